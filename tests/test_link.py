"""Links in virtual time: order, once, whatever the network does; who is up, who is lost, who is refused."""

from __future__ import annotations

import asyncio
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fdasync.errors import BadInput, DeadlineExceeded, PeerBusy, PeerRefused, PeerUnreachable, ProtocolError
from fdasync.pd.link.links import Links
from fdasync.pd.messages import MAX_PAYLOAD_NBYTES, PROTOCOL, Bye, Heartbeat, Hello, Refused, encode
from fdasync.testing.sim.loop import run_sim
from fdasync.testing.sim.network import Weather
from tests.helpers import case_settings
from tests.link_helpers import ADDRESS, Owner, World, note, send_all, settle

STORMS = {
    "calm": Weather(),
    "1 % lost": Weather(drop=0.01),
    "20 % lost": Weather(drop=0.2),
    "twice": Weather(duplicate=0.5),
    "out of order": Weather(reorder=0.5, delay_s=(0.0, 0.1)),
    "slow": Weather(delay_s=(0.3, 0.4)),
    "narrow": Weather(room=5),
    "all of it": Weather(drop=0.15, duplicate=0.3, reorder=0.4, delay_s=(0.0, 0.15), room=50),
}


def ignore(*_):
    pass


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
        world = World(Weather(drop=0.3, reorder=0.5, delay_s=(0.0, 0.05)), lost_s=30.0)
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


def test_who_is_there():
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
        world = World(Weather(delay_s=(0.001, 0.001)))
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


def test_an_acknowledgement_that_found_no_room_is_said_when_there_is():
    async def main():
        world = World(beat_s=50.0, lost_s=100.0, retry_s=20.0, retry_most_s=20.0)
        peer = await world.connect()
        world.network.between(world.wire_a, world.wire_b, Weather(room=1, delay_s=(1.0, 1.0)))
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
        world = World(Weather(delay_s=(0.001, 0.05), reorder=0.3))
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
        world = World(Weather(delay_s=(0.05, 0.1)))
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


# -- handshake


def test_ready_waits_for_one_that_starts_later_and_no_longer_than_told():
    async def main():
        world = World()
        peer = world.links_a.dial(ADDRESS)
        with pytest.raises(PeerUnreachable, match="has not answered yet"):
            peer.send(note(1))
        with pytest.raises(DeadlineExceeded, match="connecting to ipc:///run/b"):
            await peer.ready(20.0)
        cancelled = asyncio.create_task(peer.ready(60.0))
        await settle()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        world.links_b.listen(ADDRESS)
        await peer.ready(1.1)
        assert peer.is_up
        await world.aclose()

    run_sim(main())


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_refusal_says_what_does_not_fit_and_stands_until_dialed_again(who):
    async def main():
        world = World()
        owner = getattr(world, who)
        owner.refuses = Refused("shape.block_tokens", "ours is 16, theirs is 32")
        world.links_b.listen(ADDRESS)
        peer = world.links_a.dial(ADDRESS)
        with pytest.raises(PeerRefused) as caught:
            await peer.ready(5.0)
        assert (caught.value.peer, caught.value.field) == (ADDRESS, "shape.block_tokens")
        assert caught.value.problem == "ours is 16, theirs is 32"
        with pytest.raises(PeerRefused):
            peer.send(note(1))
        owner.refuses = None
        await asyncio.sleep(30.0)
        # nobody asked again, and nothing is left of it at the other side
        assert peer.state == "refused"
        assert world.a.log == world.b.log == []
        assert world.links_b._by_pipe == {}
        assert world.links_a.dial(ADDRESS) is peer
        await peer.ready(5.0)
        await settle()
        assert world.a.log == ["up b"]
        assert world.b.log == ["up a"]
        await world.aclose()

    run_sim(main())


@pytest.mark.parametrize("who", ["a", "b"])
def test_another_protocol_is_refused_before_anything_else_is_looked_at(who):
    async def main():
        world = World()
        getattr(world, who).said = Hello(PROTOCOL + 1, "newer", "mixed", "")
        # not asked
        (world.b if who == "a" else world.a).check = None
        world.links_b.listen(ADDRESS)
        with pytest.raises(PeerRefused) as caught:
            await world.links_a.dial(ADDRESS).ready(5.0)
        assert caught.value.field == "protocol"
        assert f"{PROTOCOL}" in caught.value.problem
        assert f"{PROTOCOL + 1}" in caught.value.problem
        await world.aclose()

    run_sim(main())


def test_a_hello_of_a_protocol_with_other_fields_is_refused_for_its_protocol():
    import msgspec

    async def main():
        world = World()
        refused = []
        world.links_b.listen(ADDRESS)
        wire = world.network.wire("c")
        wire.open(b"c" * 16, lambda _, frames: refused.append(frames[0]), ignore)
        body = msgspec.msgpack.encode(["hello", 77, {"all": "new"}, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
        pipe = wire.dial(ADDRESS)
        wire.send(pipe, [b"c" * 16 + bytes(32) + body])
        await settle()
        (answer,) = refused
        assert answer[16:32] == b"c" * 16
        assert encode(Refused("protocol", f"ours is {PROTOCOL}, theirs is 77")) == answer[48:]
        assert world.links_b.counters.refused == 1
        await wire.aclose()
        await world.aclose()

    run_sim(main())


def test_who_said_hello_and_was_never_heard_again_is_forgotten():
    async def main():
        world = World()
        world.links_b.listen(ADDRESS)
        wire = world.network.wire("c")
        wire.open(b"c" * 16, ignore, ignore)
        wire.send(wire.dial(ADDRESS), [b"c" * 16 + bytes(32) + encode(world.a.said)])
        await settle()
        assert len(world.links_b._by_pipe) == 1
        assert world.links_b.peers == []
        await asyncio.sleep(4.0)
        assert world.links_b._by_pipe == {}
        assert world.b.log == []
        await wire.aclose()
        await world.aclose()

    run_sim(main())


# -- push-back


@pytest.mark.parametrize("limits", [{"window_messages": 10}, {"window_nbytes": 100}])
def test_a_full_window_refuses_and_says_when_there_is_room(limits):
    async def main():
        world = World(Weather(delay_s=(0.2, 0.2)), **limits)
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


def test_those_who_wait_for_room_of_a_lost_peer_are_told():
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
        assert peer.counters.sent == 0
        await world.aclose()

    run_sim(main())


# -- what must not harm


def test_rubbish_is_counted_and_nothing_else():
    async def main():
        world = World()
        peer = await world.connect()
        other = world.b.up[0]
        head = other.session.incoming
        said = [
            [b""],
            [b"x" * 47],
            [head + bytes(16), b"payload", b"third"],
            [head + bytes(16), bytes(MAX_PAYLOAD_NBYTES + 1)],
            [head + bytes(16) + b"\xc1"],
            [head + bytes(16) + encode(note(3))],
            [head[:16] + bytes(32) + b"no hello"],
        ]
        for frames in said:
            world.wire_a.send(peer.pipe, frames)
        await settle()
        # the last is of our session, so it is answered, whatever it says
        assert other.counters.malformed == len(said) - 1
        # acknowledges what was never sent
        world.wire_a.send(peer.pipe, [head + struct.pack("<QQ", 0, 2**63)])
        # out of any window
        world.wire_a.send(peer.pipe, [head + struct.pack("<QQ", 2**63, 0) + encode(note(3))])
        await settle()
        assert other.counters.dropped == 1
        assert world.b.got == []
        assert world.b.log == ["up a"]
        other.send(note(5))
        await other.acknowledged(5.0)
        assert world.a.got == [5]
        # and from somebody who is nobody
        wire = world.network.wire("c")
        wire.open(b"c" * 16, ignore, ignore)
        pipe = wire.dial(ADDRESS)
        wire.send(pipe, [b"x"])
        wire.send(pipe, [b"c" * 16 + bytes(32) + b"x"])
        wire.send(pipe, [b"c" * 16 + head[16:] + bytes(16) + encode(note(1))])
        await settle()
        assert (world.links_b.counters.malformed, world.links_b.counters.late) == (2, 1)
        assert len(world.links_b._by_pipe) == 1
        await wire.aclose()
        await world.aclose()

    run_sim(main())


@pytest.mark.parametrize("by_dialer", [True, False])
@pytest.mark.parametrize("body", [b"\xdd\xff\xff\xff\xff", encode(Heartbeat())])
def test_a_message_in_its_turn_that_cannot_be_read_ends_the_session(by_dialer, body):
    async def main():
        world = World()
        peer = await world.connect()
        other = world.b.up[0]
        sender, reader, reads = (peer, other, world.b) if by_dialer else (other, peer, world.a)
        wire = world.wire_a if by_dialer else world.wire_b
        wire.send(sender.pipe, [reader.session.incoming + struct.pack("<QQ", 1, 0) + body])
        await settle(0.02)
        # both are told, each once; nothing of it counts as delivered
        assert (world.a.log, world.b.log) == (["up b", "lost b"], ["up a", "lost a"])
        assert (reader.counters.malformed, reader.counters.received) == (1, 0)
        assert "a message could not be read" in str(reads.errors[0])
        assert "could not be read" in str(world.a.errors[0])
        # and the one that was dialed is called again
        await peer.ready(5.0)
        await settle()
        await send_all(peer, range(3))
        await peer.acknowledged(5.0)
        assert world.b.got == [0, 1, 2]
        await world.aclose()

    run_sim(main())


def test_what_an_owner_raises_is_its_failure_and_the_link_goes_on():
    async def main():
        world = World()
        peer = await world.connect()

        def then(_peer, message):
            if message.offer == 1:
                raise KeyError("owner")

        world.b.then = then
        world.b.beat = None
        await send_all(peer, range(4))
        await settle(2.4)
        assert len(world.b.failures) == 5
        assert world.b.got == [0, 1, 2, 3]
        assert {type(error) for error in world.b.failures} == {KeyError, TypeError}
        world.b.failures.clear()
        await world.aclose()

    run_sim(main())


def test_an_owner_may_hang_up_answer_and_dial_from_its_callbacks():
    async def main():
        world = World(Weather(reorder=0.5, delay_s=(0.0, 0.05)))
        peer = await world.connect()

        def then(from_whom, message):
            if message.offer < 5:
                from_whom.send(note(100 + message.offer))
            elif message.offer == 5:
                world.links_b.hang_up(from_whom)
            else:
                raise AssertionError("after hanging up")

        world.b.then = then
        await send_all(peer, range(10))
        await settle(1.0)
        assert world.b.got in ([0, 1, 2, 3, 4, 5], [])
        assert world.a.log[:2] == ["up b", "lost b"]
        await world.aclose()

    run_sim(main())


def test_one_timer_serves_all_peers():
    async def main():
        world = World()
        hub = world.links_a
        owners = []
        for number in range(20):
            owner = Owner(f"n{number}", f"ipc:///run/n{number}")
            _, links = world.process(owner, 10 + number)
            links.listen(owner.said.address)
            owners.append(links)
            hub.dial(owner.said.address)
        await settle(1.0)
        assert len([peer for peer in hub.peers if peer.is_up]) == 20
        loop = asyncio.get_running_loop()
        ours = [timer for timer in loop._scheduled if not timer.cancelled() and "Links" in repr(timer)]
        assert len(ours) <= 1 + len(owners)
        for links in owners:
            await links.aclose(0.0)
        await world.aclose()

    run_sim(main())


# -- whatever the network does

WEATHER = st.builds(
    Weather,
    delay_s=st.tuples(st.floats(0.0, 0.02), st.floats(0.02, 0.5)),
    drop=st.sampled_from([0.0, 0.01, 0.2, 0.5]),
    duplicate=st.sampled_from([0.0, 0.1, 0.5]),
    reorder=st.sampled_from([0.0, 0.1, 0.5]),
    room=st.sampled_from([3, 50, 1000]),
)
DEEDS = st.lists(
    st.tuples(st.sampled_from(["send", "send", "send", "cut", "heal", "freeze", "thaw", "weather", "restart", "wait"]),
              st.integers(0, 400)),
    max_size=25,
)  # fmt: skip


@case_settings(60)
@given(WEATHER, WEATHER, DEEDS, st.integers(0, 2**32))
def test_each_side_sees_a_prefix_of_each_session_in_order_and_once(weather, other_weather, deeds, seed):
    """Messages are numbered without end; within a session what came must be what was sent from its first one on."""

    class Reader(Owner):
        def on_up(self, peer):
            super().on_up(peer)
            self.sessions.append([])
            self.began.append(self.counter)
            self.mine = peer

        def on_message(self, peer, message, payload):
            assert peer is self.mine
            self.sessions[-1].append((message.attempt, message.offer))

    async def main():
        world = World(weather, seed, window_messages=64)
        readers = {"a": Reader("a"), "b": Reader("b", ADDRESS)}
        world.a, world.b = readers["a"], readers["b"]
        for reader in readers.values():
            reader.sessions, reader.began, reader.counter, reader.mine = [], [], 0, None
        await world.links_a.aclose(0.0)
        await world.links_b.aclose(0.0)
        wires, links = {}, {}
        wires["a"], links["a"] = world.process(world.a, 1)
        wires["b"], links["b"] = world.process(world.b, 2)
        links["b"].listen(ADDRESS)
        links["a"].dial(ADDRESS)
        incarnation = 3
        for deed, number in deeds:
            if deed == "send":
                for side, reader in readers.items():
                    for _ in range(number % (41 if side == "a" else 17)):
                        try:
                            reader.mine.send(replace(note(reader.counter), attempt=len(reader.sessions)))
                        except (PeerBusy, PeerUnreachable, AttributeError):
                            break
                        reader.counter += 1
            elif deed == "cut":
                world.network.partition(wires["a"], wires["b"])
            elif deed == "heal":
                world.network.heal(wires["a"], wires["b"])
            elif deed in ("freeze", "thaw"):
                getattr(world.network, deed)(wires["ab"[number % 2]])
            elif deed == "weather":
                world.network.weather = other_weather
            elif deed == "restart" and number % 3 == 0:
                world.network.kill(wires["b"])
                await links["b"].aclose(0.0)
                wires["b"], links["b"] = world.process(world.b, incarnation)
                links["b"].listen(ADDRESS)
                incarnation += 1
            await asyncio.sleep(number / 100)
        # every session's messages: of one session of the sender, from its first message on, without gap or repetition
        for side, reader in readers.items():
            sender = readers["b" if side == "a" else "a"]
            used = []
            for session in reader.sessions:
                if session:
                    attempts = {attempt for attempt, _ in session}
                    assert len(attempts) == 1, (side, session)
                    (attempt,) = attempts
                    first = sender.began[attempt - 1]
                    assert [offer for _, offer in session] == list(range(first, first + len(session)))
                    used.append(attempt)
            assert used == sorted(set(used)), "a session of the sender's was seen in two of ours"
            ups = [line for line in reader.log if line.startswith("up")]
            lost = [line for line in reader.log if line.startswith("lost")]
            assert 0 <= len(ups) - len(lost) <= 1 + incarnation
            assert not reader.failures
        # and when the weather clears they find each other again
        world.network.weather = Weather()
        world.network.heal(wires["a"], wires["b"])
        for wire in wires.values():
            world.network.thaw(wire)
        await asyncio.sleep(10.0)
        assert links["a"].dial(ADDRESS).is_up
        assert len(links["b"].peers) == 1
        assert not readers["a"].failures + readers["b"].failures
        for each in links.values():
            await each.aclose(0.0)

    run_sim(main())
