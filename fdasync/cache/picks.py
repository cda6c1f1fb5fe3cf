"""Counts which experts were chosen, in memory that the engine and the runner's process share.

The runner's side counts as it writes rows (`AuxArena.scatter`), the engine's side reads whenever it is asked. The first
`WHOLE_ROWS` rows are all counted; of a long step only `MOST_AT_FIRST` are. Later one step is sampled for every
`EVERY_ROWS` rows, and `MOST_ROWS` of its rows, evenly spread and others each time, stand for all rows since. So
counting costs next to nothing, however fast the engine is (docs/performance.md). One writer. Knows no weights: the
engine notes the counts at each update, and takes differences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: rows that are all counted at the beginning, and how many of one step are then
WHOLE_ROWS, MOST_AT_FIRST = 4096, 256
#: later: one step is looked at in so many rows, and so many of its own rows are counted
EVERY_ROWS, MOST_ROWS = 4096, 32
# rows and counted rows, before the table
_HEAD = 2


class PickShape(msgspec.Struct, frozen=True, array_like=True):
    """What rows of routing mean.

    Attributes:
        layers, top_k: of the rows.
        num_experts: ids are below it.
        top_k_by_layer: how many ids of each layer count; None: all.
    """

    layers: int
    top_k: int
    num_experts: int
    top_k_by_layer: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that a `PickTable` takes."""
        return (_HEAD + self.layers * self.num_experts) * 8


class PickTable:
    """A table over memory of `shape.nbytes` bytes, which both sides map.

    Attributes:
        shape: of the rows that it counts.
        table: int64 [layers, experts]; see the module.
    """

    def __init__(self, shape: PickShape, memory: memoryview) -> None:
        cells = np.frombuffer(memory, np.int64)
        self.shape = shape
        self.table: NDArray[np.int64] = cells[_HEAD:].reshape(shape.layers, shape.num_experts)
        self._head = cells[:_HEAD]
        self._flat = cells[_HEAD:]
        by_layer = shape.top_k_by_layer
        columns = [
            (layer * shape.top_k + place, layer * shape.num_experts)
            for layer in range(shape.layers)
            for place in range(shape.top_k if by_layer is None else by_layer[layer])
        ]
        # of a row read flat: where the ids that count stand, and what to add to each
        self._columns = np.array([column for column, _ in columns]) if by_layer is not None else None
        self._offsets = np.array([offset for _, offset in columns], np.int64)
        self._turn = self._rows = self._counted = 0
        # rows for which no row that was looked at stands yet
        self._since = 0

    @property
    def rows(self) -> int:
        """Rows that were written."""
        return int(self._head[0])

    @property
    def counted(self) -> int:
        """Rows whose picks were counted."""
        return int(self._head[1])

    def add(self, rows: NDArray[np.generic]) -> None:
        """Count rows [n, layers, top_k], whose ids are below `num_experts`. Others are left out, or counted as
        picks of the next layer: a step must not end by being watched."""
        count = len(rows)
        self._rows += count
        self._since += count
        if self._since >= EVERY_ROWS or (count and self._counted < WHOLE_ROWS):
            self._look(rows, count)
        self._head[0] = self._rows

    def _look(self, rows: NDArray[np.generic], count: int) -> None:
        if not count:
            return
        stride = -(-count // (MOST_AT_FIRST if self._counted < WHOLE_ROWS else MOST_ROWS))
        first, self._turn = self._turn % stride, self._turn + 1
        taken = rows[first::stride].reshape(-1, self.shape.layers * self.shape.top_k)
        if self._columns is not None:
            taken = taken[:, self._columns]
        # what does not divide stays for the next look
        stands_for, self._since = divmod(self._since, len(taken))
        cells = np.add(taken, self._offsets, dtype=np.int64, casting="unsafe").reshape(-1)
        counts = np.bincount(cells, minlength=len(self._flat))[: len(self._flat)]
        self._flat += counts if stands_for == 1 else counts * stands_for
        self._counted += len(taken)
        self._head[1] = self._counted
