"""Plays a few control calls of several callers at once, and says whether some order of them explains the outcome.

A meeting says which caller makes which calls, at which turn of the loop each caller begins, and which calls are
cancelled at which turn; `calls.py` has the kinds of calls, `explained.py` looks for the order. A `Stage` is what is
called: an engine (`meetings_engine.py`), or a router (`meetings_fleet.py`). Knows nothing of how it keeps its state.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fdasync import SamplingParams
from fdasync.errors import FdasyncError
from fdasync.testing import run_sim
from fdasync.testing.sim.loop import SimLoop
from tests.support.broadcast_runner import GROUP
from tests.support.weights_play.calls import CALLS
from tests.support.weights_play.explained import Made, Outcome, explained
from tests.support.weights_play.play import FIRST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from fdasync import Generator, Sample
    from tests.support.weights_play.explained import State

    Opens = Callable[[], "Stage"]

PROMPT = (3, 1, 4, 1, 5)
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, seed=1)
#: no call may take longer, by the loop's clock
LIMIT_S = 60.0
UPDATE_S = 3.0


class Meeting(NamedTuple):
    """See the module.

    Attributes:
        callers: names of the calls of each caller, one after the other.
        starts: turn at which each caller begins, from the first one's on.
        cancels: (caller, number of its call, turn).
        busy: a request is in flight.
    """

    callers: tuple[tuple[str, ...], ...]
    starts: tuple[int, ...]
    cancels: tuple[tuple[int, int, int], ...] = ()
    busy: bool = False


class _TurnLoop(SimLoop):
    """A loop that does things at given turns.

    Attributes:
        todo: by turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.todo: dict[int, list[Callable[[], object]]] = {}

    def nothing_ready(self, timeout: float | None) -> None:
        due = self.todo.pop(self.turns, ())
        # the clock stands while something is to be done at this turn, or at a later one of this moment
        super().nothing_ready(0 if due else timeout)
        for do in due:
            self.call_soon(do)


class Stage(ABC):
    """What callers meet on, opened once.

    Args:
        root: folders of weights.
        engines: how many, all of which join the trainer's group.
        merges: calls of equal arguments wait for the one that is under way.
        settle_s: after which all says what came of the calls.
    """

    def __init__(self, root: Path, engines: int = 1, *, merges: bool = False, settle_s: float = 1.0) -> None:
        self.root = root
        self.merges = merges
        self.settle_s = settle_s
        self.group = msgspec.structs.replace(GROUP, world_size=1 + engines)

    @abstractmethod
    def opened(self) -> AbstractAsyncContextManager[Any]:
        """Gives the object that is called."""

    @abstractmethod
    def state(self) -> State:
        """When nothing is under way."""

    @abstractmethod
    def check(self, sample: Sample) -> None:
        """Raise AssertionError unless it is right for PROMPT and PARAMS."""

    @abstractmethod
    def check_idle(self) -> None:
        """Raise unless nothing is held."""


def play(meeting: Meeting, stage: Stage) -> Outcome:
    """Play it in virtual time. Raises AssertionError where a call does not end, or what is called cannot go on."""
    loop = _TurnLoop()
    return run_sim(_Play(meeting, stage, loop).play(), loop)


class _Play:
    def __init__(self, meeting: Meeting, stage: Stage, loop: _TurnLoop) -> None:
        self._meeting, self._stage, self._loop = meeting, stage, loop
        self._made: list[Made] = []
        # of callbacks, which nobody awaits
        self._problems: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, problem: self._problems.append(problem))
        self._at: dict[int, int] = {}

    async def play(self) -> Outcome:
        meeting, loop, stage = self._meeting, self._loop, self._stage
        async with stage.opened() as called:
            request = None
            if meeting.busy:
                request = asyncio.create_task(called.complete(PROMPT, PARAMS))
                # it has tokens, and a step is in flight
                await asyncio.sleep(0.025)
            first, at, tasks = loop.turns, loop.time(), {}
            began = asyncio.Event()

            def begin(caller: int) -> None:
                tasks[caller] = loop.create_task(self._call(called, caller, first))
                if len(tasks) == len(meeting.callers):
                    began.set()

            def cancel(caller: int, number: int) -> None:
                if self._at.get(caller) == number:
                    tasks[caller].cancel()

            for caller, start in enumerate(meeting.starts):
                loop.todo.setdefault(first + start, []).append(lambda caller=caller: begin(caller))
            for caller, number, turn in meeting.cancels:
                do = loop.todo.setdefault(first + turn, [])
                do.append(lambda caller=caller, number=number: cancel(caller, number))
            await began.wait()
            await asyncio.gather(*tasks.values())
            # what a cancelled caller left comes to its end
            await asyncio.sleep(stage.settle_s)
            outcome = Outcome(tuple(self._made), stage.state(), loop.time() - at > UPDATE_S, stage.merges)
            await self._undo(called)
            if request is not None:
                self._check_request(await request)
                # blocks that were on their way to the host arrive
                await asyncio.sleep(1.0)
            stage.check_idle()
            assert not self._problems, self._problems
            return outcome

    async def _call(self, called: Generator, caller: int, first: int) -> None:
        for number, name in enumerate(self._meeting.callers[caller]):
            begun = self._loop.turns - first
            self._at[caller] = number
            result = ""
            try:
                async with asyncio.timeout(LIMIT_S):
                    await CALLS[name].run(called, self._stage)
            except FdasyncError as error:
                result = type(error).__name__
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                result = "cancelled"
            except TimeoutError:
                raise AssertionError(f"{name} of caller {caller} never ended") from None
            finally:
                del self._at[caller]
            self._made.append(Made(caller, number, name, begun, self._loop.turns - first, result))

    async def _undo(self, called: Any) -> None:
        """After this nothing keeps requests from going on."""
        await called.abandon_weight_update()
        doing = await called.wake()
        if doing in ("broken", "waits_for_weights"):
            await called.update_weights(9, str(self._stage.root / f"w-{FIRST}"), "keep")
        await called.resume()
        assert called.load().doing == "running"

    def _check_request(self, result: Any) -> None:
        (sample,) = result.samples
        aborts = any(CALLS[made.name].aborts for made in self._made)
        assert sample.finish_reason == "length" or (aborts and sample.finish_reason == "abort"), sample.finish_reason
        self._stage.check(sample)


# -- which meetings there are -----------------------------------------------------------------------------


def check(meeting: Meeting, stage: Opens) -> Outcome:
    """Play it; raises AssertionError with the meeting and what came of it, unless an order explains that."""
    try:
        outcome = play(meeting, stage())
    except BaseException as error:
        error.add_note(f"{meeting}")
        raise
    assert explained(outcome), f"no order of the calls explains what came of\n{meeting}\n{outcome}"
    return outcome


def all_of(
    callers: tuple[tuple[str, ...], ...], stage: Opens, *, busy: bool, cancels: bool, step: int = 1
) -> Iterator[Outcome]:
    """Check meetings of one or two callers: the second begins at each `step`th turn of the first one's calls.
    `cancels`: each call is cancelled at each `step`th of its turns, too."""
    alone = check(Meeting(callers[:1], (0,), busy=busy), stage)
    last = max(made.ended for made in alone.made)
    starts = [(0, start) for start in range(0, last + 1, step)] if len(callers) > 1 else [(0,)]
    for start in starts:
        meeting = Meeting(callers, start, busy=busy)
        outcome = check(meeting, stage)
        yield outcome
        for made in outcome.made if cancels else ():
            for turn in range(made.begun, made.ended + 1, step):
                yield check(meeting._replace(cancels=((made.caller, made.number, turn),)), stage)


def drawn(seed: int) -> Meeting:
    """A meeting of two or three callers with four or five calls, of which some are cancelled."""
    random = Random(seed)
    callers: list[list[str]] = [[] for _ in range(random.choice([2, 2, 3]))]
    for number in range(random.choice([4, 5])):
        chosen = callers[number] if number < len(callers) else random.choice(callers)
        chosen.append(random.choice(list(CALLS)))
    starts = (0, *[random.randrange(24) for _ in callers[1:]])
    cancels = []
    for _ in range(random.choice([0, 1, 1, 2])):
        caller = random.randrange(len(callers))
        cancels.append((caller, random.randrange(len(callers[caller])), random.randrange(40)))
    return Meeting(tuple(map(tuple, callers)), starts, tuple(cancels), busy=random.random() < 0.3)
