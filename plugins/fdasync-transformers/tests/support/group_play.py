"""An engine of a tiny checkpoint, a trainer beside it in a thread of the test, and what they send each other."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fdasync_transformers import WeightsSender, weights_fingerprint
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

from fdasync import Engine, EngineConfig, SamplingParams, WeightsGroup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import torch

PROMPT = list(range(3, 20))
PARAMS = SamplingParams(max_tokens=6, temperature=0.0)
WAIT_S = 300.0


def engine_config(folder: Path, **values: Any) -> EngineConfig:
    own = {"dtype": "float32", "device": "cpu", "num_threads": 1, "experts": "eager"}
    sizes = {"block_tokens": 4, "num_blocks": 40, "max_context_tokens": 64, "max_running": 3, "max_step_tokens": 32}
    return EngineConfig(model=str(folder), runner_config=own, **{**sizes, "process": "inline", **values})


def checkpoint(folder: Path, seed: int) -> Any:
    """A model, and its folder."""
    return make_tiny_checkpoint(folder, "qwen3_moe", seed)


async def tokens(generator: Any) -> tuple[int, ...]:
    """Of the one prompt of these tests."""
    result = await generator.complete(PROMPT, PARAMS)
    found: tuple[int, ...] = result.samples[0].token_ids
    return found


async def fresh_tokens(folder: Path) -> tuple[int, ...]:
    """As `tokens`, of an engine that was started on the folder."""
    async with Engine(engine_config(folder)) as engine:
        return await tokens(engine)


def fingerprint(model: Any) -> Any:
    return weights_fingerprint(model, dtype="float32")


@asynccontextmanager
async def sender_of(generator: Any, world_size: int = 2, **options: Any) -> AsyncIterator[WeightsSender]:
    """A trainer whose group the generator has joined."""
    sender = WeightsSender(world_size=world_size, **{"timeout_s": WAIT_S, **options})
    try:
        await asyncio.gather(asyncio.to_thread(sender.join), generator.join_weights_group(sender.group))
        yield sender
    finally:
        await asyncio.to_thread(sender.close)


async def send(sender: WeightsSender, generator: Any, source: Any, version: Any = None, **options: Any) -> None:
    """Broadcast, and have the generator take it. Raises what either side raises, the generator's first."""
    sending = asyncio.create_task(asyncio.to_thread(sender.send, source))
    try:
        await generator.update_weights(version, sender.tell(source), "keep", **options)
    except BaseException:
        await asyncio.wait([sending], timeout=WAIT_S)
        sending.exception()
        raise
    await sending


def parts_of(model: Any, count: int) -> list[dict[str, torch.Tensor]]:
    items = list(model.state_dict().items())
    size = -(-len(items) // count)
    return [dict(items[first : first + size]) for first in range(0, len(items), size)]


class Trainer:
    """`group_trainer.py` as a process."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, world_size: int) -> None:
        self.process = process
        self.group = WeightsGroup(
            name="slime-pp_0", address="127.0.0.1", port=port, world_size=world_size, timeout_s=WAIT_S
        )

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path, world_size: int = 2, *options: str) -> AsyncIterator[Trainer]:
        script = Path(__file__).with_name("group_trainer.py")
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), str(folder), str(world_size), *options,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), WAIT_S)
            yield cls(process, int(line), world_size)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def broadcast(self, names: list[str] | None = None) -> None:
        """Have it broadcast tensors of its folder, all or those that are named; does not wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{' '.join(names or [])}\n".encode())
        await self.process.stdin.drain()

    async def read(self, word: str) -> None:
        assert self.process.stdout is not None
        assert (await asyncio.wait_for(self.process.stdout.readline(), WAIT_S)).decode().strip() == word
