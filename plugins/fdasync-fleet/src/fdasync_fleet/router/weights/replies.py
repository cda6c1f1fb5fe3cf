"""The error that an instance's reply to a command tells: of the same kind as at the instance, with the instance's name.

Knows no commands. Called by what sends them: `router/control.py` and `wakes.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync import errors
from fdasync.errors import (
    Asleep,
    BadInput,
    ConfigError,
    FdasyncError,
    RemoteError,
    UpdateUnderWay,
    WakeFailed,
    WeightsDiffer,
)

if TYPE_CHECKING:
    from fdasync_fleet.messages import Done
    from fdasync_fleet.router.instances import InstanceHandle


def error_of(instance: InstanceHandle, done: Done) -> FdasyncError:
    """The error of a reply that tells one (`done.error` is not ""); RemoteError for a kind that callers do not know."""
    kind = getattr(errors, done.error, None)
    if done.error == "UpdateUnderWay":
        says = f"says {instance.peer.name}"
        return UpdateUnderWay(says, done.problem) if done.problem else UpdateUnderWay(says)
    if done.error == "Asleep":
        return Asleep(instance.peer.name, ("weights",))
    if done.error == "WeightsDiffer":
        return WeightsDiffer(done.expected, done.held, where=instance.peer.name)
    if done.error in ("WeightsRejected", "WeightsBroken") and kind is not None:
        error: FdasyncError = kind(f"{instance.peer.name}: {done.problem}")
        return error
    if done.error == "ConfigError":
        return ConfigError(done.field, f"{instance.peer.name}: {done.problem}")
    if done.error == "WakeFailed":
        return WakeFailed(done.field, f"{instance.peer.name}: {done.problem}")
    if done.error == "BadInput":
        return BadInput(done.field, f"{instance.peer.name}: {done.problem}")
    return RemoteError(instance.peer.name, done.error, done.problem)
