"""Links in virtual time: what is lost and found, sessions that end, processes that come back."""

from __future__ import annotations

import asyncio
import struct

import pytest
from fdasync_fleet.messages import encode
from fdasync_fleet.testing.sim.network import NetworkConditions
from link_world import ADDRESS, Owner, World, note, send_all, settle
from msgspec.structs import replace

from fdasync.errors import PeerUnreachable
from fdasync.testing.sim.loop import run_sim

# -- lost and found


@pytest.mark.parametrize("cut_s", [0.3, 1.0, 2.0])
def test_a_cut_shorter_than_the_limit_costs_only_time(cut_s):
    async def main():
        world = World()
        peer = await world.connect()
        sending = asyncio.create_task(send_all(peer, range(3000)))
        await settle(0.002)
        world.network.partition(world.wire_a, world.wire_b)
        await sending
        await asyncio.sleep(cut_s)
        world.network.heal(world.wire_a, world.wire_b)
        await peer.acknowledged(30.0)
        assert world.b.got == list(range(3000))
        assert world.a.log == ["up b"]
        assert world.b.log == ["up a"]
        await world.aclose()

    run_sim(main())


def test_a_longer_cut_is_told_once_to_both_and_a_fresh_session_follows():
    async def main():
        world = World()
        peer = await world.connect()
        first = world.b.up[0]
        await send_all(peer, range(10))
        await peer.acknowledged(1.0)
        world.network.partition(world.wire_a, world.wire_b)
        await send_all(peer, range(10, 20))
        room = asyncio.create_task(peer.acknowledged(60.0))
        await asyncio.sleep(3.5)
        assert world.a.log == ["up b", "lost b"]
        assert world.b.log == ["up a", "lost a"]
        (error,) = world.a.errors
        assert isinstance(error, PeerUnreachable)
        assert (error.peer, error.problem) == (ADDRESS, "silent for 3 s")
        with pytest.raises(PeerUnreachable, match="silent for 3 s"):
            await room
        with pytest.raises(PeerUnreachable, match="silent"):
            peer.send(note(99))
        assert peer.unacked == 0
        await asyncio.sleep(30.0)
        world.network.heal(world.wire_a, world.wire_b)
        await peer.ready(5.0)
        await settle()
        assert world.a.log == ["up b", "lost b", "up b"]
        assert world.b.log == ["up a", "lost a", "up a"]
        peer.send(note(20))
        await peer.acknowledged(1.0)
        # nothing of the old session comes in the new one
        assert world.b.past == [list(range(10))]
        assert world.b.got == [20]
        # the same process again, but what it was is over
        assert first.state == "gone"
        assert world.b.up[1] is not first
        with pytest.raises(PeerUnreachable):
            first.send(note(1))
        with pytest.raises(PeerUnreachable):
            await first.ready(1.0)
        await world.aclose()

    run_sim(main())


def test_a_one_way_cut_ends_the_session_on_both_sides():
    async def main():
        world = World()
        await world.connect()
        carry = world.network.carry
        deaf = True
        # what a sends vanishes; what b sends arrives
        world.network.carry = lambda pipe, frames: (deaf and pipe.wire is world.wire_a) or carry(pipe, frames)
        await asyncio.sleep(3.6)
        assert world.b.log == ["up a", "lost a"]
        assert world.a.log == ["up b", "lost b"]
        assert "goodbye" in world.a.errors[0].problem
        deaf = False
        await settle(2.0)
        assert world.a.log == ["up b", "lost b", "up b"]
        await world.aclose()

    run_sim(main())


@pytest.mark.parametrize("stop_s", [1.5, 2.4, 20.0])
def test_a_process_that_stood_still_finds_everything_or_a_new_session(stop_s):
    async def main():
        world = World()
        peer = await world.connect()
        world.network.freeze(world.wire_b)
        await send_all(peer, range(100))
        await asyncio.sleep(stop_s)
        world.network.thaw(world.wire_b)
        await asyncio.sleep(5.0)
        sessions = [world.b.got] if stop_s < 3.0 else [*world.b.past, world.b.got]
        if stop_s < 3.0:
            assert sessions == [list(range(100))]
            assert world.a.log == ["up b"]
        else:
            assert world.a.log == ["up b", "lost b", "up b"]
            assert world.b.log == ["up a", "lost a", "up a"]
            # what a dropped does not come after all
            assert sessions == [[]]
            peer.send(note(7))
            await peer.acknowledged(1.0)
            assert world.b.got == [7]
        await world.aclose()

    run_sim(main())


@pytest.mark.parametrize("quick", [True, False])
def test_another_process_at_the_same_address_is_a_new_session(quick):
    async def main():
        world = World(NetworkConditions(delay_s=(0.001, 0.05), reorder=0.3))
        peer = await world.connect()
        await send_all(peer, range(100))
        world.network.kill(world.wire_b)
        if not quick:
            await asyncio.sleep(5.0)
            assert world.a.log == ["up b", "lost b"]
        again = Owner("b2", ADDRESS)
        _, links = world.process(again, 3)
        links.listen(ADDRESS)
        await send_all(peer, range(100, 110)) if quick else await peer.ready(5.0)
        await asyncio.sleep(2.0)
        assert world.a.log == ["up b", "lost b", "up b2"]
        assert peer.incarnation == links.incarnation
        assert world.links_a.find(world.links_b.incarnation) is None
        await send_all(peer, range(200, 300))
        await peer.acknowledged(5.0)
        # what was sent to the dead one is not for its heir
        assert again.got == list(range(200, 300))
        if quick:
            assert links.counters.late > 0
        await links.aclose(0.0)
        await world.links_a.aclose(0.0)
        await world.links_b.aclose(0.0)

    run_sim(main())


def test_a_dialer_that_came_back_as_another_process_ends_what_it_was_before():
    async def main():
        world = World()
        world.a.said = replace(world.a.said, address="ipc:///run/a")
        await world.connect()
        world.network.kill(world.wire_a)
        again = Owner("a2", "ipc:///run/a")
        _, links = world.process(again, 3)
        await links.dial(ADDRESS).ready(1.0)
        await settle()
        # at once, not after lost_s
        assert world.b.log == ["up a", "lost a", "up a2"]
        assert "another process" in world.b.errors[0].problem
        await links.aclose(0.0)
        await world.aclose()

    run_sim(main())


def test_frames_of_dead_sessions_are_counted_answered_once_and_change_nothing():
    async def main():
        world = World()
        peer = await world.connect()
        other = world.b.up[0]
        old = other.session.incoming
        await send_all(peer, range(5))
        await settle()
        world.links_a.lose(peer, "for the test")
        # the first Hello is answered, on the pipe that was there
        await peer.ready(0.21)
        await settle()
        assert world.b.log == ["up a", "lost a", "up a"]
        now = world.b.up[1]
        before = peer.counters.late
        for number in (0, 1, 6, 7, 8):
            world.wire_a.send(peer.pipe, [old + struct.pack("<QQ", number, 0) + encode(note(number))])
        # the Hello of the session before, once more
        world.wire_a.send(peer.pipe, [old[:16] + bytes(16) + bytes(16) + encode(world.a.said)])
        await settle(1.0)
        assert now.counters.late == 6
        # one Bye for all, which is late as well
        assert peer.counters.late == before + 1
        assert world.b.log == ["up a", "lost a", "up a"]
        assert world.a.log == ["up b", "lost b", "up b"]
        assert world.b.got == []
        await world.aclose()

    run_sim(main())


def test_a_loop_that_stood_still_does_not_lose_its_peers():
    async def main():
        world = World()
        peer = await world.connect()
        loop = asyncio.get_running_loop()
        # the trainer's step, say: nobody ran for five seconds, and both sides are of this loop
        loop._now_ns += 5 * 10**9
        await asyncio.sleep(2.0)
        assert peer.is_up
        assert world.a.log == ["up b"]
        assert world.b.log == ["up a"]
        await world.aclose()

    run_sim(main())


def test_a_goodbye_is_told_at_once():
    async def main():
        world = World()
        peer = await world.connect()
        other = world.b.up[0]
        world.links_b.hang_up(other, "enough")
        await settle(0.01)
        assert world.a.log == ["up b", "lost b"]
        assert world.a.errors[0].problem == "it said goodbye: enough"
        # who hung up is not told
        assert world.b.log == ["up a"]
        # and who dialed calls again
        await peer.ready(5.0)
        world.links_a.hang_up(peer)
        world.links_a.hang_up(peer)
        await settle(0.01)
        assert world.b.log[-1] == "lost a"
        with pytest.raises(PeerUnreachable, match="hung up"):
            await peer.ready(1.0)
        fresh = world.links_a.dial(ADDRESS)
        assert fresh is not peer
        await fresh.ready(1.0)
        await world.aclose()

    run_sim(main())


def test_closing_waits_for_what_was_sent_and_not_for_ever():
    async def main():
        world = World(NetworkConditions(delay_s=(0.05, 0.1)))
        peer = await world.connect()
        await send_all(peer, range(500))
        waiting = asyncio.create_task(peer.ready(60.0))
        await world.links_a.aclose(5.0)
        await settle(0.2)
        assert world.b.got == list(range(500))
        assert world.b.log == ["up a", "lost a"]
        assert world.a.log == ["up b"]
        await waiting
        with pytest.raises(PeerUnreachable, match="closed"):
            peer.send(note(1))
        with pytest.raises(PeerUnreachable, match="closed"):
            world.links_a.dial(ADDRESS)
        await world.links_a.aclose()
        await world.links_b.aclose(0.0)

        world = World()
        peer = await world.connect()
        world.network.kill(world.wire_b)
        peer.send(note(1))
        begin = asyncio.get_running_loop().time()
        await world.links_a.aclose(1.0)
        assert asyncio.get_running_loop().time() - begin < 1.2
        await world.links_b.aclose(0.0)

    run_sim(main())
