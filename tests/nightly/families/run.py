"""Plays families in child processes, some at a time; one that crashes or hangs is told, and the others go on.

Children are forked, so that each has the libraries without importing them; this process computes nothing. Knows
outcomes and no engine. Used by `families.py`.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from tests.nightly.families.play import Outcome, play_family

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_FORK = multiprocessing.get_context("fork")

Play = Callable[[str, Path], Outcome]


@dataclass
class _Child:
    name: str
    process: Any
    ends_at: float


def play_all(
    names: Sequence[str], *, jobs: int = 2, limit_s: float = 180.0, play: Play = play_family
) -> Iterator[tuple[Outcome, float]]:
    """Outcomes as they come, with the seconds that they took.

    Args:
        names: of entries.
        jobs: children at a time.
        limit_s: for one family; then its child is killed.
        play: makes the outcome, in the child.
    """
    waiting = list(names)
    running: dict[Connection, _Child] = {}
    with tempfile.TemporaryDirectory(prefix="fdasync-families-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    name = waiting.pop(0)
                    ours, theirs = _FORK.Pipe(duplex=False)
                    process = _FORK.Process(target=_child, args=(theirs, play, name, Path(folder) / name))
                    process.start()
                    theirs.close()
                    running[ours] = _Child(name, process, time.monotonic() + limit_s)
                soonest = min(child.ends_at for child in running.values())
                # ready: an outcome, or the end of a child that sent none
                ready = set(wait(list(running), max(soonest - time.monotonic(), 0)))
                for pipe, child in list(running.items()):
                    if pipe in ready or time.monotonic() > child.ends_at:
                        del running[pipe]
                        outcome = _outcome(pipe, child, limit_s if pipe not in ready else None)
                        yield outcome, time.monotonic() - child.ends_at + limit_s
        finally:
            for pipe, child in running.items():
                _end(pipe, child)


def _outcome(pipe: Connection, child: _Child, overdue_s: float | None) -> Outcome:
    problem = f"not done after {overdue_s} s"
    try:
        if overdue_s is None:
            outcome: Outcome = pipe.recv()
            return outcome
    except EOFError:
        child.process.join(10)
        problem = f"the process ended with {child.process.exitcode}"
    finally:
        _end(pipe, child, grace_s=0.0 if overdue_s is not None else 10.0)
    return Outcome(name=child.name, failed={"process": problem})


def _end(pipe: Connection, child: _Child, grace_s: float = 0.0) -> None:
    pipe.close()
    child.process.join(grace_s)
    if child.process.exitcode is None:
        child.process.kill()
    child.process.join(10)


def _child(pipe: Connection, play: Play, name: str, folder: Path) -> None:
    # of the library, about options of tiny configs
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    folder.mkdir()
    pipe.send(play(name, folder))
    pipe.close()
