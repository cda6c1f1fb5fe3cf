"""The model of passes where a sequence goes from one instance to another, held against what runners wrote."""

from __future__ import annotations

from contextlib import AsyncExitStack
from random import Random

import pytest

from fdasync.runner.base import RunnerLimits
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.runner.synthetic.oracle import SyntheticConfig
from fdasync.testing import FaultRunner, PassModel, on_bench, run_sim
from fdasync.testing.runners.bench import noisy

SIZE = 16
BASES = (0, 1000)
LIMITS = RunnerLimits(max_running=4, max_step_tokens=256, block_tokens=SIZE, num_blocks=24, pipeline_depth=2)


def instance(base):
    """A model of passes, and a bench whose runner feeds it."""
    model = PassModel(SIZE, SyntheticConfig().weights_id, base)
    inner = SyntheticRunner(SyntheticConfig(pass_stamp=True, stamp_base=base), LIMITS)
    runner = FaultRunner(inner, Random(1), on_launch=model.launched, on_copied=model.copied)
    return model, on_bench(runner, host_blocks=4)


def test_a_step_that_yields_a_run_is_the_pass_of_all_its_positions():
    async def main():
        model = PassModel(SIZE, SyntheticConfig().weights_id, runs=True)
        inner = SyntheticRunner(SyntheticConfig(pass_stamp=True, max_run_tokens=4), LIMITS)
        done = lambda output: model.done(output.step_id, output.counts)  # noqa: E731
        async with on_bench(FaultRunner(inner, Random(1), on_launch=model.launched, on_done=done)) as on:
            prompt = on.prompt(5)
            await on.launch_prefill(on.start(1, prompt, [2, 3], sampler=noisy(2)))
            counts = [(await on.launch()).counts for _ in range(3)]
            number = sum(count for (count,) in counts)
            return model.stamps[2, 0], counts, stamps_of(on, [2, 3], len(prompt) + number)

    stamps, counts, rows = run_sim(main())
    assert sum(counts, ()) != (1, 1, 1)
    assert stamps == rows == [0] * 5 + [step for step, (count,) in enumerate(counts, 1) for _ in range(count)]


def stamps_of(on, blocks, count):
    return on.rows(blocks, 0, count)["stamp"][:, 0].tolist()


async def hand_over(one, other, theirs, ours, prompt, rows_of):
    """Send the blocks of a prompt through the host tiers of two instances; `rows_of` tells what counts of each."""
    (sent, sender), (model, receiver) = one, other
    used = -(-len(prompt) // SIZE)
    rows = sender.rows(theirs, 0, len(prompt))
    await sender.swap_out(theirs[:used], [2, 0, 3][:used])
    receiver.receive([sender.host.kv[place] for place in [2, 0, 3][:used]], rows, len(prompt), [1, 3, 0][:used])
    for number, (place, host) in enumerate(zip([2, 0, 3][:used], [1, 3, 0][:used], strict=True)):
        model.received(sent, place, host, rows_of(number))
    await receiver.swap_in([1, 3, 0][:used], ours[:used])


def test_the_stamps_of_a_sequence_that_another_instance_began_are_of_both():
    """Its prompt's are of the one, whichever sequence computed them there; what came after is the other's."""

    async def main():
        async with AsyncExitStack() as stack:
            models, benches = zip(*[instance(base) for base in BASES], strict=True)
            one, other = [await stack.enter_async_context(bench) for bench in benches]
            prompt = one.prompt(2 * SIZE + 5)
            # another one computed the first block
            await one.answer(0, prompt[: SIZE + 2], 1, [0, 5], sampler=noisy(1))
            first = await one.launch_prefill(one.start(1, prompt, [0, 1, 2], cached=SIZE, sampler=noisy(2)))
            await one.step()
            rows_of = [SIZE, SIZE, 5].__getitem__
            await hand_over((models[0], one), (models[1], other), [0, 1, 2], [7, 4, 9], prompt, rows_of)
            known = [*prompt, first.tokens[0]]
            start = other.start(3, known, [7, 4, 9], cached=len(prompt), prompt_len=len(prompt), sampler=noisy(2))
            await other.launch_prefill(start)
            await other.decode(3, len(known), [7, 4, 9], 3)
            return models, stamps_of(other, [7, 4, 9], len(known) + 3)

    (began, went_on), rows = run_sim(main())
    assert began.stamps[2, 0][: SIZE + 1] == [0] * SIZE + [2]
    assert went_on.stamps[2, 0] == rows == [0] * SIZE + [2] * (SIZE + 5) + [1000, 1001, 1002, 1003]
    assert went_on.read[2, 0] == {(1, 0), (2, 0)}
    assert went_on.cached[2, 0] == 2 * SIZE + 5


@pytest.mark.parametrize(("counted", "problem"), [(4, "that no step computed"), (7, "not all of them computed")])
def test_the_model_tells_when_too_little_or_too_much_of_a_tail_was_sent(counted, problem):
    async def main():
        async with AsyncExitStack() as stack:
            models, benches = zip(*[instance(base) for base in BASES], strict=True)
            one, other = [await stack.enter_async_context(bench) for bench in benches]
            prompt = one.prompt(5)
            await one.launch_prefill(one.start(1, prompt, [2], sampler=noisy(2)))
            await hand_over((models[0], one), (models[1], other), [2], [7], prompt, lambda _: counted)
            await other.launch_prefill(other.start(3, [*prompt, 1], [7], cached=5, sampler=noisy(2)))

    with pytest.raises(AssertionError, match=problem):
        run_sim(main())
