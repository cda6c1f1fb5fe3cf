"""One scheduler and its naive runner, for `pd_world.py`: what its requests become, and whether that is right."""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.cache.identity import block_keys
from fdasync.engine.prepare import salted
from fdasync.events.actions import (
    CopyRows,
    EmitTokens,
    FinishRequest,
    HashAgain,
    RunStep,
    SwapIn,
    SwapOut,
    TellBlocks,
    WakeAt,
)
from fdasync.events.catalog import Hashed, RequestPrepared, SwapDone
from fdasync.scheduler import Scheduler, SchedulerConfig
from tests.support.paged_runner import PagedRunner, namespace_of_version, whole_output

if TYPE_CHECKING:
    from tests.scheduler.disagg.pd_world import Lease, World

#: how a sample may end without anything that its caller could see
NOTHING = ("no_lease", "never_lease", "lease_lost")


class Side:
    """One instance: its scheduler, its runner, and what its requests have become."""

    def __init__(self, name: str, config: SchedulerConfig, world: World) -> None:
        self.name, self.config, self.world = name, config, world
        self.scheduler = Scheduler(config)
        self.runner = PagedRunner(config)
        self.requests: dict[int, RequestPrepared] = {}
        self.finished: dict[int, FinishRequest] = {}
        self.rows: dict[int, list[Any]] = {}
        self.emitted: dict[int, list[int]] = {}
        self.answers: deque[tuple[int, int]] = deque()
        self.kept: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.hashes: list[HashAgain] = []
        self.queue: list[Any] = []
        self.wake_at = float("inf")
        self.version = 0
        self.paused = False
        # the decode side's leases, by its own group
        self.leases: dict[int, Lease] = {}

    def next_key(self) -> int:
        return len(self.requests)

    def add(self, request: RequestPrepared) -> None:
        self.requests[request.key] = request
        self.runner.salts[request.key] = request.salt

    @property
    def is_quiet(self) -> bool:
        return self.runner.is_quiet() and not (self.answers or self.queue or self.hashes)

    # -- a turn

    def turn(self) -> None:
        while self.queue:
            events, self.queue = self.queue, []
            events = [msgspec.structs.replace(event, at=self.world.now) for event in events]
            actions = self.scheduler.handle(events)
            self.scheduler.check()
            for action in actions:
                self.perform(action)

    def perform(self, action: Any) -> None:
        if isinstance(action, RunStep):
            assert not self.paused
            self.runner.launch(action)
        elif isinstance(action, SwapOut | SwapIn):
            self.runner.copy(action)
        elif isinstance(action, EmitTokens):
            for key, token in zip(action.keys, action.tokens, strict=True):
                self.emit(key, token)
        elif isinstance(action, CopyRows):
            for span in action.spans:
                self.copy(span)
        elif isinstance(action, FinishRequest):
            self.finish(action)
        elif isinstance(action, HashAgain):
            self.hashes.append(action)
        elif isinstance(action, WakeAt):
            self.wake_at = action.time
        elif not isinstance(action, TellBlocks):
            self.world.post(self, action)

    def emit(self, key: int, token: int) -> None:
        assert key not in self.finished
        tokens = self.emitted.setdefault(key, [])
        tokens.append(token)
        if self.requests[key].checks_stops:
            self.answers.append((key, len(tokens)))

    def copy(self, span: Any) -> None:
        assert span.key not in self.finished
        request = self.requests[span.key]
        rows = self.rows.setdefault(span.key, [])
        assert span.start == request.start + len(rows)
        assert span.offset == span.start % self.config.block_tokens
        for at in range(span.offset, span.offset + span.count):
            number, offset = divmod(at, self.config.block_tokens)
            generation, row = self.runner.rows[span.slots[number], offset]
            assert generation == span.generations[number], "a row of another use of the slot"
            assert row.salt == request.salt
            rows.append(row.tokens)

    def finish(self, end: FinishRequest) -> None:
        key = end.key
        assert key not in self.finished, "a sample ended twice"
        self.finished[key] = end
        request = self.requests[key]
        whole = whole_output(request.tokens, request.max_tokens)
        count = len(end.token_ids)
        assert list(end.token_ids) == whole[:count]
        stops = [
            number
            for number, token in enumerate(whole, 1)
            if token in request.stop_ids and number >= request.min_tokens
        ]
        assert count <= min([*stops, request.max_tokens])
        if end.reason == "stop":
            assert self.kept[key] == count if end.matched_stop < 0 else stops[0] == count
        elif end.reason == "length":
            assert count == request.max_tokens
        elif end.reason == "handed_over":
            assert request.decoders
            assert count == 1
        elif end.reason in NOTHING:
            assert count == 0
            assert end.note
            # what went on here ends like anybody's
            assert end.reason in ("no_lease", "never_lease") or key not in self.world.started.get(self.name, {})
        else:
            assert end.reason == "deadline" or key in self.aborted
        if request.emits:
            assert self.emitted.get(key, []) == whole[: len(self.emitted.get(key, []))]
            assert len(self.emitted.get(key, [])) >= count
        rows = self.rows.get(key, [])
        if request.start < 0:
            assert not rows
        elif end.reason in ("stop", "length"):
            assert end.num_rows == len(request.tokens) + count - 1 - request.start
        assert len(rows) >= end.num_rows
        tokens = (*request.tokens, *whole)
        for number, row in enumerate(rows[: end.num_rows]):
            assert row == tokens[: request.start + number + 1]

    # -- things that end

    def end_copy(self, number: int) -> None:
        self.runner.end_copy(number)
        self.queue.append(SwapDone(copy_id=number, seconds=0.001, kv_nbytes=0, aux_nbytes=0))

    def end_hash(self) -> None:
        action = self.hashes.pop(0)
        namespace = namespace_of_version(self.version)
        root = salted(namespace, action.salt)
        keys = tuple(block_keys(root, array("i", action.tokens), self.config.block_tokens))
        self.queue.append(Hashed(key=action.key, namespace=namespace, root=root, block_keys=keys))
