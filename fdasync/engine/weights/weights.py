"""One engine's weights: joins pauses, updates and groups, and takes the calls that change weights.

An update is a task of the engine: a caller that is cancelled stops waiting, and the load goes on to its end. Made by
`engine/engine.py`; called by it and by `fdasync_fleet/instance/instance.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.engine.weights.groups import Groups
from fdasync.engine.weights.loaders import Loaders
from fdasync.engine.weights.parts import PartUpdates
from fdasync.engine.weights.pausing import Pausing
from fdasync.engine.weights.source import folder_of, group_tensors_of
from fdasync.engine.weights.state import WeightsState
from fdasync.engine.weights.tasks import UpdateTask
from fdasync.engine.weights.update import Asked, Updater
from fdasync.errors import Asleep, ConfigError, WeightsBroken
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
        state: what is known of the weights in use, and what the engine does.
        pausing: its pauses.
        parts: updates in parts.
        groups: trainers' groups.
        updater: brings weights that a sleep dropped again.
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
        self.pausing = pausing = Pausing(state, config, runtime, fail, check)
        self._task = task = UpdateTask(state, runtime, fail, check)
        self._loaders = loaders = Loaders(runtime)
        self.updater = Updater(state, pausing, task, runtime, preparer, check)
        self.parts = PartUpdates(state, pausing, task, self.updater, loaders, runtime, check)
        self.groups = Groups(state, pausing, task, runtime, config.weights_interface, fail, check)
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
        state = self.state
        wanted = checked_fingerprint(expected)
        checked_fingerprint(weights_id or None)
        part = group_tensors_of(source, self._known)
        self._known = self._known if part is None else part.tensors
        if state.is_open:
            await self.parts.take(version, part, wanted)
            return
        label = state.new_label(version, goes_on=part is not None)
        check_update_mode(mode)
        state.check_idle()
        state.check_awake("update_weights")
        folder = None if part is not None else folder_of(source)
        # tensors that this update leaves out would stay from the refused update, unless the whole is compared
        whole = state.differs and wanted is None
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
            by_group=part is not None and state.held,
        )
        await self._task.run(self.updater.update(asked, load, folder))

    def relabel(self, version: str | int, order: int = 0) -> None:
        """See `Engine.set_weight_version`. `order`: of this label; 0: the next one."""
        self._check()
        state = self.state
        if self.parts.has_label(version):
            return
        if state.broken is not None:
            raise state.broken
        label = checked_version(version)
        state.check_idle()
        if label != state.version:
            self._runtime.bus.publish(WeightsRelabelled(version=label))
            order = order or next_order(state.order, label)
            state.goes_on = state.goes_on and label
        state.take_label(label, order)

    async def fingerprint(self) -> str:
        """See `Engine.weights_fingerprint`."""
        self._check()
        state = self.state
        if state.broken is not None:
            raise state.broken
        state.check_idle()
        state.check_awake("weights_fingerprint")
        if state.dropped:
            raise Asleep("weights_fingerprint", ("weights",))
        told: list[str] = []
        await self._task.run(self._hash(told))
        return told[0]

    async def _hash(self, told: list[str]) -> None:
        try:
            await self.pausing.quiet()
            read = self._runtime.runner.fingerprint_weights()
            told.append((await self._task.in_time("hashing weights", read)).weights_id)
        except WeightsBroken as error:
            # raises the engine's failure where the worker died
            self._check()
            raise ConfigError("runner", error.problem) from error
        finally:
            self._task.finish()
            self.pausing.go_on()

    async def aclose(self) -> bool:
        """Stop an update that is under way; True: the runner may lack whole weights, and takes no more work."""
        state = self.state
        state.closing = True
        await self.groups.aclose(self._config.close_deadline_s)
        interrupted = state.updating
        self.parts.stop()
        await self._task.aclose(self._config.close_deadline_s)
        return interrupted or state.broken is not None or state.dropped
