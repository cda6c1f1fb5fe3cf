"""Makes `Router.stats()`, `facts()` and `load()`: a router's instances at one moment.

An instance sends its `Status` with every heartbeat; the stats have the latest one and its age. Changes nothing and
sends nothing. Called by `router/router.py`; `fdasync up` and `fdasync demo` read the stats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fdasync.errors import PeerUnreachable
from fdasync.generator import InstanceLoad, Load
from fdasync.stats import State
from fdasync.telemetry.sight.sight import Watched
from fdasync_fleet.messages import Status
from fdasync_fleet.router.instances import farthest, nearest
from fdasync_fleet.router.weights.agreement import BEHIND, Dropped
from fdasync_fleet.router.weights.wakes import UNWOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.runner.facts import ModelFacts
    from fdasync.telemetry.sight.sight import Sight
    from fdasync_fleet.router.instances import InstanceHandle, InstanceTable


class InstanceStats(InstanceLoad, frozen=True, kw_only=True):
    """One instance, with what only its router knows.

    Attributes:
        says: the address at which it says that it listens, "" before its handshake; where the two differ, what stands
            between them (address translation, a proxy) has to be there for other instances, too.
        state: as its `stats` tell it; "draining" also where this router has asked it to; "away" without a link;
            "refused" if there is no link because it does not fit.
        status: its latest status; None before the first.
        status_at: time of that status, by the loop's clock.
        known_blocks: number of identities that, as the router knows, it has.
    """

    says: str
    state: Literal[State, "away", "refused"]
    status: Status | None
    status_at: float
    known_blocks: int


class RouterStats(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    instances: in the order in which they were named.
    live: number of requests of this router that have not ended.
    dropped: instances that the router has stopped using, with reasons.
    """

    instances: tuple[InstanceStats, ...]
    live: int
    dropped: tuple[Dropped, ...]

    @property
    def missing(self) -> tuple[InstanceStats, ...]:
        """Instances without a link; their `problem` says why."""
        return tuple([one for one in self.instances if not one.is_up])


def stats_of(table: InstanceTable, live: int, dropped: Sequence[Dropped], now: float) -> RouterStats:
    """`live`: number of requests that have not ended; `now`: time by the loop's clock."""
    instances = tuple([_of(instance, now) for instance in table.instances.values()])
    return RouterStats(instances=instances, live=live, dropped=tuple(dropped))


def facts_of(table: InstanceTable) -> ModelFacts:
    """The model of the instances, whose shapes are the same. Raises PeerUnreachable where none has answered yet."""
    known = [instance for instance in table.instances.values() if instance.peer.hello is not None]
    if not known:
        raise PeerUnreachable("router", "no instance has answered yet")
    # where an instance was refused for another model, the model most likely meant is that of the instances that are up
    first = next((instance for instance in known if instance.peer.is_up), known[0])
    alike = [instance.facts for instance in known if instance.shape == first.shape]
    return msgspec.structs.replace(
        first.facts,
        tensor_parallel=0,
        max_context_tokens=max(facts.max_context_tokens for facts in alike),
        no_sleep=next((facts.no_sleep for facts in alike if facts.no_sleep), ""),
        weight_version=table.weight_version,
        num_instances=len(table.up()),
    )


def load_of(table: InstanceTable, live: int, now: float, *, updating: bool) -> Load:
    """`live`: number of requests that have not ended; `now`: time by the loop's clock."""
    each = {instance: _of(instance, now) for instance in table.instances.values()}
    up = [one for one in each.values() if one.is_up]
    doing = nearest([one.doing for one in up])
    # of blocks, those that are promised to leases count as used
    blocks = [
        (one.status.stats.scheduler.num_blocks, one.status.free_blocks, instance.facts.block_tokens)
        for instance, one in each.items()
        if one.is_up and one.status is not None
    ]
    return Load(
        running=sum(one.running for one in up),
        waiting=sum(one.waiting for one in up),
        live=live,
        used_tokens=sum((every - free) * size for every, free, size in blocks),
        capacity_tokens=sum(every * size for every, _, size in blocks),
        doing=farthest([doing, "updating"]) if updating else doing,
        paused=doing != "running",
        updating=updating,
        asleep=any(one.doing in ("asleep", "waking") for one in up),
        instances=tuple(each.values()),
    )


def watched_of(instance: InstanceHandle, sight: Sight | None, age_s: float) -> Watched:
    """An instance and what it showed, so many seconds ago."""
    return Watched(**_told_of(instance), age_s=age_s, sight=sight)


def _unused(instance: InstanceHandle) -> str:
    """Why an instance with a link gets no requests."""
    if not instance.peer.is_up:
        return ""
    if instance.behind:
        return instance.why or BEHIND
    return UNWOKEN if instance.memory == "unwoken" else ""


def _of(instance: InstanceHandle, now: float) -> InstanceStats:
    peer, hello, status = instance.peer, instance.peer.hello, instance.status
    told = _told_of(instance)
    running: State = "running" if status is None else status.stats.state
    away: Literal["away", "refused"] = "away" if peer.refusal is None else "refused"
    return InstanceStats(
        **told,
        says="" if hello is None else hello.address,
        doing=instance.doing,
        state=("draining" if instance.is_leaving else running) if peer.is_up else away,
        stats=None if status is None else status.stats,
        age_s=0.0 if status is None else now - instance.status_at,
        status=status,
        status_at=instance.status_at,
        live=instance.live,
        known_blocks=instance.num_blocks,
        weight_version=instance.weight_version,
    )


def _told_of(instance: InstanceHandle) -> dict[str, Any]:
    """What a router says of an instance whatever it is asked."""
    peer, hello = instance.peer, instance.peer.hello
    return {
        "name": "" if hello is None else hello.name,
        "role": "" if hello is None else hello.role,
        "address": instance.address,
        "is_up": peer.is_up,
        "problem": _unused(instance) if peer.is_up else peer.problem,
    }
