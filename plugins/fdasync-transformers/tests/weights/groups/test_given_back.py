"""A group that was joined gives everything back, however it ends: descriptors and threads, many times over.

The process that joins is looked at from outside. Nobody collects garbage, and an engine whose weights are broken keeps
the error that says so: what an error's frames hold would stay.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from group_play import checkpoint, engine_config, fresh_tokens, tokens
from safetensors.torch import load_file

from fdasync import Engine, GroupTensors, TensorMeta, WeightsGroup
from fdasync.errors import FdasyncError, WeightsBroken, WeightsRejected
from fdasync.testing import until
from fdasync.testing.harness.leaks import children

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

NAME = "w"
LIMIT_S = 300.0
# of joins that fail by it
SHORT_S, TRIES = 0.3, 50
FEW, MANY = 2, 100
# the first times make what stays
WARM = 2


class Rank:
    """A rank of `group_ranks.py`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, name: str, **values: Any) -> Any:
        """Raises EOFError where it dies."""
        self._writer.write(json.dumps([name, values]).encode() + b"\n")
        line = await asyncio.wait_for(self._reader.readline(), LIMIT_S)
        if not line:
            raise EOFError
        return json.loads(line)


class Stage:
    """An engine, and the ranks of other processes that it meets."""

    def __init__(self, engine: Engine, folder: Path, socket: Path, pid: int) -> None:
        self.engine = engine
        self.pid = pid
        self._socket = socket
        self.metas = tuple(
            TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in load_file(folder / "model.safetensors").items()
        )

    @asynccontextmanager
    async def rank(self) -> AsyncIterator[Rank]:
        reader, writer = await asyncio.open_unix_connection(str(self._socket))
        try:
            yield Rank(reader, writer)
        finally:
            writer.close()
            await writer.wait_closed()

    @asynccontextmanager
    async def opened(self, world_size: int = 2, timeout_s: float = LIMIT_S) -> AsyncIterator[tuple[Rank, WeightsGroup]]:
        """A trainer with a store, and its group."""
        async with self.rank() as trainer:
            yield (
                trainer,
                msgspec.convert(await trainer.ask("open", world_size=world_size, timeout_s=timeout_s), WeightsGroup),
            )

    @asynccontextmanager
    async def met(self, timeout_s: float = LIMIT_S) -> AsyncIterator[Rank]:
        """A trainer whose group the engine has joined."""
        async with self.opened(timeout_s=timeout_s) as (trainer, group):
            _, error = await asyncio.gather(
                self.engine.join_weights_group(group), trainer.ask("join", group=rank_of(group, 0))
            )
            assert error is None
            yield trainer

    def told(self, first: int = 0, last: int | None = None) -> GroupTensors:
        return GroupTensors(group=NAME, tensors=self.metas[first:last], bucket_nbytes=0)

    async def refused(self, group: WeightsGroup) -> None:
        with pytest.raises(WeightsRejected):
            await self.engine.join_weights_group(group)

    async def breaks(self, part: GroupTensors) -> None:
        with pytest.raises(WeightsBroken):
            await self.engine.update_weights(None, part, "keep")


def rank_of(group: WeightsGroup, rank: int) -> Any:
    return msgspec.to_builtins(msgspec.structs.replace(group, rank=rank))


# -- the ways to end ------------------------------------------------------------------------------------


async def killed_before(stage: Stage) -> None:
    """The trainer had made a store, and did not join."""
    async with stage.opened() as (trainer, group):
        await trainer.ask("watch", group=rank_of(group, 0), ranks=[1])
        await stage.refused(group)


async def killed_while(stage: Stage) -> None:
    """The trainer and this rank had told their addresses, and waited for a third."""
    async with stage.opened(3) as (trainer, group):
        await trainer.ask("watch", group=rank_of(group, 0), ranks=[0, 1])
        joins = asyncio.create_task(trainer.ask("join", group=rank_of(group, 0)))
        await stage.refused(group)
        with pytest.raises((EOFError, ConnectionError)):
            await joins


async def killed_connecting(stage: Stage) -> None:
    """The rank that is to be connected to had told its address, and the store lives on."""
    async with stage.opened(2) as (_, group), stage.rank() as lost:
        await lost.ask("watch", group=rank_of(group, 0), ranks=[0])
        with pytest.raises((EOFError, ConnectionError)):
            await lost.ask("join", group=rank_of(group, 0))
        await stage.refused(msgspec.structs.replace(group, timeout_s=SHORT_S))


async def never_met(stage: Stage) -> None:
    async with stage.opened() as (_, group):
        await stage.refused(msgspec.structs.replace(group, timeout_s=SHORT_S))


async def killed_after(stage: Stage) -> None:
    async with stage.met():
        pass
    await stage.breaks(stage.told())


async def killed_and_left(stage: Stage) -> None:
    async with stage.met():
        pass
    await stage.engine.leave_weights_group(NAME)


async def killed_and_joined_anew(stage: Stage) -> None:
    async with stage.met():
        pass
    async with stage.met():
        await stage.engine.leave_weights_group(NAME)


async def killed_in_mid_broadcast(stage: Stage) -> None:
    async with stage.met() as trainer:
        sends = asyncio.create_task(trainer.ask("send", first=0, count=3, dies=True))
        await stage.breaks(stage.told())
        with pytest.raises((EOFError, ConnectionError)):
            await sends


async def killed_between_parts(stage: Stage) -> None:
    async with stage.met() as trainer:
        await stage.engine.begin_weight_update("keep")
        await asyncio.gather(
            trainer.ask("send", first=0, count=3), stage.engine.update_weights(None, stage.told(0, 3), "keep")
        )
    await stage.breaks(stage.told(3))


async def abandoned_between_parts(stage: Stage) -> None:
    async with stage.met() as trainer:
        await stage.engine.begin_weight_update("keep")
        await asyncio.gather(
            trainer.ask("send", first=0, count=3), stage.engine.update_weights(None, stage.told(0, 3), "keep")
        )
    await stage.engine.abandon_weight_update()
    await stage.engine.leave_weights_group(NAME)


async def trainer_falls_silent(stage: Stage) -> None:
    """With all the broadcasts under way that may be."""
    for _ in range(TRIES):
        # the limit of its broadcasts is that of their meeting, too short on a machine that does other things
        with suppress(WeightsRejected):
            async with stage.met(SHORT_S) as trainer:
                sends = asyncio.create_task(trainer.ask("send", first=0, count=3))
                await stage.breaks(stage.told())
                await sends
                return
    raise AssertionError("they never met")


async def member_killed(stage: Stage) -> None:
    """Another rank, before the trainer sends: the trainer ends, as it could not, and this rank may have its tensors."""
    async with stage.opened(3) as (trainer, group):
        async with stage.rank() as member:
            said = await asyncio.gather(
                trainer.ask("join", group=rank_of(group, 0)),
                member.ask("join", group=rank_of(group, 2)),
                stage.engine.join_weights_group(group),
            )
            assert said == [None, None, None]
        update = asyncio.create_task(stage.engine.update_weights(None, stage.told(), "keep"))
        assert "error" in await trainer.ask("send", first=0, count=len(stage.metas))
    await asyncio.wait([update])
    if not isinstance(update.exception(), WeightsBroken):
        await update
        await stage.engine.leave_weights_group(NAME)


async def left(stage: Stage) -> None:
    async with stage.met() as trainer:
        await asyncio.gather(
            trainer.ask("send", first=0, count=len(stage.metas)),
            stage.engine.update_weights(None, stage.told(), "keep"),
        )
        await stage.engine.leave_weights_group(NAME)


async def refused(stage: Stage) -> None:
    """Tensors that the model has not: nothing was sent, and nobody knows what will be."""
    strange = TensorMeta("nobody.has.this", "float32", (4,))
    async with stage.met():
        with pytest.raises(FdasyncError):
            await stage.engine.update_weights(None, GroupTensors(group=NAME, tensors=(strange,)), "keep")


WAYS = (
    killed_before, killed_while, killed_connecting, never_met, killed_after, killed_and_left, killed_and_joined_anew,
    killed_in_mid_broadcast, killed_between_parts, abandoned_between_parts, trainer_falls_silent, member_killed, left,
    refused,
)  # fmt: skip


# -- what is held ---------------------------------------------------------------------------------------


def held_by(pid: int) -> dict[str, int]:
    """Open files by their kind, and threads."""
    found: Counter[str] = Counter(threads=len(os.listdir(f"/proc/{pid}/task")))
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
        found[target.partition(":")[0]] += 1
    return dict(found)


@asynccontextmanager
async def staged(tmp_path: Path, process: str) -> AsyncIterator[Stage]:
    checkpoint(tmp_path / "old", 0)
    checkpoint(tmp_path / "new", 1)
    script = Path(__file__).parents[2] / "support" / "group_ranks.py"
    socket = tmp_path / "ranks"
    ranks = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(tmp_path / "new"), str(socket),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert ranks.stdout is not None
        assert await asyncio.wait_for(ranks.stdout.readline(), LIMIT_S) == b"ready\n"
        before = set(children())
        async with Engine(engine_config(tmp_path / "old", process=process)) as engine:
            (pid,) = {os.getpid()} if process == "inline" else set(children()) - before
            yield Stage(engine, tmp_path / "new", socket, pid)
            await engine.update_weights(None, str(tmp_path / "new"), "keep")
            assert await tokens(engine) == await fresh_tokens(tmp_path / "new")
            engine.check()
    finally:
        ranks.kill()
        await ranks.wait()


async def play(stage: Stage, way: Callable[[Stage], Coroutine[Any, Any, None]], times: int) -> None:
    for _ in range(WARM):
        await way(stage)
    first = held_by(stage.pid)
    for _ in range(times):
        await way(stage)

    def grown() -> dict[str, tuple[int, int]]:
        now = held_by(stage.pid)
        return {kind: (first.get(kind, 0), count) for kind, count in now.items() if count > first.get(kind, 0)}

    with suppress(TimeoutError):
        # what the kernel closes, and threads that end, take a moment
        await until(lambda: not grown(), LIMIT_S)
    assert grown() == {}, way.__name__


@pytest.mark.ci
async def test_each_end_gives_everything_back(tmp_path: Path) -> None:
    async with staged(tmp_path, "inline") as stage:
        for way in WAYS:
            await play(stage, way, FEW)


@pytest.mark.nightly
@pytest.mark.parametrize("process", ["inline", "worker"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_hundred_ends_give_everything_back(
    tmp_path: Path, way: Any, process: str, forked_children: None
) -> None:
    async with staged(tmp_path, process) as stage:
        await play(stage, way, MANY)
