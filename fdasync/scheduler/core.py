"""The pure scheduler: `handle(events) -> actions`. It takes every decision of the engine.

It has no await, no torch, no I/O, no text, no clock but the time stamped on events, and iterates over no set: the same
events give the same actions, so every decision can be tested with plain calls and replayed (docs/design.md, section 2).
This module says what events mean and how a request ends. `step_planner.py` plans the next step, `results.py` takes what
a step gave, `tiers/` decides what happens below the device, `state/queues.py` keeps where every sequence stands. Who
else has a say about a sequence (snapshots of recurrent state, drafts, other instances) is an attachment
(`state/attachment.py`), and has no line here.

Made by `make.py`. Called by `engine/driver.py`, once per loop turn.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken
from fdasync.events.actions import Action, CopyRows, FinishRequest, TellBlocks, WakeAt
from fdasync.events.catalog import (
    AbortRequested,
    CacheResetRequested,
    Event,
    Notice,
    PauseRequested,
    RequestEnded,
    RequestPrepared,
    ResumeRequested,
    SleepRequested,
    StepDone,
    StepFailed,
    StopChecked,
    StopMatched,
    TimerFired,
    WeightsChanged,
    WeightsRelabelled,
)
from fdasync.scheduler.results import StepResults
from fdasync.scheduler.state.attachment import Attachment, asked
from fdasync.scheduler.state.policy import Candidate
from fdasync.scheduler.state.sequence import Sequence, State
from fdasync.scheduler.stats import Counters, check, collect_stats
from fdasync.scheduler.step_planner import StepPlanner
from fdasync.scheduler.tiers.tiers import Tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fdasync.events.actions import FinishReason
    from fdasync.scheduler.state.policy import Policy
    from fdasync.scheduler.state.step_plan import StepPlan
    from fdasync.scheduler.tiers.parts import Parts
    from fdasync.stats import SchedulerStats

_NEVER = float("inf")
# a turn of these alone plans nothing, unless an attachment hears of one. RequestEnded always plans: a turn may end a
# request behind the plans that could have used its blocks
_UNPLANNED = (Notice, WeightsRelabelled)


class Scheduler:
    """See the module. Not thread-safe, not re-entrant.

    Args:
        parts: what it stands on, and its attachments; no other scheduler does.
        policy: the policy that the configuration names.
        attachments: who else has a say, in the order in which they are asked.

    Attributes:
        config, index, weights, pausing, sequences, queues, swap_planner, store_planner: see `Parts`.
        tiers: joins sequences to what is below the device.
        attachments: as given.
        resets: how many `CacheResetRequested` were read.
        now: time of the last event.

    Raises InvariantBroken where two handle one event.
    """

    def __init__(self, parts: Parts, policy: Policy, attachments: tuple[Attachment, ...]) -> None:
        self._parts = parts
        self._policy = policy
        self.attachments = attachments
        self.config = config = parts.config
        self.index = parts.index
        self.weights = parts.weights
        self.pausing = parts.pausing
        self.sequences = parts.sequences
        self.queues = parts.queues
        self.swap_planner = parts.swap_planner
        self.store_planner = parts.store_planner
        self.tiers = Tiers(parts)
        self._spans = parts.spans
        self._step_planner = StepPlanner(parts)
        # an engine of the device alone enters nothing of `tiers/` in a turn
        self._has_tiers = config.num_host_blocks > 0 or config.store
        self.now = 0.0
        self._inflight: deque[StepPlan] = deque()
        self._deadlines: list[tuple[float, int]] = []
        self._wake_at = float("inf")
        self._finishes: list[FinishRequest] = []
        self._arrivals = 0
        self.resets = 0
        self._counters = Counters()
        self._results = StepResults(parts, self._step_planner, self._counters, self._complete)
        self.took = self._results.took
        self._handlers: dict[type[Event], Callable[..., None]] = {
            StepDone: self._on_step_done,
            RequestPrepared: self._on_prepared,
            AbortRequested: self._on_abort,
            StopChecked: self._on_stop_checked,
            StopMatched: self._on_stop_matched,
            StepFailed: self._on_step_failed,
            TimerFired: self._on_timer,
            PauseRequested: self._on_pause,
            ResumeRequested: self.pausing.resume,
            SleepRequested: self._on_sleep,
            CacheResetRequested: self._on_reset,
            WeightsChanged: self._on_weights,
            WeightsRelabelled: self._on_label,
            **self.tiers.handlers,
        }
        for one in attachments:
            one.core = self
            for kind, handler in one.handlers.items():
                if self._handlers.setdefault(kind, handler) is not handler:
                    raise InvariantBroken(f"two handle {kind.__name__}")
        self._heard = {RequestEnded, *[kind for one in attachments for kind in (*one.handlers, *one.also)]}
        self._prepared = [(one.concerns, told) for one in attachments for told in asked(Attachment.prepared, [one])]
        self.bind()

    def bind(self) -> None:
        """See `Core`."""
        awake = [one for one in self.attachments if one.awake]
        kinds = {kind: None for one in awake for kind in one.also}
        self._also = {kind: [one.also[kind] for one in awake if kind in one.also] for kind in kinds}
        self._ring = asked(Attachment.ring, awake)
        self._begin = asked(Attachment.begin, awake)
        self._plan = asked(Attachment.plan, awake)
        self._wake_ats = asked(Attachment.wake_at, awake)
        self._computed = asked(Attachment.computed, awake)
        self._ended = asked(Attachment.ended, awake)
        self._has_begun = asked(Attachment.has_begun, awake)
        self._start_anew = asked(Attachment.start_anew, awake)
        self._step_planner.bind(awake)
        self._results.bind(awake)

    # -- the one entry ----------------------------------------------------------------------------

    def handle(self, events: list[Event]) -> list[Action]:
        """Take the events of one turn, in order; return the actions, in order.

        Raises InvariantBroken when events contradict the protocol; the engine then fails.
        """
        for event in events:
            self.now = event.at
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(event)
            elif not isinstance(event, Notice):
                raise InvariantBroken(f"the scheduler knows no event {type(event).__name__}")
            for also in self._also.get(type(event), ()):
                also(event)
        if events and all(isinstance(event, _UNPLANNED) and type(event) not in self._heard for event in events):
            return []
        if self._deadlines:
            self._expire(self.now)
        if self.pausing.stage == "clearing":
            self._fall_asleep()
        for ring in self._ring:
            ring(self.now)
        if self.queues.fresh:
            self.tiers.take_fresh(self.now)
        running = self.pausing.stage == "running"
        if not running:
            self.pausing.settle()
        first: list[Action] = []
        for begin in self._begin:
            first += begin(self.now)
        if not running and self.pausing.settle():
            # what ended there was the last that the pause waited for, and leases may be granted again
            for begin in self._begin:
                first += begin(self.now)
        paused = not running and self.pausing.paused
        steps: list[Action] = []
        while len(self._inflight) < self.config.pipeline_depth and not paused:
            preemptions = self.queues.preemptions
            planned = self._step_planner.plan(self.now)
            # a preempted sequence must not be matched again under old identities
            if self.queues.fresh:
                self.tiers.take_fresh(self.now)
            if planned is None:
                if self.queues.preemptions > preemptions:
                    # another sequence may have been left out for want of the preempted one's blocks
                    continue
                break
            steps.append(planned[0])
            self._inflight.append(planned[1])
        for plan in self._plan:
            steps += plan(self.now)
        if self._has_tiers or self.tiers.hashes:
            steps += self.tiers.plan(paused=paused, falls_asleep=self.pausing.stage == "clearing")
        if paused and self.pausing.stage == "clearing":
            # after the copies, which give up what finds no place on the host
            self._settle_sleep()
        return self._gather(first, steps)

    def _on_step_failed(self, event: StepFailed) -> None:
        raise InvariantBroken(f"step {event.step_id} failed and the engine went on: {event.problem}")

    def _on_timer(self, _event: TimerFired) -> None:
        # a loop's clock is coarse, so the timer may be early: `_gather` sets it again if there is still time left
        self._wake_at = float("inf")

    def _gather(self, first: Iterable[Action] = (), steps: Iterable[Action] = ()) -> list[Action]:
        actions: list[Action] = [*first, *self._results.emits]
        # rows are read before anything that is planned now may write their slots again
        if self._spans:
            actions.append(CopyRows(tuple(self._spans)))
        actions += self._finishes
        actions += steps
        self._results.emits.clear()
        self._spans.clear()
        self._finishes.clear()
        kv_events = self.index.kv_events
        if kv_events:
            added = tuple([key for key, here in kv_events.items() if here])
            actions.append(TellBlocks(added, tuple([key for key, here in kv_events.items() if not here])))
            kv_events.clear()
        wake_at = self._deadlines[0][0] if self._deadlines else _NEVER
        for wants in self._wake_ats:
            wake_at = min(wake_at, wants())
        if wake_at not in (self._wake_at, _NEVER):
            self._wake_at = wake_at
            actions.append(WakeAt(wake_at))
        return actions

    # -- arrivals and ends ------------------------------------------------------------------------

    def _on_prepared(self, event: RequestPrepared) -> None:
        seq = self.add(event, self.sequences.get(event.group))
        # what was hashed under other weights is hashed again
        seq.indexed = event.namespace == self.weights.namespace
        self.queues.enqueue(seq)
        for concerns, prepared in self._prepared:
            if not concerns or getattr(event, concerns):
                prepared(seq, event)

    def add(self, event: RequestPrepared, first: Sequence | None = None) -> Sequence:
        """See `Core`."""
        if event.key in self.sequences:
            raise InvariantBroken(f"sequence {event.key} was prepared twice")
        order = self._policy.order(
            Candidate(
                priority=event.priority,
                arrival=self._arrivals,
                arrived_at=self.now if event.arrived_at is None else event.arrived_at,
                prompt_tokens=len(event.tokens),
                group=event.group,
            )
        )
        seq = Sequence(event, order, self.weights, first)
        self._arrivals += 1
        self.sequences[seq.key] = seq
        if seq.deadline != float("inf"):
            heapq.heappush(self._deadlines, (seq.deadline, seq.key))
            if len(self._deadlines) > 2 * len(self.sequences) + 64:
                # most belong to requests that ended long before their deadline
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self.sequences]
                heapq.heapify(self._deadlines)
        return seq

    def _on_abort(self, event: AbortRequested) -> None:
        for key in event.keys:
            seq = self.sequences.get(key)
            if seq is None:
                self._counters.late_aborts += 1
            elif seq.has_begun or not event.begun_only:
                self.end(seq, event.reason, seq.num_output)

    def _expire(self, now: float) -> None:
        while self._deadlines:
            deadline, key = self._deadlines[0]
            seq = self.sequences.get(key)
            if seq is not None:
                if deadline > now:
                    return
                self.end(seq, "deadline", seq.num_output)
            heapq.heappop(self._deadlines)

    def _on_stop_checked(self, event: StopChecked) -> None:
        seq = self.sequences.get(event.key)
        if seq is None:
            return
        seq.checked = event.num_tokens
        if seq.ending is not None and seq.checked >= seq.ending[1]:
            self.end(seq, *seq.ending)

    def _on_stop_matched(self, event: StopMatched) -> None:
        seq = self.sequences.get(event.key)
        if seq is None:
            return
        if not 0 < event.keep_tokens <= seq.num_output:
            raise InvariantBroken(f"a stop matched at token {event.keep_tokens} of {seq.num_output} of {seq.key}")
        self.end(seq, "stop", event.keep_tokens)

    def _complete(self, seq: Sequence, reason: FinishReason, matched: int = -1) -> None:
        """The sequence has all its tokens; a stop string may still cut them (docs/design.md, rule 14)."""
        if seq.ending is not None:
            return
        if any(computed(seq) for computed in self._computed):
            return
        if not seq.checks_stops or seq.checked >= seq.num_output:
            self.end(seq, reason, seq.num_output, matched)
            return
        seq.ending = (reason, seq.num_output, matched)
        seq.stop_ids = frozenset()
        seq.emits = False
        self.queues.to_tail(seq)

    def end(self, seq: Sequence, reason: FinishReason, keep: int, matched: int = -1, note: str = "") -> None:
        """The one place where a sequence ends; see `Core`."""
        if seq.ending is not None:
            # tokens that came while a stop answer was awaited are overrun, for whatever reason it ends now
            keep = min(keep, seq.ending[1])
        seq.take_rows(seq.computed, self.config.block_tokens, self._spans)
        if self._has_tiers:
            self.tiers.leave(seq)
        for ended in self._ended:
            keep = ended(seq, reason, keep)
        output = tuple(seq.tokens[seq.prompt_len : seq.prompt_len + keep])
        num_rows = 0
        if seq.start >= 0:
            last = seq.prompt_len + keep - 1 if keep else seq.rows_have
            num_rows = max(min(last, seq.rows_have) - seq.start, 0)
        cached = seq.cached_tokens or (0, 0, 0)
        spans = tuple([span for span in seq.spans if span[0] < keep])
        self._finishes.append(
            FinishRequest(
                key=seq.key,
                reason=reason,
                token_ids=output,
                num_rows=num_rows,
                cached_tokens=cached,
                spans=spans,
                matched_stop=matched,
                note=note,
                drafts=seq.drafts,
            )
        )
        self._count_end(seq, keep)
        del self.sequences[seq.key]
        seq.stop_ids = frozenset()
        seq.emits = False
        if self.pausing.stage == "winding_down":
            self.pausing.ended(seq)
        self.queues.end(seq)

    def _count_end(self, seq: Sequence, keep: int) -> None:
        counters = self._counters
        counters.finished += 1
        counters.generated += keep
        counters.dropped += seq.num_output - keep
        if seq.cached_tokens is not None:
            counters.prompt_tokens += seq.prompt_len
            (device, host, store), (more_device, more_host, more_store) = counters.hits, seq.cached_tokens
            counters.hits = (device + more_device, host + more_host, store + more_store)

    def salvage(self) -> list[Action]:
        """End every live sequence with reason "failed" and the tokens that it has; for an engine that cannot go on.

        It plans nothing, and is no turn: no trace has it. It must not be called after `handle` raised.
        """
        for seq in list(self.sequences.values()):
            self.end(seq, "failed", seq.num_output)
        return self._gather()

    # -- steps ------------------------------------------------------------------------------------

    def _on_step_done(self, event: StepDone) -> None:
        plan = self._inflight.popleft() if self._inflight else None
        if plan is None or plan.step_id != event.step_id:
            raise InvariantBroken(f"step {event.step_id} is done, but {plan and plan.step_id} was in flight first")
        self._results.take(plan, event)

    # -- pauses -----------------------------------------------------------------------------------

    def _on_pause(self, event: PauseRequested) -> None:
        """What a pause does to the sequences of each state: docs/design.md, rule 36."""
        self.pausing.requests += 1
        if event.mode == "wait":
            self.pausing.wind_down(self._begun(), event.at)
            return
        self.pausing.pause(event.at)
        if event.mode == "abort":
            for seq in list(self.sequences.values()):
                self.end(seq, "abort", seq.num_output)
        elif event.mode == "retract":
            for seq in self.queues.retract():
                self.swap_planner.forget(seq)

    def _begun(self) -> list[Sequence]:
        """The sequences of requests that have begun: a sample of them was admitted here, or another instance and this
        one have agreed on its hand-off. A request goes on as a whole: the caller may have tokens of one sample."""
        live = list(self.sequences.values())
        waits = (State.WAITING, State.LEASED)
        groups = {
            seq.group
            for seq in live
            if seq.has_begun or seq.state not in waits or any(has_begun(seq) for has_begun in self._has_begun)
        }
        return [seq for seq in live if seq.group in groups]

    # -- sleep --------------------------------------------------------------------------------------

    def _on_sleep(self, event: SleepRequested) -> None:
        """What a sleep does to the sequences of each state: docs/design.md, rule 44."""
        self.pausing.clear(event.at)
        if self.pausing.stage == "clearing":
            for seq in self.queues.retract():
                self.swap_planner.forget(seq)

    def _fall_asleep(self) -> None:
        """Called in every turn until no block is left on the device."""
        if self._inflight:
            return
        # what another instance was promised, or sends, has its place on the device
        for start_anew in self._start_anew:
            start_anew("sleep")

    def _settle_sleep(self) -> None:
        """The sleep is deep as soon as no block of the device is used, and none is to go to the host."""
        if self._inflight:
            return
        if not (self.tiers.is_copying or self.queues.is_draining) and self.index.is_device_idle:
            self.index.clear_device()
            self.pausing.cleared()

    # -- weights ------------------------------------------------------------------------------------

    def _on_weights(self, event: WeightsChanged) -> None:
        if self._inflight:
            raise InvariantBroken("the weights changed while a step was in flight")
        weights = self.weights
        weights.namespace, weights.version, weights.weights_id = event.namespace, event.version, event.weights_id
        for start_anew in self._start_anew:
            start_anew("weights")
        self.tiers.new_weights(event)

    def _on_label(self, event: WeightsRelabelled) -> None:
        self.weights.version = event.version
        for seq in self.sequences.values():
            seq.new_weights(self.weights)

    def _on_reset(self, _event: CacheResetRequested) -> None:
        self.resets += 1
        self.tiers.reset_cache()

    # -- statistics and checks --------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """Counters since the start, gauges of now."""
        return collect_stats(self._counters, self._parts, self.attachments)

    def check(self) -> None:
        """Raise InvariantBroken unless blocks, slots, pins and queues agree. For tests and idle time."""
        check(self._parts, self.attachments, steps=bool(self._inflight))
