"""The path of GPUs: on one where there is one, else on the CPU in Triton's interpreter, which is the same code but for
graphs and streams. Held against the path of CPUs, which `test_runner.py` holds against the library."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from device_waits import waits_raise
from fdasync_transformers import TransformersConfig, TransformersRunner
from fdasync_transformers.execution import passes
from fdasync_transformers.execution.graphs import decode_rows, ladder
from fdasync_transformers.execution.mixed_graphs import token_ladder
from msgspec.structs import replace
from step_driver import Driver
from written import write_tiny_checkpoint

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.events.actions import Chunk
from fdasync.runner.base import RunnerLimits
from fdasync.testing import RunnerTests

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fdasync_transformers.execution.parts.step_part import StepWork

    from fdasync.runner.base import Runner
from device_path import DEVICE, answers, assert_same, make_small_checkpoint

FAMILIES = ["qwen3_moe", "ernie4_5_moe", "deepseek_v3", "gpt_oss", "llama4_text"]
# layers with recurrent state: each kind of recurrence once
RECURRENT = ["qwen3_next", "kimi_linear", "nemotron_h", "lfm2_moe"]
MORE = ["glm4_moe", "mixtral", "qwen2_moe", "olmoe", "hunyuan_v1_moe", "glm4_moe_lite", "phimoe", "granitemoe"]
# Triton's interpreter takes seconds for each: one in `make test`, the others in `make test-all`
QUICK = ("qwen3_moe", "qwen3_next")
MARKS: dict[str, Any] = {one: () if one in QUICK else pytest.mark.nightly for one in FAMILIES + RECURRENT}


def note_steps(monkeypatch: pytest.MonkeyPatch, seen: Callable[[StepWork], None]) -> None:
    """Have this called with every step once it is planned; checks of graphs are none."""
    plain = passes.Passes.plan

    def plan(self: passes.Passes, work: StepWork) -> Any:
        arrays = plain(self, work)
        seen(work)
        return arrays

    monkeypatch.setattr(passes.Passes, "plan", plan)


@pytest.mark.ci
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=MARKS.get(one, pytest.mark.gpu)) for one in FAMILIES + RECURRENT + MORE]
)
async def test_it_answers_as_the_path_of_cpus(tmp_path: Path, family: str) -> None:
    write_tiny_checkpoint(tmp_path, family)
    wanted = await answers(tmp_path, {"device": "cpu"})
    assert_same(await answers(tmp_path, DEVICE), wanted)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "family", ["qwen3_moe", *[pytest.param(one, marks=pytest.mark.gpu) for one in FAMILIES[1:] + MORE]]
)
async def test_few_tokens_are_computed_as_decodes(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks beside decodes, several tokens of a sequence in a step: as by the kernels for prefill."""
    write_tiny_checkpoint(tmp_path, family)
    wanted = await answers(tmp_path, {"device": "cpu"})
    shapes = []

    def seen(work: StepWork) -> None:
        tokens = len(work.batch.positions)
        shapes.append((work.way, tokens > len(work.batch.lanes), len(work.rows) < tokens))

    note_steps(monkeypatch, seen)
    assert_same(await answers(tmp_path, DEVICE, flat_tokens=16), wanted)
    assert {way for way, *_ in shapes} == {"decodes"}
    # steps with several tokens of a sequence, and some of whose tokens nothing is sampled from
    assert ("decodes", True, True) in shapes


@pytest.mark.ci
@pytest.mark.parametrize(
    "family", ["qwen3_moe", *[pytest.param(one, marks=pytest.mark.gpu) for one in FAMILIES[1:] + MORE]]
)
async def test_steps_with_prompts_in_padded_tiles(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As graphs of a few numbers of tokens compute them: decodes in tiles too, padding rows and sequences."""
    make_small_checkpoint(tmp_path, family)
    wanted = await answers(tmp_path, {"device": "cpu"})
    ways = []
    note_steps(
        monkeypatch,
        lambda work: ways.append((work.way, work.batch.num_decodes > 0, len(work.rows) < len(work.batch.lanes))),
    )
    # steps have up to 11 tokens
    assert_same(await answers(tmp_path, DEVICE, tiled_tokens=(6, 16)), wanted)
    assert {way for way, *_ in ways} == {"tiles", "decodes"}
    # decodes beside chunks, and chunks that nothing is sampled from
    assert {("tiles", True, False), ("tiles", False, True)} <= set(ways)


@pytest.mark.nightly
async def test_long_contexts_do_not_decode_in_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    monkeypatch.setattr(passes, "_MOST_TILED_TOKENS", 8)
    ways = []
    plain = passes.Passes.way
    monkeypatch.setattr(passes.Passes, "way", lambda self, batch: ways.append(plain(self, batch)) or ways[-1])
    wanted = await answers(tmp_path, {"device": "cpu"})
    assert_same(await answers(tmp_path, DEVICE, tiled_tokens=(16,)), wanted)
    assert set(ways) == {"tiles", "both", "decodes"}


def test_sizes_of_steps_that_decode() -> None:
    assert ladder(1) == (1,)
    assert ladder(8) == (1, 2, 4, 8)
    assert ladder(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    limits = RunnerLimits(max_running=8, max_step_tokens=64)
    assert decode_rows(limits) == 8
    assert decode_rows(replace(limits, speculation=3)) == 32
    # a step has no more tokens, but each sequence has its last one in it
    assert decode_rows(replace(limits, speculation=9)) == 64
    assert decode_rows(replace(limits, speculation=3, max_step_tokens=4)) == 8


def test_sizes_of_steps_with_prompts() -> None:
    narrow = (512, 768, 1024, 1280, 1536, 1792, 2048)
    assert token_ladder(2048, 256) == narrow
    assert token_ladder(2500, 256) == (*narrow, 2500)
    assert token_ladder(8192, 256) == token_ladder(20_000, 256) == (*narrow, 3072, 4096, 5120, 6144, 7168, 8192)
    assert token_ladder(600, 256) == (512, 600)
    assert token_ladder(256, 256) == token_ladder(64, 256) == ()
    assert token_ladder(600, 48) == (64, 128, 256, 512, 600)
    assert token_ladder(40, 2) == (16, 32, 40)


@pytest.mark.nightly
async def test_chunks_that_would_read_much_are_no_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE}, max_running=16)
    executor: Any = driver.runner.bound.executor
    executor.passes.flat_tokens = 16
    one = driver.sequence([7] * 8, 2)
    ways = []
    plain = executor.passes.way
    monkeypatch.setattr(executor.passes, "way", lambda batch: ways.append(plain(batch)) or ways[-1])
    token_nbytes = executor.model.layout.token_nbytes
    # the first four tokens read 1 + 2 + 3 + 4, the others 5 + 6 + 7 + 8, the decode behind them 9
    monkeypatch.setattr(passes, "_MOST_READ_NBYTES", 10 * token_nbytes)
    await driver.launch(starts=[driver.start(one)], chunks=[Chunk(one.key, 4, False)])
    await driver.launch(chunks=[Chunk(one.key, 4, True)])
    one.tokens.append(0)
    await driver.launch(appends=driver.append(one))
    assert ways == ["decodes", "both", "decodes"]
    await driver.close()


@pytest.mark.ci
async def test_a_step_is_launched_before_the_one_before_it_is_done(tmp_path: Path) -> None:
    """The sampled token never comes to the host on its way to the next step; rows of both steps are right."""
    make_small_checkpoint(tmp_path, "qwen3_moe")
    found = []
    for config, ahead in (({"device": "cpu"}, False), (DEVICE, True)):
        driver = await Driver.open(tmp_path, config={"self_check": False, **config}, pipeline_depth=2)
        one = driver.sequence([4, 8, 15, 16, 23, 42], 5, temperature=0.7, seed=3)
        two = driver.sequence([9, 8, 7], 5)
        starts = [driver.start(one), driver.start(two)]
        flights = [driver.launch(starts=starts, chunks=[Chunk(one.key, 6, True), Chunk(two.key, 3, True)])]
        for _ in range(4):
            if not ahead:
                await flights[-1]
            # planned without knowing any token
            one.tokens.append(0)
            two.tokens.append(0)
            appends = [entry for seq in (one, two) for entry in driver.append(seq)]
            flights.append(driver.launch(appends=appends))
            if ahead and len(flights) % 2 == 0:
                # launched one behind the other, with no turn of the loop between
                assert not flights[-2].done()
                await flights[-1]
                assert flights[-2].done()
        outputs = [(await flight).tokens for flight in flights]
        one.tokens, two.tokens = [tokens[0] for tokens in outputs], [tokens[1] for tokens in outputs]
        found.append((outputs, np.sort(driver.rows(one), -1), np.sort(driver.rows(two), -1)))
        await driver.close()
    assert found[0][0] == found[1][0]
    assert np.array_equal(found[0][1], found[1][1])
    assert np.array_equal(found[0][2], found[1][2])


async def complete_all(config: EngineConfig, folder: Path) -> list[Any]:
    prompts = [[number, *[(number * 31 + at * 7) % 100 for at in range(9)]] for number in range(4)]
    params = [SamplingParams(max_tokens=6, temperature=0.0), SamplingParams(max_tokens=6, temperature=1.0, seed=5)]
    async with Engine(config) as engine:
        first = await asyncio.gather(*[engine.complete(prompt, params[0]) for prompt in prompts])
        # again: prefixes of the first come from the host tier by now
        second = await asyncio.gather(*[engine.complete(prompt, params[1]) for prompt in prompts[:2]])
        assert any(result.cached.total for result in second)
        # with two steps in flight the one behind a stop is computed already: its token and its row leave the result
        stop = first[0].samples[0].token_ids[2]
        stopped = await engine.complete(
            prompts[0], SamplingParams(max_tokens=6, temperature=0.0, stop_token_ids=(stop,))
        )
        assert stopped.samples[0].finish_reason == "stop"
        assert len(stopped.samples[0].token_ids) < 6
        return [*first, *second, stopped]


@pytest.mark.nightly
@pytest.mark.parametrize("process", ["inline", pytest.param("worker", marks=pytest.mark.gpu)])
async def test_an_engine_with_little_memory(tmp_path: Path, process: Any) -> None:
    """Two steps in flight, preemption, swaps: tokens and rows are those of the path of CPUs with one in flight."""
    write_tiny_checkpoint(tmp_path, "qwen3_moe")

    def config(runner: dict[str, Any], depth: int) -> EngineConfig:
        return EngineConfig(
            model=str(tmp_path),
            runner_config={"dtype": "float32", "self_check": False, **runner},
            process=process,
            tokenizer="none",
            block_tokens=4,
            num_blocks=9,
            host_blocks=32,
            max_context_tokens=32,
            max_running=4,
            max_step_tokens=64,
            pipeline_depth=depth,
        )

    wanted = await complete_all(config({"device": "cpu", "num_threads": 1}, 1), tmp_path)
    got = await complete_all(config(DEVICE, 2), tmp_path)
    for one, other in zip(got, wanted, strict=True):
        assert one.samples[0].token_ids == other.samples[0].token_ids
        assert one.samples[0].finish_reason == other.samples[0].finish_reason
        mine, theirs = one.samples[0].routing.array, other.samples[0].routing.array
        assert np.array_equal(np.sort(mine, -1), np.sort(theirs, -1))


@pytest.mark.ci
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("ernie4_5_moe", marks=pytest.mark.nightly)])
async def test_rows_name_their_positions_under_routing_debug(tmp_path: Path, family: str) -> None:
    """By the fused router and by the hook; the runner checks each row as it comes, and would fail."""
    make_small_checkpoint(tmp_path, family, **({"mlp_only_layers": []} if family == "qwen3_moe" else {}))
    driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE}, routing_debug=True)
    assert driver.capacity.routing_debug
    one = driver.sequence([5, 6, 7, 8, 9], 3)
    await driver.run([one], chunks=2)
    rows = driver.rows(one)
    layers, slots = rows.shape[1:]
    digits = [(position + 1 >> 8 * ((layer * slots + slot) % 4)) + layer & 255
              for position in range(len(rows)) for layer in range(layers) for slot in range(slots)]  # fmt: skip
    assert rows.ravel().tolist() == digits
    await driver.close()


@pytest.mark.nightly
async def test_the_self_check_runs_the_kernels(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config=DEVICE)
    assert any(note.startswith("self-check: ") for note in driver.capacity.notes)
    await driver.close()


@pytest.mark.ci
@pytest.mark.parametrize(
    "test",
    [
        pytest.param("test_steps_overlap_and_complete_in_order", marks=pytest.mark.nightly),
        "test_a_step_fails_after_those_before_it",
        pytest.param("test_swapped_out_and_in_elsewhere_blocks_answer_as_before", marks=pytest.mark.nightly),
    ],
)
def test_the_contract(tmp_path: Path, test: str) -> None:
    """Of the conformance suite what tells the two paths apart; all of it runs on a GPU (`test_contract.py`)."""
    write_tiny_checkpoint(tmp_path, "qwen3_moe")

    class OnTheDevicePath(RunnerTests):
        __test__ = False

        def new_loop(self) -> asyncio.AbstractEventLoop:
            return asyncio.SelectorEventLoop()

        def make(self, limits: RunnerLimits) -> Runner:
            own = {"dtype": "float32", "self_check": False, **DEVICE}
            return TransformersRunner(TransformersConfig(**own), replace(limits, model=str(tmp_path)))

    getattr(OnTheDevicePath(), test)()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_no_step_waits_for_the_device(tmp_path: Path, dtype: str) -> None:
    """torch raises where anything would: prefill, mixed steps, graphs, every kind of sampling, scores of prompts."""
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE, "dtype": dtype}, pipeline_depth=2)
    honest = driver.runner.launch

    def strictly(step: Any) -> Any:
        with waits_raise():
            return honest(step)

    driver.runner.launch = strictly  # type: ignore[method-assign]
    bias = {"bias_ids": np.array([3, 9], "<i4").tobytes(), "bias_values": np.array([2.5, -100.0], "<f4").tobytes()}
    asked = [
        driver.sequence([1, 2, 3, 4, 5], 6),
        driver.sequence([3, 5, 9], 6, 1, temperature=1.0, seed=4, raw=True, processed=True, top=3),
        driver.sequence([3] * 9, 6, 2, temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.3),
        driver.sequence([6] * 9, 6, 3, frequency_penalty=0.2, min_tokens=2, stop_ids=(4, 5)),
        # the first two have left by then
        driver.sequence([8] * 9, 6, 8, temperature=0.9, processed=True, **bias),
        driver.sequence(list(range(9)), 6, 9, score_from=0, score_top=3),
    ]
    await driver.run(asked, chunks=2)
    assert all(len(one.tokens) == 6 for one in asked)
    await driver.close()


@pytest.mark.gpu
async def test_steps_without_graphs_are_the_same(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    assert_same(await answers(tmp_path, {**DEVICE, "cuda_graphs": False}), await answers(tmp_path, DEVICE))


@pytest.mark.ci
async def test_fused_experts_are_the_same(tmp_path: Path) -> None:
    """By name, so that in the interpreter they run too."""
    make_small_checkpoint(tmp_path, "qwen3_moe")
    wanted = await answers(tmp_path, {"device": "cpu"})
    # padding rows, of which graphs are full
    assert_same(await answers(tmp_path, {**DEVICE, "experts": "fused"}, tiled_tokens=(16,)), wanted)


@pytest.mark.gpu
async def test_experts_of_the_library_are_the_same(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    assert_same(await answers(tmp_path, {**DEVICE, "experts": "batched_mm"}), await answers(tmp_path, DEVICE))


@pytest.mark.gpu
async def test_unfused_routers_are_the_same(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    assert_same(await answers(tmp_path, {**DEVICE, "fused_router": False}), await answers(tmp_path, DEVICE))
