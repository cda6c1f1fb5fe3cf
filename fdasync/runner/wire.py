"""Messages between an engine and its worker process, and errors on the wire. Pure data.

engine                       worker
  Open(runner, config)  -->    loads and profiles
                       <--   Hello(capacity) | Failed
  Bind(sizes) + fd      -->    allocates, maps the arena
                       <--   Ready | Failed
  RunStep ...           -->
                       <--   StepOutput | StepError, in order
  Close                 -->    exits; the end of the stream means the same
"""

from __future__ import annotations

from typing import Any

import msgspec

from fdasync import errors
from fdasync.actions import RunStep
from fdasync.cache.aux import AuxSpec
from fdasync.runner.base import Capacity, RunnerLimits, StepOutput


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Load this runner. `config` is checked by the runner's own type."""

    runner: str
    config: dict[str, Any]
    limits: RunnerLimits


class Bind(msgspec.Struct, frozen=True, array_like=True, tag="bind"):
    """Allocate `num_blocks`; the arena's fd rides along where there are specs."""

    num_blocks: int
    num_slots: int
    block_tokens: int
    specs: tuple[AuxSpec, ...]


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """End."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Loaded."""

    capacity: Capacity


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Bound: steps may come."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Loading or binding failed: the error's class and its constructor's arguments."""

    kind: str
    fields: dict[str, Any]


class StepError(msgspec.Struct, frozen=True, array_like=True, tag="step_error"):
    """A step failed; no further step is taken."""

    step_id: int
    problem: str


ToWorker = Open | Bind | RunStep | Close
ToEngine = Hello | Ready | Failed | StepOutput | StepError

_SENT_WHOLE: dict[type[errors.FdasyncError], tuple[str, ...]] = {
    errors.BadInput: ("field", "problem", "limit", "hint"),
    errors.ConfigError: ("field", "problem", "limit", "hint"),
    errors.CheckpointError: ("path", "problem"),
    errors.UnsupportedModel: ("model", "reason"),
    errors.PluginError: ("group", "name", "distribution", "problem"),
    errors.RunnerError: ("problem", "step_id"),
}


def pack_error(error: Exception) -> Failed:
    """An error for the wire; classes that are not known there become a RunnerError in words."""
    fields = next((fields for kind, fields in _SENT_WHOLE.items() if kind is type(error)), None)
    if fields is None:
        return Failed("RunnerError", {"problem": f"{type(error).__name__}: {error}", "step_id": -1})
    values = {name: getattr(error, name) for name in fields}
    if values.get("limit") is not None:
        values["limit"] = str(values["limit"])
    return Failed(type(error).__name__, values)


def unpack_error(failed: Failed) -> errors.FdasyncError:
    """The error again. Only classes of the table are made, whatever the wire says."""
    for kind, fields in _SENT_WHOLE.items():
        if kind.__name__ == failed.kind and set(failed.fields) == set(fields):
            return kind(**failed.fields)
    return errors.ProtocolError(f"the worker failed in a way that has no name here: {failed.kind}")
