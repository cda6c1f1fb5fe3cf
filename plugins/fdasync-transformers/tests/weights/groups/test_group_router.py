"""A router and a trainer's group: every worker of every instance is a rank, and all have one weights id."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from group_play import checkpoint, engine_config, fingerprint, fresh_tokens, parts_of, send, sender_of, tokens

import fdasync
from fdasync import Instance
from fdasync.errors import BadInput, UpdateUnderWay, WeightsBroken, WeightsRejected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.nightly


def instance(folder: Path, address: str, **values: Any) -> Instance:
    config = engine_config(folder, role="mixed", host_blocks=16, process="worker", **values)
    return Instance(config, listen=address, transport="shm", transfer_process=False)


@asynccontextmanager
async def fleet(tmp_path: Path) -> AsyncIterator[Any]:
    """A router over an instance of one worker, and one of two ranks."""
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("a", "b")]
    async with (
        instance(tmp_path / "old", addresses[0]),
        instance(tmp_path / "old", addresses[1], tensor_parallel=2),
        fdasync.connect(addresses) as router,
    ):
        yield router


def labels(router: Any) -> set[str]:
    return {one.weight_version for one in router.load().instances}


async def test_all_instances_get_the_weights_of_one_broadcast(tmp_path: Path) -> None:
    checkpoint(tmp_path / "old", 0)
    new = checkpoint(tmp_path / "new", 1)
    right = await fresh_tokens(tmp_path / "new")
    async with fleet(tmp_path) as router:
        with pytest.raises(BadInput, match="3 workers"):
            async with sender_of(router, 3):
                pass
        async with sender_of(router, 4) as sender:
            await send(sender, router, new, "one", expected=fingerprint(new).weights_id)
            assert labels(router) == {"one"}
            # tensors that workers know are not described to them again, and others are
            await send(sender, router, parts_of(new, 2)[0])
            for label in ("once more", "and again"):
                await send(sender, router, new, label, expected=fingerprint(new).weights_id)
            assert [await tokens(router) for _ in range(4)] == [right] * 4
            # in parts
            await router.begin_weight_update()
            with pytest.raises(UpdateUnderWay):
                await router.begin_weight_update()
            with pytest.raises(UpdateUnderWay):
                await router.update_weights("x", str(tmp_path / "new"))
            for part in parts_of(new, 3):
                await send(sender, router, part, "two")
            # once more, as Miles says it; the weights have it when the update has ended
            await router.set_weight_version("two")
            with pytest.raises(UpdateUnderWay):
                await router.set_weight_version("three")
            assert router.facts().weight_version != "two"
            await router.end_weight_update("two", expected=fingerprint(new).weights_id)
            assert labels(router) == {"two"}
            assert router.facts().weight_version == "two"
            assert [await tokens(router) for _ in range(4)] == [right] * 4
            # an instance that comes up later waits for the next update
            late = f"ipc://{tmp_path}/late"
            async with instance(tmp_path / "old", late):
                await router.add(late)
                await until(lambda: any(one.address == late for one in router.load().instances))
                assert [await tokens(router) for _ in range(4)] == [right] * 4
                router.remove(late)
        with pytest.raises(BadInput, match="no update is open"):
            await router.end_weight_update()
        assert not router.stats().dropped


async def test_what_is_refused_or_breaks_is_so_for_all_of_them(tmp_path: Path) -> None:
    checkpoint(tmp_path / "old", 0)
    new = checkpoint(tmp_path / "new", 1)
    async with fleet(tmp_path) as router:
        before = await tokens(router)
        async with sender_of(router, 4) as sender:
            name, tensor = next(iter(new.state_dict().items()))
            with pytest.raises(WeightsRejected, match="shape"):
                await send(sender, router, {name: tensor[1:]}, "x")
        assert [await tokens(router) for _ in range(4)] == [before] * 4
        async with sender_of(router, 4) as sender:
            await router.begin_weight_update()
            await send(sender, router, parts_of(new, 2)[0], "x")
            await router.abandon_weight_update()
        async with sender_of(router, 4, timeout_s=2.0) as sender:
            with pytest.raises(WeightsBroken):
                # announced, and never sent
                await router.update_weights("x", sender.tell(new), "keep")
        async with sender_of(router, 4) as sender:
            await send(sender, router, new, "x", expected=fingerprint(new).weights_id)
        assert await tokens(router) == await fresh_tokens(tmp_path / "new")
        lonely = msgspec.structs.replace(sender.group, port=9, timeout_s=0.5)
        with pytest.raises(WeightsRejected, match="nobody answers"):
            await router.join_weights_group(lonely)
        assert not router.stats().dropped


async def until(condition: Any) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110 - another process is asked
            await asyncio.sleep(0.02)
