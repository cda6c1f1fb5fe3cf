"""One engine of a play: its requests by name, its counters after every turn, and every check of a result.

Knows engines by their public face only. Used by `matrix_play.py`.
"""

from __future__ import annotations

import asyncio
from array import array
from contextlib import asynccontextmanager
from itertools import count
from random import Random
from typing import TYPE_CHECKING, cast

import msgspec

from fdasync import Engine, Result, SamplingParams
from fdasync.cache.identity import block_keys
from fdasync.drafting import DrafterLimits
from fdasync.events.actions import SwapIn
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.testing import FaultRunner, check_idle, check_sample
from tests.support.drafters import Foretold, answers_of
from tests.support.groups import ranked
from tests.system.matrix import BLOCK_TOKENS, WEIGHTS_ID
from tests.system.matrix_facts import Facts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fdasync.cache.store.base import Store
    from fdasync.engine.config import EngineConfig
    from fdasync.events.actions import RunStep, SwapOut
    from fdasync.result import Sample
    from fdasync.runner.base import CopyOutput, Runner, RunnerLimits
    from fdasync.runner.synthetic.oracle import Oracle
    from fdasync.stats import SchedulerStats
    from fdasync.testing import PassModel
    from tests.support.drafters import Kind

# nothing here takes a second where it works
_DEADLINE_S = 120.0
# what a prefilled token costs while an engine learns that fetching is worth it
_SLOW_TOKEN_S = 0.05


def tokens(name: str, length: int) -> tuple[int, ...]:
    """Tokens that nobody else's prompt begins with."""
    random = Random(name)
    return tuple(random.randrange(100) for _ in range(length))


def drafter_of(config: EngineConfig) -> Foretold | None:
    """One that learns what it is to know; None: the cell has none."""
    speculation = config.speculation
    if speculation is None:
        return None
    limits = DrafterLimits.of(speculation.max_tokens, config.pipeline_depth, config.max_running)
    return Foretold(cast("Kind", speculation.drafter), [], limits)


class Asked(msgspec.Struct, frozen=True):
    """A request and what came of it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    start: int
    result: Result


class Stage:
    """What the engines of one play share.

    Args:
        store: an object that outlives engines; None where the config says which and where, or there is none.

    Attributes:
        kept: names of the blocks that the store has.
        seeds: one for each request: passes tell requests apart by it.
    """

    def __init__(self, oracle: Oracle, store: Store | None) -> None:
        self.oracle = oracle
        self.store = store
        self.kept: set[str] = set()
        self.seeds = count(1)


class _Watched(FaultRunner):
    """Tells of every step and every copy when it begins."""

    def __init__(
        self, inner: Runner, on_launch: Callable[[RunStep], None], on_copy: Callable[[SwapOut | SwapIn], None]
    ) -> None:
        super().__init__(inner, Random(0), on_launch=on_launch)
        self._on_copy = on_copy

    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        self._on_copy(copy)
        return super().copy(copy)


class Life:
    """See the module.

    Attributes:
        asked: requests by name, those that ended.
        facts: once `check` was called.
        weights: weights id of each version.
        stats: at the end.
        resumed: how often somebody started who had started before; recomputed: blocks that were computed again for it.
        resumed_tokens: with which tokens each of them did.
        arriving: copies from the host that have begun.
    """

    engine: Engine
    stats: SchedulerStats

    def __init__(self, stage: Stage, config: EngineConfig, passes: PassModel) -> None:
        self.asked: dict[str, Asked] = {}
        self.weights = {0: WEIGHTS_ID}
        self._stage = stage
        self._config = config
        self._passes = passes
        self.facts = Facts(passes, stage.kept, self.weights)
        self.resumed = self.recomputed = self.arriving = 0
        self.resumed_tokens: list[tuple[int, ...]] = []
        self._started: set[int] = set()
        self._ranks: list[SyntheticRunner] = []
        self._told: dict[str, int] = {}
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._drafter = drafter_of(config)

    def _rank(self, limits: RunnerLimits) -> Runner:
        runner = SyntheticRunner(self._stage.oracle.config, limits)
        self._ranks.append(runner)
        return runner

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The engine is there; its counters are checked after every turn."""
        stage = self._stage
        runner = ranked(self._rank, self._config.runner_limits())
        faults = _Watched(runner, self._launched, self._copying)
        self.engine = engine = Engine(self._config, runner=faults, store=stage.store, drafter=self._drafter)
        async with asyncio.timeout(_DEADLINE_S * 3), engine, asyncio.TaskGroup() as group:
            audit = group.create_task(self._audit(), name="audit")
            yield
            # what is on its way to the store arrives
            await self.until(lambda: not self.counters.writing and not self.counters.moving)
            check_idle(engine)
            audit.cancel()
        self.stats = engine.stats().scheduler

    def _launched(self, step: RunStep) -> None:
        for start in step.starts:
            if start.key in self._started:
                self.resumed += 1
                self.resumed_tokens.append(tuple(array("i", start.tokens)))
                known = len(start.tokens) // 4
                # what it had decoded by then it had computed
                lost = known - 1 - start.num_cached if known > start.sampler.prompt_len else 0
                self.recomputed += lost // BLOCK_TOKENS
            self._started.add(start.key)

    def _copying(self, copy: SwapOut | SwapIn) -> None:
        self.arriving += isinstance(copy, SwapIn)

    async def _audit(self) -> None:
        async with self.engine.bus.subscribe(limit=1 << 20) as events:
            async for _ in events:
                if not events.pending:
                    self.engine.check()
                    for condition, waiter in self._waiters:
                        if not waiter.done() and condition():
                            waiter.set_result(None)

    @property
    def counters(self) -> SchedulerStats:
        return self.engine.stats().scheduler

    def told(self, name: str) -> int:
        """Tokens that the stream of this name has given."""
        return self._told.get(name, 0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until it holds after some turn. Raises TimeoutError where it never does."""
        if condition():
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append((condition, waiter))
        async with asyncio.timeout(_DEADLINE_S):
            await waiter

    def begin(
        self,
        group: asyncio.TaskGroup,
        name: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        max_tokens: int,
        *,
        n: int = 1,
        start: int = 0,
        paced: bool = False,
    ) -> None:
        """A stream whose result will be in `asked`. `paced`: a step gives one token of it, drafts or not."""
        params = msgspec.structs.replace(params, max_tokens=max_tokens, n=n, seed=next(self._stage.seeds))
        if not paced:
            self._foretell(prompt, params)
        group.create_task(self._stream(name, prompt, params, start), name=name)

    async def _stream(self, name: str, prompt: tuple[int, ...], params: SamplingParams, start: int) -> None:
        async with self.engine.generate(prompt, params, request_id=name, start=start) as stream:
            async for delta in stream:
                self._told[name] = self.told(name) + len(delta.token_ids)
        self.asked[name] = Asked(prompt, params, start, stream.result)

    async def ask(self, name: str, prompt: tuple[int, ...], max_tokens: int) -> Result:
        """One request, to its end."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=next(self._stage.seeds), logprobs="raw")
        self._foretell(prompt, params)
        result = await self.engine.complete(prompt, params, request_id=name)
        assert result.finish_reason == "length"
        self.asked[name] = Asked(prompt, params, 0, result)
        return result

    def _foretell(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        """The drafter knows the answer under the first weights."""
        if self._drafter is not None:
            self._drafter.learn(answers_of([(prompt, params)], self._stage.oracle))

    async def teach(self) -> None:
        """Prefill is slow here, so that fetching is worth it and may take its time on a busy machine."""
        plain = self._stage.oracle.config
        for rank in self._ranks:
            rank.config = msgspec.structs.replace(plain, token_s=_SLOW_TOKEN_S)
        await self.ask("lesson", tokens("lesson", BLOCK_TOKENS + 1), 1)
        for rank in self._ranks:
            rank.config = plain

    # -- checks -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Hold every result against the oracle and the trace."""
        self.facts.read(self.engine.trace().encode())
        for name, asked in self.asked.items():
            assert asked.result.prompt_token_ids == asked.prompt
            assert len(asked.result.samples) == asked.params.n
            for sample in asked.result.samples:
                try:
                    self._check_sample(asked, sample)
                except AssertionError as error:
                    error.add_note(f"sample {sample.index} of request {name!r}")
                    raise
        self._check_writes()

    def _check_writes(self) -> None:
        """After an update, all that is written was begun under the new weights: a kept request is not shared."""
        facts = self.facts
        roots = list(facts.roots.items())
        for namespace, root in roots[1:]:
            known = {
                key
                for asked in self.asked.values()
                for sample in asked.result.samples
                for key in block_keys(root, asked.prompt + sample.token_ids, BLOCK_TOKENS)
            }
            strange = [key.hex() for written, key in facts.writes if written == namespace and key not in known]
            assert not strange, f"blocks {strange} were written, and nobody computed them under these weights alone"

    def _check_sample(self, asked: Asked, sample: Sample) -> None:
        passes = self._passes
        owner = (asked.params.seed or 0, sample.index)
        seen = passes.seen.get(owner, []) if len(self.weights) > 1 else None
        check_sample(sample, asked.prompt, asked.params, self._stage.oracle, start=asked.start, seen=seen)
        assert sample.cached_tokens == passes.cached.get(owner, 0)
        assert sample.routing is not None
        count = len(sample.routing.array)
        first = passes.stamps.get(owner, [])[asked.start : asked.start + count]
        assert len(first) == count, "rows of positions that no pass covered"
        assert sample.aux["stamp"][:, 0].tolist() == first, "rows are not those of the first passes"
        stop = 0
        for span in sample.weight_version:
            assert span.start == stop < span.stop
            stop = span.stop
            sampled = range(len(asked.prompt) - 1 + span.start, len(asked.prompt) - 1 + span.stop)
            ids = {WEIGHTS_ID if seen is None else seen[position].weights_id for position in sampled}
            assert ids == {self.weights[int(span.version)]}, f"{span} was sampled under {ids}"
        assert stop == len(sample.token_ids)
