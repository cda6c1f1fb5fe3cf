"""Faults of runners and transports strike where they should, and delays keep the order."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from fdasync.errors import RunnerError, WorkerDied
from fdasync.runner.base import RunnerLimits
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.runner.synthetic.oracle import SyntheticConfig
from fdasync.testing import FaultRunner, PassModel, StepFault, on_bench, run_sim
from fdasync.testing.pytest_plugin import all_strike
from fdasync.testing.runners.bench import noisy

# -- edges --------------------------------------------------------------------------------------------


def _edge(**options) -> FaultRunner:
    config = SyntheticConfig(step_s=0.01)
    limits = RunnerLimits(max_running=4, max_step_tokens=64, num_blocks=16)
    return FaultRunner(SyntheticRunner(config, limits), Random(1), **options)


@pytest.mark.parametrize("kind", ["fail", "hang", "die"])
def test_a_fault_strikes_at_its_step(kind):
    async def main():
        faults = _edge(fault=StepFault(kind, 2), max_delay_s=1.0)
        async with on_bench(faults) as on:
            first = on.launch_prefill(on.start(0, on.prompt(5), [0]))
            await first
            before = on.launch()
            with pytest.raises(AssertionError, match=f"fault '{kind}' of step 2 never struck: the last was step 1"):
                faults.assert_struck()
            struck = on.launch()
            faults.assert_struck()
            await asyncio.wait([before, struck], timeout=100.0)
            if kind == "hang":
                assert before.exception() is None
                assert not struck.done()
            elif kind == "fail":
                assert before.exception() is None
                assert isinstance(struck.exception(), RunnerError)
            else:
                assert isinstance(before.exception(), WorkerDied), "it was in flight"
                assert isinstance(struck.exception(), WorkerDied)
            after = on.launch()
            await asyncio.wait([after], timeout=100.0)
            assert after.done() == (kind != "hang")
            _ = kind == "hang" or after.exception()

    run_sim(main())


def test_a_test_whose_fault_never_struck_fails_at_its_end():
    def play(steps):
        async def main(watch):
            faults = watch(_edge(fault=StepFault("fail", 1)))
            async with on_bench(faults) as on:
                await asyncio.wait([on.launch() for _ in range(steps)])

        with all_strike() as watch:
            run_sim(main(watch))

    play(2)
    with pytest.raises(AssertionError, match="fault 'fail' of step 1 never struck: the last was step 0"):
        play(1)


def test_a_test_that_fails_for_another_reason_is_told_that_reason():
    with pytest.raises(ZeroDivisionError), all_strike() as watch:
        _ = len(watch(_edge()).launched) / 0


def test_what_died_by_hand_was_struck_by_no_fault():
    async def main():
        for fault in (None, StepFault("die", 7)):
            faults = _edge(fault=fault)
            async with on_bench(faults):
                faults.die()
                assert faults.broken
                with pytest.raises(AssertionError, match="there was no step" if fault else "no fault was injected"):
                    faults.assert_struck()

    run_sim(main())


def test_delayed_steps_delay_and_keep_the_order():
    async def main():
        loop = asyncio.get_running_loop()
        faults = _edge(max_delay_s=1.0)
        async with on_bench(faults) as on:
            await on.launch_prefill(on.start(0, on.prompt(3), [0]))
            ended = []
            pending = [on.launch() for _ in range(10)]
            for future in pending:
                future.add_done_callback(lambda done: ended.append((done.result().step_id, loop.time())))
            await asyncio.wait(pending)
            return ended

    ended = run_sim(main())
    assert [step_id for step_id, _ in ended] == list(range(1, 11))
    assert ended[-1][1] > 0.2, "nothing was delayed"
    assert run_sim(main()) == ended, "the seed does not give the same delays"


def test_delayed_steps_keep_the_order_where_timers_do_not():
    async def main():
        loop = asyncio.get_running_loop()
        faults = _edge(max_delay_s=1.0)
        async with on_bench(faults) as on:
            await on.launch_prefill(on.start(0, on.prompt(3), [0]))
            # the later a timer is due, the sooner it fires; a real loop exchanges those that are close
            at = loop.call_at
            loop.call_at = lambda when, *call: at(100.0 - when, *call)
            ended = []
            pending = [on.launch() for _ in range(5)]
            for future in pending:
                future.add_done_callback(lambda done: ended.append(done.result().step_id))
            await asyncio.wait(pending)
            del loop.call_at
            return ended

    assert run_sim(main()) == [1, 2, 3, 4, 5]


def test_pass_model_takes_the_first_pass_and_the_stamp_of_hits():
    async def main():
        model = PassModel(16)
        async with on_bench(_edge(on_launch=model.launched)) as on:
            prompt = on.prompt(20)
            await on.answer(0, prompt, 2, [0, 1], sampler=noisy(1))
            # steps 0 and 1 computed it, 2 let it leave; step 3 reads block 0 and computes the rest
            await on.launch_prefill(on.start(1, prompt, [0, 5], cached=16, sampler=noisy(2)))
            # preempted and resumed: what it has stays
            await on.leave(1)
            await on.launch_prefill(on.start(1, [*prompt, 1], [7, 8], sampler=noisy(2)))
            return model

    model = run_sim(main())
    stamps = model.stamps
    assert model.read == {(1, 0): set(), (2, 0): {(1, 0)}}
    assert stamps[1, 0] == [0] * 20 + [1]
    assert stamps[2, 0] == [0] * 16 + [3] * 4 + [5]
