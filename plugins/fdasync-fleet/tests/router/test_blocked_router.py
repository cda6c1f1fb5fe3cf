"""A router whose loop its user blocks: what instances answered meanwhile is in time. Real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.control import ControlPlane

import fdasync
from fdasync import SamplingParams
from fdasync.testing import check_sample, oracle_of, until
from tests.support import skips
from tests.support.commands import children, command, config_file, config_of
from tests.support.helpers import hold_up

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("forked_children")

PROMPT = [1, 2, 3]
# real time for an answer of 100 steps of 2 ms
_BLOCKED_S = 20.0
both_loops = pytest.mark.parametrize(
    "loop_factory",
    [
        pytest.param(skips.SkippedUvloop, id="uvloop"),
        pytest.param(skips.SkippedSelectorLoop, id="asyncio", marks=pytest.mark.nightly),
    ],
)


def run(play: Coroutine[object, object, None], loop_factory: Any) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(play)


def listens(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(address.removeprefix("ipc://")) == 0


@contextmanager
def one_instance(folder: Path) -> Iterator[tuple[list[str], int]]:
    """Its addresses, and the process of the `fdasync up` that starts it again."""
    config = str(config_file(folder, {"step_s": 0.002}))
    with command(folder, "up", "--config", config, "--mixed", "1", "--folder", str(folder / "run")) as running:
        addresses = json.loads(running.until(r"fdasync\.connect\((\[.*\])\)")[1])
        yield addresses, running.process.pid
        running.signal(signal.SIGTERM)
        running.wait()


@pytest.mark.ci
@both_loops
def test_a_block_longer_than_a_request_s_deadline_throws_no_answer_away(tmp_path: Path, loop_factory: Any) -> None:
    params = SamplingParams(max_tokens=100, temperature=0.0)

    async def ask(router: fdasync.Router, streams: bool) -> fdasync.Result:
        if not streams:
            return await router.complete(PROMPT, params, deadline_s=skips.LIMIT_S)
        async with router.generate(PROMPT, params, deadline_s=skips.LIMIT_S) as stream:
            return await stream.finished()

    async def play(addresses: list[str]) -> None:
        async with fdasync.connect(addresses) as router:
            for streams in (False, True):
                asking = asyncio.ensure_future(ask(router, streams))
                await until(lambda: any(request.name for request in router.live))
                # all of it comes meanwhile, in a fifth of a second where nobody else takes the core: more than the
                # loop reads in a turn
                hold_up(_BLOCKED_S)
                skips.block()
                check_sample((await asking).samples[0], PROMPT, params, oracle)
            # what takes longer is late all the same
            slow = SamplingParams(max_tokens=200, ignore_eos=True)
            assert (await router.complete(PROMPT, slow, deadline_s=0.1)).finish_reason == "deadline"

    with one_instance(tmp_path) as (addresses, _):
        oracle = oracle_of(config_of(tmp_path / "config.json"))
        run(play(addresses), loop_factory)


@pytest.mark.ci
@both_loops
def test_time_in_which_the_loop_was_blocked_is_no_absence(tmp_path: Path, loop_factory: Any) -> None:
    """An instance that was started again meanwhile serves who waited for it."""

    async def play(addresses: list[str], pid: int) -> None:
        async with fdasync.connect(addresses, RouterConfig(absent_s=skips.LIMIT_S)) as router:
            os.kill(pid, signal.SIGKILL)
            await until(lambda: bool(router.stats().missing))
            asking = asyncio.ensure_future(router.complete(PROMPT, SamplingParams(max_tokens=2), deadline_s=1e9))
            await until(lambda: bool(router.live))
            skips.block(lambda: listens(addresses[0]))
            assert (await asking).samples[0].token_ids

    with one_instance(tmp_path) as (addresses, pid):
        run(play(addresses, children(pid)["m0"]), loop_factory)


@pytest.mark.both_loops
@pytest.mark.skips
async def test_hand_overs_of_which_the_word_lies_unread_are_not_begun_again() -> None:
    loop = asyncio.get_running_loop()
    one, other = (SimpleNamespace(first=None, delivered=False) for _ in range(2))
    live, restarted = [one, other], []
    dispatch: Any = SimpleNamespace(being_handed_over=lambda: list(live), restart=restarted.append)
    config = RouterConfig(handoff_s=skips.LIMIT_S)
    fleet: Any = None
    links: Any = None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)

        async def read() -> None:
            await loop.sock_recv(ours, 1)
            for _ in range(3):
                # as a frame goes through its wire, its link and its owner
                await asyncio.sleep(0)
            live.remove(one)

        def block() -> None:
            theirs.send(b"x")
            skips.block()

        reading = asyncio.ensure_future(read())
        loop.call_later(0.01, block)
        commands = ControlPlane(fleet, dispatch, links, config, lambda _: None, lambda _: None)
        await commands._let_hand_overs_finish()
        await reading
    # the other one never came
    assert restarted == [other]
