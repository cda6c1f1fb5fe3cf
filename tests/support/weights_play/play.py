"""Plays a random schedule of one seed on an engine, in virtual time, and compares it with `model.py` after each call.

Requests come and go meanwhile; each must end, and its tokens, rows and stamps must be those of the weights that its
passes read (`PassModel`). Called by `tests/engine/test_weights_schedules.py`.
"""

from __future__ import annotations

import asyncio
from copy import deepcopy
from random import Random
from typing import TYPE_CHECKING, Any

from fdasync import Engine, SamplingParams
from fdasync.errors import FdasyncError, WeightsBroken
from fdasync.testing import FaultRunner, PassModel, check_idle, check_sample, oracle_of, synthetic_config, until
from tests.support.broadcast_runner import GROUP, HALF, halves, part, runner_of
from tests.support.broadcast_runner import HIGH as HIGH_META
from tests.support.broadcast_runner import LOW as LOW_META
from tests.support.weights_play.busy import is_busy
from tests.support.weights_play.model import HIGH, LOW, PARTS, WHOLE, Compared, WeightsModel

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from fdasync import GroupTensors

#: halves of these and their mixtures are all weights that there are
NUMBERS = [low + high * HALF for low in (1, 2, 3) for high in (0, 1)]
FIRST = NUMBERS[0]
# few, so that they return
LABELS = [0, 1, 2, 3]
_LIMIT_S = 3.0
_NAMES = {LOW: ("low",), HIGH: ("high",), WHOLE: ("low", "high")}
_METAS = {LOW: (LOW_META,), HIGH: (HIGH_META,), WHOLE: (LOW_META, HIGH_META)}
_TAGS = [None, [], ["weights"], ["kv_cache"], ["cuda_graph"], ["cuda_graph", "kv_cache"], ["weights", "kv_cache"]]

# a call of the engine, and what the model says of it
Move = "tuple[str, Callable[[], Coroutine[Any, Any, Any]], Callable[[], str]]"


def write_folders(root: Path) -> None:
    for number in NUMBERS:
        _write(root / f"w-{number}", f'{{"weights_id": {number}}}')
        for base in NUMBERS:
            if base != number:
                _write(root / f"d-{base}-{number}", f'{{"weights_id": {number}, "base": {base}}}')


def _write(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "weights.json").write_text(text)


class Play:
    """See the module.

    Args:
        root: with the folders of `write_folders`.
    """

    def __init__(self, seed: int, root: Path) -> None:
        self.random = random = Random(seed)
        self.root = root
        self.config = synthetic_config(
            {"step_s": 0.01, "copy_s": 0.003, "load_s": 0.05, "sleep_s": 0.05, "num_blocks": 32, "weights_id": FIRST},
            model=str(root / f"w-{FIRST}") if random.random() < 0.7 else "",
            host_blocks=random.choice([0, 24]), pipeline_depth=random.choice([1, 2]), max_running=4,
            update_deadline_s=_LIMIT_S, request_deadline_s=3600.0, seed=seed,
        )  # fmt: skip
        self.inner = runner_of(self.config)
        self.passes = PassModel(4, FIRST)
        faults = FaultRunner(
            self.inner, Random(seed), on_launch=self.passes.launched, on_copied=self.passes.copied,
            on_weights=lambda: self.passes.new_weights(self.inner.weights_id),
        )  # fmt: skip
        self.engine = Engine(self.config, runner=faults)
        self.model = WeightsModel(FIRST)
        self.model.sources = (f"w-{FIRST}",) if self.config.model else ()
        self.oracle = oracle_of(self.config)
        self.said: list[str] = []
        self.closed = self.aborted = False
        # what identities were, and of which namespaces
        self._namespaces: dict[tuple[str, int], bytes] = {}
        # of the weights of each weights id
        self._numbers: dict[str, int] = {}

    async def play(self, moves: int) -> None:
        random = self.random
        async with self.engine:
            self._check()
            clients = [asyncio.create_task(self._client(number)) for number in range(12)]
            for _ in range(moves):
                await asyncio.sleep(random.choice([0.0, random.uniform(0, 0.1)]))
                await self._move()
                self._check()
            if random.random() < 0.15:
                self.closed = True
                late = asyncio.create_task(self._any(self._draw()))
                await asyncio.sleep(random.uniform(0, 0.05))
                await self.engine.aclose()
                await late
            else:
                await self._undo()
            await asyncio.gather(*clients)
            if not self.closed:
                # blocks that nobody uses any more may still be on their way to the host
                await until(lambda: not self.engine.stats().scheduler.moving, every_s=0.01)
                check_idle(self.engine)

    # -- requests -----------------------------------------------------------------------------------------

    async def _client(self, number: int) -> None:
        random, engine = Random(number * 1000 + self.random.randrange(1000)), self.engine
        await asyncio.sleep(random.uniform(0, 2))
        params = SamplingParams(max_tokens=random.randint(1, 20), temperature=random.choice([0.0, 1.0]), seed=number)
        prompt = [number % 5, *range(random.randint(4, 30))]
        while True:
            try:
                result = await engine.complete(prompt, params)
                break
            except WeightsBroken:
                await asyncio.sleep(0.2)
            except FdasyncError:
                if not self.closed:
                    raise
                return
        (sample,) = result.samples
        seen = self.passes.seen.get((number, 0), [])
        check_sample(sample, prompt, params, self.oracle, seen=seen)
        for span in sample.weight_version:
            # a label may name several, an id names one
            numbers = {seen[len(prompt) - 1 + at].weights_id for at in range(span.start, span.stop)}
            assert numbers <= {self._numbers.setdefault(span.weights_id, next(iter(numbers), 0))}, span
        rows = sample.aux["stamp"][:, 0].tolist()
        assert rows == self.passes.stamps.get((number, 0), [])[: len(rows)]
        assert sample.finish_reason == "length" or (sample.finish_reason == "abort" and (self.aborted or self.closed))

    # -- moves ----------------------------------------------------------------------------------------------

    async def _move(self) -> None:
        """One call, or two that meet; or one whose caller gives up."""
        random, move = self.random, self._draw()
        name, call, told = move
        way = random.choice(["wait", "wait", "wait", "cancel", "meet"])
        if way == "wait" or name in ("begin", "pause", "lapse"):
            await self._one(move)
            return
        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        await asyncio.sleep(random.choice([0.0, random.uniform(0, 0.15)]))
        if way == "cancel":
            self._say(f"{name} cancelled")
            task.cancel()
            await asyncio.wait([task])
            await self._settled()
            told()
            if name == "join" and self.model.open is None:
                # a join whose caller goes away ends, unless it has ended
                self.model.joined = GROUP.name in self.inner.groups
            return
        # of the second one the model knows what it does behind the first, or that it is refused meanwhile
        others = ("folder", "tensors", "sleep", "wake", "join", "leave", "begin")
        # of two wakes that meet, a failure that is meant for one may hit the other
        other = self._draw(tuple(kind for kind in others if kind != "wake" or not name.startswith("wake")))
        met, kept = not task.done(), deepcopy(vars(self.model))
        before = other[2]()
        vars(self.model).update(kept)
        error = await self._caught(other[1]())
        wanted = told()
        if met and not wanted and (name, other[0]) == ("join", "leave"):
            # whoever leaves a group that is being joined ends that
            wanted = "WeightsRejected"
        self._same(name, wanted, await self._caught(task))
        if met and (error == "UpdateUnderWay" or (error and error == before and other[0].startswith("sleep"))):
            self._say(f"{other[0]} refused")
        else:
            self._same(other[0], other[2](), error)

    async def _one(self, move: Any) -> None:
        name, call, told = move
        error = await self._caught(call())
        self._same(name, told(), error)

    async def _any(self, move: Any) -> None:
        """One that the end may cut short."""
        await self._caught(move[1]())

    async def _caught(self, call: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> str:
        try:
            await call
        except FdasyncError as error:
            return type(error).__name__
        return ""

    def _same(self, name: str, wanted: str, error: str) -> None:
        self._say(f"{name}: {error or 'done'}")
        assert error == wanted, f"{name} ended with {error or 'success'}, the model says {wanted or 'success'}"

    def _say(self, words: str) -> None:
        self.said.append(words)

    async def _settled(self) -> None:
        """What a caller left has come to its end."""
        async with asyncio.timeout(300):
            while is_busy(self.engine):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def _check(self) -> None:
        engine, model = self.engine, self.model
        engine.check()
        load = engine.load()
        assert load.doing == model.doing, f"it is {load.doing}, the model says {model.doing}"
        assert (load.asleep, load.paused) == (model.sleeps, model.doing != "running")
        assert set(engine.stats().released) == model.released
        assert engine.stats().reloadable == bool(model.sources)
        assert engine.facts().weight_version == str(model.version)
        namespace = engine._runtime.namespace
        assert self._namespaces.setdefault(model.identity, namespace) == namespace, "another identity of equal weights"
        assert len(set(self._namespaces.values())) == len(self._namespaces), "other weights of equal identity"
        if model.doing in ("running", "paused"):
            assert self.inner.weights_id == model.number

    def _draw(self, only: tuple[str, ...] = ()) -> Any:
        kinds = {
            "pause": 2, "resume": 3, "folder": 4, "delta": 4, "tensors": 3, "group": 2, "begin": 1, "end": 1,
            "abandon": 0.3, "lapse": 0.3, "sleep": 3, "wake": 4, "relabel": 1, "join": 1, "leave": 0.5, "reset": 0.5,
            "lose": 0.5, "again": 1.5,
        }  # fmt: skip
        if self.model.open is not None:
            kinds |= {"group": 6, "end": 4}
        names = list(only or kinds)
        (name,) = self.random.choices(names, [kinds[name] for name in names])
        return getattr(self, f"_{name}")()

    def _pause(self) -> Any:
        mode = self.random.choice(["in_place", "retract", "wait", "abort"])
        self.aborted |= mode == "abort"
        return "pause", lambda: self.engine.pause(mode), lambda: self.model.pause(mode)

    def _resume(self) -> Any:
        return "resume", self.engine.resume, self.model.resume

    def _relabel(self) -> Any:
        label = self.random.choice(LABELS)
        return f"relabel {label}", lambda: self.engine.set_weight_version(label), lambda: self.model.relabel(label)

    def _reset(self) -> Any:
        return "reset", self.engine.reset_cache, lambda: ""

    def _lose(self) -> Any:
        """Folders go, or are all there again."""
        gone = {self.random.choice(self.model.sources)} if self.model.sources and not self.model.gone else set()
        self.model.gone, self.inner.gone = gone, set(gone)

        async def call() -> None:
            return

        return f"lost {sorted(gone)}", call, lambda: ""

    def _join(self) -> Any:
        # the runner leaves a group of that name when it begins to join it again
        self.inner.reach_s = self.random.choice([0.0, 0.03])
        return "join", lambda: self.engine.join_weights_group(GROUP), self.model.join

    def _leave(self) -> Any:
        return "leave", lambda: self.engine.leave_weights_group(GROUP.name), self.model.leave

    def _mode(self) -> Any:
        mode = self.random.choice(["keep", "keep", "abort"])
        self.aborted |= mode == "abort"
        return mode

    def _compared(self) -> Compared:
        return self.random.choice(["not", "not", "not", "right", "wrong"])  # type: ignore[return-value]

    def _expected(self, compared: Compared, holds: Callable[[], int]) -> str | None:
        return {"not": None, "right": f"{holds():032x}", "wrong": "f" * 32}[compared]

    def _label(self) -> int | None:
        """One that was used before, most of the time, or is in use."""
        return self.random.choice([None, None, self.model.version, *LABELS])

    def _folder(self) -> Any:
        return self._load_folder(f"w-{self.random.choice(NUMBERS)}")

    def _delta(self) -> Any:
        number = self.random.choice([number for number in NUMBERS if number != self.model.holds])
        bases = [base for base in NUMBERS if base != number]
        base = self.model.holds if self.model.holds in bases and self.random.random() < 0.8 else None
        return self._load_folder(f"d-{self.random.choice(bases) if base is None else base}-{number}")

    def _load_folder(self, name: str) -> Any:
        compared, mode, label = self._compared(), self._mode(), self._label()
        expected = self._expected(compared, lambda: int(name.split("-")[-1]))
        path = str(self.root / name)
        return (
            f"{name} {compared} as {label}",
            lambda: self.engine.update_weights(label, path, mode, expected=expected),
            lambda: self.model.folder(name, compared, label),
        )

    def _again(self) -> Any:
        number = self.model.number if self.random.random() < 0.8 else self.random.choice(NUMBERS)
        compared, mode = self._compared(), self._mode()
        expected = self._expected(compared, lambda: number)

        async def call() -> None:
            path = str(self.root / f"w-{number}")
            await self.engine.update_weights(self.engine.facts().weight_version, path, mode, expected=expected)

        return (
            f"again w-{number} {compared}",
            call,
            lambda: self.model.folder(f"w-{number}", compared, self.model.version),
        )

    def _tensors(self) -> Any:
        from tests.support.weights_play.model import mixed

        number, some, mode = self.random.choice(NUMBERS), self.random.choice([LOW, HIGH, WHOLE, WHOLE]), self._mode()
        compared, label = self._compared() if some == WHOLE else "not", self._label()
        expected = self._expected(compared, lambda: mixed(self.model.holds, number, some))
        return (
            f"tensors {some} of {number} {compared} as {label}",
            lambda: self.engine.update_weights(label, halves(number, *_NAMES[some]), mode, expected=expected),
            lambda: self.model.tensors(number, some, compared, label),
        )

    def _group(self) -> Any:
        number, some, mode = self.random.choice(NUMBERS), self.random.choice([LOW, HIGH, WHOLE, WHOLE]), self._mode()
        dies, label = self.random.random() < 0.15, self._label()
        source: GroupTensors = part(*_METAS[some])
        is_open = self.model.open is not None

        async def call() -> None:
            self.inner.sends, self.inner.dies = number, dies
            try:
                await self.engine.update_weights(label, source, mode)
            except FdasyncError:
                # a refusal came before the trainer's end
                self.inner.dies = False
                raise

        def told() -> str:
            if is_open:
                return self.model.part(number, some, dies=dies, version=label)
            return self.model.group(number, some, dies=dies, version=label)

        return f"group {some} of {number} as {label}{' dies' * dies}", call, told

    def _begin(self) -> Any:
        mode = self._mode()
        return "begin", lambda: self.engine.begin_weight_update(mode), self.model.begin

    def _end(self) -> Any:
        compared = self.random.choice(["not", "not", "wrong"])
        expected = self._expected(compared, lambda: 0)  # type: ignore[arg-type]
        return (
            f"end {compared}",
            lambda: self.engine.end_weight_update(expected=expected),
            lambda: self.model.end(compared),  # type: ignore[arg-type]
        )

    def _abandon(self) -> Any:
        return "abandon", self.engine.abandon_weight_update, self.model.abandon

    def _lapse(self) -> Any:
        """Nobody goes on with an update in parts in time."""
        return "lapse", lambda: asyncio.sleep(2 * _LIMIT_S), self.model.abandon

    def _sleep(self) -> Any:
        level, mode = self.random.choice([0, 1, 2, 2]), self.random.choice(["keep", "keep", "wait", "abort"])
        tags = self.random.choice([None, None, ["kv_cache"], ["weights"], ["weights", "kv_cache"]])
        self.aborted |= mode == "abort"
        return (
            f"sleep {level} {mode} {tags}",
            lambda: self.engine.sleep(level, mode, tags=tags),  # type: ignore[arg-type]
            lambda: self.model.sleep(level, tags),
        )

    def _wake(self) -> Any:
        tags = self.random.choice(_TAGS)
        fails = int(self.random.random() < 0.15 and bool(self.model.released & set(tags or PARTS)))

        async def call() -> None:
            self.inner.fails_wakes = fails
            try:
                assert await self.engine.wake(tags) == self.engine.load().doing  # type: ignore[arg-type]
            finally:
                self.inner.fails_wakes = 0

        return f"wake {tags}{' fails' * fails}", call, lambda: self.model.wake(tags, fails)

    # -- the end --------------------------------------------------------------------------------------------

    async def _undo(self) -> None:
        """After this nothing keeps requests from going on."""
        engine, model = self.engine, self.model
        model.gone, self.inner.gone = set(), set()
        await self._one(self._abandon())
        await self._one(("wake", engine.wake, lambda: model.wake(None, 0)))
        if model.doing in ("broken", "waits_for_weights"):
            name = f"w-{NUMBERS[-1]}"
            path = str(self.root / name)
            update = (
                f"mend {name}",
                lambda: engine.update_weights(None, path, "keep"),
                lambda: model.folder(name, "not"),
            )
            await self._one(update)
        await self._one(("resume", engine.resume, model.resume))
        self._check()
        assert model.doing == "running"
