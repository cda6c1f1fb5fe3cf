"""The positions that indexers choose for the tokens of one sequence, in memory that engine and runner share.

A token has hundreds of kilobytes of them, which no block keeps and no message carries (docs/design.md, rule 46). So
each sequence that wants them has a region of its own for as long as its request lives: a page with the number of rows
that are written, then a row for each position that it may compute. The engine makes it and reads it at the end
(`engine/chosen_output.py`), the runner is lent it (`Runner.lend`) and writes it with each step. A row that was never
written is never read: the number says how many are, and a runner that leaves one out fails.

`LentRows` is the runner's side, for all runners whose `Capacity.chosen` is set. Knows no model and no request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fdasync.errors import InvariantBroken
from fdasync.ipc.shared_memory import PAGE_NBYTES, SharedRegion

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from fdasync.runner.input_batch import Batch, InputBatch


class ChosenShape(msgspec.Struct, frozen=True):
    """What indexers choose for one token.

    Attributes:
        layer_ids: hidden-layer numbers of the layers that have one, ascending.
        top_k: most positions that one chooses.
    """

    layer_ids: tuple[int, ...]
    top_k: int

    @property
    def token_nbytes(self) -> int:
        """Bytes of a token's row."""
        return 4 * len(self.layer_ids) * self.top_k


class ChosenRows:
    """Rows of one sequence, in shared memory.

    Attributes:
        region: the shared memory, owned by this object; a worker gets `region.fd`, which is closed once it has.
        shape: of a row.
        start: position of the first row.
        rows: int32 [most, layers, top_k] over the shared bytes; the first `count` have a meaning.
    """

    # how it crosses to another process (`ipc/remote.py`)
    plan_type = tuple[ChosenShape, int, int]

    def __init__(self, region: SharedRegion, shape: ChosenShape, start: int, most: int) -> None:
        self.region = region
        self.shape = shape
        self.start = start
        self._count: NDArray[np.int64] = np.frombuffer(region.map, np.int64, 1)
        layers = len(shape.layer_ids)
        flat = np.frombuffer(region.map, np.int32, most * layers * shape.top_k, PAGE_NBYTES)
        self.rows: NDArray[np.int32] = flat.reshape(most, layers, shape.top_k)

    @classmethod
    def create(cls, shape: ChosenShape, start: int, most: int) -> ChosenRows:
        """Room for `most` rows, whose pages are taken as they are written. Raises OSError."""
        region = SharedRegion.create("chosen", PAGE_NBYTES + most * shape.token_nbytes, keeps_fd=False)
        return cls(region, shape, start, most)

    @classmethod
    def attach(cls, plan: tuple[ChosenShape, int, int], fds: Iterator[int]) -> ChosenRows:
        """The rows of another process; their descriptor is closed when they are mapped.

        Raises InvariantBroken, OSError.
        """
        shape, start, most = plan
        region = SharedRegion(next(fds), PAGE_NBYTES + most * shape.token_nbytes, keeps_fd=False)
        rows = cls(region, shape, start, most)
        rows.close_fd()
        return rows

    @property
    def plan(self) -> tuple[ChosenShape, int, int]:
        return self.shape, self.start, self.most

    @property
    def fds(self) -> tuple[int, ...]:
        return self.region.fds

    @property
    def most(self) -> int:
        """Rows that there is room for."""
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows that there is room for."""
        return self.rows.nbytes

    @property
    def count(self) -> int:
        """Rows that are written: the first ones."""
        return int(self._count[0])

    def write(self, layer: int, position: int, picked: NDArray[np.int32]) -> None:
        """Write what the indexer of `shape.layer_ids[layer]` chose, int32 [n, k] with k up to `top_k`, for the tokens
        from `position` on. Rows that stand already, and those without room, are left out."""
        first, stop = max(position - self.start, self.count), min(position - self.start + len(picked), self.most)
        if first < stop:
            own = picked[first - (position - self.start) : stop - (position - self.start)]
            self.rows[first:stop, layer, : own.shape[1]] = own
            self.rows[first:stop, layer, own.shape[1] :] = -1

    def stand(self, position: int, count: int) -> None:
        """The rows of `count` tokens from `position` on are written in all layers, and stand. Tokens without room are
        behind the sequence's end. Raises InvariantBroken where rows before them are not written."""
        first, stop = (min(place - self.start, self.most) for place in (position, position + count))
        if first > self.count:
            due = self.start + self.count
            raise InvariantBroken(f"chosen positions from {position} on came, those from {due} on were due")
        self._count[0] = max(self.count, stop)

    def close(self) -> None:
        """Drop the mapping and the descriptor; idempotent."""
        self.region.close()

    def close_fd(self) -> None:
        """Close the descriptor, the only one; idempotent. The bytes stay while this object or a view of `rows` does."""
        self.region.close()


class LentRun:
    """The tokens of one sequence in a step whose chosen positions are wanted.

    Attributes:
        rows: where they go.
        number: which sequence of the step it is.
        position: of the first of its tokens.
        at, count: its tokens in the step, [at, at + count).
    """

    __slots__ = ("at", "count", "number", "position", "rows")

    def __init__(self, rows: ChosenRows, number: int, position: int, at: int, count: int) -> None:
        self.rows = rows
        self.number = number
        self.position = position
        self.at = at
        self.count = count

    def write(self, layer: int, picked: NDArray[np.int32]) -> None:
        """`picked`: int32 [T, k], of all tokens of the step; see `ChosenRows.write`."""
        self.rows.write(layer, self.position, picked[self.at : self.at + self.count])


class LentRows:
    """What a runner was lent."""

    def __init__(self) -> None:
        self._rows: dict[int, ChosenRows] = {}

    def lend(self, key: int, rows: ChosenRows) -> None:
        """As `Runner.lend`."""
        self._rows[key] = rows

    def take_back(self, key: int) -> None:
        """As `Runner.take_back`."""
        # a call of `lend` that was cancelled may have lent nothing
        self._rows.pop(key, None)

    def runs(self, batch: Batch, table: InputBatch) -> list[LentRun]:
        """The runs of a step, after `table.plan`; a lane of -1 is padding.

        Raises InvariantBroken for a sequence that wants rows, and was lent none.
        """
        runs = []
        firsts = (np.cumsum(batch.counts) - batch.counts).tolist()
        for number, (lane, position, count) in enumerate(
            zip(batch.lanes.tolist(), batch.starts.tolist(), batch.counts.tolist(), strict=True)
        ):
            spec = None if lane < 0 else table.samplers[lane]
            if spec is None or spec.chosen_from < 0:
                continue
            rows = self._rows.get(table.keys[lane])
            if rows is None:
                raise InvariantBroken(f"chosen positions of sequence {table.keys[lane]} are wanted, and none were lent")
            if position + count > rows.start:
                runs.append(LentRun(rows, number, position, firsts[number], count))
        return runs
