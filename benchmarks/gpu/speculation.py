"""What drafts give on a GPU where so many of them are right: rates by acceptance and size, the tail of a rollout.

    python -m benchmarks gpu_speculation [--json FILE] [--only b,c,i,r,x] [--sizes 1,8,16,64,256] [--rounds 2]
                                         [--new-tokens 256] [--tiny]

The shape of Qwen3-30B-A3B in bfloat16 with weights drawn on the device; whole engines with a worker, two steps in
flight, routing in every reply, prompts of 1,024 from the prefix cache, up to 3 drafts of a sequence in a step.
Acceptance is imposed: drafts are the tokens of a recorded run of the same requests, each wrong with a chance of 1 - p,
verified as any. The temperature is 50: noise, which belongs to positions, decides nearly every token, so that the
tokens of one run are those of the next, whatever the number of rows does to bfloat16. Parts, each in engines of its
own:

b   `speedup_PP_N`: tokens per second while all N decode, at p = 0.5, 0.7 and 0.9 with the budget, over an engine
    without drafts. `off_N`: the engine with drafts whose drafter has none, over that one. In the conditions
    `drafts_PP_N`: the share of drafts that were right, drafts and tokens of a sequence in a step; and how many tokens
    are those of the recorded run (`same_PP_N`).
c   `tail_ratio`: wall time of 256 samples of skewed lengths (lognormal, 32 to `--longest` tokens), p = 0.7, with drafts
    over without.
i   `idle_share_N` (64): share of the device's time between two steps with drafts, p = 0.7, from a trace of an engine
    whose model is in its own process, the harder case; `drafting_step_us_N`, traced.
r   `rows_wrong`: an engine that checks every row by its position (`routing_debug`), with drafts at p = 0.7 and no
    budget; a wrong row fails the engine, and the figure is 0 of `rows_checked`.
x   `fixed_differing_N`, `default_differing_N` (16): samples of which a token, a log-prob or a row differs from the run
    without drafts, at temperature 1, p = 0.7, no budget, with fixed numerics (aim 0) and with the default's, where a
    row's last bits depend on how many there are. In the conditions: how many tokens are the same.

Figures are written to the JSON after every size; an error in one part is reported there (`errors`) and makes the exit
status 1. Needs a CUDA GPU with 120 GiB; `--tiny` rehearses b, c and r in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import uvloop

from benchmarks.gpu.imposed import Imposed
from benchmarks.gpu.scale import Scale, large, tiny, write_folder
from benchmarks.gpu.serving import Run
from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.drafting import DrafterLimits, Speculation

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from fdasync.result import Result, Sample
    from fdasync.scheduler.state.config import SchedulerStats

_PARTS = "bcirx"
_ACCEPTANCES = (0.9, 0.7, 0.5)
# near to noise alone: tokens of bfloat16 do not depend on the number of rows, and acceptance is what is imposed
_TEMPERATURE = 50.0
_DRAFTS, _DEPTH = 3, 2
# steps at the head of a round that are not timed: prompts' last blocks are computed in them
_EDGE = 8
_AIMS = {
    "speedup_07_16": 1.5,
    "speedup_07_64": 1.9,
    "speedup_07_256": 1.3,
    "tail_ratio": 0.75,
    "idle_share_64": 0.01,
    "rows_wrong": 0.0,
    "fixed_differing_16": 0.0,
}


class Round(NamedTuple):
    """Of one round.

    Attributes:
        seconds: to the last reply.
        rate: tokens a second while all decoded; 0 where that was too short to see.
        drafted, accepted, steps: in the steps of the whole round.
    """

    results: list[Result]
    seconds: float
    rate: float
    drafted: int
    accepted: int
    steps: int

    @property
    def samples(self) -> list[Sample]:
        return [result.samples[0] for result in self.results]

    @property
    def answers(self) -> list[tuple[int, ...]]:
        return [sample.token_ids for sample in self.samples]


class Load:
    """Prompts and lengths of a round.

    Args:
        new_tokens: of each request; one number for all, or one each.
        temperature: of all.
    """

    def __init__(
        self, scale: Scale, count: int, new_tokens: int | Sequence[int], *, temperature: float = _TEMPERATURE
    ) -> None:
        self._temperature = temperature
        self.prompts = scale.prompts(count)
        self.new_tokens = [new_tokens] * count if isinstance(new_tokens, int) else list(new_tokens)

    async def play(self, engine: Engine, *, plainly: bool = False) -> Round:
        """All at once; `plainly`: temperature 1, with log-probs. Raises RuntimeError for a reply of a wrong length."""
        watch = asyncio.create_task(_watch(engine, len(self.prompts), min(_EDGE, min(self.new_tokens) // 8)))
        before = engine.stats().scheduler
        began = time.perf_counter()
        try:
            results = await asyncio.gather(
                *[
                    engine.complete(prompt, self._params(number, new, plainly), routing=True)
                    for number, (prompt, new) in enumerate(zip(self.prompts, self.new_tokens, strict=True))
                ]
            )
            seconds, after = time.perf_counter() - began, engine.stats().scheduler
            # it sees the end of the round at its next look, if it saw the beginning
            await asyncio.wait([watch], timeout=0.1)
        finally:
            watch.cancel()
        rate = watch.result() if watch.done() else 0.0
        for result, new in zip(results, self.new_tokens, strict=True):
            if len(result.samples[0].token_ids) != new:
                raise RuntimeError(f"a reply of {len(result.samples[0].token_ids)} tokens instead of {new}")
        return Round(
            results,
            seconds,
            rate,
            _drafted(after) - _drafted(before),
            _accepted(after) - _accepted(before),
            after.steps - before.steps,
        )

    def _params(self, number: int, new: int, plainly: bool) -> SamplingParams:
        return SamplingParams(
            max_tokens=new,
            temperature=1.0 if plainly else self._temperature,
            seed=number + 1,
            ignore_eos=True,
            logprobs="raw" if plainly else "none",
        )


async def _watch(engine: Engine, count: int, edge: int) -> float:
    """Tokens per second while all decode, but for the first steps."""
    # polled, and rarely: a tap that is told of every step would be in the figure
    first = engine.stats().scheduler.steps
    while (now := engine.stats().scheduler).running < count or now.steps < first + edge:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    began, begin = time.perf_counter(), now
    ended, end = began, now
    while (now := engine.stats().scheduler).running == count:
        ended, end = time.perf_counter(), now
        await asyncio.sleep(0.002)
    if end.steps == begin.steps:
        return 0.0
    return ((end.steps - begin.steps) * count + _accepted(end) - _accepted(begin)) / (ended - began)


def _drafted(stats: SchedulerStats) -> int:
    return stats.drafted_tokens + stats.own_drafted_tokens


def _accepted(stats: SchedulerStats) -> int:
    return stats.accepted_tokens + stats.own_accepted_tokens


def engine_config(
    scale: Scale, folder: str, running: int, longest: int, speculation: Speculation | None, **values: Any
) -> EngineConfig:
    """One engine; graphs of its own ladder, and of all rows of a rehearsal."""
    # fixed numerics are proven by the self-check at the start
    runner = {
        **scale.runner_config((running * (1 + (_DRAFTS if speculation else 0)),)),
        "self_check": "numerics" in values,
    }
    if scale.device != "cpu":
        del runner["graph_sizes"]
    blocks = running * -(-(scale.context + longest + 1) // scale.block_tokens)
    return EngineConfig(
        model=folder,
        runner_config=runner,
        process=values.pop("process", "worker"),
        tokenizer="none",
        max_context_tokens=scale.context + longest + 1,
        block_tokens=scale.block_tokens,
        # rounds before may stay in the cache beside
        num_blocks=min(2 * blocks, blocks + 4000),
        host_blocks=0,
        max_running=running,
        max_step_tokens=8192 if scale.device != "cpu" else max(scale.max_step_tokens, 4 * running + scale.context),
        max_requests=running,
        pipeline_depth=_DEPTH,
        seed=1,
        speculation=speculation,
        **values,
    )


def drafting(running: int, *, budget: bool = True) -> tuple[Speculation, Imposed]:
    """The setting, and a drafter for it."""
    limits = DrafterLimits.of(_DRAFTS, _DEPTH, running)
    return Speculation(drafter="ngram", max_tokens=_DRAFTS, budget=budget), Imposed(limits)


async def rates(run: Run, folder: str, args: argparse.Namespace) -> None:
    """Part b."""
    scale, new = run.scale, args.new_tokens
    loads = {size: Load(scale, size, new) for size in reversed(scale.sizes)}
    answers: dict[int, list[tuple[int, ...]]] = {}
    base: dict[int, float] = {}
    async with Engine(engine_config(scale, folder, scale.sizes[-1], new, None)) as engine:
        for size, load in loads.items():
            # the first round fills the prefix cache
            answers[size] = (await load.play(engine)).answers
            rounds = [await load.play(engine) for _ in range(args.rounds)]
            base[size] = run.report.add(f"tokens_per_s_{size}_none", seen(rounds))
            run.report.conditions[f"same_none_{size}"] = _same(answers[size], rounds[0].answers)
            run.save()
    speculation, drafter = drafting(scale.sizes[-1])
    config = engine_config(scale, folder, scale.sizes[-1], new, speculation)
    async with Engine(config, drafter=drafter) as engine:
        for size, load in loads.items():
            drafter.forget()
            rounds = [await load.play(engine) for _ in range(args.rounds + 1)][1:]
            run.report.add(f"off_{size}", [rate / base[size] for rate in seen(rounds)], aim=0.98)
            for acceptance in _ACCEPTANCES:
                label = f"{acceptance * 10:02.0f}_{size}"
                drafter.know(load.prompts, answers[size], acceptance)
                rounds = [await load.play(engine) for _ in range(args.rounds + 1)][1:]
                values = [rate / base[size] for rate in seen(rounds)]
                run.report.add(f"speedup_{label}", values, aim=_AIMS.get(f"speedup_{label}", 0.98))
                last = rounds[-1]
                run.report.conditions[f"drafts_{label}"] = {
                    "right": round(last.accepted / last.drafted, 3) if last.drafted else None,
                    "drafts_per_step": round(last.drafted / last.steps / size, 3),
                    "tokens_per_step": round(1 + last.accepted / last.steps / size, 3),
                }
                run.report.conditions[f"same_{label}"] = _same(answers[size], last.answers)
                run.save()
            run.say(f"{size} running: done")


def seen(rounds: Sequence[Round]) -> list[float]:
    """The rates. Raises RuntimeError where no round showed one."""
    found = [one.rate for one in rounds if one.rate]
    if not found:
        raise RuntimeError("no round was long enough to see a rate: give more --new-tokens")
    return found


def _same(ones: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """The share of tokens that are equal."""
    a, b = (np.concatenate([np.array(each) for each in side]) for side in (ones, others))
    return round(float((a == b).mean()), 5)


async def tail(run: Run, folder: str, args: argparse.Namespace) -> None:
    """Part c."""
    scale = run.scale
    count, longest = (2, 12) if scale.device == "cpu" else (256, args.longest)
    drawn = np.random.default_rng(3).lognormal(np.log(longest / 10), 0.9, count)
    lengths = [int(length) for length in np.clip(drawn, min(32, longest // 2), longest)]
    run.report.conditions["tail_tokens"] = {"median": int(np.median(lengths)), "max": max(lengths), "sum": sum(lengths)}
    load = Load(scale, count, lengths)
    walls: dict[str, list[float]] = {}
    async with Engine(engine_config(scale, folder, count, longest, None)) as engine:
        answers = (await load.play(engine)).answers
        walls["none"] = [(await load.play(engine)).seconds for _ in range(args.rounds)]
    speculation, drafter = drafting(count)
    async with Engine(engine_config(scale, folder, count, longest, speculation), drafter=drafter) as engine:
        await load.play(engine)
        drafter.know(load.prompts, answers, 0.7)
        walls["drafts"] = [(await load.play(engine)).seconds for _ in range(args.rounds)]
    for way, values in walls.items():
        run.report.add(f"tail_s_{way}", values)
    base = run.report.figures["tail_s_none"]
    run.report.add("tail_ratio", [value / base for value in walls["drafts"]], aim=_AIMS["tail_ratio"])
    run.save()


async def idle(run: Run, folder: str, args: argparse.Namespace) -> None:
    """Part i."""
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.gpu import profile as profiling

    # what was captured in graphs does not survive the tracer's leaving and coming again
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    size, new = 64, args.new_tokens
    load = Load(run.scale, size, new)
    speculation, drafter = drafting(size)
    config = engine_config(run.scale, folder, size, new, speculation, process="inline")
    async with Engine(config, drafter=drafter) as engine:
        answers = (await load.play(engine)).answers
        drafter.know(load.prompts, answers, 0.7)
        await load.play(engine)
        for traced_round in (False, True):
            # the first trace of a process costs seconds
            playing = asyncio.create_task(load.play(engine))
            first = engine.stats().scheduler.steps
            while engine.stats().scheduler.steps < first + 2 * _EDGE:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            with profile(activities=[ProfilerActivity.CUDA]) as traced:
                until = engine.stats().scheduler.steps + (run.scale.traced_steps + 8 if traced_round else 4)
                while engine.stats().scheduler.steps < until:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            await playing
        with tempfile.TemporaryDirectory() as name:
            path = f"{name}/trace.json"
            traced.export_chrome_trace(path)
            events = profiling.read_trace(path)
    broken = profiling.break_down(events, run.scale.traced_steps)
    run.report.add(f"idle_share_{size}", [broken.shares[profiling.IDLE]], aim=_AIMS[f"idle_share_{size}"])
    run.report.add(f"drafting_step_us_{size}", [broken.step_us])
    run.report.conditions[f"kernels_drafts_{size}"] = profiling.table_of(broken)
    profiling.show_kernels(f"a step of {size} sequences with drafts", broken)
    run.save()


async def rows(run: Run, folder: str, args: argparse.Namespace) -> None:
    """Part r."""
    size, new = (2, 8) if run.scale.device == "cpu" else (64, args.new_tokens)
    load = Load(run.scale, size, new)
    speculation, drafter = drafting(size, budget=False)
    config = engine_config(run.scale, folder, size, new, speculation, routing_debug=True)
    async with Engine(config, drafter=drafter) as engine:
        answers = (await load.play(engine)).answers
        drafter.know(load.prompts, answers, 0.7)
        found = await load.play(engine)
    if not found.accepted:
        raise RuntimeError("no draft was accepted: nothing was checked")
    checked = sum(len(sample.routing.array) for sample in found.samples if sample.routing is not None)
    run.report.add("rows_checked", [checked])
    # a wrong one had failed the engine, and this part
    run.report.add("rows_wrong", [0.0], aim=_AIMS["rows_wrong"])
    run.report.conditions["rows_drafts"] = {"drafted": found.drafted, "accepted": found.accepted}
    run.save()


async def numerics(run: Run, folder: str, args: argparse.Namespace) -> None:
    """Part x."""
    size, new = 16, args.new_tokens
    load = Load(run.scale, size, new)
    for way in ("default", "fixed"):
        speculation, drafter = drafting(size, budget=False)
        config = engine_config(run.scale, folder, size, new, speculation, numerics=way)
        async with Engine(config, drafter=drafter) as engine:
            plain = await load.play(engine, plainly=True)
            drafter.know(load.prompts, plain.answers, 0.7)
            found = await load.play(engine, plainly=True)
        if not found.accepted:
            raise RuntimeError("no draft was accepted: nothing was compared")
        different = sum(not _equal(one, other) for one, other in zip(plain.samples, found.samples, strict=True))
        run.report.add(f"{way}_differing_{size}", [different], aim=_AIMS.get(f"{way}_differing_{size}"))
        run.report.conditions[f"{way}_drafts"] = {
            "drafted": found.drafted,
            "accepted": found.accepted,
            "same_tokens": _same(plain.answers, found.answers),
        }
        run.save()


def _equal(one: Sample, other: Sample) -> bool:
    """To the last bit."""
    assert one.routing is not None
    assert other.routing is not None
    assert one.raw_logprobs is not None
    assert other.raw_logprobs is not None
    return (
        one.token_ids == other.token_ids
        and np.array_equal(one.raw_logprobs, other.raw_logprobs)
        and np.array_equal(one.routing.array, other.routing.array)
    )


def measure(run: Run, args: argparse.Namespace, folder: str) -> None:
    """All parts that were asked for, one after the other."""
    stages: dict[str, Callable[[Run, str, argparse.Namespace], Coroutine[Any, Any, None]]] = {
        "b": rates, "c": tail, "i": idle, "r": rows, "x": numerics,
    }  # fmt: skip
    for part, stage in stages.items():
        if part not in run.parts:
            continue
        run.say(f"stage: {part}")
        try:
            uvloop.run(stage(run, folder, args))
        except Exception as error:  # whatever it is, the figures of the others count
            run.failed(part, error)
        run.save()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here, after every size")
    parser.add_argument("--only", metavar="PARTS", default=",".join(_PARTS), help="of b, c, i, r and x (default: all)")
    parser.add_argument("--sizes", metavar="N,N", default="1,8,16,64,256", help="(default 1,8,16,64,256)")
    parser.add_argument("--rounds", type=int, default=2, help="of each figure (default 2)")
    parser.add_argument("--new-tokens", type=int, default=256, help="of each request (default 256)")
    parser.add_argument("--longest", type=int, default=2048, help="answer of part c, tokens (default 2048)")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU in Triton's interpreter")
    args = parser.parse_args(arguments)
    args.parts = {part.strip() for part in args.only.split(",") if part.strip()}
    if not args.parts or args.parts - set(_PARTS):
        parser.error(f"--only names {args.only!r}, parts are b, c, i, r and x")
    if args.rounds < 1 or args.new_tokens < 1 or args.longest < 32:
        parser.error("--rounds and --new-tokens are 1 at least, --longest 32")
    return args


def main() -> None:
    args = parse()
    if args.tiny:
        # before triton is first imported
        os.environ["TRITON_INTERPRET"] = "1"
        # fixed numerics do not run in the interpreter
        args.parts -= {"i", "x"}
        args.rounds, args.new_tokens = 1, 16
    import torch

    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("this benchmark measures a CUDA GPU, and torch sees none here; --tiny rehearses it on a CPU")
    scale = tiny() if args.tiny else large("qwen3-30b-a3b")
    sizes = scale.sizes if args.tiny else tuple(sorted({int(size) for size in args.sizes.split(",")}))
    scale = dataclasses.replace(scale, sizes=sizes)
    run = Run(scale, args.parts, args.json)
    run.report.title = "Drafts on a GPU"
    run.report.conditions |= {
        "gpu": "none" if args.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": scale.model,
        "parts": sorted(args.parts),
        "sizes": scale.sizes,
        "context": scale.context,
        "new_tokens": args.new_tokens,
        "max_tokens": _DRAFTS,
        "dtype": scale.dtype,
        "rounds": args.rounds,
    }
    if args.tiny:
        run.report.conditions["void"] = "a rehearsal on a CPU: no figure says anything of a GPU"
    with tempfile.TemporaryDirectory() as name:
        measure(run, args, write_folder(Path(name), scale))
    run.save()
    run.report.finish(args.json)
    if run.errors:
        for part, error in run.errors.items():
            print(f"error in {part}: {error}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
