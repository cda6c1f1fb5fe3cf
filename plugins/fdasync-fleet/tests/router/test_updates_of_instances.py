"""Updates of real instances: routers that meet, and instances that come with other weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
from functools import partial
from typing import TYPE_CHECKING

import pytest
from fdasync_fleet.testing.patience import LEASES, LINKS
from fdasync_fleet.verbs import Verbs, verb

import fdasync
from fdasync import Instance, SamplingParams
from fdasync.errors import (
    BadInput,
    UpdateUnderWay,
    WeightsDiffer,
)
from fdasync.runner.synthetic import WEIGHTS_FILE
from fdasync.testing import synthetic_config, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("forked_children")

PROMPT = tuple(range(12))


@pytest.fixture
def weights(tmp_path: Path) -> str:
    """A folder with other weights."""
    (tmp_path / WEIGHTS_FILE).write_text(json.dumps({"weights_id": 77}))
    return str(tmp_path)


def instance(tmp_path: Path, role: str, name: str) -> Instance:
    return Instance(
        synthetic_config({"load_s": 0.1}, role=role, host_blocks=64, leases=LEASES),
        listen=f"ipc://{tmp_path}/{name}", name=name, links=LINKS, transport="shm",
    )  # fmt: skip


connect = partial(fdasync.connect, links=LINKS)


@pytest.mark.ci
async def test_of_two_routers_that_update_at_once_one_does(tmp_path: Path, weights: str) -> None:
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("p0", "d0", "d1")]
    p0, d0, d1 = (
        instance(tmp_path, role, name) for role, name in (("prefill", "p0"), ("decode", "d0"), ("decode", "d1"))
    )
    async with p0, d0, d1, connect(addresses) as one, connect(addresses) as two:
        outcomes = await asyncio.gather(
            one.update_weights(10, weights), two.update_weights(11, weights), return_exceptions=True
        )
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType", "UpdateUnderWay"]
        version = "10" if outcomes[0] is None else "11"
        assert {each.engine.stats().scheduler.weight_version for each in (p0, d0, d1)} == {version}
        assert p0._context is not None
        wanted = {p0._context.namespace()}
        # it has served nothing: no block tells the other of it
        await until(
            lambda: all({each.namespace for each in router.table.up()} == wanted for router in (one, two)), every_s=0.01
        )
        for router in (one, two):
            result = await router.complete(list(range(40)), SamplingParams(max_tokens=3), deadline_s=300)
            assert [span.version for span in result.samples[0].weight_version] == [version]
            assert router.stats().dropped == ()
            assert not any(each.problem for each in router.stats().instances)


async def test_an_instance_whose_weights_are_not_the_expected_ones_is_not_used(tmp_path: Path, weights: str) -> None:
    address = f"ipc://{tmp_path}/m0"
    async with instance(tmp_path, "mixed", "m0"), connect([address]) as router:
        with pytest.raises(WeightsDiffer) as caught:
            await router.update_weights(1, weights, expected=f"{78:032x}")
        assert (caught.value.expected, caught.value.held) == (f"{78:032x}", f"{77:032x}")
        assert caught.value.where == "m0"
        with pytest.raises(BadInput, match="expected"):
            await router.update_weights(1, weights, expected="77")
        await router.update_weights(1, weights, expected=f"{77:032x}")
        result = await router.complete(list(range(20)), SamplingParams(max_tokens=3), deadline_s=300)
        assert [span.version for span in result.samples[0].weight_version] == ["1"]


async def test_an_instance_is_claimed_until_the_update_or_the_link_is_over(tmp_path: Path, weights: str) -> None:
    address = f"ipc://{tmp_path}/m0"
    async with instance(tmp_path, "mixed", "m0"), connect([address]) as two:
        (member,) = two.table.up()
        words = verb(Verbs.update_weights, "5", weights, "abort")
        async with connect([address]) as one:
            await one.commands._claim_all("sleep")
            with pytest.raises(UpdateUnderWay, match="m0"):
                await two.update_weights(1, weights)
            with pytest.raises(UpdateUnderWay):
                await two.commands.one(member, words, 300.0)
            # weights that the instance lacked are no sleep, and end no claim for one
            (own,) = one.table.up()
            await one.commands.one(own, words, 300.0)
            with pytest.raises(UpdateUnderWay, match="m0"):
                await two.update_weights(1, weights)
            await one.update_weights(6, weights)
            await two.update_weights(7, weights)
            # until the link is over
            await one.commands._claim_all("sleep")
        async with asyncio.timeout(300):
            while True:
                # it knows in a moment that the other said goodbye
                with contextlib.suppress(UpdateUnderWay):
                    await two.update_weights(8, weights)
                    break
        assert two.stats().instances[0].weight_version == "8"


@pytest.mark.ci
async def test_a_decode_instance_that_is_started_anew_serves_the_new_weights(tmp_path: Path, weights: str) -> None:
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("p0", "d0")]
    async with instance(tmp_path, "prefill", "p0"), connect(addresses[:1]) as router:
        async with instance(tmp_path, "decode", "d0"):
            await router.add(addresses[1])
            await router.update_weights(7, weights)
        await until(lambda: not router.stats().instances[1].is_up, every_s=0.01)
        async with instance(tmp_path, "decode", "d0") as again:
            await router.add(addresses[1])
            results = [
                await router.complete([*range(20), number], SamplingParams(max_tokens=3), deadline_s=300)
                for number in range(4)
            ]
            assert again.engine.stats().scheduler.weight_version == "7"
        versions = {span.version for result in results for span in result.samples[0].weight_version}
        assert versions == {"7"}
        assert router.stats().dropped == ()
