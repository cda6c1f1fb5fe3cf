"""Works out the stamp that each row of a result must carry, from steps and copies alone.

With `pass_stamp` the synthetic runner stamps KV and rows with the number of the step that wrote them. A row in a result
must carry the stamp of the request's first pass over that position, or, where that pass found the KV cached, the stamp
of that KV (docs/design.md, rules 6 and 25). `PassModel` replays the block tables of `RunStep`s, the copies between
device and host, and the blocks that a store or another instance took and gave. For each pass it also has the weights of
the KV that the pass read. It knows nothing of schedulers, slots and rows, so that it cannot share their mistakes.

Fed by `FaultRunner(on_launch=..., on_done=..., on_copied=...)` and `RecordingStore`; read by tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fdasync.events.actions import SwapOut

if TYPE_CHECKING:
    from fdasync.events.actions import RunStep, SeqStart, SwapIn

Owner = tuple[int, int]


class Word(NamedTuple):
    """The KV of one token: the stamp of the step that wrote it, the sequence it was written for, and the weights."""

    stamp: int
    owner: Owner
    weights_id: int


class Read(NamedTuple):
    """What a first pass over a position read: weights ids of the KV up to the position, and the pass's own weights."""

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
        block_tokens: of the runner's config.
        weights_id: of the runner at its start.
        stamp_base: of the runner's config. Where several instances run at a time, each has a model and a base of its
            own: then a stamp names the instance.
        runs: steps may yield runs, so what a decode covers is known when its step is done: every step's `done` is
            called. False: a decode covers one position, and `done` need not be called.

    Attributes:
        stamps: (seed, sample index) -> the stamp of each position that any pass covered, in order. Give every
            request a seed of its own.
        cached: (seed, sample index) -> tokens that were cached at the first start of the sequence; of a sequence that
            another instance began, all tokens that came with it.
        read: (seed, sample index) -> the sequences whose KV this one took over instead of computing it.
        base: see `stamp_base`.
        seen: (seed, sample index) -> what the first pass over each position read. For a cached position it is what the
            pass that wrote the KV read.
        weights_id: of the runner now.
    """

    def __init__(self, block_tokens: int, weights_id: int = 0, stamp_base: int = 0, *, runs: bool = False) -> None:
        self.stamps: dict[Owner, list[int]] = {}
        self.cached: dict[Owner, int] = {}
        self.read: dict[Owner, set[Owner]] = {}
        self.seen: dict[Owner, list[Read]] = {}
        self.weights_id = weights_id
        self._mixed = False
        self._size = block_tokens
        self.base = stamp_base
        self._kv: dict[int, Word] = {}
        # words by host block; None where a block was copied before it was full
        self._host: dict[int, list[Word | None]] = {}
        self._stored: dict[str, list[Word | None]] = {}
        self._lanes: dict[int, _Lane] = {}
        self._decoding: dict[int, _Lane] = {}
        self._runs = runs
        # by step in flight, the sequences that it decodes
        self._decoded: dict[int, list[_Lane]] = {}

    def owner_of(self, start: SeqStart) -> Owner:
        """The name of a sequence in this model; a subclass may use other names."""
        return (start.sampler.seed, start.sampler.index)

    def launched(self, step: RunStep) -> None:
        """Take the next step, in the order of launch, in which the device performs steps."""
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
                    raise AssertionError(f"{owner} starts on KV of position {position} that no step computed")
                if word.weights_id != self.weights_id:
                    raise AssertionError(
                        f"{owner} starts on KV of weights {word.weights_id}, weights {self.weights_id} are in use"
                    )
                sources.add(word.owner)
                if position == len(have):
                    have.append(word.stamp)
                    # an identity is chained from one weights id: all KV before it was of the same
                    seen.append(Read((word.weights_id,), word.weights_id))
        for append in step.appends:
            self._lanes[append.key].blocks.append(append.block)
        skips = frozenset(step.skips)
        decoded = [lane for key, lane in self._decoding.items() if key not in skips]
        if self._runs:
            self._decoded[step.step_id] = decoded
        else:
            for lane in decoded:
                self._forward(lane, 1, step.step_id)
        for chunk in step.chunks:
            self._forward(self._lanes[chunk.key], chunk.count, step.step_id)
            if chunk.last:
                self._decoding[chunk.key] = self._lanes[chunk.key]

    def done(self, step_id: int, counts: tuple[int, ...] | None) -> None:
        """The oldest step in flight yielded runs of so many tokens, and covered as many positions of each sequence."""
        decoded = self._decoded.pop(step_id, [])
        for lane, count in zip(decoded, (1,) * len(decoded) if counts is None else counts, strict=False):
            self._forward(lane, count, step_id)

    def next_life(self, weights_id: int) -> PassModel:
        """The model of another engine on the same store."""
        model = PassModel(self._size, weights_id, self.base, runs=self._runs)
        model._stored = self._stored
        return model

    def new_weights(self, weights_id: int) -> None:
        """The runner has these weights from the next step on."""
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
        """Another instance's host block `theirs` was copied to host block `host`; its first `tokens` tokens count.

        Call it when the copy is done and before the sender may write its block again. The words bring the stamps of
        the sender's passes: the stamps of a sequence that goes on here begin with them.
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
        """The weights id of each position up to this one; a single id where all are equal."""
        if not self._mixed:
            return (self.weights_id,)
        ids = tuple([self._kv[self._place(lane, earlier)].weights_id for earlier in range(position + 1)])
        return ids[:1] if len(set(ids)) == 1 else ids

    def _place(self, lane: _Lane, position: int) -> int:
        return lane.blocks[position // self._size] * self._size + position % self._size
