"""Copies over a socket: what comes from the wire is nothing until it is what was asked for, on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket

import msgspec
import pytest
import uvloop
from fdasync_fleet.transfer import tcp_server
from fdasync_fleet.transfer.base import CopySpec
from fdasync_fleet.transfer.tcp import TcpTransport
from fdasync_fleet.transfer.tcp_client import RUN_NBYTES, TcpTransfer
from fdasync_fleet.transfer.tcp_wire import (
    ANSWER_NBYTES,
    KNOCK_NBYTES,
    MAGIC,
    MAX_REQUESTS,
    MAX_RUN_NBYTES,
    NOT_OFFERED,
    OK,
    PROOF_NBYTES,
    REPLY_NBYTES,
    REQUEST_NBYTES,
    Request,
    answer,
    check_answer,
    check_knock,
    knock,
    pack_reply,
    pack_request,
    parse_address,
    proof,
)
from fdasync_fleet.transfer.transfers import Transfers
from hypothesis import given, settings
from hypothesis import strategies as st
from tcp_dial import NONCE, REPLY, Hooks, dial

from fdasync.cache.store.base import Outcome
from fdasync.errors import BadInput
from fdasync.ipc.shared_memory import Part
from fdasync.testing import until
from tests.support import skips


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "::", "localhost", "", "127.0.0.1 "])
def test_it_listens_on_loopback_only(host):
    with pytest.raises(BadInput, match="host"):
        TcpTransport(host)


@pytest.mark.parametrize("address", ["192.0.2.7:80", "localhost:80", "0.0.0.0:80", "[::]:80", "127.0.0.1:0", ""])
async def test_it_dials_loopback_only(address):
    async with Hooks().sides() as (sender, receiver):
        copy_spec = receiver.wanted(sender, "a", 100)
        source = msgspec.structs.replace(sender.source, address=address)
        (outcome,) = await receiver.start(source, [copy_spec])
        assert (outcome.status, outcome.transient) == ("failed", False)
        assert "address" in outcome.problem or "loopback" in outcome.problem


async def test_the_other_family():
    hooks = Hooks()
    hooks.make = lambda: TcpTransport("::1")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    async with hooks.sides() as (sender, receiver):
        assert sender.source.address.startswith("[::1]:")
        assert await receiver.take(sender.source, [receiver.wanted(sender, "a", 100_000)]) == ["done"]


# -- the sender's side ------------------------------------------------------------------------------


async def greet(sender, data=b""):
    """Dial as a receiver does that knows the token."""
    token = sender.source.token
    reader, writer = await dial(sender, knock(token, NONCE))
    theirs, _ = check_answer(await reader.readexactly(ANSWER_NBYTES), token, NONCE)
    writer.write(proof(token, NONCE, theirs) + data)
    return reader, writer


async def hung_up(reader, writer, seconds=300.0) -> bool:
    """The sender ends the connection; with what it sent before, if anything."""
    try:
        await asyncio.wait_for(reader.read(1 << 20), seconds)
        return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    finally:
        writer.close()


@pytest.mark.both_loops
async def test_garbage_ends_the_connection_and_nothing_else():
    async with Hooks().sides() as (sender, receiver):
        parts, _ = sender.block("a", 1000)
        hello = knock(sender.source.token, NONCE)
        strange = [
            b"GET / HTTP/1.1\r\n\r\n" + bytes(50),
            MAGIC + bytes(48),
            knock(bytes(16), NONCE),
            hello[:-1] + bytes([hello[-1] ^ 1]),
        ]
        for data in strange:
            reader, writer = await dial(sender, data)
            async with asyncio.timeout(300):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b"", "a stranger was answered"
            writer.close()
        assert await hung_up(*await dial(sender, hello + bytes(PROOF_NBYTES)))
        assert sender.transport._server.drops["protocol"] == len(strange) + 1
        bad = [
            pack_request(Request(0, parts[0], 0, 0)),
            pack_request(Request(0, parts[0], 999, 2)),
            pack_request(Request(0, parts[0], 2**64 - 1, 1)),
            pack_request(Request(0, Part(0, 0, 2**63), 0, MAX_RUN_NBYTES + 1)),
            pack_request(Request(0, parts[0], 0, 2**32 - 1)),
            b"\xff" * REQUEST_NBYTES,
        ]
        for data in bad:
            assert await hung_up(*await greet(sender, data)), data
        assert sender.transport._server.drops["protocol"] == len(strange) + 1 + len(bad)
        # half of something, and nothing at all
        for data in (b"", MAGIC, hello[:-1]):
            assert await hung_up(*await dial(sender, data)), data
        assert await hung_up(*await greet(sender, b"x" * (REQUEST_NBYTES - 1)))
        assert sender.transport._server.drops["stuck"] == 4
        assert await receiver.take(sender.source, [receiver.wanted(sender, "b", 50_000)]) == ["done"]


async def test_what_is_not_on_offer_is_not_read():
    async with Hooks().sides(1) as (sender,):
        parts, _ = sender.block("a", 1000)
        secret = sender.part(1000)
        sender.write(secret, b"s" * 1000)
        asked = [
            Part(secret.region, secret.offset, secret.nbytes),
            Part(0, parts[0].offset, 999),
            Part(0, parts[0].offset + 1, 999),
            Part(0, 0, 40 << 20),
            Part(1, parts[0].offset, 1000),
            Part(2**32 - 1, 2**64 - 1, 2**64 - 1),
        ]
        data = b""
        for number, part in enumerate([*asked, parts[0]]):
            data += pack_request(Request(number, part, 0, 500))
        reader, writer = await greet(sender, data)
        for number in range(len(asked)):
            assert REPLY.unpack(await reader.readexactly(REPLY_NBYTES)) == (number, NOT_OFFERED, 0)
        assert REPLY.unpack(await reader.readexactly(REPLY_NBYTES)) == (len(asked), OK, 500)
        assert await reader.readexactly(500) == sender.read(parts[0])[:500]
        writer.close()


async def test_a_receiver_that_does_not_read_is_dropped_and_holds_up_no_other():
    async with Hooks().sides() as (sender, receiver):
        parts, _ = sender.block("a", 30 << 20)
        run = pack_request(Request(0, parts[0], 0, MAX_RUN_NBYTES))
        # more than it takes to fill every buffer between the two, and more requests than are read at a time
        reader, writer = await greet(sender)
        reader._transport.pause_reading()
        writer.write(run * 20 * MAX_REQUESTS)
        await asyncio.sleep(0.1)
        (connection,) = sender.transport._server._connections
        assert len(connection._replies) <= MAX_REQUESTS
        assert len(connection._unread) <= KNOCK_NBYTES + MAX_REQUESTS * REQUEST_NBYTES
        for number in range(20):
            assert await receiver.take(sender.source, [receiver.wanted(sender, number, 10_000)], 300.0) == ["done"]
        await until(lambda: sender.transport._server.drops["stuck"] == 1)
        reader._transport.resume_reading()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_so_many_connections_and_no_more(monkeypatch):
    monkeypatch.setattr(tcp_server, "MAX_CONNECTIONS", 3)
    async with Hooks().sides() as (sender, receiver):
        assert await receiver.take(sender.source, [receiver.wanted(sender, "a", 100)]) == ["done"]
        idle = [await greet(sender) for _ in range(5)]
        await until(lambda: sender.transport._server.drops["full"] == 3)
        assert len(sender.transport._server) == 3
        # who was there first goes on
        assert await receiver.take(sender.source, [receiver.wanted(sender, "b", 100)]) == ["done"]
        for _, writer in idle:
            writer.close()


async def test_strangers_take_no_place_from_a_receiver_with_the_token(monkeypatch):
    # dialing so many may take longer than a stranger has, on a busy machine
    monkeypatch.setattr(tcp_server, "_GREET_S", 60.0)
    async with Hooks().sides() as (sender, receiver):
        server = sender.transport._server
        strangers = [await dial(sender) for _ in range(tcp_server.MAX_STRANGERS + 6)]
        await until(lambda: server.drops["stranger"] == 6)
        # the oldest made room
        assert all([await hung_up(*stranger) for stranger in strangers[:6]])
        assert await receiver.take(sender.source, [receiver.wanted(sender, "a", 100)]) == ["done"]
        assert len(server) == tcp_server.MAX_STRANGERS
        # and the next ones none of those who greeted
        strangers += [await dial(sender) for _ in range(tcp_server.MAX_STRANGERS)]
        (connection,) = [each for each in server._connections if each not in server._strangers]
        assert await receiver.take(sender.source, [receiver.wanted(sender, "b", 100)]) == ["done"]
        assert connection in server._connections
        for _, writer in strangers:
            writer.close()


async def test_a_connection_without_a_greeting_in_time_goes_however_busy_it_is(monkeypatch):
    monkeypatch.setattr(tcp_server, "_GREET_S", 0.6)
    hooks = Hooks()
    hooks.make = lambda: TcpTransport(stuck_s=30.0)
    async with hooks.sides() as (sender, receiver):
        server = sender.transport._server
        assert await receiver.take(sender.source, [receiver.wanted(sender, "a", 100)]) == ["done"]
        ends = [await dial(sender)]
        _, writer = ends[0]
        await asyncio.sleep(0.3)
        ends.append(await dial(sender, MAGIC))
        writer.write(MAGIC[:4])
        async with asyncio.timeout(300):
            # it goes first, though it wrote last
            assert await ends[0][0].read() == b""
            assert (server.drops["stranger"], len(server)) == (1, 2)
            assert await ends[1][0].read() == b""
        assert (server.drops["stranger"], len(server)) == (2, 1)
        assert server.drops["stuck"] == 0
        assert server._timer is None
        for _, writer in ends:
            writer.close()


async def test_without_fds_it_waits_and_does_not_spin(monkeypatch):
    hooks = Hooks()
    # it sweeps often, and the receiver has patience
    hooks.make = lambda: TcpTransport(stuck_s=10.0, idle_s=0.1)
    async with hooks.sides() as (sender, receiver):
        server = sender.transport._server
        sock, calls, sweeps = server._sock, [], []
        sweep = server.sweep

        class Poor:
            close, fileno = sock.close, sock.fileno

            def accept(self):
                calls.append(1)
                raise OSError(errno.EMFILE, "too many open files")

        monkeypatch.setattr(server, "sweep", lambda now: sweeps.append(now) or sweep(now))
        server._sock = Poor()
        task = receiver.start(sender.source, [receiver.wanted(sender, "a", 100)])
        await until(lambda: len(calls) == 3)
        server._sock = sock
        # the first time, and then once behind each sweep
        assert len(calls) <= len(sweeps) + 1
        assert (await task)[0].status == "done"


@pytest.mark.both_loops
async def test_a_part_that_is_withdrawn_is_not_read_any_more():
    async with Hooks().sides() as (sender, receiver):
        parts, sums = sender.block("a", 24 << 20)
        copy_spec = receiver.copy_spec(parts, sums)
        task = receiver.start(sender.source, [copy_spec])
        await asyncio.sleep(0.002)
        sender.transport.withdraw(parts)
        # the sender uses it for something else at once
        sender.write(parts[0], b"s" * parts[0].nbytes)
        (outcome,) = await task
        assert outcome.status in ("failed", "damaged")
        assert b"ssssssss" not in receiver.read(copy_spec.parts[0])
        sender.transport.offer(parts)


# -- the receiver's side ----------------------------------------------------------------------------


async def test_one_connection_serves_all_and_is_made_anew():
    async with Hooks().sides() as (sender, receiver):
        copy_specs = [receiver.wanted(sender, number, 100_000) for number in range(8)]
        tasks = [receiver.start(sender.source, [copy_spec]) for copy_spec in copy_specs]
        await asyncio.gather(*tasks)
        assert len(sender.transport._server) == 1
        for connection in list(sender.transport._server._connections):
            sender.transport._server.drop(connection)
        statuses = [await receiver.take(sender.source, copy_specs) for _ in range(2)]
        assert set(statuses[-1]) == {"done"}
        assert len(sender.transport._server) == 1


async def test_an_idle_connection_is_closed_on_both_sides():
    hooks = Hooks()
    hooks.make = lambda: TcpTransport(stuck_s=5.0, idle_s=0.1)
    async with hooks.sides() as (sender, receiver):
        copy_spec = receiver.wanted(sender, "a", 100_000)
        for _ in range(2):
            assert await receiver.take(sender.source, [copy_spec]) == ["done"]
            assert (len(sender.transport._server), len(receiver.transport._connections)) == (1, 1)
            await until(lambda: not len(sender.transport._server) and not receiver.transport._connections)


async def test_a_sender_that_owes_bytes_is_dropped():
    """Before the deadline of the receive: another one can dial anew."""
    async with Hooks().sides() as (sender, receiver), liar(sender, [b""], hang=True) as source:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 300.0
        (outcome,) = await receiver.start(source, [receiver.wanted(sender, "a", 100_000)], 300.0)
        assert (outcome.status, outcome.transient) == ("failed", True)
        assert "owes bytes" in outcome.problem
        assert loop.time() < deadline


async def test_a_source_without_a_listener():
    async with Hooks().sides() as (sender, receiver):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        source = msgspec.structs.replace(sender.source, address=f"127.0.0.1:{port}")
        (outcome,) = await receiver.start(source, [receiver.wanted(sender, "a", 100_000)])
        assert (outcome.status, outcome.transient) == ("failed", True)


async def test_of_a_receipt_whose_outcome_is_known_no_more_is_asked_for():
    async with Hooks().sides() as (sender, receiver):
        ours = tuple([receiver.part(3 * RUN_NBYTES) for _ in range(2)])
        theirs, sums = sender.block("a", 3 * RUN_NBYTES)
        copy_specs = [CopySpec(theirs * 2, ours, sums * 2), CopySpec(theirs, ours[:1], sums)]
        job = TcpTransfer(
            Transfers().start(b"", asyncio.get_running_loop().time() + 9.0), copy_specs, [None, None], receiver.regions
        )
        first = next(job.runs)
        assert (first.place, first.part, first.start) == (0, 0, 0)
        # its bytes were wrong, say
        job.outcomes[0] = Outcome("damaged", "checksum")
        assert [(run.place, run.part, run.start // RUN_NBYTES) for run in job.runs] == [(1, 0, 0), (1, 0, 1), (1, 0, 2)]


@contextlib.asynccontextmanager
async def liar(sender, answers, hang=False):
    """A source whose socket sends these bytes to whoever dials, one string for each who does, and hangs up."""
    left = list(answers)
    ended = asyncio.Event()
    running = set()

    async def talk(reader, writer):
        running.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            token = sender.source.token
            theirs = check_knock(await reader.readexactly(KNOCK_NBYTES), token)
            writer.write(answer(token, theirs, NONCE))
            assert await reader.readexactly(PROOF_NBYTES) == proof(token, theirs, NONCE)
            writer.write(left.pop(0) if left else b"")
            if hang:
                await ended.wait()
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield msgspec.structs.replace(sender.source, address=f"127.0.0.1:{port}")
    finally:
        ended.set()
        server.close()
        if running:
            await asyncio.wait(running, timeout=300)
        await server.wait_closed()


HEADS = st.builds(
    lambda number, verdict, length: REPLY.pack(number, verdict, length),
    st.integers(0, 3) | st.integers(0, 2**64 - 1),
    st.integers(0, 2) | st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 1000, 700, 524_288]) | st.integers(0, 2**32 - 1),
)


@pytest.mark.ci
@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(HEADS | st.binary(max_size=2000), max_size=6).map(b"".join), min_size=1, max_size=8))
def test_whatever_a_sender_answers(answers):
    async def main():
        async with Hooks().sides() as (sender, receiver), liar(sender, answers) as source:
            copy_specs = [receiver.wanted(sender, "a", 1000, 700), receiver.wanted(sender, "b", 600_000)]
            before = receiver.snapshot()
            for _ in answers:
                statuses = await receiver.take(source, copy_specs, 2.0)
                assert set(statuses) <= {"failed", "damaged"}
                receiver.assert_only(before, copy_specs)
            receiver.transport.forget(source)
            # the one who tells the truth is believed
            assert await receiver.take(sender.source, copy_specs) == ["done", "done"]

    uvloop.run(main())


async def test_right_bytes_and_then_too_many():
    async with Hooks().sides() as (sender, receiver):
        copy_spec = receiver.wanted(sender, "a", 1000)
        good = pack_reply(0, OK, 1000) + sender.read(copy_spec.ref_parts[0])
        async with liar(sender, [good, good + pack_reply(1, OK, 5) + b"extra"]) as source:
            before = receiver.snapshot()
            for _ in range(2):
                assert await receiver.take(source, [copy_spec], 2.0) == ["done"]
                await asyncio.sleep(0.05)
                receiver.assert_only(before, [copy_spec])
                assert receiver.has(copy_spec, "a")
            assert not [each for each in receiver.transport._connections.values() if not each.closed]


@pytest.mark.skips
@pytest.mark.both_loops
@pytest.mark.parametrize("late", ["greeting", "request"])
async def test_what_came_while_the_sender_s_loop_was_blocked_is_read_first(monkeypatch, late):
    """Neither a stranger's greeting nor the rest of what a receiver owed is late for it."""
    monkeypatch.setattr(tcp_server, "_GREET_S", skips.LIMIT_S if late == "greeting" else 1e6)
    hooks = Hooks()
    hooks.make = lambda: TcpTransport(stuck_s=1e6 if late == "greeting" else skips.LIMIT_S, idle_s=1e6)
    async with hooks.sides(1) as (sender,):
        server = sender.transport._server
        parts, _ = sender.block("a", 1000)
        token = sender.source.token
        hello, request = knock(token, NONCE), pack_request(Request(0, parts[0], 0, 100))
        words = hello if late == "greeting" else request
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, parse_address(sender.source.address))

            async def greet_late():
                theirs, _ = check_answer(await loop.sock_recv(sock, ANSWER_NBYTES), token, NONCE)
                await loop.sock_sendall(sock, proof(token, NONCE, theirs))

            if late == "request":
                await loop.sock_sendall(sock, hello)
                await greet_late()
            await loop.sock_sendall(sock, words[:4])
            await until(lambda: any(len(each._unread) == 4 for each in server._connections), every_s=0.001)
            ours, theirs = socket.socketpair()

            def block() -> None:
                # a reader's callback: uvloop looks at its timers next, and reads after that
                ours.recv(1)
                sock.send(words[4:])
                skips.block()

            with ours, theirs:
                ours.setblocking(False)
                theirs.setblocking(False)
                loop.add_reader(ours, block)
                theirs.send(b"x")
                await asyncio.sleep(0.1)
                loop.remove_reader(ours)
            async with asyncio.timeout(300):
                if late == "greeting":
                    await greet_late()
                    await loop.sock_sendall(sock, request)
                assert await loop.sock_recv(sock, 1)
            # and who comes late is late all the same
            await loop.sock_sendall(sock, request[:4])
            if late == "request":
                await until(lambda: any(len(each._unread) == 4 for each in server._connections), every_s=0.001)
                skips.block()
                async with asyncio.timeout(300):
                    while await loop.sock_recv(sock, 1 << 16):
                        pass
        assert (server.drops["stranger"], server.drops["stuck"]) == (0, int(late == "request"))
