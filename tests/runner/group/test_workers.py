"""A group of two worker processes: the same answers as one, and every way for one of them to go wrong."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import numpy as np
import pytest

from fdasync import Engine, SamplingParams
from fdasync.errors import (
    BadInput,
    ConfigError,
    EngineFailed,
    RunnerError,
    WeightsBroken,
    WeightsRejected,
    WorkerDied,
    WorkerStuck,
)
from fdasync.runner.base import RunnerLimits, TensorMeta
from fdasync.runner.group.workers import WorkerGroup
from fdasync.testing import check_idle, check_sample, oracle_of, synthetic_config
from fdasync.testing.harness.leaks import children, no_leaks
from fdasync.testing.harness.processes import stop_process
from tests.support import skips
from tests.support.plugins import install_runners

pytestmark = pytest.mark.usefixtures("forked_children")

PROMPT = list(range(1, 11))
LONG = SamplingParams(max_tokens=200, temperature=0.0)
LIMITS = RunnerLimits(max_running=4, max_step_tokens=64, num_blocks=8, block_tokens=16, tensor_parallel=2)


def config_of(runner=None, ranks=2, **values):
    own = {"kv_shares": 2, "step_s": 0.002, **(runner or {})}
    return synthetic_config(own, process="worker", tensor_parallel=ranks, **values)


async def fails(config, strike, stands=lambda _: False):
    """Strike in the middle of two requests; both must be told, within seconds. Returns the cause.

    `stands(runner)` says that only time will end this: the clock is moved on.
    """
    with no_leaks():
        async with Engine(config) as engine:
            pids = engine._runtime.runner.pids
            assert set(children()) == set(pids)
            causes = []

            async def ask(ready):
                with pytest.raises(EngineFailed) as caught:  # noqa: PT012
                    async with engine.generate(PROMPT, LONG) as stream:
                        async for _ in stream:
                            ready.set()
                for sample in caught.value.partial.samples:
                    check_sample(sample, PROMPT, LONG, oracle_of(config))
                causes.append(caught.value.cause)

            # time may be skipped
            async with asyncio.timeout(1e9), asyncio.TaskGroup() as group:
                ready = [asyncio.Event(), asyncio.Event()]
                for event in ready:
                    group.create_task(ask(event))
                for event in ready:
                    await event.wait()
                strike(pids)
                await skips.go_on(
                    lambda: engine._failure is not None,
                    lambda: stands(engine._runtime.runner),
                )
        assert engine.state == "failed"
        assert children() == []
    assert causes[0] is causes[1]
    return causes[0], pids


@pytest.mark.ci
@pytest.mark.parametrize(("ranks", "shares"), [(2, 2), (2, 1), (4, 2), (8, 1)])
async def test_a_group_answers_as_one_runner_does_through_swaps(ranks, shares):
    config = config_of({"num_blocks": 24, "max_context_tokens": 96, "kv_shares": shares}, ranks, host_blocks=40)
    params = SamplingParams(max_tokens=25, seed=5, n=2)
    async with Engine(config) as engine:
        assert engine.facts().tensor_parallel == ranks
        prompts = [[token % 9 for token in range(number, number + 4 + number)] for number in range(12)]
        results = await asyncio.gather(*[engine.complete(prompt, params) for prompt in prompts])
        for prompt, result in zip(prompts, results, strict=True):
            for sample in result.samples:
                check_sample(sample, prompt, params, oracle_of(config))
        stats = engine.stats().scheduler
        # every rank has begun every step, and says so where the engine's process sees it
        assert engine._runtime.runner._progress()["steps begun"] == [stats.steps] * ranks
        assert stats.preemptions > 0
        assert stats.swapped_in_blocks > 0
        check_idle(engine)


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_dies_idle_fails_the_engine_before_anybody_asks(rank):
    with no_leaks():
        engine = Engine(config_of())
        with pytest.raises(EngineFailed) as caught:  # noqa: PT012
            async with engine:
                pids = engine._runtime.runner.pids
                os.kill(pids[rank], signal.SIGKILL)
                async with asyncio.timeout(300), engine.bus.subscribe() as events:
                    async for _ in events:
                        pass
        assert caught.value.cause.pid == pids[rank]
        assert children() == []


# -- starts that fail -----------------------------------------------------------------------------------


async def test_a_key_that_the_runner_does_not_know_is_named():
    with no_leaks(), pytest.raises(ConfigError) as caught:
        await Engine(config_of({"bogus_key": 1})).start()
    assert caught.value.field == "runner_config.bogus_key"
    assert children() == []


async def test_shares_that_the_ranks_cannot_divide_are_refused():
    with pytest.raises(ConfigError, match="2 ranks cannot divide the 3 shares"):
        await Engine(config_of({"kv_shares": 3, "pass_stamp": True}, block_tokens=2)).start()


_PLUGIN = """
    import asyncio, os
    import msgspec
    from fdasync.errors import WeightsBroken, WeightsRejected
    from fdasync.runner.base import Runner, StepOutput
    from fdasync.runner.synthetic import SyntheticRunner

    class Alone(SyntheticRunner):
        join = Runner.join

    class Unlike(SyntheticRunner):
        # each rank answers another size
        async def open(self):
            capacity = await super().open()
            return msgspec.structs.replace(capacity, vocab_size=capacity.vocab_size + self.limits.rank)

    class Deaf(SyntheticRunner):
        # rank 1 never opens
        async def open(self):
            if self.limits.rank:
                await asyncio.Event().wait()
            return await super().open()

    class Forgets(SyntheticRunner):
        # answers one process, whatever is asked
        async def open(self):
            return msgspec.structs.replace(await super().open(), tensor_parallel=1)

    class Astray(SyntheticRunner):
        # rank 1 samples other tokens from step 5 on
        def _compute(self, batch):
            output, rows = super()._compute(batch)
            if self.limits.rank and batch.step_id >= 5:
                output = StepOutput(output.step_id, tuple([token + 1 for token in output.tokens]))
            return output, rows

    class Skips(SyntheticRunner):
        # rank 1 takes no part in step 5 and those behind it: where one is in flight, it would meet the step 5 of rank 0
        def launch(self, step):
            if self.limits.rank and step.step_id >= 5:
                exchange, self._exchange = self._exchange, None
                try:
                    return super().launch(step)
                finally:
                    self._exchange = exchange
            return super().launch(step)

    class Refuses(SyntheticRunner):
        async def begin_tensors(self, tensors):
            if self.limits.rank:
                raise WeightsRejected("not mine")
            await super().begin_tensors(tensors)

    class Breaks(SyntheticRunner):
        async def write_tensor(self, number, offset_nbytes, data):
            if self.limits.rank:
                raise WeightsBroken("a torn piece")
            await super().write_tensor(number, offset_nbytes, data)
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    kinds = ("Alone", "Unlike", "Deaf", "Forgets", "Astray", "Skips", "Refuses", "Breaks")
    install_runners(tmp_path, monkeypatch, _PLUGIN, {kind.lower(): f"fdasync_bad:{kind}" for kind in kinds})


@pytest.mark.ci(after=1)
@pytest.mark.skips
@pytest.mark.parametrize(
    ("runner", "kind", "words"),
    [
        ("alone", ConfigError, "Alone computes in one process, not in 2"),
        ("unlike", ConfigError, "Capacity.vocab_size of rank 1 of 2 is 101, of rank 0 100"),
        ("forgets", ConfigError, "is 2, and runner 'forgets' answers 1"),
        ("deaf", WorkerStuck, r"deaf worker \(rank 1 of 2\).*starting the runner \(no answer of: 1"),
    ],
)
async def test_a_group_that_cannot_start_says_which_rank_and_why(plugin, runner, kind, words):
    config = msgspec.structs.replace(config_of(), runner=runner, start_deadline_s=skips.LIMIT_S)
    loop = asyncio.get_running_loop()

    def stands():
        asked = engine._runtime and engine._runtime.runner and engine._runtime.runner._asked
        return runner == "deaf" and asked and asked.left == {1} and not loop.skipped_s

    with no_leaks():
        engine = Engine(config)
        starting = asyncio.ensure_future(engine.start())
        await skips.go_on(starting.done, stands)
        with pytest.raises(kind, match=words):
            await starting
        assert children() == []


@pytest.mark.ci
async def test_a_rank_that_samples_other_tokens_fails_the_step(plugin):
    cause, _ = await fails(msgspec.structs.replace(config_of(), runner="astray"), lambda _: None)
    assert isinstance(cause, RunnerError)
    assert "rank 1 of 2 sampled other tokens than rank 0" in str(cause)
    assert cause.step_id == 5


@pytest.mark.ci(after=1)
@pytest.mark.skips
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_rank_that_skips_exchanges_is_named_at_the_step_deadline(plugin, depth):
    config = msgspec.structs.replace(config_of(), runner="skips", pipeline_depth=depth, step_deadline_s=skips.LIMIT_S)
    config = msgspec.structs.replace(config, request_deadline_s=1e9)

    def stands(runner):
        # rank 1 has answered without rank 0, which waits for it, there or in the step before
        return any(call.what == "step 5" and call.left == {0} for call in runner._steps)

    cause, pids = await fails(config, lambda _: None, stands)
    # rank 0 is the one without an answer
    assert isinstance(cause, WorkerStuck)
    assert cause.pid == pids[1], str(cause)
    assert "no answer of: 0" in cause.what


# -- new weights ----------------------------------------------------------------------------------------


async def opened(runner="synthetic", **config):
    group = WorkerGroup(runner, config, LIMITS, close_deadline_s=120.0, exchange_deadline_s=300.0, chunk_nbytes=4096)
    await group.open()
    await group.bind(8, None)
    return group


TENSOR = TensorMeta("weights", "uint64", (1,))


async def test_tensors_go_to_all_ranks_through_the_same_chunks():
    with no_leaks():
        group = await opened()
        try:
            for number in (7, 9):
                await group.begin_tensors([TENSOR])
                await group.write_tensor(0, 0, memoryview(np.array([number], np.uint64)).cast("B"))
                await group.end_tensors()
                assert not group._transfer.is_open
                # of each rank
                told = [await worker.fingerprint_weights() for worker in group._workers]
                assert {one.weights_id for one in told} == {f"{number:032x}"}
            with pytest.raises(WeightsRejected, match="rank 0 of 2"):
                await group.begin_tensors([TENSOR, TENSOR])
            assert not group._transfer.is_open
            # a close in the middle of an update ends it
            await group.begin_tensors([TENSOR])
        finally:
            await group.aclose()
            await group.aclose()
        assert not group._transfer.is_open
        assert children() == []


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(
    ("runner", "words"),
    [("refuses", "rank 1 of 2: not mine; other ranks have taken them"), ("breaks", "rank 1 of 2: a torn piece")],
)
async def test_one_rank_ends_an_update_of_all(plugin, runner, words):
    with no_leaks():
        group = await opened(runner)
        try:
            with pytest.raises(WeightsBroken) as caught:  # noqa: PT012
                await group.begin_tensors([TENSOR])
                await group.write_tensor(0, 0, memoryview(bytes(8)))
                await group.end_tensors()
            assert caught.value.problem == words
        finally:
            await group.aclose()


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_that_is_lost_in_an_update_ends_it(way):
    with no_leaks():
        group = await opened()
        try:
            await group.begin_tensors([TENSOR])
            if way == signal.SIGKILL:
                os.kill(group.pids[1], way)
                with pytest.raises(WorkerDied, match="rank 1 of 2"):  # noqa: PT012
                    await group.write_tensor(0, 0, memoryview(bytes(8)))
                    await group.end_tensors()
            else:
                stop_process(group.pids[1])
                await group.write_tensor(0, 0, memoryview(bytes(8)))
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(group.end_tensors(), 0.5)
        finally:
            async with asyncio.timeout(300):
                await group.aclose()
        assert children() == []


def test_bad_configurations_are_refused_with_a_hint():
    for values, field in (
        ({"process": "inline"}, "config.process"),
        ({"numerics": "fixed"}, "config.sum_slices"),
        ({"numerics": "fixed", "sum_slices": 4, "tensor_parallel": 8}, "config.sum_slices"),
        ({"sum_slices": 4}, "config.sum_slices"),
    ):
        with pytest.raises(ConfigError) as caught:
            synthetic_config(**{"process": "worker", "tensor_parallel": 2, **values}).validate()
        assert caught.value.field == field
        assert caught.value.hint
    for ranks in (0, 9, -1):
        with pytest.raises(BadInput, match="1 to 8"):
            synthetic_config(process="worker", tensor_parallel=ranks).validate()
