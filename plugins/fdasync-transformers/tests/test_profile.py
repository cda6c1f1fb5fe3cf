"""Profiles of a model's processes, in workers: the files are whole, and steps go on."""

from __future__ import annotations

import asyncio
import gzip
import os
import re
from pathlib import Path
from typing import Any

import pytest
from fdasync_transformers import make_random_checkpoint

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.errors import BadInput, RunnerError

pytestmark = pytest.mark.ci


def engine_of(tmp_path: Path, folder: Path | None = None, **values: Any) -> Engine:
    model = make_random_checkpoint(tmp_path / "model", "qwen3_moe", size="tiny")
    own = {"num_threads": 1}
    sizes: dict[str, Any] = {"block_tokens": 4, "num_blocks": 64, "max_context_tokens": 128, "max_running": 4}
    values = {**sizes, "runner_config": own, "profile_folder": str(folder or tmp_path / "profiles"), **values}
    return Engine(EngineConfig(model=str(model), tokenizer="none", process="worker", **values))


def operators(path: Path) -> set[str]:
    """Names of the operators in a trace, which need not be read whole."""
    return set(re.findall(r'"name": "(aten::\w+)"', gzip.decompress(path.read_bytes()).decode()))


async def busy(engine: Engine, until: asyncio.Future[Any]) -> int:
    """How many requests end meanwhile."""
    count = 0
    while not until.done():
        await engine.complete([5, 6, 7, count + 8], SamplingParams(max_tokens=4, temperature=0.0))
        count += 1
    return count


@pytest.mark.parametrize("ranks", [1, 2])
async def test_each_rank_writes_what_it_computed_while_steps_go_on(tmp_path: Path, ranks: int) -> None:
    async with engine_of(tmp_path, tensor_parallel=ranks) as engine:
        call = asyncio.ensure_future(engine.profile(0.3))
        assert await busy(engine, call) > 1
        folder = Path((await call)["engine"])
    assert folder.parent == tmp_path / "profiles"
    files = {name: operators(folder / name) for name in sorted(os.listdir(folder))}
    assert list(files) == [f"rank-{rank}.json.gz" for rank in range(ranks)]
    assert all({"aten::mm", "aten::linear"} & names for names in files.values()), files


async def test_one_profile_at_a_time_and_a_cancelled_one_writes_nothing(tmp_path: Path) -> None:
    async with engine_of(tmp_path) as engine:
        first = asyncio.ensure_future(engine.profile(10.0))
        # the worker takes calls in the order sent
        await asyncio.sleep(0)
        with pytest.raises(BadInput, match="one is being recorded already; wait for its end"):
            await engine.profile(0.1)
        first.cancel()
        await asyncio.wait([first])
        while True:
            try:
                await engine.profile(0.1)
                break
            except BadInput:
                # the worker has not heard of it yet
                await asyncio.sleep(0)
    assert len(list((tmp_path / "profiles").iterdir())) == 1


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with engine_of(tmp_path, tmp_path / "file") as engine:
        with pytest.raises(RunnerError, match=r"a profile cannot be written to .*/file/fdasync-profile-"):
            await engine.profile(0.1)
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=4))
