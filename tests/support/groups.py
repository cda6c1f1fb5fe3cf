"""Groups of synthetic runners in one process: no exchange, one loop, so virtual time is theirs too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.runner.group.group import GroupRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.runner.base import Runner, RunnerLimits


def group_of(make: Callable[[RunnerLimits], Runner], limits: RunnerLimits, ranks: int) -> GroupRunner:
    """A group of runners that `make` makes, each with its own limits."""
    return GroupRunner(
        [make(msgspec.structs.replace(limits, tensor_parallel=ranks, rank=rank)) for rank in range(ranks)]
    )


def ranked(make: Callable[[RunnerLimits], Any], limits: RunnerLimits) -> Any:
    """What `make` makes, or a group of them where the limits ask for more than one rank."""
    return group_of(make, limits, limits.tensor_parallel) if limits.tensor_parallel > 1 else make(limits)
