"""Links in virtual time: rubbish, owners that raise, and whatever the network does."""

from __future__ import annotations

import asyncio
import struct

import pytest
from fdasync_fleet.messages import MAX_PAYLOAD_NBYTES, Heartbeat, encode
from fdasync_fleet.testing.sim.network import NetworkConditions
from hypothesis import given
from hypothesis import strategies as st
from link_world import ADDRESS, Owner, World, ignore, note, send_all, settle
from msgspec.structs import replace

from fdasync.errors import PeerBusy, PeerUnreachable
from fdasync.testing.sim.loop import run_sim
from tests.support.helpers import case_settings

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
        world = World(NetworkConditions(reorder=0.5, delay_s=(0.0, 0.05)))
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
        processor = world.links_a
        owners = []
        for number in range(20):
            owner = Owner(f"n{number}", f"ipc:///run/n{number}")
            _, links = world.process(owner, 10 + number)
            links.listen(owner.said.address)
            owners.append(links)
            processor.dial(owner.said.address)
        await settle(1.0)
        assert len([peer for peer in processor.peers if peer.is_up]) == 20
        loop = asyncio.get_running_loop()
        ours = [timer for timer in loop._scheduled if not timer.cancelled() and "Links" in repr(timer)]
        assert len(ours) <= 1 + len(owners)
        for links in owners:
            await links.aclose(0.0)
        await world.aclose()

    run_sim(main())


# -- whatever the network does

CONDITIONS = st.builds(
    NetworkConditions,
    delay_s=st.tuples(st.floats(0.0, 0.02), st.floats(0.02, 0.5)),
    drop=st.sampled_from([0.0, 0.01, 0.2, 0.5]),
    duplicate=st.sampled_from([0.0, 0.1, 0.5]),
    reorder=st.sampled_from([0.0, 0.1, 0.5]),
    room=st.sampled_from([3, 50, 1000]),
)


DEEDS = st.lists(
    st.tuples(st.sampled_from(["send", "send", "send", "cut", "heal", "freeze", "thaw", "network", "restart", "wait"]),
              st.integers(0, 400)),
    max_size=25,
)  # fmt: skip


@case_settings(60)
@given(CONDITIONS, CONDITIONS, DEEDS, st.integers(0, 2**32))
def test_each_side_sees_a_prefix_of_each_session_in_order_and_once(conditions, other_conditions, deeds, seed):
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
        world = World(conditions, seed, window_messages=64)
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
            elif deed == "network":
                world.network.conditions = other_conditions
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
        # and when the network is well they find each other again
        world.network.conditions = NetworkConditions()
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
