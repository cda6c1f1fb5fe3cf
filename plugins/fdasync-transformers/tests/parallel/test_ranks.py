"""Several ranks compute what one process computes: logits, tokens, rows, and what names model and weights."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_transformers import TransformersConfig, TransformersRunner
from fdasync_transformers.parallel.collectives import HostCollectives
from fdasync_transformers.start.recurrent import refuse_cut
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint, make_tiny_model
from fdasync_transformers.tiny.families import FAMILIES as CATALOGUE
from fdasync_transformers.weights.shards import SINGLE_FILE
from rank_play import CONFIG, Played, play, play_one
from ranks import as_ranks, returned
from safetensors.torch import load_file, save_file
from step_driver import Driver
from structures import in_turn

from fdasync.cache.host_arena import HostArena
from fdasync.errors import ConfigError, InvariantBroken, RunnerError
from fdasync.events.actions import Chunk, SwapIn, SwapOut
from fdasync.runner.base import RunnerLimits

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync.ipc.exchange import Exchange

LIMITS: dict[str, Any] = {"max_running": 1, "max_step_tokens": 8}
# transposed experts; biases behind sums; latents with and without cut heads; tied embedding; heads of two sizes; sinks;
# dense experts without ids; identity experts; values narrower than keys; whole attention; no experts
FAMILIES = (
    "aria_text", "beam", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "gemma4_text", "granitemoe_swa", "llama4_text",
    "longcat_flash", "mimo_v2_flash", "minimax_m2", "qwen3_dense", "qwen3_moe_fp8",
)  # fmt: skip
# a second each: latents, dense experts without ids, no experts; others wait for `make test-ci`
FIRST = ("deepseek_v2", "llama4_text", "qwen3_dense")
OTHERS = tuple(
    name
    for name, entry in CATALOGUE.items()
    if name not in FAMILIES
    and not (entry.refused or entry.whole_only)
    and name not in ("dbrx", "gpt_oss", "gpt_oss_mxfp4")
)


def assert_same(one: Played, many: list[Played], tolerance: float) -> None:
    for rank, played in enumerate(many):
        assert played.tokens == one.tokens, rank
    assert len({token for tokens in one.tokens for token in tokens}) > 2
    for own, other in zip(one.rows, many[0].rows, strict=True):
        assert np.array_equal(own, other)
    worst = max(float((a - b).abs().max()) for a, b in zip(one.logits, many[0].logits, strict=True) if len(a))
    assert worst <= tolerance


@pytest.mark.ci
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.ci)])
def test_ranks_give_what_one_process_gives(tmp_path: Path, ranks: int) -> None:
    # at 4 ranks two of them have the same KV head
    make_tiny_checkpoint(tmp_path, "qwen3_moe", attention_bias=True)
    (one,), many = play(tmp_path), play(tmp_path, ranks)
    assert_same(one, many, 1e-12)
    keys = ("weights_id", "fingerprint", "block_nbytes", "kv_layout", "aux_specs", "max_context_tokens", "dtype")
    for played in many:
        for key in keys:
            assert getattr(played.capacity, key) == getattr(one.capacity, key), key
        assert played.capacity.tensor_parallel == ranks
    assert one.capacity.tensor_parallel == 1
    assert one.capacity.dtype == "float64"


# each rank computes layers with recurrent state whole
RECURRENT = (
    "qwen3_next", "qwen3_5_moe_text", "kimi_linear", "bailing_hybrid", "nemotron_h", "granitemoehybrid", "lfm2_moe",
    "minimax",
)  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("family", in_turn(RECURRENT, RECURRENT[:1]))
def test_recurrent_layers_are_whole_on_every_rank(tmp_path: Path, family: str) -> None:
    make_tiny_checkpoint(tmp_path, family)
    # states are no float64
    (one,), many = (play(tmp_path, ranks, config={"dtype": "float32"}) for ranks in (1, 2))
    assert_same(one, many, 1e-4)
    for played in many:
        assert played.capacity.state_specs == one.capacity.state_specs
        assert played.capacity.weights_id == one.capacity.weights_id


def test_a_plan_that_cuts_a_recurrent_layer_is_refused() -> None:
    model = make_tiny_model("qwen3_next")
    with pytest.raises(ConfigError, match=r"cuts model.layers.0.linear_attn.out_proj.weight of qwen3_next") as caught:
        refuse_cut(model, "qwen3_next", {"model.layers.0.linear_attn.out_proj.weight": None})
    assert caught.value.field == "tensor_parallel"
    refuse_cut(model, "qwen3_next", {"model.layers.0.linear_attnd.weight": None, "model.layers.3.self_attn": None})


@pytest.mark.ci
@pytest.mark.parametrize("family", in_turn([*FAMILIES, *OTHERS], FIRST, FAMILIES))
def test_families_with_a_plan_at_two_ranks(tmp_path: Path, family: str) -> None:
    make_tiny_checkpoint(tmp_path, family)
    (one,), many = play(tmp_path), play(tmp_path, 2)
    # parts of the library's code compute in float32 whatever the dtype
    assert_same(one, many, 1e-5)
    assert many[0].capacity.weights_id == one.capacity.weights_id


@pytest.mark.ci
def test_drawn_weights_are_slices_of_what_one_process_draws(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    drawn = {"weights": "random"}
    assert_same(play(tmp_path, config=drawn)[0], play(tmp_path, 2, config=drawn), 1e-12)


@pytest.mark.ci
def test_latents_expanded_to_heads_are_parts_of_the_ranks(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "deepseek_v2")
    expanded = {"latent_mla": False}
    assert_same(play(tmp_path, config=expanded)[0], play(tmp_path, 2, config=expanded), 1e-5)


# -- a rank that differs ----------------------------------------------------------------------------


@pytest.mark.ci
def test_a_rank_that_sums_in_another_order_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    state = load_file(tmp_path / SINGLE_FILE)
    for name, tensor in state.items():
        if name.endswith("mlp.gate.weight"):
            # experts that differ by little more than rounding: other bits of a hidden state choose others
            state[name] = tensor[:1] * (1 + 2e-7 * torch.arange(len(tensor)).view(-1, 1))
    save_file(state, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    assert "rank 2 of 4 chose other experts than rank 0" in of_another_order(tmp_path, monkeypatch)


@pytest.mark.ci
def test_a_rank_of_a_dense_model_that_sums_in_another_order_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_dense")
    assert "rank 2 of 4 computed other logits than rank 0" in of_another_order(tmp_path, monkeypatch)


def of_another_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The error of all ranks where rank 2 of 4 adds up others first; without that they play to the end."""
    gather = HostCollectives._gather

    def turned(collectives: HostCollectives, flat: torch.Tensor, label: str) -> list[torch.Tensor]:
        parts = gather(collectives, flat, label)
        sums = not label.startswith("end of step")
        return [*parts[1:], parts[0]] if sums and collectives.rank == 2 else parts

    settings: dict[str, Any] = {"config": {"dtype": "float32", "self_check": False}}
    assert len(play(folder, 4, **settings)) == 4
    monkeypatch.setattr(HostCollectives, "_gather", turned)
    outcomes = as_ranks(4, lambda exchange: play_one(folder, exchange, **settings))
    assert [str(error) for error in outcomes] == [str(outcomes[0])] * 4
    assert isinstance(outcomes[0], RunnerError)
    return str(outcomes[0])


@pytest.mark.ci
def test_a_rank_that_does_not_come_to_a_step_fails_the_others_in_time(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")

    async def work(exchange: Exchange) -> str:
        driver = await Driver.open(tmp_path, config=CONFIG, exchange=exchange)
        # they have met, with all the time that it takes
        exchange._deadline_s = 2.0
        try:
            if exchange.rank:
                return ""
            await driver.run([driver.sequence([1, 2, 3], 2)])
        except RunnerError as error:
            return str(error)
        finally:
            await driver.close()
        return "no error"

    said, _ = returned(as_ranks(2, lambda exchange: asyncio.run(work(exchange))))
    assert "rank 0 waited 2 s for rank 1" in said


def test_a_runner_that_did_not_join_its_group_does_not_open(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")

    def work(exchange: Exchange) -> str:
        with pytest.raises(InvariantBroken, match="rank 0 of 1 for 0 of 2"):
            TransformersRunner(TransformersConfig(), RunnerLimits(**LIMITS, tensor_parallel=2)).join(exchange)
        with pytest.raises(InvariantBroken, match="2 ranks, and this one did not join"):
            asyncio.run(Driver.open(tmp_path, tensor_parallel=2))
        return "refused"

    assert as_ranks(1, work) == ["refused"]


# -- blocks -----------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "out_ranks", "in_ranks"),
    [
        # heads in parts by four and by two; what one rank reads the others show
        pytest.param("qwen3_moe", 4, 2, marks=pytest.mark.ci),
        pytest.param("qwen3_moe", 2, 1, marks=pytest.mark.nightly),
        ("deepseek_v2", 1, 2),
        ("deepseek_v2", 2, 1),
        ("minimax_m2", 2, 1),
    ],
)
def test_blocks_written_by_some_ranks_are_read_by_others(
    tmp_path: Path, family: str, out_ranks: int, in_ranks: int
) -> None:
    make_tiny_checkpoint(tmp_path, family)
    (plain,) = play(tmp_path)
    arena = HostArena.create(4, plain.capacity.block_nbytes)
    prompt = list(range(40, 53))

    async def writes(exchange: Exchange | None) -> list[int]:
        driver = await Driver.open(tmp_path, config=CONFIG, exchange=exchange, host=arena)
        try:
            sequence = driver.sequence(prompt, 5)
            await driver.run([sequence])
            await driver.runner.copy(SwapOut(0, tuple(sequence.blocks[:3]), (2, 0, 3)))
            return sequence.tokens
        finally:
            await driver.close()

    async def reads(exchange: Exchange | None) -> list[int]:
        driver = await Driver.open(tmp_path, config=CONFIG, exchange=exchange, host=arena)
        try:
            sequence = driver.sequence(prompt, 5)
            blocks = [driver.free_blocks.pop() for _ in range(3)]
            await driver.runner.copy(SwapIn(0, (2, 0, 3), tuple(blocks)))
            # twelve of thirteen tokens are cached
            output = await driver.step(starts=[driver.start(sequence, blocks)], chunks=[Chunk(sequence.key, 1, True)])
            sequence.tokens.append(output.tokens[0])
            while len(sequence.tokens) < 5:
                output = await driver.step(appends=driver.append(sequence))
                sequence.tokens.append(output.tokens[0])
            return sequence.tokens
        finally:
            await driver.close()

    def group(ranks: int, work: Any) -> list[list[int]]:
        if ranks == 1:
            return [asyncio.run(work(None))]
        return returned(as_ranks(ranks, lambda exchange: asyncio.run(work(exchange))))

    try:
        wrote = group(out_ranks, writes)
        assert group(in_ranks, reads) == [wrote[0]] * in_ranks
    finally:
        arena.close()
