"""The streams of a device by name, and the same names where there are none.

`compute` runs steps, `results` copies their samples and rows to the host, `copy_out` and `copy_in` move blocks, `peers`
copies them from other processes' devices: so a step's few bytes never queue behind blocks. `compute` and `results` have
the higher priority: a copy by the copy engines does not feel it, a copy by a kernel gives way.

On a CPU all launched work is done when the call returns, so streams do nothing there and callers need no second path.
Knows nothing of the work on the streams. Made once by a runner, used by the runner's parts.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fdasync.gpu.completion import DeviceEvent

StreamName = Literal["compute", "results", "copy_out", "copy_in", "peers"]

# lower is sooner; torch brings what the device does not have into its range
_PRIORITIES: tuple[tuple[StreamName, int], ...] = (
    ("compute", -1),
    ("results", -1),
    ("copy_out", 0),
    ("copy_in", 0),
    ("peers", 0),
)


class Streams:
    """The named streams of one device. Every method raises KeyError for another name.

    On CUDA they are not ordered behind the default stream: call `follow` after giving the default stream work that
    they build on. Use from one thread.

    Attributes:
        device: of the streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[StreamName, torch.cuda.Stream | None] = {
            name: torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
            for name, priority in _PRIORITIES
        }

    def of(self, name: StreamName) -> torch.cuda.Stream | None:
        """The stream itself; None on a CPU."""
        return self._streams[name]

    def handle(self, name: StreamName) -> int:
        """The driver's handle of a stream; 0 on a CPU."""
        stream = self._streams[name]
        return 0 if stream is None else int(stream.cuda_stream)

    def on(self, name: StreamName) -> AbstractContextManager[object]:
        """While it is entered, torch and Triton launch on this stream, on its device."""
        stream = self._streams[name]
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    def wait(self, name: StreamName, event: DeviceEvent) -> None:
        """Work launched on the stream from now on runs after the work before `event`; the host does not wait."""
        stream = self._streams[name]
        if stream is not None:
            stream.wait_event(event)  # type: ignore[arg-type]  # events of a GPU are torch's

    def record(self, name: StreamName, event: DeviceEvent) -> None:
        """Record `event` behind the stream's work so far; does nothing on a CPU, where that work is done."""
        stream = self._streams[name]
        if stream is not None:
            stream.record_event(event)  # type: ignore[arg-type]  # events of a GPU are torch's

    def follow(self) -> None:
        """All streams wait for the work so far of the caller's current stream; the host does not wait."""
        for stream in self._streams.values():
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self.device))
