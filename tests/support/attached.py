"""Finds a scheduler's attachments by their class. Called by tests of what an attachment holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from fdasync.scheduler import Scheduler
    from fdasync.scheduler.disagg.prefill import PrefillSide

A = TypeVar("A")


def attached(scheduler: Scheduler, kind: type[A]) -> A:
    """The scheduler's one attachment of this class."""
    (found,) = [one for one in scheduler.attachments if isinstance(one, kind)]
    return found


def held_for_others(side: PrefillSide) -> int:
    """Tokens that have a lease and are not begun, blocks in the staging ring, offers and hand-overs; 0 when no hand-off
    is under way."""
    return side._leased_tokens + side._sender._ring.total + side._sender.num_out


def held_by_exports(scheduler: Scheduler) -> int:
    """Blocks that exports keep in place."""
    planner = scheduler.swap_planner
    return planner._held + len(planner.pinned)
