"""The pull of a version in a process of its own: it reads and writes whole checkpoints, which no loop could wait for.

`pull` starts a child for one call and ends it; `main` is the child. Knows no paths of HTTP. Called by `serve.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fdasync.errors import DeadlineExceeded, EngineClosed, WeightsRejected
from fdasync.ipc.deadlines import Within
from fdasync.ipc.errors import ErrorTable
from fdasync.ipc.remote import remote
from fdasync.ipc.rpc import RpcClient
from fdasync.ipc.service import Service, serve
from fdasync_http.pulls.local import Pull, bring

if TYPE_CHECKING:
    from collections.abc import Sequence


async def pull(asked: Pull, deadline_s: float) -> None:
    """Do it. A caller that is cancelled ends the child, and a later call goes on from what is whole.

    Raises WeightsRejected, DeadlineExceeded, WorkerDied.
    """
    child = RpcClient(asyncio.get_running_loop(), "pull", __name__, PullService.errors)
    try:
        async with Within(deadline_s):
            await child.call(PullService.pull, asked)
    except TimeoutError:
        raise DeadlineExceeded("pulling weights", deadline_s) from None
    finally:
        await child.kill(EngineClosed("closed"))


class PullService(Service):
    """One pull."""

    errors = ErrorTable(WeightsRejected)

    @remote()
    async def pull(self, asked: Pull) -> None:
        """Bring a version; blocks the child's loop. Raises WeightsRejected."""
        bring(asked)

    def otherwise(self, message: Any, problem: str) -> WeightsRejected:  # noqa: ARG002 - the contract's
        return WeightsRejected(problem)

    async def aclose(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """Has nothing to free."""


def main() -> None:
    """The child."""
    serve(PullService())
