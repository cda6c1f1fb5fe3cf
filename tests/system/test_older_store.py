"""Blocks that an earlier version wrote are read, with the rows of their tokens.

`tests/system/data/store_of_5363cbbb.zip` is the folder that the file store of commit 5363cbbb left behind a request of
`PROMPT`. A change of the format, of keys or of namespaces that makes it unreadable fails here: it wants a reason, and a
new file beside this one.
"""

from __future__ import annotations

import asyncio
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fdasync import Engine, EngineConfig, Result, SamplingParams
from fdasync.runner.synthetic.runner import SyntheticRunner
from fdasync.testing.harness.engines import check_sample, oracle_of

if TYPE_CHECKING:
    from fdasync.runner.base import Capacity

OLD = Path(__file__).parent / "data" / "store_of_5363cbbb.zip"
PROMPT = [number * 7 % 900 for number in range(80)]


class Patient(SyntheticRunner):
    """A model that takes ages, by its own account: the engine waits for the store, however busy the machine is."""

    async def open(self) -> Capacity:
        return msgspec.structs.replace(await super().open(), prefill_tokens_per_s=1e-3)


def config_of(folder: Path, **changes: object) -> EngineConfig:
    store = {"path": str(folder), "segment_nbytes": 1 << 16, "max_nbytes": 1 << 20}
    runner = {"num_blocks": 64} | changes
    return EngineConfig(
        runner="synthetic",
        runner_config=runner,
        process="inline",
        host_blocks=64,
        store="file",
        store_config=store,
        write_through="all",
        fetch_min_tokens=0,
    )


def read(folder: Path, **changes: object) -> int:
    """How many tokens an engine of today finds in that folder; its answer is held against the oracle."""
    with zipfile.ZipFile(OLD) as kept:
        kept.extractall(folder)
    config, params = config_of(folder, **changes), SamplingParams(max_tokens=4, temperature=0.0)

    async def ask() -> Result:
        async with Engine(config, runner=Patient(oracle_of(config).config, config.runner_limits())) as engine:
            return await engine.complete(PROMPT, params)

    result = asyncio.run(ask())
    # the rows too, which come back with the blocks
    check_sample(result.samples[0], PROMPT, params, oracle_of(config))
    return result.usage.cached_tokens


def test_blocks_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    assert read(tmp_path) == 64


def test_they_are_not_read_under_other_weights(tmp_path: Path) -> None:
    assert read(tmp_path, weights_id=2) == 0
