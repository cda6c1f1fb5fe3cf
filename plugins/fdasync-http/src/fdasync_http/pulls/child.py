"""The pull of a version in a process of its own: it reads and writes whole checkpoints, which no loop could wait for.

`pull` starts a child for one call and ends it; `main` is the child. Knows no paths of HTTP. Called by `serve.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.errors import DeadlineExceeded, EngineClosed, WeightsRejected
from fdasync.ipc.deadlines import Within
from fdasync.ipc.rpc import ErrorTable, RpcClient
from fdasync.ipc.service import Service, serve
from fdasync_http.pulls.local import Pull, bring

if TYPE_CHECKING:
    from collections.abc import Sequence

_ERRORS = ErrorTable(WeightsRejected)
_NOTHING = msgspec.msgpack.Decoder(None)


async def pull(asked: Pull, deadline_s: float) -> None:
    """Do it. A caller that is cancelled ends the child, and a later call goes on from what is whole.

    Raises WeightsRejected, DeadlineExceeded, WorkerDied.
    """
    child = RpcClient(asyncio.get_running_loop(), "pull", __name__, _ERRORS)
    try:
        async with Within(deadline_s):
            await child.send(asked, _NOTHING)
    except TimeoutError:
        raise DeadlineExceeded("pulling weights", deadline_s) from None
    finally:
        await child.kill(EngineClosed("closed"))


class _PullService(Service):
    """One pull."""

    messages = Pull
    errors = _ERRORS

    async def perform(self, message: Pull, fds: list[int]) -> None:  # noqa: ARG002 - the contract's
        bring(message)

    def error_of(self, message: Pull, error: BaseException) -> WeightsRejected:  # noqa: ARG002 - the contract's
        if isinstance(error, WeightsRejected):
            return error
        return WeightsRejected(f"{type(error).__name__}: {error}")

    async def aclose(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """Has nothing to free."""


def main() -> None:
    """The child."""
    serve(_PullService())
