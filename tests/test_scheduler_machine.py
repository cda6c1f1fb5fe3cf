"""The scheduler against a naive paged runner whose answers are the synthetic oracle's, in any order of events.

The runner below computes through block tables, cell by cell: a block that is stale, missing, misplaced or
written by two shows at once. Rows become visible when their step is done, as in the real arena.
"""

from __future__ import annotations

from array import array
from collections import deque
from functools import lru_cache

import msgspec
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fdasync.actions import CopyRows, EmitTokens, FinishRequest, RunStep, WakeAt
from fdasync.events.catalog import AbortRequested, RequestPrepared, StepDone, StopChecked, StopMatched, TimerFired
from fdasync.events.trace import TraceRing
from fdasync.runner.oracle import U64, Oracle, SyntheticConfig
from fdasync.scheduler import Scheduler, SchedulerConfig
from fdasync.scheduler.replay import replay
from tests.helpers import machine_settings, make_request

VOCAB = 6
ORACLE = Oracle(SyntheticConfig(vocab_size=VOCAB))


@lru_cache(maxsize=100_000)
def next_token(tokens: tuple[int, ...]) -> int:
    digest = ORACLE.digests(tokens)[-1:]
    return int(ORACLE.sample(digest, np.zeros(1, U64), ORACLE.config.weights_id)[0])


def whole_output(prompt, max_tokens):
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


class Lane:
    def __init__(self, tokens, position, blocks):
        self.tokens = tokens
        self.position = position
        self.blocks = blocks


class PagedRunner:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.lanes: dict[int, Lane] = {}
        self.decoding: list[int] = []
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}
        self.slot_of_block: dict[int, tuple[int, int]] = {}
        self.rows: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.flights: deque[tuple[RunStep, tuple[int, ...], dict, set[int], set[int], list]] = deque()
        self.passed: dict[int, list[tuple[int, int]]] = {}
        self.next_step = 0

    def launch(self, step: RunStep) -> None:
        config = self.config
        assert step.step_id == self.next_step
        assert len(self.flights) < config.pipeline_depth
        self.next_step += 1
        for key in step.leaves:
            del self.lanes[key]
            self.decoding = [other for other in self.decoding if other != key]
        fresh_blocks: list[int] = []
        fresh_slots: list[int] = []
        for start in step.starts:
            assert start.key not in self.lanes
            tokens = list(array("i", start.tokens))
            cached, rest = divmod(start.num_cached, config.block_tokens)
            assert rest == 0
            assert start.num_cached < len(tokens)
            assert len(start.blocks) == -(-len(tokens) // config.block_tokens) == len(set(start.blocks))
            own = start.blocks[cached:]
            fresh_blocks += own
            if config.capture:
                fresh_slots += start.slots
                self.slot_of_block.update(zip(own, zip(start.slots, start.generations, strict=True), strict=True))
            self.lanes[start.key] = Lane(tokens, start.num_cached, list(start.blocks))
        for append in step.appends:
            lane = self.lanes[append.key]
            assert append.key in self.decoding
            assert append.key not in step.skips
            # just when it is needed
            assert lane.position == len(lane.blocks) * config.block_tokens
            lane.blocks.append(append.block)
            fresh_blocks.append(append.block)
            if config.capture:
                fresh_slots.append(append.slot)
                self.slot_of_block[append.block] = (append.slot, append.generation)
        assert all(0 <= block < config.num_blocks for block in fresh_blocks)
        assert len(set(fresh_blocks)) == len(fresh_blocks)
        assert len(set(fresh_slots)) == len(fresh_slots)
        for _, _, _, blocks, slots, _ in self.flights:
            assert not blocks & set(fresh_blocks), "a block that a step in flight names got another writer"
            assert not slots & set(fresh_slots), "a slot that a step in flight names got another writer"
        decodes = [key for key in self.decoding if key not in step.skips]
        assert set(step.skips) <= set(self.decoding)
        assert len(self.lanes) <= config.max_running
        assert 0 < len(decodes) + sum(chunk.count for chunk in step.chunks) <= config.max_step_tokens
        assert len({chunk.key for chunk in step.chunks}) == len(step.chunks)
        sampled: list[int] = []
        rows: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        named: set[int] = set()
        work = [(key, 1, True) for key in decodes] + [(chunk.key, chunk.count, chunk.last) for chunk in step.chunks]
        for key, count, _ in work:
            assert count > 0
            self._write(self.lanes[key], count, rows, named)
        done = []
        for key, _, samples in work:
            lane = self.lanes[key]
            self._read(lane)
            done.append((key, lane.position))
            if samples:
                assert lane.position == len(lane.tokens)
                sampled.append(next_token(tuple(lane.tokens)))
                lane.tokens.append(sampled[-1])
            else:
                assert lane.position < len(lane.tokens)
        self.decoding += [chunk.key for chunk in step.chunks if chunk.last]
        slots = {self.slot_of_block[block][0] for block in named} if config.capture else set()
        self.flights.append((step, tuple(sampled), rows, named, slots, done))

    def _write(self, lane: Lane, count: int, rows: dict, named: set[int]) -> None:
        size = self.config.block_tokens
        for position in range(lane.position, lane.position + count):
            block, offset = lane.blocks[position // size], position % size
            self.cells[block, offset] = (lane.tokens[position], position)
            if self.config.capture:
                slot, generation = self.slot_of_block[block]
                assert generation > 0
                rows[slot, offset] = (generation, tuple(lane.tokens[: position + 1]))
        lane.position += count
        named.update(lane.blocks[: -(-lane.position // size)])

    def _read(self, lane: Lane) -> None:
        size = self.config.block_tokens
        for position in range(lane.position):
            cell = self.cells[lane.blocks[position // size], position % size]
            assert cell == (lane.tokens[position], position), "KV of another token, or of another place"

    def complete(self) -> StepDone:
        step, tokens, rows, _, _, done = self.flights.popleft()
        self.rows.update(rows)
        self.passed[step.step_id] = done
        return StepDone(step_id=step.step_id, tokens=tokens)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        depth=st.integers(1, 2), num_blocks=st.integers(2, 16), max_running=st.integers(1, 6), extra=st.integers(0, 8),
        prefix_cache=st.sampled_from([True, True, False]), capture=st.sampled_from([True, True, True, False]),
        reserve=st.integers(0, 1), size=st.sampled_from([2, 4]),
    )  # fmt: skip
    def begin(self, depth, num_blocks, max_running, extra, prefix_cache, capture, reserve, size):
        self.config = SchedulerConfig(
            block_tokens=size, num_blocks=num_blocks, max_running=max_running, max_step_tokens=max_running + extra,
            pipeline_depth=depth, prefix_cache=prefix_cache, capture=capture, decode_reserve_blocks=reserve,
        )  # fmt: skip
        self.scheduler = Scheduler(self.config)
        self.runner = PagedRunner(self.config)
        self.trace = TraceRing(self.scheduler.config, 100_000)
        self.requests: dict[int, object] = {}
        self.finished: dict[int, FinishRequest] = {}
        self.rows: dict[int, list[tuple[int, ...]]] = {}
        self.emitted: dict[int, list[int]] = {}
        self.answers: deque[tuple[int, int]] = deque()
        self.kept: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.covered: dict[int, int] = {}
        self.covered_at_abort: dict[int, int] = {}
        self.queue: list[object] = []
        self.now = 1.0
        self.wake_at = float("inf")

    # -- rules

    @rule(
        shared=st.integers(0, 12), own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
        max_tokens=st.integers(1, 14), stops=st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
        min_tokens=st.integers(0, 4), priority=st.integers(0, 2), checks=st.booleans(), emits=st.booleans(),
        patience=st.sampled_from([1e9, None, 3.0, 0.0]), start=st.integers(-1, 6), copies=st.integers(1, 3),
        hold=st.booleans(),
    )  # fmt: skip
    def arrive(
        self, shared, own, max_tokens, stops, min_tokens, priority, checks, emits, patience, start, copies, hold
    ):
        prompt = [*([1, 2, 3, 1, 5, 0] * 2)[:shared], *own]
        room = self.config.num_blocks * self.config.block_tokens - len(prompt) + 1
        if room < 1:
            return
        max_tokens = min(max_tokens, room)
        for _ in range(copies):
            key = len(self.requests)
            fields = {} if self.config.prefix_cache else {"block_keys": ()}
            if patience is not None:
                fields["deadline"] = self.now + patience
            request = make_request(
                key, prompt, max_tokens, self.config.block_tokens, stop_ids=stops, priority=priority,
                min_tokens=min(min_tokens, max_tokens), checks_stops=checks, emits=emits or checks,
                start=min(start, len(prompt) - 1) if self.config.capture else -1, **fields,
            )  # fmt: skip
            self.requests[key] = request
            self.queue.append(request)
        self.turn(hold)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), hold=st.booleans())
    def abort(self, data, hold):
        keys = data.draw(st.lists(st.sampled_from(sorted(self.requests)), min_size=1, max_size=2))
        self.aborted.update(keys)
        self.queue.append(AbortRequested(keys=tuple(keys)))
        self.turn(hold)

    @precondition(lambda self: self.runner.flights)
    @rule(count=st.integers(1, 2), hold=st.booleans())
    def complete(self, count, hold):
        for _ in range(min(count, len(self.runner.flights))):
            self.queue.append(self.runner.complete())
        self.turn(hold)

    @precondition(lambda self: self.answers)
    @rule(count=st.integers(1, 3), match=st.sampled_from([False, False, False, True]), hold=st.booleans())
    def answer(self, count, match, hold):
        for _ in range(min(count, len(self.answers))):
            key, number = self.answers.popleft()
            if key in self.kept:
                continue
            if match:
                self.kept[key] = number
                self.queue.append(StopMatched(key=key, keep_tokens=number))
            else:
                self.queue.append(StopChecked(key=key, num_tokens=number))
        self.turn(hold)

    @rule(seconds=st.sampled_from([0.5, 4.0]))
    def time_passes(self, seconds):
        self.now += seconds
        if self.now >= self.wake_at:
            self.queue.append(TimerFired())
        self.turn(False)

    @rule()
    def flush(self):
        self.turn(False)

    # -- a turn

    def turn(self, hold):
        if hold or not self.queue:
            return
        events, self.queue = self.queue, []
        events = [msgspec.structs.replace(event, at=self.now) for event in events]
        self.cover(events)
        actions = self.scheduler.handle(events)
        self.trace.add(events, actions)
        self.scheduler.check()
        for action in actions:
            if isinstance(action, RunStep):
                self.runner.launch(action)
            elif isinstance(action, EmitTokens):
                self.emit(action)
            elif isinstance(action, CopyRows):
                for span in action.spans:
                    self.copy(span)
            elif isinstance(action, FinishRequest):
                self.finish(action)
            else:
                assert isinstance(action, WakeAt)
                self.wake_at = action.time

    def cover(self, events):
        """How far the first passes got, and had got when somebody was aborted."""
        self.covered_at_abort.clear()
        for event in events:
            if isinstance(event, StepDone):
                for key, position in self.runner.passed[event.step_id]:
                    self.covered[key] = max(self.covered.get(key, 0), position)
            elif isinstance(event, AbortRequested):
                for key in event.keys:
                    self.covered_at_abort.setdefault(key, self.covered.get(key, 0))

    def emit(self, action):
        for key, token in zip(action.keys, action.tokens, strict=True):
            assert key not in self.finished
            tokens = self.emitted.setdefault(key, [])
            tokens.append(token)
            if self.requests[key].checks_stops:
                self.answers.append((key, len(tokens)))

    def copy(self, span):
        assert span.key not in self.finished
        request = self.requests[span.key]
        rows = self.rows.setdefault(span.key, [])
        position = request.start + len(rows)
        assert span.offset == position % self.config.block_tokens
        assert 0 < span.count <= self.config.block_tokens - span.offset
        for offset in range(span.offset, span.offset + span.count):
            generation, row = self.runner.rows[span.slot, offset]
            assert generation == span.generation, "a row of another use of the slot"
            rows.append(row)

    def finish(self, end):
        key = end.key
        assert key not in self.finished
        self.finished[key] = end
        request = self.requests[key]
        whole = whole_output(request.tokens, request.max_tokens)
        count = len(end.token_ids)
        assert list(end.token_ids) == whole[:count]
        stops = [
            number + 1
            for number, token in enumerate(whole)
            if token in request.stop_ids and number + 1 >= request.min_tokens
        ]
        natural = min([*stops, request.max_tokens])
        assert count <= natural
        if end.reason == "stop" and end.matched_stop < 0:
            assert self.kept[key] == count
        elif end.reason == "stop":
            assert end.token_ids[-1] == end.matched_stop
            assert stops[0] == count
        elif end.reason == "length":
            assert count == request.max_tokens
            assert not stops
        elif end.reason == "abort":
            assert key in self.aborted
        else:
            assert end.reason == "deadline"
            assert self.now >= request.deadline
        if request.emits:
            emitted = self.emitted.get(key, [])
            assert emitted == whole[: len(emitted)]
            assert len(emitted) >= count
        else:
            assert key not in self.emitted
        rows = self.rows.get(key, [])
        if request.start < 0:
            assert not rows
            assert end.num_rows == 0
            return
        covered = (self.covered_at_abort if end.reason == "abort" else self.covered).get(key, 0)
        last = min(covered, len(request.tokens) + count - 1) if count else covered
        assert end.num_rows == max(last - request.start, 0)
        if end.reason in ("stop", "length"):
            assert end.num_rows == len(request.tokens) + count - 1 - request.start
        assert len(rows) >= end.num_rows
        tokens = (*request.tokens, *whole)
        for number, row in enumerate(rows[: end.num_rows]):
            assert row == tokens[: request.start + number + 1]

    @invariant()
    def timer_is_set(self):
        unseen = {event.key for event in self.queue if isinstance(event, RequestPrepared)}
        seen = [request for key, request in self.requests.items() if key not in self.finished and key not in unseen]
        live = [request.deadline for request in seen]
        if live and min(live) < float("inf"):
            assert self.wake_at <= min(live)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            while self.answers:
                self.answer(1, False, True)
            self.turn(False)
            if self.runner.flights:
                self.complete(1, False)
            elif not self.answers and not self.queue:
                break
        assert sorted(self.finished) == sorted(self.requests)
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.finished) == (0, 0, len(self.requests))
        assert stats.free_blocks + stats.idle_blocks == self.config.num_blocks
        sampled = sum(
            len(event.tokens) for events, _ in self.trace._turns for event in events if type(event) is StepDone
        )
        assert stats.generated_tokens + stats.dropped_tokens == sampled
        assert replay(self.trace.encode()) == len(self.trace._turns)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = machine_settings(160, 50)
