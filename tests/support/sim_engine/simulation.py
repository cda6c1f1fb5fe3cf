"""Plays a workload on an engine, in virtual or real time, and compares every answer with the oracle's.

Each request must end exactly once; tokens, log-probs, text and rows must be the oracle's, and stamps those of the right
pass; `Engine.check` must pass after every turn, and nothing may be held at the end; the recorded trace must replay to
the same actions. A broken rule raises `SimulationFailed`, which names the seed.

Knows engines by their public face only. Called by tests (`simulate(seed)`) and by the simulated fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, cast

import msgspec

from fdasync.cache.aux import wanted_specs
from fdasync.cache.host_arena import host_nbytes
from fdasync.cache.store.file.store import FileConfig, FileStore
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.drafting import DrafterLimits
from fdasync.engine.engine import Engine
from fdasync.errors import BadInput, EngineClosed, EngineFailed, StoreUnavailable, UpdateUnderWay, WeightsRejected
from fdasync.events.actions import FinishRequest
from fdasync.events.catalog import BlockDamaged, RequestPrepared
from fdasync.events.trace import Turn
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.runner.synthetic.oracle import Oracle
from fdasync.scheduler.replay import replay
from fdasync.testing.harness.engines import (
    LetterTokenizer,
    check_deltas,
    check_prompt_logprobs,
    check_sample,
    expected,
)
from fdasync.testing.harness.fault_runner import FaultRunner
from fdasync.testing.harness.leaks import check_idle, no_leaks
from fdasync.testing.harness.pass_model import PassModel
from fdasync.testing.harness.recording_store import RecordingStore
from fdasync.testing.sim.late import LateLoop
from fdasync.testing.sim.loop import run_sim
from fdasync.testing.stores.faults import FaultyStore
from tests.support.drafters import Foretold, answers_of
from tests.support.groups import ranked
from tests.support.helpers import check_early_samples
from tests.support.sim_engine.crowd import Crowd, check_chosen, crowded
from tests.support.sim_engine.report import SimulationReport, add, check_groups
from tests.support.sim_engine.workload import RequestPlan, UpdatePlan, Workload, arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from fdasync.cache.store.base import Store
    from fdasync.result import Delta, Result, Sample
    from fdasync.runner.base import Runner, RunnerLimits, StepOutput
    from fdasync.testing.harness.pass_model import Read
    from tests.support.drafters import Kind


# limit of one life on a real loop, on a machine that may be busy
_REAL_LIMIT_S = 600.0


class SimulationFailed(AssertionError):
    """A rule was broken; the cause says which.

    Attributes:
        seed: plays the same again.
    """

    def __init__(self, seed: int, problem: str, again: str = "") -> None:
        self.seed = seed
        again = again or f"pytest tests/system/test_simulation.py --sim-seed {seed}"
        super().__init__(f"seed {seed}: {problem}\n  again: {again}")


def simulate(
    seed: int,
    *,
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    folder: Path | None = None,
    crowd: bool = False,
    late: bool = False,
) -> SimulationReport:
    """Draw the workload of this seed, play it, check it. Raises SimulationFailed.

    Args:
        loop: makes the loop of a hurried play in real time; None: virtual time.
        folder: an empty one, for a file store where the workload has a store; None: the store is in memory.
        crowd: with everything at once (`crowd.py`).
        late: in virtual time, on a loop that comes late (`LateLoop`).
    """
    work = Workload.draw(seed)
    if crowd:
        work = crowded(work)
    if loop is not None:
        work = work.hurried()
    memory = MemoryStore(MemoryConfig(max_nbytes=work.store_nbytes))

    def live(work: Workload, before: PassModel | None) -> _Simulation:
        file = None if folder is None else FileStore(FileConfig(path=str(folder), max_nbytes=work.store_nbytes))
        return _Simulation(
            work,
            file or memory,
            before,
            closes=file is not None,
            grace_s=1e-6 if loop is None and not late else 60.0,
        )

    def run(life: _Simulation) -> SimulationReport:
        if loop is None:
            return run_sim(life.play(), LateLoop(seed) if late else None)
        with asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(asyncio.wait_for(life.play(), _REAL_LIMIT_S))

    try:
        with no_leaks():
            life = live(work, None)
            report = run(life)
            second = work.second_life()
            return report if second is None else add(report, run(live(second, life.passes)))
    except Exception as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        file, which = ("crowd", "late") if crowd else ("simulation", "late" if late else "real_time")
        named = f" -k {which}" if late or loop is not None else ""
        again = f"pytest tests/system/test_{file}.py{named} --sim-seed {seed}"
        raise SimulationFailed(seed, f"{type(first).__name__}: {first}", again) from first


def outcomes_of(seeds: Iterable[int], only: int | None, *, crowd: bool = False, late: bool = False) -> Counter[str]:
    """Play these seeds, or the one that was asked for; how the samples ended."""
    found: Counter[str] = Counter()
    for seed in seeds if only is None else (only,):
        found.update(simulate(seed, crowd=crowd, late=late).outcomes)
    return found


class _Simulation:
    def __init__(self, work: Workload, store: Store, before: PassModel | None, *, closes: bool, grace_s: float) -> None:
        self.work = work
        self.grace_s = grace_s
        weights_id = work.runner.weights_id
        self.passes = (
            before.next_life(weights_id) if before else PassModel(work.runner.block_tokens, weights_id, runs=True)
        )
        # of all ranks; what may go wrong does so on one of them
        self.ranks: list[FaultRunner] = []
        self.synthetic: list[SyntheticRunner] = []
        self.oracle = Oracle(work.runner)
        self.runner = FaultRunner(
            ranked(self._rank, work.config.runner_limits()),
            Random(work.seed),
            on_launch=self.passes.launched,
            on_done=self._done,
            on_copied=self.passes.copied,
            on_weights=lambda: self.passes.new_weights(self.synthetic[0].weights_id),
        )
        recording = RecordingStore(store, self.passes, closes=closes)
        words = 12 if work.runner.pass_stamp else 8
        block_nbytes = words * work.runner.block_tokens
        recording.stride_nbytes = host_nbytes(1, block_nbytes) - host_nbytes(0, block_nbytes)
        self.recording = recording
        self.faults = FaultyStore(recording, work.store_faults)
        given = self.faults if work.config.store else None
        self.engine = Engine(
            work.config, runner=self.runner, tokenizer=LetterTokenizer(), store=given, drafter=self._drafter()
        )
        self.versions = {0: work.runner.weights_id}
        self.crowd = Crowd(self.engine, work, self.versions, self._saw)
        self.damaged = 0
        self.aborting = self.crowd.may_abort
        self.outcomes: Counter[str] = Counter()
        self.rows = 0
        self.long_runs = 0
        self.cause: BaseException | None = None

    def _rank(self, limits: RunnerLimits) -> Runner:
        """A rank answers late, and at a time of its own; one of them may fail, hang or die."""
        work, rank = self.work, limits.rank
        runner = SyntheticRunner(msgspec.structs.replace(work.runner, seed=work.runner.seed + rank), limits)
        self.synthetic.append(runner)
        faults = FaultRunner(
            runner,
            Random(work.seed + rank),
            max_delay_s=work.max_delay_s,
            fault=work.step_fault if rank == work.fault_rank else None,
        )
        self.ranks.append(faults)
        return faults

    def _drafter(self) -> Foretold | None:
        """One that knows nothing of sequences yet; None: the engine makes its own, or has none."""
        work, speculation = self.work, self.work.config.speculation
        if speculation is None or speculation.drafter == "ngram":
            return None
        limits = DrafterLimits.of(speculation.max_tokens, work.config.pipeline_depth, work.config.max_running)
        answers = answers_of([(plan.prompt, plan.params) for plan in work.requests], self.oracle)
        return Foretold(cast("Kind", speculation.drafter), answers, limits)

    @property
    def failed(self) -> bool:
        return self.cause is not None

    def _done(self, output: StepOutput) -> None:
        self.passes.done(output.step_id, output.counts)
        self.long_runs += sum(1 for count in output.counts or () if count > 1)

    def _saw(self, error: EngineFailed) -> None:
        self.cause = error.cause

    async def play(self) -> SimulationReport:
        engine, work = self.engine, self.work
        began = asyncio.get_running_loop().time()
        try:
            async with engine, asyncio.TaskGroup() as group:
                audit = group.create_task(self._audit(), name="audit")
                forgets = [group.create_task(self._forget(at_s), name="forget") for at_s in work.forgets_at_s]
                for number, update in enumerate(work.updates):
                    group.create_task(self._update(number, update), name=f"update-{number}")
                crowd = group.create_task(self.crowd.play(), name="crowd")
                callers = [
                    group.create_task(self._call(number, plan), name=f"caller-{number}")
                    for number, plan in enumerate(work.requests)
                ]
                if work.ends != "wait":
                    await asyncio.sleep(work.ends_at_s)
                    await self._end_early()
                await asyncio.wait([*callers, crowd])
                for task in (audit, *forgets):
                    task.cancel()
        except EngineFailed as error:
            # no request was there to raise the failure
            self._saw(error)
        assert self.failed == (engine.state == "failed"), f"the engine is {engine.state}"
        assert self.cause is None or any(rank.broken for rank in self.ranks), (
            f"the engine failed, its runner did not: {self.cause!r}"
        )
        if self.failed and len(self.ranks) > 1:
            # a step that fails says so in its own words; a rank that hangs or dies has no other name
            assert f"rank {work.fault_rank} of {len(self.ranks)}" in str(self.cause), f"{self.cause!r} names no rank"
        self._check_trace()
        self._check_salts()
        stats = engine.stats().scheduler
        if not self.failed:
            check_idle(engine)
            assert engine.stats().live == 0, "places of requests that have ended are taken"
            assert not any(runner._lent._rows for runner in self.synthetic), "rows are lent for nobody"
        return SimulationReport(
            outcomes=dict(self.outcomes),
            steps=stats.steps,
            long_runs=self.long_runs,
            drafted_tokens=stats.drafted_tokens,
            accepted_tokens=stats.accepted_tokens,
            preemptions=stats.preemptions,
            evictions=stats.evictions,
            hit_tokens=stats.hit_tokens,
            dropped_tokens=stats.dropped_tokens,
            rows=self.rows,
            swapped_in_blocks=stats.swapped_in_blocks,
            fetched_blocks=stats.fetched_blocks,
            late_blocks=stats.late_fetched_blocks,
            written_blocks=stats.written_blocks,
            forgotten_blocks=stats.forgotten_blocks,
            store_faults=sum(self.faults.counts.values()),
            damaged_blocks=self.damaged,
            updates=len(self.versions) - 1,
            seconds=asyncio.get_running_loop().time() - began,
        )

    async def _audit(self) -> None:
        """Run the engine's own check after every turn."""
        async with self.engine.bus.subscribe(limit=1 << 20) as events:
            async for event in events:
                self.damaged += isinstance(event, BlockDamaged)
                if not events.pending and self.engine.state != "failed":
                    self.engine.check()

    async def _forget(self, at_s: float) -> None:
        await asyncio.sleep(at_s)
        # an engine that has ended, or is ending, closes its store
        if self.work.config.store and self.engine.state == "running":
            with contextlib.suppress(StoreUnavailable):
                await self.recording.forget()

    async def _update(self, number: int, plan: UpdatePlan) -> None:
        await asyncio.sleep(plan.at_s)
        engine = self.engine
        version = number + 1
        try:
            if plan.kind == "pause" and plan.mode == "retract":
                return await self._sleep(plan.pause_s)
            if plan.pause_s or plan.kind == "pause":
                self.aborting = self.aborting or plan.mode == "abort"
                await engine.pause(plan.mode)
            if plan.kind == "refused":
                try:
                    await engine.update_weights(version, [("bias", "uint64", (1,), bytes(8))])
                except WeightsRejected:
                    pass
                else:
                    raise AssertionError("weights that do not fit were taken")
            elif plan.kind != "pause":
                self.aborting = self.aborting or plan.kind == "abort"
                self.versions[version] = plan.weights_id
                tensor = ("weights", "uint64", (1,), plan.weights_id.to_bytes(8, "little"))
                await engine.update_weights(version, [tensor], plan.kind)
            await asyncio.sleep(plan.pause_s)
            if plan.resets:
                await engine.reset_cache()
            if plan.pause_s or plan.kind == "pause":
                await engine.resume()
        except EngineFailed as error:
            self._saw(error)
        except (EngineClosed, BadInput) as error:
            # the engine went first, or another update is under way
            busy = isinstance(error, BadInput) and error.field == "update_weights"
            if not (busy or self.work.ends != "wait" or self.failed):
                raise
            if busy and plan.pause_s:
                await engine.resume()

    async def _sleep(self, for_s: float) -> None:
        """In the place of a pause that takes blocks; updates may refuse either call for a while."""
        for call in (self.engine.sleep, self.engine.wake):
            while self.engine.state in ("running", "draining"):
                with contextlib.suppress(UpdateUnderWay):
                    await call()
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(for_s)

    async def _end_early(self) -> None:
        try:
            if self.work.ends == "drain":
                await self.engine.drain()
            else:
                await self.engine.aclose()
        except EngineFailed as error:
            self._saw(error)
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
            self._saw(error)
            self.outcomes["failed"] += 1
            if error.partial is not None:
                self._check_result(plan, error.partial)
        except EngineClosed:
            assert self.work.ends != "wait", "closed, and not by the workload"
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
        early: list[Sample] = []
        generation = self.engine.generate(plan.prompt, plan.params, request_id=name, **arguments(plan))
        async with generation as stream:
            async for delta in stream:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    early.append(stream.sample(delta.index))
                if plan.way == "slow":
                    await asyncio.sleep(plan.after_s)
                if plan.way == "leave" and len(deltas) > 2:
                    break
        result = stream.result
        check_early_samples(early, result)
        check_deltas(deltas, result, whole=plan.way != "leave")
        return result

    # -- checks -------------------------------------------------------------------------------------

    def _check_result(self, plan: RequestPlan, result: Result) -> None:
        # a request that ended before it was prepared has no prompt
        assert result.prompt_token_ids in (plan.prompt, ())
        assert [sample.index for sample in result.samples] == list(range(plan.params.n))
        assert result.total_s < plan.deadline_s + self.grace_s, (
            f"it ended at {result.total_s} s, its deadline was before"
        )
        for sample in result.samples:
            self._check_sample(plan, sample)
        seen = self.passes.seen.get((plan.params.seed or 0, 0), []) if len(self.versions) > 1 else None
        check_prompt_logprobs(result, plan.prompt, plan.params, self.oracle, seen)

    def _check_sample(self, plan: RequestPlan, sample: Sample) -> None:
        specs = wanted_specs(self.engine.capacity.aux_specs, plan.routing, plan.aux)
        owner = (plan.params.seed or 0, sample.index)
        seen = self.passes.seen.get(owner, []) if len(self.versions) > 1 else None
        names = [spec.name for spec in specs]
        check_sample(sample, plan.prompt, plan.params, self.oracle, start=plan.start, names=names, seen=seen)
        first_seen = None if seen is None else self.passes.seen.get((plan.params.seed or 0, 0), [])
        check_chosen(sample, plan.prompt, plan.params, self.oracle, seen, first_seen)
        if seen is not None:
            self._check_versions(plan, sample, seen)
        if sample.finish_reason in ("stop", "length"):
            want = expected(plan.prompt, plan.params, sample.index, self.oracle, seen)
            assert sample.text == want.text, f"text {sample.text!r}, oracle {want.text!r}"
        elif sample.finish_reason != "failed":
            caused = {
                "abort": plan.way in ("abort", "leave") or self.work.ends == "close" or self.aborting,
                "deadline": plan.deadline_s < 3600,
            }
            assert caused[sample.finish_reason], f"{sample.finish_reason}, and the workload has no cause for it"
        cached = self.passes.cached.get(owner, 0)
        assert sample.cached_tokens == cached, (
            f"{sample.cached_tokens} cached tokens in the result, there were {cached}"
        )
        if specs:
            arrays = list(sample.aux.values()) if sample.routing is None else [sample.routing.array]
            count = len(arrays[0])
            self.rows += count
            passes = self.passes.stamps.get(owner, [])
            first = passes[plan.start : plan.start + count]
            assert len(first) == count, "rows of positions that no pass covered"
            if "stamp" in sample.aux:
                got = sample.aux["stamp"][:, 0].tolist()
                assert got == first, f"rows carry the stamps {got}, first passes were {first}"

    def _check_versions(self, plan: RequestPlan, sample: Sample, seen: list[Read]) -> None:
        """Spans cover the output in order, and each token was sampled under its span's weights."""
        stop = 0
        for span in sample.weight_version:
            assert span.start == stop < span.stop
            stop = span.stop
            first = len(plan.prompt) - 1
            ids = {seen[first + number].weights_id for number in range(span.start, span.stop)}
            assert ids == {self.versions[int(span.version)]}, f"{span} was sampled under {ids}"
        assert stop == len(sample.token_ids)

    def _check_salts(self) -> None:
        # a request's seed is its number; requests of an earlier engine are not known here
        salts = {plan.params.seed: plan.cache_salt for plan in self.work.requests}
        for (reader, _), sources in self.passes.read.items():
            strange = [source for source, _ in sources if salts.get(source, salts[reader]) != salts[reader]]
            assert not strange, f"request {reader} read the KV of {strange}, of another salt"

    def _check_trace(self) -> None:
        trace = self.engine.trace().encode()
        decoder = msgspec.json.Decoder(Turn)
        turns = [decoder.decode(line) for line in trace.splitlines()[1:]]
        check_groups(turns)
        came = [event.key for turn in turns for event in turn.events if isinstance(event, RequestPrepared)]
        ended = Counter(action.key for turn in turns for action in turn.actions if isinstance(action, FinishRequest))
        twice = [key for key, count in ended.items() if count > 1]
        assert not twice, f"sequences {twice} ended twice"
        assert ended.keys() <= set(came)
        never = set(came) - ended.keys()
        assert not never or self.failed, f"sequences {sorted(never)} never ended"
        again = self._drafter()
        assert replay(trace, **({} if again is None else {"make_drafter": lambda *_: again})) == len(turns)
