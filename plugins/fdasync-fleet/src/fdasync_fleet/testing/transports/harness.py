"""Open transports for each conformance test, each with guarded memory of its own, every wait bounded.

Knows the contract (`transfer/base.py`) only. Used by `transports/suite.py` and `transports/sender.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, TypeVar

from fdasync.errors import FdasyncError, InvariantBroken
from fdasync.testing.harness.bounded import LoopHooks
from fdasync.testing.harness.guarded_memory import GuardedMemory, all_ended, check_outcomes, value
from fdasync.testing.harness.verdicts import check, equal, in_words
from fdasync_fleet.transfer.base import CopySpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence

    from fdasync.cache.store.base import Outcome
    from fdasync.ipc.shared_memory import Part
    from fdasync_fleet.messages import Source
    from fdasync_fleet.transfer.base import Transport

_REGIONS_NBYTES = (40 << 20, (4 << 20) + 12)

T = TypeVar("T")


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """The body must raise InvariantBroken."""
    try:
        yield
    except InvariantBroken:
        return
    except Exception as error:
        raise AssertionError(f"{what} breaks the contract, and raised {error!r}, not InvariantBroken") from error
    raise AssertionError(f"{what} breaks the contract, and was not refused: it returned")


class TransportHooks(LoopHooks):
    """What an adopter of `TransportTests` says about its transport.

    Attributes:
        keeps_offers: only what is on offer can be read. False where the receiver maps the sender's memory.
        factory: "module:name" of a callable that makes a transport in another process, without arguments; "": it cannot
            cross processes, and tests that need two are skipped.
        verb_s: how long one verb may take when nothing is wrong, in seconds. It bounds hangs alone: busy machines are
            slow.
    """

    keeps_offers = True
    factory = ""
    verb_s = 120.0

    def make(self) -> Transport:
        """A transport, not opened; the transports of one test reach each other."""
        raise NotImplementedError

    def silence(self, transport: Transport) -> bool:
        """Make this sender answer nothing any more, without an end; False: that cannot be done in one process."""
        del transport
        return False

    @contextlib.asynccontextmanager
    async def sides(self, count: int = 2) -> AsyncIterator[list[Side]]:
        """So many transports, opened, with regions of their own; closed at the end."""
        sides: list[Side] = []
        async with contextlib.AsyncExitStack() as stack:
            for number in range(count):
                side = Side(self.make(), self, number)
                stack.push_async_callback(side.close)
                await side.within(side.transport.open(side.regions), "open")
                sides.append(side)
            yield sides


class Side(GuardedMemory):
    """One transport and the regions it was opened with.

    Attributes:
        transport: the one under test.
        hooks: what its adopter says about it.
    """

    def __init__(self, transport: Transport, hooks: TransportHooks, seed: int) -> None:
        super().__init__(f"side-{seed}", _REGIONS_NBYTES, seed)
        self.transport = transport
        self.hooks = hooks

    @property
    def source(self) -> Source:
        return self.transport.source()

    def part(self, nbytes: int, region: int = 0) -> Part:
        return self.room(nbytes, region)

    def write(self, part: Part, data: bytes) -> None:
        self.regions[part.region].view(part.offset, part.nbytes)[:] = data

    def read(self, part: Part) -> bytes:
        return bytes(self.regions[part.region].view(part.offset, part.nbytes))

    def block(self, tag: object, *sizes: int) -> tuple[tuple[Part, ...], tuple[int, ...]]:
        """Parts with bytes that only this tag has, on offer, and their checksums; all but the first in region 1."""
        parts = tuple([self.part(nbytes, min(place, 1)) for place, nbytes in enumerate(sizes)])
        for place, part in enumerate(parts):
            self.write(part, value((tag, place), part.nbytes))
        self.transport.offer(parts)
        return parts, tuple([self.transport.checksum(self.read(part)) for part in parts])

    def copy_spec(self, theirs: Sequence[Part], checksums: Sequence[int]) -> CopySpec:
        """Parts here, and the order to copy a sender's block into them."""
        return CopySpec(
            tuple(theirs), tuple([self.part(part.nbytes, part.region) for part in theirs]), tuple(checksums)
        )

    def wanted(self, sender: Side, tag: object, *sizes: int) -> CopySpec:
        """The order to copy a new block of the sender's."""
        return self.copy_spec(*sender.block(tag, *sizes))

    def has(self, copy_spec: CopySpec, tag: object) -> bool:
        """Our parts hold the bytes of this tag."""
        return all(self.read(part) == value((tag, place), part.nbytes) for place, part in enumerate(copy_spec.parts))

    def assert_has(self, copy_spec: CopySpec, tag: object, what: str = "a receive") -> None:
        """Raise AssertionError, with the first part that is wrong, unless our parts hold the bytes of this tag."""
        for place, part in enumerate(copy_spec.parts):
            equal(self.read(part), value((tag, place), part.nbytes), f"part {place} of {what}")

    def assert_scribbled(self, copy_specs: Iterable[CopySpec], what: str) -> None:
        """Raise AssertionError, with the part, if one was written since `scribble`."""
        for copy_spec in copy_specs:
            for part in copy_spec.parts:
                equal(self.read(part), bytes([0xEE]) * part.nbytes, f"a part that must not be written {what}")

    def scribble(self, copy_specs: Iterable[CopySpec], byte: int = 0xEE) -> None:
        for copy_spec in copy_specs:
            for part in copy_spec.parts:
                self.write(part, bytes([byte]) * part.nbytes)

    def assert_only(self, before: list[bytearray], copy_specs: Iterable[CopySpec] = ()) -> None:
        """Since the snapshot nothing was written but the parts of these."""
        self.assert_unchanged(before, [part for copy_spec in copy_specs for part in copy_spec.parts])

    # -- verbs, bounded and checked -------------------------------------------------------------------

    async def within(self, work: Awaitable[T], what: str) -> T:
        """Its result. Raises AssertionError if it takes longer than `verb_s`, or raises what no transport may."""
        task = asyncio.ensure_future(work)
        await self.ended([task], what)
        try:
            return task.result()  # of a future that is done
        except (FdasyncError, AssertionError):
            raise
        except Exception as error:
            raise AssertionError(f"{what} raised {error!r}, which no transport may") from error

    async def ended(self, tasks: Sequence[asyncio.Future[T]], what: str) -> None:
        """Wait for the ends. Raises AssertionError if they take longer than `verb_s`."""
        await all_ended(tasks, self.hooks.verb_s, what)

    def start(
        self, source: Source, copy_specs: Sequence[CopySpec], seconds: float | None = None
    ) -> asyncio.Task[list[Outcome]]:
        """A receive of that many seconds, or of half of `verb_s`, as a task."""
        deadline = asyncio.get_running_loop().time() + (self.hooks.verb_s / 2 if seconds is None else seconds)
        return asyncio.ensure_future(self._receive(source, copy_specs, deadline))

    async def take(self, source: Source, copy_specs: Sequence[CopySpec], seconds: float | None = None) -> list[str]:
        """Receive; the statuses."""
        return [one.status for one in await self.within(self.start(source, copy_specs, seconds), "receive")]

    async def expect(
        self,
        wanted: Sequence[str],
        what: str,
        source: Source,
        copy_specs: Sequence[CopySpec],
        seconds: float | None = None,
    ) -> None:
        """Receive. Raises AssertionError, with the outcomes, unless these are the statuses."""
        outcomes = await self.within(self.start(source, copy_specs, seconds), "receive")
        statuses_are(outcomes, wanted, what)

    async def _receive(self, source: Source, copy_specs: Sequence[CopySpec], deadline: float) -> list[Outcome]:
        outcomes = await self.transport.receive(source, copy_specs, deadline)
        check_outcomes(outcomes, len(copy_specs), ("done", "damaged", "failed"), "copy specs")
        for outcome in outcomes:
            check(outcome.status == "failed" or not outcome.transient, 'only "failed" is transient', outcome)
        return outcomes

    async def close(self) -> None:
        """Close the transport, which must not hang, then the regions."""
        try:
            await self.within(self.transport.aclose(), "aclose")
        finally:
            self.close_regions()


def statuses_are(outcomes: Sequence[Outcome], wanted: Sequence[str], what: str) -> None:
    """Raise AssertionError, with the outcomes, unless these are their statuses."""
    right = [one.status for one in outcomes] == list(wanted)
    check(right, f"{what} should be {in_words(list(wanted))}", list(outcomes))


def whole_or_failed(outcomes: Sequence[Outcome], what: str) -> None:
    """Raise AssertionError unless each is "done", or "failed" for now."""
    ways = (("done", False), ("failed", True))
    right = all((one.status, one.transient) in ways for one in outcomes)
    check(right, f"{what} is done, or failed for now", list(outcomes))
