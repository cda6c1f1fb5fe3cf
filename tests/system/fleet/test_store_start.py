"""Instances start without their stores."""

from __future__ import annotations

import asyncio
from random import Random

from fdasync_fleet.router.router import Router
from fdasync_fleet.testing.sim.network import SimNetwork
from fdasync_fleet.testing.sim.transport import SimFabric, SimFaults, SimTransport

from fdasync import Instance
from fdasync.testing import check_sample, oracle_of, until
from tests.engine.test_store_start import GONE, PARAMS, Opens, now, play, prompt, store_config


def test_prefill_and_decode_instances_start_without_their_stores():
    async def work():
        network, fabric = SimNetwork(Random(1)), SimFabric(Random(2), SimFaults())
        stores = [Opens("hang"), Opens(GONE)]
        instances = [
            Instance(
                store_config(role=role), listen=f"ipc://m{number}", wire=network.wire(f"m{number}"), store=store,
                transports=[SimTransport(fabric)],
            )
            for number, (role, store) in enumerate(zip(("prefill", "decode"), stores, strict=True))
        ]  # fmt: skip
        p, d = instances
        async with p, d:
            assert now() < 3.0
            async with Router([p.address, d.address], wire=network.wire("router"), seed=1) as router:
                result = await router.complete(prompt(1), PARAMS)
                check_sample(result.samples[0], prompt(1), PARAMS, oracle_of(p.engine.config))
                written = p.engine.stats().scheduler.written_blocks
                assert written == 0
                await asyncio.sleep(15.0)
                await router.complete(prompt(2), PARAMS)
                await until(lambda: p.engine.stats().scheduler.written_blocks > 0, every_s=0.01)
        assert [len(store.opened_at) for store in stores] == [2, 2]

    play(work)
