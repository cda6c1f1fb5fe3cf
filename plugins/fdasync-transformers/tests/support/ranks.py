"""Plays the ranks of a group as forks of the test's process: they have its modules, and start at once."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

from fdasync.ipc.exchange import SLOT_NBYTES, Exchange, Meeting

if TYPE_CHECKING:
    from collections.abc import Callable


def as_ranks(
    ranks: int, work: Callable[[Exchange], Any], *, deadline_s: float = 60.0, slot_nbytes: int = SLOT_NBYTES
) -> list[Any]:
    """What `work` returned or raised on each rank. Rank 0 is this process; all of them run at once."""
    meeting = Meeting(ranks, slot_nbytes)
    children = []
    try:
        for rank in range(1, ranks):
            read, write = os.pipe()
            child = os.fork()
            if not child:
                _be_rank(rank, meeting, work, write, deadline_s)
            os.close(write)
            children.append((child, read))
        outcomes = [_outcome(work, _exchange(meeting, 0, deadline_s))]
        for child, read in children:
            with os.fdopen(read, "rb") as pipe:
                data = pipe.read()
            os.waitpid(child, 0)
            outcomes.append(pickle.loads(data) if data else RuntimeError("the rank's process died"))
        return outcomes
    finally:
        meeting.close()


def returned(outcomes: list[Any]) -> list[Any]:
    """The outcomes, none of which is an error."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def _be_rank(rank: int, meeting: Meeting, work: Callable[[Exchange], Any], write: int, deadline_s: float) -> None:
    try:
        outcome = _outcome(work, _exchange(meeting, rank, deadline_s))
        with os.fdopen(write, "wb") as pipe:
            pipe.write(_pickled(outcome))
    finally:
        os._exit(0)


def _exchange(meeting: Meeting, rank: int, deadline_s: float) -> Exchange:
    fds = [os.dup(fd) for fd in meeting.fds(rank)]
    return Exchange(rank, meeting.ranks, fds, deadline_s=deadline_s, slot_nbytes=meeting.slot_nbytes)


def _outcome(work: Callable[[Exchange], Any], exchange: Exchange) -> Any:
    try:
        return work(exchange)
    except BaseException as error:
        return error
    finally:
        exchange.close()


def _pickled(outcome: Any) -> bytes:
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(outcome).__name__}: {outcome}"))
    return data
