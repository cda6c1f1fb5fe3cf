"""A decode instance that sleeps beside one that does not."""

from __future__ import annotations

import asyncio
from random import Random

from fdasync_fleet.router.router import Router
from fdasync_fleet.testing.sim.network import SimNetwork
from fdasync_fleet.testing.sim.transport import SimFabric, SimFaults, SimTransport

from fdasync import Instance, SamplingParams
from fdasync.testing import synthetic_config
from fdasync.testing.sim.loop import run_sim

BRIEF = SamplingParams(max_tokens=8)


def test_requests_go_to_another_instance_than_the_one_that_sleeps():
    async def main():
        network, fabric = SimNetwork(Random(1)), SimFabric(Random(2), SimFaults())
        p, asleep, awake = [
            Instance(
                synthetic_config({"step_s": 0.05}, role=role, host_blocks=16),
                listen=f"ipc://m{number}",
                wire=network.wire(f"m{number}"),
                transports=[SimTransport(fabric)],
            )
            for number, role in enumerate(("prefill", "decode", "decode"))
        ]
        async with (
            asleep,
            awake,
            p,
            Router([p.address, asleep.address, awake.address], wire=network.wire("router"), seed=1) as router,
        ):
            await asleep.engine.sleep(1)
            async with asyncio.timeout(30.0):
                results = await asyncio.gather(*[router.complete((number, *range(20)), BRIEF) for number in range(6)])
            assert {result.finish_reason for result in results} == {"length"}
            granted = [one.engine.stats().scheduler.leases_granted for one in (asleep, awake)]
            assert granted == [0, 6]
            # it gets its share when it is awake
            await asleep.engine.wake()
            await asyncio.gather(*[router.complete((number, *range(20)), BRIEF) for number in range(50, 56)])
            assert asleep.engine.stats().scheduler.leases_granted > 0

    run_sim(main())
