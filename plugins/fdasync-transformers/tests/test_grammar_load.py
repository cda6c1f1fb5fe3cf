"""Answers under grammars beside free ones, on a device too small for all of them: swaps, preemption and prefix hits.

On the path of CPUs always, and on a GPU where there is one: its masks are made while the device computes.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from device_path import DEVICE
from fdasync_transformers.sampling.grammars import Grammars
from fdasync_transformers.weights.random_checkpoints import EOS_ID, VOCAB_SIZE, make_random_checkpoint

from fdasync import Engine, EngineConfig, Grammar, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fdasync import Result, Sample

pytestmark = pytest.mark.usefixtures("forked_children")

CPU = {"dtype": "float32", "device": "cpu", "num_threads": 1, "self_check": False}
RUNNERS = [pytest.param(CPU, id="cpu"), pytest.param({**CPU, **DEVICE}, id="gpu", marks=pytest.mark.gpu)]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kinds": {"enum": [["a"], ["b", "c"]]}},
    "required": ["name", "kinds"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TREE = {
    "type": "object",
    "properties": {"v": {"enum": [1, 2]}, "sub": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
    "required": ["v", "sub"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
# each token is a byte: a character of these is several
CHARACTERS = "(é|漢|😀){3,6}"
GRAMMARS = [
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("json_schema", json.dumps(TREE)),
    Grammar("regex", CHARACTERS),
    Grammar("regex", "[a-f]{2}-[0-9]{1,20}"),
    Grammar("gbnf", 'root ::= "x" | "(" root ")"'),
    Grammar("lark", 'start: "yes" | "no"'),
]
# one of them is preempted while others end; prompts share a beginning, of full blocks
SHARED = [1 + at * 7 % 200 for at in range(17)]
PROMPTS = [[*SHARED, 3 + number, 5, 7 + number % 3] for number in range(2 * len(GRAMMARS))]
ROOMY = {"num_blocks": 400, "host_blocks": 0}
TIGHT = {"num_blocks": 44, "host_blocks": 64, "max_running": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_random_checkpoint(path, "qwen3_moe", size="tiny")
    return path


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Grammars:
    return Grammars(folder / "tokenizer.json", VOCAB_SIZE, (EOS_ID,))


def config(folder: Path, runner: dict[str, Any], **values: Any) -> EngineConfig:
    sizes = {"block_tokens": 4, "max_context_tokens": 160, "max_running": 12, "max_step_tokens": 48}
    return EngineConfig(
        model=str(folder), runner_config=runner, process="inline", pipeline_depth=2, **{**sizes, **values}
    )


def params(number: int, grammar: Grammar | None = None, **fields: Any) -> SamplingParams:
    # half of them greedy
    values = {"max_tokens": 40, "temperature": float(number % 2), "seed": 11 + number, **fields}
    return SamplingParams(grammar=grammar, **values)


async def free_of(engine: Engine) -> list[Result]:
    asked = [engine.complete(prompt, params(number)) for number, prompt in enumerate(PROMPTS)]
    return list(await asyncio.gather(*asked))


async def bound_of(engine: Engine) -> list[Result]:
    """Two samples under each grammar, of prompts that free ones have as well."""
    asked = [
        engine.complete(PROMPTS[number], params(number + 1, grammar, n=2, max_tokens=60))
        for number, grammar in enumerate(GRAMMARS)
    ]
    return list(await asyncio.gather(*asked))


def assert_kept(grammars: Grammars, grammar: Grammar, sample: Sample) -> None:
    """Every token is one that the grammar allowed, and a text that ended is one of its texts."""
    matcher = grammars.matcher(0, grammar.packed(), array("i"))
    mask = np.zeros(grammars.words, np.int32)
    for token in sample.token_ids:
        matcher.fill(mask)
        assert int(mask[token // 32]) >> (token % 32) & 1
        matcher.accept(token)
        assert not matcher.problem
    assert sample.finish_reason == ("stop" if sample.token_ids[-1] == EOS_ID else "length")
    if sample.finish_reason == "length":
        return
    if grammar.kind == "json_schema":
        value = json.loads(sample.text)
        assert set(value) in ({"name", "kinds"}, {"v", "sub"})
    elif grammar.kind == "regex":
        assert re.fullmatch(grammar.text, sample.text)
    else:
        assert re.fullmatch(r"\(*x\)*|yes|no", sample.text)
        assert sample.text.count("(") == sample.text.count(")")


def rows(sample: Sample) -> np.ndarray[Any, Any]:
    assert sample.routing is not None
    # the ids of a token in one order, whichever the kernel wrote
    return np.sort(sample.routing.array, axis=-1)


async def assert_exact(engine: Engine, prompts: Sequence[list[int]], results: Sequence[Result]) -> None:
    """The rows are those of the same tokens as a prompt, computed anew."""
    for prompt, result in zip(prompts, results, strict=True):
        for sample in result.samples:
            whole = [*prompt, *sample.token_ids]
            again = await engine.complete(whole, SamplingParams(max_tokens=1, temperature=0.0))
            wanted = rows(again.samples[0])
            # the last token was never forwarded
            assert len(rows(sample)) == len(whole) - 1
            assert np.array_equal(rows(sample), wanted[: len(whole) - 1])


@pytest.mark.ci
@pytest.mark.parametrize("runner", RUNNERS)
async def test_answers_under_grammars_disturb_no_others(
    folder: Path, grammars: Grammars, runner: dict[str, Any]
) -> None:
    async with Engine(config(folder, runner, **ROOMY)) as engine:
        alone = await free_of(engine)
    async with Engine(config(folder, runner, **TIGHT)) as engine:
        bound, free = await asyncio.gather(bound_of(engine), free_of(engine))
        stats = engine.stats().scheduler
        assert stats.preemptions > 0
        assert stats.swapped_out_blocks > 0
        assert stats.swapped_in_blocks > 0
        assert stats.hit_tokens > 0
        engine.check()
    reasons = set()
    for grammar, result in zip(GRAMMARS, bound, strict=True):
        for sample in result.samples:
            assert_kept(grammars, grammar, sample)
            reasons.add(sample.finish_reason)
    assert "stop" in reasons
    assert [one.samples[0].token_ids for one in free] == [one.samples[0].token_ids for one in alone]
    for one, other in zip(free, alone, strict=True):
        assert np.array_equal(rows(one.samples[0]), rows(other.samples[0]))
    async with Engine(config(folder, runner, **ROOMY, prefix_cache=False)) as engine:
        await assert_exact(engine, PROMPTS[: len(GRAMMARS)], bound)
