"""Grammars through whole engines over a checkpoint: valid texts at every depth, on both paths, after every move."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
from device_path import DEVICE, ON_GPU
from fdasync_fleet.testing.patience import LEASES, LINKS
from fdasync_transformers.weights.random_checkpoints import EOS_ID, make_random_checkpoint

import fdasync
from fdasync import Engine, EngineConfig, Grammar, Instance, SamplingParams
from fdasync.errors import BadInput
from fdasync.testing import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("forked_children")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kinds": {"enum": [["a"], ["b", "c"]]}},
    "required": ["name", "kinds"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
CPU = {"dtype": "float32", "device": "cpu", "num_threads": 1, "self_check": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_random_checkpoint(path, "qwen3_moe", size="tiny")
    return path


def config(folder: Path, runner: dict[str, Any] = CPU, **values: Any) -> EngineConfig:
    sizes = {"block_tokens": 4, "num_blocks": 128, "max_context_tokens": 128, "max_running": 8, "max_step_tokens": 64}
    return EngineConfig(model=str(folder), runner_config=runner, **{"process": "inline", **sizes, **values})


def under(grammar: Grammar | None = JSON, **fields: Any) -> SamplingParams:
    values = {"max_tokens": 100, "temperature": 1.0, "seed": 3, "logprobs": "both", "top_logprobs": 2, **fields}
    return SamplingParams(grammar=grammar, **values)


def check(sample: Any) -> tuple[int, ...]:
    assert sample.finish_reason == "stop"
    value = json.loads(sample.text)
    assert set(value) == {"name", "kinds"}
    assert value["kinds"] in (["a"], ["b", "c"])
    # forced tokens have all of the probability that was sampled from, and little of the model's own
    assert max(sample.processed_logprobs) == 0.0
    assert min(sample.raw_logprobs) < -2.0
    return tuple(sample.token_ids)


async def tokens_of(folder: Path, runner: dict[str, Any], **values: Any) -> list[tuple[int, ...]]:
    """Of samples under a grammar, beside free ones."""
    async with Engine(config(folder, runner, **values)) as engine:
        beside = engine.complete("free", under(None, n=2, max_tokens=20))
        result, free = await asyncio.gather(engine.complete("say", under(n=3)), beside)
        engine.check()
        return [*[check(sample) for sample in result.samples], *[tuple(one.token_ids) for one in free.samples]]


@pytest.mark.ci
async def test_depth_preemption_and_swaps_change_no_token(folder: Path) -> None:
    plain = await tokens_of(folder, CPU, pipeline_depth=1)
    assert len(set(plain)) == 5
    assert await tokens_of(folder, CPU, pipeline_depth=2) == plain
    assert await tokens_of(folder, CPU, pipeline_depth=2, num_blocks=36, host_blocks=40, max_running=5) == plain


@pytest.mark.ci
@pytest.mark.parametrize("depth", [2, pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpu)])
async def test_the_path_of_gpus_samples_under_them_alike(folder: Path, depth: int) -> None:
    # the interpreter takes seconds for a step
    grammar = JSON if ON_GPU else Grammar("regex", "[a-d]{2}")
    runner = {**CPU, **DEVICE}
    params = {"n": 4} if ON_GPU else {"n": 1, "max_tokens": 8}
    values = {} if ON_GPU else {"max_context_tokens": 32}
    texts = {}
    for name, own in (("kernels", runner), ("plain", CPU)):
        async with Engine(config(folder, own, pipeline_depth=depth, **values)) as engine:
            free = engine.complete("free", under(None, n=1, max_tokens=2))
            result, _ = await asyncio.gather(engine.complete("say", under(grammar, **params)), free)
            engine.check()
            texts[name] = [sample.text for sample in result.samples]
            assert {sample.finish_reason for sample in result.samples} == {"stop"}
    assert texts["kernels"] == texts["plain"]
    if not ON_GPU:
        assert all(len(text) == 2 and set(text) <= set("abcd") for text in texts["plain"])


@pytest.mark.ci
async def test_a_hand_over_rebuilds_the_matcher(folder: Path, tmp_path: Path) -> None:
    plain = await tokens_of(folder, CPU, pipeline_depth=1)
    async with AsyncExitStack() as stack:
        addresses = []
        for role in ("prefill", "decode"):
            own = config(folder, role=role, host_blocks=64, leases=LEASES)
            instance = Instance(own, listen=f"ipc://{tmp_path}/{role}", name=role, links=LINKS, transfer_process=False)
            addresses.append((await stack.enter_async_context(instance)).address)
        router = await stack.enter_async_context(fdasync.connect(addresses, links=LINKS))
        result = await router.complete("say", under(n=3))
        assert [check(sample) for sample in result.samples] == plain[:3]
        with pytest.raises(BadInput, match="grammar"):
            await router.complete("say", under(Grammar("regex", "(a")))


@pytest.mark.ci
async def test_pauses_and_new_weights_keep_every_text(folder: Path, tmp_path: Path) -> None:
    make_random_checkpoint(tmp_path, "qwen3_moe", seed=5, size="tiny")
    async with Engine(config(folder, pipeline_depth=2, host_blocks=32)) as engine:
        for mode in ("retract", "in_place"):
            asked = [asyncio.ensure_future(engine.complete("say", under(n=2, seed=seed))) for seed in range(3)]
            steps = engine.stats().scheduler.steps
            await until(lambda least=steps + 6: engine.stats().scheduler.steps > least)
            await engine.pause(mode)
            await engine.update_weights(None, str(tmp_path), "keep")
            await engine.resume()
            for result in await asyncio.gather(*asked):
                for sample in result.samples:
                    check(sample)
                    assert len(sample.weight_version) == 2
        engine.check()


@pytest.mark.ci
async def test_checks_that_clients_left_hold_up_no_other(folder: Path) -> None:
    async with Engine(config(folder, process="worker")) as engine:
        await engine.complete("say", under(Grammar("regex", "a")))
        # each would take the CPU 0.3 s
        endless = [f'{{"type": "integer", "multipleOf": {number}}}' for number in range(9_999_001, 9_999_401, 2)]
        left = [asyncio.ensure_future(engine.complete("say", under(Grammar("json_schema", text)))) for text in endless]
        await asyncio.sleep(0)
        await until(lambda: engine.load().live == len(left))
        for one in left:
            one.cancel()
        await asyncio.wait(left)
        async with asyncio.timeout(300):
            await engine.complete("say", under(Grammar("regex", "b")))
        engine.check()


# a grammar, what else is asked for, the texts that may come, and why they end
ASKED: list[tuple[Grammar, dict[str, Any], str, str]] = [
    # whatever the bias bars, the grammar's tokens are left
    (Grammar("regex", "[ab]{3}"), {"logit_bias": {ord("a"): -100.0, ord("b"): -100.0}}, "[ab]{3}", "stop"),
    (Grammar("regex", "a{3}"), {"logit_bias": {EOS_ID: 100.0}, "repetition_penalty": 1000.0}, "aaa", "stop"),
    (Grammar("regex", "a*"), {"logit_bias": {ord("b"): 100.0, EOS_ID: -100.0}, "max_tokens": 7}, "a{7}", "length"),
    # an empty text
    (Grammar("regex", "()"), {}, "", "stop"),
    # stops of the caller end a text before its grammar does
    (Grammar("regex", "ab{9}c"), {"stop_token_ids": (ord("b"),)}, "ab?", "stop"),
    (Grammar("regex", "ab{9}c"), {"stop": ("bbb",)}, "a", "stop"),
    # characters of several tokens, whole and cut
    (Grammar("regex", "(é|漢|😀){4}"), {}, "(é|漢|😀){4}", "stop"),
    (Grammar("regex", "😀{4}"), {"max_tokens": 6}, "😀\ufffd*", "length"),
    (Grammar("regex", "a{100}"), {"top_k": 1, "top_p": 0.01, "min_p": 1.0, "temperature": 100.0}, "a{100}", "stop"),
]


@pytest.mark.ci
async def test_what_else_a_caller_asks_for(folder: Path, subtests: pytest.Subtests) -> None:
    async with Engine(config(folder, pipeline_depth=2)) as engine:
        for grammar, fields, text, reason in ASKED:
            with subtests.test(grammar=grammar.text, **fields):
                free = engine.complete("free", under(None, max_tokens=20))
                asked = engine.complete("say", under(grammar, **{"max_tokens": 110, "n": 3, **fields}))
                result, beside = await asyncio.gather(asked, free)
                for sample in result.samples:
                    matched = re.fullmatch(text, sample.text) is not None
                    assert (matched, sample.finish_reason) == (True, reason), sample.text
                    assert all(value <= 0.0 for value in sample.processed_logprobs)
                alone = await engine.complete("free", under(None, max_tokens=20))
                assert alone.samples[0].token_ids == beside.samples[0].token_ids
                engine.check()


async def test_a_checkpoint_without_a_tokenizer_has_none(folder: Path, tmp_path: Path) -> None:
    for path in list(folder.iterdir()):  # noqa: ASYNC240 - some names, in a test
        if "tokenizer" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    async with Engine(config(tmp_path)) as engine:
        with pytest.raises(BadInput, match="samples under none"):
            await engine.complete([1, 2], under())
