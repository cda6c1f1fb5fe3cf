"""What engines are asked in `gpu_exact`: every way that a token and its rows can come about, and that it did.

A play starts engines of its own, asks, reads the books, and raises `Void` where what it is there for did not happen.
Knows engines by their public face; judges nothing.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from fdasync_fleet.cli.local.fleet import LocalFleet, plans_for
from fdasync_fleet.cli.local.options import LinkOptions
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.router import Router, connect
from fdasync_transformers import TransformersConfig, TransformersRunner

from benchmarks.gpu.judge import Answer
from benchmarks.lib.parts import Void
from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.events.catalog import SwapDone

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fdasync.result import Result
    from fdasync.runner.base import Capacity

_SETTLE_S = 20.0
# what a step of these models is believed to do, so that a store is asked at all
_BELIEVED_TOKENS_PER_S = 5.0


@dataclass(frozen=True)
class Scale:
    """How much is asked, of how large a model. Spans are (least, most) tokens.

    Attributes:
        tight, roomy: blocks on the device: fewer than the requests of a burst need at a time, and more.
        chunk, whole: token budgets of a step: below the prompts' lengths, and above.
        long: output tokens of those who are to be cut short.
    """

    size: str = "medium"
    requests: int = 16
    prefix: tuple[int, int] = (40, 90)
    own: tuple[int, int] = (4, 100)
    output: tuple[int, int] = (12, 40)
    long: int = 96
    block_tokens: int = 16
    tight: int = 26
    roomy: int = 192
    host: int = 256
    chunk: int = 64
    whole: int = 512
    max_running: int = 8
    graph_sizes: tuple[int, ...] = (1, 2, 4, 8)


SCALES = {
    "default": Scale(),
    "quick": Scale(size="small"),
    # for a rehearsal in Triton's interpreter, where a kernel takes a tenth of a second
    "tiny": Scale(
        size="tiny", requests=4, prefix=(8, 8), own=(3, 6), output=(4, 6), long=12, block_tokens=4, tight=7, roomy=48,
        host=64, chunk=8, whole=64, max_running=4, graph_sizes=(1, 2),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    params: SamplingParams
    start: int = 0


@dataclass
class Played:
    """Answers, and what of the books is worth telling."""

    answers: list[Answer] = field(default_factory=list)
    books: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Play:
    """One family, in one dtype, on one device.

    Attributes:
        folder, other: checkpoints; `other` has other weights.
        runner: keys of `runner_config` that all engines share.
        fields: of their configurations, likewise.
    """

    scale: Scale
    folder: Path
    other: Path
    scratch: Path
    runner: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)

    def config(self, *, fused: bool = True, whole: bool = False, **values: Any) -> EngineConfig:
        """`fused`: routers are; `whole`: prompts are not cut into chunks; `values`: in place of other fields."""
        scale = self.scale
        runner = {**self.runner, "fused_router": fused, "graph_sizes": scale.graph_sizes}
        if values.get("tensor_parallel", 1) > 1 and runner["device"] == "cuda":
            # each rank has its own
            runner["device"] = "auto"
        defaults: dict[str, Any] = {
            "model": str(self.folder),
            "runner_config": runner,
            "tokenizer": "none",
            "routing": True,
            "block_tokens": scale.block_tokens,
            "num_blocks": scale.tight,
            "host_blocks": scale.host,
            "max_context_tokens": scale.block_tokens * (scale.tight - 1),
            "max_step_tokens": scale.whole if whole else scale.chunk,
            "max_running": scale.max_running,
            "max_requests": 256,
            "decode_reserve_blocks": 0,
            "request_deadline_s": 200.0,
        }
        return EngineConfig(**{**defaults, **self.fields, **values})

    def jobs(self, seed: int, count: int | None = None) -> list[Job]:
        """Every second one begins with a shared prefix; one in four is sampled; one wants its last rows only."""
        scale, rng = self.scale, random.Random(seed)
        prefixes = [_text(rng, rng.randint(*scale.prefix)) for _ in range(2)]
        jobs = []
        for number in range(scale.requests if count is None else count):
            prompt = (prefixes[number // 2 % 2] if number % 2 else ()) + _text(rng, rng.randint(*scale.own))
            how = {"temperature": 0.9, "top_p": 0.95, "seed": number} if number % 4 == 2 else {"temperature": 0.0}
            params = SamplingParams(max_tokens=rng.randint(*scale.output), **how)
            jobs.append(Job(prompt, params, len(prompt) // 2 if number % 8 == 5 else 0))
        return jobs

    def long_ones(self, seed: int, count: int) -> list[Job]:
        """Who are to be cut short, or to see new weights."""
        rng = random.Random(seed)
        params = SamplingParams(max_tokens=self.scale.long, temperature=0.0, ignore_eos=True)
        return [Job(_text(rng, rng.randint(*self.scale.own)), params) for _ in range(count)]


def _text(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(16, 250) for _ in range(count))


# -- asking ---------------------------------------------------------------------------------------------


def answers_of(job: Job, result: Result) -> list[Answer]:
    if job.start and result.routing is not None and result.routing.start != job.start:
        raise Void(f"rows from {result.routing.start}, wanted from {job.start}")
    return [Answer.of(result, sample, greedy=job.params.temperature == 0.0) for sample in result.samples]


async def ask(face: Engine | Router, job: Job) -> list[Answer]:
    return answers_of(job, await face.complete(job.prompt, job.params, start=job.start))


async def burst(face: Engine | Router, jobs: Sequence[Job]) -> list[Answer]:
    """All at once; in order."""
    found = await asyncio.gather(*[ask(face, job) for job in jobs])
    return [answer for answers in found for answer in answers]


class Reading:
    """Streams whose progress can be waited for."""

    def __init__(self, face: Engine | Router) -> None:
        self.answers: list[Answer] = []
        self._face = face
        self._counts: dict[str, int] = {}
        self._moved = asyncio.Event()

    async def read(self, name: str, job: Job) -> None:
        async with self._face.generate(job.prompt, job.params, request_id=name, start=job.start) as stream:
            async for delta in stream:
                self._counts[name] = self._counts.get(name, 0) + len(delta.token_ids)
                self._moved.set()
        self.answers += answers_of(job, stream.result)

    async def until(self, names: Sequence[str], tokens: int) -> None:
        """Until each of them was told of so many tokens."""
        while any(self._counts.get(name, 0) < tokens for name in names):
            self._moved.clear()
            await self._moved.wait()


async def abort_one(face: Engine | Router, job: Job, name: str) -> list[Answer]:
    """One that is aborted when it has some tokens, and returns them with their rows."""
    reading = Reading(face)
    async with asyncio.TaskGroup() as group:
        group.create_task(reading.read(name, job))
        await reading.until([name], 3)
        face.abort(name)
    (answer,) = reading.answers
    if answer.finish_reason != "abort":
        raise Void(f"the abort came too late: {answer.finish_reason}")
    if answer.routing is None or len(answer.routing.array) != len(answer.prompt) + len(answer.tokens) - 1:
        raise AssertionError(f"an aborted request has other rows than tokens: {answer}")
    return [answer]


def demand(books: Any, **least: int) -> dict[str, float]:
    """These counters, each at least so much. Raises Void."""
    values = {name: getattr(books, name) for name in least}
    short = {name: value for name, value in values.items() if value < least[name]}
    if short:
        raise Void(f"nothing was tested where these are too small: {short}")
    return values


# -- plays ----------------------------------------------------------------------------------------------


async def tight(play: Play, **values: Any) -> Played:
    """Shared prefixes, chunks, preemption with swaps, hits on the host, an abort."""
    played = Played()
    jobs = play.jobs(1)
    async with Engine(play.config(**values)) as engine, engine.bus.subscribe(SwapDone, limit=1 << 16) as swaps:
        busy = asyncio.ensure_future(burst(engine, jobs))
        aborted = await abort_one(engine, play.long_ones(2, 1)[0], "leaver")
        played.answers = [*await busy, *aborted]
        # what they computed is on the host by now
        for job in jobs[: max(2, len(jobs) // 2)]:
            played.answers += await ask(engine, job)
        engine.check()
        played.books = demand(
            engine.stats().scheduler, hit_tokens=1, hit_tokens_host=1, preemptions=1, swapped_out_blocks=1,
            swapped_in_blocks=1,
        )  # fmt: skip
        while swaps.pending:
            swap = await anext(swaps)
            if isinstance(swap, SwapDone) and swap.aux_nbytes:
                raise AssertionError(f"a swap moved rows: {swap}")
    return played


class _Believed(TransformersRunner):
    """Says that it is slow, so that a store is asked before anything was measured."""

    async def open(self) -> Capacity:
        return msgspec.structs.replace(await super().open(), prefill_tokens_per_s=_BELIEVED_TOKENS_PER_S)


async def stored(play: Play, **writer: Any) -> Played:
    """Two engines on one store of files, one after the other: the second has what the first computed. `writer`: of the
    configuration of the first one alone."""
    played = Played()
    jobs = play.jobs(3)
    store = {"store": "file", "store_config": {"path": str(play.scratch / "store"), "max_nbytes": 1 << 30}}
    config = play.config(process="inline", num_blocks=play.scale.roomy, **store)
    first = play.config(**{"process": "inline", "num_blocks": play.scale.roomy, **store, **writer})
    async with Engine(first) as engine:
        played.answers += await burst(engine, jobs)
        async with asyncio.timeout(_SETTLE_S):
            # polled: what is on its way to the store has no event of its own
            while engine.stats().scheduler.writing:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        played.books = demand(engine.stats().scheduler, written_blocks=1)
    runner = _Believed(msgspec.convert(config.runner_config, TransformersConfig), config.runner_limits())
    async with Engine(config, runner=runner) as engine:
        # alone: when a prompt was computed its speed is known, and little is fetched any more
        played.answers += await ask(engine, max(jobs, key=lambda job: len(job.prompt)))
        played.answers += await burst(engine, jobs)
        played.books |= demand(engine.stats().scheduler, hit_tokens_store=1, fetched_blocks=1)
    return played


async def updated(play: Play, **values: Any) -> Played:
    """New weights while requests run: they end with what they have, or go on with the keys and values they had."""
    played = Played()
    first, second, third = play.jobs(4), play.jobs(5, play.scale.requests // 2), play.jobs(6, play.scale.requests // 2)
    running = min(4, play.scale.max_running)
    names = [f"long{number}" for number in range(running)]
    async with Engine(play.config(num_blocks=play.scale.roomy, **values)) as engine:
        played.answers += await burst(engine, first)
        for version, folder, mode in ((1, play.other, "abort"), (2, play.folder, "keep")):
            reading = Reading(engine)
            async with asyncio.TaskGroup() as group:
                for name, job in zip(names, play.long_ones(10 + version, running), strict=True):
                    group.create_task(reading.read(name, job))
                await reading.until(names, 2)
                await engine.update_weights(version, str(folder), mode)
            told = [answer.finish_reason for answer in reading.answers]
            both = sum(len(answer.spans) == 2 for answer in reading.answers)
            if (mode == "abort" and set(told) != {"abort"}) or (mode == "keep" and both != running):
                raise Void(f"update with mode {mode}: {told}, {both} under two weights")
            played.answers += reading.answers
            # those of the first burst are in the cache, under other weights
            played.answers += await burst(engine, second if version == 1 else third)
            played.answers += await burst(engine, first[:2])
        books = engine.stats().scheduler
        if books.preemptions:
            raise Void("a preempted request starts again under the new weights, and cannot be judged")
        played.books = demand(books, steps=1)
    return played


async def apart(play: Play, transport: str, **values: Any) -> Played:
    """A prefill and a decode instance, and a router; blocks and rows go from one to the other."""
    played = Played()
    jobs = play.jobs(7)
    config = play.config(num_blocks=play.scale.roomy, **values)
    plans = plans_for(config, {"prefill": 1, "decode": 1}, LinkOptions(transport=transport))
    fleet = LocalFleet(plans)
    async with fleet, connect(fleet.addresses, RouterConfig(require="all")) as router:
        played.answers = await fleet.while_alive(_asked_apart(play, router, jobs))
        played.books = {"received_blocks": await received(router)}
    return played


async def _asked_apart(play: Play, router: Router, jobs: Sequence[Job]) -> list[Answer]:
    found = await burst(router, jobs)
    # what is on the decode instance already is not sent again
    found += await burst(router, jobs[:4])
    return found + await abort_one(router, play.long_ones(8, 1)[0], "leaver")


async def received(router: Router) -> int:
    """Blocks that went from one instance to the other; instances say so twice a second. Raises TimeoutError."""
    async with asyncio.timeout(_SETTLE_S):
        while True:
            told = [one.stats.scheduler.received_blocks for one in router.stats().instances if one.stats is not None]
            if sum(told):
                return sum(told)
            await asyncio.sleep(0.1)
