"""Framed messages and fds over a socket pair: `channel.py`."""

from __future__ import annotations

import asyncio
import os
import socket
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync.errors import ProtocolError
from fdasync.ipc import channel as module
from fdasync.ipc.channel import Channel
from tests.support.helpers import case_settings

pytestmark = pytest.mark.both_loops


class End:
    """One end, with what came out of it."""

    def __init__(self, sock):
        self.frames: list[tuple[bytes, list[int]]] = []
        self.ends: list[Exception | None] = []
        self.raises: Exception | None = None
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self.ended = asyncio.get_running_loop().create_future()
        self.channel = Channel(asyncio.get_running_loop(), sock, self._frame, self._end)

    def _frame(self, payload, fds):
        self.frames.append((payload, fds))
        if self.raises is not None:
            raise self.raises
        for count, waiter in self._waiters:
            if len(self.frames) >= count and not waiter.done():
                waiter.set_result(None)

    def _end(self, error):
        self.ends.append(error)
        self.ended.set_result(None)

    async def have(self, count):
        if len(self.frames) < count:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append((count, waiter))
            await asyncio.wait_for(waiter, 300)
        return [payload for payload, _ in self.frames]

    def close(self):
        self.channel.close()
        for _, fds in self.frames:
            for fd in fds:
                os.close(fd)


@pytest.fixture
async def pair():
    left, right = socket.socketpair()
    ends = End(left), End(right)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
async def raw():
    """A plain socket, and the end that it talks to."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    end = End(theirs)
    yield ours, end
    end.close()
    ours.close()


def frame(payload, num_fds=0):
    return len(payload).to_bytes(4, "little") + bytes([num_fds]) + payload


async def test_frames_arrive_whole_in_order_both_ways(pair):
    left, right = pair
    for number in range(5):
        left.channel.send(b"l%d" % number)
        right.channel.send(b"r%d" % number)
    left.channel.send(b"")
    assert await right.have(6) == [b"l0", b"l1", b"l2", b"l3", b"l4", b""]
    assert await left.have(5) == [b"r0", b"r1", b"r2", b"r3", b"r4"]


def test_any_split_of_the_stream_gives_the_same_frames():
    @case_settings(30)
    @given(st.lists(st.binary(max_size=300), max_size=8), st.data())
    def check(payloads, data):
        stream = b"".join(map(frame, payloads))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
        runner.run(play(payloads, [stream[first:last] for first, last in pairwise([0, *cuts, len(stream)])]))

    async def play(payloads, parts):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        end = End(theirs)
        for part in parts:
            ours.send(part)
            end.channel._read()
        assert [payload for payload, _ in end.frames] == payloads
        end.close()
        ours.close()

    with asyncio.Runner() as runner:
        check()


async def test_frames_larger_than_the_sockets_buffers_arrive_whole(pair):
    left, right = pair
    big = [bytes([number]) * (3 << 20) for number in range(3)]
    for payload in big:
        left.channel.send(payload)
    left.channel.send(b"last")
    # nothing waited for the peer to read
    assert left.channel.unsent_nbytes > 1 << 20
    assert await right.have(4) == [*big, b"last"]
    assert left.channel.unsent_nbytes == 0
    # and the writer is gone: an empty queue does not spin the loop
    assert not asyncio.get_running_loop().remove_writer(left.channel._sock.fileno())
    left.channel.send(b"more")
    assert (await right.have(5))[-1] == b"more"


async def test_both_sides_may_send_much_at_once(pair):
    left, right = pair
    big = bytes(5 << 20)
    left.channel.send(big)
    right.channel.send(big)
    assert await left.have(1) == await right.have(1) == [big]


# -- fds


def make_fds(count):
    return [os.memfd_create(f"test-{number}") for number in range(count)]


def files(fds):
    return [os.fstat(fd).st_ino for fd in fds]


async def test_fds_come_with_their_frame_as_duplicates_that_no_child_inherits(pair):
    left, right = pair
    fds = make_fds(2)
    want = files(fds)
    left.channel.send(b"take these", fds)
    for fd in fds:
        os.close(fd)
    await right.have(1)
    got = right.frames[0][1]
    assert files(got) == want
    assert not any(os.get_inheritable(fd) for fd in got)


async def test_fds_belong_to_the_frame_they_were_sent_with_however_frames_run_together(pair):
    left, right = pair
    fds = make_fds(2)
    one, two = files(fds)
    # all of it lies in the socket before the other side reads
    left.channel.send(b"a")
    left.channel.send(b"b", fds[:1])
    left.channel.send(b"c")
    left.channel.send(b"d", fds[1:])
    left.channel.send(b"e")
    await right.have(5)
    assert [files(got) for _, got in right.frames] == [[], [one], [], [two], []]
    for fd in fds:
        os.close(fd)


async def test_a_large_frame_carries_its_fds_too(pair):
    left, right = pair
    (fd,) = make_fds(1)
    left.channel.send(bytes(4 << 20))
    left.channel.send(bytes(2 << 20), [fd])
    await right.have(2)
    os.close(fd)
    assert [len(got) for _, got in right.frames] == [0, 1]
    # once, with its first bytes
    assert right.channel._fds == []


async def test_fds_of_a_frame_that_never_came_whole_are_closed(raw):
    ours, end = raw
    (fd,) = make_fds(1)
    socket.send_fds(ours, [frame(b"whole", 1)[:-2]], [fd])
    end.channel._read()
    (copy,) = end.channel._fds
    assert files([copy]) == files([fd])
    end.channel.close()
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(copy)


async def test_a_frame_without_the_fds_it_speaks_of_breaks_the_protocol(raw):
    ours, end = raw
    ours.send(frame(b"x", 1))
    await end.ended
    assert isinstance(end.ends[0], ProtocolError)
    assert end.frames == []


# -- ends


async def test_the_death_of_the_peer_is_told_once_after_what_it_wrote(raw):
    ours, end = raw
    ours.send(frame(b"bye") + frame(b"half")[:-1])
    ours.close()
    await end.ended
    assert [payload for payload, _ in end.frames] == [b"bye"]
    assert end.ends == [None]
    end.channel.send(b"dropped")
    assert end.channel.unsent_nbytes == 0


async def test_writing_to_a_dead_peer_is_no_error_of_the_writer(pair):
    left, right = pair
    right.channel.close()
    left.channel.send(b"x" * 100)
    left.channel.send(b"y" * 100)
    await left.ended
    assert len(left.ends) == 1
    # who closed its own end is not told
    assert right.ends == []


async def test_drain_delivers_all_that_lies_in_the_socket_and_then_the_end(raw):
    ours, end = raw
    ours.send(frame(b"one") + frame(b"two"))
    ours.close()
    end.channel.drain()
    assert [payload for payload, _ in end.frames] == [b"one", b"two"]
    assert end.ends == [None]
    end.channel.drain()


async def test_closing_in_the_middle_of_a_delivery_stops_it(raw):
    ours, end = raw
    ours.send(frame(b"one") + frame(b"two"))
    end.raises = None
    end._waiters.append((1, asyncio.get_running_loop().create_future()))
    end._waiters[0][1].add_done_callback(lambda _: None)
    original = end.channel._on_frame
    end.channel._on_frame = lambda payload, fds: (original(payload, fds), end.channel.close())
    end.channel._read()
    assert [payload for payload, _ in end.frames] == [b"one"]
    assert end.ends == []


@pytest.mark.parametrize("size", [(256 << 20) + 1, 0xFFFF_FFFF])
async def test_a_frame_that_is_too_large_breaks_the_protocol_before_it_is_read(raw, size):
    ours, end = raw
    ours.send(frame(b"fine") + size.to_bytes(4, "little") + b"\0")
    await end.ended
    assert [payload for payload, _ in end.frames] == [b"fine"]
    assert isinstance(end.ends[0], ProtocolError)
    assert str(size) in end.ends[0].problem


async def test_what_is_too_large_is_not_sent(pair, monkeypatch):
    monkeypatch.setattr(module, "MAX_FRAME_NBYTES", 10)
    left, right = pair
    with pytest.raises(ProtocolError, match="a frame of 11 bytes"):
        left.channel.send(bytes(11))
    with pytest.raises(ProtocolError, match="with 17 fds"):
        left.channel.send(b"", range(17))
    left.channel.send(bytes(10))
    assert await right.have(1) == [bytes(10)]


async def test_closing_twice_is_fine(pair):
    left, _ = pair
    left.channel.close()
    left.channel.close()
    assert left.ends == []


@pytest.mark.parametrize("error", [ProtocolError("no"), KeyError("not ours")])
async def test_what_a_reader_raises_ends_the_channel_and_no_frame_comes_twice(pair, error):
    one, other = pair
    other.raises = error
    one.channel.send(b"first")
    one.channel.send(b"second")
    await asyncio.wait_for(other.ended, 300)
    assert [payload for payload, _ in other.frames] == [b"first"]
    assert other.ends == [error]
    await asyncio.wait_for(one.ended, 300)
