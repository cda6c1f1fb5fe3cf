"""What is the Unix transport's own: instances that use it, other users, a queue that is full, its entry point."""

from __future__ import annotations

import asyncio
import os
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

import fdasync_example.transport
import pytest
from fdasync_example import UnixTransport
from fdasync_fleet.testing import TransportTests
from fdasync_fleet.testing.patience import LEASES, LINKS

import fdasync
from fdasync import Instance, SamplingParams
from fdasync.testing import check_sample, oracle_of, synthetic_config
from fdasync.testing.harness.bounded import on_loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync_fleet.transfer.base import Transport

pytestmark = pytest.mark.usefixtures("no_leaks")

HOME = Path(__file__).parent.parent


class Suite(TransportTests):
    """For its tools."""

    def make(self) -> Transport:
        return UnixTransport()

    @on_loop
    async def read(self) -> None:
        async with self.sides() as (sender, receiver):
            copy_spec = receiver.wanted(sender, "a", 1000)
            (outcome,) = await receiver.within(receiver.start(sender.source, [copy_spec], 2.0), "receive")
            assert (outcome.status, outcome.transient) == ("failed", True)
            self.problem = outcome.problem

    @on_loop
    async def crowd(self) -> None:
        async with self.sides() as (sender, receiver):
            assert isinstance(sender.transport, UnixTransport)
            assert sender.transport._listener is not None
            asyncio.get_running_loop().remove_reader(sender.transport._listener)
            block = sender.block("a", 1000)
            copy_specs = [receiver.copy_spec(*block) for _ in range(200)]
            tasks = [receiver.start(sender.source, [copy_spec], 5.0) for copy_spec in copy_specs]
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in tasks)
            sender.transport._listen()
            await receiver.ended(tasks, "receives of a crowd")
            assert {task.result()[0].status for task in tasks} == {"done"}
            assert all(receiver.has(copy_spec, "a") for copy_spec in copy_specs)


def uids(*answers: int) -> Callable[[], int]:
    """`os.getuid` that gives these in turn, and the last one for ever."""
    left = list(answers)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_a_sender_hangs_up_on_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    # the receiver looks first
    monkeypatch.setattr(fdasync_example.transport.os, "getuid", uids(os.getuid(), os.getuid() + 1))
    suite = Suite()
    suite.read()
    assert "hung up" in suite.problem or "Broken pipe" in suite.problem or "reset" in suite.problem


def test_a_receiver_asks_nothing_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fdasync_example.transport.os, "getuid", uids(os.getuid() + 1))
    suite = Suite()
    suite.read()
    assert "another user's process listens there" in suite.problem


def test_more_than_its_queue_takes_at_once() -> None:
    Suite().crowd()


def test_its_entry_point_is_what_the_registry_takes() -> None:
    points = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["entry-points"]["fdasync.transports"]
    assert [EntryPoint(name, value, "").load() for name, value in points.items()] == [UnixTransport]
    assert list(points) == [UnixTransport.name]


async def test_blocks_and_rows_go_from_a_prefill_to_a_decode_instance(tmp_path: Path) -> None:
    configs = [synthetic_config(role=role, leases=LEASES) for role in ("prefill", "decode")]
    addresses = [f"ipc://{tmp_path}/{config.role}" for config in configs]
    prefill, decode = [
        Instance(config, listen=address, links=LINKS, transports=[UnixTransport()])
        for config, address in zip(configs, addresses, strict=True)
    ]
    prompt, params = list(range(40)), SamplingParams(max_tokens=12, temperature=0.0)
    async with prefill, decode, fdasync.connect(addresses, links=LINKS) as router:
        result = await router.complete(prompt, params, deadline_s=300)
        check_sample(result.samples[0], prompt, params, oracle_of(configs[0]))
        assert decode.status().stats.scheduler.received_blocks
