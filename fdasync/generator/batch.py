"""Many prompts at once: `Generator.complete_all`, made of `complete`.

As many tasks as requests may be under way take one prompt after the other: a deadline begins as a request is submitted,
and none runs out because it waited behind thousands. Called by `face.py`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from fdasync.errors import BadInput
from fdasync.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from fdasync.request import GenerateOptions, Prompt
    from fdasync.result import Result

_REDRAW_S = 0.1


async def complete_all(
    complete: Callable[..., Awaitable[Result]],
    prompts: Iterable[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    options: GenerateOptions,
    *,
    at_once: int,
    progress: bool,
) -> list[Result]:
    """See `Generator.complete_all`; `complete` is that of the generator."""
    if type(at_once) is not int or at_once < 1:
        raise BadInput("at_once", f"{at_once!r} requests", limit="1 or more, or None")
    asked = _with_params(prompts, params)
    waiting = enumerate(asked)
    results: dict[int, Result] = {}
    prefix = options.get("request_id")

    async def work(ended: Callable[[Result], None]) -> None:
        for number, (prompt, own) in waiting:
            named: GenerateOptions = options if prefix is None else {**options, "request_id": f"{prefix}/{number}"}
            results[number] = await complete(prompt, own, **named)
            ended(results[number])

    with _line(len(asked)) if progress and sys.stderr.isatty() else nullcontext(lambda _: None) as ended:
        tasks = [asyncio.ensure_future(work(ended)) for _ in range(min(at_once, len(asked)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            # bounded: a cancelled `complete` aborts its request
            await asyncio.gather(*tasks, return_exceptions=True)
    return [results[number] for number in range(len(asked))]


def _with_params(
    prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams | None]]:
    if isinstance(prompts, str):
        raise BadInput("prompts", "one text", hint="give a list of prompts, or call `complete`")
    several = list(prompts)
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params) for prompt in several]
    if len(params) != len(several):
        raise BadInput("params", f"{len(params)} for {len(several)} prompts", hint="one for each, or one for all")
    return list(zip(several, params, strict=True))


@contextmanager
def _line(total: int) -> Iterator[Callable[[Result], None]]:
    """A line on stderr of what is done; what it gives is called with every result. A bar of a library would have a
    thread, or be imported on the loop."""
    began = drawn = time.monotonic()
    done = tokens = 0

    def draw() -> None:
        speed = tokens / max(time.monotonic() - began, 1e-9)
        print(f"\r{done:,} of {total:,} requests, {speed:,.0f} tokens/s", end="", file=sys.stderr, flush=True)

    def ended(result: Result) -> None:
        nonlocal done, drawn, tokens
        done, tokens = done + 1, tokens + result.usage.completion_tokens
        if time.monotonic() > drawn + _REDRAW_S:
            drawn = time.monotonic()
            draw()

    try:
        yield ended
    finally:
        draw()
        print(file=sys.stderr)
