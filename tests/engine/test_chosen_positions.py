"""Positions that indexers choose, through an engine's public face: which rows a request gets, whatever caches and steps
do, and what bounds them."""

from __future__ import annotations

import asyncio
import os
from random import Random

import numpy as np
import pytest

from fdasync import Engine, SamplingParams
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.drafting import DrafterLimits, Speculation
from fdasync.engine import chosen_output
from fdasync.engine.stream import TokenStream
from fdasync.errors import BadInput, BuffersOut, EngineFailed
from fdasync.request import GenerateRequest
from fdasync.runner.chosen import ChosenRows
from fdasync.runner.synthetic.runner import SyntheticRunner
from fdasync.testing import (
    check_idle,
    check_sample,
    held_engine,
    oracle_of,
    run_sim,
    synthetic_config,
    synthetic_engine,
    until,
)
from tests.support.drafters import Foretold, answers_of

PROMPT = [token % 90 for token in range(50)]
TOKEN_NBYTES = 4 * 2 * 5


def config(runner=None, **values):
    return synthetic_config(runner={"chosen_top_k": 5, **(runner or {})}, **values)


def choosing(start: int = 0, **fields) -> SamplingParams:
    values = {"max_tokens": 4, "temperature": 0.0, **fields}
    return SamplingParams(chosen_positions_start=start, **values)


def check_chosen(result, prompt, params, oracle) -> None:
    """Raise AssertionError unless every sample has the oracle's positions: of a sample with tokens all of them."""
    first = params.chosen_positions_start
    for sample in result.samples:
        check_sample(sample, prompt, params, oracle)
        found = sample.chosen_positions
        assert (found.start, found.layer_ids, found.array.dtype) == (first, (0, 2), np.int32)
        tokens = [*prompt, *sample.token_ids]
        if sample.token_ids:
            assert len(found.array) == len(tokens) - 1 - first
        at = slice(first, first + len(found.array))
        want = oracle.chosen(oracle.digests(tokens)[at], np.arange(len(tokens))[at])
        assert np.array_equal(found.array, want)


async def ask(engine: Engine, params: SamplingParams, prompt=PROMPT, **options):
    result = await engine.complete(prompt, params, **options)
    check_chosen(result, prompt, params, oracle_of(engine.config))
    return result


@pytest.mark.parametrize("start", [0, 1, 4, 5, 16, 17, 48, 49])
async def test_positions_are_told_from_where_they_were_asked(start):
    async with synthetic_engine(config()) as engine:
        for _ in range(2):
            # the second time its blocks are cached
            result = await ask(engine, choosing(start))
        assert result.chosen_positions.array.shape == (53 - start, 2, 5)
        # the row of a token is computed with it, and everything before it may come from the cache
        assert result.cached_tokens == start // 4 * 4
        # where fewer are seen there are fewer
        assert (result.chosen_positions.array[: max(4 - start, 0)] < 0).any(axis=(1, 2)).all()
        plain = await engine.complete(PROMPT, SamplingParams(max_tokens=4, temperature=0.0))
        assert plain.chosen_positions is None
        assert plain.token_ids == result.token_ids
        check_idle(engine)


async def test_the_rows_are_the_callers():
    async with synthetic_engine(config()) as engine:
        result = await ask(engine, choosing())
        kept = result.chosen_positions.array.copy()
        assert result.chosen_positions.array.base is None
        await ask(engine, choosing())
        assert np.array_equal(result.chosen_positions.array, kept)


@pytest.mark.parametrize("depth", [1, 2])
async def test_chunks_of_several_prompts_are_told_apart(depth):
    async with synthetic_engine(config(max_step_tokens=24, pipeline_depth=depth)) as engine:
        prompts = [[number, *PROMPT[: 20 + number]] for number in range(8)]
        params = [choosing(number) for number in range(8)]
        await asyncio.gather(*[ask(engine, *pair) for pair in zip(params, prompts, strict=True)])
        check_idle(engine)


@pytest.mark.parametrize("start", [0, 30, 49])
async def test_samples_share_what_was_chosen_for_the_prompt(start):
    async with synthetic_engine(config()) as engine:
        result = await ask(engine, choosing(start, n=4, temperature=1.0, seed=5))
        assert len({sample.token_ids for sample in result.samples}) > 1
        # the prompt is computed once: beside the first sample, three computed its tail and all their own
        assert [sample.cached_tokens for sample in result.samples] == [0, 48, 48, 48]


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("seed", range(5, 13))
def test_no_sample_ends_before_the_rows_stand_that_it_shares(seed):
    """Where blocks come from the host or a store the first sample may wait for them while others could start."""
    random = Random(seed)
    sizes = {"num_blocks": random.choice([10, 14, 20]), "max_context_tokens": 40, "seed": seed}
    times = {"step_s": 0.01, "token_s": 0.005, "copy_s": random.choice([0.003, 0.03]), "jitter": 1.0}
    states = {"state_words": random.choice([0, 1]), "num_snapshots": random.choice([2, 5])}
    tiers = config(
        {**sizes, **times, **states}, host_blocks=20, max_running=2, max_step_tokens=random.choice([2, 3, 4, 8]),
        pipeline_depth=random.choice([1, 2]), request_deadline_s=900.0,
    )  # fmt: skip
    prompts = [[random.randrange(100) for _ in range(random.randint(12, 28))] for _ in range(3)]
    store = MemoryStore(MemoryConfig()) if random.random() < 0.5 else None

    async def call(engine: Engine, number: int) -> None:
        own = Random(f"{seed} {number}")
        await asyncio.sleep(own.uniform(0, 2))
        prompt = own.choice(prompts)
        params = choosing(
            own.randrange(len(prompt)), n=own.choice([1, 2, 3]), temperature=1.0, seed=number,
            max_tokens=own.randint(1, 4),
        )  # fmt: skip
        async with engine.generate(prompt, params) as stream:
            async for delta in stream:
                if delta.finish_reason is not None:
                    sample = stream.sample(delta.index)
                    whole = len(prompt) + len(sample.token_ids) - 1 - params.chosen_positions_start
                    assert len(sample.chosen_positions.array) == whole
        check_chosen(stream.result, prompt, params, oracle_of(engine.config))

    async def play() -> None:
        async with synthetic_engine(tiers, store=store) as engine:
            await asyncio.gather(*[call(engine, number) for number in range(24)])
            await until(lambda: not engine.stats().scheduler.moving, every_s=0.01)
            check_idle(engine)

    run_sim(play())


async def test_preempted_samples_keep_what_was_chosen():
    small = config(runner={"num_blocks": 24, "max_context_tokens": 96}, max_step_tokens=20, host_blocks=64)
    async with synthetic_engine(small) as engine:
        asked = [([number, *PROMPT[: 12 + number]], choosing(0, max_tokens=40)) for number in range(12)]
        await asyncio.gather(*[ask(engine, params, prompt) for prompt, params in asked])
        stats = engine.stats().scheduler
        assert stats.preemptions > 0
        # what has its rows comes back from the host
        assert stats.swapped_in_blocks > 0
        check_idle(engine)


@pytest.mark.parametrize("kind", ["right", "half"])
async def test_rejected_drafts_leave_no_row(kind):
    drafts = config(
        speculation=Speculation(drafter="foretold", max_tokens=3, budget=False), pipeline_depth=2, max_running=4
    )
    asked = [([number, *PROMPT[:20]], choosing(2, max_tokens=40)) for number in range(4)]
    drafter = Foretold(kind, answers_of(asked, oracle_of(drafts)), DrafterLimits.of(3, 2, 4))
    async with synthetic_engine(drafts, drafter=drafter) as engine:
        results = await asyncio.gather(*[ask(engine, params, prompt) for prompt, params in asked])
        counts = [result.drafts for result in results]
        assert all(count.accepted > 0 for count in counts)
        assert all((count.drafted > count.accepted) == (kind == "half") for count in counts)


async def test_runs_of_the_runner_have_their_rows():
    async with synthetic_engine(config(runner={"max_run_tokens": 4})) as engine:
        await ask(engine, choosing(3, max_tokens=33))


@pytest.mark.parametrize(("steps", "rows"), [(1, 16), (2, 32)])
async def test_one_that_ends_early_has_the_leading_rows(steps, rows):
    engine, faults = held_engine(config(max_step_tokens=16, pipeline_depth=1))
    async with engine:
        faults.hold()
        task = asyncio.create_task(engine.complete(PROMPT, choosing(), request_id="mine"))
        for step in range(steps):
            await faults.reached(step)
            faults.release(1)
        await faults.reached(steps)
        engine.abort("mine")
        result = await task
        faults.release()
        assert result.finish_reason == "abort"
        assert result.token_ids == ()
        # the step in flight may have written further rows, of positions that the prompt has
        assert rows <= len(result.chosen_positions.array) <= rows + 16
        check_chosen(result, PROMPT, choosing(), oracle_of(engine.config))


async def test_streams_end_with_the_same_rows(monkeypatch):
    monkeypatch.setattr(chosen_output, "_SLICE_NBYTES", 7 * TOKEN_NBYTES)
    async with synthetic_engine(config()) as engine, engine.generate(PROMPT, choosing(7)) as stream:
        deltas = [delta async for delta in stream]
        assert len(deltas) > 1
        check_chosen(stream.result, PROMPT, choosing(7), oracle_of(engine.config))
        assert stream.sample(0).chosen_positions.array is stream.result.chosen_positions.array


async def test_a_copy_goes_on_where_its_reader_was_cancelled(monkeypatch):
    monkeypatch.setattr(chosen_output, "_SLICE_NBYTES", TOKEN_NBYTES)
    async with synthetic_engine(config()) as engine, engine.generate(PROMPT, choosing(7)) as stream:
        await stream._request.done
        reading = asyncio.create_task(stream.finished())
        # it begins, and has copied some of 46 slices
        for _ in range(10):
            await asyncio.sleep(0)
        assert not reading.done()
        reading.cancel()
        await asyncio.wait([reading])
        check_chosen(stream.result, PROMPT, choosing(7), oracle_of(engine.config))


@pytest.mark.ci
async def test_in_a_worker_the_rows_come_by_shared_memory():
    async with synthetic_engine(config(process="worker", max_step_tokens=20, pipeline_depth=2)) as engine:
        asked = [([number, *PROMPT], choosing(number, n=2, max_tokens=20)) for number in range(6)]
        results = await asyncio.gather(*[ask(engine, params, prompt) for prompt, params in asked])
        # a copy, which keeps no descriptor
        assert all(sample.chosen_positions.array.base is None for result in results for sample in result.samples)
        check_idle(engine)


# -- what bounds them -----------------------------------------------------------------------------------


async def test_requests_wait_for_the_bytes_of_others():
    # a prompt of 50 and 4 tokens have 53 rows
    bounded = config(chosen_positions_nbytes=100 * TOKEN_NBYTES)
    engine, faults = held_engine(bounded)
    async with engine:
        faults.hold()
        first = asyncio.create_task(ask(engine, choosing()))
        await faults.reached(0)
        second = asyncio.create_task(ask(engine, choosing(), [1, *PROMPT]))
        free = asyncio.create_task(engine.complete([2, *PROMPT], SamplingParams(max_tokens=1)))
        faults.release()
        await asyncio.gather(first, second, free)
        assert engine._frontend._chosen.used == 0
        check_idle(engine)


async def test_a_wait_for_bytes_ends_with_its_request():
    engine, faults = held_engine(config(chosen_positions_nbytes=60 * TOKEN_NBYTES))
    async with engine:
        faults.hold()
        first = asyncio.create_task(ask(engine, choosing()))
        await faults.reached(0)
        late = await engine.complete(PROMPT, choosing(), deadline_s=0.05)
        assert (late.finish_reason, late.chosen_positions) == ("deadline", None)
        faults.release()
        await first
        assert engine._frontend._chosen.used == 0


@pytest.mark.parametrize(
    ("params", "prompt", "problem"),
    [
        (choosing(50), PROMPT, "is not inside the prompt"),
        (choosing(-1), PROMPT, "too small"),
        # 53 rows of the first sample, 4 of each other one
        (choosing(0, n=3), PROMPT, f"up to {61 * TOKEN_NBYTES} bytes"),
        (choosing(9, max_tokens=20), PROMPT, f"up to {60 * TOKEN_NBYTES} bytes"),
    ],
)
async def test_what_cannot_be_told_is_refused(params, prompt, problem):
    async with synthetic_engine(config(chosen_positions_nbytes=59 * TOKEN_NBYTES)) as engine:
        with pytest.raises(BadInput, match=problem) as caught:
            await engine.complete(prompt, params)
        assert caught.value.field == "chosen_positions_start"
        await ask(engine, choosing(0))


async def test_a_model_without_indexers_is_not_asked():
    async with synthetic_engine() as engine:
        with pytest.raises(BadInput, match="has no indexers") as caught:
            await engine.complete(PROMPT, choosing())
        assert caught.value.field == "chosen_positions_start"


async def test_memory_that_the_machine_does_not_have_ends_one_request(monkeypatch):
    create = ChosenRows.create.__func__

    def fails(cls, shape, start, most):
        if start:
            raise OSError(24, "Too many open files")
        return create(cls, shape, start, most)

    monkeypatch.setattr(ChosenRows, "create", classmethod(fails))
    async with synthetic_engine(config()) as engine:
        with pytest.raises(BuffersOut, match="Too many open files"):
            await engine.complete(PROMPT, choosing(0, n=2))
        await asyncio.sleep(0)
        assert engine._frontend._chosen.used == 0
        await ask(engine, choosing(0))


@pytest.mark.parametrize("process", ["inline", "worker"])
async def test_rows_that_a_runner_does_not_take_end_one_request(process, monkeypatch):
    if process == "worker":
        # the region is smaller than the worker is told
        monkeypatch.setattr(
            ChosenRows, "plan", property(lambda rows: (rows.shape, rows.start, rows.most + (rows.start > 0)))
        )
    else:
        honest = SyntheticRunner.lend

        async def lend(self, key, rows):
            if rows.start:
                raise OSError(12, "Cannot allocate memory")
            await honest(self, key, rows)

        monkeypatch.setattr(SyntheticRunner, "lend", lend)
    async with synthetic_engine(config(process=process, chosen_positions_nbytes=200 * TOKEN_NBYTES)) as engine:
        for _ in range(5):
            with pytest.raises(BuffersOut, match="the runner cannot write them") as caught:
                await engine.complete(PROMPT, choosing(0, n=2))
            assert caught.value.wanted_nbytes == 57 * TOKEN_NBYTES
            del caught
        # the bytes came back in a turn, and the sample that was lent some is as if it had never been
        await asyncio.sleep(0)
        assert engine._frontend._chosen.used == 0
        await ask(engine, choosing(0))
        if process == "inline":
            assert engine._runtime.runner._lent._rows == {}
        check_idle(engine)


async def open_files(pid: int) -> str:
    listing = await asyncio.create_subprocess_exec("ls", "-l", f"/proc/{pid}/fd", stdout=asyncio.subprocess.PIPE)
    return (await listing.communicate())[0].decode()


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("process", ["inline", "worker"])
async def test_no_descriptor_is_open_while_a_request_lives(process):
    long = choosing(0, n=3, max_tokens=60)
    async with synthetic_engine(config(process=process)) as engine, engine.generate(PROMPT, long) as stream:
        await anext(stream)
        pids = {os.getpid(), getattr(engine._runtime.runner, "pid", os.getpid())}
        for pid in pids:
            files = await open_files(pid)
            assert "socket:" in files or "eventpoll" in files
            assert "chosen" not in files
        # not yet read
        assert len(stream._request.chosen) == 3
        assert all(chosen._rows is not None for chosen in stream._request.chosen)


async def test_results_that_nobody_took_count():
    async with synthetic_engine(config(chosen_positions_nbytes=60 * TOKEN_NBYTES)) as engine:
        used = engine._frontend._chosen
        async with engine.generate(PROMPT, choosing()) as stream:
            await stream._request.done
            # it has ended, and its rows are there yet
            assert used.used == 53 * TOKEN_NBYTES
            second = asyncio.create_task(ask(engine, choosing()))
            free = await engine.complete(PROMPT, SamplingParams(max_tokens=1))
            assert free.finish_reason == "length"
            assert not second.done()
            assert len((await stream.finished()).chosen_positions.array) == 53
            await second
        assert used.used == 0


async def test_results_that_nobody_can_take_any_more_do_not_count():
    async with synthetic_engine(config(chosen_positions_nbytes=60 * TOKEN_NBYTES)) as engine:
        for _ in range(2):
            stream = await TokenStream.open(
                engine._frontend, GenerateRequest(prompt=PROMPT, params=choosing(), streams=True)
            )
            await stream._request.done
            assert engine._frontend._chosen.used == 53 * TOKEN_NBYTES
            del stream
            # the driver's turn that ended it may refer to it
            await asyncio.sleep(0)
            assert engine._frontend._chosen.used == 0


async def failure(engine: Engine) -> str:
    """What the engine fails with; no frame of it is left, which would keep the memory."""
    try:
        await engine.complete(PROMPT, choosing())
    except EngineFailed as failed:
        return str(failed)
    return ""


async def test_rows_that_a_runner_leaves_out_fail_the_engine(monkeypatch):
    monkeypatch.setattr("fdasync.runner.synthetic.steps.LentRows.runs", lambda *_: [])
    engine = synthetic_engine(config())
    await engine.start()
    assert "chosen positions came up to position 0, and 53 were computed" in await failure(engine)
    await engine.aclose()
