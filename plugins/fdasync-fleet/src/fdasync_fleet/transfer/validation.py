"""Checks the arguments of a transport's calls before any memory is touched, and counts the parts on offer.

All transports call these checks, so that a malformed argument fails with the same text in each. Copy specs and sources
hold values of a peer: nothing in them is trusted, not even their types. Knows the sizes of regions, and no transport.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from fdasync.cache.store.base import DONE, Outcome
from fdasync.errors import InvariantBroken
from fdasync.ipc.shared_memory import Part
from fdasync_fleet.messages import Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync_fleet.transfer.base import CopySpec

#: most regions of a source
MAX_REGIONS = 16
TOKEN_NBYTES = 16
_NOTHING = xxhash.xxh3_64_intdigest(b"")
# copy specs checked in one callback of the loop
_COPY_SPECS_PER_TURN = 32
#: outcome of a receive whose transport was closed, before it or during it
CLOSED = Outcome("failed", "the transport is closed")
LATE = Outcome("failed", "the sender did not answer in time", transient=True)
FORGOTTEN = Outcome("failed", "the sender went away", transient=True)


class Region(Protocol):
    """Memory with parts in it."""

    @property
    def nbytes(self) -> int: ...


def refused(problem: str) -> Outcome:
    """The outcome of a copy that can never succeed as it is."""
    return Outcome("failed", problem)


def broken(problem: str) -> Outcome:
    """The outcome of a copy that may succeed later."""
    return Outcome("failed", problem, transient=True)


def damaged(place: int) -> Outcome:
    return Outcome("damaged", f"the checksum of part {place} is wrong")


def boot_id() -> str:
    """The boot id of this machine. Raises OSError."""
    # blocking: procfs, microseconds
    fd = os.open("/proc/sys/kernel/random/boot_id", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.read(fd, 64).decode().strip()
    finally:
        os.close(fd)


def check_source(source: Any) -> str:
    """The problem with a source's form; "" if there is none."""
    if not isinstance(source, Source):
        return f"a {type(source).__name__} is no source"
    machine, pid, regions, token, address = [
        getattr(source, name) for name in ("machine", "pid", "regions", "token", "address")
    ]
    if not (isinstance(machine, str) and isinstance(address, str)):
        return "the source's machine and address are no text"
    if not (isinstance(token, bytes) and len(token) == TOKEN_NBYTES):
        return f"the source's token is not {TOKEN_NBYTES} bytes"
    if not (_is_count(pid) and isinstance(regions, tuple | list)):
        return "the source has no process, or no regions"
    if len(regions) > MAX_REGIONS:
        return f"the source has {len(regions)} regions; {MAX_REGIONS} are taken"
    for region in regions:
        if not (isinstance(region, tuple | list) and len(region) == 2 and all(map(_is_count, region))):
            return "a region of the source is not a file descriptor and a size"
    return ""


async def check_copy_specs(
    source: Source, copy_specs: Sequence[CopySpec], regions: Sequence[Region], nothing: int = _NOTHING
) -> list[Outcome | None]:
    """The outcome of each copy that needs no work (it is malformed, or has no bytes); None for a copy to make.

    Other tasks run in between. The source must have passed `check_source`. `nothing` is the checksum of no bytes.
    """
    sizes = [nbytes for _, nbytes in source.regions]
    ours = [region.nbytes for region in regions]
    taken: list[list[tuple[int, int]]] = [[] for _ in regions]
    found: list[Outcome | None] = []
    for number, copy_spec in enumerate(copy_specs, 1):
        problem = _check_form(copy_spec, sizes, ours) or _claim(copy_spec.parts, taken)
        found.append(refused(problem) if problem else _without_bytes(copy_spec, nothing))
        if number % _COPY_SPECS_PER_TURN == 0:
            await asyncio.sleep(0)
    return found


def _check_form(copy_spec: Any, sizes: list[int], ours: list[int]) -> str:
    theirs: Any = getattr(copy_spec, "ref_parts", None)
    parts: Any = getattr(copy_spec, "parts", None)
    checksums: Any = getattr(copy_spec, "checksums", None)
    for field in (theirs, parts, checksums):
        if not isinstance(field, tuple | list):
            return "a copy spec is parts of the sender's, parts of ours, and checksums"
    if not len(theirs) == len(parts) == len(checksums):
        return "a copy spec has not as many parts of the sender's as of ours, or as checksums"
    for place, part in enumerate(parts):
        if not _is_count(checksums[place]):
            return f"{checksums[place]!r:.50} is no checksum"
        problem = _outside(part, ours, "of ours") or _outside(theirs[place], sizes, "of the sender's")
        if problem:
            return problem
        if theirs[place].nbytes != part.nbytes:
            return f"a part has {theirs[place].nbytes} bytes at the sender and {part.nbytes} here"
    return ""


def _without_bytes(copy_spec: CopySpec, nothing: int) -> Outcome | None:
    """The outcome, if parts without bytes decide it."""
    empty = True
    for place, part in enumerate(copy_spec.parts):
        if part.nbytes:
            empty = False
        elif copy_spec.checksums[place] != nothing:
            return damaged(place)
    return DONE if empty else None


def _outside(part: Any, sizes: list[int], whose: str) -> str:
    """Why a value is no part of regions of these sizes; "" if it is one."""
    if not (isinstance(part, Part) and _is_count(part.region) and _is_count(part.offset) and _is_count(part.nbytes)):
        return f"a part {whose} is no region, offset and size"
    if part.region >= len(sizes):
        return f"a part {whose} names region {part.region} of {len(sizes)}"
    if part.offset + part.nbytes > sizes[part.region]:
        return f"a part {whose} ends outside of its region of {sizes[part.region]} bytes"
    return ""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def _claim(parts: Sequence[Part], taken: list[list[tuple[int, int]]]) -> str:
    """Add these parts to the taken ones. Returns a problem, and adds none, if one overlaps with a taken one."""
    for done, part in enumerate(parts):
        if not part.nbytes:
            continue
        runs = taken[part.region]
        run = (part.offset, part.offset + part.nbytes)
        place = bisect_left(runs, run)
        before, after = runs[place - 1 : place] if place else [], runs[place : place + 1]
        if (before and before[0][1] > run[0]) or (after and after[0][0] < run[1]):
            for earlier in parts[:done]:
                if earlier.nbytes:
                    taken[earlier.region].remove((earlier.offset, earlier.offset + earlier.nbytes))
            return "a part of ours overlaps with another one of the call"
        runs.insert(place, run)
    return ""


class Offers:
    """The parts of our regions that others may read, counted."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._counts: Counter[Part] = Counter()
        self._closed = False

    def open(self, regions: Sequence[Region]) -> None:
        """Set the regions in which parts lie."""
        self._sizes = [region.nbytes for region in regions]

    def close(self) -> None:
        self._counts.clear()
        self._closed = True

    def add(self, parts: Sequence[Part]) -> None:
        """See `Transport.offer`."""
        for part in parts:
            problem = _outside(part, self._sizes, "of ours")
            if problem:
                raise InvariantBroken(f"{part} was offered: {problem}")
        if not self._closed:
            self._counts.update(parts)

    def remove(self, parts: Sequence[Part]) -> None:
        """See `Transport.withdraw`."""
        if self._closed:
            return
        wanted = Counter(parts)
        for part, count in wanted.items():
            if self._counts[part] < count:
                raise InvariantBroken(f"{part} was withdrawn and is not on offer")
        for part, count in wanted.items():
            if self._counts[part] > count:
                self._counts[part] -= count
            else:
                del self._counts[part]

    def __contains__(self, part: Part) -> bool:
        return part in self._counts

    def __len__(self) -> int:
        """Number of parts on offer."""
        return len(self._counts)
