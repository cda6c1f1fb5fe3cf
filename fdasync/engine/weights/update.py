"""One update of one engine's weights: pause, load, compare, begin a new root of the namespace, go on.

Blocks of the old weights match no request afterwards, in any tier, because every identity is chained from the new
weights id (docs/design.md, rules 1, 10). A label is no part of an identity. Knows no blocks and no schedule. Called by
`weights.py` and `parts.py`, in a task of theirs, and by `sleep.py`.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Literal, NoReturn

import msgspec

from fdasync.engine.prepare import namespace_of
from fdasync.errors import BadInput, WeightsBroken, WeightsDiffer, WeightsRejected
from fdasync.events.catalog import AbortRequested, WeightsChanged
from fdasync.request import WeightsFingerprint, first_difference, next_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync.engine.prepare import Preparer
    from fdasync.engine.runtime import Runtime
    from fdasync.engine.weights.loaders import Loader
    from fdasync.engine.weights.pausing import Pausing
    from fdasync.engine.weights.state import WeightsState
    from fdasync.engine.weights.tasks import UpdateTask

UpdateMode = Literal["abort", "keep"]


class Asked(msgspec.Struct, frozen=True):
    """An update as it was asked for, checked.

    Attributes:
        label: of the new weights.
        order: of the label; 0: the next one.
        mode: whether requests that ran end.
        expected: what the weights in place must be; None: anything.
        weights_id: of weights whose loader tells none; "": a random one.
        by_group: tensors of a group, while the engine is paused by its callers.
    """

    label: str
    order: int
    mode: UpdateMode
    expected: WeightsFingerprint | None
    weights_id: str
    by_group: bool = False


class Updater:
    """See the module.

    Args:
        check: raises unless the engine is running.
    """

    def __init__(
        self,
        state: WeightsState,
        pausing: Pausing,
        task: UpdateTask,
        runtime: Runtime,
        preparer: Preparer,
        check: Callable[[], None],
    ) -> None:
        self._state = state
        self._pausing = pausing
        self._task = task
        self._runtime = runtime
        self._preparer = preparer
        self._check = check

    async def update(self, asked: Asked, load: Loader, folder: str | None) -> None:
        """All of an update.

        Args:
            folder: that is loaded; None: tensors are.
        """
        state = self._state
        try:
            await self._pausing.quiet()
            comparable = asked.label == state.version and state.broken is None and not state.dropped
            if folder is None or not comparable or not await self._is_in_use(asked, folder):
                await self._load(asked, load, folder)
            self._pausing.go_on()
        finally:
            self._task.finish()

    async def _is_in_use(self, asked: Asked, folder: str) -> bool:
        """Whether a folder that comes under the label in use holds the weights in use; then nothing is loaded, and no
        request ends or starts again.

        Raises WeightsRejected if it cannot be read, and BadInput if it holds them and others are expected; both change
        nothing.
        """
        state, runner, held = self._state, self._runtime.runner, self._runtime.capacity.weights_id
        try:
            base = await self._task.in_time("comparing weights", runner.delta_base(folder))
            weights_id = await self._task.in_time("comparing weights", runner.read_weights_id(folder))
        except Exception as error:
            # raises the engine's failure where the worker died
            self._check()
            self._pausing.go_on()
            if isinstance(error, WeightsRejected):
                raise
            raise WeightsRejected(f"{type(error).__name__}: {error}") from error
        self._check()
        if weights_id != held:
            return False
        if asked.expected is not None and asked.expected.weights_id != held:
            self._pausing.go_on()
            problem = f"{asked.label!r} is in use, and its weights are {held}, not {asked.expected.weights_id}"
            raise BadInput("expected", problem, hint="nothing was changed")
        if not base:
            state.came_from(folder, is_delta=False)
        state.take_label(asked.label, asked.order)
        state.goes_on = None
        return True

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
                told = await self._task.in_time("hashing weights", self._runtime.runner.fingerprint_weights(True))
                tensor = first_difference(expected, told)
            except WeightsBroken:
                # a runner that has no digests of tensors: the difference has no name
                self._check()
        raise self._state.breaks(WeightsDiffer(expected.weights_id, held, tensor), differs=True)

    async def _load(self, asked: Asked, load: Loader, folder: str | None) -> None:
        runtime, state, task = self._runtime, self._state, self._task
        # a delta to weights that a sleep dropped: these come first, and the delta is the last of their sources
        again = state.sources if state.dropped and folder is not None and folder in state.sources[-1:] else ()
        base = ""
        try:
            if folder is not None:
                base = await task.in_time("loading weights", runtime.runner.delta_base(folder))
            weights_id = await (self._load_folders(again) if again else task.in_time("loading weights", load()))
        except WeightsRejected:
            self._pausing.go_on()
            raise
        except Exception as error:
            self.broke(error)
        self._check()
        if asked.expected is not None:
            if not weights_id:
                try:
                    told = await task.in_time("hashing weights", runtime.runner.fingerprint_weights())
                except Exception as error:
                    self.broke(error, differs=True)
                weights_id = told.weights_id
            await self._match(asked.expected, weights_id)
            self._check()
        # dropped weights that came back: what was computed with them is still of use
        is_back = state.dropped and weights_id == runtime.capacity.weights_id and asked.label == state.version
        state.dropped = False
        if again:
            state.sources, state.is_delta = again, bool(base)
        else:
            state.came_from(folder or "", is_delta=bool(base))
        state.broken, state.differs = None, False
        if not is_back:
            if asked.mode == "abort":
                # only now: where weights are refused, no request is aborted
                self._abort()
            # random whatever the seed: no two updates may share a namespace, in this engine or another on the same
            # store
            weights_id = weights_id or asked.weights_id or secrets.token_hex(16)
            runtime.capacity = self._preparer.capacity = msgspec.structs.replace(
                runtime.capacity, weights_id=weights_id
            )
            namespace = runtime.namespace = self._preparer.namespace = namespace_of(runtime.capacity)
            runtime.bus.publish(WeightsChanged(version=asked.label, namespace=namespace, weights_id=weights_id))
        state.take_label(asked.label, asked.order or next_order(state.order, asked.label))
        state.goes_on = asked.label if asked.by_group and state.held else None

    async def _load_folders(self, folders: Sequence[str]) -> str:
        """Load a checkpoint and deltas to it, in their order; returns the weights id. Raises as the runner does:
        WeightsRejected, and then the runner has what it had, or nothing."""
        runner = self._runtime.runner
        weights_id = ""
        for number, path in enumerate(folders):
            try:
                weights_id = await self._task.in_time("loading weights", runner.load_folder(path))
            except WeightsRejected:
                if number:
                    # the folders before it were loaded, and are not all
                    await self._task.in_time("forgetting weights", runner.forget_weights())
                raise
        return weights_id

    def broke(self, error: Exception, *, differs: bool = False) -> NoReturn:
        """Weights are in part replaced: stay paused, and raise why, or the engine's failure where the worker died."""
        self._check()
        broken = error if isinstance(error, WeightsBroken) else WeightsBroken(f"{type(error).__name__}: {error}")
        raise self._state.breaks(broken, differs=differs) from error

    async def reload(self) -> None:
        """Bring weights that a sleep dropped again, from all folders that they came from. No step is in flight. The
        identities of blocks stay: it must be the same weights.

        Raises WeightsRejected where a folder cannot be read any more (they stay dropped), WeightsDiffer where one holds
        others now, WeightsBroken.
        """
        state = self._state
        weights_id = ""
        try:
            weights_id = await self._load_folders(state.sources)
        except WeightsRejected:
            raise
        except Exception as error:
            self.broke(error)
        self._check()
        held = self._runtime.capacity.weights_id
        if weights_id != held:
            raise state.breaks(WeightsDiffer(held, weights_id), differs=True)
        state.broken, state.dropped, state.differs = None, False, False

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
