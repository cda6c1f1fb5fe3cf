"""What goes wrong on one rank, in virtual time: ranks that answer by hand, late, wrongly, or not at all."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import msgspec
import pytest

from fdasync.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    InvariantBroken,
    RunnerError,
    UnsupportedModel,
    WeightsBroken,
    WeightsDiffer,
    WeightsRejected,
    WorkerDied,
)
from fdasync.events.actions import RunStep, SwapIn, SwapOut
from fdasync.runner.base import CopyOutput, Runner, RunnerLimits, StepOutput
from fdasync.runner.group.errors import of_rank
from fdasync.runner.group.group import GroupRunner
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.runner.synthetic.oracle import SyntheticConfig
from fdasync.testing import run_sim
from tests.support.groups import group_of

LIMITS = RunnerLimits(max_running=4, max_step_tokens=64, block_tokens=4, num_blocks=8)


class ByHand(Runner):
    """Answers when it is told to. `calls`: what was asked of it, in order."""

    config_type = SyntheticConfig

    def __init__(self, limits: RunnerLimits = LIMITS, **capacity: Any) -> None:
        super().__init__(SyntheticConfig(), limits)
        self.calls: list[Any] = []
        self.futures: dict[str, asyncio.Future[Any]] = {}
        self.opens: asyncio.Future[None] | None = None
        self.error: Exception | None = None
        self.closed = 0
        self.capacity = capacity

    async def open(self):
        if self.opens is not None:
            await self.opens
        if self.error is not None:
            raise self.error
        plain = await SyntheticRunner(self.config, self.limits).open()
        return msgspec.structs.replace(plain, block_nbytes=100, **self.capacity)

    async def bind(self, num_blocks, arena, host=None, snapshots=None):
        self.calls.append(("bind", num_blocks, arena, host))

    def launch(self, step):
        return self._begin(f"step {step.step_id}")

    def copy(self, copy):
        return self._begin(f"copy {copy.copy_id}")

    def _begin(self, what):
        self.calls.append(what)
        done = self.futures[what] = asyncio.get_running_loop().create_future()
        return done

    async def load_folder(self, path):
        self.calls.append(path)
        if self.opens is not None:
            await self.opens
        if self.error is not None:
            raise self.error
        return "of rank 0" if self.limits.rank == 0 else ""

    def say(self, step, token):
        self.futures[f"step {step}"].set_result(StepOutput(step, (token,)))

    async def aclose(self):
        self.closed += 1
        for done in self.futures.values():
            done.cancel()
        if self.closed == 1 and self.error is not None:
            raise self.error


class Late(ByHand):
    """Fails as it is cancelled."""

    async def open(self):
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            raise RunnerError("torn down")


async def opened(count: int = 2) -> tuple[GroupRunner, list[ByHand]]:
    group = group_of(ByHand, LIMITS, count)
    await group.open()
    return group, list(group._ranks)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def failure_of(future: asyncio.Future[Any]) -> BaseException:
    await asyncio.wait([future])
    error = future.exception()
    assert error is not None
    return error


def in_virtual_time(test):
    def run() -> None:
        run_sim(test())

    run.__name__ = test.__name__
    return run


@in_virtual_time
async def test_a_step_is_with_all_ranks_before_any_answers_and_its_output_is_rank_0_s():
    group, ranks = await opened(3)
    for step, order in enumerate(((2, 1, 0), (0, 1, 2))):
        done = group.launch(RunStep(step))
        assert [rank.calls[step:] for rank in ranks] == [[f"step {step}"]] * 3
        for rank in order:
            assert not done.done()
            ranks[rank].say(step, rank)
            await turns()
        assert (await done).tokens == (0,)
    await group.aclose()


@in_virtual_time
async def test_ranks_that_answer_at_times_of_their_own_complete_steps_in_order():
    group, ranks = await opened()
    steps = [group.launch(RunStep(number)) for number in range(2)]
    ended = []
    for number, step in enumerate(steps):
        step.add_done_callback(lambda _, number=number: ended.append(number))
    for rank, number in ((1, 0), (1, 1), (0, 0), (0, 1)):
        ranks[rank].say(number, 10 * rank + number)
        await turns()
    assert ended == [0, 1]
    assert [step.result().tokens for step in steps] == [(0,), (1,)]
    await group.aclose()


@in_virtual_time
async def test_a_rank_that_answers_for_another_step_fails_it_by_name():
    group, ranks = await opened()
    done = group.launch(RunStep(5))
    ranks[0].say(5, 1)
    ranks[1].futures["step 5"].set_result(StepOutput(4, ()))
    error = await failure_of(done)
    assert isinstance(error, InvariantBroken)
    assert str(error) == "rank 1 of 2 completed step 4 as step 5"
    await group.aclose()


@in_virtual_time
async def test_a_failed_step_fails_at_once_and_those_before_it_have_a_second():
    group, ranks = await opened()
    loop = asyncio.get_running_loop()
    steps = [group.launch(RunStep(number)) for number in range(4)]
    ranks[1].say(0, 1)
    ranks[1].futures["step 1"].set_exception(RunnerError("no memory", 1))
    await turns()
    # what is before it still ends well
    assert not any(step.done() for step in steps)
    ranks[0].say(0, 7)
    error = await failure_of(steps[1])
    assert steps[0].result().tokens == (7,)
    assert (type(error), error.problem, error.step_id) == (RunnerError, "rank 1 of 2: no memory", 1)
    assert not steps[2].done()
    # whoever waits for the rank that failed may wait for ever
    began = loop.time()
    assert "rank 1 of 2: no memory" in str(await failure_of(steps[2]))
    assert loop.time() - began == pytest.approx(1.0, abs=0.1)
    assert steps[3].done()
    await group.aclose()


@in_virtual_time
async def test_a_close_ends_the_second_that_steps_before_a_failed_one_have():
    group, ranks = await opened()
    steps = [group.launch(RunStep(number)) for number in range(2)]
    ranks[1].futures["step 1"].set_exception(RunnerError("no memory", 1))
    await turns()
    assert group._grace._next is not None
    await group.aclose()
    assert group._grace._next is None
    for step, words in zip(steps, ("it stopped|is closed", "no memory"), strict=True):
        with pytest.raises(RunnerError, match=words):
            await step


@in_virtual_time
async def test_a_copy_out_has_one_writer_for_each_byte():
    for moved, problem in (((100, 100), ""), ((200, 200), "wrote 400 bytes"), ((100, 0), "wrote 100 bytes")):
        group, ranks = await opened()
        done = group.copy(SwapOut(3, (0, 1), (0, 1)))
        for rank, nbytes in zip(ranks, moved, strict=True):
            rank.futures["copy 3"].set_result(CopyOutput(3, nbytes, 0))
        if problem:
            assert problem in str(await failure_of(done))
        else:
            assert await done == CopyOutput(3, 200, 0)
        await group.aclose()


@in_virtual_time
async def test_a_copy_in_moves_whole_blocks_and_fails_with_any_rank():
    group, ranks = await opened()
    good = group.copy(SwapIn(0, (0,), (1,), (), ()))
    bad = group.copy(SwapIn(1, (1,), (2,), (), ()))
    for rank in ranks:
        rank.futures["copy 0"].set_result(CopyOutput(0, 60, 0))
    assert await good == CopyOutput(0, 100, 0)
    # what has ended is no more among what may be late
    assert list(group._copies) == [1]
    ranks[1].futures["copy 1"].set_exception(RunnerError("no such block"))
    assert str(await failure_of(bad)) == str(RunnerError("rank 1 of 2: no such block"))
    await group.aclose()


@in_virtual_time
async def test_capacities_must_agree_but_for_the_blocks():
    def ranks(**other):
        return GroupRunner([ByHand(), ByHand(**other)])

    group = ranks(num_blocks=5, notes=("slow",), weights_id="ff", prefill_tokens_per_s=3.0)
    capacity = await group.open()
    assert (capacity.num_blocks, capacity.weights_id) == (5, f"{1:032x}")
    assert capacity.notes != ("slow",)
    for field, value in (("kv_layout", "other"), ("vocab_size", 7), ("tensor_parallel", 3)):
        with pytest.raises(ConfigError) as caught:
            await ranks(**{field: value}).open()
        assert f"Capacity.{field} of rank 1 of 2 is {value!r}, of rank 0 " in caught.value.problem


@in_virtual_time
async def test_rank_0_alone_gets_the_arena_of_rows():
    group, ranks = await opened()
    arena, host = object(), object()
    await group.bind(6, arena, host)
    assert [rank.calls for rank in ranks] == [[("bind", 6, arena, host)], [("bind", 6, None, host)]]


@in_virtual_time
async def test_an_opening_that_fails_on_one_rank_does_not_wait_for_the_others():
    group = group_of(ByHand, LIMITS, 3)
    ranks = list(group._ranks)
    ranks[0].opens = ranks[2].opens = asyncio.get_running_loop().create_future()
    ranks[1].error = CheckpointError("/models/x", "shard 2 is missing")
    with pytest.raises(CheckpointError) as caught:
        await group.open()
    assert (caught.value.path, caught.value.problem) == ("/models/x", "rank 1 of 3: shard 2 is missing")
    with pytest.raises(CheckpointError):
        await group.aclose()
    assert [rank.closed for rank in ranks] == [1, 1, 1]


@in_virtual_time
async def test_of_ranks_that_fail_at_once_the_first_is_told_and_every_error_is_read():
    loop = asyncio.get_running_loop()
    unread = []
    loop.set_exception_handler(lambda _, context: unread.append(context["message"]))
    group = group_of(ByHand, LIMITS, 5)
    for rank, problem in enumerate(("no room", "no GPU", "no room", None, None)):
        ranked = group._ranks[rank]
        ranked.error = None if problem is None else RunnerError(problem)
        ranked.opens = loop.create_future()
        if rank < 3:
            ranked.opens.set_result(None)
    with pytest.raises(RunnerError) as caught:
        await group.open()
    assert caught.value.problem == "rank 0 of 5: no room"
    assert caught.value.__notes__ == [
        f"and then: RunnerError: {RunnerError('rank 1 of 5: no GPU')}",
        f"and then: RunnerError: {RunnerError('rank 2 of 5: no room')}",
    ]
    # its frames hold the tasks
    del caught, group
    # one that fails as it is cancelled is read, too
    group = GroupRunner([ByHand(), Late()])
    group._ranks[0].error = RunnerError("no room")
    with pytest.raises(RunnerError, match="no room"):
        await group.open()
    await turns()
    del ranked, group
    gc.collect()
    assert unread == []


@in_virtual_time
async def test_an_error_that_holds_for_all_ranks_blames_none():
    for error in (
        ConfigError("tensor_parallel", "3 ranks cannot part the 2 KV heads", hint="works with 1, 2"),
        ConfigError("sum_slices", "is odd"),
        UnsupportedModel("gpt_oss", "there is no plan"),
    ):
        group = group_of(ByHand, LIMITS, 2)
        for ranked in group._ranks:
            ranked.error = error
        with pytest.raises(type(error)) as caught:
            await group.open()
        assert caught.value is error
        assert not hasattr(error, "__notes__")


@in_virtual_time
async def test_a_rank_that_opens_for_ever_is_named_at_the_deadline():
    group = group_of(ByHand, LIMITS, 3)
    group._ranks[1].opens = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(group.open(), 5.0)
    error = group.overdue("starting the runner", 5.0)
    assert isinstance(error, DeadlineExceeded)
    assert "rank 1 of 3: starting the runner (no answer of: 1)" in str(error)


@in_virtual_time
async def test_weights_are_refused_only_by_all_ranks():
    for errors, kind, problem in (
        ((WeightsRejected("bad"), WeightsRejected("bad")), WeightsRejected, "rank 0 of 2: bad"),
        ((None, WeightsRejected("bad")), WeightsBroken, "rank 1 of 2: bad; other ranks have taken them"),
        ((WeightsRejected("bad"), WeightsBroken("torn")), WeightsBroken, "rank 1 of 2: torn"),
    ):
        group, ranks = await opened()
        for rank, error in zip(ranks, errors, strict=True):
            rank.error = error
        with pytest.raises(kind) as caught:
            await group.load_folder("folder")
        assert (type(caught.value), caught.value.problem) == (kind, problem)
    group, ranks = await opened()
    assert await group.load_folder("folder") == "of rank 0"
    assert [rank.calls for rank in ranks] == [["folder"]] * 2


@in_virtual_time
async def test_weights_that_break_on_one_rank_do_not_wait_for_the_others():
    group, ranks = await opened()
    ranks[0].opens = asyncio.get_running_loop().create_future()
    ranks[1].error = WeightsBroken("half of them")
    with pytest.raises(WeightsBroken, match="rank 1 of 2: half of them"):
        await group.load_folder("folder")


@in_virtual_time
async def test_overdue_names_the_ranks_that_have_not_answered():
    group, ranks = await opened(3)
    steps = [group.launch(RunStep(number)) for number in range(2)]
    ranks[0].say(0, 1)
    ranks[2].say(0, 1)
    await turns()
    error = group.overdue("step 0", 3.0)
    assert str(error) == "rank 1 of 3: step 0 (no answer of: 1) did not end within 3 s"
    # the oldest stands for what has no name here
    assert "(no answer of: 1)" in str(group.overdue("the steps in flight at the close", 3.0))
    assert "rank 0 of 3: step 1 (no answer of: 0, 1, 2)" in str(group.overdue("step 1", 3.0))
    # the rank that others wait for is behind
    group._progress = lambda: {"exchanges entered": [4, 3, 4], "steps begun": [2, 2, 1]}
    told = str(group.overdue("step 1", 3.0))
    assert told.startswith(
        "rank 1 of 3: step 1 (no answer of: 0, 1, 2; exchanges entered: 4, 3, 4; steps begun: 2, 2, 1)"
    )
    # where ranks meet on their devices, the one that has not begun what others have
    group._progress = lambda: {"exchanges entered": [4, 4, 4], "steps begun": [2, 2, 1]}
    assert str(group.overdue("step 1", 3.0)).startswith("rank 2 of 3: step 1")
    group._stopped = lambda: [0]
    told = str(group.overdue("step 1", 3.0))
    assert told.startswith("rank 0 of 3: step 1 (")
    assert "; stopped: 0)" in told
    await group.aclose()
    assert all(step.done() for step in steps)
    assert str(group.overdue("nothing", 3.0)) == str(DeadlineExceeded("nothing", 3.0))


@in_virtual_time
async def test_a_rank_that_dies_idle_is_told_once_and_not_after_the_close():
    group, ranks = await opened()
    told = []
    group.on_failure = told.append
    ranks[1].on_failure(WorkerDied("some (rank 1 of 2)", 77, -9))
    ranks[0].on_failure(ValueError("odd"))
    assert [str(error) for error in told] == [
        str(WorkerDied("some (rank 1 of 2)", 77, -9)),
        str(RunnerError("rank 0 of 2: ValueError: odd")),
    ]
    await group.aclose()
    ranks[0].on_failure(ValueError("late"))
    assert len(told) == 2


@in_virtual_time
async def test_closing_closes_all_ranks_and_ends_what_is_open():
    group, ranks = await opened(3)
    step, copy = group.launch(RunStep(0)), group.copy(SwapOut(0, (0,), (0,)))
    ranks[1].error = RunnerError("cannot let go")
    ranks[2].error = RunnerError("nor can I")
    with pytest.raises(RunnerError, match="rank 1 of 3: cannot let go") as caught:
        await group.aclose()
    assert caught.value.__notes__ == [f"and then: RunnerError: {RunnerError('rank 2 of 3: nor can I')}"]
    assert [rank.closed for rank in ranks] == [1, 1, 1]
    for future in (step, copy):
        assert isinstance(await failure_of(future), RunnerError)
    await group.aclose()


def test_errors_keep_their_class_where_they_have_words():
    named = of_rank(ConfigError("runner_config.x", "is odd", limit=3, hint="leave it"), 1, 2)
    assert isinstance(named, ConfigError)
    assert (named.field, named.problem, named.limit, named.hint) == (
        "runner_config.x",
        "rank 1 of 2: is odd",
        3,
        "leave it",
    )
    assert of_rank(named, 1, 2) is named
    assert str(of_rank(InvariantBroken("rule", ["a", "b"]), 0, 2)).startswith("rank 0 of 2: rule\n  a")
    assert isinstance(of_rank(WeightsDiffer("a", "b"), 0, 2), RunnerError)
    assert "rank 0 of 2: KeyError" in str(of_rank(KeyError("x"), 0, 2))
