"""What an executor's work on a device shares: streams, events, page-locked buffers, the completion port.

Made by `runner.py` when it binds, on the loop that it will run on. On a CPU (tests of the device path) the same
parts do nothing, plainly, at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fdasync.gpu.pools import EventPool, PinnedPool
from fdasync.gpu.ports.other import AlreadyDone, make_port
from fdasync.gpu.streams import Streams

if TYPE_CHECKING:
    from fdasync.gpu.completion import CompletionPort

# of what steps send and fetch; steps in flight need a few megabytes each
_PINNED_NBYTES = 1 << 30


@dataclass(frozen=True)
class GpuServices:
    """Attributes:
    streams: of the device, by name.
    events: leased until their completion was seen.
    pinned: buffers of what goes to the device and comes back.
    port: makes futures of events.
    """

    streams: Streams
    events: EventPool[Any]
    pinned: PinnedPool
    port: CompletionPort


def make_services(device: torch.device, completion: str) -> GpuServices:
    """For work from the running loop; `completion` names the port on CUDA. Raises what the port raises (OSError)."""
    on_gpu = device.type == "cuda"

    def event() -> Any:
        # the thread port blocks in it, and must not spin
        return torch.cuda.Event(blocking=completion == "thread") if on_gpu else AlreadyDone()  # type: ignore[no-untyped-call]

    return GpuServices(
        Streams(device),
        EventPool(event),
        PinnedPool(_PINNED_NBYTES, pinned=on_gpu, name="buffers of steps"),
        make_port(completion if on_gpu else "fake", device),
    )
