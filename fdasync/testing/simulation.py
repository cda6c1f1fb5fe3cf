"""Plays a workload on an engine in virtual time and holds everything that comes of it against the oracle.

Each request ends exactly once; tokens, text and rows are the oracle's; stamps are those of the right pass;
the books balance after every turn and nothing is held at the end; the recorded trace replays to the same
actions. A broken rule raises `SimulationFailed`, which names the seed.

Knows engines by their public face only. Called by tests: `simulate(seed)`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import msgspec

from fdasync.actions import FinishRequest
from fdasync.engine import Engine
from fdasync.errors import EngineClosed, EngineFailed
from fdasync.events.catalog import RequestPrepared
from fdasync.events.trace import Turn
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.scheduler.replay import replay
from fdasync.testing.edges import EdgeRunner
from fdasync.testing.engines import LetterTokenizer, check_sample, expected
from fdasync.testing.leaks import check_idle, no_leaks
from fdasync.testing.loop import run_sim
from fdasync.testing.passes import PassModel
from fdasync.testing.workload import RequestPlan, Workload, arguments

if TYPE_CHECKING:
    from fdasync.result import Delta, Result, Sample


class SimulationFailed(AssertionError):
    """A rule was broken; the cause says which.

    Attributes:
        seed: plays the same again.
    """

    def __init__(self, seed: int, problem: str) -> None:
        self.seed = seed
        super().__init__(f"seed {seed}: {problem}\n  again: pytest tests/test_simulation.py --sim-seed {seed}")


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation was made of, to see that it exercised something.

    Attributes:
        outcomes: finish reasons of samples, and cancelled, closed, failed requests.
    """

    outcomes: dict[str, int]
    steps: int
    preemptions: int
    evictions: int
    hit_tokens: int
    dropped_tokens: int
    rows: int
    virtual_s: float


def simulate(seed: int) -> SimulationReport:
    """Draw the workload of this seed, play it, check it. Raises SimulationFailed."""
    try:
        with no_leaks():
            return run_sim(_Simulation(Workload.draw(seed)).play())
    except Exception as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise SimulationFailed(seed, f"{type(first).__name__}: {first}") from first


class _Simulation:
    def __init__(self, work: Workload) -> None:
        self.work = work
        self.passes = PassModel(work.runner.block_tokens)
        inner = SyntheticRunner(work.runner, work.config.runner_limits())
        self.oracle = inner.oracle
        self.runner = EdgeRunner(
            inner,
            Random(work.seed),
            max_delay_s=work.max_delay_s,
            fault=work.fault,
            on_launch=self.passes.launched,
        )
        self.engine = Engine(work.config, runner=self.runner, tokenizer=LetterTokenizer())
        self.outcomes: Counter[str] = Counter()
        self.rows = 0
        self.failed = False

    async def play(self) -> SimulationReport:
        engine, work = self.engine, self.work
        try:
            async with engine, asyncio.TaskGroup() as group:
                audit = group.create_task(self._audit(), name="audit")
                callers = [
                    group.create_task(self._call(number, plan), name=f"caller-{number}")
                    for number, plan in enumerate(work.requests)
                ]
                if work.ends != "wait":
                    await asyncio.sleep(work.ends_at_s)
                    await self._end_early()
                await asyncio.wait(callers)
                audit.cancel()
        except EngineFailed:
            # nobody was there to see it fail
            self.failed = True
        assert self.failed == (engine.state == "failed"), f"the engine is {engine.state}"
        assert not self.failed or self.runner.broken, "the engine failed, and its runner did not"
        self._check_trace()
        self._check_salts()
        stats = engine.stats().scheduler
        if not self.failed:
            check_idle(engine)
        return SimulationReport(
            outcomes=dict(self.outcomes),
            steps=stats.steps,
            preemptions=stats.preemptions,
            evictions=stats.evictions,
            hit_tokens=stats.hit_tokens,
            dropped_tokens=stats.dropped_tokens,
            rows=self.rows,
            virtual_s=asyncio.get_running_loop().time(),
        )

    async def _audit(self) -> None:
        """The books must balance after every turn."""
        async with self.engine.bus.subscribe(limit=1 << 20) as events:
            async for _ in events:
                if not events.pending and self.engine.state != "failed":
                    self.engine.check()

    async def _end_early(self) -> None:
        try:
            if self.work.ends == "drain":
                await self.engine.drain()
            else:
                await self.engine.aclose()
        except EngineFailed:
            self.failed = True
        except EngineClosed:
            assert self.engine.state == "closed"

    # -- callers ------------------------------------------------------------------------------------

    async def _call(self, number: int, plan: RequestPlan) -> None:
        await asyncio.sleep(plan.arrives_s)
        name = f"request-{number}"
        result: Result | None
        try:
            if plan.way in ("stream", "slow", "leave"):
                result = await self._read(name, plan)
            elif plan.way == "cancel":
                result = await self._cancelled(name, plan)
            else:
                if plan.way == "abort":
                    asyncio.get_running_loop().call_later(plan.after_s, self._abort, name)
                result = await self.engine.complete(plan.prompt, plan.params, request_id=name, **arguments(plan))
        except EngineFailed as error:
            self.failed = True
            self.outcomes["failed"] += 1
            if error.partial is not None:
                self._check_result(plan, error.partial)
        except EngineClosed:
            assert self.work.ends != "wait", "closed, and nobody closed it"
            self.outcomes["closed"] += 1
        else:
            if result is None:
                self.outcomes["cancelled"] += 1
            else:
                assert result.request_id == name
                self._check_result(plan, result)
                self.outcomes.update(sample.finish_reason for sample in result.samples)

    def _abort(self, name: str) -> None:
        self.engine.abort(name)
        # twice does no harm
        self.engine.abort(name)

    async def _cancelled(self, name: str, plan: RequestPlan) -> Result | None:
        try:
            async with asyncio.timeout(plan.after_s):
                return await self.engine.complete(plan.prompt, plan.params, request_id=name, **arguments(plan))
        except TimeoutError:
            return None

    async def _read(self, name: str, plan: RequestPlan) -> Result:
        deltas: list[Delta] = []
        generation = self.engine.generate(plan.prompt, plan.params, request_id=name, **arguments(plan))
        async with generation as stream:
            async for delta in stream:
                deltas.append(delta)
                if plan.way == "slow":
                    await asyncio.sleep(plan.after_s)
                if plan.way == "leave" and len(deltas) > 2:
                    break
        result = stream.result
        for sample in result.samples:
            own = [delta for delta in deltas if delta.index == sample.index]
            told = tuple(token for delta in own for token in delta.token_ids)
            text = "".join(delta.text for delta in own)
            if plan.way == "leave":
                assert told == sample.token_ids[: len(told)], "deltas are not the beginning of the result"
                assert sample.text.startswith(text)
                continue
            assert told == sample.token_ids, f"deltas {told} are not the result's {sample.token_ids}"
            assert text == sample.text, f"the deltas' text {text!r} is not the result's {sample.text!r}"
            assert [delta.finish_reason for delta in own if delta.finish_reason] == [sample.finish_reason]
            assert own[-1].finish_reason is not None
        return result

    # -- checks -------------------------------------------------------------------------------------

    def _check_result(self, plan: RequestPlan, result: Result) -> None:
        # what ended before it was prepared has no prompt
        assert result.prompt_token_ids in (plan.prompt, ())
        assert [sample.index for sample in result.samples] == list(range(plan.params.n))
        assert result.total_s < plan.deadline_s + 1e-6, f"it ended at {result.total_s} s, its deadline was before"
        for sample in result.samples:
            self._check_sample(plan, sample)

    def _check_sample(self, plan: RequestPlan, sample: Sample) -> None:
        rows = bool(self.engine.capacity.aux_specs) and plan.routing is not False
        check_sample(sample, plan.prompt, plan.params, self.oracle, start=plan.start, rows=rows)
        if sample.finish_reason in ("stop", "length"):
            want = expected(plan.prompt, plan.params, sample.index, self.oracle)
            assert sample.text == want.text, f"text {sample.text!r}, oracle {want.text!r}"
        elif sample.finish_reason != "failed":
            caused = {
                "abort": plan.way in ("abort", "leave") or self.work.ends == "close",
                "deadline": plan.deadline_s < 3600,
            }
            assert caused[sample.finish_reason], f"{sample.finish_reason}, and nobody asked for it"
        owner = (plan.params.seed or 0, sample.index)
        cached = self.passes.cached.get(owner, 0)
        assert sample.cached_tokens == cached, f"{sample.cached_tokens} cached tokens told, there were {cached}"
        if sample.routing is not None:
            count = len(sample.routing.array)
            self.rows += count
            passes = self.passes.stamps.get(owner, [])
            first = passes[plan.start : plan.start + count]
            assert len(first) == count, "rows of positions that no pass covered"
            if "stamp" in sample.aux:
                got = sample.aux["stamp"][:, 0].tolist()
                assert got == first, f"rows carry the stamps {got}, first passes were {first}"

    def _check_salts(self) -> None:
        salts = [plan.cache_salt for plan in self.work.requests]
        for (reader, _), sources in self.passes.read.items():
            # a request's seed is its number
            strange = [source for source, _ in sources if salts[source] != salts[reader]]
            assert not strange, f"request {reader} read the KV of {strange}, of another salt"

    def _check_trace(self) -> None:
        trace = self.engine.trace().encode()
        decoder = msgspec.json.Decoder(Turn)
        turns = [decoder.decode(line) for line in trace.splitlines()[1:]]
        came = [event.key for turn in turns for event in turn.events if isinstance(event, RequestPrepared)]
        ended = Counter(action.key for turn in turns for action in turn.actions if isinstance(action, FinishRequest))
        twice = [key for key, count in ended.items() if count > 1]
        assert not twice, f"sequences {twice} ended twice"
        assert ended.keys() <= set(came)
        never = set(came) - ended.keys()
        assert not never or self.failed, f"sequences {sorted(never)} never ended"
        assert replay(trace) == len(turns)
