"""The pure scheduler: `handle(events) -> actions`. It takes every decision of the engine.

It has no await, no torch, no I/O, no text, no clock but the time stamped on events, and iterates over no set: the same
events give the same actions, so every decision can be tested with plain calls and replayed (docs/design.md, section 2).
This module says what events mean and how a request ends. `step_planner.py` plans the next step, `tiers/` decides what
happens below the device, `disagg/` what goes to other instances, `state/queues.py` keeps where every sequence stands.

Called by `engine/driver.py`, once per loop turn.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

from fdasync.cache.aux import SlotPool
from fdasync.cache.blocks import BlockPool
from fdasync.cache.identity import block_key
from fdasync.cache.prefix import PrefixIndex
from fdasync.cache.snapshots import SnapshotPool
from fdasync.errors import InvariantBroken
from fdasync.events.actions import Action, CopyRows, EmitTokens, FinishRequest, RowSpan, TellBlocks, WakeAt
from fdasync.events.catalog import (
    AbortRequested,
    CacheResetRequested,
    Event,
    LeaseAsked,
    Notice,
    PauseRequested,
    RequestPrepared,
    ResumeRequested,
    SleepRequested,
    StepDone,
    StepFailed,
    StopChecked,
    StopMatched,
    SwapDone,
    TimerFired,
    WeightsChanged,
    WeightsRelabelled,
)
from fdasync.scheduler.disagg.decode import DecodeSide
from fdasync.scheduler.disagg.prefill import PrefillSide
from fdasync.scheduler.drafts import StepDrafts
from fdasync.scheduler.runs import one_each, take_runs
from fdasync.scheduler.state.pausing import PAUSED, Pausing
from fdasync.scheduler.state.policy import Candidate, own_policy
from fdasync.scheduler.state.queues import SequenceQueues
from fdasync.scheduler.state.sequence import Sequence, State
from fdasync.scheduler.state.weights import Weights
from fdasync.scheduler.stats import Counters, Parts, check, collect_stats
from fdasync.scheduler.step_planner import StepPlan, StepPlanner
from fdasync.scheduler.tiers.snapshot_planner import SnapshotPlanner
from fdasync.scheduler.tiers.store_planner import StorePlanner
from fdasync.scheduler.tiers.swap_planner import SwapPlanner
from fdasync.scheduler.tiers.tiers import Tiers
from fdasync.scheduler.tiers.write_policy import WritePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fdasync.drafting import Drafter
    from fdasync.events.actions import FinishReason
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.policy import Policy
    from fdasync.stats import SchedulerStats

_NEVER = float("inf")
# events that no plan depends on: a turn of them alone changes none
_UNPLANNED = (Notice, WeightsRelabelled)

# A decoding sequence asks for its rows once in so many blocks: asking costs more than copying a block's rows. What is
# left is asked for when the sequence ends or gives up its blocks, so this bounds the rows that are copied at once.
_ROW_BLOCKS = 8


class Scheduler:
    """See the module. Not thread-safe, not re-entrant.

    Args:
        policy: the policy that `config` names; None: it is one of the package's own.
        drafter: the drafter that `config` names, made with `drafter_limits`; None: it is made here, which raises
            PluginError and ConfigError.

    Attributes:
        config: its configuration.
        index: blocks by identity, in all tiers.
        weights: the weights in use.
        pausing: whether steps are planned, and for which sequences.
        resets: how many `CacheResetRequested` were read.
        queues: where every sequence stands.
        snapshot_planner: decides where snapshots of recurrent state are taken; None: the model has KV alone.
        swap_planner, store_planner, tiers: decide what happens below the device.
        prefill_side, decode_side: decide which requests other instances take over, and which this one takes over.
    """

    def __init__(self, config: SchedulerConfig, policy: Policy | None = None, drafter: Drafter | None = None) -> None:
        self.config = config
        self._policy = policy or own_policy(config.policy, config.policy_config)
        slots = SlotPool(config.num_blocks + config.num_host_blocks) if config.capture else None
        snapshots = SnapshotPool(config.num_snapshots, config.num_host_snapshots) if config.recurrent else None
        pool = BlockPool(config.num_blocks, slots, config.num_host_blocks, snapshots)
        self.index = PrefixIndex(pool, enabled=config.prefix_cache, kv_events=config.kv_events)
        self._spans: list[RowSpan] = []
        self._sequences: dict[int, Sequence] = {}
        self.swap_planner = SwapPlanner(config, self.index)
        self.snapshot_planner = (
            None if snapshots is None else SnapshotPlanner(config, snapshots, self.index, self.swap_planner)
        )
        self.store_planner = StorePlanner(config, self.index, self.swap_planner.keep, self.swap_planner.keep_snapshot)
        self.weights = Weights(config.namespace, config.weight_version, config.weights_id)
        self.pausing = Pausing()
        self._writes = WritePolicy(config, self.swap_planner, self.store_planner)
        self.queues = SequenceQueues(
            config.block_tokens,
            self.index,
            self._spans,
            self._writes.write_back,
            asks_store=self.store_planner.enabled,
        )
        self.tiers = Tiers(
            self.index, self._sequences, self.queues, self.swap_planner, self.store_planner, self.weights
        )
        self.prefill_side = PrefillSide(config, self.swap_planner, self.weights, self.pausing)
        self.decode_side = DecodeSide(config, self.index, self.queues, self.swap_planner, self.pausing)
        self._drafts = StepDrafts(config, drafter) if config.drafter or config.own_drafter else None
        self._parts = Parts(
            self.index,
            self.queues,
            self.swap_planner,
            self.store_planner,
            self.prefill_side,
            self.decode_side,
            self._drafts,
        )
        self._step_planner = StepPlanner(
            config,
            self.index,
            self.queues,
            self.swap_planner,
            self.store_planner,
            self.prefill_side,
            self.pausing,
            self._drafts,
            self.snapshot_planner,
        )
        # an engine of the device alone enters nothing of `tiers/` in a turn
        self._has_tiers = config.num_host_blocks > 0 or config.store
        self._now = 0.0
        self._step_ended_at = 0.0
        self._inflight: deque[StepPlan] = deque()
        # the last step that gave runs of tokens
        self._runs_step = -config.pipeline_depth
        self._deadlines: list[tuple[float, int]] = []
        self._wake_at = float("inf")
        self._emits: list[EmitTokens] = []
        self._finishes: list[FinishRequest] = []
        self._arrivals = 0
        self.resets = 0
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
            **self.prefill_side.handlers,
            **self.decode_side.handlers,
            PauseRequested: self._on_pause,
            ResumeRequested: self._on_resume,
            SleepRequested: self._on_sleep,
            CacheResetRequested: self._on_reset,
            WeightsChanged: self._on_weights,
            WeightsRelabelled: self._on_label,
        }

    # -- the one entry ----------------------------------------------------------------------------

    def handle(self, events: list[Event]) -> list[Action]:
        """Take the events of one turn, in order; return the actions, in order.

        Raises InvariantBroken when events contradict the protocol; the engine then fails.
        """
        for event in events:
            self._now = event.at
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(event)
            elif not isinstance(event, Notice):
                raise InvariantBroken(f"the scheduler knows no event {type(event).__name__}")
        if events and all(isinstance(event, _UNPLANNED) for event in events):
            return []
        self._expire(self._now)
        if self.pausing.stage == "clearing":
            # before both sides' ends and answers are taken
            self._fall_asleep()
        if self.prefill_side.hand_offs:
            self.prefill_side.ring(self._now)
            # before anything is planned: sequences that end give back blocks that others wait for
            self._take_ends(self.prefill_side.ends)
        if self.queues.fresh:
            self.tiers.take_fresh(self._now)
        handed = self._plan_leases()
        if self.pausing.stage == "winding_down":
            self.pausing.settle()
        paused = self.pausing.stage in PAUSED
        steps: list[Action] = []
        while len(self._inflight) < self.config.pipeline_depth and not paused:
            preemptions = self.queues.preemptions
            planned = self._step_planner.plan(self._now)
            # a preempted sequence must not be matched again under old identities
            if self.queues.fresh:
                self.tiers.take_fresh(self._now)
            if planned is None:
                if self.queues.preemptions > preemptions:
                    # another sequence may have been left out for want of the preempted one's blocks
                    continue
                break
            steps.append(planned[0])
            self._inflight.append(planned[1])
        if self.prefill_side.hand_offs or self.prefill_side.actions:
            steps += self.prefill_side.plan(self._now)
        if self._has_tiers or self.tiers.hashes:
            steps += self.tiers.plan(paused=paused, falls_asleep=self.pausing.stage == "clearing")
        if self.pausing.stage == "clearing":
            # after the copies, which give up what finds no place on the host
            self._settle_sleep()
        return self._gather(steps, handed)

    def _on_step_failed(self, event: StepFailed) -> None:
        raise InvariantBroken(f"step {event.step_id} failed and the engine went on: {event.problem}")

    def _on_timer(self, _event: TimerFired) -> None:
        # a loop's clock is coarse, so the timer may be early: `_gather` sets it again if there is still time left
        self._wake_at = float("inf")

    def _gather(self, steps: list[Action], handed: Iterable[Action] = ()) -> list[Action]:
        # a first token from another instance reaches its request before the request can end
        actions: list[Action] = [*handed, *self._emits]
        # rows are read before anything that is planned now may write their slots again
        if self._spans:
            actions.append(CopyRows(tuple(self._spans)))
        actions += self._finishes
        actions += steps
        self._emits.clear()
        self._spans.clear()
        self._finishes.clear()
        kv_events = self.index.kv_events
        if kv_events:
            added = tuple([key for key, here in kv_events.items() if here])
            actions.append(TellBlocks(added, tuple([key for key, here in kv_events.items() if not here])))
            kv_events.clear()
        wake_at = self._deadlines[0][0] if self._deadlines else _NEVER
        if self.prefill_side.hand_offs:
            wake_at = min(wake_at, self.prefill_side.wake_at)
        if self.decode_side.leases:
            wake_at = min(wake_at, self.decode_side.wake_at)
        if wake_at not in (self._wake_at, _NEVER):
            self._wake_at = wake_at
            actions.append(WakeAt(wake_at))
        return actions

    # -- arrivals and ends ------------------------------------------------------------------------

    def _on_prepared(self, event: RequestPrepared) -> None:
        seq = self._add(event, self._sequences.get(event.group))
        # what was hashed under other weights is hashed again
        seq.indexed = event.namespace == self.weights.namespace
        self.queues.enqueue(seq)
        if event.decoders:
            self.prefill_side.enter(seq, event, event.at)

    def _add(self, event: RequestPrepared, first: Sequence | None) -> Sequence:
        if event.key in self._sequences:
            raise InvariantBroken(f"sequence {event.key} was prepared twice")
        order = self._policy.order(
            Candidate(
                priority=event.priority,
                arrival=self._arrivals,
                arrived_at=self._now if event.arrived_at is None else event.arrived_at,
                prompt_tokens=len(event.tokens),
                group=event.group,
            )
        )
        seq = Sequence(event, order, self.weights, first)
        self._arrivals += 1
        self._sequences[seq.key] = seq
        if seq.deadline != float("inf"):
            heapq.heappush(self._deadlines, (seq.deadline, seq.key))
            if len(self._deadlines) > 2 * len(self._sequences) + 64:
                # most belong to requests that ended long before their deadline
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._sequences]
                heapq.heapify(self._deadlines)
        return seq

    # -- requests that another instance prefills --------------------------------------------------

    def _on_lease_asked(self, event: LeaseAsked) -> None:
        seqs: list[Sequence] = []
        for request in event.requests:
            seqs.append(self._add(request, seqs[0] if seqs else None))
        for seq in seqs:
            seq.lease = event.requests[0].group
            self.queues.to_leased(seq)
        self.decode_side.asked(event, seqs, self.weights.namespace)

    def _plan_leases(self) -> list[Action]:
        """The decode side's actions of this turn. Samples whose blocks are here begin to decode, unless their first
        token is their last; samples that lost their lease end. An engine without leases returns at once."""
        decode_side = self.decode_side
        if not (decode_side.leases or decode_side.actions or decode_side.started or decode_side.ends):
            return []
        actions = decode_side.plan(self._now)
        for seq, hand in decode_side.started:
            seq.lease = -1
            self._check_stop(seq, hand.token)
            if seq.state is State.LEASED:
                if len(seq.tokens) >= seq.max_len:
                    self._complete(seq, "length")
                else:
                    self.queues.handed_over(seq)
        decode_side.started.clear()
        self._take_ends(decode_side.ends)
        return actions

    def _take_ends(self, ends: list[tuple[Sequence, FinishReason, str]]) -> None:
        for seq, reason, note in ends:
            if seq.state is not State.ENDED:
                self._end(seq, reason, seq.num_output if reason == "handed_over" else 0, note=note)
        ends.clear()

    def _on_abort(self, event: AbortRequested) -> None:
        for key in event.keys:
            seq = self._sequences.get(key)
            if seq is None:
                self._counters.late_aborts += 1
            elif seq.has_begun or not event.begun_only:
                self._end(seq, event.reason, seq.num_output)

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

    def _complete(self, seq: Sequence, reason: FinishReason, matched: int = -1) -> None:
        """The sequence has all its tokens; a stop string may still cut them (docs/design.md, rule 14)."""
        if seq.ending is not None:
            return
        if seq.hand_off is not None:
            self.prefill_side.computed(seq)
            return
        if not seq.checks_stops or seq.checked >= seq.num_output:
            self._end(seq, reason, seq.num_output, matched)
            return
        seq.ending = (reason, seq.num_output, matched)
        seq.stop_ids = frozenset()
        seq.emits = False
        self.queues.to_tail(seq)

    def _end(self, seq: Sequence, reason: FinishReason, keep: int, matched: int = -1, note: str = "") -> None:
        """The one place where a sequence ends."""
        if seq.ending is not None:
            # tokens that came while a stop answer was awaited are overrun, for whatever reason it ends now
            keep = min(keep, seq.ending[1])
        if seq.hand_off is not None and reason != "handed_over":
            # the decode instance gives its first token; this result is empty
            keep = 0
        seq.take_rows(seq.computed, self.config.block_tokens, self._spans)
        output = tuple(seq.tokens[seq.prompt_len : seq.prompt_len + keep])
        num_rows = 0
        if seq.start >= 0:
            last = seq.prompt_len + keep - 1 if keep else seq.rows_have
            num_rows = max(min(last, seq.rows_have) - seq.start, 0)
        cached = seq.cached_tokens or (0, 0, 0)
        spans = tuple([span for span in seq.spans if span[0] < keep])
        drafts = None if self._drafts is None else self._drafts.end(seq, self._now)
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
                drafts=drafts,
            )
        )
        self._count_end(seq, keep)
        del self._sequences[seq.key]
        seq.stop_ids = frozenset()
        seq.emits = False
        if self._has_tiers:
            self.tiers.leave(seq)
        if seq.hand_off is not None:
            self.prefill_side.leave(seq, reason)
        if seq.lease >= 0:
            self.decode_side.leave(seq, seq.lease)
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
        for seq in list(self._sequences.values()):
            self._end(seq, "failed", seq.num_output)
        return self._gather([])

    # -- steps ------------------------------------------------------------------------------------

    def _on_step_done(self, event: StepDone) -> None:
        plan = self._inflight.popleft() if self._inflight else None
        if plan is None or plan.step_id != event.step_id:
            raise InvariantBroken(f"step {event.step_id} is done, but {plan and plan.step_id} was in flight first")
        if self.snapshot_planner is not None:
            self.snapshot_planner.pool.step_done(plan.step_id)
        tokens = event.tokens
        samplers = [chunk.seq for chunk in plan.chunks if chunk.last]
        # (sequence, how many tokens its decode gave) of sequences that are due, or may have ended
        attention: list[tuple[Sequence, int]] = []
        maybe_cut = plan.step_id - self._runs_step < self.config.pipeline_depth
        if event.counts is not None and not one_each(
            plan.decodes, len(samplers), event, plan.full, maybe_cut=maybe_cut
        ):
            self._runs_step = plan.step_id
            runs = take_runs(plan.decodes, len(samplers), event, self.config, plan.full)
            attention += runs.due
            rows = runs.emitted
            self._counters.dropped += runs.dropped
        elif len(tokens) != len(plan.decodes) + len(samplers):
            raise InvariantBroken(
                f"step {event.step_id} returned {len(tokens)} tokens for {len(plan.decodes) + len(samplers)} sequences"
            )
        else:
            # the hot loop: the cost of a token when nothing else happens
            may_stop = not plan.stop_ids.isdisjoint(tokens)
            for seq, token in zip(plan.decodes, tokens, strict=False):
                known = seq.tokens
                known.append(token)
                if len(known) >= seq.due or (may_stop and token in seq.stop_ids):
                    attention.append((seq, 1))
            rows = [pair for pair in plan.emitters if pair[1].emits]
            if self.queues.is_draining:
                self._counters.dropped += sum(1 for seq in plan.decodes if seq.state is State.ENDED)
        seconds = self._measure(plan, event.at)
        if self._drafts is not None:
            self._drafts.done(plan.decodes, samplers, event, None if plan.chunks else seconds)
        for chunk in plan.chunks:
            self._chunk_done(chunk.seq, chunk.start, chunk.stop)
        first = len(tokens) - len(samplers)
        for row, seq in enumerate(samplers, first):
            seq.tokens.append(tokens[row])
            seq.decoding = True
            attention.append((seq, 0))
            if seq.emits:
                rows.append((row, seq))
            self._counters.dropped += seq.state is State.ENDED
        if rows:
            keys = tuple([seq.key for _, seq in rows])
            self._emits.append(
                EmitTokens(plan.step_id, keys, tuple([tokens[row] for row, _ in rows]), tuple([row for row, _ in rows]))
            )
        due, size = self._step_planner.due, self.config.block_tokens
        for seq, count in attention:
            length, last = len(seq.tokens), seq.tokens[-1]
            if (length - 1) % size < count:
                self._seal_decoded(seq, count)
            if last in seq.stop_ids:
                self._check_stop(seq, last)
            if length >= seq.max_len and seq.state is not State.ENDED:
                self._complete(seq, "length")
            if length < seq.near:
                # it has just sealed a block, and has room for more
                seq.due = min(seq.near, length - (length - 1) % size + size)
            elif seq.state is State.DECODE:
                due[seq.key] = seq
        if self._drafts is not None:
            for seq in samplers:
                # its last token may have been planned already
                if seq.state is State.DECODE or (seq.state is State.TAIL and len(seq.tokens) < seq.max_len):
                    self._drafts.begin(seq)
        self.queues.step_done(plan.step_id)

    def _measure(self, plan: StepPlan, now: float) -> float:
        """Returns the seconds that the step took. Measures how fast prefill is, for the store's cost model, from steps
        that are mostly prefill."""
        started, self._step_ended_at = max(plan.planned_at, self._step_ended_at), now
        if plan.chunks and self.store_planner.enabled:
            tokens = sum(chunk.stop - chunk.start for chunk in plan.chunks)
            if tokens >= self.config.block_tokens and tokens > len(plan.decodes) and now > started:
                self.store_planner.rates.prefilled(tokens, now - started)
        return now - started

    def _check_stop(self, seq: Sequence, token: int) -> None:
        if token in seq.stop_ids and len(seq.tokens) >= seq.min_len:
            self._complete(seq, "stop", token)

    def _chunk_done(self, seq: Sequence, start: int, stop: int) -> None:
        size = self.config.block_tokens
        for number in range(start // size, stop // size):
            self.index.seal(seq.blocks[number])
            if self._writes.through:
                self._writes.write_through(seq, number)
        seq.computed_prefill = stop
        seq.scored(stop)
        if seq.state is not State.ENDED:
            # rows of sealed blocks, and of hits that this step was the first to read
            seq.take_rows(stop // size * size, size, self._spans)

    def _seal_decoded(self, seq: Sequence, count: int) -> None:
        """The last step forwarded `count` tokens of `seq`: seal the blocks that they filled."""
        size = self.config.block_tokens
        stop = len(seq.tokens) - 1
        is_shared = self.index.enabled and seq.indexed
        for number in range((stop - count) // size, stop // size):
            key = None
            if is_shared:
                parent = seq.keys[number - 1] if number else seq.root
                key = block_key(parent, seq.tokens[number * size : (number + 1) * size])
                seq.keys.append(key)
            self.index.seal(seq.blocks[number], key)
            if self.snapshot_planner is not None:
                self.snapshot_planner.sealed(seq, number, key)
            if self._writes.through:
                self._writes.write_through(seq, number)
            # apart by the key, so that sequences that began together do not ask in the same step
            if (number + seq.key) % _ROW_BLOCKS == 0 and seq.state is not State.ENDED:
                seq.take_rows((number + 1) * size, size, self._spans)

    # -- pauses -----------------------------------------------------------------------------------

    def _on_pause(self, event: PauseRequested) -> None:
        """What a pause does to the sequences of each state: docs/design.md, rule 36."""
        self.pausing.requests += 1
        if event.mode == "wait":
            self.pausing.wind_down(self._begun(), event.at)
            if self.prefill_side.hand_offs:
                self.prefill_side.hold_back()
            return
        self.pausing.pause(event.at)
        if event.mode == "abort":
            for seq in list(self._sequences.values()):
                self._end(seq, "abort", seq.num_output)
        elif event.mode == "retract":
            for seq in self.queues.retract():
                self.swap_planner.forget(seq)

    def _begun(self) -> list[Sequence]:
        """The sequences of requests that have begun: a sample of them was admitted here, or another instance and this
        one have agreed on its hand-off. A request goes on as a whole: the caller may have tokens of one sample."""
        live = list(self._sequences.values())
        groups = {seq.group for seq in live if seq.has_begun or self._has_begun(seq)}
        return [seq for seq in live if seq.group in groups]

    def _has_begun(self, seq: Sequence) -> bool:
        if seq.state is State.WAITING:
            return seq.hand_off is not None and seq.hand_off.granted
        if seq.state is State.LEASED:
            lease = self.decode_side.leases.get(seq.lease)
            # without its lease it starts, or ends, in this turn
            return lease is None or lease.granted
        return True

    def _on_resume(self, event: ResumeRequested) -> None:
        held_s = self.pausing.resume(event.at)
        # neither side's lease or search is shorter for it
        if self.prefill_side.hand_offs:
            self.prefill_side.resumed(held_s)
        if self.decode_side.leases:
            self.decode_side.resumed(held_s)

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
        for seq in self.prefill_side.start_anew(self._now, "the engine fell asleep during its hand-over"):
            self.queues.leave(seq)
        if self.decode_side.leases:
            self.decode_side.drop_all("the engine falls asleep")

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
        for seq in self.prefill_side.start_anew(event.at, "the weights changed during its hand-over"):
            self.queues.leave(seq)
        self.decode_side.drop_all("the weights changed")
        self.tiers.new_weights(event)

    def _on_label(self, event: WeightsRelabelled) -> None:
        self.weights.version = event.version
        for seq in self._sequences.values():
            seq.new_weights(self.weights)

    def _on_reset(self, _event: CacheResetRequested) -> None:
        self.resets += 1
        self.decode_side.reset_cache()
        self.tiers.reset_cache()

    def _on_swap_done(self, event: SwapDone) -> None:
        self.tiers.copied(event.copy_id)
        if self.decode_side.copies:
            self.decode_side.copied(event.copy_id)

    # -- statistics and checks --------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """Counters since the start, gauges of now."""
        return collect_stats(
            self._counters, self._parts, weight_version=self.weights.version, paused=self.pausing.stage in PAUSED
        )

    def check(self) -> None:
        """Raise InvariantBroken unless blocks, slots, pins and queues agree. For tests and idle time."""
        check(self._sequences.values(), self._parts, steps=bool(self._inflight), stage=self.pausing.stage)
