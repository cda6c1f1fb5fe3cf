"""Engines under random calls of everything that begins, stops and ends: no hang, no leak, no error without a type.

Each round is drawn from its seed: an engine with small limits; callers that complete, stream, pause, resume, update,
abort, drain and close; some of them cancelled; a loop that is blocked past deadlines; sometimes every task of the loop
cancelled. A round that fails names its seed: `play(seed)` plays it again, as far as real time allows.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from random import Random
from typing import get_args

import pytest
import uvloop

from fdasync import Engine, PauseMode, SamplingParams
from fdasync.errors import (
    DeadlineExceeded,
    DuplicateRequestId,
    EngineClosed,
    EngineFailed,
    TaskCancelled,
    UpdateUnderWay,
    WeightsRejected,
)
from fdasync.testing import LetterTokenizer, check_idle, check_sample, no_leaks, oracle_of, synthetic_config, until
from tests.support.helpers import hold_up

# what a caller may be told when others stop, close or update the engine
_EXPECTED = (EngineClosed, EngineFailed, UpdateUnderWay, DeadlineExceeded, DuplicateRequestId, WeightsRejected)
_ENDS = ("stop", "length", "abort", "deadline")
_HANG_S = 300.0
_RESUME_S = 0.3
# shorter than what a loop is blocked for; of a runner in this process, which is late where the loop is
_STEP_DEADLINE_S = 0.08
_BLOCKED_S = 0.1


class Round:
    """One engine and its callers.

    Attributes:
        outcomes: how each call ended, counted.
        killed: everything was cancelled, so the engine may have failed.
        updated: weights changed, or may have.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.killed = self.updated = False
        self._versions = itertools.count(1)
        tiers = {"host_blocks": rng.choice([2, 20])} if rng.random() < 0.4 else {}
        if tiers and rng.random() < 0.5:
            tiers["store"] = "memory"
        num_blocks, block_tokens = rng.choice([12, 20, 64]), rng.choice([4, 8])
        self._room_tokens = num_blocks * block_tokens
        options = {
            "max_requests": rng.choice([8, 40]),
            "pipeline_depth": rng.choice([1, 2]),
            "process": "worker" if rng.random() < 0.1 else "inline",
        }
        brief = rng.random() < 0.3 and options["process"] == "inline"
        self.config = synthetic_config(
            {
                "num_blocks": num_blocks,
                "block_tokens": block_tokens,
                "step_s": rng.choice([0, 0.001]),
                "load_s": rng.choice([0, 0.005]),
            },
            **options,
            step_deadline_s=_STEP_DEADLINE_S if brief else 300.0,
            trace_turns=0,
            close_deadline_s=300.0,
            **tiers,
        )

    async def play(self) -> None:
        rng = self.rng
        engine = Engine(self.config, tokenizer=LetterTokenizer())
        if not await self._start(engine):
            return
        callers = []
        for _ in range(rng.randrange(5, 40)):
            callers.append(asyncio.create_task(self._call(engine), name="caller"))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice([0, 0, 0.001, 0.005]))
            if rng.random() < 0.2:
                rng.choice(callers).cancel()
            if rng.random() < 0.02:
                hold_up(_BLOCKED_S)
        if rng.random() < 0.06:
            self.killed = True
            # every task of the loop but some callers', who must be told
            spared = {asyncio.current_task(), *rng.sample(callers, len(callers) // 2)}
            for task in asyncio.all_tasks() - spared:
                task.cancel()
        elif rng.random() < 0.5:
            await engine.aclose()
        until_s = time.monotonic() + _HANG_S
        # a caller's pause may come after any resume
        while not all(caller.done() for caller in callers) and time.monotonic() < until_s:
            if engine.state in ("running", "draining"):
                await self._tell("resume", engine.resume())
            await asyncio.wait(callers, timeout=_RESUME_S)
        hung = [caller for caller in callers if not caller.done()]
        assert not hung, f"{len(hung)} callers hang, the engine is {engine.state}"
        for caller in callers:
            if not caller.cancelled():
                caller.result()
        if engine.state == "running":
            # the last pause may have been the last call; steps and copies that nobody waits for end by themselves
            await self._tell("resume", engine.resume())
            await until(lambda: is_quiet(engine))
            check_idle(engine)
        await asyncio.wait_for(engine.aclose(), _HANG_S)
        failed = engine._failure
        assert failed is None or (self.killed and isinstance(failed, TaskCancelled)), f"the engine failed: {failed!r}"
        assert engine.state == ("closed" if failed is None else "failed")
        frontend = engine._frontend
        assert (frontend.num_live, frontend.num_waiting, frontend.requests()) == (0, 0, [])

    async def _start(self, engine: Engine) -> bool:
        """False: it was cancelled meanwhile, and nothing is left of it."""
        starting = asyncio.create_task(engine.start())
        if self.rng.random() < 0.1:
            for _ in range(self.rng.randrange(12)):
                await asyncio.sleep(0)
            starting.cancel()
        try:
            await starting
        except asyncio.CancelledError:
            self.outcomes["start: cancelled"] += 1
            await engine.aclose()
            assert engine.state == "closed"
            return False
        return True

    async def _tell(self, verb: str, call) -> None:
        """Count how a call ends. What it may not end with is raised."""
        try:
            await call
            self.outcomes[f"{verb}: ok"] += 1
        except _EXPECTED as error:
            self.outcomes[f"{verb}: {type(error).__name__}"] += 1
        except asyncio.CancelledError:
            self.outcomes[f"{verb}: cancelled"] += 1
            raise

    async def _call(self, engine: Engine) -> None:
        rng = self.rng
        verb = rng.choices(
            ["complete", "stream", "pause", "resume", "update", "reject", "drain", "close", "abort"],
            [6, 6, 3, 3, 3, 1, 0.6, 0.4, 3],
        )[0]
        if verb in ("complete", "stream"):
            await self._tell(verb, self._ask(engine, verb))
        elif verb == "pause":
            await self._tell(verb, engine.pause(rng.choice(get_args(PauseMode))))
        elif verb == "resume":
            await self._tell(verb, engine.resume())
            if rng.random() < 0.3:
                await self._tell("reset", engine.reset_cache())
        elif verb == "update":
            self.updated = True
            tensors = [("weights", "uint64", (1,), bytes([rng.randrange(256)] * 8))]
            await self._tell(
                verb, engine.update_weights(next(self._versions), tensors, mode=rng.choice(["keep", "abort"]))
            )
        elif verb == "reject":
            await self._tell(verb, engine.update_weights(next(self._versions), "/nonexistent", mode="keep"))
        elif verb == "drain":
            await self._tell(verb, engine.drain(rng.choice([0.0, 0.01, 0.2])))
        elif verb == "close":
            await self._tell(verb, engine.aclose())
        else:
            self.outcomes[f"abort: {engine.abort(rng.choice('abc'))}"] += 1
            if rng.random() < 0.3:
                self.outcomes[f"abort_all: {engine.abort_all(rng.choice(['', 'a'])) > 0}"] += 1

    async def _ask(self, engine: Engine, verb: str) -> None:
        rng = self.rng
        room = self._room_tokens
        prompt = [rng.randrange(1, 4)] * rng.randrange(1, min(40, room - 2))
        params = SamplingParams(
            max_tokens=rng.randrange(1, min(40, room - len(prompt))),
            n=rng.choice([1, 3]),
            stop=rng.choice([(), ("ab",)]),
            seed=rng.randrange(9),
        )
        options = {
            "request_id": rng.choice([None, None, "a", "b", "c"]),
            "deadline_s": rng.choice([None, None, 0.01, 0.1]),
        }
        if verb == "complete":
            result = await engine.complete(prompt, params, **options)
        else:
            leaves_early = rng.random() < 0.3
            async with engine.generate(prompt, params, **options) as stream:
                async for _ in stream:
                    if leaves_early:
                        return
            result = stream.result
        for sample in result.samples:
            assert sample.finish_reason in _ENDS
            if sample.finish_reason in ("stop", "length"):
                assert len(sample.routing.array) == len(prompt) + len(sample.token_ids) - 1
            if not self.updated and not params.stop:
                check_sample(sample, prompt, params, oracle_of(self.config))


def is_quiet(engine: Engine) -> bool:
    stats = engine.stats()
    return not (stats.steps_in_flight or stats.scheduler.moving or stats.scheduler.writing)


def play(seed: int) -> Counter[str]:
    """One round on the loop that its seed names; raises what went wrong."""
    complaints = []
    round_ = Round(seed)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        with no_leaks():
            await round_.play()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if seed % 2 else asyncio.SelectorEventLoop) as runner:
        runner.run(main())
    assert not complaints, complaints
    return round_.outcomes


def fuzz(seeds: range) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcomes += play(seed)
        except Exception as error:
            error.add_note(f"tests.engine.test_lifecycle_fuzz.play({seed}) plays this round again")
            raise
    print(dict(outcomes))
    return outcomes


@pytest.mark.heavy("calls of an engine in orders that nobody wrote down")
def test_no_order_of_calls_hangs_or_leaks():
    outcomes = fuzz(range(40))
    # rounds in which nothing happens prove nothing
    for verb in ("complete", "stream", "pause", "resume", "update"):
        assert outcomes[f"{verb}: ok"], outcomes
    assert outcomes["complete: cancelled"], outcomes


@pytest.mark.nightly
def test_no_order_of_calls_hangs_or_leaks_in_a_thousand_rounds():
    outcomes = fuzz(range(1000, 2000))
    for verb in ("complete", "stream", "pause", "resume", "update", "drain", "close"):
        assert outcomes[f"{verb}: ok"], outcomes
    for outcome in ("start: cancelled", "complete: EngineFailed", "complete: EngineClosed", "reject: WeightsRejected"):
        assert outcomes[outcome], outcomes
