"""The streams of a device by name, and the same names where there are none.

`compute` runs steps, `results` takes what they sampled and recorded to the host, `copy_out` and `copy_in` move blocks
(so that a step's few bytes never queue behind blocks), `notify` carries host functions. Compute has the higher
priority: a copy by the copy engines does not feel it, a copy by a kernel gives way.
On a CPU everything that is launched is done when the call returns, so streams do nothing there and callers need no
second path. Knows nothing of what runs on them. Made once by a runner, used by what it owns.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fdasync.gpu.completion import DeviceEvent

StreamName = Literal["compute", "results", "copy_out", "copy_in", "notify"]

# lower is sooner; torch brings what the device does not have into its range
_PRIORITIES: tuple[tuple[StreamName, int], ...] = (
    ("compute", -1),
    ("results", -1),
    ("copy_out", 0),
    ("copy_in", 0),
    ("notify", 0),
)


class Streams:
    """The named streams of one device. Every method raises KeyError for another name.

    On CUDA they do not order themselves behind the default stream: call `follow` after work was given to it that they
    build on. Use from one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[StreamName, torch.cuda.Stream | None] = {
            name: torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
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
        """What is launched on the stream from now on runs after what `event` recorded; the host does not wait."""
        stream = self._streams[name]
        if stream is not None:
            stream.wait_event(event)  # type: ignore[arg-type]

    def record(self, name: StreamName, event: DeviceEvent) -> None:
        """`event` is done when what the stream was given so far is; on a CPU it is already."""
        stream = self._streams[name]
        if stream is not None:
            stream.record_event(event)  # type: ignore[arg-type]

    def follow(self) -> None:
        """All streams wait for what the caller's current stream was given so far; the host does not wait."""
        for stream in self._streams.values():
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self.device))
