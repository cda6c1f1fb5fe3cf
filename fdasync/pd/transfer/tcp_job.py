"""One receive of `tcp.py`: what it still has to ask for, where the answers go, and what came of each receipt.

Bytes of a receipt come in order, so that each part is hashed as it grows. When the call has ended (`detach`) nothing
has a place any more. Knows no sockets. Made by `TcpTransport.receive`, driven by `tcp_client.Connection`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from fdasync.cache.store.base import DONE, Outcome
from fdasync.pd.transfer.tcp_wire import Request
from fdasync.pd.transfer.validation import damaged, refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fdasync.ipc.shared_memory import SharedRegion
    from fdasync.pd.transfer.base import Receipt
    from fdasync.pd.transfer.transfers import Call

#: of one request: receives take turns by so much
RUN_NBYTES = 512 << 10


class Job:
    """One receive: what it still has to ask for, and what came.

    Attributes:
        outcomes: of each receipt; None: not known yet.
    """

    def __init__(
        self,
        call: Call,
        receipts: Sequence[Receipt],
        outcomes: list[Outcome | None],
        regions: Sequence[SharedRegion],
    ) -> None:
        self.call = call
        self.outcomes = outcomes
        self._receipts = receipts
        self._regions: Sequence[SharedRegion] | None = regions
        self._missing = outcomes.count(None)
        self._hash = xxhash.xxh3_64()
        self.runs = self._all_runs()

    @property
    def finished(self) -> bool:
        """Every outcome is known."""
        return not self._missing

    def detach(self) -> None:
        """The call ends: nothing is written any more, and nothing asked for."""
        self._regions = None

    def _all_runs(self) -> Iterator[Run]:
        for place, receipt in enumerate(self._receipts):
            for number, part in enumerate(receipt.parts if self.outcomes[place] is None else ()):
                for start in range(0, part.nbytes, RUN_NBYTES):
                    if self._regions is None:
                        return
                    if self.outcomes[place] is None:
                        yield Run(self, place, number, start, min(RUN_NBYTES, part.nbytes - start))

    def request(self, number: int, run: Run) -> Request:
        return Request(number, self._receipts[run.place].ref_parts[run.part], run.start, run.length)

    def view(self, run: Run, at: int, nbytes: int) -> memoryview | None:
        """Where these bytes of a run go; None: nowhere, nobody wants them any more. Release it at once."""
        if self._regions is None or self.outcomes[run.place] is not None:
            return None
        part = self._receipts[run.place].parts[run.part]
        return self._regions[part.region].view(part.offset + run.start + at, nbytes)

    def took(self, run: Run, at: int, view: memoryview) -> None:
        """These bytes lie where they belong."""
        if run.start + at == 0:
            self._hash = xxhash.xxh3_64()
        self._hash.update(view)

    def arrived(self, run: Run) -> None:
        """All of it."""
        if self._regions is None or self.outcomes[run.place] is not None:
            return
        receipt = self._receipts[run.place]
        if run.start + run.length < receipt.parts[run.part].nbytes:
            return
        if self._hash.intdigest() != receipt.checksums[run.part]:
            self._settle(run.place, damaged(run.part))
        elif not any(part.nbytes for part in receipt.parts[run.part + 1 :]):
            self._settle(run.place, DONE)

    def refuse(self, run: Run) -> None:
        """The sender does not give it."""
        self._settle(run.place, refused("a part of the sender's is not on offer"))

    def _settle(self, place: int, outcome: Outcome) -> None:
        if self.outcomes[place] is None:
            self.outcomes[place] = outcome
            self._missing -= 1
            if not self._missing:
                self.call.wake()


class Run:
    """Some bytes of a part of a receipt of a job: one request."""

    __slots__ = ("job", "length", "part", "place", "start")

    def __init__(self, job: Job, place: int, part: int, start: int, length: int) -> None:
        self.job = job
        self.place = place
        self.part = part
        self.start = start
        self.length = length
