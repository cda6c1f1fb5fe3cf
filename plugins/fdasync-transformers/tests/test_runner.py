"""The runner against the contract of `fdasync.runner.base`, driven by hand-made steps."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from fdasync_transformers import TransformersConfig, TransformersRunner
from fdasync_transformers.model import ragged
from fdasync_transformers.model.attention import paged_attention
from fdasync_transformers.model.kv import KVLayout, KVPool, LayerSpec, Reach
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from fdasync_transformers.weights.groups.joined import JoinedGroups
from fdasync_transformers.weights.random_checkpoints import EOS_ID
from fdasync_transformers.weights.random_checkpoints import VOCAB_SIZE as VOCAB
from fdasync_transformers.weights.update import LiveWeights
from step_driver import Driver, Sequence

from fdasync.cache.aux_arena import AuxArena
from fdasync.errors import CheckpointError, ConfigError, InvariantBroken, RunnerError
from fdasync.events.actions import Chunk, RunStep
from fdasync.ipc.remote import marked
from fdasync.runner.base import Runner, RunnerLimits
from fdasync.runner.chosen import LentRows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

FAMILY = "qwen3_moe"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, make_tiny_checkpoint(folder, FAMILY)


@pytest.fixture
async def driver(saved: tuple[Path, Any]) -> AsyncIterator[Driver]:
    opened = await Driver.open(saved[0])
    yield opened
    await opened.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def generated(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    )
    return out[0, len(prompt) :].tolist()


async def decode(driver: Driver, sequences: list[Sequence], steps: int) -> None:
    for _ in range(steps):
        output = await driver.step(appends=[a for seq in sequences for a in driver.append(seq)])
        for seq, token in zip(sequences, output.tokens, strict=True):
            seq.tokens.append(token)


# -- blocks and sequences -----------------------------------------------------------------------


async def test_a_prefix_hit_reads_the_blocks_of_another_sequence(driver: Driver, saved: tuple[Path, Any]) -> None:
    first = driver.sequence(prompt_of(21), 6)
    await driver.run([first])
    # five whole blocks of four tokens; only the 21st token is computed
    second = driver.sequence(first.prompt, 6)
    start = driver.start(second, cached=first.blocks[:5])
    output = await driver.step(starts=[start], chunks=[Chunk(second.key, 1, True)])
    second.tokens.append(output.tokens[0])
    await decode(driver, [second], 5)
    assert second.tokens == first.tokens == generated(saved[1], first.prompt, 6)
    assert np.array_equal(driver.rows(second), driver.rows(first)[20:])


async def test_a_preempted_sequence_goes_on_in_other_blocks(driver: Driver, saved: tuple[Path, Any]) -> None:
    other, seq = driver.sequence(prompt_of(9, seed=1), 12), driver.sequence(prompt_of(14), 12)
    chunks = [Chunk(s.key, len(s.prompt), True) for s in (other, seq)]
    output = await driver.step(starts=[driver.start(other), driver.start(seq)], chunks=chunks)
    for s, token in zip((other, seq), output.tokens, strict=True):
        s.tokens.append(token)
    await decode(driver, [other, seq], 4)
    rows_before = driver.rows(seq)
    # leave, and come back in the same step that others decode in, with every known token
    output = await driver.step(
        leaves=[seq.key],
        starts=[driver.start(seq)],
        appends=driver.append(other),
        chunks=[Chunk(seq.key, len(seq.prompt) + len(seq.tokens), True)],
    )
    for s, token in zip((other, seq), output.tokens, strict=True):
        s.tokens.append(token)
    await decode(driver, [other, seq], 6)
    for s in (other, seq):
        assert s.tokens == generated(saved[1], s.prompt, 12)
    again = driver.rows(seq)[: len(rows_before)]
    assert np.array_equal(np.sort(again, axis=-1), np.sort(rows_before, axis=-1))


async def test_a_skipped_sequence_loses_nothing(driver: Driver, saved: tuple[Path, Any]) -> None:
    one, two = driver.sequence(prompt_of(5), 8), driver.sequence(prompt_of(11, seed=1), 8)
    output = await driver.step(
        starts=[driver.start(one), driver.start(two)], chunks=[Chunk(s.key, len(s.prompt), True) for s in (one, two)]
    )
    one.tokens.append(output.tokens[0])
    two.tokens.append(output.tokens[1])
    for step in range(14):
        here, away = (one, two) if step % 2 else (two, one)
        output = await driver.step(appends=driver.append(here), skips=[away.key])
        here.tokens.append(output.tokens[0])
    assert one.tokens == generated(saved[1], one.prompt, 8)
    assert two.tokens == generated(saved[1], two.prompt, 8)


async def test_what_a_past_owner_left_in_a_block_is_not_seen(driver: Driver, saved: tuple[Path, Any]) -> None:
    pool = driver.runner.bound.executor._bound.pool
    assert pool is not None
    pool.blocks.fill_(float("nan"))
    sequences = [driver.sequence(prompt_of(n, seed=n), 9) for n in (3, 8, 18)]
    await driver.run(sequences, chunks=2)
    assert [s.tokens for s in sequences] == [generated(saved[1], s.prompt, 9) for s in sequences]


@pytest.mark.ci
async def test_block_boundaries_by_token(saved: tuple[Path, Any]) -> None:
    # prompts that end just before, on and after a boundary, with one token per chunk and with all at once
    driver = await Driver.open(saved[0], max_running=16, num_blocks=256)
    for chunks in (1, 100):
        sequences = [driver.sequence(prompt_of(n, seed=n), 6) for n in (1, 3, 4, 5, 7, 8, 9)]
        await driver.run(sequences, chunks=chunks)
        assert [s.tokens for s in sequences] == [generated(saved[1], s.prompt, 6) for s in sequences]
    await driver.close()


@pytest.mark.parametrize("limit", [1, 200])
async def test_long_chunks_are_cut_without_changing_anything(
    saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(ragged, "_MASK_ELEMENTS", limit)
    driver = await Driver.open(saved[0])
    honest, pieces = ragged._cut, []

    def watched(counts: Any, starts: Any, first_rows: Any, masked: bool, most: int) -> Any:
        assert most == limit
        cut = honest(counts, starts, first_rows, masked, most)
        pieces.append((len(counts), cut))
        return cut

    monkeypatch.setattr(ragged, "_cut", watched)
    split = ragged._partition

    def bounded(pieces: Any, block_tokens: int, most: int) -> Any:
        groups = split(pieces, block_tokens, most)
        assert sorted(np.concatenate(groups).tolist()) == list(range(pieces.shape[1]))
        for members in groups:
            _, first, count, _ = pieces[:, members]
            keys = ((first + count - 1) // block_tokens + 1) * block_tokens
            # whole prompts are causal and need no mask; one piece is never split
            assert len(members) == 1 or len(members) * count.max() * keys.max() <= most
        return groups

    monkeypatch.setattr(ragged, "_partition", bounded)
    sequences = [driver.sequence(prompt_of(n, seed=n), 4) for n in (30, 41)]
    await driver.run(sequences, chunks=2)
    assert [s.tokens for s in sequences] == [generated(saved[1], s.prompt, 4) for s in sequences]
    # the second halves of both prompts were cut, as finely as the limit says
    assert max(cut.shape[1] for _, cut in pieces) >= (15 + 20 if limit == 1 else 3 + 5)
    for _, cut in pieces:
        for _, first, count, _ in cut.T.tolist():
            assert first == 0 or count == 1 or count * (first + count) <= limit
    await driver.close()


@pytest.mark.ci
async def test_lengths_far_apart_share_a_step(saved: tuple[Path, Any]) -> None:
    driver = await Driver.open(saved[0], max_running=8, max_step_tokens=512, num_blocks=128)
    sequences = [driver.sequence(prompt_of(n, seed=n), 5) for n in (2, 6, 120, 200)]
    await driver.run(sequences)
    assert [s.tokens for s in sequences] == [generated(saved[1], s.prompt, 5) for s in sequences]
    await driver.close()


def test_a_block_is_one_run_of_bytes() -> None:
    layers = (LayerSpec(0, 2, 4, 3), LayerSpec(1, 1, 5, 0, Reach(), 3), LayerSpec(2, 2, 4, 4))
    pool = KVPool(KVLayout(layers, torch.float32), num_blocks=6, block_tokens=4, device=torch.device("cpu"))
    assert pool.blocks.is_contiguous()
    assert pool.blocks.shape == (6, 4 * (14 + 5 + 16))
    # every element of block 3 belongs to exactly one view
    for views in (pool.keys, pool.values):
        for view in views.values():
            view[3] += 1
    assert (pool.blocks[3] == 1).all()
    assert not pool.blocks[[0, 1, 2, 4, 5]].any()
    assert set(pool.values) == {0, 2}


@pytest.mark.parametrize(
    ("token_nbytes", "block_tokens"), [(98304, 16), (40960, 16), (20000, 32), (8000, 64), (100, 64), (10**7, 16)]
)
def test_block_tokens_follow_the_bytes(token_nbytes: int, block_tokens: int) -> None:
    layout = KVLayout((LayerSpec(0, 1, token_nbytes // 4, 0),), torch.float32)
    assert layout.choose_block_tokens() == block_tokens


# -- what a step gives --------------------------------------------------------------------------


async def test_a_step_without_samples_computes_no_logits(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    head = driver.runner.opened.model.step_model.model.lm_head
    shapes: list[tuple[int, ...]] = []
    hook = head.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    seq = driver.sequence(prompt_of(12), 3)
    output = await driver.step(starts=[driver.start(seq)], chunks=[Chunk(seq.key, 5, False)])
    assert output.tokens == ()
    output = await driver.step(chunks=[Chunk(seq.key, 7, True)])
    assert len(output.tokens) == 1
    hook.remove()
    assert [shape[1] for shape in shapes] == [0, 1]


async def test_a_step_without_tokens(driver: Driver) -> None:
    output = await driver.step()
    assert (output.step_id, output.tokens, output.raw) == (1, (), None)


async def test_rows_are_there_when_the_future_is_done(driver: Driver) -> None:
    seq = driver.sequence(prompt_of(10), 1)
    step = RunStep(1, starts=(driver.start(seq),), chunks=(Chunk(seq.key, 6, False),))
    assert driver.runner.launch(step).done()
    rows = {"routing": np.zeros((4, *driver.capacity.aux_specs[0].shape), np.uint8)}
    slot, generation = seq.slots[0]
    assert driver.arena is not None
    driver.arena.copy_rows((slot,), (generation,), 0, 4, rows, 0)
    assert rows["routing"].any()
    # the second block is half written, the third not at all
    slot, generation = seq.slots[1]
    driver.arena.copy_rows((slot,), (generation,), 0, 2, rows, 0)
    with pytest.raises(InvariantBroken):
        driver.arena.copy_rows((slot,), (generation,), 2, 1, rows, 0)


async def test_raw_logprobs_are_those_of_the_plain_model(driver: Driver, saved: tuple[Path, Any]) -> None:
    seq = driver.sequence(prompt_of(19), 6, raw=True)
    await driver.run([seq])
    with torch.no_grad():
        logits = saved[1](torch.tensor([seq.prompt + seq.tokens])).logits[0, len(seq.prompt) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(seq.tokens)[:, None])[:, 0]
    assert np.allclose(seq.raw, wanted.numpy(), atol=1e-4)


async def test_rows_of_a_padded_head_are_never_sampled(driver: Driver, saved: tuple[Path, Any]) -> None:
    model: Any = driver.runner.opened.model.step_model.model
    weight = model.lm_head.weight.detach()
    padded = torch.nn.Linear(weight.shape[1], 2 * VOCAB, bias=False)
    with torch.no_grad():
        # whatever the best token is, a row of the padding beats it
        padded.weight.copy_(torch.cat([weight, 10 * weight]))
    model.lm_head = padded
    seq = driver.sequence(prompt_of(11), 6, raw=True)
    sampled = driver.sequence(prompt_of(7, seed=1), 6, temperature=1.0, raw=True)
    await driver.run([seq, sampled])
    assert seq.tokens == generated(saved[1], seq.prompt, 6)
    assert max(sampled.tokens) < VOCAB
    with torch.no_grad():
        logits = saved[1](torch.tensor([seq.prompt + seq.tokens])).logits[0, len(seq.prompt) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(seq.tokens)[:, None])[:, 0]
    assert np.allclose(seq.raw, wanted.numpy(), atol=1e-4)


@pytest.mark.parametrize("name", ["softcap", "position_bias", "cu_seq_lens_q", "block_table"])
def test_attention_of_a_kind_that_is_not_done_is_refused(name: str) -> None:
    empty: Any = torch.zeros(1, 1, 1, 4)
    nothing: Any = None
    with pytest.raises(RunnerError, match=name):
        paged_attention(torch.nn.Module(), empty, empty, empty, None, scaling=1.0, fd_ctx=nothing, **{name: 30.0})


@pytest.mark.ci
async def test_penalties_see_prompt_and_output(driver: Driver, saved: tuple[Path, Any]) -> None:
    seq = driver.sequence(prompt_of(7), 20, repetition_penalty=1.7)
    await driver.run([seq])
    assert seq.tokens == generated(saved[1], seq.prompt, 20, repetition_penalty=1.7)
    assert seq.tokens != generated(saved[1], seq.prompt, 20)


@pytest.mark.ci
async def test_sampling_does_not_depend_on_the_batch(saved: tuple[Path, Any]) -> None:
    results = []
    for others in (0, 3):
        driver = await Driver.open(saved[0], seed=others)
        seq = driver.sequence(prompt_of(13), 12, temperature=1.0, seed=11, index=2)
        crowd = [driver.sequence(prompt_of(5 + n, seed=n), 9, temperature=1.0, seed=n) for n in range(others)]
        await driver.run([*crowd, seq], chunks=1 + others)
        results.append(seq.tokens)
        await driver.close()
    assert results[0] == results[1]


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
async def test_every_experts_implementation_gives_the_same(saved: tuple[Path, Any], experts: str) -> None:
    driver = await Driver.open(saved[0], config={"experts": experts})
    seq = driver.sequence(prompt_of(17), 6)
    await driver.run([seq])
    assert seq.tokens == generated(saved[1], seq.prompt, 6)
    assert any(experts in note for note in driver.capacity.notes)
    await driver.close()


# -- capacity and capture -----------------------------------------------------------------------


async def test_capacity_tells_what_the_engine_needs(saved: tuple[Path, Any]) -> None:
    driver = await Driver.open(saved[0])
    capacity = driver.capacity
    assert capacity.vocab_size == VOCAB
    assert capacity.eos_ids == (EOS_ID,)
    assert capacity.max_context_tokens == 256
    assert capacity.block_nbytes == 4 * 4 * 2 * 2 * 16 * 4
    assert capacity.kv_layout == "shares-first:4x(2,16,16)"
    assert capacity.aux_specs[0].shape == (3, 3)
    assert len(capacity.weights_id) == 32
    assert capacity.tokenizer == "transformers"
    assert msgspec.convert(msgspec.to_builtins(capacity), type(capacity)) == capacity
    await driver.close()


async def test_context_is_bounded_by_the_limits(saved: tuple[Path, Any]) -> None:
    driver = await Driver.open(saved[0], max_context_tokens=30)
    assert driver.capacity.max_context_tokens == 30
    # the last token of the context is sampled, and read by no step
    seq = driver.sequence(prompt_of(20), 10)
    await driver.run([seq])
    assert seq.tokens == generated(saved[1], seq.prompt, 10)
    # past the bound by one: sampled still, kept nowhere
    full = driver.sequence(prompt_of(32), 1)
    await driver.run([full])
    assert full.tokens == generated(saved[1], full.prompt, 1)
    await driver.close()


@pytest.mark.ci
async def test_num_blocks_follow_memory_and_use(saved: tuple[Path, Any]) -> None:
    block = 16 * 4 * 2 * 2 * 16 * 4
    limits: dict[str, Any] = {"num_blocks": None, "block_tokens": 16, "max_context_tokens": 64}
    driver = await Driver.open(saved[0], config={"kv_cache_nbytes": 7 * block + 1}, **limits)
    assert driver.capacity.num_blocks == 7
    await driver.close()
    # plenty of memory: no more than four sequences of 64 tokens can use
    driver = await Driver.open(saved[0], **limits)
    assert driver.capacity.num_blocks == 16
    await driver.close()
    with pytest.raises(ConfigError) as caught:
        await Driver.open(saved[0], config={"kv_cache_nbytes": block - 1}, **limits)
    assert caught.value.field == "kv_cache_nbytes"


async def test_capture_off_serves_without_rows(saved: tuple[Path, Any]) -> None:
    driver = await Driver.open(saved[0], capture=False)
    assert driver.capacity.aux_specs == ()
    assert driver.capacity.moe_layer_ids == ()
    assert driver.arena is None
    sequences = [driver.sequence(prompt_of(n), 7) for n in (4, 17)]
    await driver.run(sequences, chunks=2)
    assert [s.tokens for s in sequences] == [generated(saved[1], s.prompt, 7) for s in sequences]
    await driver.close()


async def test_a_dense_model_has_no_rows_and_says_so_when_asked(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_dense")
    driver = await Driver.open(tmp_path)
    assert driver.capacity.aux_specs == ()
    await driver.close()
    with pytest.raises(ConfigError) as caught:
        await Driver.open(tmp_path, capture=True)
    assert caught.value.field == "routing"


async def test_an_arena_is_bound_exactly_when_routing_is_captured(saved: tuple[Path, Any]) -> None:
    limits = RunnerLimits(model=str(saved[0]), max_running=1, max_step_tokens=8, num_blocks=4, block_tokens=4)
    runner = TransformersRunner(TransformersConfig(), limits)
    capacity = await runner.open()
    with pytest.raises(InvariantBroken):
        await runner.bind(4, None)
    arena = AuxArena.create(4, 4, capacity.aux_specs)
    await runner.bind(4, arena)
    await runner.aclose()
    arena.close()


@pytest.mark.ci
async def test_two_runners_in_one_process_do_not_meet(saved: tuple[Path, Any], tmp_path: Path) -> None:
    other_model = make_tiny_checkpoint(tmp_path, "gpt_oss", seed=3)
    one, two = await Driver.open(saved[0]), await Driver.open(tmp_path)
    a, b = one.sequence(prompt_of(12), 5), two.sequence(prompt_of(12), 5)
    for driver, seq in ((one, a), (two, b)):
        output = await driver.step(starts=[driver.start(seq)], chunks=[Chunk(seq.key, 12, True)])
        seq.tokens.append(output.tokens[0])
    for _ in range(4):
        await decode(one, [a], 1)
        await decode(two, [b], 1)
    assert a.tokens == generated(saved[1], a.prompt, 5)
    assert b.tokens == generated(other_model, b.prompt, 5)
    await one.close()
    # the first one's end takes nothing from the second
    await decode(two, [b], 1)
    assert b.tokens == generated(other_model, b.prompt, 6)
    await two.close()


def test_a_part_has_the_method_of_each_verb_that_is_forwarded() -> None:
    for name in [one for one in marked(Runner) if hasattr(vars(TransformersRunner)[one], "__wrapped__")]:
        (part,) = [part for part in (JoinedGroups, LentRows, LiveWeights) if hasattr(part, name)]
        asked, has = ([*signature(getattr(one, name)).parameters] for one in (Runner, part))
        assert has[: len(asked)] == asked, f"{part.__name__}.{name}"


# -- failure and end ----------------------------------------------------------------------------


async def test_launch_never_raises_and_stops_after_a_failure(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    model = driver.runner.opened.model.step_model.model
    honest = model.forward
    monkeypatch.setattr(model, "forward", lambda **_: 1 / 0)
    seq = driver.sequence(prompt_of(6), 2)
    future = driver.runner.launch(RunStep(5, starts=(driver.start(seq),), chunks=(Chunk(seq.key, 6, True),)))
    with pytest.raises(RunnerError, match="ZeroDivisionError") as caught:
        await future
    assert caught.value.step_id == 5
    monkeypatch.setattr(model, "forward", honest)
    with pytest.raises(RunnerError, match="after a failure"):
        await driver.runner.launch(RunStep(6))


async def test_a_layer_that_is_not_captured_fails_the_step(driver: Driver) -> None:
    driver.runner.opened.model.step_model.aux.producers[0]._hooks[0].remove()
    seq = driver.sequence(prompt_of(6), 2)
    future = driver.runner.launch(RunStep(1, starts=(driver.start(seq),), chunks=(Chunk(seq.key, 6, True),)))
    with pytest.raises(RunnerError, match="2 layers was captured, 3"):
        await future


async def test_aclose_is_idempotent_and_follows_a_failed_open(saved: tuple[Path, Any], tmp_path: Path) -> None:
    driver = await Driver.open(saved[0])
    await driver.close()
    await driver.runner.aclose()
    with pytest.raises(RunnerError, match="closed"):
        await driver.runner.launch(RunStep(1))
    failed = TransformersRunner(
        TransformersConfig(), RunnerLimits(model=str(tmp_path / "none"), max_running=1, max_step_tokens=8)
    )
    with pytest.raises(CheckpointError, match="does not exist"):
        await failed.open()
    await failed.aclose()


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"num_threads": 0}, "num_threads"),
        ({"num_threads": 10**12}, "num_threads"),
        ({"device": "abacus"}, "device"),
        ({"device": "cuda:99"}, "device"),
        ({"device": "meta"}, "device"),
    ],
)
async def test_bad_settings_are_named(saved: tuple[Path, Any], values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await Driver.open(saved[0], config=values)
    assert caught.value.field == f"runner_config.{field}"


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="thread_count"):
        msgspec.convert({"thread_count": 2}, TransformersConfig)
    with pytest.raises(msgspec.ValidationError, match="dtype"):
        msgspec.convert({"dtype": "int8"}, TransformersConfig)
