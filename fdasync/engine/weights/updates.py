"""Pauses and weight updates of one engine: stop planning, let steps end, load, begin a new root of the namespace.

An update is a task of the engine: a caller that is cancelled stops waiting, and the load goes on to its end. Blocks of
the old weights match no request afterwards, in any tier, because every identity is chained from the new weights id
(docs/design.md, rules 1, 10). A label is no part of an identity. An update that comes in parts is open from `begin` to
`end`: no step runs meanwhile. Knows no blocks and no schedule. Called by `engine/engine.py` and
`pd/instance/instance.py`.
"""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import msgspec

from fdasync.engine.prepare import namespace_of
from fdasync.engine.weights.source import ITEM_NBYTES, check_group, folder_of, group_tensors_of, tensors_of
from fdasync.errors import (
    Asleep,
    BadInput,
    DeadlineExceeded,
    EngineClosed,
    FdasyncError,
    TaskCancelled,
    UpdateUnderWay,
    WeightsBroken,
    WeightsDiffer,
    WeightsRejected,
)
from fdasync.events.catalog import AbortRequested, PauseRequested, ResumeRequested, WeightsChanged, WeightsRelabelled
from fdasync.ipc.deadlines import DeadlineTimer, Within, wait_within
from fdasync.request import checked_fingerprint, checked_version, first_difference, next_order, next_version

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from fdasync.engine.config import EngineConfig
    from fdasync.engine.prepare import Preparer
    from fdasync.engine.runtime import Runtime
    from fdasync.request import (
        Doing,
        GroupTensors,
        MemoryPart,
        PauseMode,
        WeightsFingerprint,
        WeightsGroup,
        WeightSource,
    )
    from fdasync.runner.base import TensorMeta

    # loads a source and returns its weights id; "": it is not known
    Loader = Callable[[], Awaitable[str]]

# bytes handed to the runner at a time: other tasks of the loop run in between
_PIECE_NBYTES = 8 << 20

# of the deadline of an update, what a worker has: it tells what went wrong before the engine ends it
_WORKER_SHARE = 0.9
# beyond a group's own limits
_JOIN_GRACE_S = 10.0

T = TypeVar("T")


class _OpenUpdate:
    """An update in parts.

    Attributes:
        mode: of `update_weights`.
        begun: no step is in flight, and parts may come.
        label: that a part was given last; None: none was.
        parts: how many have come.
        timer: ends an update that nobody goes on with.
    """

    __slots__ = ("begun", "label", "mode", "parts", "timer")

    def __init__(self, mode: Literal["abort", "keep"]) -> None:
        self.mode = mode
        self.begun = False
        self.label: str | None = None
        self.parts = 0
        self.timer: DeadlineTimer | None = None


class Weights:
    """One engine's weights.

    Args:
        fail: ends the engine.
        check: raises unless the engine is running.
        changed: called when the weights or their label have changed; None: nothing is.

    Attributes:
        version: the caller's label of the weights in use.
        order: of that label among all weights and labels that were in use (`request.next_order`).
        broken: why the weights cannot be used; None while they can.
        folder: that the weights in use came from; "": tensors of an update are among them, or the runner needs none.
        dropped: a sleep dropped the weights, and no update or `reload` has brought any since: nothing goes on.
        sleeps: a sleep keeps the engine from going on (`sleep.py`).
        moving: a sleep or a wake is under way, and no update may begin.
        waking: it is a wake.
        released: the parts whose memory is not there.
    """

    def __init__(
        self,
        config: EngineConfig,
        runtime: Runtime,
        preparer: Preparer,
        fail: Callable[[BaseException], None],
        check: Callable[[], None],
        changed: Callable[[], None] | None = None,
    ) -> None:
        self.version = str(config.weight_version)
        self.order = next_order(-1, self.version)
        self.broken: WeightsBroken | None = None
        self.folder = str(config.model)
        self.dropped = self.sleeps = self.moving = self.waking = False
        self.released: tuple[MemoryPart, ...] = ()
        self._config = config
        self._runtime = runtime
        self._preparer = preparer
        self._fail = fail
        self._check = check
        self._changed = changed
        self._resumes = 0
        # a pause has returned, and no resume came since
        self._held = False
        # calls of `pause` that have not returned, with their modes
        self._pausers: dict[object, PauseMode] = {}
        # how many PauseRequested were published
        self._asked = 0
        # the weights id that each label named
        self._used = {self.version: runtime.capacity.weights_id}
        self._updating = False
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._open: _OpenUpdate | None = None
        # of the last group's tensors, which were checked
        self._known: tuple[TensorMeta, ...] = ()
        # the label of the last update by a group, where the engine has been paused by its callers since before it
        self._goes_on: str | None = None

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        self._check()
        pauser = object()
        self._pausers[pauser] = mode
        try:
            await self.quiet(mode)
            # a resume that came while this call waited has removed its pauser, and undoes its pause
            self._held = self._held or pauser in self._pausers
        except asyncio.CancelledError:
            # a cancelled call takes its own pause back, and no other's
            if self._pausers.pop(pauser, None) is not None and not self._updating:
                self.go_on()
            raise
        finally:
            self._pausers.pop(pauser, None)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._check()
        if self.broken is not None:
            raise self.broken
        self._held = False
        self._goes_on = None
        self._pausers.clear()
        if not self._updating:
            # an update resumes at its own end
            self.go_on()

    def _ask(self, mode: PauseMode) -> None:
        self._asked += 1
        self._runtime.bus.publish(PauseRequested(mode=mode))

    async def quiet(self, mode: PauseMode = "in_place") -> None:
        """Pause, and wait until no step and no copy is in flight; fails the engine where that takes too long
        (docs/design.md, rule 10)."""
        driver = self._runtime.driver
        assert driver is not None
        pausing = driver.scheduler.pausing
        resumes = self._resumes
        self._ask(mode)

        def paused() -> bool:
            # the turn that reads PauseRequested may still be to come
            return pausing.paused and pausing.requests >= self._asked

        def resumed() -> bool:
            # after a resume the engine may never be idle again
            return self._resumes != resumes

        if mode == "wait":
            # bounded by the deadlines of the requests that run; the pause of an update is not the one that it waits for
            await driver.wait_until(lambda: resumed() or (paused() and not self._updating))
            self._check()
        limit_s = self._config.step_deadline_s * self._config.pipeline_depth
        try:
            async with Within(limit_s):
                await driver.wait_until(lambda: resumed() or (paused() and driver.is_idle))
        except TimeoutError:
            self._fail(self._runtime.runner.overdue("the steps in flight at a pause", limit_s))
        self._check()

    @property
    def doing(self) -> Doing:
        """What the engine does, in one word; all but "running" keep it from planning steps."""
        if self.waking:
            return "waking"
        if self.sleeps:
            return "asleep"
        if self._updating:
            return "updating"
        if self.broken is not None:
            return "broken"
        if self.dropped:
            return "waits_for_weights"
        return "paused" if self._held else "running"

    async def update(
        self,
        version: str | int | None,
        source: WeightSource,
        mode: Literal["abort", "keep"],
        order: int = 0,
        expected: str | WeightsFingerprint | None = None,
        weights_id: str = "",
    ) -> None:
        """See `Engine.update_weights`.

        Args:
            order: of these weights; 0: the next one.
            weights_id: of tensors that a group brings to several engines; "": drawn here.
        """
        self._check()
        wanted = checked_fingerprint(expected)
        checked_fingerprint(weights_id or None)
        part = group_tensors_of(source, self._known)
        self._known = self._known if part is None else part.tensors
        if self._open is not None:
            await self._take_part(self._open, version, part, wanted)
            return
        label = self._new_label(version, goes_on=part is not None)
        _check_mode(mode)
        if self._updating:
            raise UpdateUnderWay("of this engine")
        self._check_awake("update_weights")
        folder = None if part is not None else folder_of(source)
        if part is not None:
            load = self._group_loader(part)
        else:
            load = self._tensors_loader(source) if folder is None else self._folder_loader(folder)
        again = label == self.version
        if again and folder is None and label != self._goes_on:
            problem = f"{label!r} is in use, and tensors from memory cannot be compared with the weights in use"
            hint = "give them a version of their own, or pause, or begin an update, before the first of several parts"
            raise BadInput("version", problem, hint=hint)
        by_group = label if part is not None and self._held else None
        await self._run(self._update(label, order, load, mode, folder, wanted, weights_id, again=again))
        self._goes_on = by_group if self._held else None

    def _check_awake(self, call: str) -> None:
        """Raise unless the weights' memory is there to stay."""
        if self.moving:
            raise UpdateUnderWay("a sleep or a wake of this engine")
        if "weights" in self.released:
            raise Asleep(call, self.released)

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work of an update as a task, and wait for it. A caller who is cancelled stops waiting."""
        self._updating = True
        self._task = task = asyncio.get_running_loop().create_task(work, name="fdasync-weights")
        task.add_done_callback(self._ended)
        # an update that the engine's end cut short cancels no caller
        await asyncio.wait([task])
        if task.cancelled():
            self._check()
            raise EngineClosed("closing")
        task.result()  # of a task that is done

    def _new_label(self, version: str | int | None, *, goes_on: bool = False) -> str:
        """The label of new weights. Raises BadInput for one that was used."""
        if version is None:
            return self._goes_on if goes_on and self._goes_on is not None else self._next_label()
        label = checked_version(version)
        if label in self._used and label != self.version:
            raise BadInput(
                "version", f"{label!r} was used before", hint="a version is used again only while it is in use"
            )
        return label

    # -- groups, and updates in parts -------------------------------------------------------------------

    async def join(self, group: WeightsGroup) -> None:
        """See `Engine.join_weights_group`."""
        self._check()
        check_group(group, self._runtime.capacity.tensor_parallel, self._config.weights_interface)
        if self._updating:
            raise UpdateUnderWay("of this engine")
        if self.moving:
            raise UpdateUnderWay("a sleep or a wake of this engine")
        await self._run(self._join(group))

    async def _join(self, group: WeightsGroup) -> None:
        runner = self._runtime.runner
        limit_s = 2 * group.timeout_s + _JOIN_GRACE_S
        try:
            # a worker may wait for the others without answering
            await self.quiet()
            async with Within(limit_s):
                await runner.join_group(group, self._config.weights_interface)
        except TimeoutError:
            self._fail(runner.overdue("joining a group", limit_s))
            self._check()
        except FdasyncError as error:
            # raises the engine's failure where the worker died
            self._check()
            if isinstance(error, WeightsRejected):
                raise
            raise WeightsRejected(f"{type(error).__name__}: {error}") from error
        finally:
            self._finish()
            self.go_on()

    async def leave(self, name: str) -> None:
        """See `Engine.leave_weights_group`."""
        self._check()
        if self._task is not None:
            raise UpdateUnderWay("of this engine")
        # closing a connection takes a moment
        await self._in_time("leaving a group", self._runtime.runner.leave_group(name))

    async def begin(self, mode: Literal["abort", "keep"]) -> None:
        """See `Engine.begin_weight_update`."""
        self._check()
        _check_mode(mode)
        if self._updating:
            raise UpdateUnderWay("of this engine")
        self._check_awake("begin_weight_update")
        self._updating = True
        self._open = update = _OpenUpdate(mode)
        try:
            await self.quiet()
        except BaseException:
            self._close_update(update)
            raise
        update.begun = True
        self._await_part(update)

    async def _take_part(
        self,
        update: _OpenUpdate,
        version: str | int | None,
        part: GroupTensors | None,
        expected: WeightsFingerprint | None,
    ) -> None:
        if part is None or self._is_busy(update):
            raise UpdateUnderWay("of this engine, in parts")
        if expected is not None:
            raise BadInput("expected", "is of a part of an update", hint="give it where the update ends")
        if version is not None:
            update.label = self._open_label(version)
        self._stop_waiting(update)
        await self._run(self._receive_part(update, part))

    def _open_label(self, version: str | int) -> str:
        label = self._new_label(version)
        if label == self.version:
            raise BadInput("version", f"{label!r} is in use", hint="give new weights a version of their own")
        return label

    async def _receive_part(self, update: _OpenUpdate, part: GroupTensors) -> None:
        ended = True
        try:
            receiving = self._receive(part, first=not update.parts, last=False)
            await self._in_time("receiving weights", receiving)
            update.parts += 1
            ended = False
        except WeightsRejected as error:
            if update.parts:
                self.broken = WeightsBroken(f"{error.problem}; tensors before these have been replaced")
                raise self.broken from error
            raise
        except Exception as error:
            self._break(error)
        finally:
            if ended:
                self._close_update(update)
            else:
                self._await_part(update)

    async def end(
        self, version: str | int | None, expected: str | WeightsFingerprint | None, order: int = 0, weights_id: str = ""
    ) -> None:
        """See `Engine.end_weight_update`. `order`, `weights_id`: as in `update`."""
        self._check()
        wanted = checked_fingerprint(expected)
        checked_fingerprint(weights_id or None)
        update = self._open
        if update is None:
            raise BadInput("end_weight_update", "no update is open", hint="it begins with begin_weight_update")
        if self._is_busy(update):
            raise UpdateUnderWay("of this engine, in parts")
        if version is not None:
            update.label = self._open_label(version)
        label = update.label or self._next_label()
        self._stop_waiting(update)
        if not update.parts:
            # nothing came, so nothing is new
            self._close_update(update)
            return
        self._open = None
        await self._run(self._update(label, order, self._end_received, update.mode, None, wanted, weights_id))

    def abandon(self) -> None:
        """See `Engine.abandon_weight_update`."""
        self._check()
        if self._open is None:
            return
        if self._is_busy(self._open):
            raise UpdateUnderWay("of this engine: tensors are being received")
        self._lapse(self._open, "was abandoned")

    def _is_busy(self, update: _OpenUpdate) -> bool:
        """The update begins, or a part of it is being received."""
        return not update.begun or self._task is not None

    @property
    def is_open(self) -> bool:
        """Whether an update in parts has begun and not ended."""
        return self._open is not None

    def _await_part(self, update: _OpenUpdate) -> None:
        limit_s = self._runtime.update_limit_s
        loop = asyncio.get_running_loop()
        words = f"was neither continued nor ended for {limit_s:g} s"
        update.timer = DeadlineTimer(loop, loop.time() + limit_s, partial(self._lapse, update, words))

    def _stop_waiting(self, update: _OpenUpdate) -> None:
        if update.timer is not None:
            update.timer.cancel()
            update.timer = None

    def _lapse(self, update: _OpenUpdate, what: str) -> None:
        """End an update that is not whole."""
        if update.parts:
            self.broken = WeightsBroken(f"an update in parts {what}, after {update.parts} of them")
        self._close_update(update)

    def _close_update(self, update: _OpenUpdate) -> None:
        self._stop_waiting(update)
        if self._open is update:
            self._open = None
        self._finish()
        if not self._closing:
            self.go_on()

    def _finish(self) -> None:
        self._updating = self._open is not None
        if self._runtime.driver is not None:
            # a pause that waits for requests looks again
            self._runtime.driver.tell()

    def relabel(self, version: str | int, order: int = 0) -> None:
        """See `Engine.set_weight_version`. `order`: of this label; 0: the next one."""
        self._check()
        if self.broken is not None:
            raise self.broken
        label = checked_version(version)
        if self._updating:
            raise UpdateUnderWay("of this engine")
        weights_id = self._runtime.capacity.weights_id
        if self._used.get(label, weights_id) != weights_id:
            raise BadInput("version", f"{label!r} was used before, for other weights")
        if label != self.version:
            self._runtime.bus.publish(WeightsRelabelled(version=label))
            order = order or next_order(self.order, label)
        self._take_label(label, order, weights_id)

    def _next_label(self) -> str:
        label = next_version(self.version)
        while label in self._used:
            label = next_version(label)
        return label

    def _take_label(self, label: str, order: int, weights_id: str) -> None:
        self.version, self.order = label, order or self.order
        self._used[label] = weights_id
        if self._changed is not None:
            self._changed()

    async def aclose(self) -> bool:
        """Stop an update that is under way; True: the runner may lack whole weights, and takes no more work."""
        interrupted = self._updating
        self._closing = True
        if self._open is not None:
            self._stop_waiting(self._open)
        if self._task is not None:
            self._task.cancel()
            # all that it awaits can be cancelled: it ends within a turn or two
            await wait_within([self._task], self._config.close_deadline_s)
        return interrupted or self.broken is not None or self.dropped

    def _ended(self, task: asyncio.Task[None]) -> None:
        # the next update may have begun in the turn in which this one ended
        if self._task is task:
            self._task = None
            # a task that was cancelled before its first step has not run `_update`
            self._updating = self._open is not None
        if task.cancelled():
            if not self._closing:
                # `asyncio.run` cancels all tasks at its end: the runner may lack whole weights
                self._fail(TaskCancelled("fdasync-weights"))
        else:
            # counts as read: a caller that was cancelled does not read it
            task.exception()

    @property
    def is_updating(self) -> bool:
        """Whether an update is under way, which may read its caller's buffers."""
        return self._updating

    async def _update(
        self,
        label: str,
        order: int,
        load: Loader,
        mode: Literal["abort", "keep"],
        folder: str | None,
        expected: WeightsFingerprint | None,
        weights_id: str,
        *,
        again: bool = False,
    ) -> None:
        """`folder`: that is loaded; None: tensors are. `weights_id`: of weights whose loader tells none. `again`:
        `label` is in use already."""
        try:
            await self.quiet()
            if again and folder is not None:
                if self.dropped:
                    # there is nothing to compare with: the same weights are brought again
                    await self.reload(folder)
                else:
                    await self._compare(label, folder)
                if self.broken is None:
                    if expected is not None:
                        await self._match(expected, self._runtime.capacity.weights_id)
                    self._take_label(label, order, self._runtime.capacity.weights_id)
                    self.go_on()
                    return
            await self._load(label, order, load, mode, expected, weights_id)
            self.folder = folder or ""
            self.go_on()
        finally:
            self._finish()

    async def _compare(self, label: str, folder: str) -> None:
        """Raise BadInput unless a folder holds the weights in use (or those that were until an update broke), and
        WeightsRejected if it cannot be read; both change nothing."""
        try:
            weights_id = await self._in_time("comparing weights", self._runtime.runner.read_weights_id(folder))
        except Exception as error:
            # raises the engine's failure where the worker died
            self._check()
            self.go_on()
            if isinstance(error, WeightsRejected):
                raise
            raise WeightsRejected(f"{type(error).__name__}: {error}") from error
        self._check()
        if weights_id != self._runtime.capacity.weights_id:
            self.go_on()
            problem = f"{label!r} is in use, and {folder} holds other weights"
            raise BadInput("version", problem, hint="give them a version of their own")

    async def _in_time(self, what: str, work: Awaitable[T]) -> T:
        """Wait for work of the runner; fails the engine where it takes longer than an update may."""
        limit_s = self._runtime.update_limit_s
        try:
            async with Within(limit_s):
                return await work
        except TimeoutError as error:
            late = not isinstance(error, DeadlineExceeded)
            self._fail(self._runtime.runner.overdue(what, limit_s) if late else error)
            self._check()
            raise

    async def _match(self, expected: WeightsFingerprint, held: str) -> None:
        """Raise WeightsDiffer, and stay paused, unless the weights in place are the expected ones.

        Args:
            held: their weights id.
        """
        if held == expected.weights_id:
            return
        tensor = ""
        if expected.tensors:
            try:
                told = await self._in_time("hashing weights", self._runtime.runner.fingerprint_weights(True))
                tensor = first_difference(expected, told)
            except WeightsBroken:
                # a runner that has no digests of tensors: the difference has no name
                self._check()
        self.broken = WeightsDiffer(expected.weights_id, held, tensor)
        raise self.broken

    async def _load(
        self,
        label: str,
        order: int,
        load: Loader,
        mode: Literal["abort", "keep"],
        expected: WeightsFingerprint | None,
        given_id: str,
    ) -> None:
        runtime = self._runtime
        try:
            weights_id = await self._in_time("loading weights", load())
            if expected is not None:
                if not weights_id:
                    told = await self._in_time("hashing weights", runtime.runner.fingerprint_weights())
                    weights_id = told.weights_id
                await self._match(expected, weights_id)
        except WeightsRejected:
            self.go_on()
            raise
        except Exception as error:
            self._break(error)
        self._check()
        self.dropped = False
        if mode == "abort":
            # only now: where weights are refused, no request is aborted
            self._abort()
        self.broken = None
        # random whatever the seed: no two updates may share a namespace, in this engine or in others on the same store
        weights_id = weights_id or given_id or secrets.token_hex(16)
        runtime.capacity = self._preparer.capacity = msgspec.structs.replace(runtime.capacity, weights_id=weights_id)
        runtime.namespace = self._preparer.namespace = namespace_of(runtime.capacity)
        runtime.bus.publish(WeightsChanged(version=label, namespace=runtime.namespace))
        self._take_label(label, order or next_order(self.order, label), weights_id)

    def _break(self, error: Exception) -> NoReturn:
        """Weights are in part replaced: stay paused, and raise why, or the engine's failure where the worker died."""
        self._check()
        broken = error if isinstance(error, WeightsBroken) else WeightsBroken(f"{type(error).__name__}: {error}")
        self.broken = broken
        raise broken from error

    def go_on(self) -> None:
        """Resume, unless the weights are broken or a pause is left. One that waits for requests lets them go on."""
        if self.sleeps or self.dropped:
            return
        if self._held or self.broken is not None or any(mode != "wait" for mode in self._pausers.values()):
            return
        self._runtime.bus.publish(ResumeRequested())
        if self._pausers:
            self._ask("wait")
        else:
            self._resumes += 1

    async def reload(self, folder: str = "") -> None:
        """Bring weights that a sleep dropped again, from a folder; "": the one that they came from. No step is in
        flight. The identities of blocks stay: it must hold the same weights.

        Raises WeightsRejected where the folder cannot be read any more (they stay dropped), WeightsDiffer where it
        holds others now, WeightsBroken.
        """
        capacity = self._runtime.capacity
        try:
            weights_id = await self._in_time("loading weights", self._runtime.runner.load_folder(folder or self.folder))
        except WeightsRejected:
            raise
        except Exception as error:
            self._break(error)
        self._check()
        if weights_id != capacity.weights_id:
            self.broken = WeightsDiffer(capacity.weights_id, weights_id)
            raise self.broken
        self.dropped = False

    def _abort(self) -> None:
        """End requests that ran with what they have, in the turn that reads WeightsChanged."""
        keys = [
            sample.key
            for request in self._runtime.processor.requests()
            for sample in request.samples
            if not sample.finish
        ]
        if keys:
            self._runtime.bus.publish(AbortRequested(keys=tuple(keys), begun_only=True))

    # -- sources --------------------------------------------------------------------------------------

    def _folder_loader(self, path: str) -> Loader:
        return lambda: self._runtime.runner.load_folder(path)

    def _tensors_loader(self, source: WeightSource) -> Loader:
        """Raises BadInput for an object that is no source."""
        checked = tensors_of(source)
        return lambda: self._load_tensors([meta for meta, _ in checked], [data for _, data in checked])

    def _group_loader(self, part: GroupTensors) -> Loader:
        return lambda: self._receive(part, first=True, last=True)

    async def _receive(self, part: GroupTensors, *, first: bool, last: bool) -> str:
        limit_s = _WORKER_SHARE * self._runtime.update_limit_s
        await self._runtime.runner.receive_tensors(part, limit_s, first=first, last=last)
        return ""

    async def _end_received(self) -> str:
        await self._runtime.runner.end_received()
        return ""

    async def _load_tensors(self, metas: list[TensorMeta], buffers: list[memoryview]) -> str:
        runner = self._runtime.runner
        await runner.begin_tensors(metas)
        for number, (meta, data) in enumerate(zip(metas, buffers, strict=True)):
            piece = max(_PIECE_NBYTES // ITEM_NBYTES[meta.dtype], 1) * ITEM_NBYTES[meta.dtype]
            for first in range(0, len(data), piece):
                await runner.write_tensor(number, first, data[first : first + piece])
                await asyncio.sleep(0)
        await runner.end_tensors()
        return ""


def _check_mode(mode: str) -> None:
    if mode not in ("abort", "keep"):
        raise BadInput("mode", f"{mode!r} is neither 'abort' nor 'keep'")
