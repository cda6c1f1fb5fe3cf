"""How a router starts: until those of its instances that are there can serve, and who is missing then.

One that is down, or does not fit, stops nobody: it is named (`Router.stats`), and called on. Knows members and their
peers, no requests. Called by `router/router.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fdasync.errors import DeadlineExceeded, PeerRefused
from fdasync.ipc.deadlines import wait_within
from fdasync.pd.messages import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.pd.messages import Hello
    from fdasync.pd.router.config import Require
    from fdasync.pd.router.instances import Member


def can_serve(members: Sequence[Member]) -> bool:
    """Whether those that are up can serve requests: any of them can. One half alone serves them whole until the other
    comes (`Fleet.choose`)."""
    return any(member.peer.is_up for member in members)


async def gather(members: Sequence[Member], require: Require, connect_s: float, settle_s: float) -> None:
    """Wait for the first instances of a router; see `Router.start`. Raises PeerRefused, DeadlineExceeded."""
    loop = asyncio.get_running_loop()
    until = loop.time() + connect_s
    settled = False
    calls: dict[Member, asyncio.Task[None]] = {}
    try:
        while missing := [member for member in members if not member.peer.is_up and member.peer.refusal is None]:
            if require == "all":
                _raise_refusal(members)
            elif not settled and can_serve(members):
                # others that are there answer within that
                settled, until = True, min(until, loop.time() + settle_s)
            left_s = until - loop.time()
            if left_s <= 0:
                break
            for member in missing:
                if member not in calls or calls[member].done():
                    calls[member] = loop.create_task(member.peer.ready(left_s), name=f"fdasync-call {member.address}")
            waited = [calls[member] for member in missing]
            await wait_within(waited, left_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for call in calls.values():
            call.cancel()
        # how they ended, their peers say
        await asyncio.gather(*calls.values(), return_exceptions=True)
    up = [member for member in members if member.peer.is_up]
    refused = [str(member.peer.refusal) for member in members if member.peer.refusal is not None]
    if require == "all" or not (up or missing):
        _raise_refusal(members)
    if missing and (require == "all" or not up):
        what = f"connecting to {', '.join(member.address for member in missing)}"
        raise DeadlineExceeded(what + (f" (refused: {'; '.join(refused)})" if refused else ""), connect_s)


def _raise_refusal(members: Sequence[Member]) -> None:
    for member in members:
        if member.peer.refusal is not None:
            raise member.peer.refusal


def misfits(members: Sequence[Member], require: Require) -> list[tuple[Member, Refused]]:
    """Of those that are up, who does not fit most of them, and why. Raises PeerRefused where not most fit together,
    those that were refused counted: nobody can tell who is wrong; or where all must."""
    up = [member for member in members if member.peer.is_up]
    fitting: list[Member] = max(
        [[other for other in up if other.hello.shape == member.hello.shape] for member in up], key=len
    )
    odd = [(member, refused) for member in up if (refused := misfit(fitting[0], member.hello)) is not None]
    problems = [PeerRefused(member.address, why.field, why.problem) for member, why in odd]
    problems += [refusal for member in members if (refusal := member.peer.refusal) is not None]
    if problems and (require == "all" or len(fitting) <= len(problems)):
        raise problems[0]
    return odd


def misfit(member: Member, hello: Hello) -> Refused | None:
    """Why somebody who says this does not fit an instance that is there."""
    ours = member.hello.shape
    assert ours is not None
    assert hello.shape is not None
    differs = ours.difference(hello.shape)
    if differs is None:
        return None
    field, one, other = differs
    return Refused(f"shape.{field}", f"{member.peer.name} has {one}, {hello.name} has {other}"[:4096])
