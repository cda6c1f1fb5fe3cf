"""One shape through a whole engine: opened, asked a mixed batch, decoding many at once.

The engine and its model are in this process, so that the device's memory can be read. Knows no judge and no report.
Used by `child.py`.
"""

from __future__ import annotations

import gc
import random
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from fdasync_transformers import TransformersConfig, TransformersRunner
from fdasync_transformers.weights import loading

from benchmarks.gpu import plays
from benchmarks.gpu.engine import one_round
from fdasync import Engine, EngineConfig, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.gpu.judge import Answer


@dataclass(frozen=True)
class Asked:
    """What one shape is asked. Spans are (least, most) tokens.

    Attributes:
        requests: of the mixed batch, all at once: every second one begins with a shared prefix, one in four is sampled.
        again: of those are asked a second time, and find their prompts in the cache.
        running: sequences that decode at a time while decode is timed, with contexts of `context` tokens.
        chunk: token budget of a step: below the longest prompts.
        texts: (texts, tokens) that the rounding is measured on.
    """

    device: str = "cuda"
    kernels: str = "auto"
    requests: int = 12
    prefix: int = 100
    own: tuple[int, int] = (4, 700)
    output: tuple[int, int] = (12, 40)
    again: int = 3
    running: int = 64
    context: int = 256
    new_tokens: int = 72
    block_tokens: int = 16
    chunk: int = 512
    texts: tuple[int, int] = (3, 500)

    @property
    def blocks(self) -> int:
        """Of the pool: enough for all that is asked, so that nothing is preempted."""
        size = self.block_tokens
        mixed = self.requests * -(-(self.prefix + self.own[1] + self.output[1]) // size)
        return mixed + self.running * (-(-(self.context + self.new_tokens) // size) + 1)

    def jobs(self, vocab: int) -> list[plays.Job]:
        rng = random.Random(1)
        prefix = self._text(rng, self.prefix, vocab)
        jobs = []
        for number in range(self.requests):
            prompt = (prefix if number % 2 else ()) + self._text(rng, rng.randint(*self.own), vocab)
            how: dict[str, Any] = {"temperature": 0.0}
            if number % 4 == 2:
                how = {"temperature": 0.9, "top_p": 0.95, "seed": number}
            params = SamplingParams(max_tokens=rng.randint(*self.output), ignore_eos=True, **how)
            jobs.append(plays.Job(prompt, params))
        return jobs

    def _text(self, rng: random.Random, count: int, vocab: int) -> tuple[int, ...]:
        return tuple(rng.randrange(10, vocab) for _ in range(count))


class Found(msgspec.Struct):
    """What was found of a shape.

    Attributes:
        seconds: of the start, and of the weights in it.
        nbytes: of weights, files, KV of a token, and the peak of device memory while weights came.
        counts: of rows and tokens, by verdict.
        decode_ms: of a step while many sequences decode.
        misplaced: see `ShapeJudge.misplaced`.
        tolerance: the largest of `ShapeJudge.tolerance`.
        worst: what is wrong, in words.
    """

    seconds: dict[str, float] = {}
    nbytes: dict[str, int] = {}
    counts: dict[str, int] = {}
    decode_ms: float = 0.0
    misplaced: float = 0.0
    tolerance: float = 0.0
    worst: list[str] = []
    facts: dict[str, Any] = {}


@contextmanager
def _watched(found: Found, mark: Callable[[str], None]) -> Iterator[None]:
    """Within the context, drawing or loading weights is timed, and the peak of the device's memory then is read."""
    honest = {name: getattr(loading, name) for name in ("fill_random", "fill")}

    def wrap(function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            mark("weights begins")
            began = time.perf_counter()
            result = function(*args, **kwargs)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
                found.nbytes["load_peak"] = torch.cuda.max_memory_allocated()
            found.seconds["weights"] = found.seconds.get("weights", 0.0) + time.perf_counter() - began
            mark("weights ends")
            return result

        return wrapped

    for name, function in honest.items():
        setattr(loading, name, wrap(function))
    try:
        yield
    finally:
        for name, function in honest.items():
            setattr(loading, name, function)


async def serve(
    folder: str, asked: Asked, *, random_weights: bool, mark: Callable[[str], None]
) -> tuple[Found, list[Answer]]:
    """Open, ask, time decode, close. `mark` is told of the beginning and the end of drawing or loading weights.

    Raises what the engine raises, and `Void` where the mixed batch had no prefix hit or no chunk.
    """
    found = Found()
    config = EngineConfig(
        model=folder,
        runner_config={
            "device": asked.device,
            "dtype": "bfloat16",
            "kernels": asked.kernels,
            "weights": "random" if random_weights else "checkpoint",
            "num_threads": 1 if asked.device == "cpu" else None,
        },
        process="inline",
        tokenizer="none",
        routing=True,
        block_tokens=asked.block_tokens,
        num_blocks=asked.blocks,
        host_blocks=0,
        max_context_tokens=max(asked.prefix + asked.own[1] + asked.output[1], asked.context + asked.new_tokens),
        max_running=asked.running,
        max_step_tokens=asked.chunk,
        max_requests=2 * asked.running,
        pipeline_depth=2,
        request_deadline_s=100.0,
    )
    runner = TransformersRunner(msgspec.convert(config.runner_config, TransformersConfig), config.runner_limits())
    began = time.perf_counter()
    with _watched(found, mark):
        engine = Engine(config, runner=runner)
        await engine.start()
    try:
        found.seconds["start"] = time.perf_counter() - began
        found.nbytes["weights"] = sum(tensor.nbytes for tensor in runner.opened.model.step_model.model.parameters())
        capacity = engine.capacity
        found.nbytes["kv_token"] = capacity.block_nbytes // capacity.block_tokens
        found.facts = {
            "layers": capacity.num_hidden_layers,
            "moe_layers": list(capacity.moe_layer_ids),
            "experts": capacity.num_experts,
            "top_k": capacity.top_k,
            "kv_layout": capacity.kv_layout,
            "notes": list(capacity.notes),
        }
        answers = await _ask(engine, asked, found)
        found.decode_ms = await _decode(engine, asked)
        engine.check()
    finally:
        await engine.aclose()
    gc.collect()
    return found, answers


async def _ask(engine: Engine, asked: Asked, found: Found) -> list[Answer]:
    jobs = asked.jobs(engine.capacity.vocab_size)
    answers = await plays.burst(engine, jobs)
    for job in jobs[: asked.again]:
        answers += await plays.ask(engine, job)
    # a step holds less than the prompts, so prompts were cut
    least = sum(len(job.prompt) for job in jobs) // asked.chunk
    found.facts["books"] = plays.demand(engine.stats().scheduler, hit_tokens=1, steps=least)
    return answers


async def _decode(engine: Engine, asked: Asked) -> float:
    """Milliseconds of a step while `running` sequences decode; 0 where that was not seen."""
    rng = random.Random(2)
    vocab = engine.capacity.vocab_size
    prompts = [list(asked._text(rng, asked.context, vocab)) for _ in range(asked.running)]
    params = SamplingParams(max_tokens=asked.new_tokens, temperature=0.0, ignore_eos=True)
    # the first round puts the prompts into the cache
    await one_round(engine, prompts, params, routing=True, steady=False)
    _, rate = await one_round(engine, prompts, params, routing=True, steady=True)
    return asked.running / rate * 1e3 if rate else 0.0
