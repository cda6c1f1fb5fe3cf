"""The server against clients that are slow, greedy or broken: bounded, answered, and no cost to others."""

from __future__ import annotations

import asyncio
import json
import socket
import sys

import pytest
from fdasync_http import HttpConfig
from fdasync_http.bodies import MAX_PARTS, decode
from fdasync_http.config import ConnectionLimits
from fdasync_http.failures import Refused
from fdasync_http.server import Listen, bind, check_exposure, is_loopback, serving

from fdasync.errors import BadInput, ConfigError
from fdasync.testing import until

KEY = "sk-0123456789abcdef"
ADMIN = "sk-admin-0123456789"
BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}


def listen(**limits):
    return Listen(port=0, drain_s=1.0, limits=ConnectionLimits(**limits))


async def connected(scene):
    return await asyncio.open_connection("127.0.0.1", scene.port)


async def rest_of(reader):
    async with asyncio.timeout(300):
        return await reader.read()


# -- keys


async def test_every_path_asks_for_the_key_and_control_for_its_own(scene_of):
    async with scene_of(api_key=KEY, admin_key=ADMIN) as scene:
        use, control = ("/health", "/model_info", "/nowhere", "/v1/loads"), ("/flush_cache",)
        for path in (*use, *control):
            for key in ("x", "wrong-0123456789abcd", KEY[:-1]):
                response = await scene.client.get(path, headers={"authorization": f"Bearer {key}"})
                assert response.status_code == 401, path
                assert response.json()["error"]["type"] == "authentication_error"
        for path in use:
            response = await scene.client.get(path, headers={"authorization": f"Bearer {KEY}"})
            assert response.status_code == (404 if path == "/nowhere" else 200)
        for path in control:
            assert (await scene.client.get(path, headers={"authorization": f"Bearer {KEY}"})).status_code == 403
            assert (await scene.client.get(path, headers={"authorization": f"bearer {ADMIN}"})).status_code == 200
            # as Anthropic's clients send it
            for key, status in (("wrong-0123456789abcd", 401), (KEY, 403), (ADMIN, 200)):
                assert (await scene.client.get(path, headers={"x-api-key": key})).status_code == status
        # the body of a request without a key is never read
        response = await scene.client.post("/generate", content=b"x" * 100_000)
        assert response.status_code == 401


@pytest.mark.parametrize("keyed", [True, False])
async def test_pages_of_other_sites_are_refused_without_a_key(scene_of, keyed):
    keys = {"api_key": KEY, "admin_key": ADMIN} if keyed else {}
    async with scene_of(**keys) as scene:
        for path in ("/generate", "/flush_cache", "/nowhere"):
            for site, refused in (("cross-site", not keyed), ("same-origin", False), ("none", False)):
                headers = {"sec-fetch-site": site, "authorization": f"Bearer {ADMIN}"}
                response = await scene.client.post(path, json=BODY, headers=headers)
                told = response.json()["error"].get("code") if response.status_code == 403 else None
                assert (told == "cross_site") == refused, (path, site)


def test_keys_are_checked_before_anything_starts():
    for values in ({"api_key": "short"}, {"api_key": "with a space in it"}, {"admin_key": ADMIN}):
        with pytest.raises(ConfigError) as refused:
            HttpConfig(**values)
        assert not any(value in str(refused.value) for value in values.values()), "a key was shown"


def test_an_embedder_may_give_folders_as_paths_and_any_limit_above_nothing(tmp_path):
    config = HttpConfig(weights_root=tmp_path, pulls_root=tmp_path / "pulls")
    assert (config.weights_root, config.pulls_root) == (str(tmp_path), str(tmp_path / "pulls"))
    for name in ("max_body_nbytes", "max_bodies_nbytes", "max_json_depth", "max_live"):
        assert getattr(HttpConfig(**{name: sys.maxsize}), name) == sys.maxsize
        with pytest.raises(ConfigError, match=rf"^{name}: 0 is too small \(limit: at least 1\)$"):
            HttpConfig(**{name: 0})
    with pytest.raises(ConfigError, match=r"^weights_root: "):
        HttpConfig(weights_root=5)


def test_with_any_limit_of_depth_a_body_is_refused_that_no_decoder_reads_and_brackets_of_texts_do_not_count():
    config = HttpConfig(max_json_depth=sys.maxsize)
    with pytest.raises(Refused, match="the body is no JSON") as refused:
        decode(b"[" * 9000 + b"]" * 9000, object, config)
    assert refused.value.status == 400
    text = "[" * (MAX_PARTS + 1)
    assert decode(json.dumps([text]).encode(), object, config) == [text]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.0.0.5", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
        ("10.0.0.1", False), ("::", False),
    ],
)  # fmt: skip
def test_other_addresses_need_a_key(host, loopback):
    assert is_loopback(host) == loopback
    check_exposure(Listen(host=host), has_key=True)
    check_exposure(Listen(host=host, client_authority="ca.pem"), has_key=False)
    if not loopback:
        with pytest.raises(BadInput, match="every path would be open"):
            check_exposure(Listen(host=host), has_key=False)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64 + ".invalid"])
@pytest.mark.parametrize("has_key", [False, True])
def test_a_name_that_does_not_resolve_is_told_as_that(host, has_key):
    with pytest.raises(BadInput, match=rf"host: {host} does not resolve: \w+"):
        check_exposure(Listen(host=host), has_key=has_key)
    with pytest.raises(BadInput, match="does not resolve"):
        bind(Listen(host=host))


def test_a_name_is_bound_at_the_address_that_it_resolves_to():
    for host, address in (("localhost", "127.0.0.1"), ("127.0.0.5", "127.0.0.5")):
        with bind(Listen(host=host, port=0)) as bound:
            assert bound.getsockname()[0] == address


async def test_of_two_that_bind_one_port_the_later_to_listen_is_told():
    slow = bind(Listen(port=0))
    fast = bind(Listen(port=slow.getsockname()[1]))
    with fast:
        fast.listen()
        with pytest.raises(BadInput, match=r"^port: \d+ of 127.0.0.1 is in use; choose"):
            async with serving(None, Listen(port=slow.getsockname()[1]), slow):
                pass
    assert slow.fileno() == -1, "it is closed"


# -- connections


async def test_headers_without_end_are_refused(scene_of):
    async with scene_of(listen=listen(max_header_nbytes=1000)) as scene:
        reader, writer = await connected(scene)
        writer.write(b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 5000)
        answer = await rest_of(reader)
        assert answer.startswith(b"HTTP/1.1 431")
        assert b"headers are longer than 1000 bytes" in answer
        writer.close()
        response = await scene.client.post("/generate", json=BODY)
        assert response.status_code == 200


async def test_a_connection_that_sends_nothing_or_half_a_request_is_closed(scene_of):
    async with scene_of(listen=listen(header_s=0.1), body_timeout_s=0.1) as scene:
        for sent, status in (
            (b"", b"408"),
            (b"POST /generate HTTP/1.1\r\nhost: x\r\n", b"408"),
            (b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{", b"408"),
        ):
            reader, writer = await connected(scene)
            writer.write(sent)
            answer = await asyncio.wait_for(reader.read(12), 300)
            assert answer == b"HTTP/1.1 " + status
            writer.close()


async def test_the_connection_too_many_is_told_so(scene_of):
    async with scene_of(listen=listen(max_connections=3)) as scene:
        held = [await connected(scene) for _ in range(3)]
        reader, writer = await connected(scene)
        answer = await rest_of(reader)
        assert answer.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 1" in answer
        for _, one in [*held, (reader, writer)]:
            one.close()
        response = await scene.client.post("/generate", json=BODY)
        assert response.status_code == 200


async def test_too_many_requests_are_429_with_a_time_to_try_again(scene_of):
    async with scene_of(max_live=1) as scene:
        long = {**BODY, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        call = asyncio.ensure_future(scene.client.post("/generate", json=long))
        await until(lambda: scene.generator.load().live == 1)
        response = await scene.client.post("/generate", json=BODY)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert "the limit is 1" in response.json()["error"]["message"]
        await scene.client.post("/abort_request", json={"abort_all": True})
        assert (await call).status_code == 200
        assert (await scene.client.post("/generate", json=BODY)).status_code == 200


async def test_bodies_that_are_too_large_or_too_deep_are_refused(scene_of):
    async with scene_of(max_body_nbytes=1 << 20) as scene:
        response = await scene.client.post("/generate", content=b"x" * (2 << 20))
        assert response.status_code == 413
        for depth in (100, 10_000):
            deep = b'{"input_ids": ' + b"[" * depth + b"]" * depth + b"}"
            response = await scene.client.post("/generate", content=deep)
            assert response.status_code == 400
            assert "deeper" in response.json()["error"]["message"]


async def test_a_long_prompt_fits_into_a_body_and_what_holds_the_loop_longer_does_not(scene_of):
    async with scene_of() as scene:
        long = {**BODY, "input_ids": [123_456] * 500_000}
        response = await scene.client.post("/generate", json=long)
        # read, decoded and refused for its length by the engine
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        response = await scene.client.post("/generate", content=b" " * (5 << 20))
        assert (response.status_code, response.json()["error"]["code"]) == (413, "too_large")
        assert "--max-body-mib" in response.json()["error"]["message"]


@pytest.mark.ci
async def test_a_reader_that_stops_costs_its_own_stream_alone(scene_of):
    runner = {"max_context_tokens": 4096, "num_blocks": 1100}
    async with scene_of(listen=listen(write_s=0.3), runner=runner) as scene:
        body = json.dumps(
            {
                "input_ids": [1], "stream": True, "return_logprob": True,
                "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True},
            }
        ).encode()  # fmt: skip
        _reader, writer = await connected(scene)
        # cumulative events: megabytes, which the client leaves unread
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: scene.generator.load().live == 1)
        response = await scene.client.post("/generate", json=BODY)
        assert response.status_code == 200
        await until(lambda: scene.generator.load().live == 0, deadline_s=300, every_s=0.01)
        writer.close()


async def test_paths_that_are_not_there(scene_of):
    async with scene_of() as scene:
        response = await scene.client.get("/nowhere")
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
        response = await scene.client.delete("/generate")
        assert response.status_code == 405
        assert "/generate takes no DELETE" in response.json()["error"]["message"]


async def test_a_stream_that_is_refused_is_refused_by_its_status(scene_of):
    async with scene_of() as scene:
        body = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 100_000}}
        response = await scene.client.post("/generate", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_answers_on_a_kept_connection_wait_for_no_acknowledgement():
    """Nagle's algorithm is off, on asyncio's own loop too, on which these tests run."""
    accepted = asyncio.get_running_loop().create_future()

    async def tell(_, writer):
        accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    bound = bind(Listen(port=0))
    async with await asyncio.start_server(tell, sock=bound):
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        assert await rest_of(reader) == b""
        writer.close()
        await writer.wait_closed()
    assert await accepted == 1
