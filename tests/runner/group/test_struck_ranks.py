"""Each rank of a group killed or stopped at each moment of an engine's life: the error names that rank, in time.

Real processes. A part of the product that has every rank, and every signal at every moment, is in the fast suite.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from fdasync import Engine, SamplingParams
from fdasync.errors import EngineFailed, WorkerDied, WorkerStuck
from fdasync.testing import check_sample, oracle_of, synthetic_config
from fdasync.testing.harness.engines import until
from fdasync.testing.harness.leaks import children, no_leaks
from fdasync.testing.harness.processes import stop_process
from tests.support import skips

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    # makes an engine meet its moment: (engine, strike) -> the failure
    Moment = Callable[[Engine, Callable[[], None]], Awaitable[BaseException]]

pytestmark = pytest.mark.usefixtures("forked_children")

# of what waits for a rank that is stopped: start, update, step; its time is skipped
DEADLINE_S = skips.LIMIT_S
# no death waits for a deadline
FAR_S = 86_400.0
# for a machine with other work
SPARE_S = 120.0

PROMPT = list(range(1, 11))
LONG = SamplingParams(max_tokens=200, temperature=0.0)
STRIKES = [f"{rank} of {ranks}" for ranks in (2, 4) for rank in range(ranks)]
SIGNALS = ["SIGKILL", "SIGSTOP"]
MOMENTS = ["start", "folder", "memory", "serving"]
# a group of four takes seconds to start, unless it is struck by then
_FAST = [
    ("0 of 4", "SIGKILL", "start"), ("3 of 4", "SIGSTOP", "start"), ("1 of 2", "SIGKILL", "folder"),
    ("0 of 2", "SIGSTOP", "folder"), ("2 of 4", "SIGKILL", "memory"), ("1 of 2", "SIGSTOP", "memory"),
    ("0 of 2", "SIGKILL", "serving"), ("1 of 4", "SIGSTOP", "serving"),
]  # fmt: skip


def config_of(ranks: int, moment: str, how: str):
    limits = dict.fromkeys(("start_deadline_s", "update_deadline_s", "step_deadline_s"), FAR_S)
    if how == "SIGSTOP":
        limits[{"start": "start", "serving": "step"}.get(moment, "update") + "_deadline_s"] = DEADLINE_S
    # no load ends before the strike
    own = {"kv_shares": 2, "step_s": 0.002, "load_s": FAR_S}
    return synthetic_config(own, process="worker", tensor_parallel=ranks, request_deadline_s=1e9, **limits)


def pids_of(engine: Engine) -> tuple[int, ...]:
    runner = engine._runtime.runner
    return () if runner is None else runner.pids


async def at_start(engine: Engine, strike: Callable[[], None]) -> BaseException:
    starting = asyncio.ensure_future(engine.start())
    try:
        await until(lambda: len(pids_of(engine)) > 1 and min(pids_of(engine)) > 0, SPARE_S, 0.001)
        strike()
        with pytest.raises((WorkerDied, WorkerStuck)) as caught:
            await starting
    finally:
        starting.cancel()
        await engine.aclose()
    return caught.value


def in_update(source, asked: str) -> Moment:
    """Of new weights, while the ranks are asked for this."""

    async def meet(engine: Engine, strike: Callable[[], None]) -> BaseException:
        with pytest.raises(EngineFailed):  # noqa: PT012 - it ends the engine
            async with engine:
                updating = asyncio.ensure_future(engine.update_weights(2, source))
                runner = engine._runtime.runner
                await until(lambda: runner._asked.what == asked and len(runner._asked.left) > 1, SPARE_S, 0.001)
                strike()
                with pytest.raises(EngineFailed) as caught:
                    await updating
                raise caught.value
        return caught.value.cause

    return meet


async def at_serving(engine: Engine, strike: Callable[[], None]) -> BaseException:
    with pytest.raises(EngineFailed) as caught:  # noqa: PT012 - it ends the engine
        async with engine, engine.generate(PROMPT, LONG) as stream:
            struck = False
            async for _ in stream:
                if not struck:
                    strike()
                    struck = True
    for sample in caught.value.partial.samples:
        check_sample(sample, PROMPT, LONG, oracle_of(engine.config))
    return caught.value.cause


@pytest.fixture
def moments(tmp_path: Path) -> dict[str, Moment]:
    (tmp_path / "weights.json").write_text(json.dumps({"weights_id": 9}))
    tensors = [("weights", "uint64", (1,), (9).to_bytes(8, "little"))]
    return {
        "start": at_start, "folder": in_update(tmp_path, "loading a folder"),
        "memory": in_update(tensors, "ending an update"), "serving": at_serving,
    }  # fmt: skip


@pytest.mark.ci(after=1)
@pytest.mark.skips
@pytest.mark.parametrize(
    ("struck", "how", "moment"),
    [
        pytest.param(*cell, id="-".join(cell).replace(" ", "_"), marks=[] if cell in _FAST else pytest.mark.nightly)
        for cell in itertools.product(STRIKES, SIGNALS, MOMENTS)
    ],
)
async def test_a_struck_rank_is_named_and_nothing_is_left(
    struck: str, how: str, moment: str, moments: dict[str, Moment]
) -> None:
    rank, ranks = map(int, struck.split(" of "))
    loop: Any = asyncio.get_running_loop()
    strikes: list[tuple[int, float]] = []
    with no_leaks():
        engine = Engine(config_of(ranks, moment, how))
        step_stands = skips.blocked_steps(engine)

        def strike() -> None:
            pids = pids_of(engine)
            assert set(pids) == set(children())
            strikes.append((pids[rank], loop.time()))
            if how == "SIGSTOP":
                stop_process(pids[rank])
            else:
                os.kill(pids[rank], signal.SIGKILL)

        def stands() -> bool:
            if not strikes or how == "SIGKILL":
                return False
            if moment == "serving":
                # what lay unread when the rank was stopped may end a step, and begin another one
                return step_stands()
            return not loop.skipped_s

        failing = asyncio.ensure_future(moments[moment](engine, strike))
        await skips.go_on(failing.done, stands)
        error = await failing
        ((pid, at),) = strikes
        took_s = loop.time() - at - loop.skipped_s
        assert children() == []
    name = f"synthetic worker (rank {rank} of {ranks})"
    if how == "SIGKILL":
        assert isinstance(error, WorkerDied)
        assert (error.pid, error.exit_status) == (pid, -signal.SIGKILL), str(error)
    else:
        assert isinstance(error, WorkerStuck)
        assert (error.pid, error.name, error.deadline_s) == (pid, name, DEADLINE_S), str(error)
        assert f"stopped: {rank})" in error.what
        assert "exchanges entered: " in error.what
    assert name in str(error)
    assert engine.state == "failed"
    assert took_s < SPARE_S


def test_the_fast_part_has_each_rank_and_each_signal_at_each_moment() -> None:
    assert {struck for struck, _, _ in _FAST} == set(STRIKES)
    assert {cell[1:] for cell in _FAST} == set(itertools.product(SIGNALS, MOMENTS))
