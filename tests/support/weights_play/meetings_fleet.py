"""A router over two instances that callers meet on. See `meetings.py`. Called by
`plugins/fdasync-fleet/tests/router/test_router_meetings.py`."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

from fdasync_fleet.testing.sim.network import SimNetwork
from fdasync_fleet.testing.sim.transport import SimFabric, SimTransport

from fdasync import Instance, Router, RouterConfig
from fdasync.testing import FaultRunner, PassModel, check_idle, check_sample, oracle_of, synthetic_config
from tests.support.broadcast_runner import GROUP, runner_of
from tests.support.weights_play.meetings import PARAMS, PROMPT, UPDATE_S, Stage
from tests.support.weights_play.meetings_engine import state_of
from tests.support.weights_play.play import FIRST

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from fdasync import Sample
    from tests.support.broadcast_runner import BroadcastRunner
    from tests.support.weights_play.explained import State


class FleetStage(Stage):
    """See the module."""

    def __init__(self, root: Path) -> None:
        # a router hears of an update in parts that lapsed when it goes on with it
        super().__init__(root, 2, merges=True, settle_s=UPDATE_S + 1.0)
        self._config = synthetic_config(
            {"step_s": 0.01, "copy_s": 0.003, "load_s": 0.05, "sleep_s": 0.05, "num_blocks": 32, "weights_id": FIRST},
            role="mixed", host_blocks=32, model=str(root / f"w-{FIRST}"), max_running=4, update_deadline_s=UPDATE_S,
            request_deadline_s=3600.0, seed=1,
        )  # fmt: skip
        self._passes = [PassModel(4, FIRST), PassModel(4, FIRST)]
        self._inner: list[BroadcastRunner] = []
        self._instances: list[Instance] = []

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Router]:
        network, fabric = SimNetwork(Random(1)), SimFabric(Random(1))
        async with AsyncExitStack() as stack:
            for number, passes in enumerate(self._passes):
                inner = runner_of(self._config)
                runner = FaultRunner(
                    inner, Random(1), on_launch=passes.launched, on_copied=passes.copied,
                    on_weights=lambda passes=passes, inner=inner: passes.new_weights(inner.weights_id),
                )  # fmt: skip
                instance = Instance(
                    self._config, listen=f"ipc:///run/m{number}", name=f"m{number}", runner=runner,
                    wire=network.wire(f"m{number}"), transports=[SimTransport(fabric)],
                )  # fmt: skip
                self._inner.append(inner)
                self._instances.append(await stack.enter_async_context(instance))
            addresses = [instance.address for instance in self._instances]
            self._router = Router(
                addresses,
                RouterConfig(request_deadline_s=3600.0, command_s=UPDATE_S),
                wire=network.wire("router"),
                seed=1,
            )
            yield await stack.enter_async_context(self._router)

    def state(self) -> State:
        states = [
            state_of(instance.engine, inner.weights_id, joined=GROUP.name in inner.groups)
            for instance, inner in zip(self._instances, self._inner, strict=True)
        ]
        assert states[0] == states[1], f"the instances are not alike: {states}"
        stats = self._router.stats()
        assert not stats.dropped, stats.dropped
        assert self._router.facts().weight_version == states[0].version
        load = self._router.load()
        assert (load.doing, load.asleep) == (states[0].doing, states[0].asleep), (
            f"the router says {load.doing}: {states[0]}"
        )
        return states[0]

    def check(self, sample: Sample) -> None:
        seen = [passes.seen[PARAMS.seed, 0] for passes in self._passes if (PARAMS.seed, 0) in passes.seen]
        check_sample(sample, PROMPT, PARAMS, oracle_of(self._config), seen=seen[0] if seen else [])

    def check_idle(self) -> None:
        for instance in self._instances:
            check_idle(instance.engine)
