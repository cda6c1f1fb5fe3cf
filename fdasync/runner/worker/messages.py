"""Messages between an engine and its worker process, and errors on the wire. Pure data.

engine                       worker
  Open(runner, config)  -->    loads and profiles
                       <--   Hello(capacity) | Failed
  Bind(sizes) + fds     -->    allocates, maps the arenas
                       <--   Ready | Failed
  RunStep ...           -->
                       <--   StepOutput | StepError, in order
  SwapOut, SwapIn ...   -->
                       <--   CopyOutput | CopyError, in any order
  LoadFolder(path)      -->    new weights from a folder
                       <--   Loaded | Failed
  BeginTensors + 2 fds  -->    checks what will come, maps the chunks
  WriteChunk ...        -->    copies the pieces out of a chunk
  EndTensors            -->
                       <--   Ready | Failed, to each of the three, in order
  Close                 -->    exits; the end of the stream means the same
"""

from __future__ import annotations

from typing import Any

import msgspec

from fdasync import errors
from fdasync.cache.aux import AuxSpec
from fdasync.events.actions import RunStep, SwapIn, SwapOut
from fdasync.runner.base import Capacity, CopyOutput, RunnerLimits, StepOutput, TensorMeta


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Load this runner. `config` is checked by the runner's own type."""

    runner: str
    config: dict[str, Any]
    limits: RunnerLimits


class Bind(msgspec.Struct, frozen=True, array_like=True, tag="bind"):
    """Allocate `num_blocks`.

    The fds of the aux arena (where there are specs) and of the host arena (where it has blocks) ride along, in
    this order.
    """

    num_blocks: int
    num_slots: int
    block_tokens: int
    specs: tuple[AuxSpec, ...]
    num_host_blocks: int
    block_nbytes: int


class LoadFolder(msgspec.Struct, frozen=True, array_like=True, tag="load_folder"):
    """Replace all weights by those of a checkpoint folder."""

    path: str


class BeginTensors(msgspec.Struct, frozen=True, array_like=True, tag="begin_tensors"):
    """These tensors will come, through chunks of shared memory whose fds ride along."""

    tensors: tuple[TensorMeta, ...]
    chunk_nbytes: int


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a tensor in a chunk.

    Attributes:
        number: of the tensor, in `BeginTensors`.
        offset_nbytes: in the tensor.
        at_nbytes: in the chunk.
    """

    number: int
    offset_nbytes: int
    at_nbytes: int
    nbytes: int


class WriteChunk(msgspec.Struct, frozen=True, array_like=True, tag="write_chunk"):
    """Copy these pieces into their tensors; the chunk is the engine's again with the answer."""

    chunk: int
    pieces: tuple[Piece, ...]


class EndTensors(msgspec.Struct, frozen=True, array_like=True, tag="end_tensors"):
    """Every byte was written."""


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """End."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Loaded."""

    capacity: Capacity


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Bound, or written: done as asked."""


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The weights of the folder are in use."""

    weights_id: str


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """What was asked failed: the error's class and its constructor's arguments."""

    kind: str
    fields: dict[str, Any]


class StepError(msgspec.Struct, frozen=True, array_like=True, tag="step_error"):
    """A step failed; no further step is taken."""

    step_id: int
    problem: str


class CopyError(msgspec.Struct, frozen=True, array_like=True, tag="copy_error"):
    """A copy of blocks failed; no further work is taken."""

    copy_id: int
    problem: str


Request = Open | Bind | LoadFolder | BeginTensors | WriteChunk | EndTensors
Answer = Hello | Ready | Loaded | Failed
ToWorker = Request | RunStep | SwapOut | SwapIn | Close
ToEngine = Answer | StepOutput | StepError | CopyOutput | CopyError

_SENT_WHOLE: dict[type[errors.FdasyncError], tuple[str, ...]] = {
    errors.BadInput: ("field", "problem", "limit", "hint"),
    errors.ConfigError: ("field", "problem", "limit", "hint"),
    errors.CheckpointError: ("path", "problem"),
    errors.UnsupportedModel: ("model", "reason"),
    errors.PluginError: ("group", "name", "distribution", "problem"),
    errors.RunnerError: ("problem", "step_id"),
    errors.WeightsRejected: ("problem",),
    errors.WeightsBroken: ("problem",),
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
