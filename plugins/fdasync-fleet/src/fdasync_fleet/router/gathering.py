"""Waits for a router's first instances, and finds instances that do not fit the others.

An instance that is down or does not fit does not stop the others: `Router.stats` names it. Knows instances and their
peers, no requests. Called by `router/router.py`.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from fdasync.errors import DeadlineExceeded, PeerRefused, PeerUnreachable
from fdasync.ipc.deadlines import wait_within
from fdasync_fleet.messages import Refused, difference

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from fdasync_fleet.messages import Hello
    from fdasync_fleet.router.config import Require, RouterConfig
    from fdasync_fleet.router.instances import InstanceHandle


async def gather(instances: Sequence[InstanceHandle], config: RouterConfig) -> None:
    """Wait for the first instances of a router; see `Router.start`. Raises PeerRefused, PeerUnreachable,
    DeadlineExceeded.

    One instance can serve alone: `InstanceTable.choose` has it serve requests whole until the others come.
    """
    loop = asyncio.get_running_loop()
    require, connect_s = config.require, config.connect_limit_s
    until = loop.time() + connect_s
    # when socket files that are missing are looked for once more; a time that was named is for instances that start
    look_at = loop.time() + config.settle_s if config.connect_s == "auto" else math.inf
    settled = False
    calls: dict[InstanceHandle, asyncio.Task[None]] = {}
    try:
        while missing := [each for each in instances if not each.peer.is_up and each.peer.refusal is None]:
            if require == "all":
                _raise_refusal(instances)
            elif not settled and any(each.peer.is_up for each in instances):
                settled, until = True, min(until, loop.time() + config.settle_s)
            now = loop.time()
            if now >= look_at:
                look_at = math.inf
                _raise_absent(instances, missing, require)
            left_s = until - now
            if left_s <= 0:
                break
            for instance in missing:
                if instance not in calls or calls[instance].done():
                    name = f"fdasync-call {instance.address}"
                    calls[instance] = loop.create_task(instance.peer.ready(left_s), name=name)
            waited = [calls[instance] for instance in missing]
            await wait_within(waited, min(left_s, look_at - now), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for call in calls.values():
            call.cancel()
        # the peers' states say how the calls ended
        await asyncio.gather(*calls.values(), return_exceptions=True)
    up = [instance for instance in instances if instance.peer.is_up]
    refused = [str(instance.peer.refusal) for instance in instances if instance.peer.refusal is not None]
    if require == "all" or not (up or missing):
        _raise_refusal(instances)
    if missing and (require == "all" or not up):
        what = f"connecting to {', '.join(instance.address for instance in missing)}"
        raise DeadlineExceeded(what + (f" (refused: {'; '.join(refused)})" if refused else ""), connect_s)


def _raise_absent(instances: Sequence[InstanceHandle], missing: Sequence[InstanceHandle], require: Require) -> None:
    """Raise PeerUnreachable if no process listens at addresses that the router needs for its start."""
    absent = [each for each in missing if each.peer.is_absent]
    if absent and (require == "all" or len(absent) == len(instances)):
        names = ", ".join(each.address for each in absent)
        raise PeerUnreachable(names, "there is no socket file: no instance listens there (`fdasync serve --listen`)")


def _raise_refusal(instances: Sequence[InstanceHandle]) -> None:
    for instance in instances:
        if instance.peer.refusal is not None:
            raise instance.peer.refusal


def misfits(instances: Sequence[InstanceHandle], require: Require) -> list[tuple[InstanceHandle, Refused]]:
    """The instances that are up and do not fit most of the others, with reasons.

    Raises PeerRefused if fewer than half of all, refused instances included, fit together: then no side is right. With
    `require="all"` raises PeerRefused for any instance that does not fit.
    """
    up = [instance for instance in instances if instance.peer.is_up]
    by_shape: dict[tuple[tuple[str, Any], ...], list[InstanceHandle]] = {}
    for instance in up:
        by_shape.setdefault(instance.shape, []).append(instance)
    fitting = max(by_shape.values(), key=len)
    odd = [(instance, refused) for instance in up if (refused := misfit(fitting[0], instance.hello)) is not None]
    problems = [PeerRefused(instance.address, why.field, why.problem) for instance, why in odd]
    problems += [refusal for instance in instances if (refusal := instance.peer.refusal) is not None]
    if problems and (require == "all" or len(fitting) <= len(problems)):
        raise problems[0]
    return odd


def misfit(instance: InstanceHandle, hello: Hello) -> Refused | None:
    """Why the sender of a Hello does not fit an instance; None: it fits."""
    differs = difference(instance.hello, hello)
    if differs is None:
        return None
    field, one, other = differs
    return Refused(field, f"{instance.peer.name} has {one}, {hello.name} has {other}"[:4096])
