"""The trainer's side: log-probs of padded batches, steps that repeat, and a rollout served again beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_transformers import (
    LogprobTable,
    ScoredSequence,
    TrainerSide,
    TransformersRunner,
    WeightsName,
    compare_logprobs,
    first_difference,
    rollout_logprobs,
    traced,
)
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


async def test_a_rollout_and_its_trainer_part_where_a_weight_does(folder: Path) -> None:
    """The served model's modules against the trainer's: with another weight they part at its module, and the tables of
    log-probs at the first token."""
    trainer = TrainerSide(folder, "float32")
    with torch.no_grad():
        trainer.model.model.layers[0].mlp.up_proj.weight.add_(0.01)
    config = EngineConfig(
        model=str(folder),
        runner_config={"dtype": "float32", "device": "cpu", "num_threads": 1, "self_check": False},
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
        params = SamplingParams(max_tokens=9, temperature=1.0, seed=1, logprobs="raw", ignore_eos=True)
        with traced(runner.model) as trace:
            result = await engine.complete(list(range(20, 60)), params, request_id="r")
        rollout = rollout_logprobs([result], {"0": engine.capacity.weights_id})
    assert trace.tokens == 40 + 9 - 1
    tokens = rollout.sequences[0].token_ids
    found = first_difference(trace, trainer.trace(tokens), 40)
    assert found is not None
    # float32 products of other shapes may differ earlier, in the last bits
    assert found.layer <= 0
    assert {"model.layers.0.mlp.up_proj", "lm_head"} <= set(trace.order)
    given, theirs = trace.given("model.layers.0.mlp.up_proj")[0], trainer.trace(tokens)
    assert (given != theirs.given("model.layers.0.mlp.up_proj")[0][: len(given)]).all()
    compared = compare_logprobs(rollout, trainer.score(rollout))
    assert not compared.ok
    assert compared.other_weights == compared.tokens == 9
    assert compared.first is not None
    assert compared.first.position == 40
