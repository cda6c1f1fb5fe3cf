"""The conformance suite for runners on a real checkpoint: in this process and in a worker."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from fdasync_transformers import TransformersConfig, TransformersRunner, make_random_checkpoint, named_tensors
from safetensors.torch import load_file

from fdasync.runner.worker import WorkerRunner
from fdasync.testing import RunnerTests

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from fdasync.runner.base import Runner, RunnerLimits
    from fdasync.testing.bench import Answer


class TestTransformers(RunnerTests):
    # a forward pass on the CPU ends where it is launched
    overlaps = False

    loads = True

    @pytest.fixture(autouse=True, params=["qwen3_moe", "ernie4_5_moe", "glm4_moe"])
    def checkpoint(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folders: list[Path] = []
        for weights in range(2):
            folder = tmp_path_factory.getbasetemp() / f"contract-{request.param}-{weights}"
            if not folder.exists():
                make_random_checkpoint(folder, request.param, size="tiny", seed=weights)
            self.folders.append(folder)

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop()

    def make(self, limits: RunnerLimits) -> Runner:
        return self.make_of(limits, 0)

    def make_of(self, limits: RunnerLimits, weights: int) -> Runner:
        own = {"dtype": "float32", "num_threads": 1, "self_check": False}
        return self.make_runner(own, msgspec.structs.replace(limits, model=str(self.folders[weights])))

    def make_runner(self, own: dict[str, Any], limits: RunnerLimits) -> Runner:
        return TransformersRunner(TransformersConfig(**own), limits)

    def write_folder(self, folder: Path, weights: int) -> None:
        shutil.copytree(self.folders[weights], folder, dirs_exist_ok=True)

    def break_folder(self, folder: Path) -> None:
        # one shard short
        sorted(folder.glob("*.safetensors"))[-1].unlink()

    def tensors_of(self, weights: int) -> list[Any]:
        state: dict[str, torch.Tensor] = {}
        for path in sorted(self.folders[weights].glob("*.safetensors")):
            state.update(load_file(path))
        return named_tensors(state)

    def assert_same(self, one: Answer, other: Answer) -> None:
        assert one.tokens == other.tokens
        for name, rows in one.rows.items():
            assert np.array_equal(np.sort(rows, axis=-1), np.sort(other.rows[name], axis=-1)), f"rows of {name} differ"


@pytest.mark.parametrize(
    "test",
    ["test_swapped_out_and_in_elsewhere_blocks_answer_as_before", "test_tensors_change_the_answers_and_back"],
)
def test_the_suite_in_a_worker(tmp_path: Path, test: str) -> None:
    """Starting a worker takes seconds: what crosses the wire, on one family."""

    class InAWorker(TestTransformers):
        def make_runner(self, own: dict[str, Any], limits: RunnerLimits) -> Runner:
            return WorkerRunner("transformers", own, limits, close_deadline_s=10.0, chunk_nbytes=4096)

    suite = InAWorker()
    suite.folders = [make_random_checkpoint(tmp_path / str(seed), size="tiny", seed=seed) for seed in range(2)]
    getattr(suite, test)()
