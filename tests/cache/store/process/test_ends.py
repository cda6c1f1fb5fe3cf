"""Stores in a process of their own: every way for that process to end, and starting again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest

from fdasync.errors import StoreRejected, StoreUnavailable
from fdasync.testing.harness.leaks import children
from fdasync.testing.harness.processes import stop_process
from tests.cache.store.process.odd_store import PART_NBYTES, Bench, in_process, opened
from tests.support import skips

pytestmark = pytest.mark.usefixtures("forked_children")

if TYPE_CHECKING:
    from fdasync.cache.store.base import Outcome


def is_gone(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


# -- ends -------------------------------------------------------------------------------------------


class Flight:
    """Verbs that write to their parts for ever. The moment one ends, its part is cleared."""

    def __init__(self, bench: Bench, key: str = "odd/scribble") -> None:
        self.bench = bench
        self.pid = bench.store.pid
        self.cleared: list[int] = []
        self.early: list[int] = []
        verbs = [bench.store.put, bench.store.get_into]
        self.tasks = [asyncio.ensure_future(verbs[place % 2]([bench.item(key, place)])) for place in range(8)]
        for place, task in enumerate(self.tasks):
            task.add_done_callback(partial(self._clear, place))

    def _clear(self, place: int, _: asyncio.Future[list[Outcome]]) -> None:
        self.bench.view(place)[:] = bytes(PART_NBYTES)
        self.cleared.append(place)
        if not is_gone(self.pid):
            self.early.append(place)

    async def is_busy(self) -> None:
        await self.bench.until(lambda: all(self.bench.view(place)[0] for place in range(8)))

    async def ends(self, words: str) -> None:
        """Every verb raises, and nothing was written to its part since."""
        _, late = await asyncio.wait(self.tasks, timeout=300)
        assert not late
        await asyncio.sleep(0)
        assert sorted(self.cleared) == list(range(8))
        assert not self.early, "verbs ended before their process had"
        for task in self.tasks:
            with pytest.raises(StoreUnavailable, match=words):
                task.result()
        await self.bench.works()
        for place in range(8):
            assert bytes(self.bench.view(place)) == bytes(PART_NBYTES)


@pytest.mark.both_loops
async def test_kill_ends_what_runs():
    async with opened() as bench:
        flight = Flight(bench)
        await flight.is_busy()
        pid = bench.store.pid
        killing = asyncio.ensure_future(bench.store.kill("the lease was too old"))
        await asyncio.sleep(0)
        # while it is being ended nothing is sent to it, and nothing is started beside it
        with pytest.raises(StoreUnavailable, match="too old"):
            await bench.store.exists_prefix(["a"])
        assert await killing is True
        assert is_gone(pid)
        await flight.ends("store odd: the lease was too old")
        assert bench.store.spawned == 2
        assert await bench.store.kill("again")
    assert await bench.store.kill("when closed") is True


async def test_a_child_that_dies_takes_its_verbs_with_it():
    async with opened() as bench:
        flight = Flight(bench)
        await flight.is_busy()
        pid = bench.store.pid
        os.kill(pid, signal.SIGKILL)
        await flight.ends(f"the odd store process {pid} ended by signal 9")
        assert bench.store.spawned == 2
        assert bench.store.pid != pid


async def test_a_child_that_exits_in_a_call():
    async with opened() as bench:
        with pytest.raises(StoreUnavailable, match="ended with status 3"):
            await bench.store.exists_prefix(["odd/exit"])
        assert children() == []
        await bench.works()


async def test_a_stopped_child_is_killed():
    async with opened() as bench:
        stop_process(bench.store.pid)
        flight = Flight(bench, "plain")
        await asyncio.wait(flight.tasks, timeout=0.05)
        assert await bench.store.kill("stuck")
        await flight.ends("stuck")


@pytest.mark.ci
async def test_kill_ends_a_start_too():
    async with opened() as bench:
        await bench.store.kill("first")
        verb = asyncio.ensure_future(bench.store.exists_prefix(["a"]))
        await bench.until(lambda: bench.store.pid > 0)
        assert await bench.store.kill("second")
        await asyncio.wait([verb], timeout=300)
        with pytest.raises(StoreUnavailable, match="second"):
            verb.result()
        assert children() == []
        await bench.works()


@pytest.mark.ci(after=2)
@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("odd/garbage", "sent what cannot be decoded"),
        ("odd/stranger", "answered call 99, which was not made"),
        ("odd/utf8", "sent what cannot be decoded"),
        ("odd/long", "above"),
        ("odd/again", "answered call 1, which was not made"),
        ("odd/kind", "sent what cannot be decoded"),
        ("odd/stopped", "answered a call with an odd Stopped"),
        ("odd/many", "answered a call with an odd int"),
        ("odd/negative", "answered a call with an odd int"),
        ("odd/error", "no name here: SystemExit"),
        ("odd/fields", "no name here: StoreRejected"),
    ],
)
async def test_a_child_that_breaks_the_protocol_is_killed(key, words):
    async with opened() as bench:
        pid = bench.store.pid
        # it hangs after its words, so nothing but a kill ends it
        with pytest.raises(StoreUnavailable, match=words):
            await bench.store.exists_prefix([key])
        assert is_gone(pid)
        await bench.works()
        assert bench.store.spawned == 2


@pytest.mark.ci
async def test_answers_that_do_not_fit_their_call_break_the_protocol():
    async with opened() as bench:
        calls = [
            (lambda: bench.store.get_into([bench.item("odd/few")]), "odd list"),
            (lambda: bench.store.delete(["odd/negative"]), "odd int"),
            (lambda: bench.store.delete(["odd/text"]), "cannot be decoded"),
        ]
        for call, words in calls:
            with pytest.raises(StoreUnavailable, match=words):
                await call()
            await bench.works()
        assert bench.store.spawned == 4


# -- starting again ---------------------------------------------------------------------------------


async def test_callers_that_need_it_share_one_start():
    async with opened() as bench:
        await bench.store.kill("a test")
        calls = [asyncio.ensure_future(bench.store.exists_prefix(["a"])) for _ in range(20)]
        await bench.until(lambda: bench.store.pid > 0)
        # who does not wait any more stops nothing
        calls[0].cancel()
        assert await asyncio.gather(*calls[1:]) == [0] * 19
        assert calls[0].cancelled()
        assert bench.store.spawned == 2


async def test_starts_are_rationed():
    async with opened(in_process(respawn_s=600.0)) as bench:
        pid = bench.store.pid
        os.kill(pid, signal.SIGKILL)
        await bench.until(lambda: bench.store.pid == -1)
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match=f"the odd store process {pid} ended by signal 9"):
                await bench.store.exists_prefix(["a"])
        assert bench.store.spawned == 1
        assert children() == []


@pytest.mark.ci
@pytest.mark.parametrize(
    ("variable", "how", "error", "words"),
    [
        ("ODD_OPEN", "reject", StoreRejected, "store odd: wrong place; another"),
        ("ODD_OPEN", "unavailable", StoreUnavailable, "not now"),
        ("ODD_OPEN", "exit", StoreUnavailable, "ended with status 4"),
        # what is neither would surprise the caller of a verb
        ("ODD_IMPORT", "broken", StoreRejected, "plugin 'odd' .* SystemExit: broken"),
    ],
)
async def test_a_store_that_does_not_open_again_says_why(monkeypatch, variable, how, error, words):
    async with opened() as bench:
        await bench.store.kill("a test")
        monkeypatch.setenv(variable, how)
        for _ in range(2):
            with pytest.raises(error, match=words) as caught:
                await bench.store.exists_prefix(["a"])
            assert type(caught.value) is error
        assert children() == []
        assert bench.store.spawned == 3
        monkeypatch.delenv(variable)
        await bench.works()


@pytest.mark.ci
@pytest.mark.skips
async def test_a_failed_start_is_not_repeated_at_once(monkeypatch):
    store = in_process(respawn_s=skips.LIMIT_S)
    async with opened(store) as bench:
        # the first start is long enough ago
        skips.block()
        await store.kill("a test")
        monkeypatch.setenv("ODD_IMPORT", "broken")
        with pytest.raises(StoreRejected):
            await store.exists_prefix(["a"])
        # no start now: who asks is told what was wrong with the last
        with pytest.raises(StoreUnavailable, match="SystemExit"):
            await store.exists_prefix(["a"])
        assert store.spawned == 2
        monkeypatch.delenv("ODD_IMPORT")
        skips.block()
        await bench.works()
        assert store.spawned == 3
