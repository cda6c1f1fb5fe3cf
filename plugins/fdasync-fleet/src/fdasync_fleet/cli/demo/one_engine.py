"""Serves the demo's workload by one engine in this process, or by prefill and decode instances (`pd.py`).

With a store everything is served twice, the second time by fresh engines on the same store. Uses public names only, as
an embedder does. Called by `run.py`.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.cli.common.options import parse_policy
from fdasync.engine.config import EngineConfig
from fdasync.engine.engine import Engine
from fdasync.errors import BadInput
from fdasync_fleet.cli.demo.chats import play_chats
from fdasync_fleet.cli.demo.pd import parse_pd, serve_apart
from fdasync_fleet.cli.demo.workload import (
    GROUP_SAMPLES,
    DemoOptions,
    Served,
    make_jobs,
    play,
    probe,
    progress_on,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from fdasync.cache.store.base import Store
    from fdasync_fleet.cli.demo.chats import Chat

_STORE_BLOCK_TOKENS = 16


class _Kept(MemoryStore):
    """Its objects outlive the engines that open it."""

    async def aclose(self) -> None:
        """Keeps the objects."""


async def serve_all(
    options: DemoOptions, model: Path, store: tuple[str, dict[str, Any]] | None, chats: Sequence[Chat], console: Console
) -> list[Served]:
    """Serve chats and the workload; with a store the workload a second time.

    Raises BadInput for options that do not go together.
    """
    counts = parse_pd(options.pd)
    policy = parse_policy(options.policy)
    config = _config(options, model, store)
    if policy is not None:
        config = msgspec.structs.replace(config, policy=policy[0], policy_config=policy[1])
    if counts is not None:
        if options.inline:
            raise BadInput("--inline", "does not go with --pd: instances are processes of their own")
        if config.store == "memory":
            raise BadInput("--store", "memory ends with the instances that filled it", limit="file:DIR with --pd")
        lives = range(2 if config.store else 1)
        return [await serve_apart(options, config, counts, console, life, () if life else chats) for life in lives]
    if store is None:
        return [await serve(options, config, console, chats=chats)]
    kept = _Kept(msgspec.convert(config.store_config, MemoryConfig)) if config.store == "memory" else None
    return [await serve(options, config, console, kept, life, () if life else chats) for life in range(2)]


def _config(options: DemoOptions, model: Path, store: tuple[str, dict[str, Any]] | None) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        runner_config={"dtype": "float32"},
        process="inline" if options.inline else "worker",
        routing=True,
        pipeline_depth=options.depth,
        numerics=options.numerics,
        max_running=max(options.concurrency * GROUP_SAMPLES, 64),
        max_step_tokens=max(options.concurrency * GROUP_SAMPLES, 2048),
        max_requests=max(options.concurrency * GROUP_SAMPLES, 4096),
        store="" if store is None else store[0],
        store_config={} if store is None else store[1],
        # the demo is to show the store
        store_required=store is not None,
        # so that short prompts have whole blocks, too
        block_tokens="auto" if store is None else _STORE_BLOCK_TOKENS,
    )


async def serve(
    options: DemoOptions,
    config: EngineConfig,
    console: Console,
    kept: Store | None = None,
    life: int = 0,
    chats: Sequence[Chat] = (),
) -> Served:
    """Serve chats and the workload by one engine in this process."""
    started = time.perf_counter()
    async with AsyncExitStack() as stack:
        with progress_on(console) as progress:
            loading = progress.add_task("loading", total=1, note="")
            progress.refresh()
            engine = await stack.enter_async_context(Engine(config, store=kept))
            capacity = engine.capacity
            progress.update(loading, completed=1, note=f"{capacity.num_blocks} KV blocks")
        start_s = time.perf_counter() - started
        answers = await play_chats(engine, chats, console) if chats else []
        jobs = make_jobs(options, capacity)
        probes = await probe(engine, jobs) if life else []
        with progress_on(console) as progress:
            results, serve_s = await play(engine, jobs, options.concurrency, progress)
            stats = engine.stats()
            return Served(
                jobs=[*(chat.job for chat in chats), *jobs],
                results=[*answers, *results],
                chats=len(chats),
                room=capacity,
                totals=stats.scheduler,
                serve_s=serve_s,
                start_s=start_s,
                probes=probes,
                refused=stats.refused_writes,
                refused_why=stats.refused_why,
            )
