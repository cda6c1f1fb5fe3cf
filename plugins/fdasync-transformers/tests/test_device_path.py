"""The path of GPUs: on one where there is one, else on the CPU in Triton's interpreter, which is the same code but for
graphs and streams. Held against the path of CPUs, which `test_runner.py` holds against the library."""

from __future__ import annotations

import asyncio
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from device_waits import waits_raise
from families_zoo import make_checkpoint
from fdasync_transformers import TransformersConfig, TransformersRunner, device_executor, gpu_services, triton_paging
from fdasync_transformers.device_executor import DeviceExecutor
from fdasync_transformers.mixed_graphs import token_ladder
from msgspec.structs import replace
from step_driver import Driver

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.errors import ConfigError, RunnerError, UnsupportedModel
from fdasync.events.actions import Chunk
from fdasync.gpu.ports.other import FakePort
from fdasync.testing import RunnerTests

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync.runner.base import Runner, RunnerLimits

ON_GPU = torch.cuda.is_available()
DEVICE = {"kernels": "triton", "device": "cuda" if ON_GPU else "cpu", "num_threads": 1}
# what the interpreter is given is small: a kernel takes it a tenth of a second
NEW = 12 if ON_GPU else 2
FAMILIES = ["qwen3_moe", "ernie4_5_moe", "deepseek_v3", "gpt_oss", "llama4_text"]
MORE = ["glm4_moe", "mixtral", "qwen2_moe", "olmoe", "hunyuan_v1_moe", "glm4_moe_lite", "phimoe", "granitemoe"]


async def answers(
    folder: Path,
    config: dict[str, Any],
    *,
    depth: int = 1,
    flat_tokens: int | None = None,
    tiled_tokens: tuple[int, ...] = (),
) -> list[tuple[list[int], Any, list[float]]]:
    """Tokens, rows as sets and log-probs of a ragged batch: late arrivals, chunks, penalties, sampling.

    `flat_tokens`: steps of so few tokens are computed as decodes; `tiled_tokens`: steps with prompts are padded to one
    of so many, and computed in tiles.
    """
    driver = await Driver.open(
        folder, config={"self_check": False, **config}, pipeline_depth=depth, max_running=flat_tokens or 4
    )
    try:
        executor: Any = driver.runner._executor
        services = getattr(executor, "_services", None)
        if flat_tokens is not None:
            executor.flat_tokens = flat_tokens
        if tiled_tokens:
            executor.flat_tokens = 0
            with executor._services.streams.on("compute"):
                executor.capture_mixed(tiled_tokens, 4)
        asked = [
            driver.sequence([1 + at * 7 % 50 for at in range(5)], NEW),
            driver.sequence([3, 5, 9, 11, 2, 3, 4, 5, 6, 7, 9], NEW, 1, temperature=1.0, seed=4, raw=True),
            driver.sequence([3] * 9, NEW, repetition_penalty=1.3, presence_penalty=0.2),
        ]
        await driver.run(asked, chunks=2)
        if services is not None:
            assert (services.events.outstanding, services.pinned.outstanding, services.port.lost) == ({}, {}, 0)
        return [(one.tokens, np.sort(driver.rows(one), -1), one.raw) for one in asked]
    finally:
        await driver.close()


def assert_same(
    got: list[tuple[list[int], Any, list[float]]], wanted: list[tuple[list[int], Any, list[float]]]
) -> None:
    for (tokens, rows, raw), (right_tokens, right_rows, right_raw) in zip(got, wanted, strict=True):
        assert tokens == right_tokens
        assert np.array_equal(rows, right_rows)
        assert np.allclose(raw, right_raw, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES + [pytest.param(one, marks=pytest.mark.gpu) for one in MORE])
async def test_it_answers_as_the_path_of_cpus(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    wanted = await answers(tmp_path, {"device": "cpu"})
    assert_same(await answers(tmp_path, DEVICE), wanted)


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *[pytest.param(one, marks=pytest.mark.gpu) for one in FAMILIES[1:] + MORE]]
)
async def test_few_tokens_are_computed_as_decodes(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks beside decodes, several tokens of a sequence in a step: as by the kernels for prefill."""
    make_checkpoint(tmp_path, family)
    wanted = await answers(tmp_path, {"device": "cpu"})
    shapes = []
    plain = device_executor.batch_arrays

    def seen(batch: Any, rows: Any, way: str) -> Any:
        shapes.append((way, len(batch.positions) > len(batch.lanes), len(rows) < len(batch.positions)))
        return plain(batch, rows, way)

    monkeypatch.setattr(device_executor, "batch_arrays", seen)
    assert_same(await answers(tmp_path, DEVICE, flat_tokens=16), wanted)
    assert {way for way, *_ in shapes} == {"decodes"}
    # steps with several tokens of a sequence, and some of whose tokens nothing is sampled from
    assert ("decodes", True, True) in shapes


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *[pytest.param(one, marks=pytest.mark.gpu) for one in FAMILIES[1:] + MORE]]
)
async def test_steps_with_prompts_in_padded_tiles(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As graphs of a few numbers of tokens compute them: decodes in tiles too, rows and sequences that are nobody's."""
    make_checkpoint(tmp_path, family)
    wanted = await answers(tmp_path, {"device": "cpu"})
    ways = []
    plain = device_executor.batch_arrays

    def seen(batch: Any, rows: Any, way: str) -> Any:
        ways.append((way, batch.num_decodes > 0, len(rows) < len(batch.lanes)))
        return plain(batch, rows, way)

    monkeypatch.setattr(device_executor, "batch_arrays", seen)
    # steps have up to 11 tokens
    assert_same(await answers(tmp_path, DEVICE, tiled_tokens=(6, 16)), wanted)
    assert {way for way, *_ in ways} == {"tiles", "decodes"}
    # decodes beside chunks, and chunks that nothing is sampled from
    assert {("tiles", True, False), ("tiles", False, True)} <= set(ways)


async def test_long_contexts_do_not_decode_in_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    monkeypatch.setattr(device_executor, "_MOST_TILED_TOKENS", 8)
    ways = []
    plain = device_executor.DeviceExecutor._way
    monkeypatch.setattr(DeviceExecutor, "_way", lambda self, batch: ways.append(plain(self, batch)) or ways[-1])
    wanted = await answers(tmp_path, {"device": "cpu"})
    assert_same(await answers(tmp_path, DEVICE, tiled_tokens=(16,)), wanted)
    assert set(ways) == {"tiles", "both", "decodes"}


def test_sizes_of_steps_with_prompts() -> None:
    assert token_ladder(2048) == token_ladder(8192) == (512, 768, 1024, 1280, 1536, 1792, 2048)
    assert token_ladder(600) == (512, 600)
    assert token_ladder(256) == token_ladder(64) == ()


async def test_chunks_that_would_read_much_are_no_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE}, max_running=16)
    executor: Any = driver.runner._executor
    executor.flat_tokens = 16
    one = driver.sequence([7] * 8, 2)
    ways = []
    plain = executor._way
    monkeypatch.setattr(executor, "_way", lambda batch: ways.append(plain(batch)) or ways[-1])
    token_nbytes = executor.model.layout.token_nbytes
    # the first four tokens read 1 + 2 + 3 + 4, the others 5 + 6 + 7 + 8, the decode behind them 9
    monkeypatch.setattr(device_executor, "_MOST_READ_NBYTES", 10 * token_nbytes)
    await driver.launch(starts=[driver.start(one)], chunks=[Chunk(one.key, 4, False)])
    await driver.launch(chunks=[Chunk(one.key, 4, True)])
    one.tokens.append(0)
    await driver.launch(appends=driver.append(one))
    assert ways == ["decodes", "both", "decodes"]
    await driver.close()


async def test_a_step_is_launched_before_the_one_before_it_is_done(tmp_path: Path) -> None:
    """The sampled token never comes to the host on its way to the next step; rows of both steps are right."""
    make_checkpoint(tmp_path, "qwen3_moe")
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


@pytest.mark.parametrize("process", ["inline", pytest.param("worker", marks=pytest.mark.gpu)])
async def test_an_engine_with_little_memory(tmp_path: Path, process: Any) -> None:
    """Two steps in flight, preemption, swaps: tokens and rows are those of the path of CPUs with one in flight."""
    make_checkpoint(tmp_path, "qwen3_moe")

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


@pytest.mark.parametrize("family", ["qwen3_moe", "ernie4_5_moe"])
async def test_rows_name_their_positions_under_routing_debug(tmp_path: Path, family: str) -> None:
    """By the fused router and by the hook; the runner checks each row as it comes, and would fail."""
    make_checkpoint(tmp_path, family)
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


async def test_a_capture_that_gives_other_rows_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE}, routing_debug=True)
    capture = driver.runner._executor._bound.capture
    honest = capture.stage
    monkeypatch.setattr(capture, "stage", lambda count: honest(count).flip(0))
    one = driver.sequence([5, 6, 7, 8, 9], 2)
    with pytest.raises(RunnerError, match="row of position 0"):
        await driver.run([one])
    with pytest.raises(RunnerError, match="nothing more after a failure"):
        await driver.step()
    await driver.close()


async def test_a_model_that_gives_nan_fails_the_step_by_row(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config={"self_check": False, "cuda_graphs": False, **DEVICE})
    with torch.no_grad():
        driver.runner._step_model.model.lm_head.weight[7] = float("nan")
    with pytest.raises(RunnerError, match="row 0 of the logits has NaN"):
        await driver.run([driver.sequence([5, 6, 7], 2)])
    await driver.close()


async def test_the_self_check_runs_the_kernels(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config=DEVICE)
    assert any(note.startswith("self-check: ") for note in driver.capacity.notes)
    await driver.close()


@pytest.mark.skipif(ON_GPU, reason="what is refused where there is no GPU")
async def test_kernels_on_a_cpu_need_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
        await Driver.open(tmp_path, config=DEVICE)


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 1), (1, 1, 2), (-1,), (1, 5)])
async def test_sizes_of_graphs_that_make_no_sense_are_refused(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(ConfigError, match="graph_sizes"):
        await Driver.open(tmp_path, config={"device": "cpu", "graph_sizes": sizes})


@pytest.mark.parametrize("error", [RuntimeError("no room"), torch.OutOfMemoryError("no room")])
async def test_what_fails_to_bind_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    """The port of the device path holds a timer; pages of the host tier are registered with the driver."""
    make_checkpoint(tmp_path, "qwen3_moe")
    closed = []
    honest = DeviceExecutor.aclose

    async def close(self: DeviceExecutor) -> None:
        await honest(self)
        closed.append(self)

    def refuses(*args: object) -> None:
        raise error

    monkeypatch.setattr(DeviceExecutor, "aclose", close)
    monkeypatch.setattr(DeviceExecutor, "warm", refuses)
    with pytest.raises(ConfigError if isinstance(error, torch.OutOfMemoryError) else RuntimeError, match="no room"):
        await Driver.open(tmp_path, config={"self_check": False, **DEVICE})
    assert len(closed) == 1
    assert closed[0]._services.port._stopped

    # and what fails before there is an executor closes the port all the same
    ports = []

    class Port(FakePort):
        async def aclose(self, deadline_s: float = 10.0) -> None:
            ports.append(self)
            await super().aclose(deadline_s)

    monkeypatch.setattr(gpu_services, "make_port", lambda *_: Port())
    monkeypatch.setattr(device_executor, "DeviceLanes", refuses)
    with pytest.raises(ConfigError if isinstance(error, torch.OutOfMemoryError) else RuntimeError, match="no room"):
        await Driver.open(tmp_path, config={"self_check": False, **DEVICE})
    assert len(ports) == 1


async def test_a_launch_that_fails_half_way_gives_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was queued before it runs on: buffers return with its end, not before, and not never."""
    make_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE}, pipeline_depth=2)
    executor: Any = driver.runner._executor
    # operation by operation
    executor.graphs, executor.mixed, executor.flat_tokens = None, None, 0

    def breaks(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("no room for this step")

    monkeypatch.setattr(executor.model, "forward", breaks)
    with pytest.raises(RunnerError, match="no room for this step"):
        await driver.run([driver.sequence([5, 6, 7], 2)])
    services = executor._services
    await driver.close()
    assert (services.events.outstanding, services.pinned.outstanding, services.port.lost) == ({}, {}, 0)


async def test_a_step_that_cannot_start_fails_behind_those_in_flight(tmp_path: Path) -> None:
    """Whether or not somebody still waits for them."""
    make_checkpoint(tmp_path, "qwen3_moe")
    for give_up in (False, True):
        driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE}, pipeline_depth=2)
        one = driver.sequence([5, 6, 7], 2)
        ended: list[str] = []
        flight = driver.launch(starts=[driver.start(one)], chunks=[Chunk(one.key, 3, True)])
        inner = driver.runner._executor._last
        inner.add_done_callback(lambda _, ended=ended: ended.append("the step"))
        wrong = driver.launch(leaves=(99,))
        wrong.add_done_callback(lambda _, ended=ended: ended.append("the wrong one"))
        if give_up:
            flight.cancel()
        with pytest.raises(RunnerError, match="99"):
            await wrong
        assert ended == ["the step", "the wrong one"]
        await driver.close()


async def test_a_closed_runner_holds_nothing_when_it_empties_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE})
    runner = driver.runner
    held = [weakref.ref(runner._executor._bound.pool), weakref.ref(runner._step_model.model)]
    seen: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.extend(ref() is not None for ref in held))
    if not ON_GPU:
        # a model on a GPU, for all that the close looks at
        runner._step_model = SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda", 0)))
    await driver.close()
    assert seen == [False, False]


async def test_after_a_device_error_steps_fail_and_the_close_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of a device that failed raises; a close makes none that it need not."""
    make_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE}, pipeline_depth=2)
    executor = driver.runner._executor

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    one = driver.sequence([5, 6, 7], 3)
    flight = driver.launch(starts=[driver.start(one)], chunks=[Chunk(one.key, 3, True)])
    executor._services.port._fail("an illegal memory access was encountered")
    with pytest.raises(RunnerError, match="illegal memory access"):
        await flight
    with pytest.raises(RunnerError, match="nothing more after a failure"):
        await driver.step()
    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    driver.runner._step_model = SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda", 0)))
    await driver.close()


async def test_the_self_check_would_find_a_decode_kernel_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")

    def zeros(*args: object, out: torch.Tensor, **kwargs: object) -> None:
        out.zero_()

    monkeypatch.setattr(triton_paging, "attend_decode", zeros)
    with pytest.raises(UnsupportedModel, match="differs from separate sequences"):
        await Driver.open(tmp_path, config=DEVICE)


@pytest.mark.parametrize(
    "test",
    [
        "test_steps_overlap_and_complete_in_order",
        "test_a_step_fails_after_those_before_it",
        "test_swapped_out_and_in_elsewhere_blocks_answer_as_before",
    ],
)
def test_the_contract(tmp_path: Path, test: str) -> None:
    """Of the conformance suite what tells the two paths apart; all of it runs on a GPU (`test_contract.py`)."""
    make_checkpoint(tmp_path, "qwen3_moe")

    class OnTheDevicePath(RunnerTests):
        __test__ = False

        def new_loop(self) -> asyncio.AbstractEventLoop:
            return asyncio.SelectorEventLoop()

        def make(self, limits: RunnerLimits) -> Runner:
            own = {"dtype": "float32", "self_check": False, **DEVICE}
            return TransformersRunner(TransformersConfig(**own), replace(limits, model=str(tmp_path)))

    getattr(OnTheDevicePath(), test)()


@pytest.mark.gpu
async def test_torch_attention_is_refused_on_a_gpu(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(ConfigError, match="is for CPUs"):
        await Driver.open(tmp_path, config={"kernels": "torch", "device": "cuda"})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_no_step_waits_for_the_device(tmp_path: Path, dtype: str) -> None:
    """torch raises where anything would: prefill, mixed steps, graphs, every kind of sampling."""
    make_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE, "dtype": dtype}, pipeline_depth=2)
    honest = driver.runner.launch

    def strictly(step: Any) -> Any:
        with waits_raise():
            return honest(step)

    driver.runner.launch = strictly  # type: ignore[method-assign]
    asked = [
        driver.sequence([1, 2, 3, 4, 5], 6),
        driver.sequence([3, 5, 9], 6, 1, temperature=1.0, seed=4, raw=True, processed=True, top=3),
        driver.sequence([3] * 9, 6, 2, temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.3),
        driver.sequence([6] * 9, 6, 3, frequency_penalty=0.2, min_tokens=2, stop_ids=(4, 5)),
    ]
    await driver.run(asked, chunks=2)
    assert all(len(one.tokens) == 6 for one in asked)
    await driver.close()


@pytest.mark.gpu
async def test_steps_without_graphs_are_the_same(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    assert_same(await answers(tmp_path, {**DEVICE, "cuda_graphs": False}), await answers(tmp_path, DEVICE))


@pytest.mark.gpu
async def test_unfused_routers_are_the_same(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    assert_same(await answers(tmp_path, {**DEVICE, "fused_router": False}), await answers(tmp_path, DEVICE))
