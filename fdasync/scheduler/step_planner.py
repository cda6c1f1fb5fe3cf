"""Plans the next step: which tokens it computes, with which blocks. Pure.

Decodes come first, then chunks of prefills under way, then admissions, under one token budget. A decode costs nothing
to plan while its blocks have room. The planner looks at a sequence when it has reached the length `Sequence.due`: where
it may need a block in the next plan, or makes its last token. So a steady step looks at about one sixteenth of the
sequences, whatever number of tokens each step gives them.

Where a step may yield a run of tokens, the block table bounds the run. With a step in flight the planner does not know
where the next one begins: behind one token of the step in flight at least, behind its longest run at most. It preempts
others for the block of the next token, where that token may need one. It takes the blocks that a longer run may fill if
they are free, and the sequence keeps them if the run does not fill them. A sequence whose next token has no room after
all yields none in that step (docs/design.md, rule 40).

A prefill under way takes the rest of the budget. So when a newcomer is admitted, every running prefill is planned to
its end: the identities that running sequences will still compute are pending, in this step or an earlier one. That
makes the leader rule a look at pending blocks (docs/design.md, rules 4 and 29).

This module decides matching, pinning, chunking and preemption; attachments (`state/attachment.py`) have a say. It knows
no events. Called by `core.py`; `results.py` tells it who is due.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import InvariantBroken
from fdasync.events.actions import BlockAppend, Chunk, RunStep, SeqStart
from fdasync.scheduler.state.attachment import Attachment, asked
from fdasync.scheduler.state.sequence import Sequence, State
from fdasync.scheduler.state.step_plan import ChunkPlan, StepPlan

if TYPE_CHECKING:
    from fdasync.cache.blocks import Block
    from fdasync.scheduler.tiers.parts import Parts


def _append(seq: Sequence, block: Block) -> BlockAppend:
    """Give a sequence one more block."""
    slot = block.slot
    seq.blocks.append(block)
    if slot is None:
        return BlockAppend(seq.key, block.id, -1, 0)
    return BlockAppend(seq.key, block.id, slot.id, slot.generation)


class StepPlanner:
    """See the module.

    Attributes:
        due: by key, the decoding sequences that the next plan looks at.
    """

    def __init__(self, parts: Parts) -> None:
        self._config = config = parts.config
        self._index = parts.index
        self._queues = parts.queues
        self._swap_planner = parts.swap_planner
        self._store_planner = parts.store_planner
        self._pausing = parts.pausing
        self._most = config.max_run_tokens
        # how many positions past what is known the steps in flight and the next one may fill
        self._ahead = config.max_run_tokens * config.pipeline_depth
        self._depth = config.pipeline_depth
        self._size = config.block_tokens
        self.due: dict[int, Sequence] = {}
        self._short = 0

    def bind(self, attachments: list[Attachment]) -> None:
        """Ask these from now on."""
        self._may_begin = asked(Attachment.may_begin, attachments)
        self._usable = asked(Attachment.usable, attachments)
        self._admitted = asked(Attachment.admitted, attachments)
        self._cut = asked(Attachment.cut, attachments)
        self._chunked = asked(Attachment.chunk, attachments)
        self._due_at = asked(Attachment.due, attachments)
        self._decodes = asked(Attachment.decodes, attachments)
        self._planned = asked(Attachment.planned, attachments)

    # -- one step ---------------------------------------------------------------------------------

    def plan(self, now: float) -> tuple[RunStep, StepPlan] | None:
        """The next step, or None when there is nothing to compute now."""
        queues = self._queues
        if not (queues.decoding or queues.prefilling or queues.waiting or queues.loaded):
            self.due.clear()
            return None
        step_id = queues.last_step + 1
        self._short = 0
        preemptions = queues.preemptions
        appends: list[BlockAppend] = []
        skips: list[Sequence] = []
        full: dict[int, int] = {}
        lasts = self._attend(appends, skips, full, step_id)
        decodes, emitters = queues.decodes(skips)
        plan = StepPlan(step_id, decodes, emitters, queues.decode_stop_ids, now, full)
        budget = self._config.max_step_tokens - self._most * len(decodes)
        for seq in list(queues.prefilling.values()):
            budget -= self._chunk(seq, budget, plan)
        starts: list[SeqStart] = []
        budget = self._enter_loaded(budget, plan, starts)
        # sequences that were preempted, or lacked a block, in this very plan go before newcomers
        if self._short:
            self._swap_planner.need(self._short)
            queues.walled = True
        elif queues.preemptions == preemptions:
            self._admit(budget, plan, starts)
        else:
            queues.walled = True
        if not decodes and not plan.chunks:
            if starts:
                raise InvariantBroken(f"sequence {starts[0].key} starts and computes nothing: `may_begin` lets it wait")
            return None
        for seq in skips:
            seq.idle_step = step_id
        queues.last_step = step_id
        leaves = queues.take_leaves()
        # a sequence that computes its last token in this step leaves with the next one
        for seq in lasts:
            queues.to_tail(seq)
        chunks = tuple([Chunk(c.seq.key, c.stop - c.start, c.last) for c in plan.chunks])
        for chunk in plan.chunks:
            if chunk.last:
                self._join(chunk.seq, plan)
        skipped = tuple([seq.key for seq in skips if seq.state is State.DECODE])
        for planned in self._planned:
            planned(plan)
        return RunStep(
            step_id=step_id,
            leaves=leaves,
            starts=tuple(starts),
            appends=tuple(appends),
            skips=skipped,
            chunks=chunks,
            drafts=plan.drafts,
            own_drafts=plan.own_drafts,
            snapshots=plan.snapshots,
        ), plan

    def _attend(
        self, appends: list[BlockAppend], skips: list[Sequence], full: dict[int, int], step_id: int
    ) -> list[Sequence]:
        """Give blocks to the sequences that are due; returns the sequences that decode for the last time."""
        due, self.due = self.due, {}
        last_step, done_step, preemptions = self._queues.last_step, self._queues.done_step, self._queues.preemptions
        most = self._most
        lasts = []
        # (sequence, the first position of the step at least, and at most)
        reaches: list[tuple[Sequence, int, int]] = []
        # the sequences among them that go on after this step
        going: list[Sequence] = []
        for seq in due.values():
            if seq.state is not State.DECODE:
                continue
            # the first position of the next step is `first` at least and `reach` at most: each step in flight yields
            # one token at least, where its table had room, and the last chunk of a prefill yields one token. With more
            # than one step in flight beside this one (the configuration has two at most), one might have skipped it
            known = len(seq.tokens) - 1
            flying = last_step - (done_step if done_step > seq.idle_step else seq.idle_step)
            room = len(seq.blocks) * self._size
            first = known + flying
            reach = known + flying * most if seq.decoding else known + 1 + (flying - 1) * most
            if reach >= room:
                reach = room
                first = min(first, room)
                if room < seq.max_len - 1:
                    block = self._allocate_for(seq)
                    if block is not None:
                        appends.append(_append(seq, block))
                    elif first == room or seq.key not in self._queues.decoding:
                        # else it was preempted itself
                        if seq.state is State.DECODE:
                            skips.append(seq)
                            self.due[seq.key] = seq
                        continue
            if first >= seq.max_len - 1:
                # a step in flight gives its last token
                self._queues.to_tail(seq)
                continue
            reaches.append((seq, first, reach))
            if first == seq.max_len - 2:
                lasts.append(seq)
            else:
                going.append(seq)
        if most > 1:
            self._stretch(reaches, appends, full)
        if self._queues.preemptions > preemptions:
            # a sequence that got its block may have been preempted for a later one
            appends[:] = [a for a in appends if a.key in self._queues.decoding]
            skips[:] = [seq for seq in skips if seq.state is State.DECODE]
            lasts = [seq for seq in lasts if seq.state is State.DECODE]
        for decodes in self._decodes:
            for seq, first, reach in reaches:
                if seq.state is State.DECODE:
                    decodes(seq, first + 1, min(reach + most, seq.max_len - 1), step_id)
        for seq in going:
            if seq.state is State.DECODE:
                self._enter_due(seq)
        return lasts

    def _enter_due(self, seq: Sequence) -> None:
        """Set the length at which the planner looks at it again, or have the very next plan look."""
        length, size, room = len(seq.tokens), self._size, len(seq.blocks) * self._size
        # from this length on the next plan may lack room for it, or plan its last token
        near = seq.max_len - self._depth
        if room < seq.max_len - 1 and room + 2 - self._ahead < near:
            near = room + 2 - self._ahead
        for due_at in self._due_at:
            near = min(near, due_at(seq))
        seq.near = near
        if length < near:
            seq.due = min(near, length - (length - 1) % size + size)
        else:
            seq.due = length
            self.due[seq.key] = seq

    def _stretch(
        self, reaches: list[tuple[Sequence, int, int]], appends: list[BlockAppend], full: dict[int, int]
    ) -> None:
        """Add room for the longest run that each length limit leaves, from the last position at which the next step may
        begin. A run that finds no room is shorter, or empty; no sequence is preempted for it."""
        for seq, _, reach in reaches:
            if seq.state is not State.DECODE:
                continue
            stop = min(reach + self._most, seq.max_len - 1)
            while len(seq.blocks) * self._size < stop:
                block = self._index.allocate()
                if block is None:
                    break
                appends.append(_append(seq, block))
            room = len(seq.blocks) * self._size
            if reach >= room:
                full[seq.key] = room

    def _chunk(self, seq: Sequence, budget: int, plan: StepPlan) -> int:
        """Plan the next chunk of a prefill within `budget`, at least 1; returns its tokens, 0 where it has to wait."""
        start = seq.planned
        stop = min(start + budget, len(seq.tokens))
        for cut in self._cut:
            before, stop = stop, cut(seq, start, stop)
            if not start <= stop <= before:
                raise InvariantBroken(f"{cut.__qualname__} cut [{start}, {before}) of {seq.key} at {stop}")
        if stop == start:
            return 0
        if self._index.enabled and seq.indexed:
            size = self._config.block_tokens
            for number in range(start // size, stop // size):
                self._index.begin(seq.blocks[number], seq.keys[number], plan.step_id)
        for chunk in self._chunked:
            chunk(seq, start, stop, plan.step_id)
        seq.planned = stop
        seq.last_step = plan.step_id
        plan.chunks.append(ChunkPlan(seq, start, stop, stop == len(seq.tokens)))
        return stop - start

    def _join(self, seq: Sequence, plan: StepPlan) -> None:
        """The last chunk of `seq` is planned: decode it from the next step on, if it has a token left to make."""
        length = len(seq.tokens)
        if length + 1 >= seq.max_len:
            self._queues.to_tail(seq)
            return
        self._queues.to_decode(seq)
        seq.idle_step = plan.step_id - 1
        self._enter_due(seq)

    # -- admission --------------------------------------------------------------------------------

    def _enter_loaded(self, budget: int, plan: StepPlan, starts: list[SeqStart]) -> int:
        """Start the sequences whose KV has arrived; returns the rest of the budget."""
        queues = self._queues
        for seq in list(queues.loaded.values()):
            if budget <= 0 or len(queues.decoding) + len(queues.prefilling) >= self._config.max_running:
                break
            if seq.midway or (self._lets_begin(seq) and self._catch_up(seq, plan.step_id)):
                starts.append(self._enter(seq))
                budget -= self._chunk(seq, budget, plan)
        return budget

    def _catch_up(self, seq: Sequence, step_id: int) -> bool:
        """Take over blocks that others computed while its own were on their way; False while a leader computes the next
        block in this very step."""
        if self._usable:
            # what it may go on from was said when it was admitted
            return True
        size = self._config.block_tokens
        limit = seq.hit_limit(size)
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
        """Start waiting sequences, in order, until one of them lacks room or a lane."""
        now = plan.planned_at
        queues, held_for = self._queues, self._queues.held_for
        waiting = queues.waiting
        # counted at most once: admitting sequences does not change which ones decode
        reserve: int | None = None
        position = 0
        while position < len(waiting):
            if queues.num_running >= self._config.max_running:
                queues.walled = True
                return
            if budget <= 0:
                # whether there would be room is not known
                return
            seq = waiting[position]
            # a sequence that waits for something else than room does not hold up the others
            waits = (
                not seq.wants_room
                or not self._lets_begin(seq)
                or (self._pausing.stage == "winding_down" and not self._pausing.lets_begin(seq))
            )
            waits = waits or (self._store_planner.enabled and self._store_planner.consider(seq, now))
            found = None if waits else self._match(seq, plan.step_id)
            hits = found
            for usable in self._usable:
                hits = None if hits is None else usable(seq, hits, plan.step_id)
            if found is None or hits is None:
                position += 1
                continue
            if reserve is None:
                reserve = queues.reserve(self._config.decode_reserve_blocks)
            # no sequence passes a lease that has aged, or a sequence that found no room: those would starve
            if (held_for is not None and held_for < seq.order) or not self._reserve(seq, hits, len(found), reserve):
                queues.walled = True
                return
            if self._store_planner.enabled:
                self._store_planner.let_go(seq)
                self._store_planner.admitted(seq, now)
            del waiting[position]
            if seq.arrivals:
                queues.to_loading(seq)
                continue
            starts.append(self._enter(seq))
            budget -= self._chunk(seq, budget, plan)
        queues.walled = False

    def _lets_begin(self, seq: Sequence) -> bool:
        return not self._may_begin or all(may_begin(seq) for may_begin in self._may_begin)

    def _match(self, seq: Sequence, step_id: int) -> list[Block] | None:
        """The blocks that it need not compute; None while a leader computes the next block in this very step."""
        limit = seq.hit_limit(self._config.block_tokens) if self._index.enabled else 0
        hits = self._index.match(seq.keys, limit, step_id)
        if len(hits) < limit and self._index.is_coming(seq.keys[len(hits)], step_id):
            return None
        return hits

    def _reserve(self, seq: Sequence, hits: list[Block], known: int, reserve: int) -> bool:
        """Pin the hits, take blocks for the rest, and order copies of the hits on the host; False: there is no room for
        all of it and a reserve of so many blocks, and nothing was done. `known`: of blocks whose KV is there."""
        size = self._config.block_tokens
        away = [block for block in hits if block.id < 0]
        fresh = -(-len(seq.tokens) // size) - len(hits)
        needed = fresh + len(away)
        alone = not self._queues.num_running and not self._queues.leased
        if needed + (0 if alone else reserve) > self._index.available_besides(hits):
            self._swap_planner.need(
                needed + (0 if alone else reserve) + sum(1 for block in hits if not block.ref_count)
            )
            return False
        for admitted in self._admitted:
            admitted(seq, hits, known * size)
        seq.hit_blocks = self._hits_by_tier(seq, hits)
        self._index.pin([block for block in hits if block.id >= 0])
        for block in away:
            self._index.bring(block)
        seq.blocks = hits + [self._index.take() for _ in range(fresh)]
        seq.planned = len(hits) * size
        if self._swap_planner.enabled:
            self._swap_planner.load(seq, hits, away)
        return True

    @staticmethod
    def _hits_by_tier(seq: Sequence, hits: list[Block]) -> tuple[int, int]:
        """How many of the hits came from the host, and how many from the store for this sequence."""
        host = stored = 0
        for block in hits:
            if block.key is not None and seq.store.brought.get(block.key):
                stored += 1
            elif block.id < 0:
                host += 1
        return host, stored

    def _enter(self, seq: Sequence) -> SeqStart:
        """Start a sequence that has its blocks, with KV in those it found cached."""
        self._queues.to_prefill(seq)
        seq.midway = False
        size = self._config.block_tokens
        if seq.cached_tokens is None:
            host, stored = (count * size for count in seq.hit_blocks)
            seq.admitted((seq.planned - host - stored, host, stored))
        fresh = seq.blocks[seq.planned // size :]
        slots = [block.slot for block in fresh if block.slot is not None]
        sampler = seq.sampler
        if sampler.score_from != seq.score_from:
            # it was preempted: what is scored stays
            sampler = msgspec.structs.replace(sampler, score_from=seq.score_from)
        return SeqStart(
            key=seq.key,
            tokens=array("i", seq.tokens).tobytes(),
            num_cached=seq.planned,
            blocks=tuple([block.id for block in seq.blocks]),
            slots=tuple([slot.id for slot in slots]),
            generations=tuple([slot.generation for slot in slots]),
            sampler=sampler,
            snapshot=-1 if seq.resume is None else seq.resume.place,
        )

    # -- shortage ---------------------------------------------------------------------------------

    def _allocate_for(self, seq: Sequence) -> Block | None:
        """A block for a decode, preempting others if need be; None: this step leaves it out, or it was preempted."""
        block = self._index.allocate()
        if block is not None:
            return block
        self._short += 1
        # blocks on their way out count: no second sequence is preempted for one need
        while self._queues.num_leaving() + self._swap_planner.num_leaving < self._short:
            victim = self._queues.preempt()
            if victim is not None:
                self._swap_planner.forget(victim)
            if victim is None and (self._queues.num_leased or self._index.lent):
                # leased samples start when their blocks are here, or their leases end; both free blocks in the end, as
                # do other instances that read this one's
                return None
            if victim is None:
                raise InvariantBroken(f"sequence {seq.key} needs a block, and no other is left to preempt")
            if victim is seq:
                self._short -= 1
                return None
            block = self._index.allocate()
            if block is not None:
                self._short -= 1
                return block
        return None
