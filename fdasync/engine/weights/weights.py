"""One engine's weights: joins pauses, updates and groups, and takes the calls that change weights.

An update is a task of the engine: a caller that is cancelled stops waiting, and the load goes on to its end. Made by
`engine/engine.py`; called by it and by `fdasync_fleet/instance/instance.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.engine.weights.changes import Changes
from fdasync.engine.weights.control import UPDATES, Control
from fdasync.engine.weights.groups import Groups
from fdasync.engine.weights.loaders import Loaders
from fdasync.engine.weights.parts import PartUpdates
from fdasync.engine.weights.pausing import Pausing
from fdasync.engine.weights.room import Room
from fdasync.engine.weights.sleep import Sleep
from fdasync.engine.weights.source import folder_of, group_tensors_of
from fdasync.engine.weights.state import WeightsState
from fdasync.engine.weights.update import Asked, Updater
from fdasync.errors import ConfigError, WeightsBroken
from fdasync.events.catalog import WeightsRelabelled
from fdasync.request import check_update_mode, checked_fingerprint, checked_version, next_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.engine.config import EngineConfig
    from fdasync.engine.prepare import Preparer
    from fdasync.engine.runtime import Runtime
    from fdasync.engine.weights.update import UpdateMode
    from fdasync.request import WeightsFingerprint, WeightSource
    from fdasync.runner.base import TensorMeta


class Weights:
    """See the module.

    Args:
        fail: ends the engine.
        check: raises unless the engine is running.
        changed: called when the weights or their label have changed; None: nothing is.

    Attributes:
        state: what is known of the weights in use.
        control: what the engine does.
        changes: what changes it.
        pausing: its pauses.
        parts: updates in parts.
        groups: trainers' groups.
        memory: sleeps and wakes.
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
        state = WeightsState(str(config.weight_version), str(config.model), changed)
        self.state = state
        self.control = control = Control(state)
        self.pausing = pausing = Pausing(control, config, runtime, fail, check)
        self.changes = changes = Changes(control, pausing, runtime, fail, check)
        self._loaders = Loaders(runtime)
        room = Room(runtime, state, control, pausing, changes, self._loaders, fail, check)
        updater = Updater(room, preparer)
        self._updater = updater
        self.parts = PartUpdates(room, updater)
        self.groups = Groups(room, config.weights_interface)
        self.memory = Sleep(room, updater)
        self._config = config
        self._runtime = runtime
        self._check = check
        # of the last group's tensors, which were checked
        self._known: tuple[TensorMeta, ...] = ()

    async def update(
        self,
        version: str | int | None,
        source: WeightSource,
        mode: UpdateMode,
        order: int = 0,
        expected: str | WeightsFingerprint | None = None,
        weights_id: str = "",
    ) -> None:
        """See `Engine.update_weights`. `order`, `weights_id`: as in `Asked`."""
        self._check()
        state, control = self.state, self.control
        wanted = checked_fingerprint(expected)
        checked_fingerprint(weights_id or None)
        part = group_tensors_of(source, self._known)
        self._known = self._known if part is None else part.tensors
        if control.in_parts:
            await self.parts.take(version, part, wanted)
            return
        label = state.new_label(version, goes_on=part is not None)
        check_update_mode(mode)
        control.check("update_weights")
        folder = None if part is not None else folder_of(source)
        # tensors that this update leaves out would stay from the refused update, unless the whole is compared
        whole = control.weights == "differs" and wanted is None
        if part is not None:
            load = self._loaders.group(part, whole=whole)
        elif folder is None:
            load = self._loaders.tensors(source, whole=whole)
        else:
            load = self._loaders.folder(folder)
        asked = Asked(
            label=label,
            order=order,
            mode=mode,
            expected=wanted,
            weights_id=weights_id,
            by_group=part is not None and control.held,
        )
        await self.changes.make("update_weights", lambda: self._updater.update(asked, load, folder))

    def relabel(self, version: str | int, order: int = 0) -> None:
        """See `Engine.set_weight_version`. `order`: of this label; 0: the next one."""
        self._check()
        state = self.state
        if self.control.in_parts and self.parts.has_label(version):
            return
        self.control.check("set_weight_version")
        label = checked_version(version)
        if label != state.version:
            self._runtime.bus.publish(WeightsRelabelled(version=label))
            order = order or next_order(state.order, label)
            state.goes_on = state.goes_on and label
        state.take_label(label, order)

    async def fingerprint(self) -> str:
        """See `Engine.weights_fingerprint`."""
        self._check()
        told: list[str] = []
        await self.changes.make("weights_fingerprint", lambda: self._hash(told))
        return told[0]

    async def _hash(self, told: list[str]) -> None:
        try:
            await self.pausing.quiet()
            read = self._runtime.runner.fingerprint_weights()
            told.append((await self.changes.in_time("hashing weights", read)).weights_id)
        except WeightsBroken as error:
            # raises the engine's failure where the worker died
            self._check()
            raise ConfigError("runner", error.problem) from error

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self.pausing.resume()
        self.state.goes_on = None

    async def aclose(self) -> bool:
        """Stop what is under way; True: the runner may lack whole weights or memory, and takes no more work."""
        self.parts.stop()
        change = await self.changes.aclose(self._config.close_deadline_s)
        # ranks that meet change no weights
        interrupted = change in UPDATES and change != "meeting"
        return interrupted or self.control.weights != "in_place" or self.control.sleeps
