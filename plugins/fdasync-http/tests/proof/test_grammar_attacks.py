"""Floods of grammars on a server of a real checkpoint: bounded memory, the answers that are meant, others in time.

A token of a stream that has no grammar costs the worker little more: its CPU is counted, since the flood, its forks and
this test share few cores with it. The bound leaves room for a machine that is busy with other things, where windows
without any flood differ by a half; the ratios are printed (`-s`), and the aim for a quiet machine is 1.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx2
import pytest
from fdasync_transformers import make_random_checkpoint

from tests.nightly.http.process import attack, children_of, front, memory_of, stream

if TYPE_CHECKING:
    from tests.nightly.http.process import Front

PAIRS = 5
WARM_S, WINDOW_S = 0.5, 2.5
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


async def read(port: int, times: list[float]) -> None:
    """A stream without a grammar, again and again; when each of its events came."""
    async for at in stream(port, 1, TOKENS):
        if at is not None:
            times.append(at)  # noqa: PERF401 - there is no end of them


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


async def window(worker: int, times: list[float]) -> Window:
    begin, spent, had = time.monotonic(), cpu_s(worker), len(times)
    await asyncio.sleep(WINDOW_S)
    came = times[had:]
    slowest_s = max(after - before for before, after in itertools.pairwise(came))
    return Window((cpu_s(worker) - spent) / len(came), (time.monotonic() - begin) / len(came), slowest_s)


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
            times: list[float] = []
            reading = asyncio.ensure_future(read(server.port, times))
            await asyncio.sleep(1.0)
            before = most = memory_of([server.pid, *children_of(server.pid)]).private
            ratios: list[float] = []
            slower: list[float] = []
            worker = worker_of(server)
            seen: set[str] = set()
            for _ in range(PAIRS):
                async with attack(beside, server.port) if beside else contextlib.nullcontext():
                    await asyncio.sleep(WARM_S)
                    quiet = await window(worker, times)
                async with attack(name, server.port) as told:
                    await asyncio.sleep(WARM_S)
                    loud = await window(worker, times)
                    # one that was not checked before is checked beside the flood
                    own = {**BODY["sampling_params"], "regex": f"[ab]{{{2 + len(ratios)}}}"}
                    answer = await client.post("/generate", json={**BODY, "sampling_params": own})
                    assert answer.status_code == 200, answer.text
                    most = max(most, memory_of([server.pid, *children_of(server.pid)]).private)
                seen |= set(told["statuses"])
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
