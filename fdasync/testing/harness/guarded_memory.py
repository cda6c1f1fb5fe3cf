"""Shared regions in which every part lies at an odd offset between guard bytes, for suites whose subjects write parts.

Knows nothing of what is tested. Base of the benches of stores and of transports.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

from fdasync.cache.store.base import Outcome
from fdasync.ipc.shared_memory import Part, SharedRegion
from fdasync.testing.harness.verdicts import check

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

_GUARD = 0xA5
_GUARD_NBYTES = 67


class GuardedMemory:
    """Regions, and room in them.

    Attributes:
        regions: of several MiB, touched only where parts are.
        random: draws offsets.
    """

    def __init__(self, name: str, sizes: Sequence[int], seed: int) -> None:
        self.regions = [SharedRegion.create(f"{name}-{place}", size) for place, size in enumerate(sizes)]
        self.random = Random(seed)
        self._used = [0] * len(self.regions)

    def room(self, nbytes: int, region: int) -> Part:
        """A new part of a region, at an odd place, with guard bytes around it."""
        start = self._used[region]
        part = Part(region, (start + _GUARD_NBYTES + 2 * self.random.randrange(30)) | 1, nbytes)
        stop = part.offset + nbytes + _GUARD_NBYTES
        self.regions[region].view(start, stop - start)[:] = bytes([_GUARD]) * (stop - start)
        self._used[region] = stop
        return part

    def free(self) -> None:
        """All parts may be handed out again."""
        self._used = [0] * len(self.regions)

    def snapshot(self) -> list[bytearray]:
        """All that was handed out so far, guards included."""
        return [bytearray(region.view(0, used)) for region, used in zip(self.regions, self._used, strict=True)]

    def assert_unchanged(self, before: list[bytearray], except_parts: Iterable[Part]) -> None:
        """Raise AssertionError, with the first byte, if anything but these parts has changed since the snapshot."""
        now = [bytearray(region.view(0, len(was))) for region, was in zip(self.regions, before, strict=True)]
        for part in except_parts:
            stop = part.offset + part.nbytes
            before[part.region][part.offset : stop] = now[part.region][part.offset : stop]
        for place, (was, is_) in enumerate(zip(before, now, strict=True)):
            if was != is_:
                at = next(at for at, pair in enumerate(zip(was, is_, strict=True)) if pair[0] != pair[1])
                raise AssertionError(
                    f"byte {at} of region {place} was written, and belongs to no part of the call: "
                    f"it is {is_[at]:#04x} instead of {was[at]:#04x}"
                )

    def close_regions(self) -> None:
        for region in self.regions:
            region.close()


async def all_ended(tasks: Sequence[asyncio.Future[Any]], limit_s: float, what: str) -> None:
    """Wait for the ends. Raises AssertionError if they take longer than the limit."""
    _, late = await asyncio.wait(tasks, timeout=limit_s)
    if late:
        raise AssertionError(f"{len(late)} of {len(tasks)} did not end within {limit_s:g} s: {what}")


def check_outcomes(outcomes: Any, count: int, statuses: tuple[str, ...], of: str) -> None:
    """Raise AssertionError unless this is a list of `count` outcomes, each of one of these statuses, with a problem
    where the item was not served."""
    whole = isinstance(outcomes, list) and len(outcomes) == count
    check(whole, f"a call gives a list with an outcome for each of the {count} {of}", outcomes)
    for outcome in outcomes:
        fits = isinstance(outcome, Outcome) and outcome.status in statuses
        check(fits, f"an outcome of this call is one of {', '.join(statuses)}", outcome)
        wrong = outcome.status in ("damaged", "full", "failed")
        check(bool(outcome.problem) == wrong, "an outcome says what is wrong, and only then", outcome)


def value(tag: object, nbytes: int) -> bytes:
    """Bytes that only this tag has."""
    return Random(str(tag)).randbytes(nbytes)
