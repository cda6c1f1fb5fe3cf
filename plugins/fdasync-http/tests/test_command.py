"""`fdasync http`, as a process of its own: one command to a serving endpoint, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from contextlib import asynccontextmanager

import click
import httpx2
import pytest
from fdasync_http.command import _APP, _CONNECTIONS, _SETTINGS, http
from fdasync_http.config import ConnectionLimits, HttpConfig

from fdasync import Instance
from fdasync.runner.synthetic import WEIGHTS_FILE
from fdasync.testing import synthetic_config
from tests.support.commands import errors

ROW = {"input_ids": [1, 2, 3], "return_logprob": True, "return_routed_experts": True,
       "sampling_params": {"max_new_tokens": 4, "temperature": 0}}  # fmt: skip


@asynccontextmanager
async def front(*options):
    """A process of `fdasync http`, and its ready line."""
    read, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fdasync", "http", "--ready-fd", str(write), *options,
        *(() if "--port" in options else ("--port", "0")),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, pass_fds=(write,),
    )  # fmt: skip
    os.close(write)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb"))
    try:
        async with asyncio.timeout(300):
            line = await reader.readline()
        yield process, json.loads(line) if line else None
    finally:
        transport.close()
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until_live(client):
    """Returns when the server tells that a request is live; it tells no other process by itself, so it is asked."""
    async with asyncio.timeout(300):
        while not (await client.get("/v1/loads")).json()["loads"][0]["num_reqs"]:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.005)


@pytest.mark.ci
@pytest.mark.parametrize("roles", [(), ("--prefill", "1", "--decode", "1"), ("--front", "in-process")])
async def test_one_command_serves_and_a_signal_drains(roles, tmp_path):
    config = tmp_path / "engine.toml"
    config.write_text("[runner_config]\nstep_s = 0.002\n")
    async with front("--runner", "synthetic", "--config", str(config), *roles) as (process, ready):
        assert ready["pid"] == process.pid
        async with httpx2.AsyncClient(base_url=ready["url"], timeout=300) as client:
            assert (await client.get("/health_generate")).status_code == 200
            answer = (await client.post("/generate", json=ROW)).json()
            assert len(answer["output_ids"]) == 4
            assert "routed_experts" in answer["meta_info"]
            long = {**ROW, "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
            call = asyncio.ensure_future(client.post("/generate", json=long))
            await until_live(client)
            process.send_signal(signal.SIGTERM)
            assert len((await call).json()["output_ids"]) == 60
        async with asyncio.timeout(300):
            out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        assert f"ready at {ready['url']}" in out.decode()
        assert "draining" in err.decode()
        # what the runner says for people, once for all instances
        assert err.decode().count("note: no model: tokens follow from those before them by a rule") == 1


@pytest.mark.ci
async def test_a_front_that_drains_says_so_to_clients_and_balancers_until_the_last_answer(tmp_path):
    config = tmp_path / "engine.toml"
    config.write_text("[runner_config]\nstep_s = 0.01\n")
    async with front("--runner", "synthetic", "--config", str(config)) as (process, ready):
        async with httpx2.AsyncClient(base_url=ready["url"], timeout=300) as client:
            for path in ("/ready", "/live"):
                assert (await client.get(path)).status_code == 200
            long = {**ROW, "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
            call = asyncio.ensure_future(client.post("/generate", json=long))
            await until_live(client)
            process.send_signal(signal.SIGTERM)
            while b"draining" not in await process.stderr.readline():
                pass
            # a connection of its own: a balancer's, or a client's that has not heard of it
            async with httpx2.AsyncClient(base_url=ready["url"], timeout=300) as late:
                refused = await late.post("/generate", json=ROW)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert refused.json()["error"]["code"] == "draining"
                assert (await late.get("/ready")).status_code == 503
                assert (await late.get("/live")).status_code == 200
            assert not call.done()
            assert len((await call).json()["output_ids"]) == 300
        async with asyncio.timeout(300):
            await process.communicate()
        assert process.returncode == 0


def children_of(pid):
    """Processes below this one."""
    with open(f"/proc/{pid}/task/{pid}/children") as listed:
        own = [int(child) for child in listed.read().split()]
    return [*own, *[one for child in own for one in children_of(child)]]


def alive(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_what_is_half_sent_holds_up_no_end_and_no_process_is_left(number):
    async with front("--runner", "synthetic", "--prefill", "1", "--decode", "1") as (process, ready):
        children = children_of(process.pid)
        assert len(children) >= 2
        open_ones = [await asyncio.open_connection("127.0.0.1", ready["port"]) for _ in range(3)]
        for text, (_, writer) in zip(("", "GET / HT", HALF), open_ones, strict=True):
            writer.write(text.encode())
        async with httpx2.AsyncClient(base_url=ready["url"], timeout=300) as client:
            # connections are read in order
            assert (await client.post("/generate", json=ROW)).status_code == 200
            process.send_signal(number)
            # less than a second; the body had a minute
            async with asyncio.timeout(300):
                _, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        assert "draining 0 requests, 60 s at most" in err.decode()
        for _, writer in open_ones:
            writer.close()
    assert alive(children) == []


HALF = "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
LONG = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("drain_s", "told"),
    [
        # long enough for one line of the count
        ("6", ("draining 1 requests, for 1 s more\n", "not all answers were sent within 6 s")),
        ("600", ("draining 1 requests, 600 s at most",)),
    ],
)
async def test_a_stream_that_outlives_the_drain_or_meets_a_second_signal_ends_with_what_it_has(drain_s, told, tmp_path):
    config = tmp_path / "engine.toml"
    config.write_text("[runner_config]\nstep_s = 0.02\nmax_context_tokens = 4096\nnum_blocks = 1100\n")
    async with front("--runner", "synthetic", "--config", str(config), "--drain-s", drain_s) as (process, ready):
        async with (
            httpx2.AsyncClient(base_url=ready["url"], timeout=300) as client,
            client.stream("POST", "/generate", json=LONG) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGINT)
            if drain_s == "600":
                # of two equal signals that are pending, the kernel delivers one
                process.send_signal(signal.SIGTERM)
            rest = [line async for line in lines if line]
        async with asyncio.timeout(300):
            _, err = await process.communicate()
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
        assert process.returncode == 1
        assert all(words in err.decode() for words in told), err.decode()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--host", "0.0.0.0"), "every path would be open"),
        (("--prefill", "1"), "add --decode 1"),
        (("--connect", "ipc:///nowhere", "--mixed", "1"), "leave out"),
        (("--api-key-file", "{open}"), "chmod 600"),
        (("--port", "70000"), "--port"),
        (("--max-body-mib", "0"), "Invalid value for '--max-body-mib': 0 is too small (limit: at least 1)"),
        (
            ("--header-timeout-s", "0"),
            "'--header-timeout-s': 0.0 is out of range (limit: above 0, up to 1000000.0)",
        ),
        (("--max-body-mib", "600"), "--max-bodies-mib: 512 is less than --max-body-mib, 600"),
        (("--max-header-kib", "2000"), "'--max-header-kib': 2000 is out of range (limit: 1 to 1024)"),
        (("--traces", "/"), "'--traces': File '/' is a directory."),
        (("--config", "{path}"), "path.toml: http.api_key_file: 5 is not text: the path of a file is needed"),
        (("--config", "{table}"), "table.toml: http.max_connections: 0 is out of range (limit: 1 to 1000000)"),
        (
            ("--config", "{typo}"),
            "typo.toml: http.max_conections is no option of the command; did you mean 'max_con",
        ),
    ],
)
def test_what_cannot_start_says_why(refused, options, told):
    err = refused(*options)
    assert told in err
    assert "loading" not in err


def test_a_port_that_is_in_use_shows_before_anything_is_loaded(refused):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        err = refused("--port", port)
    assert f"port: {port} of 127.0.0.1 is in use; choose another one; 0 takes any free one\n" in err
    assert "loading" not in err


@pytest.mark.ci
async def test_a_front_tells_at_once_which_instances_it_waits_for_and_how_long(tmp_path):
    address = f"ipc://{tmp_path}/nothing"
    async with front("--connect", address, "--connect-s", "4") as (process, ready):
        assert ready is None
        async with asyncio.timeout(300):
            _, err = await process.communicate()
    lines = err.decode().splitlines()
    assert lines[0] == f"fdasync http: connecting to {address}, for 4 s at most (--connect-s)"
    assert lines[1].startswith(f"fdasync http: waits for {address}")
    assert f"connecting to {address} did not end within 4 s" in lines[2]
    assert (process.returncode, len(lines)) == (2, 3)


@pytest.mark.ci
async def test_what_is_missing_beside_an_instance_that_answers_is_told(tmp_path):
    there, nothing = (f"ipc://{tmp_path}/{name}" for name in ("there", "nothing"))
    instance = Instance(synthetic_config({}, role="mixed", host_blocks=64), listen=there, transport="shm")
    async with instance, front("--connect", there, "--connect", nothing) as (process, ready):
        async with httpx2.AsyncClient(base_url=ready["url"], timeout=300) as client:
            assert (await client.post("/generate", json=ROW)).status_code == 200
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(300):
            _, err = await process.communicate()
        assert process.returncode == 0
        assert f"serves without {nothing}" in err.decode()


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """What the command says on stderr, which ends with 2."""
    opened = tmp_path / "open"
    opened.write_text("sk-0123456789abcdef")
    opened.chmod(0o644)
    places = {"{open}": opened}
    for name, line in (("table", "max_connections = 0"), ("typo", "max_conections = 0"), ("path", "api_key_file = 5")):
        places[f"{{{name}}}"] = (tmp_path / name).with_suffix(".toml")
        places[f"{{{name}}}"].write_text(f"[http]\n{line}\n")

    def ask(*options):
        sent = [str(places.get(option, option)) for option in options]
        port = () if "--port" in sent else ("--port", "0")
        return errors(capsys, monkeypatch, "http", *port, "--runner", "synthetic", *sent)

    return ask


@pytest.mark.ci
async def test_an_instance_that_cannot_load_the_update_again_takes_the_next_one(tmp_path):
    """A trainer deletes each folder that was loaded; then the instance ends, and is started again."""

    async def update(client, version):
        folder = tmp_path / f"v{version}"
        folder.mkdir()
        (folder / WEIGHTS_FILE).write_text(json.dumps({"weights_id": 10 + version}))
        body = {"model_path": str(folder), "weight_version": str(version)}
        answer = await client.post("/update_weights_from_disk", json=body)
        shutil.rmtree(folder)
        assert answer.json()["success"], answer.text

    async with front("--runner", "synthetic", "--weights-root", str(tmp_path)) as (process, ready):
        async with httpx2.AsyncClient(base_url=ready["url"], timeout=300) as client:
            await update(client, 1)
            os.kill(children_of(process.pid)[0], signal.SIGKILL)
            health, told = None, ""
            async with asyncio.timeout(300):
                while "did not come to version 1" not in told:
                    health = await client.get("/health")
                    told = health.text
                    await asyncio.sleep(0.05)
            assert health.status_code == 503
            async with asyncio.timeout(300):
                # it is told once, to people as well
                while b"did not come to version 1" not in await process.stderr.readline():
                    pass
            await update(client, 2)
            assert (await client.get("/health")).status_code == 200
            answer = (await client.post("/generate", json=ROW)).json()
            assert answer["meta_info"]["weight_version"] == "2"
        process.terminate()
        async with asyncio.timeout(300):
            _, err = await process.communicate()
        assert process.returncode == 0
        assert b"did not come to" not in err


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("value", ['"ipc:///nowhere"', '["ipc:///nowhere"]'])
async def test_keys_of_the_table_are_named_as_the_options(value, tmp_path):
    config = tmp_path / "front.toml"
    config.write_text(f"[http]\nconnect = {value}\nconnect_s = 0.2\n")
    async with front("--config", str(config)) as (process, ready):
        assert ready is None
        async with asyncio.timeout(300):
            _, err = await process.communicate()
        assert "connecting to ipc:///nowhere did not end within 0.2 s" in err.decode()
        assert process.returncode == 2


def test_help_has_the_limits_in_a_group_of_their_own():
    told = http.get_help(click.Context(http, info_name="http"))
    options, limits = told.split("\nLimits:\n")
    limits, others = limits.split("\nOptions:\n")
    assert "--drain-s" in options
    for field, option in {**_APP.options, **_CONNECTIONS.options}.items():
        where = options if field in _SETTINGS else limits
        assert f"\n  {option.opts[0]} " in f"\n{where}"
        assert told.count(f"\n  {option.opts[0]} ") == 1
    # keys come from files alone: no command line and no help shows one
    assert set(HttpConfig.__struct_fields__) - set(_APP.options) == {"api_key", "admin_key"}
    assert not set(ConnectionLimits.__struct_fields__) - set(_CONNECTIONS.options)
    assert "--config" in others


@pytest.mark.ci
async def test_limits_come_from_the_file_and_options_beat_it(tmp_path):
    config = tmp_path / "engine.toml"
    config.write_text(
        "max_running = 2\n[runner_config]\nmax_context_tokens = 200000\n"
        "[http]\nmax_body_mib = 2\nmax_connections = 2\nheader_timeout_s = 0.2\n"
    )
    async with front("--runner", "synthetic", "--config", str(config), "--max-body-mib", "1") as (process, ready):
        async with httpx2.AsyncClient(base_url=ready["url"], timeout=300) as client:
            answer = await client.post("/generate", content=b" " * ((1 << 20) + 1))
            assert (answer.status_code, "1048576 bytes" in answer.text) == (413, True)
            assert (await client.post("/generate", json=ROW)).status_code == 200
            silent = await asyncio.open_connection("127.0.0.1", ready["port"])
            more = await asyncio.open_connection("127.0.0.1", ready["port"])
            async with asyncio.timeout(300):
                assert (await more[0].read()).startswith(b"HTTP/1.1 429")
                assert (await silent[0].read()).startswith(b"HTTP/1.1 408")
            for _, writer in (silent, more):
                writer.close()
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(300):
            _, err = await process.communicate()
    assert "bodies up to 1 MiB hold some 131072 token ids, and the context 200000" in err.decode()


@pytest.mark.ci
async def test_a_configuration_may_come_through_a_pipe():
    read, write = os.pipe()
    os.write(write, b'{"runner_config": {"vocab_size": 50}, "http": {"served_model_name": "piped"}}')
    os.close(write)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fdasync", "http", "--runner", "synthetic", "--port", "0", "--config", "/dev/stdin",
        stdin=read, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    os.close(read)
    async with asyncio.timeout(300):
        line = await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert b": piped, sglang's" in line


@pytest.mark.ci
async def test_an_engine_of_its_own_that_fails_ends_it(tmp_path):
    config = tmp_path / "engine.toml"
    config.write_text("[runner_config]\nfail_step = 1\n")
    async with front("--runner", "synthetic", "--config", str(config), "--front", "in-process") as (process, ready):
        async with httpx2.AsyncClient(base_url=ready["url"], timeout=300) as client:
            answer = await client.post("/generate", json=ROW)
            assert answer.status_code == 503, answer.text
        async with asyncio.timeout(300):
            _, err = await process.communicate()
        assert process.returncode == 1, err.decode()


@pytest.mark.parametrize("more", [("--connect", "ipc:///x"), ("--mixed", "1"), ("--prefill", "1", "--decode", "1")])
def test_an_engine_of_its_own_goes_with_no_instances(refused, more):
    assert "in-process" in refused("--front", "in-process", *more)


@pytest.mark.parametrize("text", ["no certificate", ""])
def test_a_certificate_that_cannot_be_used_shows_before_anything_is_loaded(refused, text, tmp_path):
    bad = tmp_path / "bad.pem"
    bad.write_text(text)
    assert "--ssl-certfile" in refused("--ssl-certfile", str(bad))
