"""Checks of rows before they go to a trainer and after they were read: ids, layers and shapes.

Ids are in range, no expert is twice in a row, shapes fit the layers. Knows no trainer's format. Called by every
converter of this folder, both ways, by `conversation.py` and by `mismatch.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fdasync.errors import BadInput
from fdasync.result import Routing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

MAX_EXPERTS = 65_536
# an int64 still holds the positions of the rows after it
MAX_START = 1 << 62
# rows are checked in parts: the comparisons need a few copies of a part, not of all rows
_PART_CELLS = 1 << 20


class RoutingLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a model that a format leaves out and a reader needs.

    Attributes:
        layer_ids: hidden-layer number of each MoE layer, rising.
        num_experts: ids are below it.
        top_k: columns of a row.
        top_k_by_layer: how many leading columns count in each MoE layer, where layers differ; else None.
    """

    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    top_k_by_layer: tuple[int, ...] | None = None

    @classmethod
    def of(cls, routing: Routing) -> RoutingLayout:
        """The layout of some rows. Raises BadInput if their array is not of three axes."""
        if not is_rows(routing.array):
            raise BadInput("routing.array", "is no array of three axes", limit="[n, MoE layers, top_k]")
        return cls(
            layer_ids=routing.layer_ids,
            num_experts=routing.num_experts,
            top_k=routing.array.shape[2],
            top_k_by_layer=routing.top_k_by_layer,
        )

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of rows in a `Routing`: uint8 up to 256 experts, else uint16."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def counted(self) -> NDArray[np.bool_] | None:
        """[MoE layers, top_k]: which columns count; None where all do."""
        if self.top_k_by_layer is None:
            return None
        counted: NDArray[np.bool_] = np.arange(self.top_k) < np.array(self.top_k_by_layer)[:, None]
        return None if counted.all() else counted

    def check(self, field: str = "layout") -> None:
        """Raise BadInput, naming the part of `field`, unless this describes a model."""
        if not self.layer_ids or any(not _is_count(layer) for layer in self.layer_ids):
            raise BadInput(f"{field}.layer_ids", f"{self.layer_ids!r} are no layers", limit="one or more, from 0 on")
        if any(one >= two for one, two in zip(self.layer_ids, self.layer_ids[1:], strict=False)):
            raise BadInput(f"{field}.layer_ids", f"{self.layer_ids!r} do not rise")
        if not _is_count(self.num_experts) or not 1 <= self.num_experts <= MAX_EXPERTS:
            raise BadInput(f"{field}.num_experts", f"{self.num_experts!r} is out of range", limit=f"1 to {MAX_EXPERTS}")
        if not _is_count(self.top_k) or not 1 <= self.top_k <= self.num_experts:
            raise BadInput(f"{field}.top_k", f"{self.top_k!r} is out of range", limit=f"1 to {self.num_experts}")
        by_layer = self.top_k_by_layer
        if by_layer is None:
            return
        if len(by_layer) != len(self.layer_ids):
            raise BadInput(f"{field}.top_k_by_layer", f"{len(by_layer)} entries", limit=f"{len(self.layer_ids)} layers")
        if any(not _is_count(k) or not 1 <= k <= self.top_k for k in by_layer):
            raise BadInput(f"{field}.top_k_by_layer", f"{by_layer!r} is out of range", limit=f"1 to {self.top_k}")


def check_routing(routing: Routing, field: str = "routing") -> RoutingLayout:
    """Check rows; returns their layout.

    Raises BadInput, which names position, layer and expert: an id out of range, an expert twice in a row (among the
    columns that count), layers that the array does not have, a dtype other than uint8 or uint16.
    """
    if not isinstance(routing, Routing):
        raise BadInput(field, f"a Routing is needed, not {type(routing).__name__}")
    array = routing.array
    if not is_rows(array):
        raise BadInput(f"{field}.array", "is no array of three axes", limit="[n, MoE layers, top_k]")
    if array.dtype not in (np.uint8, np.uint16):
        raise BadInput(f"{field}.array", f"is of {array.dtype}", limit="uint8 or uint16")
    layout = RoutingLayout.of(routing)
    layout.check(field)
    if array.shape[1] != len(layout.layer_ids):
        problem = f"has rows of {array.shape[1]} layers for {len(layout.layer_ids)} layer_ids"
        raise BadInput(f"{field}.array", problem)
    check_start(routing.start, f"{field}.start")
    _check_rows(array, layout, routing.start, field)
    return layout


def rows_of(values: NDArray[np.generic], layout: RoutingLayout, start: int, field: str) -> Routing:
    """Rows from integers of any dtype, [n, MoE layers, top_k], whose shape was checked; the array is new.

    Raises BadInput, which names position, layer and expert, as `check_routing`.
    """
    layout.check()
    check_start(start)
    _check_rows(values, layout, start, field)
    return Routing(
        array=values.astype(layout.dtype, order="C"),
        start=start,
        layer_ids=layout.layer_ids,
        num_experts=layout.num_experts,
        top_k_by_layer=layout.top_k_by_layer,
    )


def check_start(start: int, field: str = "start") -> None:
    """Raise BadInput unless `start` is a position, and an int64 holds the positions of any rows after it."""
    if _is_count(start) and start > MAX_START:  # not shown: it may have more digits than Python writes
        raise BadInput(field, "is beyond any position", limit=f"0 to {MAX_START}")
    if not _is_count(start):
        raise BadInput(field, f"{start!r} is no position", limit="0 or more")


def check_count(value: int, field: str, low: int = 0) -> None:
    """Raise BadInput unless `value` is an integer of at least `low`."""
    if not _is_count(value) or value < low:
        raise BadInput(field, f"{value!r} is no number of them", limit=f"{low} or more")


def check_num_rows(rows: int, start: int, num_tokens: int | None, field: str) -> None:
    """Raise BadInput unless every token from `start` on but the last has a row; None for `num_tokens`: no check."""
    if num_tokens is None:
        return
    check_count(num_tokens, "num_tokens")
    wanted = max(num_tokens - 1 - start, 0)
    if rows != wanted:
        raise BadInput(
            field,
            f"has {rows} rows from position {start} on, {num_tokens} tokens have {wanted}",
            hint="the last token was never forwarded and has none",
        )


def check_layout(layout: RoutingLayout, wanted: RoutingLayout, field: str, where: str) -> None:
    """Raise BadInput, naming the part of `field`, unless `layout` is `wanted`, the layout of the rows `where`."""
    for name, value in msgspec.structs.asdict(wanted).items():
        if getattr(layout, name) != value:
            raise BadInput(f"{field}.{name}", f"is {getattr(layout, name)!r}, and {value!r} in {where}")


def is_rows(value: object) -> bool:
    """Whether `value` is an array of three axes."""
    return isinstance(value, np.ndarray) and value.ndim == 3


def _check_rows(array: NDArray[Any], layout: RoutingLayout, start: int, field: str) -> None:
    counted = layout.counted
    for first, part in _parts(array):
        if part.size and (int(part.min()) < 0 or int(part.max()) >= layout.num_experts):
            row, layer, column = (int(at) for at in np.argwhere((part < 0) | (part >= layout.num_experts))[0])
            raise BadInput(
                field,
                f"position {start + first + row}, layer {layout.layer_ids[layer]}: "
                f"expert {int(part[row, layer, column])} does not exist",
                limit=f"0 to {layout.num_experts - 1}",
            )
        columns = np.ascontiguousarray(part.transpose(2, 0, 1))
        for two in range(1, layout.top_k):
            for one in range(two):
                same = columns[one] == columns[two]
                if counted is not None:
                    same &= counted[:, two]
                if same.any():
                    row, layer = (int(at) for at in np.argwhere(same)[0])
                    raise BadInput(
                        field,
                        f"position {start + first + row}, layer {layout.layer_ids[layer]}: "
                        f"expert {int(columns[one, row, layer])} twice",
                        hint="a router picks an expert once; rows that were never captured look so",
                    )


def _parts(array: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    step = max(_PART_CELLS // max(array.shape[1] * array.shape[2], 1), 1)
    for first in range(0, array.shape[0], step):
        yield first, array[first : first + step]


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 0
