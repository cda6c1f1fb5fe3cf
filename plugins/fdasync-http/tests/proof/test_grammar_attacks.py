"""Floods of grammars on a server of a real checkpoint: bounded memory, the answers that are meant, others in time.

A token of a stream that has no grammar costs the worker little more: its CPU is counted, since the flood, its forks and
this test share few cores with it. The bound leaves room for a machine that is busy with other things, where windows
without any flood differ by a half; the ratios are printed (`-s`), and the aim for a quiet machine is 1.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx2
import pytest
from fdasync_transformers import make_random_checkpoint

from tests.nightly.http.process import children_of, front, memory_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.nightly.http.process import Front

PAIRS = 5
WINDOW_S = 2.5
TOKENS = 400
MOVED = 2.0
STOPPED_S = 3.0
_MIB = 1 << 20
# most memory of all processes, in MiB, and the only answers that the attacker may see
BOUNDS = {
    # a multiple of a round number is cheap
    "grammars_endless": (300, {"200", "400"}),
    "grammars_left": (300, {"left"}),
    "grammars_costly": (500, {"200", "400"}),
    "grammars_large": (500, {"200", "400"}),
    "grammars_nested": (100, {"400"}),
    "grammars_wide": (400, {"200", "400"}),
}
CONFIG = """
max_context_tokens = 1024
num_blocks = 2048
max_running = 16
max_step_tokens = 64
[runner_config]
dtype = "float32"
device = "cpu"
num_threads = 1
self_check = false
"""
BODY: dict[str, Any] = {"input_ids": [1, 2, 3], "sampling_params": {"regex": "[ab]{2}", "max_new_tokens": 4}}
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_random_checkpoint(path, "qwen3_moe", size="tiny")
    return path


class Reader:
    """A stream without a grammar, again and again; when each of its events came."""

    def __init__(self, port: int) -> None:
        self.times: list[float] = []
        self._port = port

    async def run(self) -> None:
        body = {"token_ids": [1] * 8, "stream": True,
                "sampling_params": {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}}  # fmt: skip
        data = json.dumps(body).encode()
        head = b"POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            while True:
                writer.write(head + data)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                while b"[DONE]" not in await reader.readuntil(b"\n\n"):
                    self.times.append(time.monotonic())
                await reader.readuntil(b"0\r\n\r\n")
        finally:
            writer.close()


class Window(NamedTuple):
    """CPU of the worker and time, in seconds, for each token of the stream; and the longest wait for one."""

    cpu_s: float
    tpot_s: float
    slowest_s: float


def worker_of(server: Front) -> int:
    """The process that computes steps."""
    found = []
    for pid in children_of(server.pid):
        # a process may end meanwhile
        with contextlib.suppress(OSError):
            if b"fdasync.runner.worker.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    (worker,) = found
    return worker


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def window(worker: int, stream: Reader) -> Window:
    begin, spent, had = time.monotonic(), cpu_s(worker), len(stream.times)
    await asyncio.sleep(WINDOW_S)
    times = stream.times[had:]
    slowest_s = max(after - before for before, after in itertools.pairwise(times))
    return Window((cpu_s(worker) - spent) / len(times), (time.monotonic() - begin) / len(times), slowest_s)


@contextlib.asynccontextmanager
async def attack(name: str, server: Front, seen: set[str]) -> AsyncIterator[None]:
    """An attack under way; the answers to it are added to `seen`. "": none."""
    if not name:
        yield
        return
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.nightly.http.attacker", name, str(server.port),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(300):
            assert await process.stdout.readline() == b"ready\n"
            await asyncio.sleep(0.5)
            yield
            process.stdin.close()
            out, _ = await process.communicate()
        seen |= set(json.loads(out)["statuses"])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("name", list(BOUNDS))
async def test_a_flood_of_grammars_disturbs_no_others(name: str, folder: Path, tmp_path: Path) -> None:
    most_mib, statuses = BOUNDS[name]
    # answers that run take their part of the model, with or without a grammar
    beside = "free_answers" if name == "grammars_wide" else ""
    config = tmp_path / "engine.toml"
    config.write_text(CONFIG)
    with front("--model", str(folder), "--config", str(config)) as server:
        async with httpx2.AsyncClient(base_url=server.url, timeout=300) as client:
            assert (await client.post("/generate", json=BODY)).status_code == 200
            stream = Reader(server.port)
            reading = asyncio.ensure_future(stream.run())
            await asyncio.sleep(1.0)
            before = most = memory_of([server.pid, *children_of(server.pid)]).private
            ratios: list[float] = []
            slower: list[float] = []
            worker = worker_of(server)
            seen: set[str] = set()
            for _ in range(PAIRS):
                async with attack(beside, server, set()):
                    quiet = await window(worker, stream)
                async with attack(name, server, seen):
                    loud = await window(worker, stream)
                    # one that was not checked before is checked beside the flood
                    own = {**BODY["sampling_params"], "regex": f"[ab]{{{2 + len(ratios)}}}"}
                    answer = await client.post("/generate", json={**BODY, "sampling_params": own})
                    assert answer.status_code == 200, answer.text
                    most = max(most, memory_of([server.pid, *children_of(server.pid)]).private)
                # a loop that compiles stops
                assert loud.slowest_s < STOPPED_S
                ratios.append(loud.cpu_s / quiet.cpu_s)
                slower.append(loud.tpot_s / quiet.tpot_s)
            assert not reading.done(), "the stream ended"
            reading.cancel()
            await asyncio.wait([reading])
            print(
                name,
                [[round(one, 3) for one in values] for values in (ratios, slower)],
                f"{(most - before) // _MIB} MiB",
                seen,
            )
            assert seen, "the attack sent nothing"
            assert seen <= statuses
            assert (most - before) / _MIB <= most_mib
            assert statistics.median(ratios) < MOVED
