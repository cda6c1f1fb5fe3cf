"""The groups that a runner is a rank of, by name, and why earlier groups are gone; the updates that come by them.

Made by `opened_runner.py`.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from fdasync.errors import WeightsBroken, WeightsRejected
from fdasync_transformers.weights.groups.group import JoinedGroup
from fdasync_transformers.weights.groups.reaching import reach
from fdasync_transformers.weights.groups.receiving import ReceivePlan, TensorReceiver

if TYPE_CHECKING:
    from fdasync.request import GroupTensors, WeightsGroup
    from fdasync_transformers.weights.groups.receiving import Incoming
    from fdasync_transformers.weights.update import LiveWeights

# names are clients': of so many that were left it is known why
_MOST_LEFT = 16


class JoinedGroups:
    """See the module. Methods that have the name of a verb of `Runner` do what it says.

    Args:
        device: of the model, for NCCL.
        weights: of the model, which the groups' tensors replace.
    """

    def __init__(self, device: torch.device, weights: LiveWeights) -> None:
        self._device = device
        self._weights = weights
        self._groups: dict[str, JoinedGroup] = {}
        # of groups that were left, the latest last
        self._why: dict[str, str] = {}
        # of the last update: its tensors, bucket and device, and where they go
        self._plan: tuple[tuple[Incoming, ...], tuple[int, torch.device], ReceivePlan] | None = None

    async def reach_group(self, group: WeightsGroup) -> None:
        if not self._holds(group):
            await reach(group)

    async def join_group(self, group: WeightsGroup, interface: str, limit_s: float, stop: int = -1) -> None:
        if self._holds(group):
            return
        self.leave_group(group.name)
        on_gpu = self._device.type == "cuda"
        if group.backend == "nccl" and not on_gpu:
            raise WeightsRejected(f"group {group.name!r}: this model is on a CPU, and NCCL is between GPUs; use gloo")
        with torch.cuda.device(self._device) if on_gpu else nullcontext():
            self._groups[group.name] = JoinedGroup(group, interface, limit_s=limit_s, stop=stop)
        self._why.pop(group.name, None)

    def leave_group(self, name: str) -> None:
        self._leave(name, "it was left, as somebody asked")

    async def receive_tensors(self, source: GroupTensors, limit_s: float, *, first: bool, last: bool) -> None:
        until = asyncio.get_running_loop().time() + limit_s
        weights, group = self._weights, self.get(source.group)
        try:
            weights.begin_tensors(source.tensors, first=first, last=last)
            weights.touch()
            problem = ""
            try:
                plan = self._plan_of(source, weights.incoming, group)
                await TensorReceiver(group, plan, checksum=source.checksum).run(until)
            except WeightsBroken as error:
                problem = error.problem
            except (RuntimeError, MemoryError) as error:
                # no room for a buffer, or a device that failed: other ranks must hear of it
                problem = f"{type(error).__name__}: {error}"
            weights.received(problem, last=last)
        except (WeightsRejected, WeightsBroken) as error:
            raise type(error)(self._failed(source.group, error.problem)) from error
        except BaseException:  # a cancelled receive, too: its group is left, then it is raised
            self.leave_group(source.group)
            raise

    def _plan_of(self, source: GroupTensors, incoming: tuple[Incoming, ...], group: JoinedGroup) -> ReceivePlan:
        """The last update's plan, if its tensors were the same (parameters stay where they are); else a new one."""
        asked = (source.bucket_nbytes, group.device)
        if self._plan is None or self._plan[0] is not incoming or self._plan[1] != asked:
            self._plan = incoming, asked, ReceivePlan(incoming, source.bucket_nbytes, group.device)
        return self._plan[2]

    def _holds(self, group: WeightsGroup) -> bool:
        """Whether this very group is joined."""
        held = self._groups.get(group.name)
        return held is not None and held.spec == group

    def get(self, name: str) -> JoinedGroup:
        """Raises WeightsRejected, which says what is joined and why this one is not."""
        group = self._groups.get(name)
        if group is None:
            joined = ", ".join(repr(other) for other in self._groups) or "none"
            why = self._why.get(name, "nobody has joined it")
            raise WeightsRejected(f"no group {name!r} is joined here: {why}; joined are: {joined}")
        return group

    def _leave(self, name: str, why: str) -> bool:
        """Leave a group; False: there is none of that name."""
        group = self._groups.pop(name, None)
        if group is None:
            return False
        group.close()
        self._why[name] = why
        while len(self._why) > _MOST_LEFT:
            del self._why[next(iter(self._why))]
        return True

    def _failed(self, name: str, problem: str) -> str:
        """Leave a group by which an update failed; returns the problem, and that the group was left for it."""
        if not self._leave(name, f"it was left when an update by it failed ({problem})"):
            return problem
        return f"{problem}; group {name!r} was left, since nobody knows what its rank 0 has sent: join it anew"

    def close(self) -> None:
        """Leave all."""
        for name in list(self._groups):
            self.leave_group(name)
