"""The trainer's side: log-probs of padded batches, steps that repeat, and a rollout served again beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_trainer import (
    LogprobTable,
    ModuleTrace,
    ScoredSequence,
    TrainerSide,
    WeightsName,
    compare_logprobs,
    first_difference,
    rollout_logprobs,
    traced,
)
from fdasync_transformers import TransformersRunner
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.errors import ConfigError
from fdasync.runner.plugins import make_runner

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_tiny_checkpoint(folder, "glm4_moe")
    return folder


def table(lengths: tuple[int, ...]) -> LogprobTable:
    rng = np.random.default_rng(0)
    sequences = []
    for number, count in enumerate(lengths):
        logprobs = np.full(count, np.nan, np.float32)
        logprobs[count // 2 :] = -1
        sequences.append(
            ScoredSequence(
                request_id=str(number),
                token_ids=rng.integers(0, 100, count).astype(np.int32),
                prompt_len=count // 2,
                logprobs=logprobs,
                weights=np.where(np.isnan(logprobs), -1, 0).astype(np.int32),
                temperature=1.0 if number % 2 else 0.7,
            )
        )
    return LogprobTable(tuple(sequences), (WeightsName("0"),))


def test_log_probs_are_those_of_a_plain_pass_whatever_the_batch(folder: Path) -> None:
    trainer, asked = TrainerSide(folder, "float32"), table((5, 30, 12, 9, 21))
    done: list[int] = []
    scored = trainer.score(asked, batch=2, with_digests=True, progress=lambda one, _: done.append(one))
    assert done == [2, 4, 5]
    assert scored.weights[0].weights_id == trainer.fingerprint().weights_id
    for one, given in zip(scored.sequences, asked.sequences, strict=True):
        assert np.array_equal(np.isnan(one.logprobs), np.isnan(given.logprobs))
        ids = torch.from_numpy(given.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = trainer.model(input_ids=ids[None], use_cache=False).logits[0].double() / given.temperature
        plain = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
        told = ~np.isnan(one.logprobs)
        assert np.abs(one.logprobs[told] - plain[told[1:]]).max() < 1e-5
        assert one.digests is not None
        assert one.digests.shape == (len(ids), trainer.model.config.num_hidden_layers)
    # alone, to the last bit the plain pass's: digests are those of whole sequences without padding
    (alone,) = trainer.score(LogprobTable(asked.sequences[1:2], asked.weights), with_digests=True).sequences
    trace = trainer.trace(asked.sequences[1].token_ids)
    assert alone.digests is not None
    for layer in range(alone.digests.shape[1]):
        assert np.array_equal(alone.digests[:, layer], trace.given(f"model.layers.{layer}")[0])


def test_a_token_whose_log_prob_is_not_a_number_is_scored_too(folder: Path) -> None:
    asked = table((8,))
    asked.sequences[0].logprobs[6] = np.nan
    (one,) = TrainerSide(folder, "float32").score(asked).sequences
    assert np.flatnonzero(~np.isnan(one.logprobs)).tolist() == [4, 5, 6, 7]


def test_a_step_changes_all_weights_and_repeats(folder: Path) -> None:
    one, other = TrainerSide(folder, "bfloat16"), TrainerSide(folder, "bfloat16")
    before = one.fingerprint()
    one.step(3)
    assert one.fingerprint().tensors.keys() == before.tensors.keys()
    same = [name for name, digest in one.fingerprint().tensors.items() if digest == before.tensors[name]]
    # biases of 0 have no size that a step could be a part of
    assert all("bias" in name for name in same), same
    other.step(3)
    assert other.fingerprint() == one.fingerprint()
    other.step(4)
    assert other.fingerprint() != one.fingerprint()


def test_unknown_numerics_are_refused_at_once(folder: Path) -> None:
    with pytest.raises(ConfigError, match="numerics"):
        TrainerSide(folder, "float32", "exact")


async def rollout(folder: Path) -> tuple[LogprobTable, ModuleTrace]:
    """Two requests with fixed numerics, the second on the first one's prefix; the trace is of the first."""
    config = EngineConfig(
        model=str(folder),
        numerics="fixed",
        runner_config={"dtype": "bfloat16", "device": "cpu", "num_threads": 1},
        tokenizer="none",
        process="inline",
        block_tokens=16,
        num_blocks=16,
        max_running=2,
        max_step_tokens=13,
    )
    runner: Any = make_runner("transformers", config.runner_config, config.runner_limits())
    assert isinstance(runner, TransformersRunner)
    async with Engine(config, runner=runner) as engine:
        params = SamplingParams(max_tokens=9, temperature=0.7, seed=1, logprobs="processed", ignore_eos=True)
        with traced(runner.model) as trace:
            first = await engine.complete(list(range(20, 60)), params, request_id="r")
        raw = SamplingParams(max_tokens=9, temperature=1.0, seed=1, logprobs="raw", ignore_eos=True)
        second = await engine.complete([*range(20, 52), 7, 8], raw, request_id="s")
        assert second.cached_tokens
        return rollout_logprobs([first, second], {"0": engine.capacity.weights_id}, {"r": 0.7}), trace


@pytest.mark.ci
async def test_with_fixed_numerics_all_bits_are_equal_and_a_flipped_one_has_a_name(folder: Path) -> None:
    table, trace = await rollout(folder)
    assert trace.tokens == 40 + 9 - 1
    tokens = table.sequences[0].token_ids
    trainer = TrainerSide(folder, "bfloat16", "fixed")
    assert first_difference(trace, trainer.trace(tokens), 40) is None
    compared = compare_logprobs(table, trainer.score(table, batch=2))
    assert compared.ok
    assert compared.tokens == 18
    # one bit of one expert's projection, which some token of the sequence uses
    name = "model.layers.1.mlp.experts"
    weight = trainer.model.get_submodule(name).down_proj
    weight.detach().view(torch.int16)[:, 3, 5] ^= 1 << 6
    found = first_difference(trace, trainer.trace(tokens), 40)
    assert found is not None
    assert (found.module, found.layer, found.inputs_differ) == (name, 1, False)
    compared = compare_logprobs(table, trainer.score(table))
    assert not compared.ok
    # the fingerprints tell it before a token is computed
    assert compared.other_weights == compared.tokens
    assert compared.first is not None
    assert compared.first.request_id == "r"
