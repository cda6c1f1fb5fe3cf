"""Groups of ranks on GPUs, a GPU each: what one GPU gives, through tiers, stores, new weights and a killed rank."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from agreeing import make_agreeing_checkpoint
from fdasync_trainer import fixed_numerics
from fdasync_trainer.numerics.logprobs import logprobs_of_logits
from fdasync_trainer.verification.reference import library_model
from fdasync_transformers import make_random_checkpoint, named_tensors
from safetensors.torch import load_file

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.drafting import Speculation
from fdasync.errors import EngineFailed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=40, temperature=1.0, seed=7, n=2, ignore_eos=True)


@pytest.fixture(autouse=True)
def enough_gpus(request: pytest.FixtureRequest) -> None:
    wanted = request.node.callspec.params.get("ranks", 2) if hasattr(request.node, "callspec") else 2
    if torch.cuda.device_count() < wanted:
        pytest.skip(f"needs {wanted} GPUs")


def prompt(number: int) -> list[int]:
    return [number + 3, *[(number * 31 + at * 7) % 100 + 3 for at in range(1, 70)]]


def config(folder: Path, ranks: int, store: Path | None = None, **values: Any) -> EngineConfig:
    own = {"dtype": "float32", "device": "auto", "self_check": False, "graph_sizes": [1, 2, 4]}
    # few blocks: sequences are preempted, and blocks go to the host and come back
    sizes = {"block_tokens": 16, "num_blocks": 18, "max_context_tokens": 128, "max_running": 4, "max_step_tokens": 64}
    tiers: dict[str, Any] = {"host_blocks": 64, "pipeline_depth": 2}
    if store is not None:
        tiers |= {"store": "file", "store_config": {"path": str(store)}, "fetch_min_tokens": 16}
    return EngineConfig(
        model=str(folder), runner_config=own, process="worker" if ranks > 1 else "inline",
        tensor_parallel=ranks, tokenizer="none",
        **{**sizes, **tiers, **values},
    )  # fmt: skip


async def answers(engine: Engine) -> list[Any]:
    """Tokens and rows of requests that run beside each other."""
    asked = [(number, params) for number in (0, 1, 2, 0, 3, 4) for params in (PARAMS, DRAWN)]
    results = await asyncio.gather(*[engine.complete(prompt(number), params) for number, params in asked])
    found = []
    for result in results:
        for sample in result.samples:
            assert sample.routing is not None
            # sets of experts: their order by weight may differ by a rounding. The array is in host memory
            rows = [[sorted(layer) for layer in row] for row in sample.routing.array.tolist()]
            found.append((list(sample.token_ids), rows))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
async def test_ranks_serve_store_and_take_new_weights_as_one_gpu_does(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a model this small computes faster than any store reads, so the one GPU's engine gets another speed
    monkeypatch.setattr("fdasync_transformers.start.capacity.prefill_tokens_per_s", lambda *_: 1.0)
    make_random_checkpoint(tmp_path / "old", size="tiny", seed=0)
    folder = make_random_checkpoint(tmp_path / "new", size="tiny", seed=1)
    new = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    async with Engine(config(tmp_path / "old", ranks, tmp_path / "store")) as engine:
        assert len(set(engine.gpus)) == ranks
        many = await answers(engine)
        stats = engine.stats().scheduler
        assert stats.preemptions > 0
        await engine.update_weights("from memory", named_tensors(new))
        renewed = await answers(engine)
        await engine.update_weights("from a folder", str(tmp_path / "old"))
        assert await answers(engine) == many
        engine.check()
    async with Engine(config(tmp_path / "old", 1, tmp_path / "store")) as engine:
        hit = await engine.complete(prompt(0), SamplingParams(max_tokens=2, ignore_eos=True))
        assert hit.cached.store > 0
        assert await answers(engine) == many
        await engine.update_weights("from memory", named_tensors(new))
        assert await answers(engine) == renewed
    assert renewed != many


@pytest.mark.parametrize("ranks", [2, 4])
async def test_drafts_change_nothing_on_ranks(tmp_path: Path, ranks: int) -> None:
    make_random_checkpoint(tmp_path, size="tiny")
    async with Engine(config(tmp_path, ranks)) as engine:
        plain = await answers(engine)
    drafts = Speculation(drafter_config={"keep_s": 600.0}, max_tokens=3, budget=False)
    async with Engine(config(tmp_path, ranks, speculation=drafts)) as engine:
        for _ in range(2):
            # the second time drafts are the first time's samples of the same prompts
            assert await answers(engine) == plain
        stats = engine.stats().scheduler
        assert stats.accepted_tokens > 100
        assert stats.accepted_tokens < stats.drafted_tokens
        engine.check()


@pytest.mark.parametrize(("family", "ranks"), [("qwen3_moe", 2), ("glm4_moe", 4), ("deepseek_v3", 2)])
async def test_ranks_draft_with_the_model_s_own_layers(tmp_path: Path, family: str, ranks: int) -> None:
    """What blocks carry is divided among the ranks, and comes back from the host to other ranks' lanes whole."""
    make_agreeing_checkpoint(tmp_path, family)
    own = {"dtype": "float32", "device": "auto", "self_check": False, "graph_sizes": [1, 2, 4]}
    grouped = config(tmp_path, ranks, max_step_tokens=128)
    async with Engine(msgspec.structs.replace(grouped, runner_config=own)) as engine:
        plain = await answers(engine)
    alone = Speculation(drafter="none", max_tokens=3, budget=False)
    found = []
    for width in (1, ranks):
        mtp = config(tmp_path, width, speculation=alone, max_step_tokens=128)
        async with Engine(
            msgspec.structs.replace(mtp, runner_config={**own, "mtp": True, "graph_sizes": [1, 4, 16]})
        ) as engine:
            assert await answers(engine) == plain
            stats = engine.stats().scheduler
            engine.check()
        # blocks went to the host, and came back
        assert stats.swapped_in_blocks > 0
        found.append(stats)
    for stats in found:
        assert 100 < stats.own_accepted_tokens < stats.own_drafted_tokens
    # the same drafts, but for those that preemptions at other moments cost
    assert abs(found[0].own_accepted_tokens - found[1].own_accepted_tokens) < 100


@pytest.mark.parametrize("ranks", [2, 4])
async def test_sums_in_slices_have_the_bits_of_one_gpu_and_of_a_trainer(tmp_path: Path, ranks: int) -> None:
    make_random_checkpoint(tmp_path, size="tiny")
    own = {"dtype": "bfloat16", "device": "auto", "graph_sizes": [1, 4]}
    scored = SamplingParams(max_tokens=40, temperature=1.0, seed=5, logprobs="raw", ignore_eos=True)
    found = []
    for width in (1, ranks):
        sliced = config(tmp_path, width, numerics="fixed", sum_slices=4)
        async with Engine(msgspec.structs.replace(sliced, runner_config=own)) as engine:
            assert any("decoder layers" in note and "fused: 0" not in note for note in engine.capacity.notes)
            assert "sums that ranks share have 4 slices" in engine.capacity.notes
            many = await asyncio.gather(*[engine.complete(prompt(number), scored) for number in range(6)])
            assert engine.stats().scheduler.preemptions > 0
            samples = [one.samples[0] for one in many]
        found.append([(list(sample.token_ids), np.asarray(sample.raw_logprobs).tolist()) for sample in samples])
    assert found[0] == found[1]
    # blocking: no engine is open any more
    assert trainers(tmp_path, [tokens for tokens, _ in found[0]]) == [logprobs for _, logprobs in found[0]]


def trainers(folder: Path, sampled: list[list[int]]) -> list[list[float]]:
    """Log-probs of a trainer for the answers to the prompts from 0 on."""
    model: Any = library_model(folder, torch.bfloat16, alone=True).to("cuda")
    found = []
    with torch.no_grad(), fixed_numerics(model, sum_slices=4):
        for number, tokens in enumerate(sampled):
            ids = torch.tensor([[*prompt(number), *tokens]], device="cuda")
            logits = model(ids).logits[0, len(prompt(number)) - 1 : -1]
            found.append(logprobs_of_logits(logits, ids[0, len(prompt(number)) :]).tolist())
    return found


async def test_sums_by_nccl_have_the_bits_of_sums_in_the_memory_of_peers(tmp_path: Path) -> None:
    make_random_checkpoint(tmp_path, size="tiny")
    scored = SamplingParams(max_tokens=40, temperature=1.0, seed=5, logprobs="raw", ignore_eos=True)
    found = []
    for way in ("peers", "nccl"):
        own = {"dtype": "bfloat16", "device": "auto", "self_check": False, "graph_sizes": [1, 4], "collectives": way}
        async with Engine(msgspec.structs.replace(config(tmp_path, 2), runner_config=own)) as engine:
            assert any(note.startswith("sums by NCCL") for note in engine.capacity.notes) is (way == "nccl")
            many = await asyncio.gather(*[engine.complete(prompt(number), scored) for number in range(4)])
            samples = [one.samples[0] for one in many]
            assert all(sample.raw_logprobs is not None for sample in samples)
            found.append([(list(sample.token_ids), np.asarray(sample.raw_logprobs).tolist()) for sample in samples])
    assert found[0] == found[1]


@pytest.mark.parametrize(("kill", "rank"), [(signal.SIGKILL, 1), (signal.SIGKILL, 0), (signal.SIGSTOP, 1)])
async def test_a_rank_that_dies_or_stands_still_fails_the_engine_by_name(
    tmp_path: Path, kill: signal.Signals, rank: int
) -> None:
    make_random_checkpoint(tmp_path, size="tiny")
    values: dict[str, Any] = {"max_context_tokens": 4096, "num_blocks": 300, "step_deadline_s": 5.0}
    async with Engine(config(tmp_path, 2, **values)) as engine:
        pids = engine.worker_pids
        long = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
        running = asyncio.create_task(engine.complete(prompt(1), long))
        async with asyncio.timeout(300):
            while engine.stats().scheduler.steps < 20:  # noqa: ASYNC110 - no event tells an embedder of steps
                await asyncio.sleep(0.01)
        os.kill(pids[rank], kill)
        began = time.monotonic()
        with pytest.raises(EngineFailed, match=f"rank {rank}") as caught:
            await running
        assert time.monotonic() - began < 20.0
        assert caught.value.partial is not None
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    # their GPUs are free again
    async with Engine(config(tmp_path, 2)) as engine:
        assert len(await answers(engine)) == 18
