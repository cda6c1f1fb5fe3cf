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
from dataclasses import dataclass
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
    from collections.abc import Sequence
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


@dataclass(frozen=True)
class Pass:
    """Output of a trainer's pass over all sequences, in their order.

    Attributes:
        logprobs: float32, of the sampled tokens.
        routing: experts that were computed, of all positions but the last.
        real, live: real tokens, and real tokens without a row; with replay only.
        seconds: of wall time.
    """

    logprobs: list[NDArray[np.float32]]
    routing: list[Routing]
    real: int = 0
    live: int = 0
    seconds: float = 0.0


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
    model: Path, prompts: Sequence[Ask], device: str, numerics: Numerics
) -> tuple[list[Sampled], dict[str, Any]]:
    """Sample all prompts at temperature 1; returns the sequences and the engine's counters.

    Raises SystemExit if nothing was preempted or nothing cached: then the rollout lacks what is to be measured.
    """
    num_blocks = _few_blocks(prompts)
    config = EngineConfig(
        model=str(model),
        runner_config={"dtype": "bfloat16", "device": device, "num_threads": 1},
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
    async with Engine(config) as engine:

        async def group(number: int, ask: Ask) -> list[Sampled]:
            params = SamplingParams(n=GROUP, max_tokens=ask.max_tokens, ignore_eos=True, logprobs="raw", seed=number)
            found = []
            for sample in (await engine.complete(ask.prompt, params)).samples:
                assert sample.raw_logprobs is not None
                assert sample.routing is not None
                ids = [*ask.prompt, *sample.token_ids]
                found.append(Sampled(ids, len(ask.prompt), sample.raw_logprobs, sample.routing))
            return found

        groups = await asyncio.gather(*[group(number, ask) for number, ask in enumerate(prompts)])
        counted, notes = engine.stats().scheduler, list(engine.capacity.notes)
    if not counted.preemptions or not counted.hit_tokens:
        raise SystemExit(f"{counted.preemptions} preemptions, {counted.hit_tokens} cached tokens: nothing was measured")
    facts = {
        "preemptions": counted.preemptions,
        "prompt_tokens": counted.prompt_tokens,
        "cached_tokens": counted.hit_tokens,
        "num_blocks": num_blocks,
        "notes": notes,
    }
    return [one for found in groups for one in found], facts


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
        began, real, live = time.perf_counter(), 0, 0
        logprobs: dict[int, NDArray[np.float32]] = {}
        routing: dict[int, Routing] = {}
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
                real += on.replayed_tokens + on.live_tokens
                live += on.live_tokens
            experts = torch.stack([seen[layer].view(*ids.shape, -1) for layer in self._layers], dim=2)
            for row, one in enumerate(chosen):
                length = len(sequences[one].ids)
                logprobs[one] = self._logprobs(sequences[one], logits[row, : length - 1])
                routing[one] = self._rows(experts[row, : length - 1])
        seconds = time.perf_counter() - began
        order.sort()
        return Pass([logprobs[one] for one in order], [routing[one] for one in order], real, live, seconds)

    def _padded(self, all_ids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(ids) for ids in all_ids)
        table, mask = np.zeros((2, len(all_ids), width), np.int64)
        for row, ids in enumerate(all_ids):
            table[row, : len(ids)] = ids
            mask[row, : len(ids)] = 1
        return torch.from_numpy(table).to(self._device), torch.from_numpy(mask).to(self._device)

    def _logprobs(self, sequence: Sampled, logits: torch.Tensor) -> NDArray[np.float32]:
        """Of the sampled tokens, from logits [n - 1, V] of a sequence of n tokens; with the rollout's log-softmax if
        numerics are fixed."""
        logits = logits[sequence.prompt_len - 1 :]
        sampled = torch.tensor(sequence.ids[sequence.prompt_len :], device=logits.device)
        if self._fixed:
            chosen = logprobs_of_logits(logits, sampled)
        else:
            # in float32, as the engine does
            chosen = logits.float().log_softmax(dim=-1).gather(1, sampled.unsqueeze(1)).squeeze(1)
        found: NDArray[np.float32] = chosen.cpu().numpy()
        return found

    def _rows(self, experts: torch.Tensor) -> Routing:
        """Of chosen experts [n - 1, L, K]."""
        count = self.model.config.num_experts
        array = experts.cpu().numpy().astype(np.uint8 if count <= 256 else np.uint16)
        return Routing(array=array, start=0, layer_ids=self._layers, num_experts=count)
