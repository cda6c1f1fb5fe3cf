"""What `fdasync serve` and `fdasync up` say of the taps that their configuration names."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import uvloop
from fdasync_fleet.testing.patience import LINKS
from fleet_up import up

import fdasync
from fdasync import SamplingParams
from tests.support.commands import command, config_file
from tests.support.plugins import install_plugin

if TYPE_CHECKING:
    from pathlib import Path


PROMPT, PARAMS = [1, 2, 3], SamplingParams(max_tokens=2)
_SOURCE = """
    import asyncio
    from fdasync.events.catalog import RequestEnded
    from fdasync.events.tap import Tap

    class Deaf(Tap):
        kinds = (RequestEnded,)
        limit = 1

        async def run(self, events):
            while not events._closed:
                await asyncio.sleep(0.01)

    class Raises(Tap):
        async def run(self, events):
            raise OSError("no space left")
"""
_TAPS = {"deaf": "fdasync_bad:Deaf", "raises": "fdasync_bad:Raises"}


@pytest.mark.ci
def test_it_says_which_taps_failed_and_which_lost_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(tmp_path, monkeypatch, _SOURCE, "fdasync.taps", _TAPS)
    config, address = config_file(tmp_path), f"ipc://{tmp_path}/m0"

    async def ask() -> None:
        async with fdasync.connect([address], links=LINKS) as router:
            for _ in range(3):
                await router.complete(PROMPT, PARAMS)

    arguments = ("--config", str(config), "--listen", address, "--tap", "deaf", "--tap", "raises")
    with command(tmp_path, "serve", *arguments) as running:
        running.until("goes on without tap raises, which failed: OSError: no space left")
        running.until("ready at")
        uvloop.run(ask())
        running.signal(signal.SIGTERM)
        assert running.wait() == 0, running.text
    assert "tap deaf lost 2 events of 2" in running.text


@pytest.mark.ci
def test_taps_that_failed_or_lost_events_are_said_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(tmp_path, monkeypatch, _SOURCE, "fdasync.taps", _TAPS)

    async def ask(addresses: list[str]) -> None:
        async with fdasync.connect(addresses, links=LINKS) as router:
            for _ in range(3):
                await router.complete([1, 2, 3], SamplingParams(max_tokens=2))

    config = config_file(tmp_path, taps={"deaf": {}, "raises": {}})
    with up(tmp_path, config, "--mixed", "1") as (running, addresses, _):
        running.until("m0: goes on without taps that failed: raises: OSError: no space left")
        uvloop.run(ask(addresses))
        running.until("m0: its taps have lost [12] events so far")
        running.signal(signal.SIGTERM)
        assert running.wait() == 0, running.text
