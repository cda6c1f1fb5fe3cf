"""Ranks in processes of their own exchange bytes, and notice a rank that is late or out of step."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fdasync.errors import InvariantBroken, RunnerError
from fdasync.ipc.exchange import LABEL_NBYTES, Exchange, Meeting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def own_fds(meeting: Meeting, rank: int) -> list[int]:
    return [os.dup(fd) for fd in meeting.fds(rank)]


@contextlib.contextmanager
def group(ranks: int, work: Callable[[Exchange], None], **options: Any) -> Iterator[tuple[Meeting, Exchange]]:
    """Rank 0 is this process; the others do `work`, and must end well."""
    meeting = Meeting(ranks, slot_nbytes=64)
    children = []
    for rank in range(1, ranks):
        child = os.fork()
        if not child:
            status = 1
            try:
                work(Exchange(rank, ranks, own_fds(meeting, rank), slot_nbytes=64, deadline_s=300, **options))
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    mine = Exchange(0, ranks, own_fds(meeting, 0), slot_nbytes=64, deadline_s=300)
    try:
        yield meeting, mine
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * len(children)
    finally:
        mine.close()
        mine.close()
        meeting.close()
        meeting.close()


def said(exchange: Exchange, round_: int) -> bytes:
    return bytes([exchange.rank, round_]) * (exchange.rank + round_ % 3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_the_bytes_of_all_in_order(ranks: int) -> None:
    rounds = 200

    def work(exchange: Exchange) -> None:
        for number in range(rounds):
            parts = exchange.gather(said(exchange, number), f"round {number}")
            wanted = [bytes([rank, number]) * (rank + number % 3) for rank in range(ranks)]
            assert [bytes(part) for part in parts] == wanted
            if number % 50 == exchange.rank:
                os.sched_yield()  # so that ranks come in different orders

    with group(ranks, work) as (meeting, mine):
        work(mine)
        assert meeting.entered() == [rounds] * ranks
        assert meeting.begun() == [0] * ranks


def test_a_rank_out_of_step_is_named() -> None:
    def work(exchange: Exchange) -> None:
        with pytest.raises(RunnerError, match=r"rank 0 is at exchange 1 \(tokens\), rank 1 at 1 \(sums\)"):
            exchange.gather(b"x", "sums")

    with group(2, work) as (_, mine), pytest.raises(RunnerError, match="out of step"):
        mine.gather(b"x", "tokens")


def test_a_rank_that_does_not_come_is_named_within_the_deadline() -> None:
    meeting = Meeting(3)
    mine = Exchange(1, 3, own_fds(meeting, 1), deadline_s=0.01)
    with pytest.raises(RunnerError, match=r"rank 1 waited 0.01 s for rank 0, 2 at exchange 1 \(sums\)"):
        mine.gather(b"", "sums")
    mine.begin_step()
    mine.begin_step()
    assert meeting.entered() == [0, 1, 0]
    assert meeting.begun() == [0, 2, 0]
    # a signal that comes late is not taken for that of another exchange
    with pytest.raises(RunnerError, match="no exchange after one that failed: rank 1 waited"):
        mine.gather(b"", "sums")
    mine.close()
    meeting.close()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def one_end(ranks: int = 2, *, deadline_s: float = 1.0) -> Iterator[tuple[Meeting, Exchange]]:
    """Rank 0 alone, in this process."""
    meeting = Meeting(ranks, slot_nbytes=8)
    mine = Exchange(0, ranks, own_fds(meeting, 0), deadline_s=deadline_s, slot_nbytes=8)
    try:
        yield meeting, mine
    finally:
        mine.close()
        meeting.close()


def test_the_deadline_is_that_of_the_whole_exchange() -> None:
    with one_end(deadline_s=0.2) as (_, mine):
        began = time.monotonic()
        with pytest.raises(RunnerError):
            mine.gather(b"", "sums")
        assert 0.2 <= time.monotonic() - began < 120.0


def test_a_rank_that_began_anew_is_out_of_step_under_the_same_label() -> None:
    def work(exchange: Exchange) -> None:
        for _ in range(2):
            exchange.gather(b"x", "sums")
        exchange._number = 0  # as a process that attached again counts
        with pytest.raises(RunnerError):
            exchange.gather(b"x", "sums")

    with group(2, work) as (_, mine):
        for _ in range(2):
            mine.gather(b"x", "sums")
        with pytest.raises(RunnerError, match=r"rank 1 is at exchange 1 \(sums\), rank 0 at 3"):
            mine.gather(b"x", "sums")


def test_a_rank_has_entered_before_others_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    with one_end(deadline_s=0) as (meeting, mine):
        monkeypatch.setattr(os, "eventfd_write", lambda *_: entered.append(meeting.entered()))
        with pytest.raises(RunnerError):
            mine.gather(b"", "sums")
    assert entered == [[1, 0]]


def test_programs_that_a_rank_starts_inherit_no_descriptor() -> None:
    meeting = Meeting(3)
    assert not any(os.get_inheritable(fd) for rank in range(3) for fd in meeting.fds(rank))
    meeting.close()


def test_nothing_can_be_written_through_what_is_gathered() -> None:
    with one_end(1) as (_, mine):
        (own,) = mine.gather(b"abc", "sums")
        assert (bytes(own), own.readonly) == (b"abc", True)
        # bytes of an array, with none of them too
        assert bytes(mine.gather(np.arange(2, dtype=np.int32).reshape(1, 2), "sums")[0]) == b"\0\0\0\0\1\0\0\0"
        assert bytes(mine.gather(np.zeros((0, 3)), "sums")[0]) == b""


def test_bytes_and_labels_that_do_not_fit_are_refused() -> None:
    with one_end(1) as (meeting, mine):
        for data, label, words in (
            (bytes(9), "sums", "9 bytes of sums in an exchange of at most 8"),
            (np.zeros((4, 4), np.uint8)[:, :2], "sums", "bytes of sums that are not contiguous"),
            (b"", "x" * (LABEL_NBYTES + 1), f"a label of more than {LABEL_NBYTES} bytes: xxx"),
            (b"", "\N{SNOWMAN}" * (LABEL_NBYTES // 2), f"a label of more than {LABEL_NBYTES} bytes"),
        ):
            with pytest.raises(InvariantBroken, match=words):
                mine.gather(data, label)
        assert meeting.entered() == [0]
        # what is refused ends nothing
        assert bytes(mine.gather(bytes(8), "x" * LABEL_NBYTES)[0]) == bytes(8)
    for ranks, nbytes in ((0, 8), (2, 0)):
        with pytest.raises(InvariantBroken, match=f"{ranks} ranks with slots of {nbytes} bytes"):
            Meeting(ranks, nbytes)


def test_descriptors_that_are_no_meeting_are_refused_and_closed() -> None:
    with one_end() as (meeting, _):
        before = open_fds()
        with pytest.raises(InvariantBroken, match="3 descriptors for rank 0 of 3"):
            Exchange(0, 3, own_fds(meeting, 0), deadline_s=1)
        with pytest.raises(InvariantBroken, match="3 descriptors for rank 2 of 2"):
            Exchange(2, 2, own_fds(meeting, 0), deadline_s=1)
        with pytest.raises(InvariantBroken, match="are needed"):
            Exchange(1, 2, own_fds(meeting, 1), deadline_s=1, slot_nbytes=1 << 20)
        gone = own_fds(meeting, 1)
        os.close(gone[0])
        with pytest.raises(RunnerError, match="rank 1 cannot map the memory of its group: Bad file descriptor"):
            Exchange(1, 2, gone, deadline_s=1, slot_nbytes=8)
        assert open_fds() == before


def test_a_meeting_without_descriptors_left_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def few(value: int, flags: int) -> int:
        if len(made) == 3:
            raise OSError(errno.EMFILE, "too many")
        made.append(eventfd(value, flags))
        return made[-1]

    eventfd = os.eventfd
    monkeypatch.setattr(os, "eventfd", few)
    before = open_fds()
    with pytest.raises(OSError, match="too many"):
        Meeting(3)
    assert (open_fds(), len(made)) == (before, 3)


def test_closed_ends_say_so() -> None:
    before = open_fds()
    with one_end() as (meeting, mine):
        # a signal that cannot be sent ends the exchange
        os.close(mine._told[0])
        with pytest.raises(RunnerError, match=r"rank 0 cannot signal at exchange 1 \(sums\): Bad file descriptor"):
            mine.gather(b"", "sums")
        with pytest.raises(RunnerError, match="no exchange after one that failed: rank 0 cannot signal"):
            mine.gather(b"", "sums")
        mine.close()
        with pytest.raises(RunnerError, match="no exchange after the end: it is closed"):
            mine.gather(b"", "sums")
        for rank in (-1, 2):
            with pytest.raises(InvariantBroken, match=f"the descriptors of rank {rank} of 2"):
                meeting.fds(rank)
        meeting.close()
        with pytest.raises(InvariantBroken, match="the meeting is closed"):
            meeting.entered()
        with pytest.raises(InvariantBroken, match="the meeting is closed"):
            meeting.fds(0)
    assert open_fds() == before
