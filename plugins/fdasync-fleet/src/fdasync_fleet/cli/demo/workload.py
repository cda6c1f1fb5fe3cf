"""The demo's workload: makes prompts and parameters from a seed, plays them on an engine or a router, keeps results.

Knows a `Generator`, and no processes. Called by `one_engine.py` and `pd.py`.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fdasync.errors import BadInput
from fdasync.request import Numerics, SamplingParams
from fdasync.result import Result
from fdasync.runner.facts import Facts
from fdasync.stats import SchedulerStats

if TYPE_CHECKING:
    from rich.console import Console

    from fdasync.generator import Generator

_REQUESTS = 64
_TOKENS = 64
_MIN_PROMPT_TOKENS = 4
# prompts are up to four times as long as outputs, and beside short outputs up to this long
_LONGEST_PROMPT_TOKENS = 64
GROUP_SAMPLES = 4
# one in this many requests is a group of samples of one prompt
_GROUP_EVERY = 8
REFRESH_S = 0.1
_PROBES = 8
COLUMNS = (
    SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
)  # fmt: skip


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `fdasync demo` does.

    Attributes:
        model: Hugging Face MoE checkpoint folder; without it SmolLM2-135M-Instruct with experts is made, once, in a
            cache folder, or a small random Qwen3-MoE where the package of SmolLM2 is not installed.
        requests: requests to serve beside the chats; by default 64, or 12 with SmolLM2.
        concurrency: requests in flight at a time.
        max_tokens: longest output of these; by default 64, or 16 with SmolLM2.
        depth: steps in flight; 2 overlaps.
        numerics: as of `fdasync serve`.
        seed: of the prompts and of sampling.
        store: serve everything twice: first fill the store (as of `fdasync serve`), then start a fresh engine on it and
            show what came back; a pool of mooncake needs a process that gives it memory and outlives the engine.
        policy: which requests go first, as of `fdasync serve`.
        pd: serve with P prefill and D decode instances, each a process of its own, e.g. 1x1; with --store file:DIR each
            has its own folder in DIR; 0: one engine in this process, the default.
        inline: run the model on the engine's own loop instead of in a worker process.
        json_path: write the figures here.
        svg_path: write a picture of what is printed here.
    """

    model: Path | None = None
    requests: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    concurrency: Annotated[int, Meta(ge=1, le=4096)] = 32
    max_tokens: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    depth: Annotated[int, Meta(ge=1, le=2)] = 2
    numerics: Numerics = "default"
    seed: Annotated[int, Meta(ge=0)] = 0
    store: Annotated[str, Meta(title="STORE")] | None = None
    policy: Annotated[str, Meta(title="POLICY")] | None = None
    pd: Annotated[str, Meta(title="PxD")] = ""
    inline: bool = False
    json_path: Path | None = None
    svg_path: Path | None = None


class Job(msgspec.Struct, frozen=True):
    """One request of the workload: token ids and how to sample."""

    prompt: tuple[int, ...]
    params: SamplingParams


class Probe(msgspec.Struct, frozen=True):
    """The times to first token of one prompt that is prefilled twice.

    Attributes:
        computed_s: without the store.
        stored_s: with the blocks that the store has.
    """

    computed_s: float
    stored_s: float


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic between instances.

    Attributes:
        prefill, decode: how many instances of each role there are.
        blocks, nbytes: that went from prefill to decode instances.
        leases: how many were granted.
        lease_s, lease_most_s: seconds from asking to the grant: their sum, and the longest.
    """

    prefill: int
    decode: int
    blocks: int
    nbytes: int
    leases: int
    lease_s: float
    lease_most_s: float


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of serving the workload once.

    Attributes:
        jobs: the chats, then the workload.
        results: one for each job, in its order.
        room: the sizes that the workload had to fit into.
        totals: counters of the engines.
        chats: how many of the jobs are chats.
        serve_s: from the first request of the workload to its last result.
        start_s: until engines or instances were ready.
        probes: of the second time, with a store.
        moved: traffic between instances; None without them.
        refused: blocks that the store refused.
        refused_why: the store's words about the latest of them.
    """

    jobs: list[Job]
    results: list[Result]
    room: Facts
    totals: SchedulerStats
    serve_s: float
    start_s: float
    probes: list[Probe] = []
    moved: Moved | None = None
    chats: int = 0
    refused: int = 0
    refused_why: str = ""


def make_jobs(options: DemoOptions, room: Facts) -> list[Job]:
    """Mixed lengths; every second request begins with one of four shared prefixes; some are groups of samples."""
    rng = random.Random(options.seed)
    longest_context = min(room.max_context_tokens, room.num_blocks * room.block_tokens)
    most = options.max_tokens or _TOKENS
    output = min(most, longest_context // 4)
    longest = min(max(4 * most, _LONGEST_PROMPT_TOKENS), longest_context - output - 1)
    if output < 1 or longest <= _MIN_PROMPT_TOKENS:
        raise BadInput("model", f"a context of {longest_context} tokens is too short for the demo")
    low, high = min(16, room.vocab_size - 1), min(room.vocab_size, 256)

    def text(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(low, high) for _ in range(count))

    prefixes = [text(rng.randint(longest // 4, longest // 2)) for _ in range(4)]
    jobs = []
    for number in range(options.requests or _REQUESTS):
        own = rng.randint(_MIN_PROMPT_TOKENS, max(longest // 2, _MIN_PROMPT_TOKENS))
        prompt = (prefixes[number // 2 % 4] if number % 2 else ()) + text(own)
        count = rng.randint(max(1, output // 4), output)
        if number % _GROUP_EVERY == _GROUP_EVERY - 1:
            params = SamplingParams(max_tokens=count, temperature=0.8, top_p=0.95, seed=number, n=GROUP_SAMPLES)
        else:
            params = SamplingParams(max_tokens=count, temperature=0.0, logprobs="raw")
        jobs.append(Job(prompt, params))
    return jobs


def progress_on(console: Console) -> Progress:
    """Progress bars with a note; refreshed by hand, because `auto_refresh` starts a thread."""
    return Progress(*COLUMNS, TextColumn("{task.fields[note]}"), console=console, auto_refresh=False)


async def play(face: Generator, jobs: list[Job], concurrency: int, progress: Progress) -> tuple[list[Result], float]:
    """Serve all jobs, so many at a time; returns their results, and the seconds that they took."""
    serving = progress.add_task("serving", total=len(jobs), note="")
    results: list[Result | None] = [None] * len(jobs)
    places = asyncio.Semaphore(concurrency)
    tokens = 0
    begun = ended = time.perf_counter()

    async def serve_one(number: int, job: Job) -> None:
        nonlocal tokens, ended
        async with places, face.generate(job.prompt, job.params) as stream:
            async for delta in stream:
                tokens += len(delta.token_ids)
        results[number] = stream.result
        ended = time.perf_counter()
        rate = tokens / (ended - begun)
        progress.update(serving, advance=1, note=f"{rate:.0f} tokens/s")

    async def refresh() -> None:
        while not progress.finished:
            progress.refresh()
            await asyncio.sleep(REFRESH_S)

    async with asyncio.TaskGroup() as group:
        for number, job in enumerate(jobs):
            group.create_task(serve_one(number, job))
        group.create_task(refresh())
    progress.refresh()
    return [result for result in results if result is not None], ended - begun


async def probe(face: Generator, jobs: list[Job]) -> list[Probe]:
    """Time to first token of the longest prompts, one at a time: computed anew, and with the store's blocks."""

    async def ttft(prompt: tuple[int, ...], salt: str) -> tuple[float, int]:
        async with face.generate(prompt, SamplingParams(max_tokens=1), cache_salt=salt) as stream:
            async for _ in stream:
                pass
        return stream.result.ttft_s or 0.0, stream.result.cached.store

    longest = sorted({job.prompt for job in jobs}, key=lambda prompt: (-len(prompt), prompt))
    # during the first one the engine measures its speeds: it does not count
    found = []
    for number, prompt in enumerate(longest[: _PROBES + 1]):
        # a salt of its own: the prompt matches no block
        computed_s, _ = await ttft(prompt, f"probe {number}")
        stored_s, tokens = await ttft(prompt, "")
        if number and tokens:
            found.append(Probe(computed_s, stored_s))
    return found
