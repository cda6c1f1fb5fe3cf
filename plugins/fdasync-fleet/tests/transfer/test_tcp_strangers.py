"""Who may take blocks over a socket: a recorded greeting, a stolen port, an address beyond the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import msgspec
import pytest
from fdasync_fleet.transfer.tcp import TcpTransport
from fdasync_fleet.transfer.tcp_wire import (
    ANSWER_NBYTES,
    KNOCK_NBYTES,
    OK,
    REPLY_NBYTES,
    Request,
    check_answer,
    knock,
    pack_reply,
    pack_request,
    proof,
)
from tcp_dial import NONCE, Hooks, dial

from fdasync.errors import BadInput


async def test_what_another_receiver_said_is_no_proof():
    """A recorded greeting, replayed: it gets an answer with a new nonce, and no block."""
    async with Hooks().sides(1) as (sender,):
        parts, _ = sender.block("a", 1000)
        token = sender.source.token
        request = pack_request(Request(0, parts[0], 0, 100))
        reader, writer = await dial(sender, knock(token, NONCE))
        theirs, _ = check_answer(await reader.readexactly(ANSWER_NBYTES), token, NONCE)
        recorded = proof(token, NONCE, theirs) + request
        writer.write(recorded)
        assert len(await reader.readexactly(REPLY_NBYTES + 100)) == REPLY_NBYTES + 100
        writer.close()
        reader, writer = await dial(sender, knock(token, NONCE) + recorded)
        async with asyncio.timeout(300):
            with contextlib.suppress(ConnectionError):
                assert len(await reader.read()) <= ANSWER_NBYTES
        writer.close()
        assert sender.transport._server.drops["protocol"] == 1


async def test_a_process_that_took_the_senders_port_is_not_believed():
    async def talk(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readexactly(KNOCK_NBYTES)
            writer.write(bytes(ANSWER_NBYTES) + pack_reply(0, OK, 100) + bytes(100))
            await writer.drain()
        writer.close()

    async with Hooks().sides() as (sender, receiver):
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        source = msgspec.structs.replace(sender.source, address=f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        (outcome,) = await receiver.start(source, [receiver.wanted(sender, "a", 100)])
        assert outcome.status == "failed"
        assert "another process" in outcome.problem
        server.close()
        await server.wait_closed()


async def test_with_keys_a_sender_may_be_beyond_the_loopback():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # sends nothing: asks for the route
            probe.connect_ex(("192.0.2.1", 9))
            host = probe.getsockname()[0]
        except OSError:
            host = "127.0.0.1"
    if host.startswith(("127.", "0.")):
        pytest.skip("this machine has the loopback alone")
    with pytest.raises(BadInput, match="without keys"):
        TcpTransport(host)
    for wrong in ("0.0.0.0", "::", "224.0.0.1"):
        with pytest.raises(BadInput, match="no machine"):
            TcpTransport(wrong, keyed=True)
    hooks = Hooks()
    hooks.make = lambda: TcpTransport(host, keyed=True)
    async with hooks.sides() as (sender, receiver):
        assert sender.source.address.startswith(f"{host}:")
        assert await receiver.take(sender.source, [receiver.wanted(sender, "a", 100_000)]) == ["done"]
