"""The part of the demo that a person reads: chats that are answered as they stream, and the experts of one sentence.

Their results are checked like the workload's. Makes prompts by the checkpoint's own chat template, before any loop
runs: a template may take long. Called by `run.py`, which shows the map, and by what serves (`one_engine.py`, `pd.py`).
"""

from __future__ import annotations

import asyncio
import colorsys
import time
from typing import TYPE_CHECKING, Any

import msgspec
from rich.cells import set_cell_size
from rich.console import Group
from rich.live import Live
from rich.text import Text

from fdasync.engine.tokenizer import WithPieces
from fdasync.errors import ChatUnsupported
from fdasync.request import SamplingParams
from fdasync_fleet.cli.demo.workload import REFRESH_S, Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from fdasync.generator import Generator
    from fdasync.result import Result

_QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What do bees make?",
)
_ANSWER_TOKENS = 40
# rows of the map, and columns of its left side
_MAP_TOKENS = 16
_PIECE_CELLS = 12


class Chat(msgspec.Struct, frozen=True):
    """A question and the request that asks it."""

    question: str
    job: Job


def make_chats(tokenizer: Any, console: Console) -> list[Chat]:
    """Chats by the tokenizer's template; none, and a line that says so, where there is none."""
    params = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0)
    try:
        prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in _QUESTIONS]
    except ChatUnsupported as error:
        console.print(f"no chats: {error}", style="yellow", markup=False, highlight=False)
        return []
    return [Chat(text, Job(tuple(ids), params)) for text, ids in zip(_QUESTIONS, prompts, strict=True)]


async def play_chats(face: Generator, chats: Sequence[Chat], console: Console) -> list[Result]:
    """Ask all questions at a time, and show the answers while they grow; without a terminal, when they are whole."""
    answers = [""] * len(chats)
    results: list[Result | None] = [None] * len(chats)

    def shown() -> Group:
        pairs = zip(chats, answers, strict=True)
        return Group(*(Text.assemble((chat.question, "bold"), "\n", answer, "\n") for chat, answer in pairs))

    # auto_refresh would start a thread, and this is an engine's process
    with Live(shown(), console=console, auto_refresh=False) as live:
        drawn = 0.0

        async def ask(number: int, chat: Chat) -> None:
            nonlocal drawn
            async with face.generate(chat.job.prompt, chat.job.params) as stream:
                async for delta in stream:
                    answers[number] += _printable(delta.text)
                    if time.monotonic() > drawn + REFRESH_S:
                        drawn = time.monotonic()
                        live.update(shown(), refresh=True)
            results[number] = stream.result

        async with asyncio.TaskGroup() as group:
            for number, chat in enumerate(chats):
                group.create_task(ask(number, chat))
        live.update(shown(), refresh=True)
    return [result for result in results if result is not None]


def show_experts(tokenizer: Any, result: Result, console: Console) -> None:
    """A map of the first expert of each token of an answer in each layer: its number, on a colour of its own."""
    sample = result.samples[0]
    if sample.routing is None or not isinstance(tokenizer, WithPieces):
        return
    routing = sample.routing
    first = len(result.prompt_token_ids) - routing.start
    rows = routing.array[first : first + _MAP_TOKENS, :, 0].tolist()
    digits = len(str(routing.num_experts - 1))
    layers = _spread(len(routing.layer_ids), (console.width - _PIECE_CELLS) // (digits + 1))
    console.print(
        f"first expert of {routing.num_experts} of each token of the answer, in layers"
        f" {routing.layer_ids[layers[0]]} to {routing.layer_ids[layers[-1]]}",
        highlight=False,
    )
    for token, row in zip(sample.token_ids, rows, strict=False):
        piece = _printable(tokenizer.piece(token).decode(errors="replace").replace("\n", "\u21b5"))
        line = Text(set_cell_size(piece, _PIECE_CELLS - 1) + " ")
        for layer in layers:
            line.append(f"{row[layer]:>{digits}}", style=_style(row[layer], routing.num_experts)).append(" ")
        console.print(line, no_wrap=True, crop=True)
    console.print()


def _spread(count: int, room: int) -> list[int]:
    """All of so many layers, or as many as there is room for, evenly, the first and the last among them."""
    if count <= room or room < 2:
        return list(range(count))[: max(room, 1)]
    return [round(number * (count - 1) / (room - 1)) for number in range(room)]


def _style(expert: int, experts: int) -> str:
    """Black on a colour of the expert's own."""
    red, green, blue = (round(255 * part) for part in colorsys.hsv_to_rgb(expert / experts, 0.55, 0.95))
    return f"black on #{red:02x}{green:02x}{blue:02x}"


def _printable(text: str) -> str:
    """Control characters would move the cursor or change colours: a random model writes any byte."""
    return "".join(char if char.isprintable() or char == "\n" else "\u00b7" for char in text)
