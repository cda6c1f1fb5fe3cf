"""How long links wait for whom: routers stand still with their process, dead ones tell by their connection."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from link_world import World, note, send_all, settle

from fdasync.testing.sim.loop import run_sim


def world_of_a_router(**config):
    """`a` is a router that dialed the instance `b`."""
    world = World(**config)
    world.a.said = msgspec.structs.replace(world.a.said, role="router")
    return world


async def stand_still(world, seconds, *, timers_first):
    """Nothing of a's process runs for so long, but for ZMQ's thread, which keeps what comes."""
    world.network.freeze(world.wire_a)
    world.links_a._timer.cancel()
    await asyncio.sleep(seconds)
    world.network.thaw(world.wire_a)
    if not timers_first:
        await asyncio.sleep(0)
    world.links_a._tick()


@pytest.mark.parametrize("seconds", [4.0, 200.0])
@pytest.mark.parametrize("timers_first", [True, False])
def test_a_router_whose_loop_stood_still_loses_nothing(seconds, timers_first):
    async def main():
        world = world_of_a_router()
        peer = await world.connect()
        back = world.b.up[0]
        sending = asyncio.create_task(send_all(back, range(50)))
        await asyncio.sleep(0)
        standing = asyncio.create_task(stand_still(world, seconds, timers_first=timers_first))
        for number in range(50, 90):
            await asyncio.sleep(0.05)
            back.send(note(number))
        await standing
        await sending
        await back.acknowledged(2.0)
        await settle(5.0)
        assert peer.is_up
        assert world.a.log == ["up b"]
        assert world.b.log == ["up a"]
        assert world.a.got == list(range(90))
        await world.aclose()

    run_sim(main())


def test_a_router_of_which_nothing_is_heard_is_lost_in_its_own_time():
    async def main():
        world = world_of_a_router(router_lost_s=20.0)
        await world.connect()
        world.network.partition(world.wire_a, world.wire_b)
        await asyncio.sleep(19.0)
        assert world.b.log == ["up a"]
        # it has lost the instance long ago
        assert world.a.log == ["up b", "lost b"]
        await asyncio.sleep(1.2)
        assert world.b.log == ["up a", "lost a"]
        assert "silent for 20 s" in world.b.errors[0].problem
        await world.aclose()

    run_sim(main())


@pytest.mark.parametrize("stood_s", [0.0, 30.0])
def test_a_router_whose_process_is_gone_is_lost_as_soon_as_an_instance_is(stood_s):
    async def main():
        world = world_of_a_router()
        await world.connect()
        world.network.freeze(world.wire_a)
        world.links_a._timer.cancel()
        await asyncio.sleep(stood_s)
        assert world.b.log == ["up a"]
        world.network.kill(world.wire_a)
        await asyncio.sleep(2.4)
        # its connection may come back until then
        assert world.b.log == ["up a"]
        await asyncio.sleep(1.7)
        assert world.b.log == ["up a", "lost a"]
        await world.aclose()

    run_sim(main())


def test_a_connection_that_came_back_is_forgotten():
    async def main():
        world = world_of_a_router()
        await world.connect()
        pipe = world.b.up[0].pipe
        world.network.freeze(world.wire_a)
        world.links_a._timer.cancel()
        for _ in range(3):
            world.wire_a.dead = True
            await asyncio.sleep(2.0)
            assert pipe.is_cut
            world.wire_a.dead = False
            await asyncio.sleep(1.0)
            assert not pipe.is_cut
        assert world.b.log == ["up a"]
        await world.aclose()

    run_sim(main())


def test_a_connection_that_was_cut_before_our_loop_stood_still_is_looked_at_once_more():
    async def main():
        world = world_of_a_router()
        await world.connect()
        world.network.freeze(world.wire_a)
        world.links_a._timer.cancel()
        await asyncio.sleep(10.0)
        world.wire_a.dead = True
        await asyncio.sleep(1.0)
        assert world.b.up[0].pipe.is_cut
        world.wire_a.dead = False
        asyncio.get_running_loop()._now_ns += 5 * 10**9
        await asyncio.sleep(2.0)
        assert not world.b.up[0].pipe.is_cut
        assert world.b.log == ["up a"]
        await world.aclose()

    run_sim(main())


@pytest.mark.parametrize("role", ["mixed", "router"])
def test_a_peer_that_goes_on_talking_and_acknowledges_nothing_is_lost(role):
    async def main():
        world = World(deaf_s=5.0)
        world.a.said = msgspec.structs.replace(world.a.said, role=role)
        await world.connect()
        carry = world.network.carry

        def carry_without_acks(pipe, frames):
            if pipe.wire is world.wire_a:
                frames = [frames[0][:40] + bytes(8) + frames[0][48:], *frames[1:]]
            return carry(pipe, frames)

        await settle(20.0)
        assert world.b.log == ["up a"]
        world.network.carry = carry_without_acks
        await settle(20.0)
        # there is nothing that it should acknowledge
        assert world.b.log == ["up a"]
        world.b.up[0].send(note(1))
        await settle(4.0)
        assert world.b.log == ["up a"]
        await settle(2.0)
        # and comes again
        assert world.b.log[:2] == ["up a", "lost a"]
        assert "acknowledged nothing for 5 s" in world.b.errors[0].problem
        assert "acknowledged nothing" in world.a.errors[0].problem
        await world.aclose()

    run_sim(main())
