"""The device services that an executor's steps and copies share: streams, events, page-locked buffers, the port.

On a CPU streams and events do nothing, nothing is page-locked, and work is done when it is queued (or a turn later,
where kernels run in Triton's interpreter, for tests). Knows no model and no steps. Made by `bound_runner.py` when it
binds, on the loop of the executor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fdasync.gpu import packed_copy
from fdasync.gpu.pools import EventPool, PinnedPool
from fdasync.gpu.ports.adaptive import AdaptivePort
from fdasync.gpu.ports.at_once import AtOncePort
from fdasync.gpu.ports.fake import AlreadyDone, FakePort
from fdasync.gpu.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from fdasync.gpu.completion import CompletionPort, Hold

# most bytes of the buffers of steps: those in flight need a few megabytes each, but for hidden states of long prompts
_PINNED_NBYTES = 4 << 30


@dataclass(frozen=True)
class GpuServices:
    """See the module.

    Attributes:
        streams: of the device, by name.
        events: held until their completion was seen.
        pinned: page-locked buffers of copies to and from the device.
        port: makes futures of events.
        graph_memory: where all CUDA graphs keep what they compute on the way: they run one after the other on one
            stream. None on a CPU.
    """

    streams: Streams
    events: EventPool[Any]
    pinned: PinnedPool
    port: CompletionPort
    graph_memory: Any

    def send(self, arrays: Mapping[str, NDArray[np.generic]], holds: list[Hold]) -> dict[str, torch.Tensor]:
        """Queue one copy of all arrays to the device; `holds` get what it uses. The arrays may change at once."""
        device = self.streams.device
        if device.type == "cpu":
            return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        sent, hold = packed_copy.send(arrays, self.pinned, device)
        holds.append(hold)
        return sent

    def fetch(self, tensors: Mapping[str, torch.Tensor], holds: list[Hold]) -> dict[str, NDArray[np.generic]]:
        """Queue copies of all tensors to the host; `holds` get what they use. Valid as of `packed_copy.fetch`."""
        if self.streams.device.type == "cpu":
            return {name: tensor.numpy() for name, tensor in tensors.items()}
        arrays, hold = packed_copy.fetch(tensors, self.pinned)
        holds.append(hold)
        return arrays


def make_services(device: torch.device, *, by_kernels: bool = True) -> GpuServices:
    """Services for work from the running loop. `by_kernels`: False: its model computes where it is called.

    Raises OSError where the kernel gives the port no timer."""
    on_gpu = device.type == "cuda"
    return GpuServices(
        Streams(device),
        EventPool(torch.cuda.Event if on_gpu else AlreadyDone),
        PinnedPool(_PINNED_NBYTES, pinned=on_gpu, name="buffers of steps"),
        AdaptivePort() if on_gpu else FakePort() if by_kernels else AtOncePort(),
        torch.cuda.graph_pool_handle() if on_gpu else None,
    )
