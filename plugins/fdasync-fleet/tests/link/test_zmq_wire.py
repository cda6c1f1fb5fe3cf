"""The wire of ZMQ sockets: real ones, on both loops."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest
import zmq
from fdasync_fleet.link.links import Links
from fdasync_fleet.link.zmq_wire import ZmqWire
from fdasync_fleet.testing.patience import LINKS
from link_world import Owner, note, send_all
from wire_files import is_there

from fdasync.errors import BadInput, ConfigError, PeerUnreachable, ProtocolError
from fdasync.testing import until
from fdasync.testing.harness.leaks import no_leaks

pytestmark = pytest.mark.both_loops


class End:
    """A wire, and what came out of it."""

    def __init__(self, number, **options):
        self.wire = ZmqWire(**options)
        self.frames = []
        self.pipes = []
        self.rooms = []
        self.changed = asyncio.Event()
        self.wire.open(bytes([number]) * 16, self._frames, self._room)

    def _frames(self, pipe, frames):
        self.pipes.append(pipe)
        self.frames.append([bytes(frame) for frame in frames])
        self.changed.set()

    def _room(self, pipe):
        self.rooms.append(pipe)
        self.changed.set()

    async def until(self, met):
        async with asyncio.timeout(300):
            while not met():
                self.changed.clear()
                await self.changed.wait()

    async def have(self, count):
        await self.until(lambda: len(self.frames) >= count)
        return self.frames


@pytest.fixture(params=["ipc", "tcp"])
def address(request, tmp_path):
    return f"ipc://{tmp_path}/a" if request.param == "ipc" else "tcp://127.0.0.1:*"


@pytest.fixture
async def ends():
    """Makes ends, and closes them."""
    made = []

    def make(number, **options):
        made.append(End(number, **options))
        return made[-1]

    yield make
    for end in made:
        await end.wire.aclose()


async def connected(make, address, **options):
    one, other = make(1, **options), make(2, **options)
    actual = other.wire.listen(address)
    pipe = one.wire.dial(actual)
    await one.until(lambda: one.rooms)
    return one, pipe, other, actual


async def test_frames_go_both_ways_whole_and_in_order(ends, address):
    one, pipe, other, actual = await connected(ends, address)
    assert actual.startswith(address.rstrip("*"))
    assert pipe.address == actual
    for number in range(2500):
        while not one.wire.send(pipe, [b"%d" % number, b"payload"] if number % 3 else [b"%d" % number]):
            await one.until(lambda: len(one.rooms) > 1)
            one.rooms[1:] = []
    got = await other.have(2500)
    assert got == [[b"%d" % n, b"payload"] if n % 3 else [b"%d" % n] for n in range(2500)]
    # one pipe, that nobody dialed from here
    (back,) = set(other.pipes)
    assert back.address == ""
    assert other.wire.send(back, [b"hello", memoryview(b"you")])
    assert await one.have(1) == [[b"hello", b"you"]]
    assert one.pipes == [pipe]
    big = os.urandom(4 << 20)
    assert one.wire.send(pipe, [b"big", big])
    assert (await other.have(2501))[-1] == [b"big", big]


async def test_several_dial_one_listener_and_each_gets_its_own(ends, address):
    processor = ends(9)
    actual = processor.wire.listen(address)
    others = [ends(1 + number) for number in range(5)]
    pipes = [end.wire.dial(actual) for end in others]
    for number, (end, pipe) in enumerate(zip(others, pipes, strict=True)):
        await end.until(lambda end=end: end.rooms)
        end.wire.send(pipe, [b"from %d" % number])
    await processor.have(5)
    assert len(set(processor.pipes)) == 5
    for pipe, (said,) in zip(processor.pipes, processor.frames, strict=True):
        processor.wire.send(pipe, [b"to " + said[5:]])
    for number, end in enumerate(others):
        assert await end.have(1) == [[b"to %d" % number]]


async def test_a_pipe_waits_for_its_listener_and_comes_back_to_the_next(ends, tmp_path):
    address = f"ipc://{tmp_path}/a"
    one = ends(1)
    pipe = one.wire.dial(address)
    assert not one.wire.send(pipe, [b"too early"])
    for number in (2, 3):
        other = ends(number)
        other.wire.listen(address)
        one.rooms.clear()
        await one.until(lambda: one.rooms)
        assert one.wire.send(pipe, [b"hello"])
        assert await other.have(1) == [[b"hello"]]
        assert other.wire.send(other.pipes[0], [b"back"])
        await one.have(number - 1)
        await other.wire.aclose()
        assert not is_there(address[6:])
        await until(lambda: not one.wire.send(pipe, [b"into nothing"]))


async def test_one_that_dialed_us_and_is_gone_takes_nothing_and_breaks_nothing(ends, address):
    one, pipe, other, _ = await connected(ends, address)
    one.wire.send(pipe, [b"here"])
    await other.have(1)
    back = other.pipes[0]
    one.wire.hang_up(pipe)
    one.wire.hang_up(pipe)
    assert one.wire.send(pipe, [b"nowhere"])
    await asyncio.sleep(0.2)
    assert other.wire.send(back, [b"nowhere"])
    other.wire.hang_up(back)
    other.wire.hang_up(back)
    assert other.wire.send(back, [b"nowhere"])
    assert one.frames == []


async def test_what_was_said_just_before_hanging_up_arrives(ends, address):
    one, pipe, other, _ = await connected(ends, address)
    one.wire.send(pipe, [b"bye"])
    one.wire.hang_up(pipe)
    assert await other.have(1) == [[b"bye"]]


@pytest.mark.parametrize("backwards", [False, True])
async def test_a_full_pipe_refuses_until_there_is_room(ends, tmp_path, backwards):
    one, pipe, other, _ = await connected(ends, f"ipc://{tmp_path}/a", high_water=10)
    one.wire.send(pipe, [b"first"])
    await other.have(1)
    sender, way, reader = (other, other.pipes[0], one) if backwards else (one, pipe, other)
    sender.rooms.clear()
    body = bytes(100_000)
    sent = 0
    # the loop does not turn, so no end reads; ZMQ's thread may still make room after a refusal
    while sender.wire.send(way, [body]):
        sent += 1
        assert sent < 10_000
    assert not sender.rooms
    got = len(reader.frames)
    await sender.until(lambda: sender.rooms)
    while not sender.wire.send(way, [b"last"]):
        # a ROUTER's pipes are tried in turn, whether they have room yet or not
        assert backwards
        sender.rooms.clear()
        await sender.until(lambda: sender.rooms)
    assert set(sender.rooms) == {way}
    frames = await reader.have(got + sent + 1)
    # nothing that was refused came, and all else did
    assert frames[got:] == [[body]] * sent + [[b"last"]]


async def test_a_pipe_without_room_does_not_keep_the_loop_busy(ends, tmp_path):
    """Whoever listens there never says a word of ZMQ's."""
    path = f"{tmp_path}/a"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(path)
        deaf.listen()
        one = ends(1)
        pipe = one.wire.dial(f"ipc://{path}")
        for _ in range(20):
            assert not one.wire.send(pipe, [b"x"])
            await asyncio.sleep(0.01)
        begin = os.times()
        await asyncio.sleep(0.5)
        end = os.times()
    assert not one.rooms
    assert end.user + end.system - begin.user - begin.system < 0.2


async def test_a_frame_above_the_limit_is_not_read_and_costs_the_connection(ends, address):
    one, pipe, other, _ = await connected(ends, address, max_frame_nbytes=10_000)
    assert one.wire.send(pipe, [bytes(10_000)])
    await other.have(1)
    one.rooms.clear()
    assert one.wire.send(pipe, [bytes(10_001)])
    async with asyncio.timeout(300):
        while len(other.frames) < 2:
            one.wire.send(pipe, [b"small"])
            await asyncio.sleep(0.02)
    assert other.frames[1] == [b"small"]


async def test_a_message_of_many_frames_is_handed_on_as_three(ends, address):
    one, pipe, other, _ = await connected(ends, address)
    pipe.port.sock.send_multipart([b"%d" % number for number in range(2000)])
    one.wire.send(pipe, [b"next"])
    assert await other.have(2) == [[b"0", b"1", b"2"], [b"next"]]


async def test_more_than_one_turns_worth_is_read_without_another_event(ends, tmp_path):
    one, pipe, other, _ = await connected(ends, f"ipc://{tmp_path}/a", high_water=20_000)
    for number in range(5000):
        assert one.wire.send(pipe, [b"%d" % number])
    await asyncio.sleep(0.3)
    assert len(await other.have(5000)) == 5000


# -- what is left


async def test_closing_leaves_nothing(address):
    with no_leaks():
        one, other, third = End(1), End(2), End(3)
        actual = other.wire.listen(address)
        pipe = one.wire.dial(actual)
        third.wire.dial("ipc:///nowhere/at/all")
        await one.until(lambda: one.rooms)
        one.wire.send(pipe, [b"x"])
        await other.have(1)
        one.wire.send(pipe, [b"not read any more"])
        assert threading.active_count() == 1
        for end in (one, other, third):
            await end.wire.aclose()
            await end.wire.aclose()
        count = len(other.frames)
        await asyncio.sleep(0.05)
        assert len(other.frames) == count
        assert one.wire.send(pipe, [b"x"])
        one.wire.hang_up(pipe)
        with pytest.raises(ProtocolError, match="closed"):
            one.wire.dial(actual)
        if actual.startswith("ipc"):
            assert not is_there(actual[6:])


async def test_a_wire_that_never_did_anything_closes():
    with no_leaks():
        wire = ZmqWire()
        await wire.aclose()
        end = End(1)
        await end.wire.aclose()
        with pytest.raises(ProtocolError, match="16 bytes"):
            ZmqWire().open(b"short", end._frames, end._room)
        with pytest.raises(ProtocolError, match="not opened"):
            ZmqWire().dial("tcp://127.0.0.1:9")


# -- addresses


@pytest.mark.parametrize(
    "bad",
    [
        "tcp://0.0.0.0:5000", "tcp://*:5000", "tcp://192.168.1.7:5000", "tcp://localhost:5000", "tcp://[::1]:5000",
        "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:http", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:-1",
        "tcp://127.0.0.1:5000;tcp://1.2.3.4:1", "tcp://127.0.0.1.example.com:80", "udp://127.0.0.1:1", "inproc://a",
        "ipc://", "ipc://*", "ipc://@abstract", "ipc:///run/\0x", "ipc://" + "x" * 108, "/run/a", "", "pgm://x",
    ],
)  # fmt: skip
async def test_other_addresses_are_refused_by_name(ends, bad):
    one = ends(1)
    for call in (one.wire.listen, one.wire.dial):
        with pytest.raises(ConfigError) as caught:
            call(bad)
        assert isinstance(caught.value, BadInput)
        assert repr(bad) in caught.value.problem
    if bad.startswith("tcp://0"):
        assert "fdasync keys new" in caught.value.hint


async def test_the_address_of_a_live_listener_is_not_taken(ends, address):
    one, pipe, other, actual = await connected(ends, address)
    thief = ends(3)
    with pytest.raises(ConfigError, match=actual):
        thief.wire.listen(actual)
    one.wire.send(pipe, [b"still here"])
    assert await other.have(1) == [[b"still here"]]
    assert thief.frames == []


async def test_the_socket_file_of_a_dead_listener_is_replaced_and_no_other_file(ends, tmp_path):
    path = tmp_path / "a"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert is_there(path)
    one, pipe, other, _ = await connected(ends, f"ipc://{path}")
    one.wire.send(pipe, [b"x"])
    await other.have(1)
    assert os.lstat(path).st_mode & 0o777 == 0o600
    precious = tmp_path
    with pytest.raises(ConfigError, match="no socket"):
        ends(3).wire.listen(f"ipc://{precious}")
    assert is_there(precious)
    with pytest.raises(ConfigError, match="cannot listen"):
        ends(4).wire.listen(f"ipc://{tmp_path}/no/folder")


async def test_a_port_that_is_taken_is_refused(ends):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=address):
            ends(1).wire.listen(address)


# -- links over it


@pytest.mark.ci(after=1)
async def test_links_over_real_sockets_survive_a_restart(address, tmp_path):
    if address.startswith("tcp"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with no_leaks():
        a, b = Owner("a"), Owner("b", address)
        one, other = Links(ZmqWire(), a, LINKS), Links(ZmqWire(), b, LINKS)
        assert other.listen(address) == address
        peer = one.dial(address)
        await peer.ready(300.0)
        async with asyncio.timeout(300):
            await send_all(peer, range(20_000))
        await peer.acknowledged(300.0)
        assert b.got == list(range(20_000))
        peer.send(note(1), bytes(1 << 20))
        await peer.acknowledged(300.0)
        assert b.payloads[-1] == bytes(1 << 20)
        await other.aclose()
        await until(lambda: a.errors)
        assert isinstance(a.errors[0], PeerUnreachable)
        c = Owner("c", address)
        third = Links(ZmqWire(), c, LINKS)
        third.listen(address)
        await peer.ready(300.0)
        peer.send(note(5))
        await peer.acknowledged(300.0)
        assert c.got == [5]
        assert a.log == ["up b", "lost b", "up c"]
        await one.aclose()
        await until(lambda: c.errors)
        assert "goodbye" in c.errors[0].problem
        await third.aclose()
        assert threading.active_count() == 1
        assert not a.failures + b.failures + c.failures


_OTHER = """
import asyncio, sys, threading, uvloop
from fdasync_fleet.link.links import Links
from fdasync_fleet.link.zmq_wire import ZmqWire
from fdasync_fleet.testing.patience import LINKS
from link_world import Owner

async def main():
    owner = Owner("other")
    owner.then = lambda peer, message: peer.send(message)
    links = Links(ZmqWire(), owner, LINKS)
    print(links.listen(sys.argv[1]), flush=True)
    async with asyncio.timeout(300):
        while not owner.errors:
            await asyncio.sleep(0.01)
    await links.aclose()
    assert threading.active_count() == 1
    print(len(owner.got), owner.failures, flush=True)

uvloop.run(main())
"""


async def test_a_signal_does_not_interrupt_the_end_of_a_context(monkeypatch):
    """pyzmq gives one up whose end was interrupted: its threads and descriptors would stay."""
    links = Links(ZmqWire(), Owner("one"), LINKS)
    links.listen("tcp://127.0.0.1:0")
    masks, term = [], zmq.Context.term

    def terms(context):
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        term(context)

    monkeypatch.setattr(zmq.Context, "term", terms)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    await links.aclose()
    assert [signal.SIGCHLD in mask for mask in masks] == [True]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


@pytest.mark.ci
async def test_two_processes(tmp_path):
    address = f"ipc://{tmp_path}/a"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _OTHER, address, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[1] / "support"
    )
    owner = Owner("one")
    links = Links(ZmqWire(), owner, LINKS)
    async with asyncio.timeout(300):
        assert await process.stdout.readline() == f"{address}\n".encode()
        peer = links.dial(address)
        await peer.ready(300.0)
        await send_all(peer, range(3000))
        await until(lambda: len(owner.got) == 3000, 300)
        await links.aclose()
        assert owner.got == list(range(3000))
        assert await process.stdout.readline() == b"3000 []\n"
        assert await process.wait() == 0
    # in Python 3.11 a thread waits for each process, and is there for a moment longer
    await until(lambda: not [each for each in threading.enumerate() if each.name.startswith("asyncio-waitpid")])
    assert not is_there(address[6:])
