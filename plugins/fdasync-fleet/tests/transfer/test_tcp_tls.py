"""Blocks by TLS: nothing is read on the way, nobody between both is believed, and nothing falls back to clear text."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys

import msgspec
import pytest
from fdasync_fleet.testing.transports.harness import TransportHooks
from fdasync_fleet.transfer import tcp_server
from fdasync_fleet.transfer.tcp import TcpTransport
from fdasync_fleet.transfer.tcp_tls import DIGEST_NBYTES, ServerTls
from fdasync_fleet.transfer.tcp_wire import ANSWER_NBYTES, KNOCK_NBYTES, NONCE_NBYTES, is_tls, knock, parse_address

from fdasync.errors import ConfigError

NONCE = bytes(range(16))


class Hooks(TransportHooks):
    stuck_s = 60.0

    def make(self):
        return TcpTransport(stuck_s=self.stuck_s, idle_s=60.0, tls=True)


class Quick(Hooks):
    """Gives up soon."""

    stuck_s = 0.3


class Between:
    """A process between a receiver and a sender: passes all on, a piece at a time, and keeps it. With a certificate of
    its own it passes the greeting on, and then speaks TLS with the receiver itself; `announces` it, too, in the place
    of the sender's."""

    def __init__(self, sender, certificate=None, *, announces=False, piece=1 << 16):
        self.announces, self.piece = announces, piece
        self.host, self.port = parse_address(sender.source.address)
        self.certificate = certificate
        self.seen = bytearray()
        self.from_sender = asyncio.Event()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.talk, "127.0.0.1", 0)
        self.address = f"tls:127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def talk(self, reader, writer):
        there, back = await asyncio.open_connection(self.host, self.port)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                if self.certificate is not None:
                    back.write(await reader.readexactly(KNOCK_NBYTES))
                    words = bytearray(await there.readexactly(ANSWER_NBYTES + DIGEST_NBYTES))
                    if self.announces:
                        words[NONCE_NBYTES : NONCE_NBYTES + DIGEST_NBYTES] = self.certificate.digest
                    writer.write(words)
                    await writer.start_tls(self.certificate._context)
                await asyncio.gather(self.pass_on(reader, back), self.pass_on(there, writer))
        finally:
            for one in (writer, back):
                one.close()

    async def pass_on(self, source, target):
        while data := await source.read(self.piece):
            self.seen += data
            target.write(data)
            await target.drain()
            # the other sides look at each piece
            await asyncio.sleep(0)
        target.close()


async def test_whoever_stands_between_reads_nothing():
    async with Hooks().sides() as (sender, receiver), Between(sender) as between:
        nbytes = 3_000_000
        wanted = receiver.wanted(sender, "a", nbytes)
        source = msgspec.structs.replace(sender.source, address=between.address)
        assert await receiver.take(source, [wanted]) == ["done"]
        part = wanted.ref_parts[0]
        with sender.regions[part.region].view(part.offset, part.nbytes) as view:
            data = bytes(view)
        assert len(between.seen) > nbytes
        pieces = [data[at : at + 32] for at in range(0, len(data) - 32, 100_000)]
        assert len(set(pieces)) > 20
        assert not any(piece in between.seen for piece in pieces)


async def test_a_certificate_of_another_is_not_believed():
    async with Hooks().sides() as (sender, receiver), Between(sender, ServerTls()) as between:
        source = msgspec.structs.replace(sender.source, address=between.address)
        (outcome,) = await receiver.start(source, [receiver.wanted(sender, "a", 1000)])
        assert outcome.status == "failed"
        assert "another process than the sender shows a certificate" in outcome.problem


async def test_a_certificate_of_another_in_the_senders_answer_is_not_believed():
    async with Hooks().sides() as (sender, receiver), Between(sender, ServerTls(), announces=True) as between:
        source = msgspec.structs.replace(sender.source, address=between.address)
        (outcome,) = await receiver.start(source, [receiver.wanted(sender, "a", 1000)])
        assert outcome.status == "failed"
        assert "another process than the sender answered" in outcome.problem


@pytest.mark.parametrize(("piece", "nbytes"), [(10, 9_000), (5000, 600_000)])
async def test_records_that_come_in_pieces_are_waited_for(monkeypatch, piece, nbytes):
    """A few bytes at a time: TLS has read most of a record when the kernel wakes the reader for its last bytes."""
    # a handshake of so many pieces may take longer than a stranger has, on a busy machine
    monkeypatch.setattr(tcp_server, "_GREET_S", 60.0)
    async with Hooks().sides() as (sender, receiver), Between(sender, piece=piece) as between:
        source = msgspec.structs.replace(sender.source, address=between.address)
        assert await receiver.take(source, [receiver.wanted(sender, "a", nbytes)]) == ["done"]


async def test_older_tls_is_refused():
    async with Hooks().sides(1) as (sender,):
        host, port = parse_address(sender.source.address)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(knock(sender.source.token, NONCE, tls=True))
        await reader.readexactly(ANSWER_NBYTES + DIGEST_NBYTES)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await writer.start_tls(context, ssl_handshake_timeout=300.0)
        writer.close()
        assert sender.transport._server.drops["protocol"] == 1


async def test_a_receiver_that_encrypts_takes_nothing_in_clear():
    plain = Hooks()
    plain.make = lambda: TcpTransport(stuck_s=60.0)
    async with plain.sides(1) as (sender,), Hooks().sides(1) as (receiver,):
        assert not is_tls(sender.source.address)
        (outcome,) = await receiver.start(sender.source, [receiver.wanted(sender, "a", 1000)])
        assert (outcome.status, outcome.transient) == ("failed", False)
        assert "travel in clear" in outcome.problem
        assert "encrypt_blocks" in outcome.problem


async def test_a_receiver_that_does_not_ask_for_it_speaks_it_with_a_sender_that_does():
    plain = Hooks()
    plain.make = lambda: TcpTransport(stuck_s=60.0)
    async with Hooks().sides(1) as (sender,), plain.sides(1) as (receiver,):
        assert await receiver.take(sender.source, [receiver.wanted(sender, "a", 1_500_000)]) == ["done"]


@pytest.mark.both_loops
async def test_a_sender_that_encrypts_does_not_speak_without():
    async with Hooks().sides(1) as (sender,):
        sender.block("a", 1000)
        host, port = parse_address(sender.source.address)
        for words in (
            knock(sender.source.token, NONCE),
            # the magic of TLS over the greeting without
            knock(sender.source.token, NONCE, tls=True)[:8] + knock(sender.source.token, NONCE)[8:],
        ):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(words)
            async with asyncio.timeout(300):
                assert await reader.read() == b""
            writer.close()
        assert sender.transport._server.drops["protocol"] == 2


async def test_clear_text_behind_the_greeting_ends_the_connection():
    async with Hooks().sides() as (sender, receiver):
        sender.block("a", 1000)
        host, port = parse_address(sender.source.address)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(knock(sender.source.token, NONCE, tls=True))
        await reader.readexactly(ANSWER_NBYTES + DIGEST_NBYTES)
        writer.write(bytes(32) + b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(300):
            with contextlib.suppress(ConnectionError):
                # an alert, and no block
                assert len(await reader.read()) < 100
        writer.close()
        assert sender.transport._server.drops["protocol"] == 1
        # and a greeting with more behind it, before the answer
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(knock(sender.source.token, NONCE, tls=True) + bytes(100))
        async with asyncio.timeout(300):
            with contextlib.suppress(ConnectionError):
                assert len(await reader.read()) <= ANSWER_NBYTES + DIGEST_NBYTES
        writer.close()
        # the port serves others
        assert await receiver.take(sender.source, [receiver.wanted(sender, "b", 1000)]) == ["done"]


async def test_one_that_does_not_go_on_with_the_handshake_is_dropped_in_time():
    async with Quick().sides(1) as (sender,):
        host, port = parse_address(sender.source.address)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(knock(sender.source.token, NONCE, tls=True))
        await reader.readexactly(ANSWER_NBYTES + DIGEST_NBYTES)
        async with asyncio.timeout(300):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        assert sum(sender.transport._server.drops.values()) == 1


def test_each_process_has_a_certificate_of_its_own():
    assert ServerTls().digest != ServerTls().digest


def test_without_the_package_that_makes_certificates_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"encrypt_blocks.*cryptography.*pip install"):
        TcpTransport(tls=True)


async def test_a_receiver_that_goes_away_before_the_handshake_is_dropped(monkeypatch):
    def gone(self, sock):
        raise OSError("not connected")

    async with Quick().sides(1) as (sender,):
        monkeypatch.setattr(ServerTls, "wrap", gone)
        host, port = parse_address(sender.source.address)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(knock(sender.source.token, NONCE, tls=True))
        async with asyncio.timeout(300):
            with contextlib.suppress(ConnectionError):
                assert len(await reader.read()) <= ANSWER_NBYTES + DIGEST_NBYTES
        writer.close()
        assert sender.transport._server.drops["protocol"] == 1
        assert len(sender.transport._server) == 0
