"""Instances of a request show each pick of experts once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fdasync_fleet.testing.patience import LEASES, LINKS

import fdasync
from fdasync import Instance
from fdasync.errors import EngineClosed
from fdasync.telemetry.sight.latencies import total
from fdasync.testing import synthetic_config

if TYPE_CHECKING:
    from pathlib import Path

from tests.telemetry.sight.test_watch import picked, play, told


async def test_prefill_and_decode_together_show_each_pick_once(tmp_path: Path) -> None:
    def instance(role: Any) -> Instance:
        config = synthetic_config({"pass_stamp": False}, role=role, host_blocks=64, leases=LEASES)
        return Instance(
            config, listen=f"ipc://{tmp_path}/{role}", name=role, links=LINKS, transport="shm", transfer_process=False
        )

    router = fdasync.connect([f"ipc://{tmp_path}/prefill", f"ipc://{tmp_path}/decode"], links=LINKS)
    with pytest.raises(EngineClosed):
        await router.watch()
    async with instance("prefill"), instance("decode"), router:
        results = await play(router)
        watched = await router.watch()
    assert [(one.name, one.role, one.is_up, one.problem) for one in watched] == [
        ("prefill", "prefill", True, ""), ("decode", "decode", True, ""),
    ]  # fmt: skip
    assert (told(watched, "0") == picked(results)).all()
    first, second = [one.sight for one in watched]
    assert first is not None
    assert second is not None
    assert (first.picks[0].rows, second.picks[0].rows) == (8 + 6 + 17, 3 * 6)
    assert (dict(first.ends), dict(second.ends)) == ({"handed_over": 3}, {"length": 3})
    # the decode instance alone knows how long a request took
    assert (total(first.total), total(second.total), total(second.ttft)) == (0, 3, 3)
