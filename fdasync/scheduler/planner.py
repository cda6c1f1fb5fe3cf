"""Which tokens the next step computes, with which blocks. Pure.

Decodes come first, then chunks of prefills under way, then admissions, under one token budget. A decode
costs nothing to plan while its block has room: a *calendar* by step tick holds the sequences that need
attention (a new block, or their last token), so a steady step looks at about one sixteenth of them.

A prefill under way takes what is left of the budget, so when a newcomer is admitted every running prefill is
planned to its end: the identities that running sequences will still compute are pending, in this step or an
earlier one. That makes the leader rule (DECISIONS 4) a look at pending blocks.

Called by `core.py`, which tells it what completed; it decides matching, pinning, chunking, preemption.
"""

from __future__ import annotations

from array import array
from bisect import insort
from typing import TYPE_CHECKING

from fdasync.actions import BlockAppend, Chunk, RowSpan, RunStep, SeqStart
from fdasync.cache.prefix import PrefixIndex, block_keys
from fdasync.errors import InvariantBroken
from fdasync.scheduler.sequence import Sequence, State

if TYPE_CHECKING:
    from fdasync.cache.blocks import Block
    from fdasync.scheduler.core import SchedulerConfig


class ChunkPlan:
    """A chunk in flight: positions [start, stop) of a sequence; `last` samples."""

    __slots__ = ("last", "seq", "start", "stop")

    def __init__(self, seq: Sequence, start: int, stop: int, last: bool) -> None:
        self.seq = seq
        self.start = start
        self.stop = stop
        self.last = last


class StepPlan:
    """A step in flight, frozen when planned.

    Attributes:
        decodes: sequences that decode, in the runner's order; shared between plans, never written.
        emitters: (row, sequence) of the decodes whose tokens are wanted as they come.
        lasts: sequences whose length limit this step reaches.
    """

    __slots__ = ("chunks", "decodes", "emitters", "lasts", "step_id")

    def __init__(self, step_id: int, decodes: list[Sequence], emitters: list[tuple[int, Sequence]]) -> None:
        self.step_id = step_id
        self.decodes = decodes
        self.emitters = emitters
        self.chunks: list[ChunkPlan] = []
        self.lasts: list[Sequence] = []


class Planner:
    """Queues of sequences, and the plan of the next step.

    Attributes:
        waiting: in order; holds no blocks.
        prefilling, decoding, tail: by key; `decoding` in the runner's order.
        preemptions: how many there were.
    """

    def __init__(self, config: SchedulerConfig, index: PrefixIndex, spans: list[RowSpan]) -> None:
        self.config = config
        self.index = index
        self.waiting: list[Sequence] = []
        self.prefilling: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self.tail: dict[int, Sequence] = {}
        self.preemptions = 0
        self.last_step = -1
        self.done_step = -1
        self._spans = spans
        self._calendar: dict[int, list[tuple[Sequence, int]]] = {}
        self._leaves: list[int] = []
        self._draining: dict[int, list[Sequence]] = {}
        self._decodes: list[Sequence] | None = None
        self._emitters: list[tuple[int, Sequence]] = []
        self._short = 0

    # -- queues -----------------------------------------------------------------------------------

    def enqueue(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=lambda other: other.order)

    def remove(self, seq: Sequence) -> None:
        """Plan no more tokens of `seq`, whatever it was doing; the runner forgets it at the next step."""
        if seq.state is State.WAITING:
            self.waiting.remove(seq)
        elif seq.state is State.PREFILL:
            del self.prefilling[seq.key]
            self._leaves.append(seq.key)
        elif seq.state is State.DECODE:
            self._leave_decode(seq)
        elif seq.state is State.TAIL:
            del self.tail[seq.key]

    def await_answer(self, seq: Sequence) -> None:
        """Plan no more tokens, but keep blocks and rows: whether it ends here is not known yet."""
        if seq.state is not State.TAIL:
            self.remove(seq)
            seq.state = State.TAIL
            self.tail[seq.key] = seq

    def end(self, seq: Sequence) -> None:
        """Its caller has the result: plan nothing more, and give its blocks back."""
        self.remove(seq)
        seq.state = State.ENDED
        self._retire(seq)

    def _retire(self, seq: Sequence) -> None:
        """Give its blocks back once no step in flight names them; a preempted one then waits again."""
        if seq.last_step > self.done_step:
            self._draining.setdefault(seq.last_step, []).append(seq)
        else:
            self._release(seq)

    def step_done(self, step_id: int) -> None:
        """Release what was retired while this step was in flight. Called after its blocks are sealed."""
        self.done_step = step_id
        for seq in self._draining.pop(step_id, ()):
            self._release(seq)

    @property
    def is_draining(self) -> bool:
        return bool(self._draining)

    def draining(self) -> list[Sequence]:
        """Retired sequences whose blocks a step in flight still names."""
        return [seq for batch in self._draining.values() for seq in batch]

    def _release(self, seq: Sequence) -> None:
        preempted = seq.state is State.LEAVING
        if seq.state is not State.ENDED and seq.blocks:
            # the open tail's slot goes with its block: last chance for its rows (DECISIONS 6)
            seq.take_rows(seq.computed, self.config.block_tokens, self._spans)
        self.index.release(seq.blocks)
        seq.blocks = []
        if preempted:
            seq.restart()
            if self.index.enabled:
                size = self.config.block_tokens
                parent = seq.keys[-1] if seq.keys else seq.root
                seq.keys += block_keys(parent, seq.tokens, size, len(seq.keys) * size)
            self.enqueue(seq)

    # -- one step ---------------------------------------------------------------------------------

    def plan(self) -> tuple[RunStep, StepPlan] | None:
        """The next step, or None when there is nothing to compute now."""
        if not (self.decoding or self.prefilling or self.waiting):
            return None
        step_id = self.last_step + 1
        self._short = 0
        preemptions = self.preemptions
        appends: list[BlockAppend] = []
        skips: list[Sequence] = []
        lasts = self._attend(step_id, appends, skips)
        decodes, emitters = self._decode_list(skips)
        plan = StepPlan(step_id, decodes, emitters)
        plan.lasts += lasts
        budget = self.config.max_step_tokens - len(decodes)
        for seq in list(self.prefilling.values()):
            budget -= self._chunk(seq, budget, plan)
        # who was preempted, or lacked a block, in this very plan has precedence over newcomers
        starts = [] if self._short or self.preemptions > preemptions else self._admit(budget, plan)
        if not decodes and not plan.chunks:
            # nothing was planned: those who could not get a block look again at the same tick
            self._defer(skips, step_id)
            return None
        self._defer(skips, step_id + 1)
        self.last_step = step_id
        leaves = tuple(self._leaves)
        self._leaves.clear()
        # who computes a last token in this step leaves with the next one
        for seq in lasts:
            self._to_tail(seq)
        chunks = tuple([Chunk(c.seq.key, c.stop - c.start, c.last) for c in plan.chunks])
        for chunk in plan.chunks:
            if chunk.last:
                self._join(chunk.seq, plan)
        skipped = tuple([seq.key for seq in skips if seq.state is State.DECODE])
        return RunStep(step_id, leaves, tuple(starts), tuple(appends), skipped, chunks), plan

    def _attend(self, tick: int, appends: list[BlockAppend], skips: list[Sequence]) -> list[Sequence]:
        """Serve the calendar of this tick; returns the sequences that decode for the last time."""
        size = self.config.block_tokens
        lasts = []
        for seq, stamp in self._calendar.pop(tick, ()):
            if seq.stamp != stamp:
                continue
            position = seq.base + tick
            if position == len(seq.blocks) * size:
                block = self._allocate_for(seq)
                if block is None:
                    if seq.state is State.DECODE:
                        skips.append(seq)
                    continue
                slot = block.slot
                seq.blocks.append(block)
                appends.append(
                    BlockAppend(seq.key, block.id, *((-1, 0) if slot is None else (slot.id, slot.generation)))
                )
            if position == seq.max_len - 2:
                lasts.append(seq)
            else:
                self._schedule(seq)
        # a later attention may have preempted an earlier one that had its block
        appends[:] = [a for a in appends if a.key in self.decoding]
        skips[:] = [seq for seq in skips if seq.state is State.DECODE]
        return [seq for seq in lasts if seq.state is State.DECODE]

    def _schedule(self, seq: Sequence) -> None:
        position = min(len(seq.blocks) * self.config.block_tokens, seq.max_len - 2)
        self._calendar.setdefault(position - seq.base, []).append((seq, seq.stamp))

    def _defer(self, skips: list[Sequence], tick: int) -> None:
        """Sequences that sit this step out attend again at `tick`, at the same position."""
        for seq in skips:
            if seq.state is State.DECODE:
                seq.base += (self.last_step + 1) - tick
                self._calendar.setdefault(tick, []).append((seq, seq.stamp))

    def _decode_list(self, skips: list[Sequence]) -> tuple[list[Sequence], list[tuple[int, Sequence]]]:
        if self._decodes is None:
            self._decodes = list(self.decoding.values())
            self._emitters = [(row, seq) for row, seq in enumerate(self._decodes) if seq.emits]
        if not skips:
            return self._decodes, self._emitters
        decodes = [seq for seq in self._decodes if seq not in skips]
        return decodes, [(row, seq) for row, seq in enumerate(decodes) if seq.emits]

    def _chunk(self, seq: Sequence, budget: int, plan: StepPlan) -> int:
        """Plan the next chunk of a prefill within `budget`, at least 1; returns its tokens."""
        start = seq.planned
        stop = min(start + budget, len(seq.tokens))
        if self.index.enabled:
            size = self.config.block_tokens
            for number in range(start // size, stop // size):
                self.index.begin(seq.blocks[number], seq.keys[number], plan.step_id)
        seq.planned = stop
        seq.last_step = plan.step_id
        plan.chunks.append(ChunkPlan(seq, start, stop, stop == len(seq.tokens)))
        return stop - start

    def _join(self, seq: Sequence, plan: StepPlan) -> None:
        """Its last chunk is planned: decode from the next step on, if there is a token left to make."""
        del self.prefilling[seq.key]
        length = len(seq.tokens)
        if length + 1 >= seq.max_len:
            seq.state = State.TAIL
            self.tail[seq.key] = seq
            self._leaves.append(seq.key)
            plan.lasts.append(seq)
            return
        seq.state = State.DECODE
        self.decoding[seq.key] = seq
        self._decodes = None
        seq.base = length - (plan.step_id + 1)
        seq.stamp += 1
        self._schedule(seq)

    def _to_tail(self, seq: Sequence) -> None:
        self._leave_decode(seq)
        seq.state = State.TAIL
        self.tail[seq.key] = seq

    def _leave_decode(self, seq: Sequence) -> None:
        del self.decoding[seq.key]
        self._decodes = None
        self._leaves.append(seq.key)
        seq.stamp += 1
        seq.last_step = self.last_step

    # -- admission --------------------------------------------------------------------------------

    def _admit(self, budget: int, plan: StepPlan) -> list[SeqStart]:
        starts: list[SeqStart] = []
        position = 0
        while position < len(self.waiting) and budget > 0:
            if len(self.decoding) + len(self.prefilling) >= self.config.max_running:
                break
            seq = self.waiting[position]
            hits = self._match(seq, plan.step_id)
            if hits is None:
                position += 1
                continue
            start = self._start(seq, hits)
            if start is None:
                # no room: those behind it must not overtake, or it would starve
                break
            del self.waiting[position]
            starts.append(start)
            budget -= self._chunk(seq, budget, plan)
        return starts

    def _match(self, seq: Sequence, step_id: int) -> list[Block] | None:
        """The blocks that it need not compute; None while a leader computes the next one in this very step."""
        # the last token is always forwarded: its logits are what the first sample needs
        limit = (len(seq.tokens) - 1) // self.config.block_tokens if self.index.enabled else 0
        hits = self.index.match(seq.keys, limit, step_id)
        if len(hits) < limit and self.index.is_coming(seq.keys[len(hits)], step_id):
            return None
        return hits

    def _start(self, seq: Sequence, hits: list[Block]) -> SeqStart | None:
        """Pin the hits and reserve the rest in one go; None if there is no room."""
        size = self.config.block_tokens
        length = len(seq.tokens)
        needed = -(-length // size) - len(hits)
        idle_hits = sum(1 for block in hits if not block.pins)
        reserve = min(len(self.decoding) * self.config.decode_reserve_blocks, self.index.pool.num_blocks // 4)
        alone = not (self.decoding or self.prefilling)
        if needed + (0 if alone else reserve) > self.index.num_available - idle_hits:
            return None
        self.index.pin(hits)
        fresh = []
        for _ in range(needed):
            block = self.index.allocate()
            assert block is not None
            fresh.append(block)
        seq.blocks = hits + fresh
        seq.state = State.PREFILL
        seq.planned = len(hits) * size
        if seq.cached_tokens < 0:
            seq.cached_tokens = seq.planned
        self.prefilling[seq.key] = seq
        slots = [block.slot for block in fresh if block.slot is not None]
        return SeqStart(
            seq.key,
            array("i", seq.tokens).tobytes(),
            seq.planned,
            tuple([block.id for block in seq.blocks]),
            tuple([slot.id for slot in slots]),
            tuple([slot.generation for slot in slots]),
            seq.sampler,
        )

    # -- shortage ---------------------------------------------------------------------------------

    def _allocate_for(self, seq: Sequence) -> Block | None:
        """A block for a decode, preempting others if need be; None: it sits this step out, or was preempted."""
        block = self.index.allocate()
        if block is not None:
            return block
        self._short += 1
        # blocks on their way out count: nobody is preempted twice for one need
        while self._pending_free() < self._short:
            victim = self._victim()
            if victim is None:
                raise InvariantBroken(f"sequence {seq.key} needs a block, and nobody is left to preempt")
            self._preempt(victim)
            if victim is seq:
                self._short -= 1
                return None
            block = self.index.allocate()
            if block is not None:
                self._short -= 1
                return block
        return None

    def _pending_free(self) -> int:
        leaving = {seq.key: seq for seq in self.draining()} | self.tail
        return sum(1 for seq in leaving.values() for block in seq.blocks if block.pins == 1)

    def _victim(self) -> Sequence | None:
        """Lowest priority, then newest; never the oldest of the highest (it must get through)."""
        running = sorted([*self.decoding.values(), *self.prefilling.values()], key=lambda seq: seq.order)
        return running[-1] if len(running) > 1 else None

    def _preempt(self, seq: Sequence) -> None:
        self.preemptions += 1
        self.remove(seq)
        seq.state = State.LEAVING
        self._retire(seq)
