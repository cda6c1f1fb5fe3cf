"""Links in virtual time: order, once, whatever the network does; who is up, who is lost, who is refused."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from fdasync_fleet.link.links import Links
from fdasync_fleet.link.session import LinkConfig
from fdasync_fleet.messages import MAX_PAYLOAD_NBYTES, Bye, Heartbeat
from fdasync_fleet.testing.sim.network import NetworkConditions
from link_world import ADDRESS, Owner, World, note, send_all, settle

from fdasync.errors import BadInput, DeadlineExceeded, PeerBusy, PeerUnreachable, ProtocolError
from fdasync.testing.sim.loop import run_sim

STORMS = {
    "1 % lost": NetworkConditions(drop=0.01),
    "twice": NetworkConditions(duplicate=0.5),
    "out of order": NetworkConditions(reorder=0.5, delay_s=(0.0, 0.1)),
    "narrow": NetworkConditions(room=5),
    "calm": NetworkConditions(),
    "20 % lost": NetworkConditions(drop=0.2),
    "slow": NetworkConditions(delay_s=(0.3, 0.4)),
    "all of it": NetworkConditions(drop=0.15, duplicate=0.3, reorder=0.4, delay_s=(0.0, 0.15), room=50),
}


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("storm", STORMS)
def test_everything_arrives_once_and_in_order_both_ways(storm):
    async def main():
        world = World(STORMS[storm], lost_s=30.0)
        peer = await world.connect()
        while not world.b.up:
            await settle()
        await asyncio.gather(send_all(peer, range(1500)), send_all(world.b.up[0], range(1200)))
        await peer.acknowledged(600.0)
        await world.b.up[0].acknowledged(600.0)
        assert world.b.got == list(range(1500))
        assert world.a.got == list(range(1200))
        assert world.a.log == ["up b"]
        assert world.b.log == ["up a"]
        counters = peer.counters
        assert counters.sent == 1500
        assert counters.received == 1200
        assert counters.malformed == counters.late == 0
        assert bool(counters.duplicates) == (storm not in ("calm", "narrow", "out of order"))
        # nothing is kept of what was delivered
        for each in (peer, world.b.up[0]):
            assert not each.session._held
            assert each.session._held_nbytes == each.session.unacked_nbytes == 0
        assert bool(counters.resent) == bool(STORMS[storm].drop or STORMS[storm].delay_s[1] > 0.2)
        await world.aclose()

    run_sim(main())


def test_payloads_come_with_their_message_and_are_the_callers_again_at_once():
    async def main():
        world = World(NetworkConditions(drop=0.3, reorder=0.5, delay_s=(0.0, 0.05)), lost_s=30.0)
        peer = await world.connect()
        buffer = bytearray(b"0000")
        for number in range(50):
            buffer[:] = b"%04d" % number
            peer.send(note(number), memoryview(buffer) if number % 2 else None)
        await peer.acknowledged(60.0)
        assert world.b.got == list(range(50))
        assert world.b.payloads == [b"%04d" % number if number % 2 else None for number in range(50)]
        await world.aclose()

    run_sim(main())


def test_peers_are_known_by_name_address_and_incarnation():
    async def main():
        world = World()
        peer = await world.connect()
        other = world.b.up[0]
        assert (peer.name, peer.role, peer.address, peer.was_dialed) == ("b", "mixed", ADDRESS, True)
        assert (other.name, other.role, other.address, other.was_dialed) == ("a", "mixed", "", False)
        assert peer.incarnation == world.links_b.incarnation == b"\2" * 12 + bytes(4)
        assert other.incarnation == world.links_a.incarnation
        assert world.links_a.find(peer.incarnation) is peer
        assert world.links_b.find(other.incarnation) is other
        assert world.links_b.find(b"?" * 16) is None
        assert world.links_a.dial(ADDRESS) is peer
        assert world.links_a.peers == [peer]
        assert world.links_b.peers == [other]
        await world.aclose()
        assert world.links_b.find(other.incarnation) is None

    run_sim(main())


def test_heartbeats_come_every_beat_and_carry_what_the_owner_says():
    async def main():
        world = World(beat_s=0.25)
        await world.connect()
        await asyncio.sleep(10.0)
        for owner, name in ((world.a, "b"), (world.b, "a")):
            assert 38 <= len(owner.beats) <= 41
            assert owner.beats[0] == Heartbeat(leases=((name, 7),))
        await world.aclose()

    run_sim(main())


def test_an_idle_link_is_acknowledged_within_its_time():
    async def main():
        world = World(NetworkConditions(delay_s=(0.001, 0.001)))
        peer = await world.connect()
        begin = asyncio.get_running_loop().time()
        peer.send(note(1))
        await peer.acknowledged(1.0)
        assert 0.05 < asyncio.get_running_loop().time() - begin < 0.06
        for number in range(64):
            peer.send(note(number))
        begin = asyncio.get_running_loop().time()
        await peer.acknowledged(1.0)
        assert asyncio.get_running_loop().time() - begin < 0.01
        assert peer.counters.resent == 0
        await world.aclose()

    run_sim(main())


def test_two_that_dialed_each_other_have_two_ways_and_find_the_other_when_one_ends():
    async def main():
        world = World()
        peer = await world.connect()
        world.links_a.listen("ipc:///run/a")
        back = world.links_b.dial("ipc:///run/a")
        await back.ready(5.0)
        await settle()
        first, second = world.a.up
        assert first is peer
        assert world.links_a.find(peer.incarnation) is second
        world.links_b.hang_up(back)
        await settle()
        assert world.links_a.find(peer.incarnation) is peer
        assert world.a.log == ["up b", "up b", "lost b"]
        peer.send(note(1))
        await peer.acknowledged(1.0)
        await world.aclose()

    run_sim(main())


def test_a_busy_peer_costs_the_others_nothing(monkeypatch):
    looks = Counter()
    look = Links._look
    monkeypatch.setattr(Links, "_look", lambda links, peer, now: (looks.update([peer.name]), look(links, peer, now)))

    async def main():
        world = World(NetworkConditions(delay_s=(0.001, 0.001)))
        busy = await world.connect()
        owner = Owner("idle")
        _, idle = world.process(owner, 3)
        await idle.dial(ADDRESS).ready(5.0)
        await settle()
        looks.clear()
        # each is acknowledged alone, by a timer of its own
        for number in range(200):
            busy.send(note(number))
            await busy.acknowledged(1.0)
        assert world.b.got == list(range(200))
        assert looks["a"] >= 200
        # heartbeats, in the ten seconds that this took
        assert looks["idle"] <= 50
        await idle.aclose(0.0)
        await world.aclose()

    run_sim(main())


def test_an_acknowledgement_that_found_no_room_is_said_when_there_is():
    async def main():
        world = World(beat_s=50.0, lost_s=100.0, retry_s=20.0, retry_most_s=20.0)
        peer = await world.connect()
        world.network.between(world.wire_a, world.wire_b, NetworkConditions(room=1, delay_s=(1.0, 1.0)))
        peer.send(note(1))
        await settle(0.97)
        # on its way when the acknowledgement is due
        world.b.up[0].send(note(1))
        await peer.acknowledged(2.5)
        await world.aclose()

    run_sim(main())


def test_a_slow_peer_is_not_sent_all_of_it_again_and_again():
    async def main():
        world = World(lost_s=60.0)
        peer = await world.connect()
        world.network.freeze(world.wire_b)
        await send_all(peer, range(900))
        await settle(20.0)
        # about one a second, of some messages each
        assert 0 < peer.counters.resent < 1000
        before = peer.counters.resent
        world.network.thaw(world.wire_b)
        await peer.acknowledged(1.0)
        # the acknowledgements may come after what they make superfluous, once
        assert peer.counters.resent - before <= 900
        assert world.b.got == list(range(900))
        await world.aclose()

    run_sim(main())


def test_a_pipe_that_connects_is_used_at_once():
    async def main():
        world = World(retry_s=20.0, retry_most_s=20.0)
        peer = world.links_a.dial(ADDRESS)
        await settle(5.0)
        world.links_b.listen(ADDRESS)
        world.wire_a.on_room(peer.pipe)
        await peer.ready(0.1)
        await world.aclose()

    run_sim(main())


# -- push-back


@pytest.mark.parametrize("limits", [{"window_messages": 10}, {"window_nbytes": 100}])
def test_a_full_window_refuses_and_says_when_there_is_room(limits):
    async def main():
        world = World(NetworkConditions(delay_s=(0.2, 0.2)), **limits)
        peer = await world.connect()
        await settle(1.0)
        sent = 0
        while not peer.session.is_full:
            peer.send(note(sent))
            sent += 1
        with pytest.raises(PeerBusy) as caught:
            peer.send(note(sent))
        assert 5 <= sent <= 12
        assert caught.value.unacked_nbytes == peer.session.unacked_nbytes > 0
        assert peer.unacked == sent
        with pytest.raises(DeadlineExceeded, match="room"):
            await peer.room(0.01)
        await peer.room(5.0)
        await send_all(peer, range(sent, 200))
        await peer.acknowledged(60.0)
        assert world.b.got == list(range(200))
        # nothing that was refused was sent all the same
        assert peer.counters.sent == 200
        await world.aclose()

    run_sim(main())


def test_callers_that_wait_for_room_of_a_lost_peer_are_told():
    async def main():
        world = World(window_messages=2)
        peer = await world.connect()
        world.network.kill(world.wire_b)
        await send_all(peer, range(2))
        with pytest.raises(PeerUnreachable, match="silent"):
            await peer.room(60.0)
        await world.links_a.aclose()
        await world.links_b.aclose(0.0)

    run_sim(main())


def test_one_message_may_be_larger_than_the_window():
    async def main():
        world = World(window_nbytes=1000)
        peer = await world.connect()
        peer.send(note(1), bytes(5000))
        with pytest.raises(PeerBusy):
            peer.send(note(2))
        await peer.room(5.0)
        assert world.b.payloads == [bytes(5000)]
        await world.aclose()

    run_sim(main())


def test_what_a_link_does_not_take():
    async def main():
        world = World()
        peer = await world.connect()
        with pytest.raises(ProtocolError, match="payload"):
            peer.send(note(1), bytes(MAX_PAYLOAD_NBYTES + 1))
        with pytest.raises(ProtocolError, match="links themselves"):
            peer.send(Bye("no"))
        with pytest.raises(BadInput, match="incarnation"):
            Links(world.network.wire("x"), world.a, incarnation=bytes(16))
        for wrong in ({"beat_s": -1.0}, {"lost_s": float("inf")}, {"window_messages": 0}):
            with pytest.raises(BadInput, match=rf"links\.{next(iter(wrong))}"):
                Links(world.network.wire("x"), world.a, LinkConfig(**wrong))
        assert peer.counters.sent == 0
        await world.aclose()

    run_sim(main())
