"""The runner of the chaos harness: the synthetic one, with weights that a trainer's group brings, and wakes that fail.

Its weights are tensors of one number each, which is the synthetic model's `weights_id`. They are received by the
transformers plugin's own code (`fdasync_transformers.weights.groups`) over gloo. From the first byte on the model's
number is one that no weights have, until all elements of all tensors agree: a step on torn weights shows in tokens.

The harness asks for things by files in `ChaosConfig.orders`, which a timer looks for. torch takes seconds to import, so
it is imported when it is asked for, beside the loop. Found by its entry point (`write_plugin`) in every process that
computes; started by `fleet.py`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fdasync.errors import InvariantBroken, WakeFailed, WeightsBroken, WeightsRejected
from fdasync.request import TensorMeta
from fdasync.runner.synthetic import SyntheticConfig, SyntheticRunner

if TYPE_CHECKING:
    import msgspec

    from fdasync.request import GroupTensors, MemoryPart, WeightsGroup
    from fdasync.runner.base import Capacity, RunnerLimits

NAME = "chaos"
#: a broadcast each: long enough to be met half-way
PARTS, PART_WORDS = 12, 1 << 16
METAS = tuple(TensorMeta(f"weights.{number}", "int64", (PART_WORDS,)) for number in range(PARTS))
# weights that nobody has
_TORN = 0xDEAD
_LOOK_S = 0.25


class ChaosConfig(SyntheticConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attributes:
    orders: folder of the harness's files; the same for all instances of a fleet.
    """

    orders: str = ""


class ChaosRunner(SyntheticRunner):
    """See the module."""

    config_type: ClassVar[type[msgspec.Struct]] = ChaosConfig

    def __init__(self, config: ChaosConfig, limits: RunnerLimits) -> None:
        super().__init__(config, limits)
        self._orders = Path(config.orders)
        self._parts = np.zeros((PARTS, PART_WORDS), np.int64)
        self._groups: dict[str, Any] = {}
        self._warming: threading.Thread | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def open(self) -> Capacity:
        capacity = await super().open()
        self._look()
        return capacity

    async def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for name in list(self._groups):
            await self.leave_group(name)
        await super().aclose()

    # -- what the harness asks for ----------------------------------------------------------------------

    def _look(self) -> None:
        if self._warming is None and warm_order(self._orders, os.getpid()).exists():
            # beside the loop, which goes on with steps: an import in it would be an overdue one
            self._warming = threading.Thread(target=self._warm, daemon=True)
            self._warming.start()
        if self._warming is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _warm(self) -> None:
        import fdasync_transformers.weights.groups.group
        import fdasync_transformers.weights.groups.receiving  # noqa: F401 - both are imported for later

        warm_order(self._orders, os.getpid()).unlink(missing_ok=True)

    async def regain_memory(self, part: MemoryPart) -> None:
        order = wake_order(self._orders, os.getpid())
        if order.exists():
            order.unlink()
            raise WakeFailed(part, "the harness has its memory")
        await super().regain_memory(part)

    # -- groups -----------------------------------------------------------------------------------------

    async def join_group(self, group: WeightsGroup, interface: str, limit_s: float, stop: int = -1) -> None:
        from fdasync_transformers.weights.groups.group import JoinedGroup

        await self.leave_group(group.name)
        self._groups[group.name] = JoinedGroup(group, interface, limit_s=limit_s, stop=stop)

    async def leave_group(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()

    async def receive_tensors(self, source: GroupTensors, limit_s: float, *, first: bool, last: bool) -> None:
        import torch
        from fdasync_transformers.parallel.cuts import Target
        from fdasync_transformers.weights.groups.receiving import Incoming, ReceivePlan, TensorReceiver

        group = self._groups.get(source.group)
        try:
            if group is None:
                raise WeightsRejected(f"no group {source.group!r} was joined, or it was left since")
            if source.tensors != METAS or not (first and last):
                raise WeightsRejected("the model's tensors, all in one part, are all that it takes")
            if self._flights or self._copies or "weights" in self._released:
                raise InvariantBroken("weights are received beside steps or copies, or without memory")
            places = [Target.whole(torch.from_numpy(part)) for part in self._parts]
            tensors = [
                Incoming(meta.name, place.tensor.dtype, place.tensor.nbytes, place)
                for meta, place in zip(METAS, places, strict=True)
            ]
            self._loading, self.weights_id = True, _TORN
            until = asyncio.get_running_loop().time() + limit_s
            try:
                plan = ReceivePlan(tensors, source.bucket_nbytes, group.device)
                await TensorReceiver(group, plan, checksum=source.checksum).run(until)
            except RuntimeError as error:
                raise WeightsBroken(f"{type(error).__name__}: {error}") from error
            finally:
                self._loading = False
            number = int(self._parts[0, 0])
            if not (self._parts == number).all():
                raise WeightsBroken("the tensors that came do not agree")
            await self._load(number)
        except BaseException:
            await self.leave_group(source.group)
            raise


def warm_order(orders: Path, pid: int) -> Path:
    """Asks the process to import torch; it removes the file when it has."""
    return orders / f"warm-{pid}"


def wake_order(orders: Path, pid: int) -> Path:
    """While this file is there, the next part that the process is to take back is refused, once."""
    return orders / f"wake-{pid}"


def write_plugin(folder: Path) -> None:
    """Make the runner's entry point in a folder that child processes have on their path."""
    info = folder / "fdasync_chaos-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fdasync-chaos\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fdasync.runners]\n{NAME} = {__name__}:{ChaosRunner.__name__}\n")
