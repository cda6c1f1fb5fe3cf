"""Grammars, through an engine's public face: every token is allowed, whatever interrupts a request."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from fdasync import Engine, Grammar, SamplingParams
from fdasync.errors import BadInput, DeadlineExceeded, GrammarFailed
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.testing import check_idle, check_sample, oracle_of, synthetic_config, synthetic_engine, until

PROMPT = [token % 90 for token in range(30)]


def under(text: str, **fields) -> SamplingParams:
    values = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "grammar": Grammar("regex", text), **fields}
    return SamplingParams(**values)


async def ask(engine: Engine, params: SamplingParams, prompt=PROMPT):
    """Complete, and hold the samples against the oracle."""
    result = await engine.complete(prompt, params)
    for sample in result.samples:
        check_sample(sample, prompt, params, oracle_of(engine.config))
    return result


async def read(stream, seen: list[int]) -> None:
    async with stream as deltas:
        async for delta in deltas:
            seen += delta.token_ids


@pytest.mark.parametrize("runner", [{}, {"max_run_tokens": 4}])
async def test_tokens_are_those_that_the_grammar_allows(runner):
    depth = 1 if runner else 2
    async with synthetic_engine(synthetic_config(pipeline_depth=depth, runner=runner)) as engine:
        tokens = (await ask(engine, under("%7"))).samples[0].token_ids
        assert len(tokens) == 12
        assert all(token % 7 == 0 for token in tokens)
        free = (await ask(engine, SamplingParams(max_tokens=12, temperature=1.0, seed=5))).samples[0].token_ids
        assert any(token % 7 for token in free)
        check_idle(engine)


async def test_it_ends_with_eos_where_its_text_must_end():
    async with synthetic_engine(synthetic_config(runner={"eos_id": 3})) as engine:
        result = await ask(engine, under("%5{4}", n=3))
        for sample in result.samples:
            assert sample.finish_reason == "stop"
            assert len(sample.token_ids) == 5
            assert sample.token_ids[-1] == sample.stop_token_id == 3
            assert all(token % 5 == 0 for token in sample.token_ids[:-1])


async def test_matchers_are_built_again_after_preemption():
    config = synthetic_config(runner={"num_blocks": 24, "max_context_tokens": 96}, max_step_tokens=20)
    async with synthetic_engine(config) as engine:
        asked = [([number, *PROMPT[: 12 + number]], under(f"%{number % 5 + 2}", max_tokens=40)) for number in range(12)]
        await asyncio.gather(*[ask(engine, params, prompt) for prompt, params in asked])
        assert engine.stats().scheduler.preemptions > 0
        check_idle(engine)


async def test_a_grammar_that_cannot_be_kept_ends_its_request_alone():
    async with synthetic_engine() as engine:
        others = asyncio.create_task(ask(engine, under("%3", n=2, max_tokens=30)))
        with pytest.raises(GrammarFailed, match="told to break") as caught:
            await engine.complete(PROMPT, under("%2!4", max_tokens=30))
        partial = caught.value.partial.samples[0]
        assert len(partial.token_ids) == 4
        assert all(token % 2 == 0 for token in partial.token_ids)
        stream = engine.generate(PROMPT, under("%2!4", max_tokens=30))
        seen = []
        with pytest.raises(GrammarFailed):
            await read(stream, seen)
        # the failure may overtake the last delta
        assert tuple(seen) == partial.token_ids[: len(seen)]
        await others
        check_idle(engine)


@pytest.mark.parametrize(
    ("params", "field", "words"),
    [
        (under("nonsense"), "grammar", "none of the synthetic model"),
        (under("%999"), "grammar", "modulus"),
        (under(""), "grammar", "1 to 65536"),
        (under("%2" * 40_000), "grammar", "1 to 65536"),
        (under("%2", ignore_eos=True), "grammar", "ignore_eos"),
        (under("%2", min_tokens=2), "grammar", "min_tokens"),
        (under("%2", grammar=Grammar("lark", "%2")), "grammar", "none of the synthetic model"),
        (under("%2", grammar="%2"), "grammar", "object"),
        (under("%2", grammar=Grammar("prose", "%2")), "grammar", "prose"),
    ],
)
async def test_a_bad_grammar_is_refused_before_anything_starts(params, field, words):
    async with synthetic_engine() as engine:
        with pytest.raises(BadInput) as caught:
            await engine.complete(PROMPT, params)
        assert caught.value.field == field
        assert words in str(caught.value)
        assert engine.stats().scheduler.steps == 0


async def test_each_grammar_is_checked_once(monkeypatch):
    checked = []
    check = SyntheticRunner.check_grammar

    async def counted(self, grammar):
        checked.append(grammar.text)
        await check(self, grammar)

    monkeypatch.setattr(SyntheticRunner, "check_grammar", counted)
    async with synthetic_engine() as engine:
        for text in ("%2", "%3", "%2", "%3"):
            await ask(engine, under(text))
    assert checked == ["%2", "%3"]


async def test_requests_of_one_new_grammar_share_its_check(monkeypatch):
    checked, gate = [], asyncio.Event()
    check = SyntheticRunner.check_grammar

    async def counted(self, grammar):
        checked.append(grammar.text)
        await gate.wait()
        await check(self, grammar)

    monkeypatch.setattr(SyntheticRunner, "check_grammar", counted)
    async with synthetic_engine() as engine:
        asked = [asyncio.create_task(ask(engine, under("%2"))) for _ in range(5)]
        wrong = [asyncio.create_task(ask(engine, under("%999"))) for _ in range(3)]
        await until(lambda: len(checked) == 2)
        # the first, whose check the others wait for, is left
        asked[0].cancel()
        wrong[0].cancel()
        await until(lambda: len(checked) == 4)
        gate.set()
        await asyncio.gather(*asked[1:])
        refusals = await asyncio.gather(*wrong[1:], return_exceptions=True)
        assert [type(one) for one in refusals] == [BadInput] * 2
        assert all("modulus" in str(one) and one.limit for one in refusals)
        assert refusals[0] is not refusals[1]
        assert sorted(checked) == ["%2", "%2", "%999", "%999"]
        check_idle(engine)


async def test_a_check_has_a_deadline(monkeypatch):
    async def never(self, grammar):
        await asyncio.Event().wait()

    monkeypatch.setattr(SyntheticRunner, "check_grammar", never)
    async with synthetic_engine(synthetic_config(prepare_deadline_s=0.01)) as engine:
        with pytest.raises(DeadlineExceeded, match="grammar"):
            await engine.complete(PROMPT, under("%2"))
        check_idle(engine)


async def test_a_runner_without_grammars_is_not_asked(monkeypatch):
    opened = SyntheticRunner.open

    async def without(self):
        return msgspec.structs.replace(await opened(self), grammars=False)

    monkeypatch.setattr(SyntheticRunner, "open", without)
    async with synthetic_engine() as engine:
        with pytest.raises(BadInput, match="samples under none"):
            await engine.complete(PROMPT, under("%2"))


@pytest.mark.ci
async def test_a_worker_checks_and_keeps_them():
    config = synthetic_config(process="worker")
    async with Engine(config) as engine:
        with pytest.raises(BadInput, match="none of the synthetic model"):
            await engine.complete(PROMPT, under("nonsense"))
        await ask(engine, under("%7", n=2))
        with pytest.raises(GrammarFailed, match="told to break"):
            await engine.complete(PROMPT, under("%2!4"))


@pytest.mark.ci
async def test_grammars_are_checked_beside_steps_in_flight():
    # an answer of a step that overtook another one would fail the engine
    config = synthetic_config(process="worker", runner={"step_s": 0.001, "vocab_size": 1000}, pipeline_depth=2)
    async with Engine(config) as engine:
        busy = [asyncio.create_task(ask(engine, SamplingParams(max_tokens=200, seed=seed))) for seed in range(3)]
        for modulus in range(2, 60):
            await ask(engine, under(f"%{modulus}", max_tokens=2))
        await asyncio.gather(*busy)
        check_idle(engine)
