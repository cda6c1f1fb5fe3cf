"""How busy an engine or a router says that it is. Pure data."""

from __future__ import annotations

import msgspec

from fdasync.request import Doing
from fdasync.stats import EngineStats


class InstanceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of a router, as its latest heartbeat told it, with the requests of other routers.

    Attributes:
        name, role: from its handshake; "" before the first.
        address: the address that the router dials.
        is_up: whether there is a link to it; without one the numbers are the last that it sent.
        problem: why there is no link, or why it gets no requests although there is one; else "".
        doing: what it does, by its latest heartbeat or this router's last call.
        stats: the numbers of its engine; None before the first heartbeat.
        age_s: age of `stats`, in seconds.
        live: requests of this router that it serves or prefills.
        weight_version: label of its weights.
    """

    name: str
    role: str
    address: str
    is_up: bool
    problem: str
    doing: Doing
    stats: EngineStats | None
    age_s: float
    live: int
    weight_version: str

    @property
    def running(self) -> int:
        """Samples that hold KV blocks; 0 before the first heartbeat."""
        return 0 if self.stats is None else self.stats.scheduler.running

    @property
    def waiting(self) -> int:
        """Samples that wait to be computed; 0 before the first heartbeat."""
        return 0 if self.stats is None else self.stats.scheduler.waiting

    @property
    def paused(self) -> bool:
        """It plans no steps."""
        return self.doing != "running"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a generator is. On a router the numbers of samples and tokens are sums over the instances that are up,
    and as old as their latest heartbeats.

    Attributes:
        running: samples that hold KV blocks.
        waiting: samples that wait to be computed, and requests that wait for a place.
        live: requests of this engine or router that have not ended; 0: all have their results.
        used_tokens, capacity_tokens: tokens of KV blocks that samples use, and of all blocks. Cached blocks that no
            sample uses do not count as used.
        doing: what it does, in one word (`request.Doing`). On a router: what the instance nearest to "running" does,
            among those that are up; "updating" while the router updates running instances.
        paused: no steps are planned; on a router: at no instance that is up.
        asleep: a sleep has begun, and not all memory is back; on a router: at any instance that is up.
        updating: weights are being updated, or on a router their label.
        instances: of a router, in the order in which they were named; () of an engine.
    """

    running: int
    waiting: int
    live: int
    used_tokens: int
    capacity_tokens: int
    doing: Doing
    paused: bool
    updating: bool
    asleep: bool = False
    instances: tuple[InstanceLoad, ...] = ()
