"""The two sides that `replay_kl` compares: a rollout by the engine, and a trainer that recomputes the log-probs.

The rollout: the `transformers` runner in a worker process, bfloat16, continuous batching, chunked prefill, shared
prefixes out of the prefix cache, too few blocks for all that run. The trainer: the library's own model as a plain
user has it (`from_pretrained`, bfloat16, sdpa, the default experts), whole sequences. Knows no figures.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fdasync_trainer import fixed_numerics, replay_routing
from fdasync_trainer.numerics.logprobs import logprobs_of_logits
from fdasync_trainer.replay.force import find_routers, observed_routing

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.result import Routing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from fdasync.request import Numerics

BLOCK_TOKENS = 16
MAX_RUNNING = 32
GROUP = 4  # samples of a prompt
_PREFIX = 64  # tokens that prompts of one document share
_OWN = (8, 64)
_ANSWER = (64, 160)
_SHORT = (20, 40)
_DOCUMENTS = 8


@dataclass(frozen=True)
class Ask:
    """A prompt, and the number of tokens that each of its GROUP samples gets."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Sampled:
    """One sample.

    Attributes:
        ids: of the prompt and the output.
        prompt_len: tokens of the prompt.
        logprobs: float32, of the sampled tokens: log-softmax of the model's logits.
        routing: rows of all positions but the last.
    """

    ids: list[int]
    prompt_len: int
    logprobs: NDArray[np.float32]
    routing: Routing


@dataclass
class Pass:
    """Output of a trainer's pass over all sequences, in their order.

    Attributes:
        logprobs: float32, of the sampled tokens.
        routing: experts that were computed, of all positions but the last.
        real, live: real tokens, and real tokens without a row; with replay only.
        seconds: of wall time.
    """

    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    routing: list[Routing] = field(default_factory=list)
    real: int = 0
    live: int = 0
    seconds: float = 0.0

    def part(self, count: int) -> Pass:
        """The log-probs and rows of the first sequences."""
        return Pass(self.logprobs[:count], self.routing[:count])


def asks(text: NDArray[np.uint8], tokens: int) -> list[Ask]:
    """Prompts from a text, for at least so many sampled tokens in all; the same for the same arguments.

    Below 1,000 tokens, for a test, answers are shorter.
    """
    answer = _ANSWER if tokens >= 1000 else _SHORT
    rng = random.Random(0)
    starts = [rng.randrange(text.size - 4096) for _ in range(_DOCUMENTS)]
    found: list[Ask] = []
    while sum(GROUP * ask.max_tokens for ask in found) < tokens:
        at = starts[len(found) % _DOCUMENTS]
        stop = at + _PREFIX + rng.randint(*_OWN)
        found.append(Ask(text[at:stop].tolist(), rng.randint(*answer)))
    return found


async def rollout(
    model: Path,
    prompts: Sequence[Ask],
    device: str,
    threads: int,
    say: Callable[[str], None],
    numerics: Numerics = "default",
) -> tuple[list[Sampled], dict[str, Any]]:
    """Sample all prompts at temperature 1; returns the sequences and the engine's counters.

    Raises SystemExit if nothing was preempted or nothing cached: then the rollout lacks what is to be measured.
    """
    num_blocks = _few_blocks(prompts)
    config = EngineConfig(
        model=str(model),
        runner_config={"dtype": "bfloat16", "device": device, "num_threads": threads},
        tokenizer="none",
        routing=True,
        block_tokens=BLOCK_TOKENS,
        num_blocks=num_blocks,
        max_running=MAX_RUNNING,
        max_step_tokens=256,
        max_context_tokens=512,
        seed=0,
        numerics=numerics,
    )
    groups: dict[int, list[Sampled]] = {}
    began = time.perf_counter()
    async with Engine(config) as engine:
        notes = engine.capacity.notes

        async def one(number: int, ask: Ask) -> None:
            params = SamplingParams(n=GROUP, max_tokens=ask.max_tokens, ignore_eos=True, logprobs="raw", seed=number)
            result = await engine.complete(ask.prompt, params)
            groups[number] = []
            for sample in result.samples:
                assert sample.raw_logprobs is not None
                assert sample.routing is not None
                ids = [*ask.prompt, *sample.token_ids]
                groups[number].append(Sampled(ids, len(ask.prompt), sample.raw_logprobs, sample.routing))
            if len(groups) % 10 == 0:
                say(f"rollout: {len(groups)} of {len(prompts)} prompts, {time.perf_counter() - began:.0f} s")

        async with asyncio.TaskGroup() as group:
            for number, ask in enumerate(prompts):
                group.create_task(one(number, ask))
        counted = engine.stats().scheduler
    if not counted.preemptions or not counted.hit_tokens:
        raise SystemExit(f"{counted.preemptions} preemptions, {counted.hit_tokens} cached tokens: nothing was measured")
    facts = {
        "steps": counted.steps,
        "preemptions": counted.preemptions,
        "prompt_tokens": counted.prompt_tokens,
        "cached_tokens": counted.hit_tokens,
        "num_blocks": num_blocks,
        "block_tokens": BLOCK_TOKENS,
        "max_running": MAX_RUNNING,
        "max_step_tokens": 256,
        "notes": list(notes),
        "seconds": round(time.perf_counter() - began, 1),
    }
    return [one for number in sorted(groups) for one in groups[number]], facts


def _few_blocks(asks: Sequence[Ask]) -> int:
    """Two thirds of the blocks that the first running samples need at their end, a prompt counted once; enough for any
    single sample."""
    first = asks[: MAX_RUNNING // GROUP]
    prompts = sum(-(-len(ask.prompt) // BLOCK_TOKENS) for ask in first)
    answers = sum(-(-ask.max_tokens // BLOCK_TOKENS) for ask in first)
    longest = max(len(ask.prompt) + ask.max_tokens for ask in asks)
    return max(-(-longest // BLOCK_TOKENS) + 2, (prompts + GROUP * answers) * 2 // 3)


class Trainer:
    """The library's model, and passes of it over whole sequences. `experts` None is the library's default, `fixed`
    fixes its numerics for good."""

    def __init__(self, model: Path, device: torch.device, experts: str | None = None, *, fixed: bool = False) -> None:
        hf: Any = import_module("transformers")
        options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
        if experts is not None:
            options["experts_implementation"] = experts
        self.model = hf.AutoModelForCausalLM.from_pretrained(model, **options).to(device).eval()
        if fixed:
            fixed_numerics(self.model).apply()
        self.experts = str(self.model.config._experts_implementation)
        self._fixed = fixed
        self._device = device
        self._layers = tuple(find_routers(self.model))

    @torch.no_grad()
    def recompute(self, sequences: Sequence[Sampled], batch: int, *, replay: bool = False) -> Pass:
        """Batches of so many sequences, drawn at random as a trainer does, padded on the right."""
        began, done = time.perf_counter(), self._collected(sequences)
        order = list(range(len(sequences)))
        random.Random(batch).shuffle(order)
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            ids, mask = self._padded([sequences[one].ids for one in chosen])
            seen: dict[int, torch.Tensor] = {}
            records = [sequences[one].routing for one in chosen]
            with (
                observed_routing(self.model, seen),
                replay_routing(self.model, records) if replay else nullcontext() as on,
            ):
                logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            if on is not None:
                done.result.real += on.replayed_tokens + on.live_tokens
                done.result.live += on.live_tokens
            experts = torch.stack([seen[layer].view(*ids.shape, -1) for layer in self._layers], dim=2)
            for row, one in enumerate(chosen):
                length = len(sequences[one].ids)
                done.put(one, logits[row, : length - 1], experts[row, : length - 1])
        return done.finished(began)

    @torch.no_grad()
    def decode(self, sequences: Sequence[Sampled]) -> Pass:
        """One position of all of them at a time, with the library's own cache: the batch shape of decoding."""
        began, done = time.perf_counter(), self._collected(sequences)
        ids, _ = self._padded([one.ids for one in sequences])
        cache, logits, experts = None, [], []
        # positions behind the end of a sequence change nothing before it
        for position in range(ids.shape[1] - 1):
            seen: dict[int, torch.Tensor] = {}
            with observed_routing(self.model, seen):
                output = self.model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits[:, 0])
            experts.append(torch.stack([seen[layer] for layer in self._layers], dim=1))
        all_logits, all_experts = torch.stack(logits, dim=1), torch.stack(experts, dim=1)
        for row, one in enumerate(sequences):
            length = len(one.ids)
            done.put(row, all_logits[row, : length - 1], all_experts[row, : length - 1])
        return done.finished(began)

    def _collected(self, sequences: Sequence[Sampled]) -> _Collected:
        return _Collected(sequences, self._layers, self.model.config.num_experts, self._fixed)

    def _padded(self, all_ids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(ids) for ids in all_ids)
        table, mask = np.zeros((2, len(all_ids), width), np.int64)
        for row, ids in enumerate(all_ids):
            table[row, : len(ids)] = ids
            mask[row, : len(ids)] = 1
        return torch.from_numpy(table).to(self._device), torch.from_numpy(mask).to(self._device)


class _Collected:
    """A pass, filled in any order; with the rollout's log-softmax if it is `fixed`."""

    def __init__(self, sequences: Sequence[Sampled], layers: tuple[int, ...], num_experts: int, fixed: bool) -> None:
        self.result = Pass()
        self._sequences = sequences
        self._layers = layers
        self._num_experts = num_experts
        self._fixed = fixed
        self._logprobs: dict[int, NDArray[np.float32]] = {}
        self._routing: dict[int, Routing] = {}

    def put(self, number: int, logits: torch.Tensor, experts: torch.Tensor) -> None:
        """Logits [n - 1, V] and experts [n - 1, L, K] of a sequence of n tokens."""
        sequence = self._sequences[number]
        logits = logits[sequence.prompt_len - 1 :]
        sampled = torch.tensor(sequence.ids[sequence.prompt_len :], device=logits.device)
        if self._fixed:
            chosen = logprobs_of_logits(logits, sampled)
        else:
            # in float32, as the engine does
            chosen = logits.float().log_softmax(dim=-1).gather(1, sampled.unsqueeze(1)).squeeze(1)
        self._logprobs[number] = chosen.cpu().numpy()
        array = experts.cpu().numpy().astype(np.uint8 if self._num_experts <= 256 else np.uint16)
        self._routing[number] = Routing(array=array, start=0, layer_ids=self._layers, num_experts=self._num_experts)

    def finished(self, began: float) -> Pass:
        self.result.logprobs = [self._logprobs[one] for one in range(len(self._sequences))]
        self.result.routing = [self._routing[one] for one in range(len(self._sequences))]
        self.result.seconds = time.perf_counter() - began
        return self.result


def sampled_rows(sequences: Sequence[Sampled], routing: Sequence[Routing]) -> Iterator[Routing]:
    """The rows of the positions that the sampled tokens of each sequence came from, one for each token."""
    for sequence, one in zip(sequences, routing, strict=True):
        first = sequence.prompt_len - 1
        yield Routing(
            array=one.array[first - one.start :], start=first, layer_ids=one.layer_ids, num_experts=one.num_experts
        )
