"""What a receiver and a sender say to each other beside the bytes, over a connection of its own, and its bounds.

    receiver: knock                    as in `fdasync_fleet/transfer/tcp_wire.py`: who does not know the sender's token
    sender:   answer                   hears nothing
    receiver: proof
    receiver: Stage, Free              frames: length (4 bytes, little-endian), then so many bytes of msgpack
    sender:   Staged, Unstaged

A receiver asks for runs of parts (`Stage`). The sender copies them into a slot of its staging area and says where that
is. The receiver's engine reads the slot, and the receiver frees it. Nothing is allocated by a number of the peer's: a
frame has at most `MAX_FRAME_NBYTES`, the runs of one request fit a slot, and `MAX_STAGES` requests may be open. Any
other bytes are a ProtocolError, which ends the connection. Pure. Called by both sides.
"""

from __future__ import annotations

import struct
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from fdasync.errors import ProtocolError
from fdasync.ipc.shared_memory import Part
from fdasync_mooncake.transfer.staging import SLOT_NBYTES

MAX_FRAME_NBYTES = 64 << 10
#: runs of one request
MAX_RUNS = 512
#: requests of a connection that are neither freed nor refused
MAX_STAGES = 32

_LENGTH = struct.Struct("<I")
_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class WireRun(msgspec.Struct, frozen=True, array_like=True):
    """`length` bytes from `start` of a part of the sender's."""

    part: Part
    start: _Count
    length: Annotated[int, Meta(ge=1, le=SLOT_NBYTES)]


class Stage(msgspec.Struct, frozen=True, array_like=True, tag="stage"):
    """Copy these runs into a slot, one behind the other; the answer is `Staged` or `Unstaged` with the number."""

    number: _Count
    runs: Annotated[tuple[WireRun, ...], Meta(min_length=1, max_length=MAX_RUNS)]


class Free(msgspec.Struct, frozen=True, array_like=True, tag="free"):
    """The slot of this number is not read any more, or not wanted any more."""

    number: _Count


class Staged(msgspec.Struct, frozen=True, array_like=True, tag="staged"):
    """The runs are in place.

    Attributes:
        number: of the request.
        segment: host:port by which engines reach the sender's; `protocol` must be the receiver's.
        address: of the first byte, as the sender's engine names it.
        offered: of each run whether its part is on offer; if not, its room holds anything.
    """

    number: _Count
    segment: Annotated[str, Meta(max_length=256)]
    protocol: Annotated[str, Meta(max_length=16)]
    address: _Count
    offered: Annotated[tuple[bool, ...], Meta(max_length=MAX_RUNS)]


class Unstaged(msgspec.Struct, frozen=True, array_like=True, tag="unstaged"):
    """The sender's engine is away; the number is free again."""

    number: _Count
    problem: Annotated[str, Meta(max_length=512)]


Asked = Stage | Free
Told = Staged | Unstaged
ASKED: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Stage | Free)
TOLD: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Staged | Unstaged)
T = TypeVar("T")


def pack(message: Asked | Told) -> bytes:
    """A frame."""
    payload = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def unpack(data: bytearray, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """Take one message off the front; None: it is not whole. Raises ProtocolError."""
    if len(data) < _LENGTH.size:
        return None
    (nbytes,) = _LENGTH.unpack_from(data)
    if nbytes > MAX_FRAME_NBYTES:
        raise ProtocolError(f"a frame of {nbytes} bytes; {MAX_FRAME_NBYTES} are taken")
    if len(data) < _LENGTH.size + nbytes:
        return None
    try:
        message = decoder.decode(bytes(data[_LENGTH.size : _LENGTH.size + nbytes]))
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"a frame that cannot be decoded: {error}") from None
    del data[: _LENGTH.size + nbytes]
    return message


def check_stage(stage: Stage) -> None:
    """Raises ProtocolError for runs that are outside of their parts, or more than a slot holds."""
    if sum(run.length for run in stage.runs) > SLOT_NBYTES:
        raise ProtocolError(f"a request for more than {SLOT_NBYTES} bytes at a time")
    for run in stage.runs:
        if run.start + run.length > run.part.nbytes:
            raise ProtocolError(f"a request for {run.length} bytes from {run.start} of a part of {run.part.nbytes}")
