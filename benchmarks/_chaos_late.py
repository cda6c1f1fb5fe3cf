"""A prefill instance that is stopped in mid-transfer and wakes when its lease is long over, as one scene.

While it sleeps its lease expires, and the decode instance gives the blocks to others. When it wakes, and what it had
said before arrives at last, that must be refused and counted, and touch nothing. Used by `chaos.py`.
"""

from __future__ import annotations

import asyncio
import random
import signal
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks._chaos_fleet import RULES, VOCAB, Fleet
from benchmarks._chaos_load import Ask, Load
from benchmarks._chaos_node import Node
from fdasync.errors import DeadlineExceeded
from fdasync.pd.link.session import LinkConfig
from fdasync.pd.router.router import Router
from fdasync.request import SamplingParams
from fdasync.testing.harness.engines import oracle_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks._chaos_child import Probe

# so long that it is the lease that ends, not the link
_LINKS = LinkConfig(beat_s=0.2, lost_s=30.0)
_TTL_S = 1.0
_PROMPT, _OUTPUT = 200, 12
_OTHERS = 40
_LIMIT_S = 30.0


class Late(msgspec.Struct):
    """How it went; `refused`: words that came too late."""

    wrong: list[str]
    refused: int = 0


class _SlowFleet(Fleet):
    """Steps that take long enough to be met half-way, and few blocks on the decode instance."""

    def make(self, name: str, role: str, *, worker: bool, store: bool) -> Node:  # noqa: ARG002 - as any fleet
        node = super().make(name, role, worker=False, store=False)
        config = node.config
        runner = config.runner_config
        if role == "prefill":
            config = msgspec.structs.replace(
                config, max_step_tokens=16, runner_config={**runner, "step_s": 0.06, "jitter": 0.0}
            )
        rules = msgspec.structs.replace(RULES, ttl_s=_TTL_S)
        config = msgspec.structs.replace(config, leases=rules, runner_config={**config.runner_config, "num_blocks": 96})
        made = self.nodes[name] = Node(name, config, _LINKS, self._transport, self._folder, drain_s=20.0)
        return made


async def play_late(folder: Path, transport: str, seed: int) -> Late:
    """The scene twice: with its words held back on the way, and without."""
    late = Late([])
    rng = random.Random(seed)
    fleet = _SlowFleet(folder, transport, 1, 1)
    try:
        await fleet.open()
        lender = fleet.nodes["d0"]
        direct = [f"tcp://127.0.0.1:{lender.proxy.target}"]
        oracle = oracle_of(lender.config)
        async with Router(fleet.addresses, links=_LINKS) as router, Router(direct, links=_LINKS) as aside:
            load = Load(router, oracle, rng, VOCAB)
            others = Load(aside, oracle, rng, VOCAB)
            await load.one(_ask(rng, 40))
            for held_back in (True, False):
                late.refused += await _scene(fleet, load, others, rng, held_back)
            await fleet.check_quiet()
            late.wrong += load.wrong + others.wrong
            if load.outcomes["right"] + load.outcomes["lost"] != 3:
                late.wrong.append(f"late: the requests whose prefill stopped: {dict(load.outcomes)}")
            if set(others.outcomes) != {"right"}:
                late.wrong.append(f"late: the others: {dict(others.outcomes)}")
        if not late.refused:
            late.wrong.append("late: no word came too late")
        await fleet.aclose()
        late.wrong += fleet.wrong
    finally:
        fleet.destroy()
    return late


async def _scene(fleet: Fleet, load: Load, others: Load, rng: random.Random, held_back: bool) -> int:
    """How many words came too late."""
    first, lender = fleet.nodes["p0"], fleet.nodes["d0"]
    before = await _until(lender, "no lease", lambda probe: probe.leases == 0)
    had = before.books["received_blocks"]
    asked = asyncio.ensure_future(load.one(_ask(rng, _PROMPT)))
    try:
        await _until(
            lender, "in mid-transfer", lambda probe: probe.leases == 1 and probe.books["received_blocks"] > had
        )
        if held_back:
            lender.proxy.stall(inward=True, outward=False)
            # more blocks are offered, and lie still
            await asyncio.sleep(0.2)
        first.kill_now(signal.SIGSTOP)
        await _until(lender, "the lease is over", lambda probe: probe.leases == 0 and not probe.held["leased"])
        busy = [asyncio.ensure_future(others.one(_ask(rng, 60))) for _ in range(_OTHERS // 2)]
        await asyncio.wait(busy)
        busy = [asyncio.ensure_future(others.one(_ask(rng, 60))) for _ in range(_OTHERS // 2)]
        first.kill_now(signal.SIGCONT)
        await asyncio.sleep(0.05)
        lender.proxy.stall(inward=False, outward=False)
        await asyncio.wait(busy)
        await asyncio.wait([asked])
    finally:
        first.kill_now(signal.SIGCONT)
        lender.proxy.stall(inward=False, outward=False)
    after = await _until(lender, "no lease", lambda probe: probe.leases == 0)
    if after.books["leases_dropped"] <= before.books["leases_dropped"]:
        fleet.wrong.append("late: the lease of a stopped instance was not dropped")
    return after.late_as_lender - before.late_as_lender


def _ask(rng: random.Random, num_tokens: int) -> Ask:
    prompt = [rng.randrange(VOCAB) for _ in range(num_tokens)]
    params = SamplingParams(max_tokens=_OUTPUT, temperature=1.0, seed=rng.randrange(1 << 30), logprobs="both")
    return Ask(prompt, params, "stream", 40.0, 0.0, True, 0)


async def _until(node: Node, what: str, met: Callable[[Probe], bool]) -> Any:
    """Ask an instance until it says so. Raises DeadlineExceeded."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _LIMIT_S
    probe = None
    while loop.time() < until:
        probe = await node.probe()
        if probe is not None and met(probe):
            return probe
        await asyncio.sleep(0.02)
    raise DeadlineExceeded(f"{node.name}, {what}: {probe}", _LIMIT_S)
