"""Multi-token prediction layers that draft on a device: on a GPU where there is one, else in Triton's interpreter.

Held against the same steps in torch, whose drafts are held against the library's (`test_drafts.py`), and against the
conformance suite of runs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from agreeing import make_agreeing_checkpoint
from device_path import DEVICE, ON_GPU
from draft_results import assert_same
from fdasync_fleet.testing.patience import LEASES, LINKS
from fdasync_transformers import TransformersConfig, TransformersRunner
from fdasync_transformers.mtp.specs import LAYERS

from fdasync import Engine, EngineConfig, Instance, SamplingParams, connect
from fdasync.drafting import Speculation
from fdasync.testing import RunTests
from fdasync.testing.runners.bench import GREEDY, noisy, on_bench

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync import Result
    from fdasync.runner.base import Runner, RunnerLimits, StepOutput
    from fdasync.testing.runners.bench import Bench

MOST = 3
LIMITS = msgspec.structs.replace(RunTests.limits, speculation=MOST)
# the interpreter takes a step of one layer a second; the last one must draft, since what an earlier one drafted stays
# in the tables of a device
STEPS = 13 if ON_GPU else 3
# how many tokens steps are told to draft; the last one of a play some
TOLD = (None, 0, None, 1, 2)
# of the hidden states, enough that drafts of wrong ones are others
TAKES = 0.6


def runner(folder: Path, limits: RunnerLimits, **own: Any) -> Runner:
    config = {"dtype": "float32", "num_threads": 1, "self_check": False, "mtp": True, **own}
    return TransformersRunner(TransformersConfig(**config), msgspec.structs.replace(limits, model=str(folder)))


Told = tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]


def told(output: StepOutput) -> Told:
    return output.tokens, output.counts, output.own_drafts


async def decode(on: Bench, keys: tuple[int, ...], steps: int, *, flying: int) -> list[Told]:
    """Steps of sequences whose blocks are `key` and 4 further ones, so many in flight."""
    appends = [on.append(key, 4 + 4 * part + key) for key in keys for part in range(2)]
    flights: list[asyncio.Future[StepOutput]] = []
    outputs = []
    for step in range(steps):
        flights.append(on.launch(appends=[] if step else appends, own_drafts=TOLD[step % len(TOLD)]))
        if len(flights) == flying:
            outputs.append(told(await flights.pop(0)))
    return outputs + [told(await flight) for flight in flights]


def waiting_drafts(on: Bench, *keys: int) -> list[list[int]]:
    """What the layers have drafted behind sequences, for their next step."""
    executor: Any = on.runner.bound.executor  # type: ignore[attr-defined]
    found = []
    for key in keys:
        tables, lane = executor.passes._lanes, executor._bound.table.lane_of(key)
        first = int(tables.lengths[lane]) + 1
        # blocking: a test, and no step is in flight
        found.append(tables.tokens[lane, first : first + int(tables.drafted[lane])].tolist())
    return found


def entered_keys(on: Bench, block: int) -> Any:
    """The first prediction layer's key of the first token in a block."""
    runner: Any = on.runner
    layer = next(layer for layer in runner.opened.model.step_model.layout.layers if layer.group == LAYERS)
    return runner.bound.executor._bound.pool.keys[layer.index][block, 0].float().cpu().numpy().copy()


async def plays(folder: Path, steps: int, *, flying: int = 2, **own: Any) -> tuple[list[Told], list[Any], Any, Any]:
    """Two sequences, one of them with noise; then a third that begins on the first one's block, behind which it goes on
    from what the block carries. What each step tells, what waits to be verified now and then, the first layer's key
    that was made of what the block carries, and all rows."""
    limits = msgspec.structs.replace(LIMITS, pipeline_depth=2)
    async with on_bench(runner(folder, limits, **own)) as on:
        size = on.size
        prompts = [on.prompt(size + 1), on.prompt(5, salt=1)]
        starts = [
            on.start(key, prompt, [key, 3 - key] if key == 0 else [key], sampler=sampler)
            for key, (prompt, sampler) in enumerate(zip(prompts, (GREEDY, noisy(3)), strict=True))
        ]
        outputs = [told(await on.launch_prefill(*starts))]
        drafts = [waiting_drafts(on, 0, 1)]
        outputs += await decode(on, (0, 1), steps, flying=flying)
        drafts.append(waiting_drafts(on, 0, 1))
        again = on.start(2, [*prompts[0], 7], [0, 2], cached=size, sampler=noisy(5))
        outputs.append(told(await on.launch_prefill(again)))
        drafts.append(waiting_drafts(on, 2))
        entered = entered_keys(on, 2)
        await on.leave(0, 1)
        outputs += await decode(on, (2,), steps, flying=flying)
        drafts.append(waiting_drafts(on, 2))
        return outputs, drafts, entered, on.rows([0, 2], 0, size + 2)


def counts_of(outputs: list[Told]) -> tuple[int, int]:
    """Drafts that were forwarded, and accepted."""
    drafted = sum(sum(own) for _, _, own in outputs if own is not None)
    return drafted, sum(len(tokens) - len(counts) for tokens, counts, _ in outputs if counts is not None)


async def compare(folder: Path, steps: int, **own: Any) -> None:
    wanted, waiting, entered, rows = await plays(folder, steps, device="cpu", kernels="torch")
    found, drafts, key, same = await plays(folder, steps, **{**DEVICE, **own})
    assert found == wanted
    assert drafts == waiting
    np.testing.assert_allclose(key, entered, rtol=0, atol=2e-3)
    assert any(len(each) > 1 for part in drafts for each in part)
    drafted, accepted = counts_of(found)
    assert 0 < accepted < drafted
    for name, values in rows.items():
        assert np.array_equal(np.sort(values, -1), np.sort(same[name], -1))


@pytest.mark.ci
async def test_what_they_draft_is_what_they_draft_on_a_cpu(tmp_path: Path) -> None:
    """With the noise of its positions, behind prompts and behind a block of another sequence, two steps in flight."""
    make_agreeing_checkpoint(tmp_path, num_hidden_layers=1, takes=TAKES)
    await compare(tmp_path, STEPS, fused_router=False)


# layers of several depths, latents, and deeper drafts than layers
@pytest.mark.nightly
@pytest.mark.parametrize(("family", "layers"), [("glm4_moe", 1), ("deepseek_v3", 2), ("glm4_moe", 3)])
async def test_layers_of_several_depths(tmp_path: Path, family: str, layers: int) -> None:
    make_agreeing_checkpoint(tmp_path, family, layers=layers, num_hidden_layers=2, takes=TAKES)
    await compare(tmp_path, STEPS)


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "layers"), [("qwen3_moe", 1), ("glm4_moe", 1), ("deepseek_v3", 2), ("glm4_moe", 3)])
async def test_on_a_gpu_too(tmp_path: Path, family: str, layers: int) -> None:
    """By graphs, in float32: the drafts of a CPU."""
    make_agreeing_checkpoint(tmp_path, family, layers=layers, takes=TAKES)
    await compare(tmp_path, STEPS, graph_sizes=(1, 4, 16), fused_layers=True)


@pytest.mark.gpu
class TestMtpRunsOnAGpu(RunTests):
    """The suite of runs, with graphs of a few numbers of rows."""

    limits = LIMITS
    logprob_error = 1e-4

    @pytest.fixture(
        autouse=True, params=[("qwen3_moe", 1), ("deepseek_v3", 2), ("glm4_moe", 1), ("qwen3_next", 1)], ids=str
    )
    def checkpoint(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
        family, layers = request.param
        self.folder = tmp_path_factory.getbasetemp() / f"device-mtp-{family}"
        if not self.folder.exists():
            make_agreeing_checkpoint(self.folder, family, layers=layers)

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop()

    def make(self, limits: RunnerLimits) -> Runner:
        return runner(self.folder, limits, device="cuda", graph_sizes=(1, 4, 16))

    def make_plain(self, limits: RunnerLimits) -> Runner:
        return runner(self.folder, msgspec.structs.replace(limits, speculation=0), device="cuda", mtp=False)


PROMPTS = [[number + 3, *[(number * 31 + at * 7) % 100 + 3 for at in range(1, 40)]] for number in range(3)]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0.0, logprobs="raw"),
    SamplingParams(max_tokens=32, temperature=1.0, seed=3, n=2, logprobs="both"),
    SamplingParams(max_tokens=30, temperature=0.8, seed=4, repetition_penalty=1.2, logprobs="raw"),
    SamplingParams(max_tokens=50, temperature=1.0, seed=5, stop_token_ids=tuple(range(0, 256, 5)), logprobs="raw"),
]


def config(folder: Path, *, mtp: bool, **changed: Any) -> EngineConfig:
    own = {"dtype": "bfloat16", "device": "cuda", "mtp": mtp, "graph_sizes": (1, 6, 24) if mtp else (1, 6)}
    # too few blocks for all: some are preempted
    sizes = {"block_tokens": 16, "num_blocks": 20, "max_context_tokens": 128, "max_running": 6, "max_step_tokens": 64}
    return EngineConfig(
        model=str(folder),
        tokenizer="none",
        speculation=Speculation(drafter="none", max_tokens=MOST, budget=False) if mtp else None,
        **{"runner_config": own, "process": "inline", "numerics": "fixed", "pipeline_depth": 2, **sizes, **changed},
    )


async def play(engine: Any) -> list[Result]:
    return list(await asyncio.gather(*[engine.complete(prompt, one) for prompt in PROMPTS for one in PARAMS]))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
async def test_results_with_fixed_numerics_are_those_without_drafts(tmp_path: Path, family: str) -> None:
    """In bfloat16, to the bit, where blocks are few; and the layers are right now and then."""
    make_agreeing_checkpoint(tmp_path, family)
    async with Engine(config(tmp_path, mtp=False)) as engine:
        wanted = await play(engine)
    async with Engine(config(tmp_path, mtp=True)) as engine:
        results = await play(engine)
        stats = engine.stats().scheduler
        engine.check()
    assert_same(results, wanted)
    for result, want in zip(results, wanted, strict=True):
        for sample, other in zip(result.samples, want.samples, strict=True):
            assert np.array_equal(sample.raw_logprobs, other.raw_logprobs)
    assert stats.evictions
    assert 40 < stats.own_accepted_tokens < stats.own_drafted_tokens


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
async def test_they_are_fused_as_the_model_s_own_layers_are(tmp_path: Path, family: str) -> None:
    make_agreeing_checkpoint(tmp_path, family)
    async with on_bench(runner(tmp_path, LIMITS, device="cuda", dtype="bfloat16", self_check=True)) as on:
        (line,) = [note for note in on.capacity.notes if note.startswith("fused:")]
        fused, _, layers = line.split()[1:4]
        assert fused == layers == str(on.capacity.num_hidden_layers + 1)


@pytest.mark.gpu
async def test_instances_on_a_gpu_draft_behind_a_hand_over(tmp_path: Path) -> None:
    make_agreeing_checkpoint(tmp_path, "glm4_moe")
    async with Engine(config(tmp_path, mtp=False)) as engine:
        wanted = await play(engine)
    sides = [
        Instance(
            config(tmp_path, mtp=True, role=role, host_blocks=32, num_blocks=64, leases=LEASES),
            listen=f"ipc://{tmp_path}/{role}",
            transport="shm",
            transfer_process=False,
            links=LINKS,
        )
        for role in ("prefill", "decode")
    ]
    async with sides[0], sides[1], connect([side.address for side in sides], links=LINKS) as router:
        results = await play(router)
        decoder = sides[1].engine.stats().scheduler
        assert decoder.received_blocks > 10
        assert 40 < decoder.own_accepted_tokens < decoder.own_drafted_tokens
        for side in sides:
            side.engine.check()
    assert_same(results, wanted)
