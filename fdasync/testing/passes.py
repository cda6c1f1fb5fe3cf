"""Which pass wrote what: the stamps that a request's rows must carry, worked out from the steps alone.

With `pass_stamp` the synthetic runner stamps KV and rows with the number of the step that wrote them. A
row in a result must carry the stamp of the request's first pass over that position, or, where that pass
found the KV cached, the stamp of that KV (DECISIONS 6 and 25). `PassModel` replays the block tables of
`RunStep`s and knows nothing of schedulers, slots and rows, so that it cannot share their mistakes.

Fed by `EdgeRunner(on_launch=...)`; read by tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdasync.actions import RunStep


class _Lane:
    def __init__(self, owner: tuple[int, int], blocks: list[int], length: int) -> None:
        self.owner = owner
        self.blocks = blocks
        self.length = length


class PassModel:
    """Stamps by request.

    Attributes:
        stamps: (seed, sample index) -> the stamp of each position that any pass covered, in order. Give every
            request a seed of its own.
        cached: (seed, sample index) -> tokens that were cached when it first came in.
        read: (seed, sample index) -> whose KV it took over instead of computing it.
    """

    def __init__(self, block_tokens: int) -> None:
        self.stamps: dict[tuple[int, int], list[int]] = {}
        self.cached: dict[tuple[int, int], int] = {}
        self.read: dict[tuple[int, int], set[tuple[int, int]]] = {}
        self._size = block_tokens
        self._kv: dict[int, tuple[int, tuple[int, int]]] = {}
        self._lanes: dict[int, _Lane] = {}
        self._decoding: dict[int, _Lane] = {}

    def launched(self, step: RunStep) -> None:
        """Take the next step, in order of launch: the device performs them in that order."""
        for key in step.leaves:
            self._decoding.pop(key, None)
            del self._lanes[key]
        for start in step.starts:
            owner = (start.sampler.seed, start.sampler.index)
            lane = self._lanes[start.key] = _Lane(owner, list(start.blocks), start.num_cached)
            have = self.stamps.setdefault(owner, [])
            self.cached.setdefault(owner, start.num_cached)
            sources = self.read.setdefault(owner, set())
            for position in range(start.num_cached):
                step_id, source = self._kv[self._place(lane, position)]
                sources.add(source)
                if position == len(have):
                    have.append(step_id)
        for append in step.appends:
            self._lanes[append.key].blocks.append(append.block)
        skips = frozenset(step.skips)
        for key, lane in self._decoding.items():
            if key not in skips:
                self._forward(lane, 1, step.step_id)
        for chunk in step.chunks:
            self._forward(self._lanes[chunk.key], chunk.count, step.step_id)
            if chunk.last:
                self._decoding[chunk.key] = self._lanes[chunk.key]

    def _forward(self, lane: _Lane, count: int, step_id: int) -> None:
        have = self.stamps[lane.owner]
        for position in range(lane.length, lane.length + count):
            self._kv[self._place(lane, position)] = (step_id, lane.owner)
            if position == len(have):
                have.append(step_id)
        lane.length += count

    def _place(self, lane: _Lane, position: int) -> int:
        return lane.blocks[position // self._size] * self._size + position % self._size
