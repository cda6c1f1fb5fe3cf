"""Links in virtual time: who is let in, and who is refused with which words."""

from __future__ import annotations

import asyncio

import pytest
from fdasync_fleet.messages import PROTOCOL, Hello, Refused, encode
from link_world import ADDRESS, World, ignore, note, settle

from fdasync.errors import DeadlineExceeded, PeerRefused, PeerUnreachable
from fdasync.testing.sim.loop import run_sim

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


def test_a_process_that_said_hello_and_was_never_heard_again_is_forgotten():
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
