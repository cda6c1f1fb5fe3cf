"""The completion port of a device whose work is done when it is given, such as a CPU that computes where it is called.

`completion.py` has the contract, but for one word of it: a future resolves before `completion` returns, and not in a
later turn. A process that computes on its loop has few turns; a result that waited for one would wait for the next
step. Called by runners.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fdasync.gpu.completion import CompletionPort

if TYPE_CHECKING:
    from fdasync.gpu.completion import Work


class AtOncePort(CompletionPort):
    """See the module. Its events are done (`fake.AlreadyDone`)."""

    name: ClassVar[str] = "at once"

    def _given(self, work: Work) -> None:
        self._drain(work.lane)

    def _stop(self) -> None:
        """There is nothing to watch."""
