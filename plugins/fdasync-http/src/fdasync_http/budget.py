"""A bound on bytes that many requests hold together. `Front` holds it; `bodies.py` finds it in a request's scope."""

from __future__ import annotations

from fdasync_http.failures import RETRY_AFTER_S, Refused

#: name in an ASGI scope of the app's budget for bodies
BUDGET = "fdasync_http.bodies"


class Budget:
    """Bytes of bodies that are being read, of all requests together.

    Args:
        most: how many there may be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0

    def take(self, nbytes: int) -> None:
        """Raises Refused (429), and takes nothing then."""
        if self.held + nbytes > self._most:
            told = f"the bodies that arrive have {self._most} bytes together, the most that they may"
            raise Refused(429, told, code="overloaded", retry_after_s=RETRY_AFTER_S)
        self.held += nbytes

    def give(self, nbytes: int) -> None:
        """Return what was taken."""
        self.held -= nbytes
