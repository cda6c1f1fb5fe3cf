"""What a router tells of its instances: `Router.stats()`, from heartbeats."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from fdasync_fleet.testing.patience import LEASES, LINKS

import fdasync
from fdasync import Instance, SamplingParams
from fdasync.errors import EngineClosed
from fdasync.testing import synthetic_config

if TYPE_CHECKING:
    from pathlib import Path


async def test_stats_tell_what_instances_did_and_which_are_away(tmp_path: Path) -> None:
    def instance(role: str, name: str) -> Instance:
        config = synthetic_config(role=role, host_blocks=64, leases=LEASES)
        return Instance(config, listen=f"ipc://{tmp_path}/{name}", name=name, links=LINKS, transport="shm")

    router = fdasync.connect([f"ipc://{tmp_path}/p0", f"ipc://{tmp_path}/d0"], links=LINKS)
    with pytest.raises(EngineClosed):
        router.stats()
    async with instance("prefill", "p0"), instance("decode", "d0") as decode, router:
        result = await router.complete(list(range(40)), SamplingParams(max_tokens=9), deadline_s=300)
        until = asyncio.get_running_loop().time()
        async with asyncio.timeout(300):
            while any(one.status_at < until for one in router.stats().instances):  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0.05)
        stats = router.stats()
        first, second = stats.instances
        assert (first.name, first.role, first.state, first.live) == ("p0", "prefill", "running", 0)
        assert (second.name, second.role, second.is_up, second.problem) == ("d0", "decode", True, "")
        assert stats.live == 0
        assert stats.dropped == ()
        assert first.status is not None
        assert second.status is not None
        assert first.status.asked == second.status.stats.scheduler.leases_granted == 1
        # the clock is one of milliseconds
        assert 0 <= first.status.asked_s == first.status.asked_most_s < 300
        assert second.status.stats.tokens == len(result.token_ids) == 9
        assert second.status.stats.scheduler.received_blocks == 10
        assert second.status.received_nbytes > 0
        assert first.status.received_nbytes == 0
        assert second.known_blocks >= 10
        await decode.aclose()
        async with asyncio.timeout(300):
            while router.stats().instances[1].is_up:  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0.01)
        assert router.stats().instances[1].state == "away"
        assert router.stats().instances[1].problem
