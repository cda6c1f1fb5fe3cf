"""Engines of known weights, and updates to others."""

from __future__ import annotations

import msgspec

from fdasync import SamplingParams
from fdasync.runner.synthetic.oracle import Oracle
from fdasync.testing import check_sample, no_leaks, oracle_of, run_sim

PROMPT = list(range(20))


PARAMS = SamplingParams(max_tokens=16, temperature=0.0)


def weights(number):
    return [("weights", "uint64", (1,), number.to_bytes(8, "little"))]


def oracle_with(engine, number):
    return Oracle(msgspec.structs.replace(oracle_of(engine.config).config, weights_id=number))


async def ask(engine, number, prompt=PROMPT, params=PARAMS):
    """A whole request under these weights."""
    result = await engine.complete(prompt, params)
    check_sample(result.samples[0], prompt, params, oracle_with(engine, number))
    return result


def spans(result):
    return [(span.start, span.stop, span.version) for span in result.weight_version]


def play(work):
    with no_leaks():
        return run_sim(work())
