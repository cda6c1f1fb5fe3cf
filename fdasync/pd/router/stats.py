"""What a router knows of its instances at one moment: `Router.stats()`. Changes nothing, asks nobody.

An instance says how it is doing with every heartbeat; what stands here is its latest word, and how old that is.
Called by `router/router.py`; read by `fdasync up`, by `fdasync demo` and by whoever embeds a router.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from fdasync.pd.messages import Status
from fdasync.pd.router.weight_agreement import BEHIND, Dropped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.pd.router.instances import Fleet, Member


class InstanceStats(msgspec.Struct, frozen=True, kw_only=True):
    """One instance, as a router sees it.

    Attributes:
        name, role: as it said them; "" as long as it never answered.
        is_up: there is a link to it; `problem`: why there is none, or why it gets no requests all the same.
        state: "running", "paused" or "draining", by its own last word; "away" where there is no link; "refused" where
            there is none because it does not fit.
        status: its last word, None before the first; `status_at`: when it came, in the loop's time; `status_age_s`: so
            old.
        live: requests of this router that it serves, or prefills.
        known_blocks: identities that this router knows it to have.
        weight_version: of its weights.
    """

    name: str
    address: str
    role: str
    is_up: bool
    problem: str
    state: Literal["running", "paused", "draining", "away", "refused"]
    status: Status | None
    status_at: float
    status_age_s: float
    live: int
    known_blocks: int
    weight_version: int


class RouterStats(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    instances: in the order in which they were named.
    live: requests of this router that have not ended.
    dropped: instances that it does not use any more, and why.
    """

    instances: tuple[InstanceStats, ...]
    live: int
    dropped: tuple[Dropped, ...]

    @property
    def missing(self) -> tuple[InstanceStats, ...]:
        """Instances to which there is no link; each says why."""
        return tuple([one for one in self.instances if not one.is_up])


def stats_of(fleet: Fleet, live: int, dropped: Sequence[Dropped], now: float) -> RouterStats:
    """`live`: requests that have not ended; `now`: by the loop's clock."""
    return RouterStats(
        instances=tuple([_of(member, now) for member in fleet.members.values()]), live=live, dropped=tuple(dropped)
    )


def _of(member: Member, now: float) -> InstanceStats:
    peer, hello, status = member.peer, member.peer.hello, member.status
    running = "running" if status is None else status.state
    away = "away" if peer.refusal is None else "refused"
    return InstanceStats(
        name="" if hello is None else hello.name,
        address=member.address,
        role="" if hello is None else hello.role,
        is_up=peer.is_up,
        problem=(member.waits or BEHIND if member.behind else "") if peer.is_up else peer.problem,
        state=("draining" if member.is_leaving else running) if peer.is_up else away,  # type: ignore[arg-type]
        status=status,
        status_at=member.status_at,
        status_age_s=now - member.status_at if status is not None else 0.0,
        live=member.live,
        known_blocks=len(member.blocks),
        weight_version=member.weight_version,
    )
