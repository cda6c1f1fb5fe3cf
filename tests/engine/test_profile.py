"""`Engine.profile`: its folder, its length, its errors."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest

from fdasync import SamplingParams
from fdasync.errors import BadInput, DeadlineExceeded, EngineClosed, RunnerError
from fdasync.runner.synthetic.runner import SyntheticRunner
from fdasync.testing import synthetic_config, synthetic_engine
from fdasync.testing.harness.engines import oracle_of
from fdasync.testing.sim.loop import run_sim


class Recorder(SyntheticRunner):
    """Writes a file after its seconds, or does what its test says."""

    ends = "written"

    async def profile(self, parent, name, seconds):
        await asyncio.sleep(seconds)
        if self.ends == "hangs":
            await asyncio.get_running_loop().create_future()
        if self.ends == "fails":
            raise RunnerError("no room on the disk")
        return f"{parent}/{name}"


def engine_of(ends="written"):
    config = msgspec.structs.replace(synthetic_config(), profile_folder="/profiles")
    runner = Recorder(oracle_of(config).config, config.runner_limits())
    runner.ends = ends
    return synthetic_engine(config, runner=runner)


def test_each_profile_has_a_folder_of_its_own():
    async def play():
        async with engine_of() as engine:
            began = asyncio.get_running_loop().time()
            one = await engine.profile(2.0)
            assert asyncio.get_running_loop().time() - began == pytest.approx(2.0)
            return one, await engine.profile(1)

    folders = [told["engine"] for told in run_sim(play())]
    assert len(set(folders)) == 2
    assert all(re.fullmatch(r"/profiles/fdasync-profile-\w{8}", folder) for folder in folders)


@pytest.mark.parametrize(
    ("ends", "error", "words"),
    [("fails", RunnerError, "no room on the disk"), ("hangs", DeadlineExceeded, "profiling did not end within 122 s")],
)
def test_a_profile_that_fails_says_why(ends, error, words):
    async def play():
        async with engine_of(ends) as engine:
            with pytest.raises(error, match=words):
                await engine.profile(2.0)
            # the engine goes on
            await engine.complete([1, 2, 3], SamplingParams(max_tokens=4))

    run_sim(play())


@pytest.mark.parametrize("seconds", [0, -1, 11, float("nan"), True, "1", None])
def test_a_length_that_is_none_is_refused(seconds):
    async def play():
        async with engine_of() as engine:
            with pytest.raises(BadInput, match="limit: above 0, up to 10"):
                await engine.profile(seconds)

    run_sim(play())


def test_a_runner_that_records_nothing_says_so():
    async def play():
        async with synthetic_engine() as engine:
            with pytest.raises(BadInput, match="SyntheticRunner records nothing of itself"):
                await engine.profile(1.0)
        with pytest.raises(EngineClosed):
            await engine.profile(1.0)

    run_sim(play())
