"""An engine over a group of real workers: what one process gives, from prompts to a store and new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fdasync_transformers import named_tensors, weights_fingerprint
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from fdasync_transformers.weights.random_checkpoints import VOCAB_SIZE

from fdasync import Engine, EngineConfig, Grammar, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, logprobs="raw", prompt_logprobs_start=2)
DRAWN = SamplingParams(max_tokens=12, temperature=1.0, seed=7, top_p=0.9, n=2)
BOUND = SamplingParams(max_tokens=12, temperature=0.0, grammar=Grammar("regex", "[a-f]{3,8}"))


def prompt(number: int) -> list[int]:
    return [number + 3, *[(number * 31 + at * 7) % 100 + 3 for at in range(1, 22)]]


def config(folder: Path, ranks: int, store: Path, **values: Any) -> EngineConfig:
    own = {"dtype": "float64", "device": "cpu", "num_threads": 1, "experts": "eager"}
    sizes = {"block_tokens": 4, "num_blocks": 20, "max_context_tokens": 64, "max_running": 3, "max_step_tokens": 32}
    tiers = {"host_blocks": 64, "store": "file", "store_config": {"path": str(store)}, "fetch_min_tokens": 4}
    place = {"tensor_parallel": ranks} if ranks > 1 else {"process": "inline"}
    return EngineConfig(model=str(folder), runner_config=own, **{**sizes, **tiers, **place, **values})


async def answers(engine: Engine) -> tuple[list[Any], list[Any]]:
    """Tokens, rows and log-probs of requests that overflow the device's blocks and come back from the host."""
    found: list[Any] = []
    logprobs: list[Any] = []
    for number in (0, 1, 2, 0):
        for params in (PARAMS, DRAWN) if number == 1 else (PARAMS,):
            result = await engine.complete(prompt(number), params)
            for sample in result.samples:
                assert sample.routing is not None
                found.append((list(sample.token_ids), sample.routing.array.tolist()))
            if params is PARAMS:
                logprobs += [*result.prompt_logprobs, *result.samples[0].raw_logprobs]
    bound = await engine.complete(prompt(4), BOUND)
    return [*found, list(bound.samples[0].token_ids)], logprobs


@pytest.mark.ci
async def test_two_ranks_serve_store_and_take_new_weights_as_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a dense layer and one of experts
    make_tiny_checkpoint(tmp_path / "old", "qwen3_moe", 0, num_hidden_layers=2)
    new = make_tiny_checkpoint(tmp_path / "new", "qwen3_moe", 1, num_hidden_layers=2)
    expected = weights_fingerprint(new, dtype="float64")
    # a model this small computes faster than any store reads, so the one engine gets another speed
    monkeypatch.setattr("fdasync_transformers.start.capacity.prefill_tokens_per_s", lambda *_: 1.0)
    async with Engine(config(tmp_path / "old", 2, tmp_path / "store")) as engine:
        many, scores = await answers(engine)
        with pytest.raises(Exception, match="grammar"):
            await engine.complete(prompt(4), SamplingParams(max_tokens=3, grammar=Grammar("regex", "[a")))
        await engine.update_weights("from memory", named_tensors(new), expected=expected)
        renewed, _ = await answers(engine)
        await engine.update_weights("from a folder", str(tmp_path / "old"))
        assert (await answers(engine))[0] == many
        engine.check()
    async with Engine(config(tmp_path / "old", 1, tmp_path / "store")) as engine:
        # a request whose prompt is scored computes it
        hit = await engine.complete(prompt(0), SamplingParams(max_tokens=2))
        assert hit.cached.store == 20
        found, others = await answers(engine)
        assert found == many
        np.testing.assert_allclose(others, scores, rtol=1e-5)
        await engine.update_weights("from memory", named_tensors(new), expected=expected)
        assert (await answers(engine))[0] == renewed != many
    assert len(np.unique([token for tokens, _ in many[:-1] for token in tokens])) > VOCAB_SIZE // 20
