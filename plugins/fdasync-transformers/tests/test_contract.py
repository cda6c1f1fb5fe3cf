"""The conformance suite for runners on a real checkpoint: in this process and in a worker."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from fdasync_transformers import TransformersConfig, TransformersRunner, make_random_checkpoint, named_tensors
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from safetensors.torch import load_file

from fdasync import Grammar
from fdasync.runner.worker.proxy import WorkerRunner
from fdasync.testing import RunnerTests
from fdasync.testing.runners.harness import RunnerSuite
from fdasync.testing.runners.open_blocks import TailTests

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from fdasync.runner.base import Runner, RunnerLimits
    from fdasync.testing.runners.bench import Answer


# of one in `make test`, of all in `make test-all`
FAMILIES = ["qwen3_moe", *[pytest.param(family, marks=pytest.mark.nightly) for family in ("ernie4_5_moe", "glm4_moe")]]


class _OnACheckpoint(RunnerSuite):
    # a forward pass on the CPU ends where it is launched
    overlaps = False

    loads = True
    grammar = Grammar("regex", "[a-f]{2}[0-9]{4}x*")
    dtype = "float32"
    device = "cpu"
    logprob_error = 1e-4

    @pytest.fixture(autouse=True, params=FAMILIES)
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
        # fixed numerics are refused without the self-check, which proves them
        checked = limits.numerics == "fixed"
        own = {"dtype": self.dtype, "device": self.device, "num_threads": 1, "self_check": checked}
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


@pytest.mark.heavy("the suite of runners against the model's")
class TestTransformers(_OnACheckpoint, RunnerTests):
    pass


@pytest.mark.gpu
class TestOnAGpu(_OnACheckpoint, RunnerTests):
    """Steps and copies in flight, graphs, fused routers."""

    overlaps = True
    device = "cuda"

    def make_runner(self, own: dict[str, Any], limits: RunnerLimits) -> Runner:
        return TransformersRunner(TransformersConfig(**own, graph_sizes=(1, 4)), limits)


@pytest.mark.ci
class TestInHalfPrecision(_OnACheckpoint, TailTests):
    """Not all of the suite: in this dtype the last bit, which depends on the batch, often decides between two tokens.
    The same shapes give the same bits."""

    dtype = "bfloat16"
    batch_safe = False
    logprob_error = 0.0


@pytest.mark.ci
@pytest.mark.parametrize(
    "family", ["deepseek_v3", *[pytest.param(one, marks=pytest.mark.nightly) for one in ("gpt_oss", "llama4_text")]]
)
def test_what_came_with_a_tail_reaches_no_kind_of_attention(tmp_path: Path, family: str) -> None:
    """Latents, sinks with windows, chunks: each has a mask of its own over the block that is there in part."""
    make_tiny_checkpoint(tmp_path, family)
    suite = TestTransformers()
    suite.folders = [tmp_path]
    suite.test_what_lies_past_the_tokens_of_a_tail_counts_for_nothing()
    suite.test_a_sequence_begun_elsewhere_may_have_more_to_compute()


@pytest.mark.ci
@pytest.mark.parametrize("family", ["deepseek_v32", pytest.param("glm_moe_dsa", marks=pytest.mark.nightly)])
def test_positions_that_indexers_chose_are_written_as_they_are_due(tmp_path: Path, family: str) -> None:
    make_tiny_checkpoint(tmp_path, family)
    suite = TestTransformers()
    suite.folders = [tmp_path]
    suite.test_a_sequence_has_the_chosen_positions_of_all_its_tokens()
    suite.test_chosen_positions_are_those_of_one_sequence_from_its_first_on()
    suite.test_rows_that_stand_stay_when_a_sequence_starts_again()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "test",
    ["test_swapped_out_and_in_elsewhere_blocks_answer_as_before", "test_tensors_change_the_answers_and_back"],
)
def test_the_suite_in_a_worker(tmp_path: Path, test: str) -> None:
    """Starting a worker takes seconds: what crosses the wire, on one family."""

    class InAWorker(TestTransformers):
        def make_runner(self, own: dict[str, Any], limits: RunnerLimits) -> Runner:
            return WorkerRunner("transformers", own, limits, close_deadline_s=300.0, chunk_nbytes=4096)

    suite = InAWorker()
    suite.folders = [make_random_checkpoint(tmp_path / str(seed), size="tiny", seed=seed) for seed in range(2)]
    getattr(suite, test)()
