"""Engines of real checkpoints whose multi-token prediction layers draft: results are those without drafts."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from agreeing import make_agreeing_checkpoint
from draft_results import Known, assert_same
from fdasync_fleet.testing.patience import LEASES, LINKS

from fdasync import Engine, EngineConfig, Instance, SamplingParams, connect
from fdasync.drafting import DrafterLimits, Speculation
from fdasync.errors import ConfigError
from fdasync.telemetry.prometheus import PrometheusTap
from fdasync.testing import LetterTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync import Result

PROMPTS = [[number + 3, *[(number * 31 + at * 7) % 100 + 3 for at in range(1, 12)]] for number in range(3)]
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0.0, logprobs="raw"),
    SamplingParams(max_tokens=16, temperature=1.0, seed=3, n=2, logprobs="both"),
    SamplingParams(
        max_tokens=18, temperature=0.8, seed=4, repetition_penalty=1.2, presence_penalty=0.3, logprobs="raw"
    ),
    SamplingParams(max_tokens=30, temperature=1.0, seed=5, stop_token_ids=tuple(range(0, 256, 5)), logprobs="raw"),
]
FAMILIES = ["glm4_moe", "deepseek_v3", "qwen3_moe", "qwen3_next"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def folder(family: str, seed: int = 0) -> Path:
        made = tmp_path_factory.mktemp(f"{family}-{seed}")
        make_agreeing_checkpoint(made, family, seed)
        return made

    return folder


def config(folder: Path, speculation: Speculation | None, *, mtp: bool = True, **changed: Any) -> EngineConfig:
    own = {"dtype": "float32", "device": "cpu", "num_threads": 1, "self_check": False}
    # too few blocks for all: some are preempted
    sizes = {"block_tokens": 4, "num_blocks": 30, "max_context_tokens": 64, "max_running": 6, "max_step_tokens": 48}
    return EngineConfig(
        model=str(folder),
        tokenizer="none",
        speculation=speculation,
        **{"runner_config": {**own, "mtp": mtp}, "process": "inline", **sizes, **changed},
    )


async def play(engine: Engine) -> list[Result]:
    return list(await asyncio.gather(*[engine.complete(prompt, one) for prompt in PROMPTS for one in PARAMS]))


def answers_of(results: list[Result]) -> dict[bytes, list[tuple[int, ...]]]:
    answers: dict[bytes, list[tuple[int, ...]]] = {}
    for number, result in enumerate(results):
        prompt = np.array(PROMPTS[number // len(PARAMS)], "<i4").tobytes()
        answers.setdefault(prompt, []).extend(sample.token_ids for sample in result.samples)
    return answers


@pytest.mark.ci
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
async def test_results_are_those_without_drafts(folder_of: Any, family: str, depth: int) -> None:
    folder = folder_of(family)
    async with Engine(config(folder, None, mtp=False, pipeline_depth=depth)) as engine:
        wanted = await play(engine)
        plain = engine.stats().scheduler
        assert plain.own_drafter == ""
        assert all(result.drafts is None for result in wanted)
    assert {result.finish_reason for result in wanted} == {"length", "stop"}
    alone = Speculation(drafter="none", max_tokens=3, budget=False)
    async with Engine(config(folder, alone, pipeline_depth=depth)) as engine:
        results = await play(engine)
        assert_same(results, wanted)
        stats = engine.stats().scheduler
        engine.check()
    assert stats.preemptions
    assert stats.steps < plain.steps
    assert (stats.drafter, stats.drafted_tokens) == ("", 0)
    assert stats.own_drafter == "mtp"
    assert 20 < stats.own_accepted_tokens < stats.own_drafted_tokens
    assert 0 < stats.own_drafting_steps <= stats.steps
    told = [sample.drafts for result in results for sample in result.samples]
    assert sum(drafts.drafted for drafts in told) == stats.own_drafted_tokens
    assert sum(drafts.accepted for drafts in told) == stats.own_accepted_tokens
    for result in results:
        for sample in result.samples:
            # the first token is the prefill's, and so is one after each preemption
            assert min(len(sample.token_ids) - 1, 1) <= sample.drafts.steps <= len(sample.token_ids) - 1


@pytest.mark.ci
async def test_with_the_budget_results_are_the_same(folder_of: Any) -> None:
    """However many are drafted behind a step: the times of this machine decide."""
    folder = folder_of("qwen3_moe")
    async with Engine(config(folder, None, mtp=False)) as engine:
        wanted = await play(engine)
    async with Engine(config(folder, Speculation(drafter="none", max_tokens=3))) as engine:
        for _ in range(3):
            assert_same(await play(engine), wanted)
        stats = engine.stats().scheduler
        engine.check()
    # all numbers are tried
    assert 0 < stats.own_accepted_tokens < stats.own_drafted_tokens
    assert 0 < stats.own_drafting_steps < stats.steps


@pytest.mark.ci
@pytest.mark.parametrize("family", FAMILIES[:2])
async def test_host_s_drafts_and_the_runner_s_are_counted_apart(folder_of: Any, family: str) -> None:
    folder = folder_of(family)
    async with Engine(config(folder, None, mtp=False)) as engine:
        wanted = await play(engine)
    # the answers of two prompts alone are known: the others are left to the runner
    answers = answers_of(wanted)
    del answers[np.array(PROMPTS[2], "<i4").tobytes()]
    known = Known(answers, DrafterLimits.of(3, 2, 6))
    both = Speculation(drafter="known", max_tokens=3, budget=False)
    async with Engine(config(folder, both), drafter=known) as engine, PrometheusTap(engine) as tap:
        results = await play(engine)
        assert_same(results, wanted)
        stats = engine.stats().scheduler
        lines = tap.exposition().decode().splitlines()
        assert f'fdasync_accepted_tokens_total{{drafter="known"}} {stats.accepted_tokens}.0' in lines
        assert f'fdasync_accepted_tokens_total{{drafter="mtp"}} {stats.own_accepted_tokens}.0' in lines
        engine.check()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert 0 < stats.own_accepted_tokens < stats.own_drafted_tokens
    told = [sample.drafts for result in results for sample in result.samples]
    assert sum(drafts.drafted for drafts in told) == stats.drafted_tokens + stats.own_drafted_tokens
    assert sum(drafts.accepted for drafts in told) == stats.accepted_tokens + stats.own_accepted_tokens


@pytest.mark.ci
@pytest.mark.parametrize("family", FAMILIES[:2])
async def test_new_weights_and_an_abort_in_the_middle(folder_of: Any, family: str) -> None:
    """New weights reach the layers too: requests behind them are those of an engine that began with these weights."""
    folder, other = folder_of(family), folder_of(family, 1)
    speculation = Speculation(drafter="none", max_tokens=3, budget=False)
    async with Engine(config(other, None, mtp=False, num_blocks=64)) as engine:
        wanted = await play(engine)
    async with Engine(config(other, speculation, num_blocks=64)) as engine:
        assert_same(await play(engine), wanted)
        fresh = engine.stats().scheduler
    async with Engine(config(folder, speculation, num_blocks=64)) as engine:
        long = SamplingParams(max_tokens=44, temperature=0.0, ignore_eos=True)
        async with engine.generate(PROMPTS[0], long) as kept, engine.generate(PROMPTS[1], long) as cut:
            await anext(aiter(kept))
            await anext(aiter(cut))
            assert engine.abort(cut.request_id)
            await engine.update_weights(1, str(other), "keep")
            async for _ in kept:
                pass
            async for _ in cut:
                pass
        assert cut.result.finish_reason == "abort"
        assert [span.version for span in kept.result.weight_version] == ["0", "1"]
        assert kept.result.routing is not None
        assert len(kept.result.routing.array) == len(PROMPTS[0]) + 43
        before = engine.stats().scheduler
        assert_same(await play(engine), wanted)
        stats = engine.stats().scheduler
        engine.check()
    # layers of the old weights would draft other tokens
    assert fresh.own_accepted_tokens > 20
    assert stats.own_accepted_tokens - before.own_accepted_tokens == fresh.own_accepted_tokens
    assert stats.own_drafted_tokens - before.own_drafted_tokens == fresh.own_drafted_tokens


@pytest.mark.ci
@pytest.mark.parametrize("family", FAMILIES[:2])
async def test_a_stop_string_in_the_middle_of_accepted_drafts_ends_a_sample_where_it_would_without(
    folder_of: Any, family: str
) -> None:
    folder = folder_of(family)
    free = SamplingParams(max_tokens=30, temperature=1.0, seed=9, n=2, logprobs="raw")
    async with Engine(config(folder, None, mtp=False), tokenizer=LetterTokenizer()) as engine:
        texts = [sample.text for prompt in PROMPTS for sample in (await engine.complete(prompt, free)).samples]
        assert all(text is not None and len(text) == 30 for text in texts)
        # two letters of each answer, in its middle and so in that of a run of accepted drafts now and then
        stops = tuple({text[at : at + 2] for text in texts if text for at in (11, 14)})
        stopped = msgspec.structs.replace(free, stop=stops)
        wanted = [await engine.complete(prompt, stopped) for prompt in PROMPTS]
    assert {sample.finish_reason for result in wanted for sample in result.samples} == {"stop"}
    speculation = Speculation(drafter="none", max_tokens=3, budget=False)
    async with Engine(config(folder, speculation), tokenizer=LetterTokenizer()) as engine:
        results = list(await asyncio.gather(*[engine.complete(prompt, stopped) for prompt in PROMPTS]))
        assert engine.stats().scheduler.own_accepted_tokens > 10
        engine.check()
    assert_same(results, wanted)
    assert [[s.text for s in result.samples] for result in results] == [[s.text for s in r.samples] for r in wanted]


@pytest.mark.ci
@pytest.mark.parametrize("transport", ["shm", "device"])
async def test_instances_apart_draft_behind_a_hand_over(folder_of: Any, tmp_path: Path, transport: str) -> None:
    folder = folder_of("glm4_moe")
    async with Engine(config(folder, None, mtp=False)) as engine:
        wanted = await play(engine)
    speculation = Speculation(drafter="none", max_tokens=3, budget=False)
    sides = [
        Instance(
            config(folder, speculation, role=role, host_blocks=32, num_blocks=64, leases=LEASES),
            listen=f"ipc://{tmp_path}/{role}",
            transport=transport,
            transfer_process=False,
            links=LINKS,
        )
        for role in ("prefill", "decode")
    ]
    async with sides[0], sides[1], connect([side.address for side in sides], links=LINKS) as router:
        asked = [router.complete(prompt, one) for prompt in PROMPTS for one in PARAMS]
        results = list(await asyncio.gather(*asked))
        decoder = sides[1].engine.stats().scheduler
        assert decoder.received_blocks > 10
        assert 20 < decoder.own_accepted_tokens < decoder.own_drafted_tokens
        for side in sides:
            side.engine.check()
    assert_same(results, wanted)


# the fewest ranks draft in every run, more of them and the other families where time allows
OF_RANKS = [("glm4_moe", 4), ("deepseek_v3", 2), ("qwen3_moe", 2)]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "ranks"), [("glm4_moe", 2), *[pytest.param(*each, marks=pytest.mark.nightly) for each in OF_RANKS]]
)
async def test_ranks_draft_as_one_process_does(
    folder_of: Any, family: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_children: None
) -> None:
    """Blocks of every width carry the same, so that one process goes on from what ranks have stored."""
    folder = folder_of(family)
    exact = {"dtype": "float64", "device": "cpu", "num_threads": 1, "self_check": False, "mtp": True}
    tiers: dict[str, Any] = {"host_blocks": 40, "store": "file", "store_config": {"path": str(tmp_path)}}
    speculation = Speculation(drafter="none", max_tokens=3, budget=False)
    grouped = config(folder, speculation, runner_config=exact, tensor_parallel=ranks, process="worker", **tiers)
    async with Engine(config(folder, speculation, runner_config=exact)) as engine:
        wanted = await play(engine)
        alone = engine.stats().scheduler
    async with Engine(grouped) as engine:
        results = await play(engine)
        assert_same(results, wanted)
        stats = engine.stats().scheduler
        engine.check()
    # how many are preempted, and what comes back, is a matter of time among processes
    assert stats.written_blocks
    assert 20 < stats.own_accepted_tokens < stats.own_drafted_tokens
    # the same drafts, but for those that preemptions at other moments cost
    assert abs(stats.own_accepted_tokens - alone.own_accepted_tokens) < 20
    # a model this small computes faster than any store reads, so the one process gets another speed
    monkeypatch.setattr("fdasync_transformers.start.capacity.prefill_tokens_per_s", lambda *_: 1.0)
    async with Engine(config(folder, speculation, runner_config=exact, fetch_min_tokens=4, **tiers)) as engine:
        prompt = (*PROMPTS[0], *wanted[0].samples[0].token_ids[:9])
        again = await engine.complete(prompt, msgspec.structs.replace(PARAMS[0], max_tokens=11))
        assert again.cached.store > 0
        assert again.samples[0].token_ids == wanted[0].samples[0].token_ids[9:]
        assert again.drafts is not None
        assert again.drafts.accepted > 0


def test_where_they_are_refused(folder_of: Any) -> None:
    folder = folder_of("glm4_moe")

    async def start(**changed: Any) -> None:
        async with Engine(config(folder, Speculation(drafter="none"), **changed)):
            raise AssertionError("it started")

    with pytest.raises(ConfigError) as caught:
        asyncio.run(start(numerics="fixed", sum_slices=2))
    assert caught.value.field == "runner_config.mtp"
