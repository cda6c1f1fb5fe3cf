"""Makes `Router.stats()`, `facts()` and `load()`: a router's instances at one moment.

An instance sends its `Status` with every heartbeat; the stats have the latest one and its age. Changes nothing and
sends nothing. Called by `router/router.py`; `fdasync up` and `fdasync demo` read the stats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from fdasync.cache.aux import ROUTING
from fdasync.errors import PeerUnreachable
from fdasync.generator import InstanceLoad, Load, ModelFacts
from fdasync.request import Doing
from fdasync.telemetry.sight.sight import Watched
from fdasync_fleet.messages import Status
from fdasync_fleet.router.instances import farthest, nearest
from fdasync_fleet.router.weights.agreement import BEHIND, Dropped
from fdasync_fleet.router.weights.wakes import OWES_WAKE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.telemetry.sight.sight import Sight
    from fdasync_fleet.router.instances import InstanceHandle, InstanceTable


class InstanceStats(msgspec.Struct, frozen=True, kw_only=True):
    """One instance, as a router sees it.

    Attributes:
        name, role: from its handshake; "" before the first.
        address: the address that the router dials.
        says: the address at which it says that it listens, "" before its handshake; where the two differ, what stands
            between them (address translation, a proxy) has to be there for other instances, too.
        is_up: whether there is a link to it.
        problem: why there is no link, or why it gets no requests although there is one; else "".
        state: what it does, or "draining", as in its latest status; "away" without a link; "refused" if there is no
            link because it does not fit.
        status: its latest status; None before the first.
        status_at: time of that status, by the loop's clock.
        status_age_s: age of that status.
        live: requests of this router that it serves or prefills.
        known_blocks: number of identities that, as the router knows, it has.
        weight_version: label of its weights.
    """

    name: str
    address: str
    says: str
    role: str
    is_up: bool
    problem: str
    state: Literal[Doing, "draining", "away", "refused"]
    status: Status | None
    status_at: float
    status_age_s: float
    live: int
    known_blocks: int
    weight_version: str


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
    facts, shape = first.facts, first.shape
    alike = [instance for instance in known if instance.shape == shape]
    names = [spec.name for spec in shape.aux]
    return ModelFacts(
        model=facts.model,
        model_path=facts.model_path,
        tokenizer=facts.tokenizer,
        takes_text=bool(shape.text),
        dtype=facts.dtype,
        kv_dtype=shape.kv_dtype,
        numerics=shape.numerics,
        tensor_parallel=0,
        vocab_size=facts.vocab_size,
        eos_ids=shape.eos_ids,
        max_context_tokens=max(instance.facts.max_context_tokens for instance in alike),
        block_tokens=shape.block_tokens,
        captures_routing=ROUTING in names,
        num_hidden_layers=facts.num_hidden_layers,
        moe_layer_ids=facts.moe_layer_ids,
        num_experts=facts.num_experts,
        top_k=facts.top_k,
        top_k_by_layer=facts.top_k_by_layer,
        aux=tuple([name for name in names if name != ROUTING]),
        can_sleep=all(instance.facts.can_sleep for instance in alike),
        weight_version=table.weight_version,
        num_instances=len(table.up()),
    )


def load_of(table: InstanceTable, live: int, *, updating: bool) -> Load:
    """`live`: number of requests that have not ended."""
    instances = tuple([_load_of(instance) for instance in table.instances.values()])
    up = [one for one in instances if one.is_up]
    doing = nearest([one.doing for one in up])
    return Load(
        running=sum(one.running for one in up),
        waiting=sum(one.waiting for one in up),
        live=live,
        used_tokens=sum(one.used_tokens for one in up),
        capacity_tokens=sum(one.capacity_tokens for one in up),
        doing=farthest([doing, "updating"]) if updating else doing,
        paused=doing != "running",
        updating=updating,
        asleep=any(one.doing in ("asleep", "waking") for one in up),
        instances=instances,
    )


def _load_of(instance: InstanceHandle) -> InstanceLoad:
    hello, status = instance.peer.hello, instance.status
    size = 0 if hello is None else instance.shape.block_tokens
    return InstanceLoad(
        name="" if hello is None else hello.name,
        address=instance.address,
        role="" if hello is None else hello.role,
        is_up=instance.peer.is_up,
        running=0 if status is None else status.running,
        waiting=0 if status is None else status.waiting,
        live=instance.live,
        used_tokens=0 if status is None else (status.num_blocks - status.free_blocks) * size,
        capacity_tokens=0 if status is None else status.num_blocks * size,
        doing=instance.doing,
        paused=instance.is_paused,
        weight_version=instance.weight_version,
        problem=_unused(instance),
    )


def watched_of(instance: InstanceHandle, sight: Sight | None, age_s: float) -> Watched:
    """An instance and what it showed, so many seconds ago."""
    peer, hello = instance.peer, instance.peer.hello
    return Watched(
        name="" if hello is None else hello.name,
        role="" if hello is None else hello.role,
        address=instance.address,
        is_up=peer.is_up,
        problem=_unused(instance) if peer.is_up else peer.problem,
        age_s=age_s,
        sight=sight,
    )


def _unused(instance: InstanceHandle) -> str:
    """Why an instance with a link gets no requests."""
    if not instance.peer.is_up:
        return ""
    if instance.behind:
        return instance.why or BEHIND
    return OWES_WAKE if instance.owes_wake else ""


def _of(instance: InstanceHandle, now: float) -> InstanceStats:
    peer, hello, status = instance.peer, instance.peer.hello, instance.status
    running = "running" if status is None else status.state
    away = "away" if peer.refusal is None else "refused"
    return InstanceStats(
        name="" if hello is None else hello.name,
        address=instance.address,
        says="" if hello is None else hello.address,
        role="" if hello is None else hello.role,
        is_up=peer.is_up,
        problem=_unused(instance) if peer.is_up else peer.problem,
        state=("draining" if instance.is_leaving else running) if peer.is_up else away,  # type: ignore[arg-type]
        status=status,
        status_at=instance.status_at,
        status_age_s=now - instance.status_at if status is not None else 0.0,
        live=instance.live,
        known_blocks=instance.num_blocks,
        weight_version=instance.weight_version,
    )
