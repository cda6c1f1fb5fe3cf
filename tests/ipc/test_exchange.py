"""Ranks in processes of their own exchange bytes, and notice a rank that is late or out of step."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest

from fdasync.errors import InvariantBroken, RunnerError
from fdasync.ipc.exchange import Exchange, Meeting

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
                work(Exchange(rank, ranks, own_fds(meeting, rank), slot_nbytes=64, deadline_s=20, **options))
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    mine = Exchange(0, ranks, own_fds(meeting, 0), slot_nbytes=64, deadline_s=20)
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
    assert meeting.entered() == [0, 1, 0]
    # a signal that comes late is not taken for that of another exchange
    with pytest.raises(RunnerError, match="no exchange after one that failed: rank 1 waited"):
        mine.gather(b"", "sums")
    mine.close()
    meeting.close()


def test_too_many_bytes_and_wrong_descriptors_are_refused() -> None:
    meeting = Meeting(2, slot_nbytes=8)
    mine = Exchange(0, 2, own_fds(meeting, 0), deadline_s=1, slot_nbytes=8)
    with pytest.raises(InvariantBroken, match="9 bytes of sums in an exchange of at most 8"):
        mine.gather(bytes(9), "sums")
    with pytest.raises(InvariantBroken, match="1 descriptors for rank 0 of 2"):
        Exchange(0, 2, [0], deadline_s=1)
    mine.close()
    meeting.close()
