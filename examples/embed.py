"""For embedders: rollouts for reinforcement learning, with log-probs and routing for the trainer.

    python examples/embed.py [CHECKPOINT]

Samples a group of answers for each prompt, scores them, and shows the input of a trainer: token ids, the log-probs that
they were sampled with, and the routing rows to replay. The conversation's next turn asks only for the rows that the
first one did not return (`start`). Without CHECKPOINT it uses a small random one.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np
from fdasync_transformers import make_random_checkpoint

from fdasync import Engine, EngineConfig, Result, SamplingParams
from fdasync.errors import EngineFailed

PROMPTS = ["What is 2 + 2?", "Name a prime number.", "Say something nice."]
GROUP = 4


def reward(text: str) -> float:
    """Stands for yours: the share of letters."""
    return sum(character.isalpha() for character in text) / max(len(text), 1)


def advantages(result: Result) -> np.ndarray:
    """GRPO: rewards of a group, centred and scaled."""
    rewards = np.array([reward(sample.text) for sample in result.samples])
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


async def rollout(engine: Engine, prompt: str) -> None:
    params = SamplingParams(n=GROUP, max_tokens=48, temperature=1.0, logprobs="processed", seed=7)
    result = await engine.complete(prompt, params, deadline_s=120)
    for sample, advantage in zip(result.samples, advantages(result), strict=True):
        assert sample.routing is not None
        assert sample.processed_logprobs is not None
        rows = len(result.prompt_token_ids) + len(sample.token_ids) - 1
        assert sample.routing.array.shape[0] == rows
        print(
            f"{prompt!r} #{sample.index}: {len(sample.token_ids)} tokens ({sample.finish_reason}),"
            f" mean logprob {sample.processed_logprobs.mean():.2f}, advantage {advantage:+.2f},"
            f" routing {sample.routing.array.shape} {sample.routing.array.dtype}, {sample.cached_tokens} cached"
        )
    # the next turn of the best answer: its KV is in the prefix cache, and so are its rows
    best = result.samples[int(advantages(result).argmax())]
    turn = [*result.prompt_token_ids, *best.token_ids, 10]
    known = len(turn) - 2
    follow_up = await engine.complete(turn, SamplingParams(max_tokens=8, temperature=0.0), start=known)
    assert follow_up.routing is not None
    assert follow_up.routing.start == known
    print(f"  next turn: {follow_up.cached_tokens} of {len(turn)} prompt tokens cached, rows from {known} on")


async def main(model: str) -> None:
    async with Engine(EngineConfig(model=model)) as engine:
        async with asyncio.TaskGroup() as group:
            for prompt in PROMPTS:
                group.create_task(rollout(engine, prompt))
        await engine.drain(timeout_s=30)
        print(f"{engine.stats().scheduler.generated_tokens} tokens generated")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        chosen = sys.argv[1] if len(sys.argv) > 1 else str(make_random_checkpoint(Path(folder) / "model"))
        try:
            asyncio.run(main(chosen))
        except EngineFailed as failure:
            sys.exit(f"{failure}; so far: {failure.partial}")
