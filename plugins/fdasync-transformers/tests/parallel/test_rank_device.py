"""Ranks on the path of GPUs, in Triton's interpreter: what one process computes by the same kernels."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from device_path import make_small_checkpoint
from fdasync_kernels.digest import PARTS
from fdasync_kernels.step_kernels import HostKernels, StepKernels
from fdasync_transformers import make_random_checkpoint
from fdasync_transformers.fused.recurrent import flat
from fdasync_transformers.fused.replacement import Differs
from fdasync_transformers.parallel.collectives import HostCollectives
from fdasync_transformers.parallel.on_device import StepEnds
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from ranks import as_ranks, returned
from step_driver import Driver

from fdasync.cache.host_arena import HostArena
from fdasync.errors import RunnerError
from fdasync.events.actions import Chunk, SwapIn, SwapOut
from fdasync.request import Grammar

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync.ipc.exchange import Exchange

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks as forks: a GPU takes none")

GRAMMAR = Grammar("regex", "[a-f]{2}[0-9]{4}x*").packed()
DEVICE = {"kernels": "triton", "device": "cpu", "num_threads": 1, "self_check": False}


async def plays(folder: Path, exchange: Exchange | None, arena: HostArena, **config: Any) -> Any:
    """Two sequences, one of them in chunks; two steps in flight; blocks go to the host and come back."""
    driver = await Driver.open(
        folder, config={**DEVICE, **config}, exchange=exchange, host=arena, pipeline_depth=2, max_running=2
    )
    try:
        one = driver.sequence([5, 9, 200, 31, 7, 3, 2, 1, 99], 6)
        two = driver.sequence([7, 8, 9, 4, 4], 2)
        first = driver.launch(starts=[driver.start(one)], chunks=[Chunk(one.key, 4, False)])
        second = driver.launch(starts=[driver.start(two)], chunks=[Chunk(two.key, 5, True), Chunk(one.key, 5, True)])
        assert not (await first).tokens
        for sequence, token in zip((two, one), (await second).tokens, strict=True):
            sequence.tokens.append(token)
        # a step is launched before the one before it has ended: tokens stay on the device
        flights = []
        for _ in range(2):
            appends = [append for sequence in (two, one) for append in driver.append(sequence)]
            flights.append(driver.launch(appends=appends))
            for sequence in (two, one):
                sequence.tokens.append(0)
        for at, flight in enumerate(flights):
            for sequence, token in zip((two, one), (await flight).tokens, strict=True):
                sequence.tokens[1 + at] = token
        rows = [driver.rows(sequence) for sequence in (one, two)] if driver.arena is not None else []
        # two full blocks leave, and a new sequence begins on them
        await driver.runner.copy(SwapOut(0, tuple(one.blocks[:2]), (2, 0)))
        again = driver.sequence(one.prompt, 1)
        blocks = [driver.free_blocks.pop() for _ in range(2)]
        await driver.runner.copy(SwapIn(1, (2, 0), tuple(blocks)))
        start = driver.start(again, blocks)
        output = await driver.step(leaves=(one.key, two.key), starts=[start], chunks=[Chunk(again.key, 1, True)])
        return [one.tokens, two.tokens, list(output.tokens)], rows, driver.capacity
    finally:
        await driver.close()


# fused parts are proven for half a minute in the interpreter; shared experts, and such with a gate
@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "fused"),
    [
        ("qwen3_moe", False),
        *[pytest.param(one, True, marks=pytest.mark.nightly) for one in ("qwen3_moe", "glm4_moe", "qwen2_moe")],
    ],
)
def test_two_ranks_answer_as_one_process(tmp_path: Path, family: str, fused: bool) -> None:
    make_small_checkpoint(tmp_path, family)
    config: dict[str, Any] = {"experts": "fused", "fused_layers": True} if fused else {"fused_router": False}
    arena = HostArena.create(4, 1024 if family == "qwen2_moe" else 2048)

    def on(exchange: Exchange | None) -> Any:
        return asyncio.run(plays(tmp_path, exchange, arena, **config))

    try:
        tokens, rows, capacity = on(None)
        many = returned(as_ranks(2, on))
    finally:
        arena.close()
    assert [played[0] for played in many] == [tokens] * 2
    assert tokens[2] == tokens[0][:1]
    for mine, other in zip(rows, many[0][1], strict=True):
        assert np.array_equal(np.sort(mine, -1), np.sort(other, -1))
    if fused:
        said = [next(note for note in each.notes if note.startswith("fused:")) for each in (capacity, many[1][2])]
        assert said[0] == said[1]
        assert "2 of 2 decoder layers" in said[0]


@pytest.mark.ci
def test_ranks_keep_the_library_s_recurrent_layers_where_one_of_them_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_checkpoint(
        tmp_path, "qwen3_next", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )

    def other_units(*_: Any) -> None:
        raise Differs("it has other units")

    async def opened(exchange: Exchange) -> tuple[set[str], list[str]]:
        if exchange.rank:
            monkeypatch.setattr(flat, "check_net", other_units)
        driver = await Driver.open(
            tmp_path, config={**DEVICE, "fused_router": False, "cuda_graphs": False}, exchange=exchange
        )
        made = {type(one).__name__ for one in driver.runner.opened.model.step_model._flat._flat}
        notes = [note for note in driver.capacity.notes if "GatedDelta" in note]
        await driver.close()
        return made, notes

    for made, notes in returned(as_ranks(2, lambda exchange: asyncio.run(opened(exchange)))):
        assert made == {"_FlatForward"}
        assert notes == [
            "recurrent layers Qwen3NextGatedDeltaNet are the library's own: rank 1 of 2: it has other units"
        ]


@pytest.mark.ci
def test_a_rank_that_chose_other_experts_fails_the_step_by_name(tmp_path: Path) -> None:
    make_small_checkpoint(tmp_path, "qwen3_moe")

    async def work(exchange: Exchange) -> str:
        driver = await Driver.open(tmp_path, config={**DEVICE, "fused_router": False}, exchange=exchange)
        stage = driver.runner.opened.model.step_model.aux.stage
        wrong = exchange.rank == 1
        # the first step of two is right
        driver.runner.opened.model.step_model.aux.stage = lambda count: {
            name: rows + 1 if wrong and count == 1 else rows for name, rows in stage(count).items()
        }
        try:
            await driver.run([driver.sequence([1, 2, 3], 2)])
        except RunnerError as error:
            return str(error)
        finally:
            await driver.close()
        return "no error"

    said = returned(as_ranks(2, lambda exchange: asyncio.run(work(exchange))))
    assert said[0] == said[1]
    assert "step 2" in said[0]
    assert "rank 1 of 2 chose other experts than rank 0: their rows differ" in said[0]


both_kernels = pytest.mark.parametrize("kernels", [StepKernels(), HostKernels()], ids=lambda one: type(one).__name__)


@both_kernels
def test_a_step_of_several_kinds_of_rows_is_read_back_as_it_was_told(kernels: StepKernels) -> None:
    class Alone(HostCollectives):
        def __init__(self) -> None:
            self.rank, self.ranks = 0, 1

        def share(self, message: torch.Tensor, label: str) -> torch.Tensor:
            return message[None]

    rows = {str(number): torch.zeros(5, 2, dtype=torch.uint8) for number in range(4)}
    tokens = torch.arange(7)
    told = StepEnds(Alone(), torch.device("cpu"), kernels).queue(3, rows, torch.zeros(7, 2000), tokens, 7)
    assert StepEnds.read(told.numpy(), 3, 7).tolist() == [*range(7)]
    # of four ranks, two of the others differ in their rows, or one in its logits
    four = told.repeat(4, 1)
    four[2, 1] += 1
    four[3, PARTS + 1] += 1
    with pytest.raises(RunnerError, match="rank 2, 3 of 4 chose other experts than rank 0"):
        StepEnds.read(four.numpy(), 3, 7)
    four = told.repeat(4, 1)
    four[3, -8] += 1
    with pytest.raises(RunnerError, match="rank 3 of 4 computed other logits than rank 0"):
        StepEnds.read(four.numpy(), 3, 7)
    # of another step: whatever rows it has
    later = StepEnds(Alone(), torch.device("cpu"), kernels).queue(5, rows, torch.ones(7, 2000), tokens, 7)
    for other in (
        later,
        StepEnds(Alone(), torch.device("cpu"), kernels).queue(5, rows, torch.zeros(7, 2000), tokens, 7),
    ):
        with pytest.raises(RunnerError, match="rank 1 was at step 5 of 2 ranks, and rank 0 at step 3"):
            StepEnds.read(torch.cat([told, other]).numpy(), 3, 7)


@both_kernels
def test_padding_may_hold_what_it_likes(kernels: StepKernels) -> None:
    class Alone(HostCollectives):
        def __init__(self) -> None:
            self.rank, self.ranks = 0, 1

        def share(self, message: torch.Tensor, label: str) -> torch.Tensor:
            return message[None]

    def told(at: int, padding: torch.Tensor | None) -> list[int]:
        """Row and logits of this place hold something else."""
        rows, logits = torch.zeros(6, 2, 3, dtype=torch.uint8), torch.zeros(5, 2000)
        rows[at], logits[at] = 9, float("nan")
        before = rows.clone()
        found = StepEnds(Alone(), torch.device("cpu"), kernels).queue(3, {"routing": rows}, logits, None, 0, padding)
        assert torch.equal(rows, before), "the rows of the step were changed"
        return found.flatten().tolist()

    padding = torch.tensor([False, True, False, True])
    assert told(1, padding) == told(3, padding)
    assert told(0, padding) != told(3, padding)
    # behind the rows that may be padding
    assert told(4, padding) != told(3, padding)
    assert told(1, None) != told(3, None)


@pytest.mark.ci
def test_a_rank_of_a_dense_model_whose_sums_differ_fails_the_step_by_name(tmp_path: Path) -> None:
    make_small_checkpoint(tmp_path, "qwen3_dense")

    async def work(exchange: Exchange) -> str:
        driver = await Driver.open(tmp_path, config={**DEVICE, "fused_router": False}, exchange=exchange)
        collectives = driver.runner.opened.collectives
        own = collectives._sum
        try:
            sequence = driver.sequence([1, 2, 3], 3)
            output = await driver.step(starts=[driver.start(sequence)], chunks=[Chunk(sequence.key, 3, True)])
            sequence.tokens.append(output.tokens[0])
            if exchange.rank == 1:
                collectives._sum = lambda tensor, label: own(tensor, label) * (1 + 1e-6)
            await driver.step(appends=driver.append(sequence))
        except RunnerError as error:
            return str(error)
        finally:
            await driver.close()
        return "no error"

    said = returned(as_ranks(2, lambda exchange: asyncio.run(work(exchange))))
    assert said[0] == said[1]
    assert "rank 1 of 2 computed other logits than rank 0" in said[0]


@pytest.mark.ci
def test_steps_that_wait_for_a_grammar_or_score_prompts_keep_the_order_of_sums(tmp_path: Path) -> None:
    """Rank 0 queues such steps in two parts, or scores; the other ranks do neither, and wait for nothing."""
    make_random_checkpoint(tmp_path, size="tiny")

    async def work(exchange: Exchange | None) -> Any:
        driver = await Driver.open(tmp_path, config={**DEVICE, "fused_router": False}, exchange=exchange, max_running=2)
        try:
            bound = driver.sequence([5, 9, 12], 3, grammar=GRAMMAR)
            scored = driver.sequence([7, 8, 9, 4, 4], 2, score_from=1)
            first = driver.launch(starts=[driver.start(bound)], chunks=[Chunk(bound.key, 3, True)])
            # its sampling waits for the first one's token
            bound.tokens.append(0)
            flights = [first, driver.launch(appends=driver.append(bound))]
            bound.tokens.append(0)
            chunks = [Chunk(scored.key, 5, True)]
            flights.append(driver.launch(appends=driver.append(bound), starts=[driver.start(scored)], chunks=chunks))
            outputs = [await flight for flight in flights]
            return [output.tokens for output in outputs], outputs[-1].scores
        finally:
            await driver.close()

    tokens, scores = asyncio.run(work(None))
    many = returned(as_ranks(2, lambda exchange: asyncio.run(work(exchange))))
    assert [played[0] for played in many] == [tokens] * 2
    assert len(tokens[2]) == 2
    assert not many[1][1]
    (mine,), (other,) = scores, many[0][1]
    assert len(np.frombuffer(mine.logprobs, "<f4")) == 4
    assert np.allclose(np.frombuffer(mine.logprobs, "<f4"), np.frombuffer(other.logprobs, "<f4"), atol=1e-4)
