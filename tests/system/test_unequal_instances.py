"""Instances that hold unequal amounts behind one router: what any of them can serve is served, and right."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from random import Random

import pytest
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.router import Router
from fdasync_fleet.testing.sim.network import SimNetwork
from fdasync_fleet.testing.sim.transport import SimFabric, SimFaults, SimTransport

from fdasync import Instance, SamplingParams
from fdasync.errors import BadInput, PeerUnreachable, TooLong
from fdasync.testing import check_sample, oracle_of, synthetic_config
from fdasync.testing.harness.engines import LetterTokenizer
from fdasync.testing.sim.loop import run_sim

SMALL, LARGE = 20, 60
ROLES = {"p": "prefill", "d": "decode", "m": "mixed"}


class Fleet:
    """A router and its instances, by name: (KV blocks of 4 tokens, context)."""

    def __init__(self, sizes, **router):
        network, fabric = SimNetwork(Random(1)), SimFabric(Random(2), SimFaults())
        self.instances = {}
        for name, (blocks, context) in sizes.items():
            runner = {"num_blocks": blocks, "max_context_tokens": context, "block_tokens": 4, "vocab_size": 26}
            config = synthetic_config(runner, role=ROLES[name[0]], host_blocks=8, max_running=8, max_step_tokens=32)
            self.config = config
            self.instances[name] = Instance(
                config, listen=f"ipc:///run/{name}", name=name, wire=network.wire(name),
                transports=[SimTransport(fabric)], tokenizer=LetterTokenizer(),
            )  # fmt: skip
        addresses = [instance.address for instance in self.instances.values()]
        self.router = Router(addresses, RouterConfig(**router), wire=network.wire("router"), seed=1)

    async def __aenter__(self):
        async with AsyncExitStack() as stack:
            for instance in self.instances.values():
                await stack.enter_async_context(instance)
            await stack.enter_async_context(self.router)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc):
        await self._stack.aclose()

    async def check(self, count, max_tokens, n=1, *, text=False):
        """Ask for it several times at once; each answer is the oracle's."""
        oracle = oracle_of(self.config)
        prompts = [tuple((7 * number + place) % 26 for place in range(count)) for number in range(4)]
        params = SamplingParams(max_tokens=max_tokens, n=n, seed=3)
        asked = [LetterTokenizer().decode(prompt) if text else prompt for prompt in prompts]
        answers = [self.router.complete(prompt, params, deadline_s=60.0) for prompt in asked]
        for prompt, result in zip(prompts, await asyncio.gather(*answers), strict=True):
            assert result.prompt_token_ids == prompt
            assert [sample.finish_reason for sample in result.samples] == ["length"] * n
            for sample in result.samples:
                check_sample(sample, prompt, params, oracle)


FLEETS = {
    "two mixed": {"m0": (SMALL, 400), "m1": (LARGE, 400)},
    "two contexts": {"m0": (LARGE, 100), "m1": (LARGE, 400)},
    "a small decoder": {"p0": (LARGE, 400), "d0": (SMALL, 400)},
    "a small decoder beside a large one": {"p0": (LARGE, 400), "d0": (SMALL, 400), "d1": (LARGE, 400)},
    "a small prefiller": {"p0": (SMALL, 400), "d0": (LARGE, 400)},
    "a prefiller of a short context": {"p0": (LARGE, 100), "d0": (LARGE, 400)},
    "decoders of short and long contexts": {"p0": (LARGE, 400), "d0": (LARGE, 100), "d1": (LARGE, 400)},
}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        # text is tokens once it has reached an instance: of every other fleet either stands for both
        pytest.param(sizes, text, id=f"{name}-{word}", marks=() if number % 2 == text else pytest.mark.nightly)
        for number, (name, sizes) in enumerate(FLEETS.items())
        for text, word in enumerate(("tokens", "text"))
    ],
)
def test_what_any_instance_can_hold_is_served(sizes, text):
    async def main():
        # a try that fails would be one too many
        async with Fleet(sizes, retries=0) as fleet:
            for count, max_tokens, n in ((100, 60, 1), (50, 100, 1), (30, 20, 1), (30, 10, 6)):
                await fleet.check(count, max_tokens, n, text=text)

    run_sim(main())


def test_a_prefiller_of_a_short_context_hands_over_what_goes_beyond_it():
    async def main():
        async with Fleet({"p0": (LARGE, 100), "d0": (LARGE, 400)}) as fleet:
            await fleet.check(90, 60)
            assert fleet.instances["d0"].engine.stats().scheduler.leases_granted == 4

    run_sim(main())


@pytest.mark.parametrize("text", [False, True], ids=["tokens", "text"])
def test_a_request_that_no_instance_can_hold_is_refused_with_the_largest_limit(text):
    async def main():
        async with Fleet({"p0": (SMALL, 400), "d0": (LARGE, 400), "m0": (LARGE, 100)}) as fleet:
            for count, max_tokens in ((200, 42), (300, 1)):
                prompt = "a" * count if text else [0] * count
                with pytest.raises(BadInput) as caught:
                    await fleet.router.complete(prompt, SamplingParams(max_tokens=max_tokens))
                assert isinstance(caught.value, TooLong)
                assert (caught.value.limit, caught.value.prompt_tokens) == (241, count)
            await fleet.check(200, 41, text=text)

    run_sim(main())


def test_what_only_one_that_is_away_could_hold_may_be_tried_again():
    async def main():
        async with Fleet({"m0": (SMALL, 400), "m1": (LARGE, 400)}, absent_s=5.0) as fleet:
            await fleet.instances["m1"].aclose()
            with pytest.raises(PeerUnreachable, match=r"for 5 s that takes it; missing: ipc:///run/m1"):
                await fleet.router.complete([0] * 100, SamplingParams(max_tokens=60))
            # which does not hold up what others can
            await fleet.check(30, 20)

    run_sim(main())
