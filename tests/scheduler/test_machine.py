"""The scheduler against a naive paged runner, host and store, in any order of events.

Requests of two tenants come and go, blocks move between device, host and a store that fails, forgets and is late;
planning pauses, and the weights change under everybody. `tests/support/paged_runner.py` finds what is computed from
wrong KV.
"""

from __future__ import annotations

from array import array
from typing import get_args

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fdasync.cache.identity import block_keys
from fdasync.engine.prepare import salted
from fdasync.events.actions import (
    CopyRows,
    EmitTokens,
    FetchBlocks,
    FinishRequest,
    HashAgain,
    LookUp,
    RunStep,
    StoreBlocks,
    SwapIn,
    SwapOut,
    WakeAt,
)
from fdasync.events.catalog import (
    AbortRequested,
    CacheResetRequested,
    FetchEnded,
    Hashed,
    LateTransferEnded,
    LookedUp,
    PauseRequested,
    RequestPrepared,
    ResumeRequested,
    StepDone,
    StopChecked,
    StopMatched,
    StoreEnded,
    SwapDone,
    TimerFired,
    WeightsChanged,
)
from fdasync.events.trace import TraceRing
from fdasync.request import PauseMode
from fdasync.scheduler import SchedulerConfig
from tests.scheduler.ledger import Ledger
from tests.scheduler.machine_end import EndOfPlay
from tests.scheduler.table import span
from tests.support.helpers import POLICIES, machine_settings, make_request
from tests.support.paged_runner import VOCAB, namespace_of_version

SHARED = [1, 2, 3, 1, 5, 0] * 2
MODES = st.sampled_from(get_args(PauseMode))
SECONDS = st.sampled_from([0.0, 0.001, 0.3])


class SchedulerMachine(EndOfPlay, Ledger, RuleBasedStateMachine):
    """See the module. `num_host`, `with_store`: None is either."""

    @initialize(
        depth=st.integers(1, 2), num_blocks=st.integers(2, 16), max_running=st.integers(1, 6), extra=st.integers(0, 8),
        prefix_cache=st.sampled_from([True, True, True, False]), capture=st.sampled_from([True, True, True, False]),
        reserve=st.integers(0, 1), size=st.sampled_from([2, 4]), num_host=st.sampled_from([0, 1, 2, 3, 5, 8, 20]),
        store=st.sampled_from([True, True, False]), through=st.sampled_from(["off", "prompt", "all", "all"]),
        back=st.booleans(), computed_per_s=st.sampled_from([0.1, 10.0, 1e4]), fetch_min=st.sampled_from([0, 0, 5]),
        policy=POLICIES,
    )  # fmt: skip
    def begin(
        self, depth, num_blocks, max_running, extra, prefix_cache, capture, reserve, size, num_host, store, through,
        back, computed_per_s, fetch_min, policy,
    ):  # fmt: skip
        num_host = num_host if prefix_cache else 0
        config = SchedulerConfig(
            block_tokens=size, num_blocks=num_blocks, max_running=max_running, max_step_tokens=max_running + extra,
            pipeline_depth=depth, prefix_cache=prefix_cache, capture=capture, decode_reserve_blocks=reserve,
            namespace=namespace_of_version(0), num_host_blocks=num_host, block_nbytes=1000,
            store=store and num_host > 0, write_through=through, write_back=back, fetch_min_tokens=fetch_min,
            prefill_tokens_per_s=computed_per_s, policy=policy[0], policy_config=policy[1],
        )  # fmt: skip
        self.open(config)
        self.trace = TraceRing(self.scheduler.config, 100_000)
        self.lookups: dict[int, LookUp] = {}
        self.late_fetches: list[int] = []
        self.late_puts: list[int] = []
        self.started: set[int] = set()
        self.winding: set[int] | None = None
        self.covered: dict[int, int] = {}
        self.covered_at_abort: dict[int, int] = {}
        self.now = 1.0

    # -- requests

    @rule(
        shared=st.integers(0, 12), own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
        max_tokens=st.integers(1, 14), stops=st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
        min_tokens=st.integers(0, 4), priority=st.integers(0, 2), checks=st.booleans(), emits=st.booleans(),
        patience=st.sampled_from([1e9, None, 3.0, 0.0]), start=st.integers(-1, 6), copies=st.integers(1, 3),
        hold=st.booleans(), salt=st.sampled_from(["", "", "", "s"]), stale=st.sampled_from([False, False, False, True]),
    )  # fmt: skip
    def arrive(
        self, shared, own, max_tokens, stops, min_tokens, priority, checks, emits, patience, start, copies, hold, salt,
        stale,
    ):  # fmt: skip
        prompt = [*SHARED[:shared], *own]
        room = self.config.num_blocks * self.config.block_tokens - len(prompt) + 1
        if room < 1:
            return
        max_tokens = min(max_tokens, room)
        namespace = namespace_of_version(max(self.version - 1, 0) if stale else self.version)
        root = salted(namespace, salt)
        keys = block_keys(root, prompt, self.config.block_tokens) if self.config.prefix_cache else []
        for _ in range(copies):
            key = len(self.requests)
            fields = {} if patience is None else {"deadline": self.now + patience}
            request = make_request(
                key, prompt, max_tokens, self.config.block_tokens, stop_ids=stops, priority=priority,
                min_tokens=min(min_tokens, max_tokens), checks_stops=checks, emits=emits or checks,
                start=min(start, len(prompt) - 1) if self.config.capture else -1, namespace=namespace, root=root,
                salt=salt, block_keys=tuple(keys), **fields,
            )  # fmt: skip
            self.add(request)
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

    @rule(seconds=st.sampled_from([0.01, 0.5, 4.0]))
    def time_passes(self, seconds):
        self.now += seconds
        if self.now >= self.wake_at:
            self.queue.append(TimerFired())
        self.turn(False)

    @rule()
    def flush(self):
        self.turn(False)

    # -- tiers: everything ends in any order, and some of it badly

    @precondition(lambda self: self.runner.copies)
    @rule(data=st.data(), hold=st.booleans())
    def copy_ends(self, data, hold):
        number = data.draw(st.sampled_from(sorted(self.runner.copies)))
        self.runner.end_copy(number)
        self.queue.append(SwapDone(copy_id=number, seconds=0.001, kv_nbytes=0, aux_nbytes=0))
        self.turn(hold)

    @precondition(lambda self: self.lookups)
    @rule(data=st.data(), answered=st.sampled_from([True, True, True, False]), seconds=SECONDS, hold=st.booleans())
    def lookup_ends(self, data, answered, seconds, hold):
        number = data.draw(st.sampled_from(sorted(self.lookups)))
        lookup = self.lookups.pop(number)
        count = self.runner.count(lookup.namespace, lookup.keys) if answered else 0
        self.queue.append(LookedUp(lookup_id=number, count=count, seconds=seconds, answered=answered))
        self.turn(hold)

    def unreported(self, transfers, late):
        return sorted(set(transfers) - set(late))

    @precondition(lambda self: self.unreported(self.runner.fetches, self.late_fetches))
    @rule(data=st.data(), fails=st.sampled_from([0, 0, 1, 9]), late=st.sampled_from([False, False, True]),
          seconds=SECONDS, hold=st.booleans())  # fmt: skip
    def fetch_ends(self, data, fails, late, seconds, hold):
        number = data.draw(st.sampled_from(self.unreported(self.runner.fetches, self.late_fetches)))
        arrived = self.some(data, self.runner.has(number), fails)
        self.runner.end_fetch(number, arrived, late=late)
        if late:
            self.late_fetches.append(number)
        self.queue.append(FetchEnded(fetch_id=number, arrived=tuple(arrived), late=late, seconds=seconds, nbytes=0))
        self.turn(hold)

    @precondition(lambda self: self.unreported(self.runner.puts, self.late_puts))
    @rule(data=st.data(), fails=st.sampled_from([0, 0, 1, 9]), late=st.sampled_from([False, False, True]),
          hold=st.booleans())  # fmt: skip
    def put_ends(self, data, fails, late, hold):
        number = data.draw(st.sampled_from(self.unreported(self.runner.puts, self.late_puts)))
        stored = self.some(data, [True] * len(self.runner.puts[number][0].keys), fails)
        self.runner.end_put(number, stored, late=late)
        if late:
            self.late_puts.append(number)
        self.queue.append(StoreEnded(put_id=number, stored=tuple(stored), late=late, seconds=0.001, nbytes=0))
        self.turn(hold)

    @staticmethod
    def some(data, can, fails):
        """Which of them succeed: `fails` of those that can do not."""
        bad = data.draw(st.lists(st.integers(0, len(can) - 1), max_size=fails)) if fails else []
        return [ok and at not in bad for at, ok in enumerate(can)]

    @precondition(lambda self: self.late_fetches or self.late_puts)
    @rule(data=st.data(), fails=st.sampled_from([0, 1, 9]), hold=st.booleans())
    def lease_returns(self, data, fails, hold):
        number = data.draw(st.sampled_from(sorted(self.late_fetches + self.late_puts)))
        if number in self.late_fetches:
            self.late_fetches.remove(number)
            held = self.runner.fetches[number][1]
            can = self.runner.has(number)
            end = self.runner.end_fetch
        else:
            self.late_puts.remove(number)
            put, _, held = self.runner.puts[number]
            can = [True] * len(put.keys)
            end = self.runner.end_put
        some = self.some(data, can, fails)
        # what had arrived before has
        arrived = [ok or at not in held for at, ok in enumerate(some)]
        end(number, arrived, late=False)
        self.queue.append(LateTransferEnded(transfer_id=number, arrived=tuple(arrived)))
        self.turn(hold)

    @precondition(lambda self: self.config.store)
    @rule(salt=st.sampled_from(["", "s"]), more=st.lists(st.integers(0, VOCAB - 1), max_size=2))
    def others_store(self, salt, more):
        """Another engine with these weights wrote blocks of a prompt."""
        self.runner.write_for_others([*SHARED, *more], salt)

    @precondition(lambda self: self.runner.store)
    @rule(data=st.data())
    def store_forgets(self, data):
        del self.runner.store[data.draw(st.sampled_from(list(self.runner.store)))]

    # -- weights

    @precondition(lambda self: self.hashes)
    @rule(stale=st.sampled_from([False, False, True]), hold=st.booleans())
    def hash_ends(self, stale, hold):
        action = self.hashes.pop(0)
        namespace = namespace_of_version(max(self.version - 1, 0) if stale else self.version)
        root = salted(namespace, action.salt)
        keys = tuple(block_keys(root, array("i", action.tokens), self.config.block_tokens))
        self.queue.append(Hashed(key=action.key, namespace=namespace, root=root, block_keys=keys))
        self.turn(hold)

    @rule(mode=MODES, hold=st.booleans())
    def pause(self, mode, hold):
        if mode == "abort":
            self.aborted.update(key for key in self.requests if key not in self.finished)
        self.queue.append(PauseRequested(mode=mode))
        self.turn(hold)

    @rule(hold=st.booleans())
    def resume(self, hold):
        self.queue.append(ResumeRequested())
        self.turn(hold)

    @rule(hold=st.booleans())
    def reset_cache(self, hold):
        self.queue.append(CacheResetRequested())
        self.turn(hold)

    @rule(data=st.data(), how=st.sampled_from(["keep", "keep", "abort"]), resume=st.booleans(), copies=st.booleans())
    def update(self, data, how, resume, copies):
        """As the engine does it: pause, let steps (and most often copies) end, load, go on in the same turn."""
        self.queue.append(PauseRequested())
        self.turn(False)
        while self.runner.flights:
            self.complete(1, False)
        while copies and self.runner.copies:
            self.copy_ends(data, False)
        live = [key for key in self.requests if key not in self.finished]
        if how == "abort" and live:
            self.aborted.update(live)
            self.queue.append(AbortRequested(keys=tuple(live)))
            self.turn(False)
        self.version += 1
        self.runner.load(self.version)
        version, namespace = str(self.version), namespace_of_version(self.version)
        self.queue.append(WeightsChanged(version=version, namespace=namespace, weights_id=f"of {version}"))
        if resume:
            self.queue.append(ResumeRequested())
        self.turn(False)

    # -- a turn

    def turn(self, hold):
        if hold or not self.queue:
            return
        events, self.queue = self.queue, []
        events = [msgspec.structs.replace(event, at=self.now) for event in events]
        self.cover(events)
        queues = self.scheduler.queues
        loading = {*queues.loading, *queues.loaded}
        actions = self.scheduler.handle(events)
        self.trace.add(events, actions)
        self.scheduler.check()
        for action in actions:
            if isinstance(action, RunStep):
                self.runner.launch(action)
            elif isinstance(action, EmitTokens):
                for key, token in zip(action.keys, action.tokens, strict=True):
                    self.emit(key, token)
            elif isinstance(action, CopyRows):
                for span in action.spans:
                    self.copy(span)
            elif isinstance(action, FinishRequest):
                self.finish(action)
            elif isinstance(action, SwapOut | SwapIn):
                assert self.scheduler.pausing.stage != "paused", "a copy was begun while paused"
                self.runner.copy(action)
            elif isinstance(action, LookUp):
                assert action.lookup_id not in self.lookups
                assert 0 < len(set(action.keys)) == len(action.keys)
                assert action.deadline >= self.now
                self.lookups[action.lookup_id] = action
            elif isinstance(action, FetchBlocks):
                assert action.deadline >= self.now
                self.runner.fetch(action)
            elif isinstance(action, StoreBlocks):
                self.runner.put(action)
            elif isinstance(action, HashAgain):
                assert all(action.key != other.key for other in self.hashes), "it is being hashed already"
                self.hashes.append(action)
            else:
                assert isinstance(action, WakeAt)
                self.wake_at = action.time
        if self.paused():
            assert not any(isinstance(action, RunStep) for action in actions)
        self.check_pause(events, actions, loading)
        if isinstance(events[-1], CacheResetRequested) and not any(isinstance(action, RunStep) for action in actions):
            assert not any(block.key for block in self.scheduler.index.pool.live())

    def check_pause(self, events, actions, loading):
        """What the last pause in these events left running, and whom one that waits lets start."""
        modes = [event.mode for event in events if isinstance(event, PauseRequested)]
        if any(isinstance(event, ResumeRequested) for event in events):
            self.winding = None
        if modes and not any(isinstance(event, ResumeRequested) for event in events):
            stats = self.scheduler.stats()
            if modes[-1] == "abort":
                last = max(at for at, event in enumerate(events) if isinstance(event, PauseRequested))
                later = {event.key for event in events[last:] if isinstance(event, RequestPrepared)}
                assert set(self.requests) - set(self.finished) <= later
            if modes[-1] == "retract":
                # what is left has its last token in flight, or waits for a stop answer
                assert stats.running == len(self.scheduler.queues.tail)
            if self.winding is None and set(modes) == {"wait"} and not stats.paused:
                self.winding = self.started | loading
        for step in [action for action in actions if isinstance(action, RunStep)]:
            starts = {start.key for start in step.starts}
            assert self.winding is None or starts <= self.winding, "a request that had not begun was started"
            self.started |= starts
        if self.paused():
            self.winding = None

    def paused(self):
        return self.scheduler.stats().paused

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
            elif isinstance(event, PauseRequested) and event.mode == "abort":
                for key in self.requests:
                    self.covered_at_abort.setdefault(key, self.covered.get(key, 0))

    def finish(self, end):
        super().finish(end)
        key, count = end.key, len(end.token_ids)
        request = self.requests[key]
        assert end.reason in ("stop", "length", "abort") or (end.reason == "deadline" and self.now >= request.deadline)
        self.check_spans(end)
        assert sum(end.cached_tokens) < len(request.tokens) + max(count, 1)
        assert all(tokens >= 0 and tokens % self.config.block_tokens == 0 for tokens in end.cached_tokens)
        if request.start >= 0:
            covered = (self.covered_at_abort if end.reason == "abort" else self.covered).get(key, 0)
            last = min(covered, len(request.tokens) + count - 1) if count else covered
            assert end.num_rows == max(last - request.start, 0)

    def check_spans(self, end):
        """Where the weights changed under the returned tokens."""
        ran = self.runner.sampled.get(end.key, [])[: len(end.token_ids)]
        spans = [span(at, str(version)) for at, version in enumerate(ran) if at == 0 or ran[at - 1] != version]
        assert list(end.spans) == spans

    @invariant()
    def timer_is_set(self):
        unseen = {event.key for event in self.queue if isinstance(event, RequestPrepared)}
        seen = [request for key, request in self.requests.items() if key not in self.finished and key not in unseen]
        live = [request.deadline for request in seen]
        if live and min(live) < float("inf"):
            assert self.wake_at <= min(live)


TestSchedulerMachine = pytest.mark.heavy("calls in orders that nobody wrote down")(SchedulerMachine.TestCase)
TestSchedulerMachine.settings = machine_settings(400, 50)
