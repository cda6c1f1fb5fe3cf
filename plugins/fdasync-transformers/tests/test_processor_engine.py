"""Logits processors through whole engines: tokens are the library's, at every depth, with drafts, beside others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from device_path import DEVICE, ON_GPU, make_small_checkpoint
from draft_results import Known
from fdasync_transformers.sampling.no_repeat_ngram import NoRepeatNgram
from fdasync_transformers.sampling.processors import LogitsProcessor, ProcessedRows
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.drafting import DrafterLimits, Speculation
from fdasync.errors import BadInput, ConfigError, ProcessorFailed
from fdasync.registry.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fdasync import Result

CPU = {"dtype": "float32", "device": "cpu", "num_threads": 1, "self_check": False}
PROMPTS = [[5, 9, 7, 9], [3] * 9, [number * 7 % 50 + 3 for number in range(21)]]
NEW = 24


def config(folder: Path, names: tuple[str, ...] = ("no_repeat_ngram",), own: Any = CPU, **values: Any) -> EngineConfig:
    # too few blocks for all: some are preempted; prompts come in chunks
    sizes = {"block_tokens": 4, "num_blocks": 40, "max_context_tokens": 64, "max_running": 8, "max_step_tokens": 36}
    return EngineConfig(
        model=str(folder),
        runner_config={**own, "processors": names},
        **{"process": "inline", "tokenizer": "none", **sizes, **values},
    )


def asked(size: int = 2, **fields: Any) -> SamplingParams:
    given = {"no_repeat_ngram": {"size": size}} if size else {}
    return SamplingParams(**{"max_tokens": NEW, "temperature": 0.0, "processors": given, "ignore_eos": True, **fields})


def library(model: Any, prompt: list[int], size: int) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, no_repeat_ngram_size=size, eos_token_id=None
    )
    return list(ids[0, len(prompt) :].tolist())


async def play(engine: Engine, *params: SamplingParams) -> list[Result]:
    return list(await asyncio.gather(*[engine.complete(prompt, one) for prompt in PROMPTS for one in params]))


@pytest.mark.parametrize("depth", [1, 2])
async def test_tokens_are_those_of_the_library_s_processor(tmp_path: Path, depth: int) -> None:
    model = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    sizes = (0, 1, 2, 3)
    async with Engine(config(tmp_path, pipeline_depth=depth)) as engine:
        results = await play(engine, *[asked(size) for size in sizes])
        assert engine.stats().scheduler.preemptions
        engine.check()
    wanted = [library(model, prompt, size) for prompt in PROMPTS for size in sizes]
    assert [list(result.samples[0].token_ids) for result in results] == wanted
    # it made a difference
    assert wanted[0] != wanted[1] != wanted[2]


async def test_drafts_are_tokens_like_others(tmp_path: Path) -> None:
    """Of what a processor makes of them, and of what the model would say alone."""
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    params = (asked(2), asked(3, temperature=1.0, seed=4), asked(0))
    async with Engine(config(tmp_path)) as engine:
        wanted = await play(engine, *params)
    answers: dict[bytes, list[tuple[int, ...]]] = {}
    for number, result in enumerate(wanted):
        prompt = np.array(PROMPTS[number // len(params)], "<i4").tobytes()
        answers.setdefault(prompt, []).extend(sample.token_ids for sample in result.samples)
    speculation = Speculation(drafter="known", max_tokens=3, budget=False)
    drafter = Known(answers, DrafterLimits.of(3, 2, 8))
    async with Engine(config(tmp_path, speculation=speculation), drafter=drafter) as engine:
        results = await play(engine, *params)
        stats = engine.stats().scheduler
    assert [one.samples[0].token_ids for one in results] == [one.samples[0].token_ids for one in wanted]
    assert 50 < stats.accepted_tokens < stats.drafted_tokens


async def test_raw_log_probs_are_of_the_model_and_processed_ones_of_what_was_sampled(tmp_path: Path) -> None:
    # without experts there are no near ties of routers
    model = make_tiny_checkpoint(tmp_path, "qwen3_dense")
    async with Engine(config(tmp_path)) as engine:
        results = await play(engine, asked(1, logprobs="both"), asked(0, logprobs="both"))
    for number, result in enumerate(results):
        prompt, sample = PROMPTS[number // 2], result.samples[0]
        tokens = [*prompt, *sample.token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].double()
        chosen = torch.tensor(sample.token_ids)[:, None]
        raw = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        np.testing.assert_allclose(sample.raw_logprobs, raw, atol=1e-4)
        if number % 2 == 0:
            for row, known in zip(logits, range(len(prompt), len(tokens)), strict=True):
                row[torch.tensor(tokens[:known])] = float("-inf")
        processed = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        np.testing.assert_allclose(sample.processed_logprobs, processed, atol=1e-4)
        assert (np.abs(np.subtract(sample.raw_logprobs, sample.processed_logprobs)).max() > 0.01) == (number % 2 == 0)


class Broken(Exception):
    """Its words are no words of any encoding."""


class Failing(LogitsProcessor):
    """Fails as it is told, for rows with so many tokens behind their prompt."""

    def read(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        if settings["how"] == "read":
            raise BadInput("how", "is told to fail")
        return settings

    def process(self, rows: ProcessedRows) -> None:
        for number, (settings, prompt) in enumerate(zip(rows.settings, rows.prompt_lengths, strict=True)):
            if settings["how"] == "token":
                tokens, known = rows.known()
                if int(tokens[number][known[number]][-1]) in settings["tokens"]:
                    raise ValueError("a token that no answer has")
                continue
            rows.logits[number, 7] = 1e4
            if int(rows.lengths[number]) - prompt < settings["after"]:
                continue
            match settings["how"]:
                case "raise":
                    raise ValueError("as told")
                case "nan":
                    rows.logits[number, 3] = float("nan")
                case "nothing":
                    rows.logits[number].fill_(float("-inf"))
                case "infinite":
                    rows.logits[number, 3] = float("inf")
                case "shape":
                    rows.logits.resize_(1, 3)
                case "cancelled":
                    raise asyncio.CancelledError
                case "broken":
                    raise Broken("\udc80" * 5000)
                case "narrow":
                    # an idiom; in bfloat16 it is -inf
                    rows.logits[number].fill_(torch.finfo(torch.float32).min)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Registry.load

    def found(self: Any, group: str, name: str, base: Any) -> Any:
        return Failing if name == "failing" else load(self, group, name, base)

    monkeypatch.setattr(Registry, "load", found)


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("raise", "failing: ValueError: as told"), ("nan", "failing: NaN, [+]inf, or nothing finite"),
        ("nothing", "failing: NaN, [+]inf, or nothing finite"), ("infinite", "failing: NaN, [+]inf"),
        ("shape", "failing: ValueError: the logits became"), ("cancelled", "failing: CancelledError"),
        ("broken", "failing: Broken: "),
    ],
)  # fmt: skip
async def test_a_failure_ends_its_own_request(tmp_path: Path, failing: None, how: str, problem: str) -> None:
    model = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    bad = asked(0, processors={"failing": {"how": how, "after": 5}})
    good = asked(0, processors={"failing": {"how": "not", "after": 0}})
    async with Engine(config(tmp_path, ("no_repeat_ngram", "failing"))) as engine:
        both = asked(0, processors={"no_repeat_ngram": {"size": 2}, "failing": {"how": how, "after": 7}})
        work = [engine.complete(PROMPTS[0], one) for one in (bad, good, asked(2), both)]
        failed, sevens, other, second = await asyncio.gather(*work, return_exceptions=True)
        for error, count in ((failed, 5), (second, 7)):
            assert isinstance(error, ProcessorFailed)
            assert error.partial.samples[0].token_ids == (7,) * count
        with pytest.raises(ProcessorFailed, match=problem):
            raise failed
        assert not isinstance(sevens, BaseException)
        assert sevens.samples[0].token_ids == (7,) * NEW
        assert not isinstance(other, BaseException)
        assert list(other.samples[0].token_ids) == library(model, PROMPTS[0], 2)
        # and the engine goes on
        again = await engine.complete(PROMPTS[0], good)
        assert again.samples[0].token_ids == (7,) * NEW
        engine.check()


@pytest.mark.parametrize("depth", [1, 2])
async def test_what_fails_behind_the_end_of_an_answer_is_dropped(tmp_path: Path, failing: None, depth: int) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    async with Engine(config(tmp_path, ("failing",), pipeline_depth=depth)) as engine:
        plain = await engine.complete(PROMPTS[0], asked(0))
        wanted = plain.samples[0].token_ids
        last = next(at for at in range(2, NEW) if wanted[at] not in wanted[:at])
        # every row behind the last token fails
        chain = {"failing": {"how": "token", "tokens": [wanted[last]]}}
        for ends in ({"stop_token_ids": (wanted[last],)}, {"max_tokens": last + 1}):
            result = await engine.complete(PROMPTS[0], asked(0, processors=chain, **ends))
            assert result.samples[0].token_ids == wanted[: last + 1]
        with pytest.raises(ProcessorFailed, match="a token that no answer has") as caught:
            await engine.complete(PROMPTS[0], asked(0, processors=chain))
        assert caught.value.partial.samples[0].token_ids == wanted[: last + 1]
        engine.check()


async def test_what_fails_behind_a_wrong_draft_does_not_count(tmp_path: Path, failing: None) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    async with Engine(config(tmp_path, ("failing",))) as engine:
        wanted = [(await engine.complete(prompt, asked(0))).samples[0].token_ids for prompt in PROMPTS]
    # what the drafter says wrong, and no answer and no prompt has
    right = {token for tokens in [*wanted, *PROMPTS] for token in tokens}
    never = sorted({token ^ 1 for tokens in wanted for token in tokens[::3]} - right)
    answers = {np.array(prompt, "<i4").tobytes(): [one] for prompt, one in zip(PROMPTS, wanted, strict=True)}
    drafter = Known(answers, DrafterLimits.of(3, 2, 8))
    speculation = Speculation(drafter="known", max_tokens=3, budget=False)
    chain = {"failing": {"how": "token", "tokens": never}}
    async with Engine(config(tmp_path, ("failing",), speculation=speculation), drafter=drafter) as engine:
        results = await play(engine, asked(0, processors=chain))
        stats = engine.stats().scheduler
    assert [one.samples[0].token_ids for one in results] == wanted
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


async def test_logits_that_the_model_s_dtype_does_not_hold_fail(tmp_path: Path, failing: None) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    chain = {"failing": {"how": "narrow", "after": 2}}
    async with Engine(config(tmp_path, ("failing",), {**CPU, "dtype": "bfloat16"})) as engine:
        with pytest.raises(ProcessorFailed, match="nothing finite among the logits"):
            await engine.complete(PROMPTS[0], asked(0, processors=chain))
        assert len((await engine.complete(PROMPTS[0], asked(0))).samples[0].token_ids) == NEW


async def test_settings_that_make_no_sense_end_their_request(tmp_path: Path, failing: None) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    async with Engine(config(tmp_path, ("no_repeat_ngram", "failing"))) as engine:
        with pytest.raises(ProcessorFailed, match=r"no_repeat_ngram: size: .*limit: 1 to 64"):
            await engine.complete(PROMPTS[0], asked(0, processors={"no_repeat_ngram": {"size": 0}}))
        with pytest.raises(ProcessorFailed, match="failing: how: is told to fail"):
            await engine.complete(PROMPTS[0], asked(0, processors={"failing": {"how": "read"}}))
        assert len((await engine.complete(PROMPTS[0], asked())).samples[0].token_ids) == NEW


async def test_what_an_engine_does_not_have_is_refused_at_once(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe")
    async with Engine(config(tmp_path)) as engine:
        assert engine.facts().processors == ("no_repeat_ngram",)
        for params, problem in (
            (asked(0, processors={"other": {}}), "'other' is none of this engine's: no_repeat_ngram"),
            (asked(0, processors={"no_repeat_ngram": {"size": "x" * 70_000}}), "bytes of settings as JSON"),
            (asked(2, logprobs="raw", top_logprobs=2), "top_logprobs: cannot be raw with processors"),
            (asked(0, processors={"no_repeat_ngram": {"size": object()}}), "settings that are no JSON"),
            (asked(0, processors={"no_repeat_ngram": {"size": float("nan")}}), "settings that are no JSON"),
        ):
            with pytest.raises(BadInput, match=problem):
                await engine.complete(PROMPTS[0], params)
    for changes, problem in (
        ({"names": ("nowhere",)}, "'nowhere': not installed"),
        ({"names": ("no_repeat_ngram",) * 2}, "names one twice"),
        ({"numerics": "fixed"}, "are refused with fixed numerics"),
    ):
        with pytest.raises(ConfigError, match=problem) as caught:
            await Engine(config(tmp_path, **changes)).start()
        assert caught.value.field == "runner_config.processors"


def test_settings_are_the_caller_s_no_longer() -> None:
    settings = {"sizes": [2]}
    checked = asked(0, processors={"mine": settings}).validated(vocab_size=250)
    settings["sizes"].append(1)
    assert checked.processors == {"mine": {"sizes": [2]}}


@pytest.mark.ci
async def test_a_worker_finds_them_by_their_entry_points(tmp_path: Path, forked_children: None) -> None:
    model = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    async with Engine(config(tmp_path, process="worker")) as engine:
        results = await play(engine, asked(2))
    assert [list(one.samples[0].token_ids) for one in results] == [library(model, prompt, 2) for prompt in PROMPTS]


@pytest.mark.ci
@pytest.mark.parametrize("speculation", [False, pytest.param(True, marks=pytest.mark.gpu)])
async def test_on_a_device_too(tmp_path: Path, speculation: bool) -> None:
    """By graphs on a GPU, with drafts there; else in Triton's interpreter."""
    # without experts there are no near ties of routers
    make_small_checkpoint(tmp_path, "qwen3_dense")
    new = 16 if ON_GPU else 4
    params = [asked(size, max_tokens=new, logprobs="both") for size in (1, 2, 0)]
    found = []
    for own in (CPU, {**DEVICE, "dtype": "float32", "self_check": False}):
        drafts = Speculation(drafter="ngram", max_tokens=3, budget=False) if speculation and own is not CPU else None
        async with Engine(config(tmp_path, own=own, speculation=drafts)) as engine:
            found.append([one.samples[0] for one in await play(engine, *params)])
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.raw_logprobs, other.raw_logprobs, atol=2e-4)
        np.testing.assert_allclose(one.processed_logprobs, other.processed_logprobs, atol=2e-4)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_runs_are_found_row_by_row(size: int) -> None:
    rng = np.random.default_rng(size)
    tokens = rng.integers(0, 4, (3, 40)).astype(np.int32)
    lengths = [1, 17, 40]
    logits = torch.zeros(3, 6)
    rows = ProcessedRows(
        logits, torch.from_numpy(tokens), torch.arange(3), torch.tensor(lengths), [1, 2, 3], [size] * 3
    )
    NoRepeatNgram(6).process(rows)
    for row, length, known in zip(logits, lengths, tokens.tolist(), strict=True):
        run = known[length - size + 1 : length] if length >= size - 1 else None
        banned = {
            known[at + size - 1] for at in range(length - size + 1) if known[at : at + size - 1] == run
        }  # fmt: skip
        assert [at for at in range(6) if row[at] == float("-inf")] == sorted(banned)
