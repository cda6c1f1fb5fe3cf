"""What is the example runner's own: the values of its entropy, and what it does without it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from fdasync_example import TinyMoeConfig, TinyMoeRunner
from fdasync_example.runner import entropy_of

from fdasync.errors import ConfigError
from fdasync.runner.base import RunnerLimits
from fdasync.runner.worker.proxy import WorkerRunner
from fdasync.testing import RunnerTests, on_bench

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync.runner.base import Runner

LIMITS = RunnerLimits(max_running=2, max_step_tokens=64, block_tokens=4, num_blocks=12)


def test_entropy_is_that_of_the_distribution():
    flat = np.zeros((1, 64), np.float32)
    peaked = np.where(np.arange(64) == 3, np.float32(200.0), np.float32(0.0))[None]
    coin = np.where(np.arange(64) < 2, np.float32(100.0), np.float32(0.0))[None]
    found = entropy_of(np.concatenate([flat, peaked, coin]))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[:, 0], [np.log(64), 0.0, np.log(2)], atol=1e-6)


@pytest.mark.parametrize(
    ("entropy", "capture", "names"),
    [
        (False, "auto", ["routing"]),
        (True, False, ["entropy"]),
        (True, True, ["routing", "entropy"]),
        (False, False, []),
    ],
)
async def test_specs_are_what_was_asked_for(entropy, capture, names):
    limits = RunnerLimits(max_running=2, max_step_tokens=64, block_tokens=4, num_blocks=12, capture=capture)
    async with on_bench(TinyMoeRunner(TinyMoeConfig(entropy=entropy), limits)) as on:
        assert [spec.name for spec in on.capacity.aux_specs] == names
        assert sorted((await on.answer(0, [1, 2, 3, 4, 5], 4, [0, 1])).rows) == sorted(names)


async def test_another_seed_is_another_model():
    tokens = []
    for seed in (0, 1):
        async with on_bench(TinyMoeRunner(TinyMoeConfig(seed=seed), LIMITS)) as on:
            tokens.append((await on.answer(0, [1, 2, 3, 4, 5], 6, [0, 1, 2])).tokens)
    assert tokens[0] != tokens[1]


async def test_what_it_does_not_know_is_refused():
    limits = RunnerLimits(max_running=2, max_step_tokens=64, routing_debug=True)
    with pytest.raises(ConfigError, match="routing_debug"):
        await TinyMoeRunner(TinyMoeConfig(), limits).open()


@pytest.mark.ci
def test_it_runs_in_a_worker_that_finds_it_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Under a name of its own, so that it does not matter which copy of the package is installed."""
    info = tmp_path / "tiny_here-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-here\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fdasync.runners]\ntiny_here = fdasync_example.runner:TinyMoeRunner\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    class InAWorker(RunnerTests):
        __test__ = False

        def make(self, limits: RunnerLimits) -> Runner:
            return WorkerRunner("tiny_here", {"entropy": True}, limits, close_deadline_s=300.0)

    InAWorker().test_a_step_writes_every_spec_of_every_row()
    InAWorker().test_swapped_out_and_in_elsewhere_blocks_answer_as_before()
