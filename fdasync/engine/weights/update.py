"""One update of one engine's weights: pause, load, compare, begin a new root of the namespace.

The engine goes on at the end of the change (`changes.py`). Blocks of the old weights match no request afterwards, in
any tier, because every identity is chained from the new weights id (docs/design.md, rules 1, 10). A label is no part of
an identity. Knows no blocks and no schedule. Called by `weights.py`, `parts.py` and `sleep.py`.
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
    from collections.abc import Sequence

    from fdasync.engine.prepare import Preparer
    from fdasync.engine.weights.loaders import Loader
    from fdasync.engine.weights.room import Room

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
    """See the module."""

    def __init__(self, room: Room, preparer: Preparer) -> None:
        self._room = room
        self._preparer = preparer

    async def update(self, asked: Asked, load: Loader, folder: str | None) -> None:
        """All of an update.

        Args:
            folder: that is loaded; None: tensors are.
        """
        await self._room.pausing.quiet()
        comparable = asked.label == self._room.state.version and self._room.control.weights == "in_place"
        if folder is None or not comparable or not await self._is_in_use(asked, folder):
            await self._load(asked, load, folder)

    async def _is_in_use(self, asked: Asked, folder: str) -> bool:
        """Whether a folder that comes under the label in use holds the weights in use; then nothing is loaded, and no
        request ends or starts again.

        Raises WeightsRejected if it cannot be read, and BadInput if it holds them and others are expected; both change
        nothing.
        """
        state, runner, held = self._room.state, self._room.runtime.runner, self._room.runtime.capacity.weights_id
        try:
            base = await self._room.changes.in_time("comparing weights", runner.delta_base(folder))
            weights_id = await self._room.changes.in_time("comparing weights", runner.read_weights_id(folder))
        except Exception as error:
            # raises the engine's failure where the worker died
            self._room.check()
            if isinstance(error, WeightsRejected):
                raise
            raise WeightsRejected(f"{type(error).__name__}: {error}") from error
        self._room.check()
        if weights_id != held:
            return False
        if asked.expected is not None and asked.expected.weights_id != held:
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
                told = await self._room.changes.in_time(
                    "hashing weights", self._room.runtime.runner.fingerprint_weights(True)
                )
                tensor = first_difference(expected, told)
            except WeightsBroken:
                # a runner that has no digests of tensors: the difference has no name
                self._room.check()
        raise self.breaks(WeightsDiffer(expected.weights_id, held, tensor), differs=True)

    async def _load(self, asked: Asked, load: Loader, folder: str | None) -> None:
        runtime, state, control, changes = self._room.runtime, self._room.state, self._room.control, self._room.changes
        away = control.weights != "in_place"
        # a delta to weights that a sleep dropped: these come first, and the delta is the last of their sources
        again = (
            state.sources
            if control.weights == "dropped" and folder is not None and folder in state.sources[-1:]
            else ()
        )
        base = ""
        try:
            if folder is not None:
                base = await changes.in_time("loading weights", runtime.runner.delta_base(folder))
            weights_id = await (self._load_folders(again) if again else changes.in_time("loading weights", load()))
        except WeightsRejected:
            raise
        except Exception as error:
            self.broke(error)
        self._room.check()
        if asked.expected is not None:
            if not weights_id:
                try:
                    told = await changes.in_time("hashing weights", runtime.runner.fingerprint_weights())
                except Exception as error:
                    self.broke(error, differs=True)
                weights_id = told.weights_id
            await self._match(asked.expected, weights_id)
            self._room.check()
        # weights that were dropped or broken came back: what was computed with them is still of use
        is_back = away and weights_id == runtime.capacity.weights_id and asked.label == state.version
        if again:
            state.sources, state.is_delta = again, bool(base)
        else:
            state.came_from(folder or "", is_delta=bool(base))
        control.mends()
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
        state.goes_on = asked.label if asked.by_group and control.held else None

    async def _load_folders(self, folders: Sequence[str]) -> str:
        """Load a checkpoint and deltas to it, in their order; returns the weights id. Raises as the runner does:
        WeightsRejected, and then the runner has what it had, or nothing."""
        runner = self._room.runtime.runner
        weights_id = ""
        for number, path in enumerate(folders):
            try:
                weights_id = await self._room.changes.in_time("loading weights", runner.load_folder(path))
            except WeightsRejected:
                if number:
                    # the folders before it were loaded, and are not all
                    await self._room.changes.in_time("forgetting weights", runner.forget_weights())
                raise
        return weights_id

    def broke(self, error: Exception, *, differs: bool = False) -> NoReturn:
        """Weights are in part replaced: stay paused, and raise why, or the engine's failure where the worker died."""
        self._room.check()
        broken = error if isinstance(error, WeightsBroken) else WeightsBroken(f"{type(error).__name__}: {error}")
        raise self.breaks(broken, differs=differs) from error

    async def reload(self) -> None:
        """Bring weights that a sleep dropped again, from all folders that they came from. No step is in flight. The
        identities of blocks stay: it must be the same weights.

        Raises WeightsRejected where a folder cannot be read any more (they stay dropped), WeightsDiffer where one holds
        others now, WeightsBroken.
        """
        weights_id = ""
        try:
            weights_id = await self._load_folders(self._room.state.sources)
        except WeightsRejected:
            raise
        except Exception as error:
            self.broke(error)
        self._room.check()
        held = self._room.runtime.capacity.weights_id
        if weights_id != held:
            raise self.breaks(WeightsDiffer(held, weights_id), differs=True)
        self._room.control.mends()

    def breaks(self, error: WeightsBroken, *, differs: bool = False) -> WeightsBroken:
        """The weights cannot be used any more; returns why."""
        self._room.control.breaks(error, differs=differs)
        self._room.state.sources = ()
        return error

    def _abort(self) -> None:
        """End requests that ran with what they have, in the turn that reads WeightsChanged."""
        keys = [
            sample.key
            for request in self._room.runtime.processor.requests()
            for sample in request.samples
            if not sample.finish
        ]
        if keys:
            self._room.runtime.bus.publish(AbortRequested(keys=tuple(keys), begun_only=True))
