"""The bytes of a block's object on their way to a store and back, hashed while the CPU's caches hold them.

A block that leaves is hashed, gets its header, and goes in one piece: one system call costs less than several, and the
file system does less. A block that arrives is read in pieces, each small enough to be hashed while it is in the CPU's
cache, as a whole block would not be. The module knows the object format and no store, no file and no loop. `checked.py`
makes a `BlockMoves` for each store that moves bytes in threads; such a store (`file/store.py`) iterates there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from fdasync.cache.store.base import Moves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from fdasync.cache.store.base import Item, Piece
    from fdasync.ipc.shared_memory import Part

# bytes of a piece that arrives
PIECE_NBYTES = 1 << 18

# a run of bytes of one part: the part's place in the item, where the run begins and ends in the part, and the number of
# the section whose bytes these are, or -1
_Run = tuple[int, int, int, int]


class Form:
    """The layout of one schema's objects that have the same sections.

    Args:
        sizes: bytes of the parts of a whole object, in order: the header page, then sections and padding.
        sections: the place of each section among them.

    Attributes:
        num_parts: parts of a whole object.
        sections: as given.
        plan: the pieces in which an object arrives.
    """

    def __init__(self, sizes: Sequence[int], sections: Sequence[int]) -> None:
        self.num_parts = len(sizes)
        self.sections = sections
        self.plan = _plan(sizes, {place: number for number, place in enumerate(sections)})


class BlockMoves(Moves):
    """Blocks of one schema.

    Args:
        forms: of its objects; no two have equally many parts.
        view: the bytes of a part.
        write_header: completes the header in the first part of an item, given the checksums of its sections.
        problem: how these checksums differ from the header in the first part, or "".
    """

    def __init__(
        self,
        forms: Sequence[Form],
        view: Callable[[Part], memoryview],
        write_header: Callable[[Item, list[int]], None],
        problem: Callable[[Item, list[int]], str],
    ) -> None:
        self._forms = {form.num_parts: form for form in forms}
        self._write_header = write_header
        self.view = view
        self.problem = problem

    def form(self, item: Item) -> Form:
        """The form of a whole object."""
        return self._forms[len(item.parts)]

    def leave(self, item: Item) -> tuple[Piece]:
        view = self.view
        views = [view(part) for part in item.parts]
        self._write_header(item, [xxhash.xxh3_64_intdigest(views[place]) for place in self.form(item).sections])
        return ((0, views),)

    def arrive(self, item: Item) -> _BlockArrival:
        return _BlockArrival(self, item, self.problem)

    def complete_in_pieces(self, item: Item) -> Iterable[Piece]:
        """As `complete`, once every piece was asked for: for a caller that stops in between."""
        return _BlockArrival(self, item, self._write_header)


class _BlockArrival:
    """One block on its way in, or being completed: `end` gets its checksums, and returns the `problem`."""

    __slots__ = ("_end", "_item", "_moves", "problem")

    def __init__(self, moves: BlockMoves, item: Item, end: Callable[[Item, list[int]], str | None]) -> None:
        self.problem = ""
        self._moves = moves
        self._item = item
        self._end = end

    def __iter__(self) -> Iterator[Piece]:
        moves = self._moves
        form = moves.form(self._item)
        views = [moves.view(part) for part in self._item.parts]
        sums = [xxhash.xxh3_64() for _ in form.sections]
        for offset, runs in form.plan:
            piece = [views[place][start:stop] for place, start, stop, _ in runs]
            yield offset, piece
            for view, run in zip(piece, runs, strict=True):
                if run[3] >= 0:
                    sums[run[3]].update(view)
        self.problem = self._end(self._item, [running.intdigest() for running in sums]) or ""


def _plan(sizes: Sequence[int], sections: dict[int, int]) -> list[tuple[int, tuple[_Run, ...]]]:
    """Pieces of an object whose parts have these sizes: the offset of each, and its runs.

    Each has `PIECE_NBYTES`, but the last one takes the rest, too, if it is short: a short rest is not worth a call.
    """
    plan: list[tuple[int, tuple[_Run, ...]]] = []
    runs: list[_Run] = []
    begin = offset = 0
    for place, nbytes in enumerate(sizes):
        start = 0
        while start < nbytes:
            stop = min(nbytes, start + begin + PIECE_NBYTES - offset)
            runs.append((place, start, stop, sections.get(place, -1)))
            offset += stop - start
            start = stop
            if offset - begin == PIECE_NBYTES:
                plan.append((begin, tuple(runs)))
                runs, begin = [], offset
    if plan and offset - begin <= PIECE_NBYTES // 8:
        begin, before = plan.pop()
        runs = [*before, *runs]
    plan.append((begin, tuple(runs)))
    return plan
