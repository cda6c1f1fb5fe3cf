"""Finds a scheduler's attachments by their class. Called by tests of what an attachment holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from fdasync.scheduler import Scheduler

A = TypeVar("A")


def attached(scheduler: Scheduler, kind: type[A]) -> A:
    """The scheduler's one attachment of this class."""
    (found,) = [one for one in scheduler.attachments if isinstance(one, kind)]
    return found
