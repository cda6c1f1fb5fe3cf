"""Serves the demo's workload by prefill and decode instances: `fdasync serve` children, a router in this process.

Checks no results. Called by `one_engine.py`.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import BadInput, DeadlineExceeded
from fdasync.stats import summed
from fdasync_fleet.cli.demo.chats import play_chats
from fdasync_fleet.cli.demo.workload import (
    REFRESH_S,
    DemoOptions,
    Moved,
    Served,
    make_jobs,
    play,
    probe,
    progress_on,
)
from fdasync_fleet.cli.local.fleet import LocalFleet, plans_for
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.router import Router, connect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from fdasync.engine.config import EngineConfig
    from fdasync.runner.facts import Facts
    from fdasync.stats import SchedulerStats
    from fdasync_fleet.cli.demo.chats import Chat

_MAX_INSTANCES = 16
# instances send their status twice a second
_SETTLE_S = 10.0


def parse_pd(text: str) -> tuple[int, int] | None:
    """How many prefill and decode instances `--pd` names; None: one engine in this process. Raises BadInput."""
    if text in ("", "0"):
        return None
    match = re.fullmatch("([0-9]+)x([0-9]+)", text)
    if match is None or not all(1 <= int(count) <= _MAX_INSTANCES for count in match.groups()):
        limit = f"PxD, for example 1x1, each 1 to {_MAX_INSTANCES}; 0 for none"
        raise BadInput("--pd", f"{text!r} names no instances", limit=limit)
    return int(match[1]), int(match[2])


async def serve_apart(
    options: DemoOptions,
    config: EngineConfig,
    counts: tuple[int, int],
    console: Console,
    life: int,
    chats: Sequence[Chat] = (),
) -> Served:
    """Serve chats and the workload by instances in processes of their own."""
    started = time.perf_counter()
    plans = plans_for(config, {"prefill": counts[0], "decode": counts[1]})
    async with AsyncExitStack() as stack:
        with progress_on(console) as progress:
            loading = progress.add_task("loading", total=1, note=f"{len(plans)} instances")
            progress.refresh()
            fleet = await stack.enter_async_context(LocalFleet(plans))
            router = await stack.enter_async_context(connect(fleet.addresses, RouterConfig(require="all")))
            progress.update(loading, completed=1, note=f"{counts[0]} prefill, {counts[1]} decode")
        room = _room(router)
        start_s = time.perf_counter() - started
        answers = await fleet.while_alive(play_chats(router, chats, console)) if chats else []
        jobs = make_jobs(options, room)
        probes = await fleet.while_alive(probe(router, jobs)) if life else []
        with progress_on(console) as progress:
            playing = play(router, jobs, options.concurrency, progress)
            results, serve_s = await fleet.while_alive(playing)
        totals, moved = await fleet.while_alive(totals_of(router, counts))
        return Served(
            jobs=[*(chat.job for chat in chats), *jobs],
            results=[*answers, *results],
            chats=len(chats),
            room=room,
            totals=totals,
            serve_s=serve_s,
            start_s=start_s,
            probes=probes,
            moved=moved,
        )


def _room(router: Router) -> Facts:
    facts = [member.facts for member in router.table.up()]
    return msgspec.structs.replace(
        facts[0],
        max_context_tokens=min(each.max_context_tokens for each in facts),
        num_blocks=min(each.num_blocks for each in facts),
    )


async def totals_of(router: Router, counts: tuple[int, int]) -> tuple[SchedulerStats, Moved]:
    """Sums of the instances' counters, from statuses that they sent after the last request."""
    loop = asyncio.get_running_loop()
    since = loop.time()
    # a result may be faster than the status with its counts: the second status has them all
    while any(one.status_at < since + 0.1 for one in router.stats().instances):
        if loop.time() > since + _SETTLE_S:
            raise DeadlineExceeded("waiting for the figures of all instances", _SETTLE_S)
        await asyncio.sleep(REFRESH_S)
    told = [(one.role, one.status) for one in router.stats().instances if one.status is not None]
    every = summed([one.stats for _, one in told]).scheduler
    prefill = summed([one.stats for role, one in told if role != "decode"]).scheduler
    # of a request that was handed over, both sides count the prompt
    prompts = ("prompt_tokens", "hit_tokens_device", "hit_tokens_host", "hit_tokens_store")
    totals = msgspec.structs.replace(every, **{name: getattr(prefill, name) for name in prompts})
    moved = Moved(
        prefill=counts[0],
        decode=counts[1],
        blocks=every.received_blocks,
        nbytes=sum(one.received_nbytes for _, one in told),
        leases=sum(one.asked for _, one in told),
        lease_s=sum(one.asked_s for _, one in told),
        lease_most_s=max(one.asked_most_s for _, one in told),
    )
    return totals, moved
