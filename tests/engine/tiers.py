"""Engines with a host tier and a store, in virtual time."""

from __future__ import annotations

from fdasync import SamplingParams
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.testing import check_sample, no_leaks, oracle_of, run_sim, synthetic_config
from fdasync.testing.stores.faults import FaultyStore, StoreFaults

PARAMS = SamplingParams(max_tokens=4, temperature=0.0)


COSTS = {"step_s": 0.01, "token_s": 0.002, "copy_s": 0.001}


def prompt(number, length=40):
    """Prompts that share nothing: their first tokens differ."""
    return [number, *[(number * 31 + at * 7) % 100 for at in range(1, length)]]


def tiers_config(runner=None, **values):
    """12 device blocks of 4 tokens: one prompt of 40 fits, two do not."""
    own = {"num_blocks": 12, "max_context_tokens": 48, **COSTS, **(runner or {})}
    return synthetic_config(own, **{"host_blocks": 64, "max_step_tokens": 64, **values})


def kept_memory(plan=None):
    """A memory store with faults that outlives the engine that opens it."""

    class Kept(FaultyStore):
        async def aclose(self):
            self.end()

    return Kept(MemoryStore(MemoryConfig()), plan or StoreFaults())


async def ask(engine, tokens, params=PARAMS, **arguments):
    result = await engine.complete(tokens, params, **arguments)
    check_sample(result.samples[0], tokens, params, oracle_of(engine.config))
    return result


def play(work):
    with no_leaks():
        run_sim(work())
