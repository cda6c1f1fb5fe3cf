"""The pure scheduler: `handle(events) -> actions`. Every decision of the engine is made here.

No await, no torch, no I/O, no text, no clock but the time stamped on events, no iteration over sets: the
same events give the same actions, so every decision can be tested with plain calls and replayed from a
trace. This file: what events mean, how a request ends. `planner.py`: what the next step computes. `roster.py`: where
every sequence stands.

Called by `driver.py` once per loop turn.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from typing import TYPE_CHECKING

from fdasync.actions import Action, CopyRows, EmitTokens, FinishRequest, HashAgain, RowSpan, WakeAt
from fdasync.cache.aux import SlotPool
from fdasync.cache.blocks import BlockPool
from fdasync.cache.prefix import PrefixIndex, block_key
from fdasync.errors import InvariantBroken
from fdasync.events.catalog import (
    AbortRequested,
    Event,
    FetchEnded,
    Hashed,
    LeaseReturned,
    LookedUp,
    PauseRequested,
    RequestPrepared,
    ResumeRequested,
    StepDone,
    StepFailed,
    StopChecked,
    StopMatched,
    StoreEnded,
    SwapDone,
    TimerFired,
    Told,
    WeightsChanged,
)
from fdasync.scheduler.config import SchedulerConfig, SchedulerStats
from fdasync.scheduler.copier import Copier
from fdasync.scheduler.planner import Planner, StepPlan
from fdasync.scheduler.roster import Roster
from fdasync.scheduler.sequence import Sequence, State, StoreNotes
from fdasync.scheduler.storer import Storer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fdasync.cache.blocks import Block


class Scheduler:
    """See the module. Not thread-safe, not re-entrant."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        slots = SlotPool(config.num_blocks + config.num_host_blocks) if config.capture else None
        pool = BlockPool(config.num_blocks, slots, config.num_host_blocks)
        self.index = PrefixIndex(pool, enabled=config.prefix_cache)
        self._spans: list[RowSpan] = []
        self.storer = Storer(config, self.index)
        self.copier = Copier(config, self.index, self.storer.on_host)
        self.roster = Roster(config.block_tokens, self.index, self._spans, self.copier, self._write_back)
        self._planner = Planner(config, self.index, self.roster, self.copier, self.storer)
        self._paused = False
        self._namespace = config.namespace
        self._version = config.weight_version
        self._hashes: list[HashAgain] = []
        self._now = 0.0
        self._step_ended_at = 0.0
        self._mask = config.block_tokens - 1
        self._sequences: dict[int, Sequence] = {}
        self._inflight: deque[StepPlan] = deque()
        self._deadlines: list[tuple[float, int]] = []
        self._wake_at = float("inf")
        self._emits: list[EmitTokens] = []
        self._finishes: list[FinishRequest] = []
        self._arrivals = 0
        self._finished = self._generated = self._dropped = self._late_aborts = 0
        self._prompt_tokens = 0
        self._hit_tokens = [0, 0, 0]
        self._handlers: dict[type[Event], Callable[..., None]] = {
            StepDone: self._on_step_done,
            RequestPrepared: self._on_prepared,
            AbortRequested: self._on_abort,
            StopChecked: self._on_stop_checked,
            StopMatched: self._on_stop_matched,
            StepFailed: self._on_step_failed,
            TimerFired: self._on_timer,
            SwapDone: self._on_swap_done,
            LookedUp: self._on_looked_up,
            FetchEnded: self._on_fetch_ended,
            StoreEnded: self.storer.store_ended,
            LeaseReturned: self.storer.lease_returned,
            Hashed: self._on_hashed,
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
        steps: list[Action] = []
        while len(self._inflight) < self.config.pipeline_depth and not self._paused:
            # who was preempted, or sent back by new weights, must not be matched under what it was
            self._take_requeued()
            preemptions = self.roster.preemptions
            planned = self._planner.plan(self._now)
            if planned is None:
                if self.roster.preemptions > preemptions:
                    # somebody gave up what another one sat out for
                    continue
                break
            steps.append(planned[0])
            self._inflight.append(planned[1])
        self._take_requeued()
        if not self._paused:
            steps += self.copier.plan()
        steps += self.storer.plan()
        return self._gather(steps)

    def _on_step_failed(self, event: StepFailed) -> None:
        raise InvariantBroken(f"step {event.step_id} failed and the engine went on: {event.problem}")

    def _on_timer(self, _event: TimerFired) -> None:
        # loops ring a little early (their clocks are coarse): set it again if there is still time left
        self._wake_at = float("inf")

    def _gather(self, steps: list[Action]) -> list[Action]:
        actions: list[Action] = [*self._emits]
        # rows are read before anything that is planned now may write their slots again
        if self._spans:
            actions.append(CopyRows(tuple(self._spans)))
        actions += self._finishes
        actions += steps
        actions += self._hashes
        self._hashes.clear()
        self._emits.clear()
        self._spans.clear()
        self._finishes.clear()
        if self._deadlines and self._deadlines[0][0] != self._wake_at:
            self._wake_at = self._deadlines[0][0]
            actions.append(WakeAt(self._wake_at))
        return actions

    # -- arrivals and ends ------------------------------------------------------------------------

    def _on_prepared(self, event: RequestPrepared) -> None:
        if event.key in self._sequences:
            raise InvariantBroken(f"sequence {event.key} was prepared twice")
        seq = Sequence(event, self._arrivals, self._version)
        self._arrivals += 1
        self._sequences[seq.key] = seq
        if seq.deadline != float("inf"):
            heapq.heappush(self._deadlines, (seq.deadline, seq.key))
            if len(self._deadlines) > 2 * len(self._sequences) + 64:
                # most belong to requests that ended long before their deadline
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._sequences]
                heapq.heapify(self._deadlines)
        self.roster.enqueue(seq)
        if event.namespace != self._namespace:
            self._hash_again(seq)
        elif self.index.enabled:
            self.storer.consider(seq, event.at)

    def _on_abort(self, event: AbortRequested) -> None:
        for key in event.keys:
            seq = self._sequences.get(key)
            if seq is None:
                self._late_aborts += 1
            else:
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
        if not seq.checks_stops or seq.checked >= seq.num_output:
            self._end(seq, reason, seq.num_output, matched)
            return
        seq.ending = (reason, seq.num_output, matched)
        seq.stop_ids = frozenset()
        seq.emits = False
        self.roster.to_tail(seq)

    def _end(self, seq: Sequence, reason: str, keep: int, matched: int = -1) -> None:
        """The one place where a sequence ends."""
        if seq.ending is not None:
            # what came while a stop answer was awaited is overrun, whoever ends it now
            keep = min(keep, seq.ending[1])
        seq.take_rows(seq.computed, self.config.block_tokens, self._spans)
        output = tuple(seq.tokens[seq.prompt_len : seq.prompt_len + keep])
        num_rows = 0
        if seq.start >= 0:
            last = seq.prompt_len + keep - 1 if keep else seq.rows_have
            num_rows = max(min(last, seq.rows_have) - seq.start, 0)
        cached = seq.cached_tokens or (0, 0, 0)
        spans = tuple([span for span in seq.spans if span[0] < keep])
        self._finishes.append(FinishRequest(seq.key, reason, output, num_rows, cached, spans, matched))
        self._finished += 1
        self._generated += keep
        self._dropped += seq.num_output - keep
        if seq.cached_tokens is not None:
            self._prompt_tokens += seq.prompt_len
            self._hit_tokens = [so_far + more for so_far, more in zip(self._hit_tokens, cached, strict=True)]
        del self._sequences[seq.key]
        seq.stop_ids = frozenset()
        seq.emits = False
        seq.store.waits_for = None
        self.storer.let_go(seq)
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
            self._dropped += sum(1 for seq in (*plan.decodes, *samplers) if seq.state is State.ENDED)

    def _chunk_done(self, seq: Sequence, start: int, stop: int) -> None:
        size = self.config.block_tokens
        for number in range(start // size, stop // size):
            self.index.seal(seq.blocks[number])
            self._write_through(seq, number)
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
        self._write_through(seq, number)
        if seq.state is not State.ENDED:
            seq.take_rows(stop, size, self._spans)

    # -- tiers --------------------------------------------------------------------------------------

    def _write_through(self, seq: Sequence, number: int) -> None:
        """A block was sealed: shall the store have it?"""
        config = self.config
        if not config.store or config.write_through == "off":
            return
        block = seq.blocks[number]
        prompt = (number + 1) * config.block_tokens <= seq.prompt_len
        if block.key is not None and (prompt or config.write_through == "all"):
            block.wanted = True
            self.copier.keep(block)

    def _write_back(self, blocks: Iterable[Block]) -> None:
        """A preempted sequence gives these sealed blocks up: to the host, and from there to the store."""
        if self.config.write_back:
            for block in blocks:
                if self.config.store and not block.stored and not block.wanted:
                    block.wanted = True
                    if block.on_host:
                        self.storer.on_host(block)
                self.copier.keep(block)

    def _on_swap_done(self, event: SwapDone) -> None:
        for seq in self.copier.done(event.copy_id):
            self.roster.arrived(seq)

    def _on_looked_up(self, event: LookedUp) -> None:
        for seq in self.storer.looked_up(event):
            self.storer.consider(seq, event.at)

    def _on_fetch_ended(self, event: FetchEnded) -> None:
        for seq in self.storer.fetch_ended(event):
            self.storer.consider(seq, event.at)

    def _take_requeued(self) -> None:
        """Those who were preempted are matched again, under the namespace of now."""
        for seq in self.roster.requeued:
            if seq.state is State.WAITING:
                if not seq.indexed:
                    self._hash_again(seq)
                elif self.index.enabled:
                    self.storer.consider(seq, self._now)
        self.roster.requeued.clear()

    def _hash_again(self, seq: Sequence) -> None:
        if self.index.enabled:
            seq.hashing = True
            seq.keys = []
            self._hashes.append(HashAgain(seq.key, array("i", seq.tokens).tobytes(), seq.salt))

    def _on_hashed(self, event: Hashed) -> None:
        seq = self._sequences.get(event.key)
        if seq is None or not seq.hashing:
            return
        if event.namespace != self._namespace:
            self._hash_again(seq)
            return
        seq.hashing = False
        seq.indexed = True
        seq.root = event.root
        seq.keys = list(event.block_keys)
        self.storer.consider(seq, event.at)

    # -- weights ------------------------------------------------------------------------------------

    def _on_pause(self, _event: PauseRequested) -> None:
        self._paused = True

    def _on_resume(self, _event: ResumeRequested) -> None:
        self._paused = False

    def _on_weights(self, event: WeightsChanged) -> None:
        """DECISIONS 10: who has KV on the device goes on with it, unshared; everyone else starts under the new root."""
        if self._inflight:
            raise InvariantBroken("the weights changed while a step was in flight")
        self._namespace, self._version = event.namespace, event.version
        self.storer.new_weights(event.namespace)
        for seq in [*self.roster.loading.values(), *self.roster.loaded.values()]:
            seq.indexed = False
            self.roster.leave(seq)
        for seq in self._sequences.values():
            seq.new_weights(event.version)
            self.storer.let_go(seq)
            seq.store = StoreNotes()
            seq.indexed = False
            if seq.state is State.WAITING and not seq.hashing and seq not in self.roster.requeued:
                self._hash_again(seq)
        self.index.forget()

    @property
    def is_paused(self) -> bool:
        """No steps are planned."""
        return self._paused

    @property
    def is_writing(self) -> bool:
        """Blocks are on their way to the host or the store, or wait for it."""
        return bool(self.storer.num_writes or self.copier.num_queued or self.copier.num_in_flight)

    # -- looking in -------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        roster = self.roster
        pool = self.index.pool
        return SchedulerStats(
            waiting=len(roster.waiting),
            running=roster.num_running + len(roster.tail),
            steps=roster.done_step + 1,
            free_blocks=pool.num_free,
            idle_blocks=self.index.num_idle,
            num_blocks=pool.num_blocks,
            preemptions=roster.preemptions,
            evictions=self.index.evictions,
            finished=self._finished,
            generated_tokens=self._generated,
            dropped_tokens=self._dropped,
            late_aborts=self._late_aborts,
            prompt_tokens=self._prompt_tokens,
            hit_tokens=sum(self._hit_tokens),
            hit_tokens_host=self._hit_tokens[1],
            hit_tokens_store=self._hit_tokens[2],
            num_host_blocks=pool.num_host_blocks,
            free_host_blocks=pool.num_host_free,
            host_evictions=self.index.host_evictions,
            swapped_in_blocks=self.copier.in_blocks,
            swapped_out_blocks=self.copier.out_blocks,
            fetched_blocks=self.storer.fetched,
            late_fetched_blocks=self.storer.late_fetched,
            written_blocks=self.storer.written,
            dropped_writes=self.storer.dropped + self.copier.dropped,
            fetch_cut_offs=self.storer.cut_off,
            moving=self.copier.num_in_flight,
            writing=self.storer.num_writes + self.copier.num_queued,
            waiting_for_store=self.storer.num_waits,
            late_leases=self.storer.num_late,
            paused=self._paused,
            weight_version=self._version,
        )

    def check(self) -> None:
        """Raise InvariantBroken unless blocks, slots, pins and queues agree. For tests and idle time."""
        self.index.check()
        pins: dict[int, int] = {}
        holders = {id(seq): seq for seq in self._sequences.values()}
        holders |= {id(seq): seq for seq in self.roster.draining()}
        for seq in holders.values():
            for block in seq.blocks:
                pins[block.id] = pins.get(block.id, 0) + 1
        for block in self.index.pool.live():
            if block.pins != pins.get(block.id, 0):
                raise InvariantBroken(f"{block} has {block.pins} pins, {pins.get(block.id, 0)} sequences use it")
        if not self._inflight and self.roster.is_draining:
            raise InvariantBroken("sequences drain, but no step is in flight")
        self.copier.check()
        self.storer.check(sum(block.device_moves for block in self.index.pool.live()))
        hashing = any(seq.hashing for seq in self._sequences.values())
        moving = self.copier.num_in_flight or self.storer.num_waits
        awaited = self._inflight or self.roster.tail or moving or hashing or self._paused
        if self._sequences and not awaited:
            raise InvariantBroken(f"{len(self._sequences)} sequences wait for nothing: the scheduler stalled")
