"""A slot's worth of bytes on its way from a sender's regions to this side's staging area.

Knows no regions of ours and no checksums. Made by `transport.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from fdasync_fleet.transfer.validation import broken, refused

from fdasync_mooncake.transfer.control import ControlEnded
from fdasync_mooncake.transfer.engine import DONE, ENGINE_ERRORS
from fdasync_mooncake.transfer.staging import SLOT_NBYTES
from fdasync_mooncake.transfer.wire import MAX_RUNS, Staged, WireRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fdasync_fleet.transfer.base import CopySpec
    from fdasync_fleet.transfer.transfers import Transfer

    from fdasync.cache.store.base import Outcome
    from fdasync.ipc.shared_memory import Part
    from fdasync_mooncake.transfer.control import Control
    from fdasync_mooncake.transfer.engine import Engine
    from fdasync_mooncake.transfer.staging import Slots


class Run(NamedTuple):
    """`length` bytes from `start` of part number `part` of copy number `place`, which is `theirs` at the sender."""

    place: int
    part: int
    theirs: Part
    start: int
    length: int


def slots_worth(copy_specs: Sequence[CopySpec], outcomes: Sequence[Outcome | None]) -> Iterator[tuple[Run, ...]]:
    """The runs of all copies whose outcome is not known, as many at a time as fit a slot."""
    runs: list[Run] = []
    room = SLOT_NBYTES
    for place, copy_spec in enumerate(copy_specs):
        # a copy whose outcome is known may be malformed
        for number, theirs in enumerate(copy_spec.ref_parts if outcomes[place] is None else ()):
            start = 0
            while start < theirs.nbytes and outcomes[place] is None:
                length = min(room, theirs.nbytes - start)
                runs.append(Run(place, number, theirs, start, length))
                start += length
                room -= length
                if not room or len(runs) == MAX_RUNS:
                    yield tuple(runs)
                    runs, room = [], SLOT_NBYTES
    if runs:
        yield tuple(runs)


class Landing:
    """Asks for the runs, reads them; `leave` it in any case.

    Attributes:
        runs: the runs.
        task: done when they are here, or will not come; never raises.
        problem: why they will not come; None if they are here, once the task is done.
        slot: where they are.
        offered: of each run whether the sender has it on offer.
    """

    def __init__(
        self, engine: Engine, slots: Slots, control: Control, transfer: Transfer, runs: tuple[Run, ...]
    ) -> None:
        self.runs = runs
        self.problem: Outcome | None = None
        self.slot = -1
        self.offered: tuple[bool, ...] = ()
        self._engine = engine
        self._slots = slots
        self._control = control
        self._transfer = transfer
        self._reading = False
        self._left = False
        self.task = asyncio.get_running_loop().create_task(self._land())
        self.task.add_done_callback(self._landed)

    def leave(self) -> None:
        """It is not wanted any more. A read that has begun goes on, and then its slot is free; idempotent."""
        self._left = True
        if not self._reading:
            self.task.cancel()
        if self.task.done():
            self._give()

    def _landed(self, task: asyncio.Task[None]) -> None:
        if self._left:
            self._give()
        if not task.cancelled() and task.exception() is not None:
            self.problem = broken(f"{type(task.exception()).__name__}: {task.exception()}")
        self._transfer.wake()

    def _give(self) -> None:
        if self.slot >= 0:
            self._slots.give(self._control, self.slot)
            self.slot = -1

    async def _land(self) -> None:
        control = self._control
        credit = await control.credits.take(self._transfer)
        number, answer = control.ask(tuple([WireRun(run.theirs, run.start, run.length) for run in self.runs]))
        try:
            staged = await answer
            self.problem = self._check(staged)
            if self.problem is not None:
                return
            met = await self._engine.connect(staged.segment)
            if met.problem:
                self.problem = refused(met.problem) if met.lasts else broken(met.problem)
                return
            self.slot = await self._slots.take(control)
            self._reading = True
            code = await self._engine.read(
                staged.segment, staged.address, self.slot * SLOT_NBYTES, sum([run.length for run in self.runs])
            )
            if code == DONE:
                self.offered = staged.offered
            else:
                self.problem = broken(f"Mooncake's engine could not read from {staged.segment} (code {code})")
        except ControlEnded as error:
            self.problem = error.outcome
        except ENGINE_ERRORS as error:
            self.problem = broken(f"no engine to read with: {error}")
        finally:
            self._reading = False
            control.free(number)
            control.credits.give(self._transfer, credit)

    def _check(self, staged: Staged) -> Outcome | None:
        """Why the engine is not to read from there: a peer names it."""
        if len(staged.offered) != len(self.runs):
            return broken("the sender staged other runs than were asked for")
        host, _, port = staged.segment.rpartition(":")
        if host != self._control.host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            return refused(f"the sender's engine is at {staged.segment!r:.100}, and its blocks at {self._control.host}")
        if staged.protocol != self._engine.protocol:
            return refused(f"the sender's engine speaks {staged.protocol!r:.20}, this one {self._engine.protocol}")
        return None
