"""A prefill instance that is stopped in mid-transfer and goes on when its lease is long over, as one scene.

While it is stopped its lease expires, and the decode instance gives the blocks to other requests. When it goes on, the
messages that it sent before arrive at last: the decode instance must refuse and count them, and they must touch
nothing. Used by `chaos.py`.
"""

from __future__ import annotations

import asyncio
import random
import signal
from typing import TYPE_CHECKING, Any

import msgspec
from fdasync_fleet.link.session import LinkConfig
from fdasync_fleet.router.router import Router

from fdasync.errors import DeadlineExceeded
from fdasync.request import SamplingParams
from tests.nightly.chaos.fleet import RULES, VOCAB, Fleet, versions_of
from tests.nightly.chaos.load import Ask, Load
from tests.nightly.chaos.node import Node

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.nightly.chaos.child import Probe

# so long that the lease ends before the link does
_LINKS = LinkConfig(beat_s=0.2, lost_s=30.0)
_TTL_S = 1.0
_PROMPT, _OUTPUT = 200, 12
_OTHERS = 40
_LIMIT_S = 30.0


class _SlowFleet(Fleet):
    """Steps that take long enough to be met half-way, and few blocks on the decode instance."""

    def make(self, name: str, role: str, *, workers: int, store: bool) -> Node:
        node = super().make(name, role, workers=0, store=False)
        config = node.config
        runner = config.runner_config
        if role == "prefill":
            config = msgspec.structs.replace(
                config, max_step_tokens=16, runner_config={**runner, "step_s": 0.06, "jitter": 0.0}
            )
        rules = msgspec.structs.replace(RULES, ttl_s=_TTL_S)
        config = msgspec.structs.replace(config, leases=rules, runner_config={**config.runner_config, "num_blocks": 96})
        made = self.nodes[name] = Node(name, config, _LINKS, self._transport, self.folder, drain_s=20.0)
        return made


async def play_late(folder: Path, transport: str, seed: int) -> tuple[int, list[str]]:
    """The scene twice: with the messages of the stopped instance held back on the way, and without. Returns how many
    messages were refused, and broken rules, in words."""
    refused = 0
    wrong: list[str] = []
    rng = random.Random(seed)
    fleet = _SlowFleet(folder, transport, 1, 1)
    try:
        await fleet.open()
        decode_side = fleet.nodes["d0"]
        direct = [f"tcp://127.0.0.1:{decode_side.proxy.target}"]
        versions = versions_of(decode_side)
        async with Router(fleet.addresses, links=_LINKS) as router, Router(direct, links=_LINKS) as aside:
            load = Load(router, versions, rng, VOCAB)
            others = Load(aside, versions, rng, VOCAB)
            await load.one(_ask(rng, 40))
            for held_back in (True, False):
                refused += await _scene(fleet, load, others, rng, held_back)
            await fleet.check_quiet()
            wrong += load.wrong + others.wrong
            if load.outcomes["right"] + load.outcomes["lost"] != 3:
                wrong.append(f"late: the requests whose prefill stopped: {dict(load.outcomes)}")
            if set(others.outcomes) != {"right"}:
                wrong.append(f"late: the others: {dict(others.outcomes)}")
        if not refused:
            wrong.append("late: no message came too late")
        await fleet.aclose()
        wrong += fleet.wrong
    finally:
        fleet.destroy()
    return refused, wrong


async def _scene(fleet: Fleet, load: Load, others: Load, rng: random.Random, held_back: bool) -> int:
    """How many messages came too late."""
    first, decode_side = fleet.nodes["p0"], fleet.nodes["d0"]
    before = await _until(decode_side, "no lease", lambda probe: not probe.held["leases"])
    had = before.scheduler_stats["received_blocks"]
    request = asyncio.ensure_future(load.one(_ask(rng, _PROMPT)))
    try:
        await _until(
            decode_side,
            "in mid-transfer",
            lambda probe: probe.held["leases"] == 1 and probe.scheduler_stats["received_blocks"] > had,
        )
        if held_back:
            decode_side.proxy.stall(inward=True, outward=False)
            # more blocks are offered, and their offers lie still
            await asyncio.sleep(0.2)
        first.kill_now(signal.SIGSTOP)
        await _until(decode_side, "the lease is over", lambda probe: not (probe.held["leases"] or probe.held["leased"]))
        busy = [asyncio.ensure_future(others.one(_ask(rng, 60))) for _ in range(_OTHERS // 2)]
        await asyncio.wait(busy)
        busy = [asyncio.ensure_future(others.one(_ask(rng, 60))) for _ in range(_OTHERS // 2)]
        first.kill_now(signal.SIGCONT)
        await asyncio.sleep(0.05)
        decode_side.proxy.stall(inward=False, outward=False)
        await asyncio.wait(busy)
        await asyncio.wait([request])
    finally:
        first.kill_now(signal.SIGCONT)
        decode_side.proxy.stall(inward=False, outward=False)
    after = await _until(decode_side, "no lease", lambda probe: not probe.held["leases"])
    if after.scheduler_stats["leases_dropped"] <= before.scheduler_stats["leases_dropped"]:
        fleet.wrong.append("late: the lease of a stopped instance was not dropped")
    return after.late_decode - before.late_decode


def _ask(rng: random.Random, num_tokens: int) -> Ask:
    prompt = [rng.randrange(VOCAB) for _ in range(num_tokens)]
    params = SamplingParams(max_tokens=_OUTPUT, temperature=1.0, seed=rng.randrange(1 << 30), logprobs="both")
    return Ask(prompt, params, "stream", 40.0, 0.0, True, 0)


async def _until(node: Node, what: str, met: Callable[[Probe], bool]) -> Any:
    """Ask an instance until its answer meets the condition. Raises DeadlineExceeded."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _LIMIT_S
    probe = None
    while loop.time() < until:
        probe = await node.probe()
        if probe is not None and met(probe):
            return probe
        await asyncio.sleep(0.02)
    raise DeadlineExceeded(f"{node.name}, {what}: {probe}", _LIMIT_S)
