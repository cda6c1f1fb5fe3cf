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
from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken
from fdasync.events.actions import BlockAppend, Chunk, RunStep, SeqStart
from fdasync.scheduler.state.sequence import Sequence, State

if TYPE_CHECKING:
    from fdasync.cache.blocks import Block
    from fdasync.cache.prefix import PrefixIndex
    from fdasync.scheduler.disagg.prefill import Borrower
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.queues import Roster
    from fdasync.scheduler.tiers.store_planner import Storer
    from fdasync.scheduler.tiers.swap_planner import Copier


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
        planned_at: engine time.
    """

    __slots__ = ("chunks", "decodes", "emitters", "lasts", "planned_at", "step_id")

    def __init__(
        self, step_id: int, decodes: list[Sequence], emitters: list[tuple[int, Sequence]], planned_at: float
    ) -> None:
        self.step_id = step_id
        self.decodes = decodes
        self.emitters = emitters
        self.chunks: list[ChunkPlan] = []
        self.lasts: list[Sequence] = []
        self.planned_at = planned_at


class Planner:
    """The plan of the next step, over a roster of sequences."""

    def __init__(
        self,
        config: SchedulerConfig,
        index: PrefixIndex,
        roster: Roster,
        copier: Copier,
        storer: Storer,
        borrower: Borrower,
    ) -> None:
        self._config = config
        self._index = index
        self._roster = roster
        self._copier = copier
        self._storer = storer
        self._borrower = borrower
        self._calendar: dict[int, list[tuple[Sequence, int]]] = {}
        self._short = 0

    # -- one step ---------------------------------------------------------------------------------

    def plan(self, now: float) -> tuple[RunStep, StepPlan] | None:
        """The next step, or None when there is nothing to compute now."""
        roster = self._roster
        if not (roster.decoding or roster.prefilling or roster.waiting or roster.loaded):
            return None
        step_id = roster.last_step + 1
        self._short = 0
        preemptions = roster.preemptions
        appends: list[BlockAppend] = []
        skips: list[Sequence] = []
        lasts = self._attend(step_id, appends, skips)
        decodes, emitters = roster.decodes(skips)
        plan = StepPlan(step_id, decodes, emitters, now)
        plan.lasts += lasts
        budget = self._config.max_step_tokens - len(decodes)
        for seq in list(roster.prefilling.values()):
            budget -= self._chunk(seq, budget, plan)
        starts: list[SeqStart] = []
        budget = self._enter_loaded(budget, plan, starts)
        # who was preempted, or lacked a block, in this very plan has precedence over newcomers
        if self._short:
            self._copier.need(self._short)
            roster.walled = True
        elif roster.preemptions == preemptions:
            self._admit(budget, plan, starts)
        else:
            roster.walled = True
        if not decodes and not plan.chunks:
            # nothing was planned: those who could not get a block look again at the same tick
            self._defer(skips, step_id)
            return None
        self._defer(skips, step_id + 1)
        roster.last_step = step_id
        leaves = roster.take_leaves()
        # who computes a last token in this step leaves with the next one
        for seq in lasts:
            roster.to_tail(seq)
        chunks = tuple([Chunk(c.seq.key, c.stop - c.start, c.last) for c in plan.chunks])
        for chunk in plan.chunks:
            if chunk.last:
                self._join(chunk.seq, plan)
        skipped = tuple([seq.key for seq in skips if seq.state is State.DECODE])
        return RunStep(step_id, leaves, tuple(starts), tuple(appends), skipped, chunks), plan

    def _attend(self, tick: int, appends: list[BlockAppend], skips: list[Sequence]) -> list[Sequence]:
        """Serve the calendar of this tick; returns the sequences that decode for the last time."""
        size = self._config.block_tokens
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
        appends[:] = [a for a in appends if a.key in self._roster.decoding]
        skips[:] = [seq for seq in skips if seq.state is State.DECODE]
        return [seq for seq in lasts if seq.state is State.DECODE]

    def _schedule(self, seq: Sequence) -> None:
        position = min(len(seq.blocks) * self._config.block_tokens, seq.max_len - 2)
        self._calendar.setdefault(position - seq.base, []).append((seq, seq.stamp))

    def _defer(self, skips: list[Sequence], tick: int) -> None:
        """Sequences that sit this step out attend again at `tick`, at the same position."""
        for seq in skips:
            if seq.state is State.DECODE:
                seq.base += (self._roster.last_step + 1) - tick
                self._calendar.setdefault(tick, []).append((seq, seq.stamp))

    def _chunk(self, seq: Sequence, budget: int, plan: StepPlan) -> int:
        """Plan the next chunk of a prefill within `budget`, at least 1; returns its tokens."""
        start = seq.planned
        stop = min(start + budget, len(seq.tokens))
        if self._index.enabled and seq.indexed:
            size = self._config.block_tokens
            for number in range(start // size, stop // size):
                self._index.begin(seq.blocks[number], seq.keys[number], plan.step_id)
        seq.planned = stop
        seq.last_step = plan.step_id
        plan.chunks.append(ChunkPlan(seq, start, stop, stop == len(seq.tokens)))
        return stop - start

    def _join(self, seq: Sequence, plan: StepPlan) -> None:
        """Its last chunk is planned: decode from the next step on, if there is a token left to make."""
        length = len(seq.tokens)
        if length + 1 >= seq.max_len:
            self._roster.to_tail(seq)
            plan.lasts.append(seq)
            return
        self._roster.to_decode(seq)
        seq.base = length - (plan.step_id + 1)
        self._schedule(seq)

    # -- admission --------------------------------------------------------------------------------

    def _enter_loaded(self, budget: int, plan: StepPlan, starts: list[SeqStart]) -> int:
        """Start those whose KV has arrived; returns what is left of the budget."""
        roster = self._roster
        for seq in list(roster.loaded.values()):
            if budget <= 0 or len(roster.decoding) + len(roster.prefilling) >= self._config.max_running:
                break
            if seq.midway or self._catch_up(seq, plan.step_id):
                starts.append(self._enter(seq))
                budget -= self._chunk(seq, budget, plan)
        return budget

    def _catch_up(self, seq: Sequence, step_id: int) -> bool:
        """Take over what others computed while its blocks were on their way; False while a leader computes the next
        one in this very step."""
        size = self._config.block_tokens
        limit = (len(seq.tokens) - 1) // size
        number = seq.planned // size
        while number < limit:
            if self._index.is_coming(seq.keys[number], step_id):
                return False
            (block,) = self._index.match(seq.keys[number : number + 1], 1, step_id) or (None,)
            if block is None or not block.usable:
                break
            self._index.pin((block,))
            self._index.release((seq.blocks[number],))
            seq.blocks[number] = block
            number += 1
        seq.planned = number * size
        return True

    def _admit(self, budget: int, plan: StepPlan, starts: list[SeqStart]) -> None:
        """Start those who wait, in order, until one of them lacks room or a lane."""
        now = plan.planned_at
        roster, held_for = self._roster, self._roster.held_for
        waiting = roster.waiting
        position = 0
        while position < len(waiting):
            if roster.num_running >= self._config.max_running:
                roster.walled = True
                return
            if budget <= 0:
                # whether there would be room is not known
                return
            seq = waiting[position]
            # who waits for something else than room holds nobody up
            waits = seq.hashing or (seq.errand is not None and not seq.errand.granted)
            waits = waits or self._storer.consider(seq, now)
            hits = None if waits else self._match(seq, plan.step_id)
            if hits is None:
                position += 1
                continue
            # a lease that has aged is not passed, nor is one of these that finds no room: they would starve
            if (held_for is not None and held_for < seq.order) or not self._reserve(seq, hits):
                roster.walled = True
                return
            self._storer.let_go(seq)
            self._storer.admitted(seq, now)
            del waiting[position]
            if seq.arrivals:
                roster.to_loading(seq)
                continue
            starts.append(self._enter(seq))
            budget -= self._chunk(seq, budget, plan)
        roster.walled = False

    def _match(self, seq: Sequence, step_id: int) -> list[Block] | None:
        """The blocks that it need not compute; None while a leader computes the next one in this very step."""
        # the last token is always forwarded: its logits are what the first sample needs
        limit = (len(seq.tokens) - 1) // self._config.block_tokens if self._index.enabled else 0
        hits = self._index.match(seq.keys, limit, step_id)
        if len(hits) < limit and self._index.is_coming(seq.keys[len(hits)], step_id):
            return None
        return hits

    def _reserve(self, seq: Sequence, hits: list[Block]) -> bool:
        """Pin the hits and reserve the rest, in one go, and send for what of them is on the host; False: no room."""
        size = self._config.block_tokens
        away = [block for block in hits if block.id < 0]
        fresh = -(-len(seq.tokens) // size) - len(hits)
        needed = fresh + len(away)
        reserve = self._roster.reserve(self._config.decode_reserve_blocks)
        alone = not self._roster.num_running and not self._roster.leased
        if needed + (0 if alone else reserve) > self._index.available_besides(hits):
            self._copier.need(needed + (0 if alone else reserve) + sum(1 for block in hits if not block.pins))
            return False
        seq.hit_blocks = self._hits_by_tier(seq, hits)
        self._index.pin([block for block in hits if block.id >= 0])
        for block in away:
            self._index.bring(block)
        seq.blocks = hits + [self._index.take() for _ in range(fresh)]
        seq.planned = len(hits) * size
        self._copier.load(seq, hits, away)
        return True

    @staticmethod
    def _hits_by_tier(seq: Sequence, hits: list[Block]) -> tuple[int, int]:
        """How many came from the host, and how many from the store for its sake."""
        host = stored = 0
        for block in hits:
            if block.key is not None and seq.store.brought.get(block.key):
                stored += 1
            elif block.id < 0:
                host += 1
        return host, stored

    def _enter(self, seq: Sequence) -> SeqStart:
        """Tell the runner of a sequence that has its blocks, and KV in those that are hits."""
        self._roster.to_prefill(seq)
        seq.midway = False
        self._borrower.begun(seq)
        size = self._config.block_tokens
        if seq.cached_tokens is None:
            host, stored = (count * size for count in seq.hit_blocks)
            seq.cached_tokens = (seq.planned - host - stored, host, stored)
        fresh = seq.blocks[seq.planned // size :]
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
        block = self._index.allocate()
        if block is not None:
            return block
        self._short += 1
        # blocks on their way out count: nobody is preempted twice for one need
        while self._roster.pending_free() < self._short:
            victim = self._roster.preempt()
            if victim is None and self._roster.num_leased:
                # they run when their blocks are here, or their leases end
                return None
            if victim is None:
                raise InvariantBroken(f"sequence {seq.key} needs a block, and nobody is left to preempt")
            if victim is seq:
                self._short -= 1
                return None
            block = self._index.allocate()
            if block is not None:
                self._short -= 1
                return block
        return None
