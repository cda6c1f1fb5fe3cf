"""One scheduler and its naive runner, for `pd_world.py`: what its requests become, and whether that is right."""

from __future__ import annotations

from array import array
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
from fdasync.events.catalog import Hashed, SwapDone
from tests.scheduler.ledger import Ledger
from tests.support.paged_runner import namespace_of_version

if TYPE_CHECKING:
    from fdasync.scheduler import SchedulerConfig
    from tests.scheduler.disagg.pd_world import Lease, World

#: how a sample may end without anything that its caller could see
NOTHING = ("no_lease", "never_lease", "lease_lost")


class Side(Ledger):
    """One instance."""

    def __init__(self, name: str, config: SchedulerConfig, world: World) -> None:
        self.name, self.world = name, world
        self.open(config)
        self.paused = False
        # the decode side's leases, by its own group
        self.leases: dict[int, Lease] = {}

    def next_key(self) -> int:
        return len(self.requests)

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
            if self.scheduler.pausing.stage == "clear":
                # another program has the memory
                self.runner.cells.clear()

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

    def finish(self, end: FinishRequest) -> None:
        super().finish(end)
        count = len(end.token_ids)
        if end.reason == "handed_over":
            assert self.requests[end.key].decoders
            assert count == 1
        elif end.reason in NOTHING:
            assert count == 0
            assert end.note
            # what went on here ends like anybody's
            assert end.reason in ("no_lease", "never_lease") or end.key not in self.world.started.get(self.name, {})
        else:
            assert end.reason in ("stop", "length", "abort", "deadline")

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
