"""`fdasync demo`: serve a real checkpoint, check every token and row, show the figures.

With `--store` everything is served twice, the second time by a fresh engine on the same store: what comes back from
there is checked like the rest.

An embedder like any other: everything it does goes through the public API of the engine and of the
transformers plugin.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fdasync.cache.memory import MemoryConfig, MemoryStore
from fdasync.cache.wrappers import Wrapper
from fdasync.config import EngineConfig
from fdasync.engine import Engine, EngineStats
from fdasync.errors import BadInput, PluginError
from fdasync.request import SamplingParams
from fdasync.result import Result
from fdasync.runner.base import Capacity

if TYPE_CHECKING:
    from rich.console import Console

    from fdasync.cache.store import Store

_MIN_PROMPT_TOKENS = 4
_GROUP_SAMPLES = 4
# one in this many requests is a group of samples of one prompt
_GROUP_EVERY = 8
_REFRESH_S = 0.1
_STORE_BLOCK_TOKENS = 16
_PROBES = 8
_COLUMNS = (
    SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
)  # fmt: skip


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """As on the command line."""

    model: Path | None = None
    requests: int = 64
    concurrency: int = 32
    max_tokens: int = 64
    depth: int = 2
    seed: int = 0
    inline: bool = False
    store: str = ""
    json_path: Path | None = None


class Job(msgspec.Struct, frozen=True):
    """One request of the workload."""

    prompt: tuple[int, ...]
    params: SamplingParams


class Probe(msgspec.Struct, frozen=True):
    """One prompt, prefilled twice: tokens, those that came from the store, and both times to first token."""

    prompt_tokens: int
    store_tokens: int
    computed_s: float
    stored_s: float


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine's serving gave: results by job, and how long things took."""

    jobs: list[Job]
    results: list[Result]
    capacity: Capacity
    stats: EngineStats
    serve_s: float
    start_s: float
    probes: list[Probe] = []


def run_demo(options: DemoOptions, console: Console) -> int:
    """Do it all; returns the exit code. Raises FdasyncError where it cannot run."""
    plugin = _plugin()
    if options.json_path is not None:
        options.json_path.open("a").close()  # before the work: a path that cannot be written to
    store = parse_store(options.store)
    if options.model is None:
        # a model whose prefill costs nothing never reads a store: computing is faster
        size = "medium" if options.store else "small"
        model = cache_folder() / f"demo-qwen3-moe-{size}-v1"
        made = not model.exists()
        console.print(f"{'making' if made else 'using'} a {size} random Qwen3-MoE checkpoint in {model}")
        if made:
            plugin.make_random_checkpoint(model, "qwen3_moe", size=size)
    else:
        model = options.model
    lives = uvloop.run(_serve_all(options, model, store, console))
    served = lives[0]
    report = _verify(plugin, model, lives, console)
    figures = _figures(served, report)
    if len(lives) > 1:
        figures["store"] = _store_figures(options.store, *lives)
    _print(figures, served, console)
    for difference in report.differences[:10]:
        console.print(f"  {difference.verdict}: {difference}", style="red", highlight=False)
    if options.json_path is not None:
        options.json_path.write_text(json.dumps(figures, indent=2) + "\n")
    good = report.ok and all(_finished(life) == len(life.jobs) for life in lives)
    if len(lives) > 1 and not figures["store"]["hit_tokens_store"]:
        console.print("[yellow]nothing came back from the store: computing was faster, or it was not there[/]")
    ties = report.rows_tied + report.tokens_tied
    equal = "everything equals the reference" + (f", but for {ties} within rounding of a tie" if ties else "")
    console.print(f"[green]{equal}[/]" if good else "[red]something differs[/]")
    return 0 if good else 1


def cache_folder() -> Path:
    """Where the demo keeps its checkpoint: `$XDG_CACHE_HOME/fdasync`, or `~/.cache/fdasync`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fdasync"


def make_jobs(options: DemoOptions, capacity: Capacity) -> list[Job]:
    """Mixed lengths; every second request begins with one of four shared prefixes; some are groups of samples."""
    rng = random.Random(options.seed)
    room = min(capacity.max_context_tokens, capacity.num_blocks * capacity.block_tokens)
    output = min(options.max_tokens, room // 4)
    longest = min(4 * options.max_tokens, room - output - 1)
    if output < 1 or longest <= _MIN_PROMPT_TOKENS:
        raise BadInput("model", f"a context of {room} tokens is too short for the demo")
    low, high = min(16, capacity.vocab_size - 1), min(capacity.vocab_size, 256)

    def text(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(low, high) for _ in range(count))

    prefixes = [text(rng.randint(longest // 4, longest // 2)) for _ in range(4)]
    jobs = []
    for number in range(options.requests):
        own = rng.randint(_MIN_PROMPT_TOKENS, max(longest // 2, _MIN_PROMPT_TOKENS))
        prompt = (prefixes[number // 2 % 4] if number % 2 else ()) + text(own)
        count = rng.randint(max(1, output // 4), output)
        if number % _GROUP_EVERY == _GROUP_EVERY - 1:
            params = SamplingParams(max_tokens=count, temperature=0.8, top_p=0.95, seed=number, n=_GROUP_SAMPLES)
        else:
            params = SamplingParams(max_tokens=count, temperature=0.0, logprobs="raw")
        jobs.append(Job(prompt, params))
    return jobs


class _Kept(Wrapper):
    """A store that outlives the engines that open it."""

    async def aclose(self) -> None:
        """It stays as it is."""


def parse_store(text: str) -> tuple[str, dict[str, Any]] | None:
    """Entry-point name and configuration of `--store`; None for "". Raises BadInput."""
    name, _, rest = text.partition(":")
    if not text:
        return None
    if text == "memory":
        return "memory", {}
    if name == "file" and rest:
        return "file", {"path": rest}
    if name == "mooncake" and rest:
        return "mooncake", {"master": rest.removeprefix("//")}
    raise BadInput("store", f"{text!r} is no store", limit="memory, file:DIR or mooncake:HOST:PORT")


async def _serve_all(
    options: DemoOptions, model: Path, store: tuple[str, dict[str, Any]] | None, console: Console
) -> list[Served]:
    """One engine; with a store a second one, for the same work."""
    if store is None:
        return [await _serve(options, model, console)]
    kept = _Kept(MemoryStore(MemoryConfig())) if store[0] == "memory" else None
    return [await _serve(options, model, console, store, kept, life=life) for life in range(2)]


async def _serve(
    options: DemoOptions,
    model: Path,
    console: Console,
    store: tuple[str, dict[str, Any]] | None = None,
    kept: Store | None = None,
    life: int = 0,
) -> Served:
    config = EngineConfig(
        model=str(model),
        runner_config={"dtype": "float32"},
        process="inline" if options.inline else "worker",
        routing=True,
        pipeline_depth=options.depth,
        max_running=max(options.concurrency * _GROUP_SAMPLES, 64),
        max_step_tokens=max(options.concurrency * _GROUP_SAMPLES, 2048),
        max_requests=max(options.concurrency * _GROUP_SAMPLES, 4096),
        store="" if store is None else store[0],
        store_config={} if store is None else store[1],
        # short prompts have whole blocks too
        block_tokens="auto" if store is None else _STORE_BLOCK_TOKENS,
    )
    started = time.perf_counter()
    note = TextColumn("{task.fields[note]}")
    # auto_refresh would start a thread, and this is an engine's process
    with Progress(*_COLUMNS, note, console=console, auto_refresh=False) as progress:
        loading = progress.add_task("loading", total=1, note="")
        async with Engine(config, store=kept) as engine:
            progress.update(loading, completed=1, note=f"{engine.capacity.num_blocks} KV blocks")
            progress.refresh()
            start_s = time.perf_counter() - started
            jobs = make_jobs(options, engine.capacity)
            probes = await _probe(engine, jobs) if life else []
            serving = progress.add_task("serving", total=len(jobs), note="")
            results: list[Result | None] = [None] * len(jobs)
            places = asyncio.Semaphore(options.concurrency)
            tokens = 0
            begun = ended = time.perf_counter()

            async def serve(number: int, job: Job) -> None:
                nonlocal tokens, ended
                async with places, engine.generate(job.prompt, job.params) as stream:
                    async for delta in stream:
                        tokens += len(delta.token_ids)
                results[number] = stream.result
                ended = time.perf_counter()
                rate = tokens / (ended - begun)
                progress.update(serving, advance=1, note=f"{rate:.0f} tokens/s")

            async def refresh() -> None:
                while not progress.finished:
                    progress.refresh()
                    await asyncio.sleep(_REFRESH_S)

            async with asyncio.TaskGroup() as group:
                for number, job in enumerate(jobs):
                    group.create_task(serve(number, job))
                group.create_task(refresh())
            serve_s = ended - begun
            return Served(
                jobs=jobs,
                results=[result for result in results if result is not None],
                capacity=engine.capacity,
                stats=engine.stats(),
                serve_s=serve_s,
                start_s=start_s,
                probes=probes,
            )


async def _probe(engine: Engine, jobs: list[Job]) -> list[Probe]:
    """Time to first token of the longest prompts, one at a time: computed anew, and with what the store has."""

    async def ttft(prompt: tuple[int, ...], salt: str) -> tuple[float, int]:
        async with engine.generate(prompt, SamplingParams(max_tokens=1), cache_salt=salt) as stream:
            async for _ in stream:
                pass
        return stream.result.ttft_s or 0.0, stream.result.cached.store

    longest = sorted({job.prompt for job in jobs}, key=lambda prompt: (-len(prompt), prompt))
    # the first one teaches the engine what things cost
    found = []
    for number, prompt in enumerate(longest[: _PROBES + 1]):
        # another salt shares nothing with anybody
        computed_s, _ = await ttft(prompt, f"probe {number}")
        stored_s, tokens = await ttft(prompt, "")
        if number and tokens:
            found.append(Probe(len(prompt), tokens, computed_s, stored_s))
    return found


def _verify(plugin: Any, model: Path, lives: list[Served], console: Console) -> Any:
    records = [
        plugin.Served(
            result.prompt_token_ids,
            sample.token_ids,
            greedy=job.params.temperature == 0,
            routing=sample.routing,
            wants_rows=sample.finish_reason in ("stop", "length"),
        )
        for served in lives
        for job, result in zip(served.jobs, served.results, strict=True)
        for sample in result.samples
    ]
    shown = 0.0
    with Progress(*_COLUMNS, console=console, auto_refresh=False) as progress:
        task = progress.add_task("checking against the library's plain forward pass", total=len(records))

        def show(done: int, total: int) -> None:
            nonlocal shown
            progress.update(task, completed=done)
            if done == total or time.monotonic() > shown + _REFRESH_S:
                shown = time.monotonic()
                progress.refresh()

        return plugin.verify(model, records, progress=show)


def _figures(served: Served, report: Any) -> dict[str, Any]:
    samples = [sample for result in served.results for sample in result.samples]
    tokens = sum(len(sample.token_ids) for sample in samples)
    ttft = [result.ttft_s * 1e3 for result in served.results if result.ttft_s is not None]
    tpot = [
        (result.total_s - result.ttft_s) * 1e3 / (longest - 1)
        for result in served.results
        if result.ttft_s is not None and (longest := max(len(sample.token_ids) for sample in result.samples)) > 1
    ]
    scheduler = served.stats.scheduler
    greedy = [
        sample.token_ids
        for job, result in zip(served.jobs, served.results, strict=True)
        if job.params.temperature == 0
        for sample in result.samples
    ]
    return {
        "requests": {"total": len(served.jobs), "finished": _finished(served), "samples": len(samples)},
        "tokens": {
            "generated": tokens,
            "checked": report.tokens_checked,
            "equal": report.tokens_equal,
            "tied": report.tokens_tied,
            "wrong": report.tokens_wrong,
            "distinct_greedy": len({token for output in greedy for token in output}),
        },
        "routing": {
            "rows_checked": report.rows_checked,
            "rows_exact": report.rows_exact,
            "rows_tied": report.rows_tied,
            "rows_wrong": report.rows_wrong,
            "rows_missing": report.rows_missing,
            "nbytes": sum(sample.routing.array.nbytes for sample in samples if sample.routing is not None),
        },
        "throughput": {
            "start_s": round(served.start_s, 3),
            "serve_s": round(served.serve_s, 3),
            "requests_per_s": round(len(served.results) / served.serve_s, 2),
            "tokens_per_s": round(tokens / served.serve_s, 1),
            "ttft_ms_p50": round(_percentile(ttft, 50), 2),
            "ttft_ms_p99": round(_percentile(ttft, 99), 2),
            "tpot_ms_p50": round(_percentile(tpot, 50), 2),
            "tpot_ms_p99": round(_percentile(tpot, 99), 2),
            "prefix_hit_rate": round(scheduler.hit_tokens / max(scheduler.prompt_tokens, 1), 4),
            "steps": scheduler.steps,
            "preemptions": scheduler.preemptions,
        },
    }


def _finished(served: Served) -> int:
    return sum(
        all(sample.finish_reason in ("stop", "length") for sample in result.samples) for result in served.results
    )


def _store_figures(name: str, first: Served, second: Served) -> dict[str, Any]:
    """What the store gave back to the second engine, and what that was worth."""
    probes = second.probes
    books = second.stats.scheduler
    return {
        "name": name,
        "written_blocks": first.stats.scheduler.written_blocks,
        "fetched_blocks": books.fetched_blocks,
        "prompt_tokens": books.prompt_tokens,
        "hit_tokens_device": books.hit_tokens - books.hit_tokens_host - books.hit_tokens_store,
        "hit_tokens_host": books.hit_tokens_host,
        "hit_tokens_store": books.hit_tokens_store,
        "probes": len(probes),
        "ttft_ms_p50_computed": round(_percentile([probe.computed_s * 1e3 for probe in probes], 50), 2),
        "ttft_ms_p50_stored": round(_percentile([probe.stored_s * 1e3 for probe in probes], 50), 2),
        "serve_s_first": round(first.serve_s, 3),
        "serve_s_second": round(second.serve_s, 3),
    }


def _percentile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _print(figures: dict[str, Any], served: Served, console: Console) -> None:
    throughput, tokens, routing = figures["throughput"], figures["tokens"], figures["routing"]
    table = Table(title=f"fdasync demo: {served.capacity.model}", show_header=False)
    rows = [
        ("requests", f"{figures['requests']['finished']} of {figures['requests']['total']} finished"
                     f" ({figures['requests']['samples']} samples)"),
        ("requests/s", f"{throughput['requests_per_s']:g}"),
        ("tokens/s", f"{throughput['tokens_per_s']:g}"),
        ("TTFT p50 / p99", f"{throughput['ttft_ms_p50']:g} / {throughput['ttft_ms_p99']:g} ms"),
        ("TPOT p50 / p99", f"{throughput['tpot_ms_p50']:g} / {throughput['tpot_ms_p99']:g} ms"),
        ("prefix-cache hit rate", f"{throughput['prefix_hit_rate']:.1%} of prompt tokens"),
        ("distinct greedy tokens", f"{tokens['distinct_greedy']}"),
        ("greedy tokens", f"{tokens['checked']} checked, {tokens['equal']} equal, {tokens['tied']} tied,"
                          f" {tokens['wrong']} wrong"),
        ("routing rows", f"{routing['rows_checked']} checked, {routing['rows_exact']} exact,"
                         f" {routing['rows_tied']} tied, {routing['rows_wrong']} wrong,"
                         f" {routing['rows_missing']} missing"),
        ("routing bytes", f"{routing['nbytes']:,}"),
    ]  # fmt: skip
    if store := figures.get("store"):
        rows += [
            (f"store {store['name']}", f"{store['written_blocks']} blocks written,"
                                       f" {store['fetched_blocks']} read back"),
            ("second engine's hit tokens", f"{store['hit_tokens_store']} from the store, {store['hit_tokens_device']}"
                                           f" from the device, of {store['prompt_tokens']} prompt tokens"),
            (f"TTFT p50, {store['probes']} prompts alone", f"{store['ttft_ms_p50_stored']:g} ms with the store;"
                                                           f" {store['ttft_ms_p50_computed']:g} ms computed anew"),
            ("serving all", f"{store['serve_s_second']:g} s; the first engine {store['serve_s_first']:g} s"),
        ]  # fmt: skip
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def _plugin() -> Any:
    try:
        import fdasync_transformers
    except ImportError as error:
        raise PluginError(
            "fdasync.runners", "transformers", "", f"cannot be imported ({error}); pip install fdasync-transformers"
        ) from error
    return fdasync_transformers
