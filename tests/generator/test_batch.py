"""Requests read by a plain loop, and many prompts at once: `generator/streams.py`, `generator/batch.py`."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from fdasync import SamplingParams
from fdasync.errors import BadInput
from fdasync.testing import check_idle, check_sample, oracle_of, synthetic_config, synthetic_engine

PARAMS = SamplingParams(max_tokens=6, temperature=0.0)


def test_a_plain_loop_gets_all_deltas(run_sim):
    async def scenario():
        async with synthetic_engine(synthetic_config()) as engine:
            deltas = [delta async for delta in engine.generate([1, 2, 3], PARAMS)]
            wanted = await engine.complete([1, 2, 3], PARAMS)
        assert [token for delta in deltas for token in delta.token_ids] == list(wanted.samples[0].token_ids)
        assert [delta.finish_reason for delta in deltas][-1] == "length"

    run_sim(scenario())


def test_a_plain_loop_that_is_left_early_aborts(run_sim):
    async def scenario():
        async with synthetic_engine(synthetic_config({"step_s": 1.0})) as engine:
            async for _ in engine.generate([1, 2, 3], SamplingParams(max_tokens=200)):
                break
            await asyncio.sleep(3.0)
            assert engine.load().live == 0
            assert engine.stats().scheduler.steps < 10
        check_idle(engine)

    run_sim(scenario())


def test_a_request_is_read_once(run_sim):
    async def scenario():
        async with synthetic_engine(synthetic_config()) as engine:
            request = engine.generate([1, 2, 3], PARAMS)
            async for _ in request:
                pass
            with pytest.raises(RuntimeError, match="once"):
                async for _ in request:
                    pass

    run_sim(scenario())


def test_results_of_many_prompts_come_in_their_order(run_sim):
    async def scenario():
        config = synthetic_config({"step_s": 0.1}, max_running=4)
        prompts = [[number, number + 1, 7] for number in range(30)]
        async with synthetic_engine(config) as engine:
            results = await engine.complete_all(iter(prompts), PARAMS, request_id="batch")
        assert [result.request_id for result in results] == [f"batch/{number}" for number in range(30)]
        for prompt, result in zip(prompts, results, strict=True):
            check_sample(result.samples[0], prompt, PARAMS, oracle_of(config))

    run_sim(scenario())


def test_each_prompt_may_have_its_params(run_sim):
    async def scenario():
        async with synthetic_engine(synthetic_config()) as engine:
            several = [SamplingParams(max_tokens=number + 1) for number in range(3)]
            results = await engine.complete_all([[1], [2], [3]], several)
            assert [len(result.samples[0].token_ids) for result in results] == [1, 2, 3]
            assert await engine.complete_all([]) == []
            with pytest.raises(BadInput, match=r"params: 2 for 3 prompts"):
                await engine.complete_all([[1], [2], [3]], several[:2])

    run_sim(scenario())


def test_no_more_are_submitted_than_asked(run_sim):
    async def scenario():
        async with synthetic_engine(synthetic_config({"step_s": 1.0})) as engine:
            batch = asyncio.ensure_future(engine.complete_all([[number] for number in range(9)], PARAMS, at_once=2))
            most = 0
            while not batch.done():
                most = max(most, engine.load().live)
                await asyncio.sleep(0.5)
            assert most == 2

    run_sim(scenario())


@pytest.mark.parametrize("how", ["a wrong prompt", "a cancel"])
def test_an_end_of_one_ends_all(run_sim, how):
    async def scenario():
        async with synthetic_engine(synthetic_config({"step_s": 1.0})) as engine:
            prompts = [[1], [2], [10**9] if how == "a wrong prompt" else [3]]
            batch = asyncio.ensure_future(engine.complete_all(prompts, SamplingParams(max_tokens=100)))
            await asyncio.sleep(2.5)
            batch.cancel()
            with pytest.raises(BadInput) if how == "a wrong prompt" else contextlib.suppress(asyncio.CancelledError):
                await batch
            assert batch.done()
            assert engine.load().live == 0

    run_sim(scenario())


@pytest.mark.parametrize(
    ("prompts", "at_once", "problem"),
    [("a text", None, "prompts: one text"), ([[1]], 0, "at_once: 0 requests"), ([[1]], True, "at_once: True")],
)
def test_other_arguments_are_refused(run_sim, prompts, at_once, problem):
    async def scenario():
        async with synthetic_engine(synthetic_config()) as engine:
            with pytest.raises(BadInput, match=problem):
                await engine.complete_all(prompts, PARAMS, at_once=at_once)

    run_sim(scenario())


def test_a_terminal_sees_how_far_it_is(run_sim, monkeypatch, capsys):
    async def scenario():
        async with synthetic_engine(synthetic_config()) as engine:
            await engine.complete_all([[1], [2], [3]], PARAMS, progress=True)
            silent = capsys.readouterr().err
            monkeypatch.setattr("sys.stderr.isatty", lambda: True)
            await engine.complete_all([[1], [2], [3]], PARAMS, progress=True)
        assert silent == ""
        assert "3 of 3 requests, " in capsys.readouterr().err

    run_sim(scenario())
