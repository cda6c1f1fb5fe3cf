"""Processes of one group exchange bytes: each gives some, and gets the bytes of all, in the order of their ranks.

The bytes lie in one shared region, in two slots of each rank that are used in turn: a rank that is one exchange ahead
of the others writes where they do not read. Semaphores (an eventfd for each ordered pair of ranks) say that a slot is
written; the kernel orders the writes before the signal. Waiting blocks its process and has a deadline. A process that
falls out of step is noticed: every slot carries the exchange's number and label. This module does not know what the
bytes mean. The process that starts the group makes a `Meeting`; each process of it attaches as `Exchange`.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken, RunnerError
from fdasync.ipc.shared_memory import SharedRegion, page_aligned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Buffer = bytes | bytearray | memoryview

#: bytes of a rank's slot unless told
SLOT_NBYTES = 4 << 20
#: most bytes of a label, as UTF-8
LABEL_NBYTES = 112
# in front of the bytes of a slot: number of the exchange, how many bytes, what they are for
_HEAD = struct.Struct(f"<QQ{LABEL_NBYTES}s")
# how many exchanges each rank has entered, and how many steps it has begun: in a cache line of its own
_COUNT = struct.Struct("<Q")
_STEPS_AT = 8
_COUNT_APART_NBYTES = 64


def _region_nbytes(ranks: int, slot_nbytes: int) -> int:
    return page_aligned(ranks * _COUNT_APART_NBYTES) + 2 * ranks * _slot_apart(slot_nbytes)


def _slot_apart(slot_nbytes: int) -> int:
    return page_aligned(_HEAD.size + slot_nbytes)


class Meeting:
    """What the processes of a group share, held by the process that starts them.

    Args:
        ranks: how many processes, at least 1.
        slot_nbytes: most bytes that a rank gives at once, at least 1.

    Raises OSError where memory or descriptors run out; then nothing is left open.
    """

    def __init__(self, ranks: int, slot_nbytes: int = SLOT_NBYTES) -> None:
        if ranks < 1 or slot_nbytes < 1:
            raise InvariantBroken(f"a meeting of {ranks} ranks with slots of {slot_nbytes} bytes")
        self.ranks = ranks
        self.slot_nbytes = slot_nbytes
        self._signals: dict[tuple[int, int], int] = {}
        self._region = SharedRegion.create("exchange", _region_nbytes(ranks, slot_nbytes))
        try:
            for sender in range(ranks):
                for receiver in range(ranks):
                    if sender != receiver:
                        flags = os.EFD_CLOEXEC | os.EFD_SEMAPHORE | os.EFD_NONBLOCK
                        self._signals[sender, receiver] = os.eventfd(0, flags)
        except OSError:
            self.close()
            raise

    def seat(self, rank: int, deadline_s: float) -> Seat:
        """A rank's place, for its process; `deadline_s` as `Exchange` has it. Raises as `fds`."""
        return Seat((rank, self.ranks, deadline_s, self.slot_nbytes), self.fds(rank))

    def fds(self, rank: int) -> list[int]:
        """What `Exchange` takes for this rank. The descriptors stay this object's; send them to the process.

        Raises InvariantBroken after `close`, and for a rank that there is not.
        """
        self._check_open()
        if not 0 <= rank < self.ranks:
            raise InvariantBroken(f"the descriptors of rank {rank} of {self.ranks}")
        others = [other for other in range(self.ranks) if other != rank]
        heard = [self._signals[other, rank] for other in others]
        told = [self._signals[rank, other] for other in others]
        return [self._region.fd, *heard, *told]

    def entered(self) -> list[int]:
        """How many exchanges each rank has entered so far: others may wait for the rank with the lowest.

        Raises InvariantBroken after `close`.
        """
        return self._counts(0)

    def begun(self) -> list[int]:
        """How many steps each rank has begun so far, as `Exchange.begin_step` counts; raises as `entered`."""
        return self._counts(_STEPS_AT)

    def _counts(self, at: int) -> list[int]:
        self._check_open()
        with self._region.view() as view:
            return [_COUNT.unpack_from(view, rank * _COUNT_APART_NBYTES + at)[0] for rank in range(self.ranks)]

    def _check_open(self) -> None:
        if self._region.fd < 0:
            raise InvariantBroken("the meeting is closed")

    def close(self) -> None:
        """Drop memory and descriptors; idempotent. Processes that attached have their own."""
        for fd in self._signals.values():
            os.close(fd)
        self._signals = {}
        self._region.close()


class Seat:
    """A rank's place in a meeting, as it crosses to the rank's process (`ipc/remote.py`)."""

    # rank, ranks, deadline_s, slot_nbytes
    plan_type = tuple[int, int, float, int]

    def __init__(self, plan: tuple[int, int, float, int], fds: list[int]) -> None:
        self.plan = plan
        self.fds = fds

    @classmethod
    def attach(cls, plan: tuple[int, int, float, int], fds: Iterator[int]) -> Seat:
        """A place that came; its descriptors belong to the exchange that `take` makes."""
        seat = cls(plan, [])
        try:
            seat.fds += [next(fds) for _ in range(2 * plan[1] - 1)]
        except BaseException:
            seat.close()
            raise
        return seat

    def close(self) -> None:
        """Close what came, where nobody takes it."""
        while self.fds:
            os.close(self.fds.pop())

    def take(self) -> Exchange:
        """The rank's end. Raises as `Exchange`."""
        rank, ranks, deadline_s, slot_nbytes = self.plan
        return Exchange(rank, ranks, self.fds, deadline_s=deadline_s, slot_nbytes=slot_nbytes)


class Exchange:
    """One rank's end.

    Args:
        fds: as `Meeting.fds` has them, received; this object's from now on, and closed where it raises.
        deadline_s: how long the others may take to reach the same exchange.

    Attributes:
        rank, ranks: of the group.
        slot_nbytes: most bytes that `gather` takes.
    """

    def __init__(
        self, rank: int, ranks: int, fds: Sequence[int], *, deadline_s: float, slot_nbytes: int = SLOT_NBYTES
    ) -> None:
        """Raises InvariantBroken for descriptors that are no meeting of this many, RunnerError where the memory cannot
        be mapped."""
        self.rank, self.ranks, self.slot_nbytes = rank, ranks, slot_nbytes
        self._deadline_s = deadline_s
        self._fds = tuple(fds)
        self._number = self._steps = 0
        # why there are no more exchanges
        self._ended = ""
        try:
            if len(fds) != 2 * ranks - 1 or not 0 <= rank < ranks:
                raise InvariantBroken(f"{len(fds)} descriptors for rank {rank} of {ranks}")
            self._others = [other for other in range(ranks) if other != rank]
            self._heard = dict(zip(self._others, fds[1:ranks], strict=True))
            self._told = [*fds[ranks:]]
            # the region owns its descriptor
            self._fds = (*fds[1:],)
            self._region = SharedRegion(fds[0], _region_nbytes(ranks, slot_nbytes))
        except BaseException as error:
            self._close_fds()
            if isinstance(error, OSError):
                raise RunnerError(f"rank {rank} cannot map the memory of its group: {error.strerror}") from error
            raise
        self._view = self._region.view()

    def gather(self, data: Buffer, label: str) -> list[memoryview]:
        """Give bytes; returns the bytes of every rank, in the order of ranks, its own among them.

        Blocks until all ranks have reached this exchange. The views are of shared memory, read-only, and valid until
        this rank's next exchange. Ranks may give different amounts.

        Args:
            data: at most `slot_nbytes`, contiguous; the caller's again on return.
            label: what it is for, at most `LABEL_NBYTES`. All ranks must say the same: another label means that one
                fell out of step.

        Raises:
            InvariantBroken: more bytes than a slot holds, or that are not contiguous; a longer label.
            RunnerError: a rank did not come within the deadline, or came with another label; no exchange is possible
                after either, nor after `close`.
        """
        if len(label) > LABEL_NBYTES or len(name := label.encode()) > LABEL_NBYTES:
            raise InvariantBroken(f"a label of more than {LABEL_NBYTES} bytes: {label[:LABEL_NBYTES]}...")
        if self._ended:
            raise RunnerError(f"no exchange after {self._ended}")
        with memoryview(data) as whole:
            if not whole.c_contiguous:
                raise InvariantBroken(f"bytes of {label} that are not contiguous")
            if whole.nbytes > self.slot_nbytes:
                raise InvariantBroken(f"{whole.nbytes} bytes of {label} in an exchange of at most {self.slot_nbytes}")
            self._number += 1
            at = self._slot(self.rank)
            if whole.nbytes:
                with whole.cast("B") as given:
                    self._view[at + _HEAD.size : at + _HEAD.size + len(given)] = given
            # last, so that a slot is never told whole that is not
            _HEAD.pack_into(self._view, at, self._number, whole.nbytes, name)
        _COUNT.pack_into(self._view, self.rank * _COUNT_APART_NBYTES, self._number)
        try:
            self._meet(label)
            return [self._read(rank, label) for rank in range(self.ranks)]
        except RunnerError as error:
            # signals that come late would be taken for signals of the next exchange
            self._ended = f"one that failed: {error.problem}"
            raise

    def begin_step(self) -> None:
        """Count a step that this rank has begun, for `Meeting.begun`: ranks whose devices meet without an exchange
        differ in nothing else that the starting process sees. Without effect after `close`."""
        self._steps += 1
        if self._region.fd >= 0:
            _COUNT.pack_into(self._view, self.rank * _COUNT_APART_NBYTES + _STEPS_AT, self._steps)

    def _meet(self, label: str) -> None:
        """Tell the others that this rank's slot is written, and wait for theirs."""
        try:
            for fd in self._told:
                os.eventfd_write(fd, 1)
            self._wait(label)
        except OSError as error:
            problem = f"rank {self.rank} cannot signal at exchange {self._number} ({label}): {error.strerror}"
            raise RunnerError(problem) from error

    def _slot(self, rank: int) -> int:
        """Where the slot of this rank begins that the exchange under way uses."""
        first = page_aligned(self.ranks * _COUNT_APART_NBYTES)
        return first + (2 * rank + self._number % 2) * _slot_apart(self.slot_nbytes)

    def _wait(self, label: str) -> None:
        ends = time.monotonic() + self._deadline_s
        poll = select.poll()
        for other in self._others:
            poll.register(self._heard[other], select.POLLIN)
        left = {fd: other for other, fd in self._heard.items()}
        while left:
            wait_s = ends - time.monotonic()
            # blocking: the other ranks compute the same step; the process is a worker's
            ready = poll.poll(max(0.0, wait_s) * 1000)
            if not ready and wait_s <= 0:
                names = ", ".join(str(other) for other in left.values())
                where = f"at exchange {self._number} ({label})"
                raise RunnerError(f"rank {self.rank} waited {self._deadline_s:g} s for rank {names} {where}")
            for fd, _ in ready:
                os.eventfd_read(fd)
                poll.unregister(fd)
                del left[fd]

    def _read(self, rank: int, label: str) -> memoryview:
        at = self._slot(rank)
        number, nbytes, raw = _HEAD.unpack_from(self._view, at)
        theirs = raw.rstrip(b"\0").decode(errors="replace")
        if number != self._number or theirs != label:
            raise RunnerError(
                f"rank {rank} is at exchange {number} ({theirs}), rank {self.rank} at {self._number} ({label}):"
                " they fell out of step"
            )
        first = at + _HEAD.size
        return self._view[first : first + nbytes].toreadonly()

    def close(self) -> None:
        """Drop memory and descriptors; idempotent. There is no exchange afterwards."""
        if self._region.fd < 0:
            return
        self._ended = "the end: it is closed"
        self._view.release()
        self._region.close()
        self._close_fds()

    def _close_fds(self) -> None:
        """Close the descriptors. Idempotent."""
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds = ()
