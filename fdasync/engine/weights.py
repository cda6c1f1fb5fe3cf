"""Pauses and weight updates of one engine: stop planning, let steps end, load, begin a new root of the namespace.

An update is a task of the engine: a caller that is cancelled stops waiting, the load goes on to its end. Nothing old
can match afterwards in any tier, because every identity is chained from the new weights id (DECISIONS 1, 10). Knows
no blocks and no schedule; called by `engine/engine.py`.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fdasync.engine.prepare import namespace_of
from fdasync.errors import (
    BadInput,
    DeadlineExceeded,
    EngineClosed,
    TaskCancelled,
    UpdateUnderWay,
    WeightsBroken,
    WeightsRejected,
)
from fdasync.events.catalog import AbortRequested, PauseRequested, ResumeRequested, WeightsChanged
from fdasync.ipc.deadlines import Within, wait_within
from fdasync.runner.base import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.engine.config import EngineConfig
    from fdasync.engine.prepare import Preparer
    from fdasync.engine.runtime import Runtime

    NamedTensor = tuple[str, str, Sequence[int], Any]
    WeightSource = str | os.PathLike[str] | Sequence[NamedTensor]

# bytes handed to the runner at a time: other tasks of the loop run in between
_PIECE_NBYTES = 8 << 20
_ITEM_NBYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "uint16": 2, "float16": 2,
    "bfloat16": 2, "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip
# formats of buffers, as `struct` names them: raw bytes hold anything; of the others, those of a dtype's kind and size
_RAW_FORMATS = "Bbc"
_SIGNED, _UNSIGNED, _FLOAT = "bhilqn", "BHILQN", "efd"
_FORMATS = {
    "bool": "?", "uint8": _UNSIGNED, "uint16": _UNSIGNED, "uint32": _UNSIGNED, "uint64": _UNSIGNED, "int8": _SIGNED,
    "int16": _SIGNED, "int32": _SIGNED, "int64": _SIGNED, "float16": _FLOAT, "float32": _FLOAT, "float64": _FLOAT,
    # no format names these: they come in integers of their size
    "bfloat16": _SIGNED + _UNSIGNED, "float8_e4m3fn": _SIGNED + _UNSIGNED, "float8_e5m2": _SIGNED + _UNSIGNED,
}  # fmt: skip


class Weights:
    """One engine's weights.

    Args:
        fail: ends the engine.
        check: raises unless the engine is running.

    Attributes:
        version: the caller's label of the weights in use.
        broken: why the weights cannot be used; None while they can.
    """

    def __init__(
        self,
        config: EngineConfig,
        runtime: Runtime,
        preparer: Preparer,
        fail: Callable[[BaseException], None],
        check: Callable[[], None],
    ) -> None:
        self.version = config.weight_version
        self.broken: WeightsBroken | None = None
        self._config = config
        self._runtime = runtime
        self._preparer = preparer
        self._fail = fail
        self._check = check
        self._resumes = 0
        # a pause has returned, and nobody resumed since; and those who wait for theirs to return
        self._held = False
        self._pausers: set[object] = set()
        self._used = {config.weight_version}
        self._updating = False
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def pause(self) -> None:
        """See `Engine.pause`."""
        self._check()
        pauser = object()
        self._pausers.add(pauser)
        try:
            await self._quiet()
            # one who was resumed while he waited holds nothing
            self._held = self._held or pauser in self._pausers
        except asyncio.CancelledError:
            # who gave up waiting for the pause does not want it any more; others may
            if pauser in self._pausers:
                self._pausers.discard(pauser)
                if not self._updating:
                    self._go_on()
            raise
        finally:
            self._pausers.discard(pauser)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._check()
        if self.broken is not None:
            raise self.broken
        self._held = False
        self._pausers.clear()
        if not self._updating:
            # else the update goes on when it ends
            self._go_on()

    async def _quiet(self) -> None:
        """Until no step and no copy is in flight; kills what is stuck, and fails the engine (DECISIONS 10)."""
        driver = self._runtime.driver
        assert driver is not None
        limit_s = self._config.step_deadline_s * self._config.pipeline_depth
        resumes = self._resumes
        self._runtime.bus.publish(PauseRequested())

        def quiet() -> bool:
            # the turn that reads of the pause may still be to come; and who was resumed meanwhile never gets quiet
            return (driver.is_idle and driver.scheduler.is_paused) or self._resumes != resumes

        try:
            async with Within(limit_s):
                await driver.wait_until(quiet)
        except TimeoutError:
            self._fail(self._runtime.runner.overdue("the steps in flight at a pause", limit_s))
        self._check()

    async def update(self, version: int, source: WeightSource, mode: Literal["abort", "keep"]) -> None:
        """See `Engine.update_weights`."""
        self._check()
        label: Any = version
        if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < 1 << 63:
            raise BadInput("version", f"{version!r} is no version", limit="an integer from 0 on")
        if version in self._used:
            raise BadInput("version", f"{version} was used before", hint="a version is never used twice")
        if mode not in ("abort", "keep"):
            raise BadInput("mode", f"{mode!r} is neither 'abort' nor 'keep'")
        if self._updating:
            raise UpdateUnderWay("of this engine")
        load = self._loader(source)
        self._updating = True
        work = self._update(version, load, mode)
        self._task = task = asyncio.get_running_loop().create_task(work, name="fdasync-weights")
        task.add_done_callback(self._ended)
        # a caller who is cancelled stops waiting; an update that the engine's end cut short cancels no caller
        await asyncio.wait([task])
        if task.cancelled():
            self._check()
            raise EngineClosed("closing")
        task.result()  # of a task that is done

    async def aclose(self) -> bool:
        """Stop an update that is under way; True: the runner may lack whole weights, and can only be closed."""
        interrupted = self._updating
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            # what it waits for can be cancelled: a turn or two
            await wait_within([self._task], self._config.close_deadline_s)
        return interrupted or self.broken is not None

    def _ended(self, task: asyncio.Task[None]) -> None:
        # the next update may have begun in the turn in which this one ended
        if self._task is task:
            self._task = None
            # one that was cancelled before its first step
            self._updating = False
        if task.cancelled():
            if not self._closing:
                # from outside, as `asyncio.run` does to all tasks at its end: the runner may lack whole weights
                self._fail(TaskCancelled("fdasync-weights"))
        else:
            # it is the caller's; one who was cancelled does not ask
            task.exception()

    @property
    def is_updating(self) -> bool:
        """An update is under way; it may read its caller's buffers."""
        return self._updating

    async def _update(self, version: int, load: Callable[[], Any], mode: str) -> None:
        try:
            await self._load(version, load, mode)
        finally:
            self._updating = False

    async def _load(self, version: int, load: Callable[[], Any], mode: str) -> None:
        runtime = self._runtime
        await self._quiet()
        limit_s = self._config.start_deadline_s
        try:
            async with Within(limit_s):
                weights_id = await load()
        except WeightsRejected:
            self._go_on()
            raise
        except TimeoutError as error:
            late = not isinstance(error, DeadlineExceeded)
            self._fail(runtime.runner.overdue("loading weights", limit_s) if late else error)
            self._check()
            raise
        except Exception as error:
            # a worker that died has failed the engine by now
            self._check()
            broken = error if isinstance(error, WeightsBroken) else WeightsBroken(f"{type(error).__name__}: {error}")
            self.broken = broken
            raise broken from error
        self._check()
        if mode == "abort":
            # not before the weights are there: if they are refused, nothing has happened
            self._abort()
        self._used.add(version)
        self.version = version
        self.broken = None
        runtime.capacity = self._preparer.capacity = msgspec.structs.replace(runtime.capacity, weights_id=weights_id)
        runtime.namespace = self._preparer.namespace = namespace_of(runtime.capacity)
        runtime.bus.publish(WeightsChanged(version=version, namespace=runtime.namespace))
        self._go_on()

    def _go_on(self) -> None:
        if not self._held and not self._pausers and self.broken is None:
            self._resumes += 1
            self._runtime.bus.publish(ResumeRequested())

    def _abort(self) -> None:
        """End those that ran with what they have, in the turn that reads of the new weights."""
        keys = [
            sample.key for request in self._runtime.hub.requests() for sample in request.samples if not sample.finish
        ]
        if keys:
            self._runtime.bus.publish(AbortRequested(keys=tuple(keys), begun_only=True))

    # -- sources --------------------------------------------------------------------------------------

    def _loader(self, source: WeightSource) -> Callable[[], Any]:
        """Raises BadInput for what cannot be a source."""
        if isinstance(source, (str, os.PathLike)):
            path: Any = os.fspath(source)
            if not isinstance(path, str) or not path or "\0" in path or not _is_text(path):
                raise BadInput("source", f"{source!r} is no folder")
            return lambda: self._runtime.runner.load_folder(path)
        tensors: Any = source
        if not isinstance(tensors, Sequence) or isinstance(tensors, (bytes, bytearray, memoryview)):
            raise BadInput("source", f"{type(source).__name__} is neither a folder nor a sequence of tensors")
        checked = [_checked(number, entry) for number, entry in enumerate(tensors)]
        if not checked:
            raise BadInput("source", "holds no tensors")
        return lambda: self._load_tensors([meta for meta, _ in checked], [data for _, data in checked])

    async def _load_tensors(self, metas: list[TensorMeta], buffers: list[memoryview]) -> str:
        runner = self._runtime.runner
        await runner.begin_tensors(metas)
        for number, (meta, data) in enumerate(zip(metas, buffers, strict=True)):
            piece = max(_PIECE_NBYTES // _ITEM_NBYTES[meta.dtype], 1) * _ITEM_NBYTES[meta.dtype]
            for first in range(0, len(data), piece):
                await runner.write_tensor(number, first, data[first : first + piece])
                await asyncio.sleep(0)
        await runner.end_tensors()
        # real randomness, whatever the seed: two updates must never share a namespace, nor two engines' updates a store
        return secrets.token_hex(16)


def _checked(number: int, entry: Any) -> tuple[TensorMeta, memoryview]:
    """A tensor's description and its bytes. Raises BadInput naming it."""
    where = f"source[{number}]"
    if not isinstance(entry, tuple) or len(entry) != 4:
        raise BadInput(where, "is not a tuple (name, dtype, shape, buffer)")
    name, dtype, shape, buffer = entry
    if not isinstance(name, str) or not name or not _is_text(name):
        raise BadInput(where, f"{name!r} is no name of a tensor")
    where = f"source[{number}] {name!r}"
    if not isinstance(dtype, str) or dtype not in _ITEM_NBYTES:
        raise BadInput(where, f"dtype {dtype!r} is not known", limit=", ".join(_ITEM_NBYTES))
    if not _is_shape(shape):
        raise BadInput(where, f"{shape!r} is no shape")
    try:
        data = memoryview(buffer)
    except Exception as error:
        # exporting is the buffer's own code: it may refuse in any way
        raise BadInput(where, f"{type(buffer).__name__} gives no buffer: {error}") from None
    if not data.c_contiguous:
        raise BadInput(where, "is not contiguous", hint="copy it first")
    if not _holds(data, dtype):
        problem = f"its buffer holds items of {data.itemsize} bytes in format {data.format!r}, which is not {dtype}"
        raise BadInput(where, problem, hint="give values of that dtype in this machine's byte order, or raw bytes")
    want = math.prod(shape) * _ITEM_NBYTES[dtype]
    if data.nbytes != want:
        raise BadInput(where, f"has {data.nbytes} bytes, {dtype} {tuple(shape)} has {want}")
    return TensorMeta(name, dtype, tuple(shape)), data.cast("B") if data.nbytes else memoryview(b"")


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, Sequence) or isinstance(shape, (str, bytes, bytearray, memoryview)):
        return False
    return all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 1 << 63 for size in shape)


def _holds(data: memoryview, dtype: str) -> bool:
    """Whether items of a buffer may be this dtype's; other byte orders and structs never are."""
    form = data.format.removeprefix("@")
    if len(form) != 1:
        return False
    return form in _RAW_FORMATS or (form in _FORMATS[dtype] and data.itemsize == _ITEM_NBYTES[dtype])


def _is_text(text: str) -> bool:
    """False for lone surrogates: no file and no message can hold them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_broken(weights: Weights | None) -> None:
    """Raises WeightsBroken while no weights can be used."""
    if weights is not None and weights.broken is not None:
        raise weights.broken
