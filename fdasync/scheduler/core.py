"""The pure scheduler: `handle(events) -> actions`. Every decision of the engine is made here.

No await, no torch, no I/O, no text, no clock but the time stamped on events, no iteration over sets: the
same events give the same actions, so every decision can be tested with plain calls and replayed from a
trace. This file: what events mean, how a request ends. `step_planner.py`: what the next step computes. `tiers.py`: what
happens below the device. `queues.py`: where every sequence stands.

Called by `driver.py` once per loop turn.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

from fdasync.cache.aux import SlotPool
from fdasync.cache.blocks import BlockPool
from fdasync.cache.prefix import PrefixIndex, block_key
from fdasync.errors import InvariantBroken
from fdasync.events.actions import Action, CopyRows, EmitTokens, FinishRequest, RowSpan, TellBlocks, WakeAt
from fdasync.events.catalog import (
    AbortRequested,
    Event,
    LeaseAsked,
    PauseRequested,
    RequestPrepared,
    ResumeRequested,
    StepDone,
    StepFailed,
    StopChecked,
    StopMatched,
    SwapDone,
    TimerFired,
    Told,
    WeightsChanged,
)
from fdasync.scheduler import stats as books
from fdasync.scheduler.disagg.decode import Lender
from fdasync.scheduler.disagg.prefill import Borrower
from fdasync.scheduler.state.queues import Roster
from fdasync.scheduler.state.sequence import Sequence, State
from fdasync.scheduler.state.weights import Weights
from fdasync.scheduler.stats import Counters, Parts
from fdasync.scheduler.step_planner import Planner, StepPlan
from fdasync.scheduler.tiers.store_planner import Storer
from fdasync.scheduler.tiers.swap_planner import Copier
from fdasync.scheduler.tiers.tiers import Tiers
from fdasync.scheduler.tiers.write_policy import WritePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fdasync.scheduler.state.config import SchedulerConfig, SchedulerStats

_NEVER = float("inf")


class Scheduler:
    """See the module. Not thread-safe, not re-entrant."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        slots = SlotPool(config.num_blocks + config.num_host_blocks) if config.capture else None
        pool = BlockPool(config.num_blocks, slots, config.num_host_blocks)
        self.index = PrefixIndex(pool, enabled=config.prefix_cache, news=config.block_news)
        self._spans: list[RowSpan] = []
        self._sequences: dict[int, Sequence] = {}
        self.storer = Storer(config, self.index, lambda block: self.copier.keep(block))
        self.copier = Copier(config, self.index, self.storer.on_host)
        self.weights = Weights(config.namespace, config.weight_version)
        self._writes = WritePolicy(config, self.copier, self.storer)
        self.roster = Roster(config.block_tokens, self.index, self._spans, self.copier, self._writes.write_back)
        self.tiers = Tiers(self.index, self._sequences, self.roster, self.copier, self.storer, self.weights)
        self.borrower = Borrower(config, self.copier, self.weights)
        self.lender = Lender(config, self.index, self.roster, self.copier)
        self._parts = Parts(self.index, self.roster, self.copier, self.storer, self.borrower, self.lender)
        self._planner = Planner(config, self.index, self.roster, self.copier, self.storer, self.borrower)
        self._paused = False
        self._now = 0.0
        self._step_ended_at = 0.0
        self._mask = config.block_tokens - 1
        self._inflight: deque[StepPlan] = deque()
        self._deadlines: list[tuple[float, int]] = []
        self._wake_at = float("inf")
        self._emits: list[EmitTokens] = []
        self._finishes: list[FinishRequest] = []
        self._arrivals = 0
        self._counters = Counters()
        self._handlers: dict[type[Event], Callable[..., None]] = {
            StepDone: self._on_step_done,
            RequestPrepared: self._on_prepared,
            AbortRequested: self._on_abort,
            StopChecked: self._on_stop_checked,
            StopMatched: self._on_stop_matched,
            StepFailed: self._on_step_failed,
            TimerFired: self._on_timer,
            LeaseAsked: self._on_lease_asked,
            SwapDone: self._on_swap_done,
            **self.tiers.handlers,
            **self.borrower.handlers,
            **self.lender.handlers,
            PauseRequested: self._on_pause,
            ResumeRequested: self._on_resume,
            WeightsChanged: self._on_weights,
        }

    # -- the one entry ----------------------------------------------------------------------------

    def handle(self, events: list[Event]) -> list[Action]:
        """Take the events of one turn, in order; return what is to be done, in order.

        Raises InvariantBroken when events contradict the protocol; the engine then fails.
        """
        for event in events:
            self._now = event.at
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(event)
            elif not isinstance(event, Told):
                raise InvariantBroken(f"the scheduler knows no event {type(event).__name__}")
        self._expire(self._now)
        self.borrower.ring(self._now)
        # before anything is planned: what they held may be what others wait for
        self._take_ends(self.borrower.ends)
        told = self.lender.plan(self._now)
        self._take_leased()
        steps: list[Action] = []
        while len(self._inflight) < self.config.pipeline_depth and not self._paused:
            # who was preempted, or sent back by new weights, must not be matched under what it was
            self.tiers.take_requeued(self._now)
            preemptions = self.roster.preemptions
            planned = self._planner.plan(self._now)
            if planned is None:
                if self.roster.preemptions > preemptions:
                    # somebody gave up what another one sat out for
                    continue
                break
            steps.append(planned[0])
            self._inflight.append(planned[1])
        self.tiers.take_requeued(self._now)
        if self.borrower.num_errands:
            steps += self.borrower.plan(self._now, paused=self._paused)
        # also of those that ended just now
        steps += self.borrower.take_actions()
        steps += self.tiers.plan(paused=self._paused)
        return self._gather(steps, told)

    def _on_step_failed(self, event: StepFailed) -> None:
        raise InvariantBroken(f"step {event.step_id} failed and the engine went on: {event.problem}")

    def _on_timer(self, _event: TimerFired) -> None:
        # loops ring a little early (their clocks are coarse): set it again if there is still time left
        self._wake_at = float("inf")

    def _gather(self, steps: list[Action], told: Iterable[Action] = ()) -> list[Action]:
        # a first token that came from elsewhere is its request's before its request can end
        actions: list[Action] = [*told, *self._emits]
        # rows are read before anything that is planned now may write their slots again
        if self._spans:
            actions.append(CopyRows(tuple(self._spans)))
        actions += self._finishes
        actions += steps
        self._emits.clear()
        self._spans.clear()
        self._finishes.clear()
        news = self.index.news
        if news:
            added = tuple([key for key, here in news.items() if here])
            actions.append(TellBlocks(added, tuple([key for key, here in news.items() if not here])))
            news.clear()
        wake_at = self._deadlines[0][0] if self._deadlines else _NEVER
        wake_at = min(wake_at, self.borrower.wake_at, self.lender.wake_at)
        if wake_at not in (self._wake_at, _NEVER):
            self._wake_at = wake_at
            actions.append(WakeAt(wake_at))
        return actions

    # -- arrivals and ends ------------------------------------------------------------------------

    def _on_prepared(self, event: RequestPrepared) -> None:
        seq = self._add(event)
        self.roster.enqueue(seq)
        if event.decoders:
            self.borrower.enter(seq, event, event.at)
        self.tiers.enter(seq, event.namespace, event.at)

    def _add(self, event: RequestPrepared) -> Sequence:
        if event.key in self._sequences:
            raise InvariantBroken(f"sequence {event.key} was prepared twice")
        seq = Sequence(event, self._arrivals, self.weights.version)
        self._arrivals += 1
        self._sequences[seq.key] = seq
        if seq.deadline != float("inf"):
            heapq.heappush(self._deadlines, (seq.deadline, seq.key))
            if len(self._deadlines) > 2 * len(self._sequences) + 64:
                # most belong to requests that ended long before their deadline
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._sequences]
                heapq.heapify(self._deadlines)
        return seq

    # -- requests of other instances, and for them ------------------------------------------------

    def _on_lease_asked(self, event: LeaseAsked) -> None:
        seqs = [self._add(request) for request in event.requests]
        for seq in seqs:
            seq.lease = event.requests[0].group
            self.roster.to_leased(seq)
        self.lender.asked(event, seqs, self.weights.namespace)

    def _take_leased(self) -> None:
        """Samples that have everything begin to decode, unless their first token is their last; and those end of which
        nothing comes here."""
        for seq, hand in self.lender.started:
            seq.lease = -1
            self._check_stop(seq, hand.token)
            if seq.state is State.LEASED:
                if len(seq.tokens) >= seq.max_len:
                    self._complete(seq, "length")
                else:
                    self.roster.handed_over(seq)
        self.lender.started.clear()
        self._take_ends(self.lender.ends)

    def _take_ends(self, ends: list[tuple[Sequence, str, str]]) -> None:
        for seq, reason, note in ends:
            if seq.state is not State.ENDED:
                self._end(seq, reason, seq.num_output if reason == "handed_over" else 0, note=note)
        ends.clear()

    def _on_abort(self, event: AbortRequested) -> None:
        for key in event.keys:
            seq = self._sequences.get(key)
            if seq is None:
                self._counters.late_aborts += 1
            elif seq.cached_tokens is not None or not event.begun_only:
                self._end(seq, "abort", seq.num_output)

    def _expire(self, now: float) -> None:
        while self._deadlines:
            deadline, key = self._deadlines[0]
            seq = self._sequences.get(key)
            if seq is not None:
                if deadline > now:
                    return
                self._end(seq, "deadline", seq.num_output)
            heapq.heappop(self._deadlines)

    def _on_stop_checked(self, event: StopChecked) -> None:
        seq = self._sequences.get(event.key)
        if seq is None:
            return
        seq.checked = event.num_tokens
        if seq.ending is not None and seq.checked >= seq.ending[1]:
            self._end(seq, *seq.ending)

    def _on_stop_matched(self, event: StopMatched) -> None:
        seq = self._sequences.get(event.key)
        if seq is None:
            return
        if not 0 < event.keep_tokens <= seq.num_output:
            raise InvariantBroken(f"a stop matched at token {event.keep_tokens} of {seq.num_output} of {seq.key}")
        self._end(seq, "stop", event.keep_tokens)

    def _complete(self, seq: Sequence, reason: str, matched: int = -1) -> None:
        """The tokens so far are all that it will have; a stop string may still cut them (DECISIONS 14)."""
        if seq.ending is not None:
            return
        if seq.errand is not None:
            self.borrower.computed(seq)
            return
        if not seq.checks_stops or seq.checked >= seq.num_output:
            self._end(seq, reason, seq.num_output, matched)
            return
        seq.ending = (reason, seq.num_output, matched)
        seq.stop_ids = frozenset()
        seq.emits = False
        self.roster.to_tail(seq)

    def _end(self, seq: Sequence, reason: str, keep: int, matched: int = -1, note: str = "") -> None:
        """The one place where a sequence ends."""
        if seq.ending is not None:
            # what came while a stop answer was awaited is overrun, whoever ends it now
            keep = min(keep, seq.ending[1])
        if seq.errand is not None and reason != "handed_over":
            # its first token is for the other instance to give: here nothing came of it
            keep = 0
        seq.take_rows(seq.computed, self.config.block_tokens, self._spans)
        output = tuple(seq.tokens[seq.prompt_len : seq.prompt_len + keep])
        num_rows = 0
        if seq.start >= 0:
            last = seq.prompt_len + keep - 1 if keep else seq.rows_have
            num_rows = max(min(last, seq.rows_have) - seq.start, 0)
        cached = seq.cached_tokens or (0, 0, 0)
        spans = tuple([span for span in seq.spans if span[0] < keep])
        self._finishes.append(FinishRequest(seq.key, reason, output, num_rows, cached, spans, matched, note))
        self._counters.ended(seq, keep)
        del self._sequences[seq.key]
        seq.stop_ids = frozenset()
        seq.emits = False
        self.tiers.leave(seq)
        if seq.errand is not None:
            self.borrower.leave(seq)
        if seq.lease >= 0:
            self.lender.leave(seq, seq.lease)
        self.roster.end(seq)

    def salvage(self) -> list[Action]:
        """End every live sequence with reason "failed" and what it has; for an engine that cannot go on.

        Plans nothing, and is no turn: it stands in no trace. Not to be called after `handle` raised.
        """
        for seq in list(self._sequences.values()):
            self._end(seq, "failed", seq.num_output)
        return self._gather([])

    # -- steps ------------------------------------------------------------------------------------

    def _on_step_done(self, event: StepDone) -> None:
        plan = self._inflight.popleft() if self._inflight else None
        if plan is None or plan.step_id != event.step_id:
            raise InvariantBroken(f"step {event.step_id} is done, but {plan and plan.step_id} was in flight first")
        tokens = event.tokens
        samplers = [chunk for chunk in plan.chunks if chunk.last]
        if len(tokens) != len(plan.decodes) + len(samplers):
            raise InvariantBroken(
                f"step {event.step_id} returned {len(tokens)} tokens for {len(plan.decodes) + len(samplers)} sequences"
            )
        self._measure(plan, event.at)
        # the hot loop: what a token costs when nothing happens
        mask = self._mask
        attention: list[tuple[Sequence, int]] = []
        for seq, token in zip(plan.decodes, tokens, strict=False):
            known = seq.tokens
            known.append(token)
            if token in seq.stop_ids or len(known) & mask == 1:
                attention.append((seq, token))
        first = len(plan.decodes)
        for chunk in plan.chunks:
            self._chunk_done(chunk.seq, chunk.start, chunk.stop)
        for chunk, token in zip(samplers, tokens[first:], strict=True):
            chunk.seq.tokens.append(token)
            chunk.seq.decoding = True
        self._emit(plan, tokens, [chunk.seq for chunk in samplers])
        for seq, token in attention:
            if len(seq.tokens) & mask == 1:
                self._seal_decoded(seq)
            self._check_stop(seq, token)
        for chunk, token in zip(samplers, tokens[first:], strict=True):
            self._check_stop(chunk.seq, token)
        for seq in plan.lasts:
            if seq.state is not State.ENDED:
                self._complete(seq, "length")
        self.roster.step_done(plan.step_id)

    def _measure(self, plan: StepPlan, now: float) -> None:
        """How fast prefill is, from steps that are mostly that."""
        started, self._step_ended_at = max(plan.planned_at, self._step_ended_at), now
        tokens = sum(chunk.stop - chunk.start for chunk in plan.chunks)
        if tokens >= self.config.block_tokens and tokens > len(plan.decodes) and now > started:
            self.storer.rates.prefilled(tokens, now - started)

    def _check_stop(self, seq: Sequence, token: int) -> None:
        if token in seq.stop_ids and len(seq.tokens) >= seq.min_len:
            self._complete(seq, "stop", token)

    def _emit(self, plan: StepPlan, tokens: tuple[int, ...], samplers: list[Sequence]) -> None:
        first = len(plan.decodes)
        rows = [pair for pair in plan.emitters if pair[1].emits]
        rows += [(first + number, seq) for number, seq in enumerate(samplers) if seq.emits]
        if rows:
            self._emits.append(
                EmitTokens(
                    plan.step_id,
                    tuple([seq.key for _, seq in rows]),
                    tuple([tokens[row] for row, _ in rows]),
                    tuple([row for row, _ in rows]),
                )
            )
        if self.roster.is_draining:
            self._counters.dropped += sum(1 for seq in (*plan.decodes, *samplers) if seq.state is State.ENDED)

    def _chunk_done(self, seq: Sequence, start: int, stop: int) -> None:
        size = self.config.block_tokens
        for number in range(start // size, stop // size):
            self.index.seal(seq.blocks[number])
            if self._writes.through:
                self._writes.write_through(seq, number)
        seq.computed_prefill = stop
        if seq.state is not State.ENDED:
            # sealed blocks, and the hits that this step was the first to read
            seq.take_rows(stop // size * size, size, self._spans)

    def _seal_decoded(self, seq: Sequence) -> None:
        """The last step filled a block with tokens that were not known when it was planned."""
        size = self.config.block_tokens
        stop = len(seq.tokens) - 1
        number = stop // size - 1
        key = None
        if self.index.enabled and seq.indexed:
            parent = seq.keys[number - 1] if number else seq.root
            key = block_key(parent, seq.tokens[stop - size : stop])
            seq.keys.append(key)
        self.index.seal(seq.blocks[number], key)
        if self._writes.through:
            self._writes.write_through(seq, number)
        if seq.state is not State.ENDED:
            seq.take_rows(stop, size, self._spans)

    @property
    def is_paused(self) -> bool:
        """No steps are planned."""
        return self._paused

    def _on_pause(self, _event: PauseRequested) -> None:
        self._paused = True

    def _on_resume(self, _event: ResumeRequested) -> None:
        self._paused = False

    def _on_weights(self, event: WeightsChanged) -> None:
        if self._inflight:
            raise InvariantBroken("the weights changed while a step was in flight")
        self.weights.namespace, self.weights.version = event.namespace, event.version
        for seq in self.borrower.new_weights(event.at):
            self.roster.leave(seq)
        self.lender.new_weights()
        self.tiers.new_weights(event)

    def _on_swap_done(self, event: SwapDone) -> None:
        self.tiers.copied(event.copy_id)
        self.lender.copied(event.copy_id)

    # -- looking in -------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """Counters since the start, gauges of now."""
        return books.stats(self._counters, self._parts, weight_version=self.weights.version, paused=self._paused)

    def check(self) -> None:
        """Raise InvariantBroken unless blocks, slots, pins and queues agree. For tests and idle time."""
        books.check(self._sequences.values(), self._parts, steps=bool(self._inflight), paused=self._paused)
