"""Joins of groups that never meet, by a worker: steps go on until the store answers, and it gives up when told."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from fdasync_transformers import WeightsSender
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from group_play import engine_config, fresh_tokens, send, sender_of, tokens

from fdasync import Engine, WeightsGroup
from fdasync.errors import WeightsRejected
from fdasync.testing import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

# of a join that has an hour left
_SOON_S = 300.0


def group_at(port: int, world_size: int = 2) -> WeightsGroup:
    return WeightsGroup(name="w", address="127.0.0.1", port=port, world_size=world_size, timeout_s=3600.0)


@contextmanager
def nobody() -> Iterator[int]:
    """A port at which nobody listens, and nobody will."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextmanager
def silent() -> Iterator[int]:
    """A port at which somebody listens who says nothing."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen(8)
        yield held.getsockname()[1]


@contextmanager
def lonely() -> Iterator[int]:
    """A trainer's store whose trainer does not join."""
    sender = WeightsSender(world_size=2, name="w")
    try:
        yield sender.group.port
    finally:
        sender.close()


@asynccontextmanager
async def strange(says: bytes) -> AsyncIterator[int]:
    """A port at which somebody listens who is no store, says that to whoever comes, and hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(says)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.ci
async def test_who_is_no_store_is_refused_at_once_and_nothing_waits_for_it(
    tmp_path: Path, forked_children: None
) -> None:
    """torch's client would dial it anew until the limit and longer, and the engine would stand still meanwhile."""
    make_tiny_checkpoint(tmp_path / "old", "qwen3_moe", 0)
    async with Engine(engine_config(tmp_path / "old", process="worker")) as engine:
        before = await tokens(engine)
        async with strange(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
            with pytest.raises(WeightsRejected, match=rf"127.0.0.1:{port} is no store .*it says b'HTTP'"):
                await asyncio.wait_for(engine.join_weights_group(group_at(port)), _SOON_S)
        # one that hangs up may pass connections on to a store that is not there yet
        for says in (b"", b"xy"):
            async with strange(says) as port:
                join = asyncio.create_task(engine.join_weights_group(group_at(port)))
                for _ in range(3):
                    assert await tokens(engine) == before
                assert engine.load().doing == "running"
                await engine.leave_weights_group("w")
                with pytest.raises(WeightsRejected, match="was left meanwhile"):
                    await join
        engine.check()


@pytest.mark.ci
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
async def test_joins_that_cannot_end_are_ended_and_the_worker_goes_on(
    tmp_path: Path, ranks: int, forked_children: None
) -> None:
    make_tiny_checkpoint(tmp_path / "old", "qwen3_moe", 0)
    new = make_tiny_checkpoint(tmp_path / "new", "qwen3_moe", 1)
    config = engine_config(tmp_path / "old", process="worker", tensor_parallel=ranks)
    async with Engine(config) as engine:
        before = await tokens(engine)
        for port_of in (nobody, silent, lonely):
            for way in ("left", "cancelled"):
                with port_of() as port:
                    join = asyncio.create_task(engine.join_weights_group(group_at(port, 1 + ranks)))
                    if port_of is lonely:
                        await until(lambda: engine.load().doing == "updating", 300)
                        # the worker has begun to wait for the others: nothing that it says comes any more
                        await asyncio.sleep(0.5)
                    else:
                        # steps go on, however long nobody answers
                        for _ in range(3):
                            assert await tokens(engine) == before
                        assert engine.load().doing == "running"
                    began = time.monotonic()
                    if way == "left":
                        await engine.leave_weights_group("w")
                        with pytest.raises(WeightsRejected, match="was left meanwhile"):
                            await join
                    else:
                        join.cancel()
                    assert await asyncio.wait_for(tokens(engine), 300) == before
                    assert time.monotonic() - began < _SOON_S
                    await until(lambda: not engine.weights.groups.joins, 300)
        async with sender_of(engine, 1 + ranks) as sender:
            await send(sender, engine, new, "new")
        assert await tokens(engine) == await fresh_tokens(tmp_path / "new")
        engine.check()


async def test_who_did_not_come_is_said_in_plain_words(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path / "old", "qwen3_moe", 0)
    async with Engine(engine_config(tmp_path / "old")) as engine:
        for port_of, words in (
            (nobody, "nobody answers at 127.0.0.1:{port}, where its store should be, for 3 s"),
            (lonely, "rank 1 of 2 could not meet the others by the store at 127.0.0.1:{port} within "),
        ):
            with port_of() as port:
                group = msgspec.structs.replace(group_at(port), timeout_s=3.0)
                with pytest.raises(WeightsRejected) as caught:
                    await engine.join_weights_group(group)
            said: Any = str(caught.value)
            assert words.format(port=port) in said
            assert said.count("the weights were not taken") == 1
            assert "Exception" not in said
            assert "rank 0 has not come" in said or port_of is nobody
