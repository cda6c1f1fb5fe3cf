"""The chaos harness's judgement of answers whose weights changed under them: real answers are right, others are not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from fdasync import Engine, SamplingParams
from fdasync.testing import oracle_of, run_sim, synthetic_config
from tests.engine.updates import weights
from tests.nightly.chaos.versions import Versions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fdasync.result import Sample

pytestmark = pytest.mark.ci

PROMPT = list(range(20, 61))
PARAMS = SamplingParams(max_tokens=30, temperature=1.0, seed=7, logprobs="both")
CONFIG = synthetic_config({"step_s": 0.01}, max_step_tokens=16)

# when a request has run for so long, in steps of 0.01 s: in mid-prompt, with tokens
MID_PROMPT_S, LATER_S = 0.015, 0.105


async def play(change: Callable[[Engine, Versions], Awaitable[None]]) -> tuple[Sample, Versions]:
    """A request, and what changes while it runs."""
    versions = Versions(oracle_of(CONFIG).config)
    async with Engine(CONFIG) as engine:
        asked = asyncio.ensure_future(engine.complete(PROMPT, PARAMS))
        await change(engine, versions)
        return (await asked).samples[0], versions


async def update(engine: Engine, versions: Versions, label: str, number: int, *, told: int = 0) -> None:
    """`told`: the number that the judge is told."""
    versions.begins(label, told or number)
    await engine.update_weights(label, weights(number), "keep")
    versions.agreed(label)


def check(sample: Sample, versions: Versions, began: float = 0.0, start: int = 0) -> None:
    versions.check(sample, PROMPT, PARAMS, began, start, None)


async def keeps_its_blocks(engine: Engine, versions: Versions) -> None:
    await asyncio.sleep(MID_PROMPT_S)
    await update(engine, versions, "1", 5)
    await asyncio.sleep(LATER_S)
    await update(engine, versions, "2", 6)


async def is_computed_again(engine: Engine, versions: Versions) -> None:
    await asyncio.sleep(LATER_S)
    await engine.pause("retract")
    await update(engine, versions, "1", 5)
    await engine.resume()
    # in mid-prompt of what is computed again
    await asyncio.sleep(MID_PROMPT_S)
    await update(engine, versions, "2", 6)


async def sleeps(engine: Engine, versions: Versions) -> None:
    await asyncio.sleep(LATER_S)
    await engine.sleep(1)
    await engine.wake()
    await update(engine, versions, "1", 5)


@pytest.mark.parametrize("change", [keeps_its_blocks, is_computed_again, sleeps])
def test_weights_may_change_under_an_answer_and_nothing_else_in_it(change):
    async def work():
        sample, versions = await play(change)
        assert len(sample.weight_version) > 1
        check(sample, versions)
        assert versions.mixed == 1
        for at in (0, len(sample.token_ids) - 1):
            tokens = list(sample.token_ids)
            tokens[at] = (tokens[at] + 1) % 100
            with pytest.raises(AssertionError, match="no history"):
                check(msgspec.structs.replace(sample, token_ids=tuple(tokens)), versions)
        for row in (0, 15, len(PROMPT) - 1, len(PROMPT) + 20):
            values = sample.aux["values"].copy()
            values[row] += 1
            with pytest.raises(AssertionError, match="no history"):
                check(msgspec.structs.replace(sample, aux={**sample.aux, "values": values}), versions)
        short = msgspec.structs.replace(sample.routing, array=sample.routing.array[:-1])
        with pytest.raises(AssertionError, match="rows"):
            check(msgspec.structs.replace(sample, routing=short), versions)

    run_sim(work())


def test_weights_that_nobody_gave_are_seen():
    async def torn(engine, versions):
        await asyncio.sleep(LATER_S)
        await update(engine, versions, "1", 0xDEAD, told=5)

    async def unknown(engine, versions):
        await asyncio.sleep(LATER_S)
        await engine.update_weights("x", weights(5), "keep")

    async def work():
        with pytest.raises(AssertionError, match="no history"):
            check(*await play(torn))
        with pytest.raises(AssertionError, match="which nobody gave"):
            check(*await play(unknown))

    run_sim(work())


def test_no_request_may_have_weights_that_were_replaced_before_it_came():
    async def early(engine, versions):
        """What the judge is told is over before the request comes, and the engine changes later."""
        versions.begins("1", 5)
        versions.agreed("1")
        await asyncio.sleep(LATER_S)
        await engine.update_weights("1", weights(5), "keep")

    async def work():
        sample, versions = await play(early)
        # it was under way
        check(sample, versions, began=-1.0)
        with pytest.raises(AssertionError, match="was replaced"):
            check(sample, versions, began=asyncio.get_running_loop().time())

    run_sim(work())


def test_a_beginning_is_of_weights_that_it_may_have_met():
    async def work():
        versions = Versions(oracle_of(CONFIG).config)
        old, new = (versions.oracle(n).generate(PROMPT, 30, temperature=1.0, seed=7) for n in (1, 5))
        versions.check_beginning(old[:9], PROMPT, PARAMS, 0, 0.0)
        with pytest.raises(AssertionError, match="the oracle says"):
            versions.check_beginning(new[:9], PROMPT, PARAMS, 0, 0.0)
        versions.begins("1", 5)
        versions.check_beginning(new[:9], PROMPT, PARAMS, 0, 0.0)
        versions.check_beginning([*old[:4], 3], PROMPT, PARAMS, 0, 0.0)
        with pytest.raises(AssertionError, match="the oracles of"):
            versions.check_beginning([(old[0] + 1) % 100], PROMPT, PARAMS, 0, 0.0)

    run_sim(work())
