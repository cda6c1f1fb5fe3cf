"""Engines whose store has a process of its own: one that hangs is replaced, one that cannot open says so."""

from __future__ import annotations

import asyncio

import pytest

from fdasync import Engine, SamplingParams
from fdasync.errors import StoreRejected
from fdasync.events.catalog import BreakerChanged
from fdasync.testing import check_idle, check_sample, oracle_of, synthetic_config, until
from fdasync.testing.harness.processes import stop_process
from tests.support import skips

PARAMS = SamplingParams(max_tokens=4, temperature=0.0)


def prompt(number):
    """Prompts that share nothing: their first two tokens differ. 10,000 of them, in a vocabulary of 100."""
    return [number % 100, number // 100, *[(number * 31 + at * 7) % 100 for at in range(2, 40)]]


def test_prompts_stay_in_the_vocabulary_however_many_are_asked():
    many = [prompt(number) for number in range(10_000)]
    assert len({tuple(tokens[:2]) for tokens in many}) == len(many)
    assert max(max(tokens) for tokens in many) < 100
    assert {len(tokens) for tokens in many} == {40}


def file_config(path, **values):
    """A store in a folder. A step takes a while, so that looking up is worth it."""
    runner = {"num_blocks": 12, "max_context_tokens": 48, "step_s": 0.002, "token_s": 0.001}
    defaults = {"host_blocks": 64, "max_step_tokens": 64, "store_open_deadline_s": skips.LIMIT_S,
                "store_deadline_s": skips.LIMIT_S, "store_kill_s": 2 * skips.LIMIT_S, "close_deadline_s": skips.LIMIT_S,
                "request_deadline_s": 1e6}  # fmt: skip
    store = {"path": str(path), "max_nbytes": 1 << 24}
    return synthetic_config(runner, store="file", store_config=store, **{**defaults, **values})


async def ask(engine, tokens):
    result = await engine.complete(tokens, PARAMS)
    check_sample(result.samples[0], tokens, PARAMS, oracle_of(engine.config))
    return result


@pytest.mark.ci
@pytest.mark.skips
@pytest.mark.parametrize("write_through", ["off", "all"])
async def test_a_store_process_that_hangs_is_replaced_whatever_it_was_asked(write_through, tmp_path):
    # "off": lookups and the breaker's probes are all that hangs, and nothing of them is lent out
    config = file_config(tmp_path / "store", write_through=write_through, write_back=False)
    async with Engine(config) as engine, engine.bus.subscribe(BreakerChanged) as changes:
        await ask(engine, prompt(0))
        await until(lambda: not engine.stats().scheduler.writing)
        stopped = engine.store_pid
        stop_process(stopped)
        states = []
        number = 1
        while states[-1:] != ["closed"]:
            asking = asyncio.ensure_future(ask(engine, prompt(number)))
            await skips.go_on(asking.done, lambda: skips.is_left_or_stuck(engine, stopped))
            await asking
            number += 1
            while changes.pending:
                states.append((await anext(changes)).state)
        assert states[0] == "open"
        assert engine.store_pid not in (-1, stopped)
        await until(lambda: not engine.stats().scheduler.late_transfers)
        # it is asked and answers
        await ask(engine, prompt(number))
        assert states[-1] == "closed"
        assert engine._runtime.store.breaker.state == "closed"
    check_idle(engine)


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("path", ["", "a\0b"])
async def test_a_path_that_names_no_folder_is_an_error_of_the_start(path):
    engine = Engine(file_config(path))
    with pytest.raises(StoreRejected, match="path") as found:
        await engine.start()
    assert "name a folder" in found.value.hint
    await engine.aclose()
