"""The requests of `fdasync verify-trainer`, and what came of serving them.

Made from a seed; prompts share prefixes, and lengths are of all kinds. Knows a `Generator`, and no processes. Called by
`serve.py` and `run.py`.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fdasync.errors import BadInput
from fdasync.request import SamplingParams, WeightsFingerprint
from fdasync.result import Result
from fdasync.runner.shares import MOST_RANKS
from fdasync.stats import SchedulerStats

if TYPE_CHECKING:
    from fdasync.generator import Generator

#: small, so that short prompts have whole blocks
BLOCK_TOKENS = 16
MAX_RUNNING = 8
# requests under way: requests behind the running ones wait for room, for which instances wait a minute at most
_MAX_OPEN = 2 * MAX_RUNNING
#: odd, so that chunks of prompts end at every place of a block
MAX_STEP_TOKENS = 61
#: of the requests that are not sampled from the model's own distribution
TEMPERATURE = 0.7
_DOCUMENTS = 4
_SHARED = (33, 79)
_OWN = (3, 40)
_ANSWER = (17, 64)


class TrainerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `fdasync verify-trainer` compares.

    Attributes:
        model: Hugging Face checkpoint folder.
        numerics: of both sides.
        sum_slices: of fixed numerics, of both sides.
        tensor_parallel: of the rollout.
        tokens: sampled tokens, at least.
        seed: of prompts, sampling and weights.
        batch: sequences in a trainer's pass.
        dtype: of weights and KV, of both sides; float64 has no fixed numerics.
        device: of both sides: cpu, cuda:1, ...; a GPU if there is one by default.
        num_threads: CPU threads of each model process.
        pd: serve by a prefill and a decode instance, too.
        update: update the weights in the middle.
        write: write the rollout's log-probs here, for another trainer; goes without an update.
        rollout: a rollout's file (--write), to be compared with --logprobs; serves nothing.
        logprobs: another trainer's file of log-probs for --rollout.
        as_json: print JSON instead of lines.
    """

    model: Path | None = None
    numerics: Literal["fixed", "default"] = "fixed"
    sum_slices: Literal[1, 2, 4] = 1
    tensor_parallel: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1
    tokens: Annotated[int, Meta(ge=1, le=10_000_000)] = 2000
    seed: Annotated[int, Meta(ge=0)] = 0
    batch: Annotated[int, Meta(ge=1)] = 4
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = None
    num_threads: Annotated[int, Meta(ge=1)] | None = None
    pd: bool = True
    update: bool = True
    write: Path | None = None
    rollout: Path | None = None
    logprobs: Path | None = None
    as_json: bool = False


class Ask(msgspec.Struct, frozen=True):
    """A request.

    Attributes:
        name: its id.
        prompt: token ids.
        params: one sample.
    """

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams


class Update(msgspec.Struct, frozen=True):
    """New weights for an engine.

    Attributes:
        tensors: for `update_weights`.
        expected: their fingerprint at the trainer.
    """

    tensors: list[Any]
    expected: WeightsFingerprint


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that were served in one way.

    Attributes:
        name: of the way.
        asks, results: in one order.
        weights_ids: fingerprints of the engine's weights, by version.
        crossed: ids of the requests that ran while weights were updated.
        totals: counters of the engines.
        moved_blocks: that went from prefill to decode instances.
    """

    name: str
    asks: list[Ask]
    results: list[Result]
    weights_ids: dict[str, str]
    crossed: frozenset[str]
    totals: SchedulerStats
    moved_blocks: int = 0


def make_asks(name: str, tokens: int, vocab_size: int, seed: int) -> list[Ask]:
    """Requests for at least so many tokens; the same for the same arguments."""
    rng = random.Random(f"{name} {seed}")
    low = min(16, vocab_size - 1)

    def text(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(low, vocab_size) for _ in range(count))

    documents = [text(rng.randint(*_SHARED)) for _ in range(_DOCUMENTS)]
    asks: list[Ask] = []
    left = tokens
    while left > 0:
        number = len(asks)
        prompt = documents[number % _DOCUMENTS][: None if number % 3 else BLOCK_TOKENS] + text(rng.randint(*_OWN))
        count = rng.randint(*_ANSWER)
        odd = number % 2 == 1
        params = SamplingParams(
            max_tokens=count,
            temperature=TEMPERATURE if odd else 1.0,
            logprobs="processed" if odd else "raw",
            seed=rng.randrange(1 << 31),
            ignore_eos=True,
        )
        asks.append(Ask(f"{name}-{number}", prompt, params))
        left -= count
    return asks


def few_blocks(asks: list[Ask]) -> int:
    """About half of the blocks that the running requests need at their end, so that some are preempted; enough for any
    single one."""
    needs = [-(-(len(ask.prompt) + ask.params.max_tokens) // BLOCK_TOKENS) for ask in asks]
    return max(max(needs) + 2, sum(sorted(needs)[-MAX_RUNNING:]) // 2)


def check_room(max_context_tokens: int) -> None:
    """Raise BadInput for a model whose context does not hold the requests."""
    most = _SHARED[1] + _OWN[1] + _ANSWER[1]
    if max_context_tokens < most:
        raise BadInput("--model", f"a context of {max_context_tokens} tokens is too short", limit=f"at least {most}")


class Answers:
    """Results of requests that are served together.

    Attributes:
        results: so far, by the request's name.
        third: set once a third of the requests has ended.
    """

    def __init__(self, asks: list[Ask]) -> None:
        self.results: dict[str, Result] = {}
        self.third = asyncio.Event()
        self._asks = asks
        self._open = asyncio.Semaphore(_MAX_OPEN)

    async def serve(self, face: Generator) -> list[Result]:
        """Serve all requests; returns their results, in their order."""
        async with asyncio.TaskGroup() as group:
            for ask in self._asks:
                group.create_task(self._one(face, ask))
        return [self.results[ask.name] for ask in self._asks]

    async def _one(self, face: Generator, ask: Ask) -> None:
        # requests have deadlines: each ends, and a failed one ends the group
        async with self._open:
            self.results[ask.name] = await face.complete(ask.prompt, ask.params, request_id=ask.name)
        if 3 * len(self.results) >= len(self._asks):
            self.third.set()
