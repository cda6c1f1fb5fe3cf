"""What drafts give a rollout, and what they cost the engine process.

The letter model of `examples/small_moe.py`, trained here, answers each of its questions 16 times at temperature 1, on a
CPU: a group is what RL samples. Before that it answers all of them once with other seeds, which is the epoch before.
Arms take turns, without drafts and with the drafter `ngram`; their tokens, log-probs and rows must be equal, or the run
is void.

    tokens_per_step_ngram    tokens that a step gives of a decoding sequence (none: 1), with the budget, and
    tokens_per_step_all      with as many drafts in every step as the drafter has
    tokens_per_step_epoch    likewise, with `keep_s`: drafts also come from the epoch before (aim: 1.6)
    cpu_per_token_ratio      CPU time of the engine's process for each emitted token, over none, whole requests of some
                             ten tokens at 128 running (aim: 1.1); the model is in a worker. What this program imported
                             before is out of the garbage collector's rounds, as in a serving process: one full round
                             over the training library takes half of a rollout's CPU time, and fell to any arm
    accepted_share           drafts that were right, over all that were forwarded; those behind the end of an answer
                             count too, and make tokens_per_step a little too high
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import uvloop

from benchmarks.lib.arguments import at_least_one, parser_of
from benchmarks.lib.report import Report
from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.drafting import Speculation

if TYPE_CHECKING:
    from fdasync.result import Result, Sample

GROUP, RUNNING, MAX_DRAFTS = 16, 128, 3
_DEADLINE_S = 600.0
_ARMS: dict[str, Speculation | None] = {
    "none": None,
    "ngram": Speculation(drafter="ngram", max_tokens=MAX_DRAFTS),
    "all": Speculation(drafter="ngram", max_tokens=MAX_DRAFTS, budget=False),
    "epoch": Speculation(drafter="ngram", drafter_config={"keep_s": 3600.0}, max_tokens=MAX_DRAFTS, budget=False),
}
# the epoch before has other seeds
_EPOCH = 1000


class Rollout(NamedTuple):
    """One rollout of all questions.

    Attributes:
        results: in the order of the questions.
        cpu_us: of this process, for an emitted token.
        per_step: tokens that a step gave of a sequence.
        accepted: drafts that were right, over all.
    """

    results: list[Result]
    cpu_us: float
    per_step: float
    accepted: float


async def rollout(folder: Path, prompts: list[tuple[int, ...]], speculation: Speculation | None) -> Rollout:
    """Serve all questions, RUNNING samples at a time."""
    config = EngineConfig(
        model=str(folder),
        runner_config={"dtype": "float32", "num_threads": 1},
        max_running=RUNNING,
        speculation=speculation,
        seed=1,
    )
    async with Engine(config) as engine:
        await asyncio.gather(*[_ask(engine, prompt, _EPOCH + number) for number, prompt in enumerate(prompts)])
        gc.collect()
        before = engine.stats().scheduler
        cpu = time.process_time()
        results = await asyncio.gather(*[_ask(engine, prompt, number) for number, prompt in enumerate(prompts)])
        cpu = time.process_time() - cpu
        after = engine.stats().scheduler
    accepted = after.accepted_tokens - before.accepted_tokens
    drafted = after.drafted_tokens - before.drafted_tokens
    tokens = sum(len(sample.token_ids) for result in results for sample in result.samples)
    # the first token of a sample is its prompt's, and the last run may have been cut
    decoded = tokens - GROUP * len(prompts)
    return Rollout(
        results,
        cpu / tokens * 1e6,
        decoded / max(decoded - accepted, 1),
        accepted / drafted if drafted else 0.0,
    )


async def _ask(engine: Engine, prompt: tuple[int, ...], number: int) -> Result:
    from examples.small_moe import END, MAX_NEW_TOKENS

    params = SamplingParams(
        max_tokens=MAX_NEW_TOKENS, temperature=1.0, n=GROUP, seed=number + 2, stop_token_ids=(END,), logprobs="raw"
    )
    return await engine.complete(prompt, params, request_id=f"question-{number}", deadline_s=_DEADLINE_S)


def differing(ones: list[Result], others: list[Result]) -> int:
    """Samples whose tokens or rows differ, or whose log-probs are more than float32's order of sums apart."""
    pairs = zip(ones, others, strict=True)
    return sum(not _same(a, b) for one, other in pairs for a, b in zip(one.samples, other.samples, strict=True))


def _same(one: Sample, other: Sample) -> bool:
    if one.token_ids != other.token_ids or one.finish_reason != other.finish_reason:
        return False
    assert one.routing is not None
    assert other.routing is not None
    assert one.raw_logprobs is not None
    assert other.raw_logprobs is not None
    near = bool(np.allclose(one.raw_logprobs, other.raw_logprobs, rtol=0, atol=1e-4))
    return near and bool(np.array_equal(one.routing.array, other.routing.array))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--questions", type=at_least_one, default=64, help="groups of 16 samples")
    parser.add_argument("--pairs", type=at_least_one, default=3, help="rollouts of each arm")
    parser.add_argument("--steps", type=at_least_one, help="training steps of the model (default: the example's)")
    options = parser.parse_args()
    from examples.small_moe import STEPS, pretrain, problems

    report = Report("speculation: groups of 16 samples on a CPU")
    report.conditions |= {
        "questions": options.questions,
        "max_tokens": MAX_DRAFTS,
        "max_running": RUNNING,
    }
    with tempfile.TemporaryDirectory(prefix="fdasync-speculation-") as name:
        folder = pretrain(
            Path(name) / "model", steps=options.steps or STEPS, say=lambda line: print(line, file=sys.stderr)
        )
        prompts = [problem.prompt for problem in problems(options.questions, seed=3)]
        found: dict[str, list[Rollout]] = {arm: [] for arm in _ARMS}
        gc.collect()
        gc.freeze()
        for _ in range(options.pairs):
            for arm, speculation in _ARMS.items():
                one = uvloop.run(rollout(folder, prompts, speculation))
                wrong = differing(found["none"][0].results, one.results) if found["none"] else 0
                if wrong:
                    raise SystemExit(f"{arm}: {wrong} samples differ from those without drafts")
                found[arm].append(one)
    for arm in ("ngram", "all", "epoch"):
        report.add(f"tokens_per_step_{arm}", [one.per_step for one in found[arm]], aim=1.6 if arm == "epoch" else None)
        report.add(f"accepted_share_{arm}", [one.accepted for one in found[arm]])
        pairs = zip(found[arm], found["none"], strict=True)
        report.add(f"cpu_per_token_ratio_{arm}", [one.cpu_us / none.cpu_us for one, none in pairs], aim=1.1)
    report.add("cpu_us_per_token_none", [one.cpu_us for one in found["none"]])
    report.finish(options.json_path)
