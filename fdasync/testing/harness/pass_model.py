"""Which pass wrote what: the stamps that a request's rows must carry, worked out from steps and copies alone.

With `pass_stamp` the synthetic runner stamps KV and rows with the number of the step that wrote them. A
row in a result must carry the stamp of the request's first pass over that position, or, where that pass
found the KV cached, the stamp of that KV (DECISIONS 6 and 25). `PassModel` replays the block tables of
`RunStep`s, the copies between device and host and what a store or another instance took and gave, and knows nothing of
schedulers, slots and rows, so that it cannot share their mistakes. It also tells under which weights the KV was written
that a pass read.

Fed by `EdgeRunner(on_launch=..., on_copied=...)` and `WatchedStore`; read by tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fdasync.events.actions import SwapOut

if TYPE_CHECKING:
    from fdasync.events.actions import RunStep, SeqStart, SwapIn

Owner = tuple[int, int]


class Word(NamedTuple):
    """The KV of one token: the stamp of the step that wrote it, for whom, under which weights."""

    stamp: int
    owner: Owner
    weights_id: int


class Read(NamedTuple):
    """What a first pass over a position saw: weights ids of the KV up to it, and its own."""

    kv_weights: tuple[int, ...]
    weights_id: int


class _Lane:
    def __init__(self, owner: Owner, blocks: list[int], length: int) -> None:
        self.owner = owner
        self.blocks = blocks
        self.length = length


class PassModel:
    """Stamps by request.

    Args:
        weights_id: of the runner at its start.
        stamp_base: of the runner's config. Where several instances run at a time, each has a model and a base of its
            own: then a stamp tells whose pass it was.

    Attributes:
        stamps: (seed, sample index) -> the stamp of each position that any pass covered, in order. Give every
            request a seed of its own.
        cached: (seed, sample index) -> tokens that were cached when it first came in; of a sequence that another
            instance began, all that came with it.
        read: (seed, sample index) -> whose KV it took over instead of computing it.
        base: see `stamp_base`.
        seen: (seed, sample index) -> what the first pass over each position read. A position that was cached tells what
            the pass that wrote it saw.
    """

    def __init__(self, block_tokens: int, weights_id: int = 0, stamp_base: int = 0) -> None:
        self.stamps: dict[Owner, list[int]] = {}
        self.cached: dict[Owner, int] = {}
        self.read: dict[Owner, set[Owner]] = {}
        self.seen: dict[Owner, list[Read]] = {}
        self.weights_id = weights_id
        self._mixed = False
        self._size = block_tokens
        self.base = stamp_base
        self._kv: dict[int, Word] = {}
        # of a block that was copied before it was full, None where nothing was written
        self._host: dict[int, list[Word | None]] = {}
        self._stored: dict[str, list[Word | None]] = {}
        self._lanes: dict[int, _Lane] = {}
        self._decoding: dict[int, _Lane] = {}

    def owner_of(self, start: SeqStart) -> Owner:
        """Whose passes these are. For whoever needs other names than the model's own."""
        return (start.sampler.seed, start.sampler.index)

    def launched(self, step: RunStep) -> None:
        """Take the next step, in order of launch: the device performs them in that order."""
        for key in step.leaves:
            self._decoding.pop(key, None)
            del self._lanes[key]
        for start in step.starts:
            owner = self.owner_of(start)
            lane = self._lanes[start.key] = _Lane(owner, list(start.blocks), start.num_cached)
            have = self.stamps.setdefault(owner, [])
            seen = self.seen.setdefault(owner, [])
            self.cached.setdefault(owner, start.num_cached)
            sources = self.read.setdefault(owner, set())
            for position in range(start.num_cached):
                word = self._kv.get(self._place(lane, position))
                if word is None:
                    raise AssertionError(f"{owner} starts on KV of position {position} that nobody computed")
                if word.weights_id != self.weights_id:
                    raise AssertionError(
                        f"{owner} starts on KV of weights {word.weights_id}, in use are {self.weights_id}"
                    )
                sources.add(word.owner)
                if position == len(have):
                    have.append(word.stamp)
                    # an identity is chained from one weights id: all KV before it was of the same
                    seen.append(Read((word.weights_id,), word.weights_id))
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

    def next_life(self, weights_id: int) -> PassModel:
        """Of another engine on the same store."""
        model = PassModel(self._size, weights_id, self.base)
        model._stored = self._stored
        return model

    def new_weights(self, weights_id: int) -> None:
        """The runner has these from the next step on."""
        self._mixed = self._mixed or weights_id != self.weights_id
        self.weights_id = weights_id

    def copied(self, copy: SwapOut | SwapIn) -> None:
        """A copy between device and host is done."""
        size = self._size
        for device, host in zip(copy.device, copy.host, strict=True):
            first = device * size
            if isinstance(copy, SwapOut):
                self._host[host] = [self._kv.get(first + offset) for offset in range(size)]
            else:
                for offset, word in enumerate(self._host[host]):
                    self._kv.pop(first + offset, None)
                    if word is not None:
                        self._kv[first + offset] = word

    def received(self, sender: PassModel, theirs: int, host: int, tokens: int) -> None:
        """Another instance's host block was copied to this one of ours; its first `tokens` tokens count.

        Call it when the copy is done and before the sender may write its block again. What a sequence that goes on here
        has of the other instance's passes comes with the words: its stamps here begin with theirs.
        """
        words = sender._host[theirs][:tokens]
        assert None not in words, f"host block {theirs} was sent with {tokens} tokens, not all of them computed"
        self._host[host] = [*words, *[None] * (self._size - tokens)]

    def stored(self, key: str, host: int) -> None:
        """The store took this host block."""
        assert None not in self._host[host], f"the store was given host block {host}, which is not full"
        self._stored[key] = self._host[host]

    def fetched(self, key: str, host: int) -> None:
        """The store filled this host block."""
        self._host[host] = self._stored[key]

    def _forward(self, lane: _Lane, count: int, step_id: int) -> None:
        have, seen = self.stamps[lane.owner], self.seen[lane.owner]
        for position in range(lane.length, lane.length + count):
            word = self._kv[self._place(lane, position)] = Word(self.base + step_id, lane.owner, self.weights_id)
            if position == len(have):
                have.append(word.stamp)
                seen.append(Read(self._weights_up_to(lane, position), self.weights_id))
        lane.length += count

    def _weights_up_to(self, lane: _Lane, position: int) -> tuple[int, ...]:
        """One id where all are of one, else one for each position."""
        if not self._mixed:
            return (self.weights_id,)
        ids = tuple([self._kv[self._place(lane, earlier)].weights_id for earlier in range(position + 1)])
        return ids[:1] if len(set(ids)) == 1 else ids

    def _place(self, lane: _Lane, position: int) -> int:
        return lane.blocks[position // self._size] * self._size + position % self._size
