"""The calls that a transport makes to its engine's process, and the answer of each. Pure data.

The first call is `Start`, with the fd of the staging area. Both sides use it, `engine.py` and `engine_main.py`.
"""

from __future__ import annotations

import msgspec

from fdasync import errors
from fdasync.ipc.rpc import ErrorTable


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Initialise the engine and register the staging area, whose fd rides along; the answer is `Started`.

    Attributes:
        nbytes: of the staging area.
        host: the address by which other machines reach this one.
        protocol: "tcp" or "rdma".
        devices: names of RDMA devices, separated by commas; "": all.
    """

    nbytes: int
    host: str
    protocol: str
    devices: str


class Started(msgspec.Struct, frozen=True, array_like=True):
    """The engine runs.

    Attributes:
        port: by which other engines reach it.
        address: of the staging area's first byte in its process.
    """

    port: int
    address: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """The answer is None."""


class Connect(msgspec.Struct, frozen=True, array_like=True, tag="connect"):
    """Get to know another engine; the answer is `Met`. Blocks the process while that engine is stopped.

    Attributes:
        limit_s: for its answer.
    """

    segment: str
    limit_s: float


class Met(msgspec.Struct, frozen=True, array_like=True):
    """Whether an engine can be read from.

    Attributes:
        problem: why not; "" if it can.
        lasts: nothing between the machines lets a connection through.
    """

    problem: str = ""
    lasts: bool = False


class Read(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """Read another engine's memory into the staging area; the answer is a code of `engine.py`.

    Attributes:
        segment: of the other engine, which was connected before.
        address: there.
        offset, nbytes: in the staging area.
    """

    segment: str
    address: int
    offset: int
    nbytes: int


Verb = Start | Ping | Connect | Read
ERRORS = ErrorTable(errors.RunnerError, errors.PluginError)
