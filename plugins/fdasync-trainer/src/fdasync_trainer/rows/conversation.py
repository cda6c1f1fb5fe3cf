"""Joins the rows of a conversation's requests by position: every position has one row, with no gap.

Each request asks for rows from the end of the rows before it on (`start=`), and its rows are appended here. The last
token of a request was never forwarded, so its row comes with the next request. Knows no trainer. Called by users,
before a converter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import BadInput
from fdasync.result import Routing
from fdasync_trainer.rows.checks import RoutingLayout, check_layout, check_routing

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PART_ROWS = 4096


def append(first: Routing, second: Routing, *, first_wins: bool = False) -> Routing:
    """Rows of `first`, then rows of `second` at later positions; the array is new.

    Positions that both have must have the same experts, as sets. With `first_wins` the experts may differ, and the
    experts of `first` count: later tokens were computed with its KV.

    Raises:
        BadInput: rows as in `check_routing`; other layers, experts or top_k; positions between the two without rows; a
            `second` that begins before `first`; rows that differ at a position of both.
    """
    log = RoutingLog(first_wins=first_wins)
    log.add(first, "first")
    log.add(second, "second")
    return log.routing()


class RoutingLog:
    """Rows of a conversation so far; adding a request's rows costs a copy of these rows only.

        log = RoutingLog()
        for ...:
            result = await engine.complete(tokens, params, start=log.stop)
            log.add(result.routing)
        to_sglang(log.routing(), num_hidden_layers)

    Rows of an aborted request are added like any others: the next request goes on from them. One user at a time.
    """

    def __init__(self, *, first_wins: bool = False) -> None:
        """`first_wins`: see `append`."""
        self._first_wins = first_wins
        self._layout: RoutingLayout | None = None
        self._rows: NDArray[np.generic] = np.zeros((0, 0, 0), np.uint8)
        self._count = 0
        self._start = 0

    @property
    def stop(self) -> int:
        """The first position without a row: the `start` of the next request. 0 at first."""
        return self._start + self._count

    def add(self, routing: Routing, field: str = "routing") -> int:
        """Append a request's rows, copied; returns how many were new. Raises BadInput as `append`, and adds nothing."""
        layout = check_routing(routing, field)
        if self._layout is None:
            self._layout, self._start = layout, routing.start
            self._rows = np.zeros((0, *routing.array.shape[1:]), layout.dtype)
        else:
            check_layout(layout, self._layout, field, "the rows before")
        if routing.start > self.stop:
            raise BadInput(
                f"{field}.start",
                f"positions {self.stop} to {routing.start - 1} have no rows",
                limit=self.stop,
                hint="ask for rows from there on",
            )
        if routing.start < self._start:
            problem = f"{routing.start} is before {self._start}, where the rows begin"
            raise BadInput(f"{field}.start", problem, limit=self._start)
        rows = int(routing.array.shape[0])
        both = min(self.stop - routing.start, rows)
        if both and not self._first_wins:
            at = routing.start - self._start
            self._check_same(self._rows[at : at + both], routing.array[:both], layout, routing.start, field)
        self._extend(routing.array[both:])
        return rows - both

    def routing(self) -> Routing:
        """All rows so far; the array is new. Raises BadInput before the first rows."""
        if self._layout is None:
            raise BadInput("routing", "no rows were added")
        return Routing(
            array=self._rows[: self._count].copy(),
            start=self._start,
            layer_ids=self._layout.layer_ids,
            num_experts=self._layout.num_experts,
            top_k_by_layer=self._layout.top_k_by_layer,
        )

    def _check_same(
        self, mine: NDArray[np.generic], theirs: NDArray[np.generic], layout: RoutingLayout, start: int, field: str
    ) -> None:
        for first in range(0, mine.shape[0], _PART_ROWS):
            stop = first + _PART_ROWS
            differ = (as_sets(mine[first:stop], layout) != as_sets(theirs[first:stop], layout)).any(axis=2)
            if differ.any():
                row, layer = (int(at) for at in np.argwhere(differ)[0])
                raise BadInput(
                    field,
                    f"position {start + first + row}, layer {layout.layer_ids[layer]}: other experts than before",
                    hint="first_wins=True keeps the earlier ones",
                )

    def _extend(self, rows: NDArray[np.generic]) -> None:
        stop = self._count + rows.shape[0]
        if stop > self._rows.shape[0]:
            room = np.empty((max(stop, 2 * self._rows.shape[0]), *rows.shape[1:]), self._rows.dtype)
            room[: self._count] = self._rows[: self._count]
            self._rows = room
        self._rows[self._count : stop] = rows
        self._count = stop


def as_sets(rows: NDArray[np.generic], layout: RoutingLayout) -> NDArray[np.int32]:
    """[n, MoE layers, K] sorted within each row, -1 in columns that do not count; equal for equal sets of experts."""
    wide = rows.astype(np.int32)
    counted = layout.counted
    if counted is not None:
        wide[:, ~counted] = -1
    wide.sort(axis=2)
    return wide
