"""Whether a call comes in the event loop that its object was started on.

What waits in one loop is never woken from another one: a call from elsewhere would wait for ever, so it is refused.
Called by the public verbs of engines, instances and routers.
"""

from __future__ import annotations

import asyncio

from fdasync.errors import WrongLoop


def check_loop(home: asyncio.AbstractEventLoop | None, what: str) -> None:
    """Raise WrongLoop for a call from another loop, or from outside of all loops while `home` runs in another thread.

    Args:
        home: the loop of the object; None: it was not started.
        what: the object.
    """
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        if home is not None and home.is_running():
            raise WrongLoop(what) from None
        return
    if home is not None and running is not home:
        raise WrongLoop(what)
