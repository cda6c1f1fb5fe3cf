"""Await a CUDA event in an asyncio program, with `fdasync.gpu` and no engine.

    python examples/cuda_future.py

On a machine without a GPU the same coroutine awaits a fake event, which a timer fires.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import torch

from fdasync.gpu.ports.adaptive import AdaptivePort
from fdasync.gpu.ports.fake import FakeEvent, FakePort

if TYPE_CHECKING:
    from fdasync.gpu.completion import CompletionPort, DeviceEvent


def launch_on_gpu() -> tuple[DeviceEvent, torch.Tensor]:
    """Queue work on the current stream and record an event behind it; returns before the GPU has begun."""
    left = torch.randn(8192, 8192, device="cuda")
    product = left @ left
    event = torch.cuda.Event()
    event.record()
    return event, product


async def run(port: CompletionPort, event: DeviceEvent) -> int:
    """Wait for the event; returns how often another task ran meanwhile."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.0005)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await port.completion(event)
    ticking.cancel()
    return ticks


async def main() -> None:
    began = time.perf_counter()
    if torch.cuda.is_available():
        port: CompletionPort = AdaptivePort()
        event, product = launch_on_gpu()
        ticks = await run(port, event)
        print(f"the GPU is done: {tuple(product.shape)}", end=", ")
    else:
        port, fake = FakePort(), FakeEvent()
        # bare timer: stands for a device that takes 20 ms
        asyncio.get_running_loop().call_later(0.02, fake.fire)
        ticks = await run(port, fake)
        print("no GPU: the fake event fired", end=", ")
    await port.aclose()
    print(f"{time.perf_counter() - began:.3f} s; another task ran {ticks} times meanwhile")


if __name__ == "__main__":
    asyncio.run(main())
