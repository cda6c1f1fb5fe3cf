"""The conformance suite for runners on a real checkpoint: in this process and in a worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
from fdasync_transformers import TransformersConfig, TransformersRunner, make_random_checkpoint

from fdasync.runner.worker import WorkerRunner
from fdasync.testing import RunnerTests

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync.runner.base import Runner, RunnerLimits
    from fdasync.testing.bench import Answer


class TestTransformers(RunnerTests):
    # a forward pass on the CPU ends where it is launched
    overlaps = False

    @pytest.fixture(autouse=True, params=["qwen3_moe", "ernie4_5_moe", "glm4_moe"])
    def checkpoint(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = tmp_path_factory.getbasetemp() / f"contract-{request.param}"
        if not folder.exists():
            make_random_checkpoint(folder, request.param, size="tiny")
        self.folder: Path = folder

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop()

    def make(self, limits: RunnerLimits) -> Runner:
        limits = self.with_model(limits)
        return TransformersRunner(TransformersConfig(dtype="float32", num_threads=1, self_check=False), limits)

    def with_model(self, limits: RunnerLimits) -> RunnerLimits:
        import msgspec

        return msgspec.structs.replace(limits, model=str(self.folder))

    def assert_same(self, one: Answer, other: Answer) -> None:
        assert one.tokens == other.tokens
        for name, rows in one.rows.items():
            assert np.array_equal(np.sort(rows, axis=-1), np.sort(other.rows[name], axis=-1)), f"rows of {name} differ"


def test_the_suite_in_a_worker(tmp_path: Path) -> None:
    folder = make_random_checkpoint(tmp_path / "model", size="tiny")

    class InAWorker(TestTransformers):
        def make(self, limits: RunnerLimits) -> Runner:
            own = {"dtype": "float32", "num_threads": 1, "self_check": False}
            return WorkerRunner("transformers", own, self.with_model(limits), close_deadline_s=10.0)

    suite = InAWorker()
    suite.folder = folder
    suite.test_two_of_them_answer_alike()
