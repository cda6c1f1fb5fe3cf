"""Plays a few control calls of several callers on one engine, and says whether some order of them explains the outcome.

A meeting says which caller makes which calls, at which turn of the loop each caller begins, and which calls are
cancelled at which turn. `explained` looks for an order of the calls, one after the other, by which `model.py` gives the
results and the state that came. A call that met another may be refused, and a cancelled one may have had its effect or
none. Knows nothing of how an engine keeps its state. Called by `tests/engine/test_control_meetings.py`.
"""

from __future__ import annotations

import asyncio
from itertools import permutations, product
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from fdasync import Engine, SamplingParams
from fdasync.errors import FdasyncError
from fdasync.testing import FaultRunner, PassModel, check_idle, check_sample, oracle_of, run_sim, synthetic_config
from fdasync.testing.sim.loop import SimLoop
from tests.support.broadcast_runner import GROUP, runner_of
from tests.support.weights_play.model import WeightsModel
from tests.support.weights_play.play import FIRST, NUMBERS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

PROMPT = (3, 1, 4, 1, 5)
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, seed=1)
#: no call may take longer, by the loop's clock
LIMIT_S = 60.0
_SETTLE_S = 1.0
_UPDATE_S = 3.0
OTHER = NUMBERS[1]


class Call(NamedTuple):
    """One kind of call.

    Attributes:
        run: makes it; the folder holds the weights.
        told: what the model says of it.
        aborts: it may end requests.
        ended_by: a call that ends this one with `WeightsRejected` where both meet.
        cut: what it may have done when it was cancelled, beside all and nothing.
    """

    run: Callable[[Engine, Path], Awaitable[Any]]
    told: Callable[[WeightsModel], str]
    aborts: bool = False
    ended_by: str = ""
    cut: Callable[[WeightsModel], object] | None = None


async def _abort_all(engine: Engine) -> None:
    engine.abort_all()


def _update(number: int, mode: Any, *, label: int | None = None, wrong: bool = False) -> Call:
    name, expected = f"w-{number}", "f" * 32 if wrong else None
    return Call(
        lambda engine, root: engine.update_weights(label, str(root / name), mode, expected=expected),
        lambda model: model.folder(name, "wrong" if wrong else "not", label),
        mode == "abort",
    )


def _pause(mode: Any) -> Call:
    return Call(lambda engine, _: engine.pause(mode), lambda model: model.pause(mode), mode == "abort")


def _sleep(level: Any) -> Call:
    return Call(lambda engine, _: engine.sleep(level), lambda model: model.sleep(level, None))


CALLS = {
    "pause": _pause("in_place"),
    "pause retract": _pause("retract"),
    "pause wait": _pause("wait"),
    "pause abort": _pause("abort"),
    "resume": Call(lambda engine, _: engine.resume(), lambda model: model.resume()),
    "update": _update(OTHER, "keep"),
    "update abort": _update(OTHER, "abort"),
    "update differs": _update(OTHER, "keep", wrong=True),
    "update again": _update(FIRST, "keep", label=0),
    "label": Call(lambda engine, _: engine.set_weight_version(3), lambda model: model.relabel(3)),
    "sleep": _sleep(1),
    "sleep 2": _sleep(2),
    "wake": Call(lambda engine, _: engine.wake(), lambda model: model.wake(None, 0)),
    "reset": Call(lambda engine, _: engine.reset_cache(), lambda _: ""),
    "abort": Call(lambda engine, _: _abort_all(engine), lambda _: "", aborts=True),
    "begin": Call(lambda engine, _: engine.begin_weight_update("keep"), lambda model: model.begin()),
    "end": Call(lambda engine, _: engine.end_weight_update(), lambda model: model.end("not")),
    "abandon": Call(lambda engine, _: engine.abandon_weight_update(), lambda model: model.abandon()),
    "join": Call(
        lambda engine, _: engine.join_weights_group(GROUP),
        lambda model: model.join(),
        ended_by="leave",
        # whoever joins a group again leaves it first
        cut=lambda model: model.leave(),
    ),
    "leave": Call(lambda engine, _: engine.leave_weights_group(GROUP.name), lambda model: model.leave()),
}
#: without updates in parts, and without groups
CONTROL = tuple(CALLS)[:15]


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


class Made(NamedTuple):
    """A call as it came.

    Attributes:
        caller, number: which one.
        begun, ended: turns.
        result: "", an error's name, or "cancelled".
    """

    caller: int
    number: int
    name: str
    begun: int
    ended: int
    result: str


class State(NamedTuple):
    """What an engine says of itself when nothing is under way.

    Attributes:
        paused: its scheduler plans no step.
        weights: the number of the runner's; None: they are not all in place.
    """

    doing: str
    paused: bool
    asleep: bool
    released: frozenset[str]
    version: str
    weights: int | None
    joined: bool


class Outcome(NamedTuple):
    """What came of a meeting.

    Attributes:
        lapses: it took so long that an update in parts, which nobody goes on with, ends.
    """

    made: tuple[Made, ...]
    state: State
    lapses: bool


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


def play(meeting: Meeting, root: Path) -> Outcome:
    """Play it in virtual time. Raises AssertionError where a call does not end, or the engine cannot go on."""
    loop = _TurnLoop()
    return run_sim(_Play(meeting, root, loop).play(), loop)


class _Play:
    def __init__(self, meeting: Meeting, root: Path, loop: _TurnLoop) -> None:
        self._meeting, self._root, self._loop = meeting, root, loop
        config = synthetic_config(
            {"step_s": 0.01, "copy_s": 0.003, "load_s": 0.05, "sleep_s": 0.05, "num_blocks": 32, "weights_id": FIRST},
            model=str(root / f"w-{FIRST}"), max_running=4, update_deadline_s=_UPDATE_S,
            request_deadline_s=3600.0, seed=1,
        )  # fmt: skip
        self._inner = runner_of(config)
        self._passes = PassModel(4, FIRST)
        runner = FaultRunner(
            self._inner, Random(1), on_launch=self._passes.launched, on_copied=self._passes.copied,
            on_weights=lambda: self._passes.new_weights(self._inner.weights_id),
        )  # fmt: skip
        self._engine = Engine(config, runner=runner)
        self._oracle = oracle_of(config)
        self._made: list[Made] = []
        self._at: dict[int, int] = {}

    async def play(self) -> Outcome:
        meeting, loop, engine = self._meeting, self._loop, self._engine
        async with engine:
            request = None
            if meeting.busy:
                request = asyncio.create_task(engine.complete(PROMPT, PARAMS))
                # it has tokens, and a step is in flight
                await asyncio.sleep(0.025)
            first, at, tasks = loop.turns, loop.time(), {}
            began = asyncio.Event()

            def begin(caller: int) -> None:
                tasks[caller] = loop.create_task(self._call(caller, first))
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
            await asyncio.sleep(_SETTLE_S)
            outcome = Outcome(tuple(self._made), self._state(), loop.time() - at > _UPDATE_S)
            await self._undo()
            if request is not None:
                self._check_request(await request)
            check_idle(engine)
            return outcome

    async def _call(self, caller: int, first: int) -> None:
        for number, name in enumerate(self._meeting.callers[caller]):
            begun = self._loop.turns - first
            self._at[caller] = number
            result = ""
            try:
                async with asyncio.timeout(LIMIT_S):
                    await CALLS[name].run(self._engine, self._root)
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

    def _state(self) -> State:
        load, stats = self._engine.load(), self._engine.stats()
        self._engine.check()
        weights = self._inner.weights_id if load.doing in ("running", "paused") else None
        return State(
            doing=load.doing,
            paused=stats.scheduler.paused,
            asleep=load.asleep,
            released=frozenset(stats.released),
            version=self._engine.facts().weight_version,
            weights=weights,
            joined=GROUP.name in self._inner.groups,
        )

    async def _undo(self) -> None:
        """After this nothing keeps requests from going on."""
        engine = self._engine
        await engine.abandon_weight_update()
        doing = await engine.wake()
        if doing in ("broken", "waits_for_weights"):
            await engine.update_weights(9, str(self._root / f"w-{FIRST}"), "keep")
        await engine.resume()
        assert engine.load().doing == "running"

    def _check_request(self, result: Any) -> None:
        (sample,) = result.samples
        aborts = any(CALLS[made.name].aborts for made in self._made)
        assert sample.finish_reason == "length" or (aborts and sample.finish_reason == "abort"), sample.finish_reason
        check_sample(sample, PROMPT, PARAMS, self._oracle, seen=self._passes.seen.get((PARAMS.seed, 0), []))


Effect = Literal["all", "nothing", "cut"]
_EFFECTS: tuple[Effect, ...] = get_args(Effect)


# -- what explains an outcome -----------------------------------------------------------------------------


def explained(outcome: Outcome) -> bool:
    """Whether some order of the calls gives these results and this state."""
    made = outcome.made
    for order in permutations(range(len(made))):
        if not _may_follow(made, order):
            continue
        choices = [_EFFECTS if made[at].result == "cancelled" else _EFFECTS[:1] for at in order]
        if any(_gives(outcome, order, effects) for effects in product(*choices)):
            return True
    return False


def _may_follow(made: tuple[Made, ...], order: tuple[int, ...]) -> bool:
    """No call comes before one that had ended when it began. The work of a cancelled call goes on for a while."""
    for place, later in enumerate(order):
        for earlier in order[place + 1 :]:
            one, other = made[earlier], made[later]
            if one.caller == other.caller and one.number < other.number and one.result != "cancelled":
                return False
            if one.ended < other.begun and one.result != "cancelled":
                return False
    return True


def _gives(outcome: Outcome, order: tuple[int, ...], effects: tuple[Effect, ...]) -> bool:
    model = WeightsModel(FIRST)
    model.sources = (f"w-{FIRST}",)
    for at, effect in zip(order, effects, strict=True):
        one = outcome.made[at]
        call = CALLS[one.name]
        if effect == "cut" and call.cut is not None:
            call.cut(model)
        refused = one.result == "UpdateUnderWay" and _met(outcome.made, one)
        refused = refused or (one.result == "WeightsRejected" and _met(outcome.made, one, call.ended_by))
        if effect == "all" and not refused and call.told(model) != one.result != "cancelled":
            return False
    if state_of(model) != outcome.state and outcome.lapses:
        model.abandon()
    return state_of(model) == outcome.state


def _met(made: tuple[Made, ...], one: Made, name: str | None = None) -> bool:
    """Whether a call was made while another had not ended; `name`: one of this name."""
    return any(
        other is not one
        and name in (None, other.name)
        and other.begun <= one.ended
        and (other.ended >= one.begun or other.result == "cancelled")
        for other in made
    )


def state_of(model: WeightsModel) -> State:
    weights = model.number if model.doing in ("running", "paused") else None
    return State(
        doing=model.doing,
        paused=model.doing != "running",
        asleep=model.sleeps,
        released=frozenset(model.released),
        version=str(model.version),
        weights=weights,
        joined=model.joined,
    )


# -- which meetings there are -----------------------------------------------------------------------------


def check(meeting: Meeting, root: Path) -> Outcome:
    """Play it; raises AssertionError with the meeting and what came of it, unless an order explains that."""
    try:
        outcome = play(meeting, root)
    except BaseException as error:
        error.add_note(f"{meeting}")
        raise
    assert explained(outcome), f"no order of the calls explains what came of\n{meeting}\n{outcome}"
    return outcome


def all_of(callers: tuple[tuple[str, ...], ...], root: Path, *, busy: bool, cancels: bool) -> Iterator[Outcome]:
    """Check every meeting of two callers: the second begins at each turn of the first one's calls. `cancels`: each call
    is cancelled at each of its turns, too."""
    alone = check(Meeting(callers[:1], (0,), busy=busy), root)
    last = max(made.ended for made in alone.made)
    starts = [(0, start) for start in range(last + 1)] if len(callers) > 1 else [(0,)]
    for start in starts:
        meeting = Meeting(callers, start, busy=busy)
        outcome = check(meeting, root)
        yield outcome
        for made in outcome.made if cancels else ():
            for turn in range(made.begun, made.ended + 1):
                yield check(meeting._replace(cancels=((made.caller, made.number, turn),)), root)


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
