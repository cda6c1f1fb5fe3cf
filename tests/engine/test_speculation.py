"""A whole engine that asks drafters: whatever they draft, every answer is the one without drafts."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from fdasync import Engine, SamplingParams
from fdasync.drafting import DrafterLimits, Speculation
from fdasync.errors import ConfigError, EngineFailed, PluginError
from fdasync.events.catalog import StepDone
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.scheduler.replay import replay
from fdasync.testing import (
    LetterTokenizer,
    check_deltas,
    check_idle,
    check_sample,
    oracle_of,
    synthetic_config,
    synthetic_engine,
)
from tests.support.drafters import Broken, Foretold, answers_of

PROMPTS = [[1, 2, 3], list(range(20)), [5] * 15, list(range(40, 49))]
RUNNER = {"pass_stamp": True, "values_spec": True, "vocab_size": 60, "num_blocks": 24}
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0.0),
    SamplingParams(max_tokens=33, seed=3, logprobs="both", top_logprobs=2, n=2),
    SamplingParams(max_tokens=17, seed=4, stop=("ab", "q")),
    SamplingParams(max_tokens=50, seed=5, stop_token_ids=(3, 9, 11)),
    SamplingParams(max_tokens=2, seed=6),
    SamplingParams(max_tokens=1, seed=6),
]
LIMITS = DrafterLimits.of(3, 2, 4)


def drafting_config(drafter="foretold", *, max_tokens=3, budget=False, runner=None, **values):
    speculation = Speculation(drafter=drafter, max_tokens=max_tokens, budget=budget)
    defaults = {"pipeline_depth": 2, "max_running": 4, "max_step_tokens": 64}
    return synthetic_config({**RUNNER, **(runner or {})}, speculation=speculation, **{**defaults, **values})


def foretold(kind, config, limits=LIMITS):
    requests = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
    return Foretold(kind, answers_of(requests, oracle_of(config)), limits)


async def read(engine, prompt, params):
    async with engine.generate(prompt, params) as stream:
        deltas = [delta async for delta in stream]
    check_deltas(deltas, stream.result)
    return stream.result


async def play(engine):
    """All requests at once; returns their results, and the runs of each step."""
    async with engine.bus.subscribe(StepDone, limit=4096) as steps:
        requests = [read(engine, prompt, params) for prompt in PROMPTS for params in PARAMS]
        results = await asyncio.gather(*requests)
        runs = [event.counts or () for event in [await anext(steps) for _ in range(steps.pending)]]
    return results, runs


def check_results(results, config):
    for number, result in enumerate(results):
        prompt, params = PROMPTS[number // len(PARAMS)], PARAMS[number % len(PARAMS)]
        for sample in result.samples:
            check_sample(sample, prompt, params, oracle_of(config))


def outcome(results):
    """All of the results that must not depend on drafts: rows but those that name their step, log-probs, ends."""
    return [
        (
            sample.token_ids,
            sample.finish_reason,
            sample.text,
            sample.raw_logprobs is not None and sample.raw_logprobs.tolist(),
            sample.processed_logprobs is not None and sample.processed_logprobs.tolist(),
            sample.top_logprobs,
            None if sample.routing is None else sample.routing.array.tobytes(),
            sample.aux["values"].tobytes(),
        )
        for result in results
        for sample in result.samples
    ]


@pytest.mark.ci
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["right", "wrong", "half", "wild"])
async def test_every_result_is_the_one_without_drafts(kind, depth):
    """Stop strings, stop ids and length limits fall inside runs; there are too few blocks, so some are preempted."""
    config = drafting_config(pipeline_depth=depth)
    plain = msgspec.structs.replace(config, speculation=None)
    async with synthetic_engine(plain, tokenizer=LetterTokenizer()) as engine:
        want, _ = await play(engine)
        plain_steps = engine.stats().scheduler.steps
    async with synthetic_engine(config, tokenizer=LetterTokenizer(), drafter=foretold(kind, config)) as engine:
        results, runs = await play(engine)
        check_results(results, config)
        assert outcome(results) == outcome(want)
        check_idle(engine)
        stats = engine.stats().scheduler
        samples = [sample for result in results for sample in result.samples]
        # nothing ended but by itself
        assert sum(sample.drafts.drafted for sample in samples) == stats.drafted_tokens
        assert sum(sample.drafts.accepted for sample in samples) == stats.accepted_tokens
        for sample in samples:
            # the first token is the prefill's, and so is one after each preemption
            assert sample.drafts.steps + sample.drafts.accepted <= len(sample.token_ids) + 3
            assert sample.drafts.steps <= max(len(sample.token_ids) - 1, 0)
        assert stats.preemptions
        assert stats.drafter == "foretold"
        assert stats.drafted_tokens >= stats.accepted_tokens
        assert stats.drafting_steps > 10
        seen = {count for counts in runs for count in counts} - {0}
        if kind == "wrong":
            assert seen == {1}
            assert stats.drafted_tokens > 100
            assert stats.accepted_tokens == 0
        else:
            assert seen >= {1, 2}
            assert stats.steps < plain_steps
            assert stats.accepted_tokens > 100
        if kind == "right":
            assert seen == {1, 2, 3, 4}
        assert replay(engine.trace().encode(), make_drafter=lambda *_: foretold(kind, config))


@pytest.mark.ci
async def test_a_drafter_by_name():
    """`ngram` finds what samples of a prompt repeat of each other: this prompt's greedy samples are all the same."""
    config = drafting_config("ngram", runner={"num_blocks": 64})
    params = SamplingParams(max_tokens=40, temperature=0.0)
    async with synthetic_engine(config) as engine:
        first = await read(engine, PROMPTS[0], params)
        both = await asyncio.gather(*[read(engine, PROMPTS[0], SamplingParams(max_tokens=40, temperature=0.0, n=2))])
        for result in (first, *both):
            for sample in result.samples:
                check_sample(sample, PROMPTS[0], params, oracle_of(config))
        stats = engine.stats().scheduler
        assert replay(engine.trace().encode())
    assert stats.drafter == "ngram"


@pytest.mark.parametrize(
    "fault",
    ["begin", "take", "propose", "end", "none", "lists", "long", "negative", "few counts", "few tokens", "int64",
     "floats"],
)  # fmt: skip
async def test_a_broken_drafter_ends_the_engine_by_name(fault):
    config = drafting_config("odd", runner={"num_blocks": 64})
    engine = synthetic_engine(config, drafter=Broken(fault, LIMITS, after=0 if fault == "begin" else 3))
    await engine.start()
    try:
        with pytest.raises(EngineFailed) as failed:
            async with asyncio.timeout(300):
                await asyncio.gather(
                    *[engine.complete(PROMPTS[0], SamplingParams(max_tokens=count, seed=1)) for count in (8, 60, 60)]
                )
    finally:
        await engine.aclose()
    assert isinstance(failed.value.cause, PluginError)
    assert failed.value.cause.name == "odd"
    assert "nonsense" in str(failed.value.cause) or f"its {fault} raised KeyError" in str(failed.value.cause)


def test_a_drafter_that_is_not_installed_is_refused_at_once():
    with pytest.raises(PluginError, match="nobody"):
        synthetic_engine(drafting_config("nobody"))


@pytest.mark.parametrize(
    ("speculation", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 65}, "1 to 64"),
        ({"max_tokens": "3"}, "max_tokens"),
        (Speculation(max_tokens="3"), "max_tokens: Expected `int`, got `str`.*1 to 64.*leave config.speculation out"),
        (Speculation(max_tokens=2.5), "max_tokens: Expected `int`, got `float`"),
        (Speculation(max_tokens=True), "max_tokens: Expected `int`, got `bool`"),
        (Speculation(budget="no"), "budget: Expected `bool`, got `str`"),
        (Speculation(drafter=3), "drafter: Expected `str`, got `int`; 'none': the runner drafts alone"),
        ({"drafter": ""}, "drafter: has 0 characters"),
        ({"drafter": "none", "drafter_config": {"orders": [2]}}, "drafter_config"),
        ({"drafter_config": {"order": 2}}, "config.speculation.drafter_config.order"),
        ({"tokens": 3}, "tokens"),
        ({"max_tokens": 8}, "cannot hold 9 tokens of each of max_running=8"),
    ],
)
def test_settings_are_checked(speculation, named):
    values = msgspec.structs.asdict(synthetic_config(RUNNER)) | {"speculation": speculation}
    with pytest.raises(ConfigError, match=named):
        Engine(values)


class Plain(SyntheticRunner):
    """Does not look at `RunnerLimits.speculation`."""

    def __init__(self, config, limits):
        super().__init__(config, msgspec.structs.replace(limits, speculation=0))


async def test_a_runner_that_verifies_nothing_is_refused():
    config = drafting_config("ngram")
    runner = Plain(oracle_of(config).config, config.runner_limits())
    with pytest.raises(ConfigError, match=r"asks for 3 drafts.*gives 1 tokens.*Capacity\.max_run_tokens of 4"):
        async with synthetic_engine(config, runner=runner):
            raise AssertionError("it started")


async def test_nobody_who_drafts_is_refused():
    config = drafting_config("none")
    with pytest.raises(ConfigError, match=r"speculation\.drafter.*drafts nothing by itself.*runner_config\.mtp"):
        async with synthetic_engine(config):
            raise AssertionError("it started")


async def test_a_last_token_that_was_planned_early_has_its_step():
    """With two steps in flight the second of two tokens is planned before the first is known."""
    config = drafting_config()
    async with synthetic_engine(config, drafter=foretold("right", config)) as engine:
        result = await engine.complete(PROMPTS[0], PARAMS[4])
    (sample,) = result.samples
    assert len(sample.token_ids) == 2
    assert (sample.drafts.steps, sample.drafts.accepted) == (1, 0)


def test_objects_that_do_not_fit_are_refused():
    config = drafting_config()
    with pytest.raises(ConfigError, match="no Drafter"):
        synthetic_engine(config, drafter=object())
    with pytest.raises(ConfigError, match="was made for"):
        synthetic_engine(config, drafter=foretold("right", config, DrafterLimits.of(2, 2, 4)))
    with pytest.raises(ConfigError, match="give it a name"):
        synthetic_engine(synthetic_config(), drafter=foretold("right", config))
