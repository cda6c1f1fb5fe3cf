"""Requests as no library sends them: pipelined, half read, with trailers without end, with an offer to upgrade."""

from __future__ import annotations

import asyncio
import json
import logging
import random

import pytest
from fdasync_http.config import ConnectionLimits
from fdasync_http.server import Listen

from fdasync.testing import until

KEY = "sk-0123456789abcdef"
PING = b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
LONG = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}


def listen(**limits):
    return Listen(port=0, drain_s=1.0, limits=ConnectionLimits(**limits))


def post(body, head=b""):
    encoded = json.dumps(body).encode()
    return b"POST /generate HTTP/1.1\r\nhost: x\r\n%scontent-length: %d\r\n\r\n" % (head, len(encoded)) + encoded


class Line:
    """A connection, byte for byte."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    def send(self, data):
        self._writer.write(data)

    async def answer(self):
        """The head of the next answer, and its body."""
        async with asyncio.timeout(300):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            return head, await self._reader.readexactly(length)

    async def rest(self):
        """All that comes until the server closes the connection."""
        async with asyncio.timeout(300):
            try:
                return await self._reader.read()
            except ConnectionResetError:
                return b""

    def close(self):
        self._writer.close()


async def line_to(scene):
    return Line(*await asyncio.open_connection("127.0.0.1", scene.port))


async def still_serves(scene):
    response = await scene.client.post("/generate", json={"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "sent", [b"GARBAGE\r\n\r\n", b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"]
)
async def test_what_is_no_request_is_told_so_as_every_error(scene_of, sent):
    async with scene_of() as scene:
        line = await line_to(scene)
        line.send(sent)
        head, body = await line.answer()
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["code"] == "bad_http"
        assert await line.rest() == b""
        line.close()


@pytest.mark.parametrize(
    "head",
    [
        b"", b"host: a\r\nhost: a", b"host: a\r\nHost: b", b"host: a b", b"host: a/b", b"host: a@b", b"host: \xff",
        b"host: a, b",
    ],
)  # fmt: skip
async def test_a_request_is_for_one_host(scene_of, head):
    async with scene_of() as scene:
        for offer in (b"", b"connection: upgrade\r\nupgrade: h2c\r\n"):
            line = await line_to(scene)
            line.send(b"GET /ping HTTP/1.1\r\n" + offer + head + b"\r\n" * bool(head) + b"\r\n")
            told, body = await line.answer()
            assert told.startswith(b"HTTP/1.1 400 ")
            assert json.loads(body)["error"]["code"] == "bad_http"
            assert await line.rest() == b""
            line.close()


@pytest.mark.parametrize(
    "request_line", [b"GET /ping HTTP/1.1\r\nhost:\r\n", b"GET /ping HTTP/1.1\r\nHost: [::1]:8000\r\n",
                     b"GET /ping HTTP/1.0\r\n", b"GET /ping HTTP/1.0\r\nconnection: upgrade\r\nupgrade: h2c\r\n"]
)  # fmt: skip
async def test_a_host_may_be_empty_and_old_clients_name_none(scene_of, request_line):
    async with scene_of() as scene:
        line = await line_to(scene)
        line.send(request_line + b"connection: close\r\n\r\n")
        assert (await line.rest()).startswith(b"HTTP/1.1 200 ")
        line.close()


@pytest.mark.ci(after=7)
@pytest.mark.parametrize(
    ("version", "head"),
    [
        (b"1.1", b"gzip, chunked"), (b"1.1", b"gzip\r\ntransfer-encoding: chunked"), (b"1.1", b"chunked, chunked"),
        (b"1.1", b"chunked\r\ntransfer-encoding: chunked"), (b"1.1", b"identity, chunked"), (b"1.1", b"gzip"),
        (b"1.1", b"xchunked"), (b"1.1", b"chunked, gzip"), (b"1.1", b"chunked\r\ncontent-length: 5"),
        (b"1.1", b"\r\ntransfer-encoding: chunked"), (b"1.0", b"chunked"),
    ],
)  # fmt: skip
async def test_a_body_has_no_coding_but_chunks(scene_of, version, head):
    async with scene_of() as scene:
        line = await line_to(scene)
        line.send(b"POST /generate HTTP/%s\r\nhost: x\r\ntransfer-encoding: %s\r\n\r\n" % (version, head))
        line.send(b"2\r\n{}\r\n0\r\n\r\n")
        told, body = await line.answer()
        assert told.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "bad_http"
        assert not (await line.rest()).startswith(b"HTTP")
        line.close()


@pytest.mark.parametrize("coding", [b"chunked", b" Chunked ", b"CHUNKED"])
async def test_a_body_in_chunks_is_read(scene_of, coding):
    async with scene_of() as scene:
        line = await line_to(scene)
        body = json.dumps({"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}).encode()
        line.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: %s\r\n\r\n" % coding)
        line.send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert (await line.answer())[0].startswith(b"HTTP/1.1 200 ")
        line.close()


async def test_the_rest_of_a_body_that_was_refused_has_a_limit(scene_of):
    async with scene_of(listen=listen(header_s=0.2), api_key=KEY) as scene:
        line = await line_to(scene)
        line.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\nxx")
        head, _ = await line.answer()
        assert head.startswith(b"HTTP/1.1 401")
        # a byte now and then does not keep it open
        ends = asyncio.ensure_future(line.rest())
        async with asyncio.timeout(300):
            while not ends.done():
                line.send(b"x")
                await asyncio.wait([ends], timeout=0.02)
        line.close()


async def test_a_connection_goes_on_behind_the_rest_of_a_refused_body(scene_of):
    async with scene_of(max_body_nbytes=1000) as scene:
        line = await line_to(scene)
        line.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n")
        head, _ = await line.answer()
        assert head.startswith(b"HTTP/1.1 413")
        line.send(b"x" * 5000 + PING)
        head, _ = await line.answer()
        assert head.startswith(b"HTTP/1.1 200")
        line.close()


async def test_trailers_without_end_are_refused_and_small_chunks_are_not(scene_of):
    async with scene_of(listen=listen(max_header_nbytes=2000)) as scene:
        line = await line_to(scene)
        line.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        body = json.dumps({"input_ids": [1] * 900, "sampling_params": {"max_new_tokens": 1}}).encode()
        for byte in body:
            line.send(b"1\r\n%c\r\n" % byte)
        line.send(b"0\r\n\r\n")
        head, _ = await line.answer()
        # 900 tokens are more than the context holds
        assert head.startswith(b"HTTP/1.1 400")
        line.close()

        for more in (b"x-trailer: yyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n", b"x-trailer: " + b"y" * 5000):
            line = await line_to(scene)
            line.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
            ends = asyncio.ensure_future(line.rest())
            async with asyncio.timeout(300):
                while not ends.done():
                    line.send(more)
                    await asyncio.wait([ends], timeout=0.002)
            assert b"bytes of trailers and chunk extensions" in ends.result()
            line.close()
        await still_serves(scene)


async def test_requests_in_a_row_are_answered_in_order_and_thousands_are_not_kept(scene_of):
    async with scene_of() as scene:
        line = await line_to(scene)
        line.send(
            post({**LONG, "sampling_params": {"max_new_tokens": 3}})
            + PING
            + b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n"
        )
        assert [(await line.answer())[0][9:12] for _ in range(3)] == [b"200", b"200", b"404"]
        line.close()
        line = await line_to(scene)
        line.send(post(LONG) + PING * 5000)
        assert b"more than 16 requests wait behind another" in await line.rest()
        await until(lambda: scene.generator.load().live == 0)
        line.close()
        await still_serves(scene)


async def test_a_client_that_goes_away_aborts_all_that_it_sent_in_a_row(scene_of):
    async with scene_of() as scene:
        line = await line_to(scene)
        line.send(post({**LONG, "stream": True}) + post(LONG))
        await until(lambda: scene.generator.load().live == 1)
        line.close()
        await until(lambda: scene.generator.load().live == 0)


@pytest.mark.parametrize("extra", [b"", b"connection-x: 1\r\n"])
async def test_an_offer_to_upgrade_is_passed_over_and_its_body_is_read(scene_of, extra):
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n" + extra
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
    async with scene_of() as scene:
        line = await line_to(scene)
        # with its body in one piece, in pieces, and with another request behind it
        whole = post(body, offer)
        for pieces in ([whole], [whole[:-10], whole[-10:]], [whole[:40], whole[40:-30], whole[-30:]]):
            for piece in pieces:
                line.send(piece)
                await asyncio.sleep(0)
            head, got = await line.answer()
            assert head.startswith(b"HTTP/1.1 200"), got
            assert len(json.loads(got)["output_ids"]) == 2
        line.send(whole + PING)
        assert [(await line.answer())[0][9:12] for _ in range(2)] == [b"200", b"200"]
        line.close()


async def test_a_stray_byte_ends_no_answer(scene_of):
    async with scene_of(listen=listen(header_s=1.0), runner={"step_s": 0.02}) as scene:
        line = await line_to(scene)
        line.send(post({**LONG, "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}) + b"\r\n")
        await until(lambda: scene.generator.load().live == 1)
        line.send(b"\r\n")
        head, body = await line.answer()
        assert head.startswith(b"HTTP/1.1 200")
        assert len(json.loads(body)["output_ids"]) == 100
        line.close()


async def test_bodies_have_a_limit_together(scene_of):
    async with scene_of(max_bodies_nbytes=10_000) as scene:
        line = await line_to(scene)
        line.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n" + b"x" * 8000)
        # its bytes lie in the app when the next ones are too many
        async with asyncio.timeout(300):
            while True:
                response = await scene.client.post("/generate", content=b"{" + b" " * 4000)
                if response.status_code == 429:
                    break
        assert response.headers["retry-after"] == "1"
        line.close()
        async with asyncio.timeout(300):
            while response.status_code == 429:
                response = await scene.client.post("/generate", content=b"{" + b" " * 4000)
        await still_serves(scene)


@pytest.mark.parametrize("sent", [1 << 10, 8 << 20])
async def test_a_refused_client_reads_why_also_while_it_sends(scene_of, sent):
    async with scene_of(listen=listen(max_connections=1)) as scene:
        kept = await line_to(scene)
        kept.send(PING)
        await kept.answer()
        # a connection too many, with a request under way
        line = await line_to(scene)
        line.send(post({"input_ids": [1]}) + b"x" * sent)
        head, body = await line.answer()
        assert head.startswith(b"HTTP/1.1 429")
        assert json.loads(body)["error"]["code"] == "overloaded"
        assert b"retry-after: 1" in head
        line.close()
        # headers that are too long
        kept.send(b"GET /ping HTTP/1.1\r\nx: " + b"y" * max(sent, 1 << 17))
        head, _ = await kept.answer()
        assert head.startswith(b"HTTP/1.1 431")
        kept.close()


def broken(rng, request):
    """A request with some of its bytes changed, left out, or there twice."""
    data = bytearray(request)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(data)), rng.randint(1, 12)
        change = rng.randrange(4)
        if change == 0:
            data[at] = rng.randrange(256)
        elif change == 1 and len(data) > 20:
            del data[at : at + length]
        elif change == 2:
            data[at:at] = data[at : at + length]
        else:
            data[at:at] = rng.choice([b"\r\n", b"\r\n\r\n", b"\0", b": ", b" HTTP/1.1", b"chunked", b"-1", b"\xff"])
    return bytes(data)


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("seed", range(4))
async def test_broken_bytes_raise_nothing_and_keep_nothing(scene_of, seed, caplog):
    rng = random.Random(seed)
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
    chunked = (
        b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1a;x=y\r\n%s\r\n0\r\nt: u\r\n\r\n"
    )
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    requests = [post(body), post(body, offer), chunked % b'{"input_ids": [1, 2, 3 ] }', PING * 3, post(body) + PING]
    answered = 0
    async with scene_of(listen=listen(header_s=0.5), body_timeout_s=0.5) as scene:
        for _ in range(60):
            line = await line_to(scene)
            # whatever the first bytes were, the last ones end the connection, or the time for them does
            line.send(broken(rng, rng.choice(requests)) + LAST)
            got = await line.rest()
            assert not got or got.startswith(b"HTTP/1.1 "), got[:80]
            answered += bool(got)
            line.close()
        await still_serves(scene)
        await until(lambda: scene.generator.load().live == 0)
    assert answered > 30
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
