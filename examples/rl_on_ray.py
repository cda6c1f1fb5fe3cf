"""For embedders: an RL loop on Ray. Roll-outs in actors, the trainer in another, rows by reference.

    python examples/rl_on_ray.py                        # a fleet on this machine alone, on the synthetic runner
    python examples/rl_on_ray.py --address auto --decode 6 --steps 10

Each roll-out actor has a router of its own over the fleet and asks for its prompts. It leaves samples, with the experts
of every token, in Ray's object store and passes references on; the trainer reads them there without a copy. The trainer
sends new weights from its memory, through the object store as well. The synthetic runner has one number for weights and
the trainer one line for a step: put your model and your step there.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any, NamedTuple

import numpy as np

try:
    import ray
    from fdasync_ray import FleetConfig, RayFleet, attach
except ModuleNotFoundError as missing:
    raise SystemExit(f"rl_on_ray.py: {missing.name} is missing: pip install -e 'plugins/fdasync-ray[ray]'") from None

from fdasync import EngineConfig, SamplingParams

FLEET = "rl"
GROUP = 4  # samples of a prompt
PARAMS = SamplingParams(n=GROUP, max_tokens=16, temperature=1.0, logprobs="raw")
RUNNER = {"vocab_size": 128, "block_tokens": 16, "num_blocks": 512, "max_context_tokens": 512}


class Experience(NamedTuple):
    """A sample as the trainer takes it. (Ray sends classes of a program by value, which no Struct survives.)

    Attributes:
        tokens: of prompt and output, int32 [tokens].
        rows: experts of all but the last token, [tokens - 1, layers, top_k].
        logprobs: of the output, float32 [output].
        version: of the weights that sampled its last token.
    """

    tokens: np.ndarray[Any, Any]
    rows: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]
    version: str


class Rollouts:
    """An actor that samples; any number of them share a fleet."""

    async def open(self) -> None:
        """Connect to the fleet; until `close`."""
        self._context = attach(FLEET).router()
        self._router = await self._context.__aenter__()

    async def close(self) -> None:
        await self._context.__aexit__(None, None, None)

    async def sample(self, prompts: list[list[int]]) -> list[Any]:
        """References of one list of experiences for each prompt."""
        results = await asyncio.gather(*[self._router.complete(prompt, PARAMS, deadline_s=120) for prompt in prompts])
        return [ray.put(experiences(prompt, result)) for prompt, result in zip(prompts, results, strict=True)]


def experiences(prompt: list[int], result: Any) -> list[Experience]:
    return [
        Experience(
            np.asarray([*prompt, *sample.token_ids], np.int32),
            sample.routing.array,
            np.asarray(sample.raw_logprobs, np.float32),
            str(sample.weight_version[-1].version),
        )
        for sample in result.samples
    ]


class Trainer:
    """An actor that learns, and gives the fleet its weights."""

    def __init__(self) -> None:
        self._weights = np.array([1], np.uint64)

    async def step(self, version: int, references: list[Any]) -> str:
        """Train on what the references name, and update the fleet; returns a line for people."""
        groups: list[list[Experience]] = await asyncio.gather(*references)
        samples = [one for group in groups for one in group]
        assert all(not one.rows.flags.owndata for one in samples), "rows lie in the object store"
        assert all(len(one.rows) == len(one.tokens) - 1 for one in samples), "a row for each token but the last"
        mean = float(np.mean([one.logprobs.mean() for one in samples]))
        # your step: forward passes with `rows` replayed, a loss, an optimiser
        self._weights = self._weights + np.uint64(len(samples))
        client = attach(FLEET)
        async with client.router() as router:
            await client.update_weights(router, version, [("weights", "uint64", (1,), self._weights)], mode="keep")
        versions = ", ".join(sorted({one.version for one in samples}))
        return f"step {version}: {len(samples)} samples of version {versions}, mean logprob {mean:.2f}"


async def main(options: argparse.Namespace) -> None:
    engine = EngineConfig(runner="synthetic", runner_config=RUNNER, process="inline", role="mixed", weight_version="0")
    config = FleetConfig(engine=engine, name=FLEET, prefill=options.prefill, decode=options.decode)
    async with RayFleet(config, print):
        rollouts = [ray.remote(Rollouts).options(num_cpus=0).remote() for _ in range(options.actors)]
        await asyncio.gather(*[one.open.remote() for one in rollouts])
        trainer = ray.remote(Trainer).options(num_cpus=0).remote()
        for step in range(1, options.steps + 1):
            asked = [[[2 + step, 3 + actor, *range(10, 40)], [90, *range(40, 70)]] for actor in range(options.actors)]
            sampling = [one.sample.remote(prompts) for one, prompts in zip(rollouts, asked, strict=True)]
            references = [each for some in await asyncio.gather(*sampling) for each in some]
            # references alone pass through this process
            print(await trainer.step.remote(step, references))
        await asyncio.gather(*[one.close.remote() for one in rollouts])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--address", default="local", help="of a Ray cluster; auto: the one that runs here")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    own = {"num_cpus": 8, "include_dashboard": False} if arguments.address == "local" else {}
    ray.init(address=arguments.address, log_to_driver=False, **own)
    asyncio.run(main(arguments))
