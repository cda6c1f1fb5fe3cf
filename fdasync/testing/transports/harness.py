"""What the conformance suite for transports stands on: open transports with regions of their own, every wait bounded.

Parts lie at odd offsets in two regions with guard bytes around them. Knows the contract (`transfer/base.py`) only. Used
by `transports/suite.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from fdasync.cache.store.base import Outcome
from fdasync.errors import FdasyncError, InvariantBroken
from fdasync.ipc.shared_memory import Part, SharedRegion
from fdasync.pd.transfer.base import Receipt
from fdasync.testing.harness.verdicts import check, equal, told
from fdasync.testing.stores.harness import run_bounded, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence

    from fdasync.pd.messages import Source
    from fdasync.pd.transfer.base import Transport

_GUARD = 0xA5
_GUARD_NBYTES = 67
_REGIONS_NBYTES = (40 << 20, (4 << 20) + 12)

T = TypeVar("T")
S = TypeVar("S", bound="TransportHooks")


def on_loop(test: Callable[[S], Coroutine[Any, Any, None]]) -> Callable[[S], None]:
    """An async test method as a plain one, on a new loop of `new_loop`, ended at `limit_s`, leaving no task behind."""

    @functools.wraps(test)
    def run(self: S) -> None:
        run_bounded(self.new_loop(), test(self), self.limit_s)

    # pytest must see a plain function, whatever plugin looks for coroutines
    del run.__wrapped__
    return run


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """What runs in it must raise InvariantBroken."""
    try:
        yield
    except InvariantBroken:
        return
    except Exception as error:
        raise AssertionError(f"{what} breaks the contract, and raised {error!r}, not InvariantBroken") from error
    raise AssertionError(f"{what} breaks the contract, and was not refused: it returned")


class TransportHooks:
    """What an adopter of `TransportTests` says about its transport.

    Attributes:
        keeps_offers: only what is on offer can be read. False where the receiver maps the sender's memory.
        factory: "module:name" of what makes a transport, called without arguments in another process; "": it cannot
            cross processes, and tests that need two are skipped.
        verb_s: how long one verb may take when nothing is wrong, in seconds.
        limit_s: how long one test may take, in seconds.
    """

    keeps_offers = True
    factory = ""
    verb_s = 20.0
    limit_s = 60.0

    def make(self) -> Transport:
        """A transport, not opened; those of one test reach each other."""
        raise NotImplementedError

    def silence(self, transport: Transport) -> bool:
        """Make this sender answer nothing any more, without an end; False: that cannot be done in one process."""
        del transport
        return False

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """The loop of one test. `fdasync.testing.SimLoop()` for a transport that needs no outside world."""
        import uvloop

        return uvloop.new_event_loop()

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


class Side:
    """One transport and the regions it was opened with.

    Attributes:
        transport: the one under test.
        regions: two, touched only where parts are.
    """

    def __init__(self, transport: Transport, hooks: TransportHooks, seed: int) -> None:
        self.transport = transport
        self.hooks = hooks
        self.random = Random(seed)
        self.regions = [SharedRegion.create(f"side-{seed}-{place}", size) for place, size in enumerate(_REGIONS_NBYTES)]
        self._used = [0] * len(self.regions)

    @property
    def source(self) -> Source:
        return self.transport.source()

    def part(self, nbytes: int, region: int = 0) -> Part:
        """New room at an odd place, with guard bytes around it."""
        start = self._used[region]
        part = Part(region, (start + _GUARD_NBYTES + 2 * self.random.randrange(30)) | 1, nbytes)
        stop = part.offset + nbytes + _GUARD_NBYTES
        self.regions[region].view(start, stop - start)[:] = bytes([_GUARD]) * (stop - start)
        self._used[region] = stop
        return part

    def free(self) -> None:
        """All parts may be handed out again."""
        self._used = [0] * len(self.regions)

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
        return parts, tuple([xxhash.xxh3_64_intdigest(self.read(part)) for part in parts])

    def receipt(self, theirs: Sequence[Part], checksums: Sequence[int]) -> Receipt:
        """New parts of ours for a block of somebody's."""
        return Receipt(tuple(theirs), tuple([self.part(part.nbytes, part.region) for part in theirs]), tuple(checksums))

    def wanted(self, sender: Side, tag: object, *sizes: int) -> Receipt:
        """A new block of the sender's, and room for it here."""
        return self.receipt(*sender.block(tag, *sizes))

    def has(self, receipt: Receipt, tag: object) -> bool:
        """Our parts hold the bytes of this tag."""
        return all(self.read(part) == value((tag, place), part.nbytes) for place, part in enumerate(receipt.parts))

    def assert_has(self, receipt: Receipt, tag: object, what: str = "a receive") -> None:
        """Raise AssertionError, with the first part that is wrong, unless our parts hold the bytes of this tag."""
        for place, part in enumerate(receipt.parts):
            equal(self.read(part), value((tag, place), part.nbytes), f"part {place} of {what}")

    def assert_scribbled(self, receipts: Iterable[Receipt], what: str) -> None:
        """Raise AssertionError, with the first part that was written, unless nobody wrote there since `scribble`."""
        for receipt in receipts:
            for part in receipt.parts:
                equal(self.read(part), bytes([0xEE]) * part.nbytes, f"a part that nobody writes to {what}")

    def scribble(self, receipts: Iterable[Receipt], byte: int = 0xEE) -> None:
        for receipt in receipts:
            for part in receipt.parts:
                self.write(part, bytes([byte]) * part.nbytes)

    def snapshot(self) -> list[bytearray]:
        return [bytearray(region.view(0, used)) for region, used in zip(self.regions, self._used, strict=True)]

    def assert_only(self, before: list[bytearray], receipts: Iterable[Receipt] = ()) -> None:
        """Since the snapshot nothing was written but the parts of these."""
        now = self.snapshot()
        for receipt in receipts:
            for part in receipt.parts:
                stop = part.offset + part.nbytes
                before[part.region][part.offset : stop] = now[part.region][part.offset : stop]
        for place, (was, is_) in enumerate(zip(before, now, strict=True)):
            if was != is_[: len(was)]:
                at = next(at for at, pair in enumerate(zip(was, is_, strict=False)) if pair[0] != pair[1])
                raise AssertionError(
                    f"byte {at} of region {place} was written, and belongs to no part of the call: "
                    f"{told(is_[at : at + 8])} instead of {told(was[at : at + 8])}"
                )

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

    async def ended(self, tasks: Sequence[asyncio.Future[Any]], what: str) -> None:
        """Wait for the ends. Raises AssertionError if they take longer than `verb_s`."""
        _, late = await asyncio.wait(tasks, timeout=self.hooks.verb_s)
        if late:
            raise AssertionError(f"{len(late)} of {len(tasks)} did not end within {self.hooks.verb_s:g} s: {what}")

    def start(
        self, source: Source, receipts: Sequence[Receipt], seconds: float | None = None
    ) -> asyncio.Task[list[Outcome]]:
        """A receive of that many seconds, or of half of `verb_s`, as a task."""
        deadline = asyncio.get_running_loop().time() + (self.hooks.verb_s / 2 if seconds is None else seconds)
        return asyncio.ensure_future(self._receive(source, receipts, deadline))

    async def take(self, source: Source, receipts: Sequence[Receipt], seconds: float | None = None) -> list[str]:
        """Receive; the statuses."""
        return [one.status for one in await self.within(self.start(source, receipts, seconds), "receive")]

    async def expect(
        self,
        wanted: Sequence[str],
        what: str,
        source: Source,
        receipts: Sequence[Receipt],
        seconds: float | None = None,
    ) -> None:
        """Receive. Raises AssertionError, with the outcomes, unless these are the statuses."""
        outcomes = await self.within(self.start(source, receipts, seconds), "receive")
        statuses_are(outcomes, wanted, what)

    async def _receive(self, source: Source, receipts: Sequence[Receipt], deadline: float) -> list[Outcome]:
        outcomes = await self.transport.receive(source, receipts, deadline)
        # whatever its type says
        answer: object = outcomes
        whole = isinstance(answer, list) and len(answer) == len(receipts)
        check(whole, f"receive gives a list with an outcome for each of the {len(receipts)} receipts", outcomes)
        for outcome in outcomes:
            each: object = outcome
            fits = isinstance(each, Outcome) and each.status in ("done", "damaged", "failed")
            check(fits, "an outcome of receive is done, damaged or failed", outcome)
            wrong = outcome.status != "done"
            check(bool(outcome.problem) == wrong, "an outcome says what is wrong, and only then", outcome)
            check(outcome.status == "failed" or not outcome.transient, 'only "failed" is transient', outcome)
        return outcomes

    async def close(self) -> None:
        """Close the transport, which must not hang, then the regions."""
        try:
            await self.within(self.transport.aclose(), "aclose")
        finally:
            for region in self.regions:
                region.close()


def statuses_are(outcomes: Sequence[Outcome], wanted: Sequence[str], what: str) -> None:
    """Raise AssertionError, with the outcomes, unless these are their statuses."""
    check([one.status for one in outcomes] == list(wanted), f"{what} should be {told(list(wanted))}", list(outcomes))


def whole_or_failed(outcomes: Sequence[Outcome], what: str) -> None:
    """Raise AssertionError unless each is "done", or "failed" for now."""
    ways = (("done", False), ("failed", True))
    right = all((one.status, one.transient) in ways for one in outcomes)
    check(right, f"{what} is done, or failed for now", list(outcomes))
