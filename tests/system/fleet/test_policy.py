"""What a request waited goes with it from instance to instance."""

from __future__ import annotations

import asyncio
from random import Random

import msgspec
import pytest
from fdasync_fleet.router.request import RoutedRequest
from fdasync_fleet.router.router import Router
from fdasync_fleet.testing.sim.network import SimNetwork
from fdasync_fleet.testing.sim.transport import SimFabric, SimFaults, SimTransport

from fdasync import Instance, SamplingParams
from fdasync.events.catalog import LeaseAsked
from fdasync.events.trace import Turn
from fdasync.testing import run_sim, synthetic_config


def test_what_a_request_waited_at_router_and_prefill_instance_is_known_at_its_decode_instance(monkeypatch):
    """One request at a time at P: the others wait at its frontend. D knows of all when their callers asked."""
    init = RoutedRequest.__init__

    def asked_before(self, *given):
        init(self, *given)
        # as if the router had held it for so long
        self.started_at -= 5.0

    monkeypatch.setattr(RoutedRequest, "__init__", asked_before)

    async def main():
        network, fabric = SimNetwork(Random(1)), SimFabric(Random(2), SimFaults())
        prefill, decode = (
            Instance(
                synthetic_config(
                    {"step_s": step_s}, role=role, host_blocks=16, max_running=1, max_requests=lanes,
                    trace_turns=1 << 20,
                ),
                listen=f"ipc://{role}",
                wire=network.wire(role),
                transports=[SimTransport(fabric)],
            )
            for role, step_s, lanes in (("prefill", 0.3, 1), ("decode", 0.001, 9))
        )  # fmt: skip
        router = Router([prefill.address, decode.address], wire=network.wire("router"), seed=1)
        async with prefill, decode, router:
            called = []

            async def ask(number):
                await asyncio.sleep(0.05 * number)
                called.append(asyncio.get_running_loop().time() - 5.0)
                await router.complete([number, 2, 3, 4, 5], SamplingParams(max_tokens=3, ignore_eos=True))

            await asyncio.gather(*map(ask, range(3)))
            lines = decode.engine.trace().encode().splitlines()[1:]
            events = [event for line in lines for event in msgspec.json.decode(line, type=Turn).events]
            asked = [event for event in events if isinstance(event, LeaseAsked)]
            arrived = [event.requests[0].arrived_at for event in asked]
            assert arrived == pytest.approx(called, abs=0.01)
            # the last one stood in line for most of the steps of the others
            assert asked[2].at - arrived[2] > 5.4

    run_sim(main())
