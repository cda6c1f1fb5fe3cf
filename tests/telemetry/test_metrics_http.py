"""The endpoint that Prometheus scrapes: requests, clients that do not behave, addresses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading

import pytest

from fdasync import SamplingParams
from fdasync.errors import ConfigError
from fdasync.telemetry.metrics_http import ScrapeServer
from fdasync.telemetry.prometheus import PrometheusTap
from fdasync.testing import synthetic_engine, until
from tests.telemetry.scrape import Scrape, check_counters

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


# -- the endpoint -------------------------------------------------------------------------------------


async def talk(port: int, data: bytes, host: str = "127.0.0.1") -> bytes:
    """Send, then read to the end of the connection."""
    async with asyncio.timeout(300):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(data)
            return await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()


def get(path: str = "/metrics", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


@pytest.mark.both_loops
async def test_a_scrape(monkeypatch):
    async with synthetic_engine() as engine, PrometheusTap(engine) as tap:
        # kept, since no two are alike for sure: the loop may be held up between them, which is counted
        given = []
        exposition = tap.exposition
        monkeypatch.setattr(tap, "exposition", lambda: given.append(exposition()) or given[-1])
        await engine.complete([1, 2, 3], GREEDY)
        await until(lambda: not tap.pending)
        port = await tap.serve()
        answer = await talk(port, get())
        head, body = answer.split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
        assert f"Content-Length: {len(body)}".encode() in head
        assert [body] == given
        check_counters(Scrape(body), engine)
        # as a scraper asks that is configured with parameters
        assert (await talk(port, get("/metrics?name=x"))).startswith(b"HTTP/1.1 200 OK")
        bare, nothing = (await talk(port, get(method="HEAD"))).split(b"\r\n\r\n", 1)
        told = f"Content-Length: {len(body)}\r\n", f"Content-Length: {len(given[-1])}\r\n"
        assert (bare, nothing) == (head.replace(told[0].encode(), told[1].encode()), b"")
        assert len(given) == 3
        assert threading.active_count() == 1
        with pytest.raises(ConfigError, match="once"):
            await tap.serve()
    with pytest.raises(OSError, match=r".*"):
        await talk(port, get())


@pytest.mark.both_loops
@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/"), 404),
        (get("/metrics/x"), 404),
        (get("//metrics"), 404),
        (get(method="POST"), 405),
        (get(method="get"), 405),
        (b"\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/2\r\n\r\n", 400),
        (b"\x00\xff\xfe \x01\r\n\r\n", 400),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: " + b"y" * 9000, 431),
    ],
)
async def test_bad_requests(request_, status):
    def never():
        raise AssertionError("nobody asked for it")

    server = ScrapeServer(never)
    port = await server.open("127.0.0.1", 0)
    answer = await talk(port, request_)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"Connection: close" in answer
    assert server.answered == {status: 1}
    await server.aclose()
    await server.aclose()


async def test_content_that_cannot_be_made_is_a_500():
    def broken():
        raise OSError("private words")

    server = ScrapeServer(broken)
    port = await server.open("127.0.0.1", 0)
    answer = await talk(port, get())
    assert answer.startswith(b"HTTP/1.1 500 Internal Server Error: OSError\r\n")
    assert b"private" not in answer
    await server.aclose()


@pytest.mark.both_loops
@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nX", b"GET /metrics HTTP/1.1\n\n"])
async def test_a_client_that_does_not_ask_is_left(sent):
    server = ScrapeServer(lambda: b"", connection_s=0.05)
    port = await server.open("127.0.0.1", 0)
    # it ends: with a reset, or with nothing
    with contextlib.suppress(ConnectionResetError):
        assert await talk(port, sent) == b""
    assert server.answered == {}
    await server.aclose()


@pytest.mark.both_loops
async def test_a_client_that_does_not_take_its_answer_is_left():
    server = ScrapeServer(lambda: bytes(64 << 20), connection_s=0.1)
    port = await server.open("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(get())
    await until(lambda: server.answered == {200: 1})
    await until(lambda: not server._clients)
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await reader.readexactly(64 << 20)
    writer.close()
    await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])
    await server.aclose()


@pytest.mark.both_loops
async def test_a_client_that_leaves_causes_no_error():
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    server = ScrapeServer(lambda: bytes(16 << 20))
    port = await server.open("127.0.0.1", 0)
    for sent in (b"", b"GET /me", get()):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        await until(lambda: len(server._clients) == 1)
        writer.transport.abort()
        await until(lambda: not server._clients)
    await server.aclose()
    assert errors == []


@pytest.mark.both_loops
async def test_too_many_clients_at_a_time():
    server = ScrapeServer(lambda: b"x\n")
    port = await server.open("127.0.0.1", 0)
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(16)]
    await until(lambda: len(server._clients) == 16)
    with contextlib.suppress(ConnectionResetError):
        assert await talk(port, get()) == b""
    # one leaves, and there is room again
    idle[0][1].close()
    await until(lambda: len(server._clients) == 15)
    assert (await talk(port, get())).endswith(b"x\n")
    # closing does not wait for those who stay
    async with asyncio.timeout(300):
        await server.aclose()
    for _, writer in idle:
        writer.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "10.1.2.3", "::ffff:127.0.0.1", "8.8.8.8"])
async def test_it_listens_on_the_loopback_only(host):
    async with synthetic_engine() as engine, PrometheusTap(engine) as tap:
        with pytest.raises(ConfigError, match=re.escape(f"{host} is not the loopback")):
            await tap.serve(0, host)
        # a refusal is not the end of it
        assert await tap.serve(0) > 0


@pytest.mark.parametrize(("host", "port"), [("localhost", 0), ("", 0), ("127.0.0.1", -1), ("127.0.0.1", 1 << 16)])
async def test_addresses_that_are_none(host, port):
    with pytest.raises(ConfigError, match=r"address|port"):
        await ScrapeServer(bytes).open(host, port)


async def test_an_address_that_is_taken():
    first, second = ScrapeServer(lambda: b""), ScrapeServer(lambda: b"")
    port = await first.open("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        await second.open("127.0.0.1", port)
    # the server ends it, so it lingers
    await talk(port, get())
    await first.aclose()
    assert await second.open("127.0.0.1", port) == port
    await second.aclose()


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this machine has no IPv6")
async def test_ipv6():
    server = ScrapeServer(lambda: b"x\n")
    try:
        port = await server.open("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    assert (await talk(port, get(), "::1")).endswith(b"x\n")
    await server.aclose()
