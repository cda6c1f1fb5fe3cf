"""The calls that an instance makes to its transfer process, and the answer of each. Pure data.

The first call is `Open`, with the fds of the regions. Calls begin in the order sent, run at the same time and are
answered in any order (`ipc/rpc.py`). An `Offer` is in force before any call sent after it begins. Both sides use it,
`proxy.py` and `main.py`.
"""

from __future__ import annotations

import msgspec

from fdasync import errors
from fdasync.ipc.rpc import ErrorTable
from fdasync.ipc.shared_memory import Part
from fdasync_fleet.messages import Source
from fdasync_fleet.transfer.base import CopySpec
from fdasync_fleet.transfer.plugins import TransportSpec


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Make these transports and open them; the answer is the `Source` of each, in order, or why an optional one does
    not open.

    Attributes:
        specs: of the transports; other calls name one by its place.
        region_nbytes: sizes of the regions whose fds ride along.
    """

    specs: tuple[TransportSpec, ...]
    region_nbytes: tuple[int, ...]


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """`Transport.offer`; the answer is None."""

    place: int
    parts: tuple[Part, ...]


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag="withdraw"):
    """`Transport.withdraw`; the answer is None."""

    place: int
    parts: tuple[Part, ...]


class Forget(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """`Transport.forget`; the answer is None."""

    place: int
    source: Source


class Receive(msgspec.Struct, frozen=True, array_like=True, tag="receive"):
    """`Transport.receive`; the answer is its outcomes.

    Attributes:
        limit_s: seconds until the deadline; clocks of processes are not compared.
    """

    place: int
    source: Source
    copy_specs: tuple[CopySpec, ...]
    limit_s: float


class Checksums(msgspec.Struct, frozen=True, array_like=True, tag="checksums"):
    """`checksum_parts`; the answer is its checksums."""

    parts: tuple[Part, ...]


Verb = Offer | Withdraw | Forget | Receive | Checksums

ERRORS = ErrorTable(errors.BadInput, errors.InvariantBroken, errors.PluginError, errors.RunnerError)


def error_of(error: BaseException) -> errors.FdasyncError:
    """The error that an answer carries; an error that no transport should raise becomes a RunnerError."""
    if error in ERRORS:
        assert isinstance(error, errors.FdasyncError)
        return error
    return errors.RunnerError(f"{type(error).__name__}: {error}")
