"""Stores in a process of their own: the same answers, and every way for that process to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from fdasync.cache.store.base import DONE, EXISTS, MISS, Item, Outcome, StoreUsage
from fdasync.cache.store.block_format import BlockSchema, Section, object_key
from fdasync.cache.store.process.messages import pack_error, unpack_error
from fdasync.cache.store.process.proxy import HostedStore
from fdasync.errors import BadInput, ConfigError, PluginError, StoreRejected, StoreTimeout, StoreUnavailable
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, SharedRegion
from fdasync.testing import StoreTests
from fdasync.testing.harness.leaks import children, native_threads
from fdasync.testing.harness.processes import stop_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

MODULE = '''
import asyncio, os, sys, time
from concurrent.futures import ThreadPoolExecutor
import msgspec
from fdasync.cache.store.memory import MemoryStore
from fdasync.cache.store.base import Capabilities, Outcome, StoreUsage, finish
from fdasync.errors import StoreRejected, StoreUnavailable


if "ODD_IMPORT" in os.environ:
    raise SystemExit(os.environ["ODD_IMPORT"])


class OddConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_nbytes: int = 1 << 30
    open: str = ""
    close: str = ""
    max_batch: int = 256
    flip: int = -1


def frame(payload):
    """Written where the engine listens; nothing but a kill ends what comes then."""
    if not isinstance(payload, bytes):
        payload = msgspec.msgpack.encode(payload)
    os.write(int(sys.argv[1]), len(payload).to_bytes(4, "little") + bytes(1) + payload)
    time.sleep(600)


class OddStore(MemoryStore):
    """Does what the first key of a call says; a memory store for other keys."""

    config_type = OddConfig

    async def open(self, regions):
        await super().open(regions)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(8))
        self.capabilities = msgspec.structs.replace(self.capabilities, name="odd", max_batch=self.config.max_batch)
        regions[0].view(regions[0].nbytes - 7, 1)[:] = b"o"
        match os.environ.get("ODD_OPEN", self.config.open):
            case "reject": raise StoreRejected("odd", "wrong place", "another")
            case "unavailable": raise StoreUnavailable("odd", "not now")
            case "fail": raise OSError("no such disk")
            case "exit": os._exit(4)
            case "hang": time.sleep(600)
            case "wait": await asyncio.get_running_loop().create_future()
            case "garbage": frame(b"xyz")
            case "odd": frame(["count", 1, 1])

    async def exists_prefix(self, keys):
        if not keys:
            return 0
        await self._play(keys[0], ())
        if keys[0] == "odd/many":
            return 1 << 40
        if keys[0] == "odd/negative":
            return -1
        if keys[0] == "odd/junk":
            return object()
        return await super().exists_prefix(keys)

    async def delete(self, keys):
        if keys[0] == "odd/text":
            return "several"
        if keys[0] == "odd/negative":
            return -1
        return await super().delete(keys)

    async def get_into(self, items):
        if not items:
            return []
        await self._play(items[0].key, items[0].parts)
        if items[0].key == "odd/few":
            return []
        return await super().get_into(items)

    async def put(self, items):
        if not items:
            return []
        await self._play(items[0].key, items[0].parts)
        outcomes = await super().put(items)
        if self.config.flip >= 0:
            value = bytearray(self._objects[items[0].key])
            value[self.config.flip] ^= 4
            self._objects[items[0].key] = bytes(value)
        return outcomes

    async def usage(self):
        return StoreUsage(objects=os.getpid(), nbytes=len(os.listdir("/proc/self/fd")))

    async def aclose(self):
        for region in self._regions:
            region.view(region.nbytes - 6)[:] = b"closed"
        await super().aclose()
        match self.config.close:
            case "hang": time.sleep(600)
            case "fail": raise RuntimeError("cannot let go")

    async def _play(self, key, parts):
        views = [self._regions[part.region].view(part.offset, part.nbytes) for part in parts]
        match key:
            case "odd/hang":
                views[0][:1] = b"h"
                time.sleep(600)
            case "odd/exit": os._exit(3)
            case "odd/raise": raise ZeroDivisionError("by zero")
            case "odd/reject": raise StoreRejected("own", "not ever", "leave it")
            case "odd/unavailable": raise StoreUnavailable("own", "not now")
            case "odd/cancelled": raise asyncio.CancelledError
            case "odd/garbage": frame(b"xyz")
            case "odd/utf8": frame(b"\\x94\\xa7refused\\x01\\xa1\\xff\\x80")
            case "odd/long": os.write(int(sys.argv[1]), b"\\xff" * 9); time.sleep(600)
            case "odd/stranger": frame(["count", 99, 1])
            case "odd/again": frame(["opened", Capabilities(name="x", durability="none")])
            case "odd/kind": frame(["used", 1, StoreUsage()])
            case "odd/stopped": frame(["stopped", 1])
            case "odd/error": frame(["refused", 1, "SystemExit", {}])
            case "odd/fields": frame(["refused", 1, "StoreRejected", {"x": "y"}])
            case "odd/wait":
                views[0][:1] = b"w"
                await asyncio.get_running_loop().create_future()
            case "odd/tidy":
                views[0][:1] = b"w"
                try:
                    await asyncio.get_running_loop().create_future()
                except asyncio.CancelledError:
                    await asyncio.sleep(0.1)
                    views[0][:1] = b"t"
                    raise
            case "odd/stubborn" | "odd/scribble":
                await finish(asyncio.ensure_future(asyncio.to_thread(self._scribble, views, key == "odd/scribble")))

    def _scribble(self, views, for_ever):
        """Until somebody says go, at the end of the first region."""
        number = 0
        go = self._regions[0].view(self._regions[0].nbytes - 8, 1)
        while for_ever or go[0] == 0:
            number = number % 250 + 1
            for view in views:
                view[:] = bytes([number]) * len(view)
            time.sleep(0.0002)
'''


@pytest.fixture(autouse=True)
def odd_plugin(tmp_path, monkeypatch) -> None:
    """A distribution with a store that does what it should not, where the child looks for modules."""
    (tmp_path / "oddstore.py").write_text(MODULE)
    info = tmp_path / "fdasync_oddstore-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fdasync-oddstore\nVersion: 1.0\n")
    points = "[fdasync.stores]\nodd = oddstore:OddStore\nmissing = oddstore:NoStore\nnone = oddstore:frame\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


PART_NBYTES = 10_000


def hosted(name: str = "odd", config: dict[str, Any] | None = None, **options: Any) -> HostedStore:
    return HostedStore(name, config or {}, **{"close_deadline_s": 20.0, "respawn_s": 0.0, **options})


class TestHosted(StoreTests):
    """Memory, one process away."""

    examples = 6

    def make(self):
        return hosted("memory", respawn_s=0.05)

    def make_capped(self, max_nbytes):
        return hosted("memory", {"max_nbytes": max_nbytes})

    def make_broken(self):
        return hosted(config={"open": "reject"})


class Bench:
    """An open store and a region of parts."""

    def __init__(self, store: HostedStore) -> None:
        self.store = store
        self.region = SharedRegion.create("hosted", 64 * PART_NBYTES)

    def item(self, key: str, place: int = 0) -> Item:
        return Item(key, (Part(0, place * PART_NBYTES, PART_NBYTES),))

    def view(self, place: int = 0) -> memoryview:
        return self.region.view(place * PART_NBYTES, PART_NBYTES)

    def go(self) -> None:
        """Stubborn verbs may end."""
        self.region.view(self.region.nbytes - 8, 1)[:] = b"g"

    async def until(self, there: Callable[[], bool]) -> None:
        """The child shows by what it writes how far it is."""
        async with asyncio.timeout(20.0):
            while not there():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def works(self) -> None:
        self.view(60)[:] = b"p" * PART_NBYTES
        assert await self.store.put([self.item("plain", 60)]) in ([DONE], [EXISTS])
        assert await self.store.get_into([self.item("plain", 61)]) == [DONE]
        assert bytes(self.view(61)) == b"p" * PART_NBYTES


@contextlib.asynccontextmanager
async def opened(store: HostedStore | None = None) -> AsyncIterator[Bench]:
    bench = Bench(store or hosted())
    try:
        await bench.store.open([bench.region])
        yield bench
    finally:
        await bench.store.aclose()
        bench.region.close()


def is_gone(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


# -- verbs ------------------------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_verbs_answer_from_another_process():
    async with opened() as bench:
        store = bench.store
        usage = await store.usage()
        assert usage.objects == store.pid != os.getpid()
        bench.view()[:] = b"a" * PART_NBYTES
        assert await store.put([bench.item("a"), bench.item("b")]) == [DONE, DONE]
        assert await store.put([bench.item("a"), bench.item("c")]) == [EXISTS, DONE]
        assert await store.exists_prefix(["a", "c", "x", "b"]) == 2
        assert await store.get_into([bench.item("b", 1), bench.item("x", 2)]) == [DONE, MISS]
        assert bytes(bench.view(1)) == b"a" * PART_NBYTES
        assert await store.delete(["a", "b", "x"]) == 2
        assert await store.exists_prefix([]) == 0
        assert await store.put([]) == []
        assert store.capabilities.name == "odd"
        assert store.spawned == 1


async def test_calls_are_performed_at_the_same_time():
    async with opened() as bench:
        waiting = [asyncio.ensure_future(bench.store.get_into([bench.item("odd/wait", place)])) for place in range(5)]
        await bench.until(lambda: all(bench.view(place)[0] == ord("w") for place in range(5)))
        await bench.works()
        for task in waiting:
            task.cancel()
        done, _ = await asyncio.wait(waiting, timeout=20.0)
        assert [task.cancelled() for task in done] == [True] * 5
        await bench.works()
        assert bench.store.spawned == 1


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        ("odd/raise", StoreUnavailable, "store odd: ZeroDivisionError: by zero"),
        ("odd/unavailable", StoreUnavailable, "store own: not now"),
        ("odd/reject", StoreRejected, "store own: not ever; leave it"),
        ("odd/cancelled", StoreUnavailable, "store odd: it cancelled its own call"),
        ("odd/junk", StoreUnavailable, "store odd: .*object"),
    ],
)
async def test_what_a_verb_raises_comes_typed(key, error, words):
    async with opened() as bench:
        for _ in range(2):
            with pytest.raises(error, match=f"^{words}") as caught:
                await bench.store.exists_prefix([key])
            assert type(caught.value) is error
        assert bench.store.spawned == 1


async def test_batches_have_an_end():
    async with opened(hosted(config={"max_batch": 100_000})) as bench:
        assert bench.store.capabilities.max_batch == 256
        items = [bench.item(f"k{number}") for number in range(257)]
        keys = [item.key for item in items]
        verbs = [(bench.store.put, items), (bench.store.get_into, items)]
        for verb, what in [*verbs, (bench.store.exists_prefix, keys), (bench.store.delete, keys)]:
            with pytest.raises(StoreRejected, match="257 items in one call; at most 256"):
                await verb(what)
        assert await bench.store.put(items[:256]) == [DONE] * 256
    async with opened(hosted(config={"max_batch": 3})) as bench:
        with pytest.raises(StoreRejected):
            await bench.store.put(items[:4])


async def test_what_cannot_be_sent_is_refused():
    async with opened() as bench:
        with pytest.raises(StoreRejected, match="cannot be sent"):
            await bench.store.put([Item("a", (Part(0, 1 << 70, 1),))])
        with pytest.raises(StoreRejected, match="cannot be sent"):
            await bench.store.exists_prefix(["\ud800"])
        await bench.works()


async def test_an_engine_process_starts_no_thread():
    before = native_threads()
    async with opened() as bench:
        await asyncio.gather(*(bench.store.put([bench.item(f"k{number}", number)]) for number in range(32)))
        assert native_threads() == before


# -- cancelling -------------------------------------------------------------------------------------


async def test_a_cancelled_verb_ends_when_its_work_has_ended():
    async with opened() as bench:
        task = asyncio.ensure_future(bench.store.get_into([bench.item("odd/stubborn")]))
        await bench.until(lambda: bench.view()[0] != 0)
        for _ in range(3):
            task.cancel()
            await asyncio.wait([task], timeout=0.01)
        assert not task.done()
        # the other end goes on as if nothing was
        await bench.works()
        bench.go()
        await asyncio.wait([task], timeout=20.0)
        assert task.cancelled()
        bench.view()[:] = bytes(PART_NBYTES)
        await bench.works()
        assert bytes(bench.view()) == bytes(PART_NBYTES)


async def test_a_verb_is_cancelled_once_however_often_it_is_asked_for():
    async with opened() as bench:
        task = asyncio.ensure_future(bench.store.get_into([bench.item("odd/tidy")]))
        await bench.until(lambda: bench.view()[0] == ord("w"))
        for _ in range(5):
            task.cancel()
            await asyncio.wait([task], timeout=0.01)
        await asyncio.wait([task], timeout=20.0)
        assert task.cancelled()
        # what the store does at its end was not cut short
        assert bench.view()[0] == ord("t")


async def test_a_cancelled_verb_of_a_stopped_child_ends_with_the_child():
    async with opened() as bench:
        stop_process(bench.store.pid)
        task = asyncio.ensure_future(bench.store.get_into([bench.item("a")]))
        await asyncio.wait([task], timeout=0.02)
        task.cancel()
        await asyncio.wait([task], timeout=0.05)
        assert not task.done()
        assert await bench.store.kill("a test")
        await asyncio.wait([task], timeout=20.0)
        assert task.cancelled()


# -- opening ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config", "error", "words"),
    [
        ("nobody", {}, PluginError, "plugin 'nobody' of fdasync.stores: not installed"),
        ("missing", {}, PluginError, "AttributeError"),
        ("none", {}, PluginError, "not a Store class"),
        ("odd", {"max_bytes": 1}, ConfigError, "store_config.max_bytes: is not a key that exists"),
        ("odd", {"max_nbytes": "much"}, ConfigError, "store_config.max_nbytes: Expected `int`"),
        ("odd", {"max_nbytes": object()}, ConfigError, "store_config: cannot be sent"),
        ("odd", {"open": "reject"}, StoreRejected, "store odd: wrong place; another"),
        ("odd", {"open": "unavailable"}, StoreUnavailable, "store odd: not now"),
        ("odd", {"open": "fail"}, StoreUnavailable, "store odd: OSError: no such disk"),
        ("odd", {"open": "exit"}, StoreUnavailable, "the odd store process .* ended with status 4"),
        ("odd", {"open": "garbage"}, StoreUnavailable, "sent what cannot be decoded"),
        ("odd", {"open": "odd"}, StoreUnavailable, "answered call 1, and nobody asked"),
    ],
)
async def test_a_store_that_does_not_open_says_why(name, config, error, words):
    store = hosted(name, config)
    with pytest.raises(error, match=words) as caught:
        async with opened(store):
            pass
    assert type(caught.value) is error
    assert children() == []
    assert store.pid == -1


async def test_fields_of_errors_come_whole():
    with pytest.raises(ConfigError) as caught:
        async with opened(hosted(config={"max_bytes": 1})):
            pass
    assert (caught.value.field, caught.value.limit) == ("store_config.max_bytes", None)
    with pytest.raises(PluginError) as missing:
        async with opened(hosted("missing")):
            pass
    assert (missing.value.group, missing.value.name) == ("fdasync.stores", "missing")
    assert missing.value.distribution == "fdasync-oddstore"


async def test_errors_of_other_classes_are_told_in_words():
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    told = [
        (StoreTimeout("own", "put", 2.0, ended), StoreUnavailable("odd", "put did not end within 2 s")),
        (KeyError("k"), StoreUnavailable("odd", "KeyError: 'k'")),
        (BadInput("n", "is odd", limit=3, hint="even"), BadInput("n", "is odd", limit="3", hint="even")),
    ]
    for error, wanted in told:
        found = unpack_error(pack_error(1, "odd", error))
        assert (type(found), str(found)) == (type(wanted), str(wanted))


async def test_one_that_did_not_open_is_opened_again_in_another_process(monkeypatch):
    monkeypatch.setenv("ODD_OPEN", "unavailable")
    store = hosted()
    bench = Bench(store)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="not now"):
            await store.open([bench.region])
    monkeypatch.delenv("ODD_OPEN")
    await store.open([bench.region])
    await bench.works()
    with pytest.raises(StoreUnavailable, match="it is open"):
        await store.open([bench.region])
    assert store.spawned == 3
    await store.aclose()
    bench.region.close()


@pytest.mark.parametrize("how", ["hang", "wait"])
async def test_opening_has_a_deadline(how):
    store = hosted(config={"open": how}, open_deadline_s=1.0)
    with pytest.raises(StoreUnavailable, match="opening it did not end within 1 s"):
        async with opened(store):
            pass
    assert children() == []


@pytest.mark.parametrize(("how", "deadline_s"), [("hang", 1.0), ("wait", 40.0)])
async def test_closing_while_it_opens(how, deadline_s):
    bench = Bench(hosted(config={"open": how}, close_deadline_s=deadline_s))
    opening = asyncio.ensure_future(bench.store.open([bench.region]))
    await bench.until(lambda: bench.region.view(bench.region.nbytes - 7)[0] == ord("o"))
    async with asyncio.timeout(20.0):
        await bench.store.aclose()
    await asyncio.wait([opening], timeout=20.0)
    assert isinstance(opening.exception(), StoreUnavailable)
    assert children() == []
    if how == "wait":
        assert bytes(bench.region.view(bench.region.nbytes - 6)) == b"closed"
    bench.region.close()


async def test_closing_before_its_process_is_there():
    bench = Bench(hosted())
    opening = asyncio.ensure_future(bench.store.open([bench.region]))
    await asyncio.sleep(0)
    assert bench.store.pid == -1
    await bench.store.aclose()
    assert asyncio.all_tasks() <= {opening, asyncio.current_task()}
    await asyncio.wait([opening], timeout=20.0)
    with pytest.raises(StoreUnavailable, match="it is closed"):
        opening.result()
    assert bench.store.spawned == 0
    bench.region.close()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 10])
async def test_an_opening_that_is_cancelled_leaves_nothing(turns):
    bench = Bench(hosted("memory"))
    opening = asyncio.ensure_future(bench.store.open([bench.region]))
    for _ in range(turns):
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening], timeout=20.0)
    assert opening.cancelled()
    await bench.store.aclose()
    assert children() == []
    bench.region.close()


async def test_more_regions_than_can_be_shared_are_refused():
    region = SharedRegion.create("one", PAGE_NBYTES)
    store = hosted("memory")
    with pytest.raises(StoreRejected, match="9 regions; at most 8"):
        await store.open([region] * 9)
    await store.aclose()
    assert store.spawned == 0
    region.close()


async def test_eight_regions_are_shared():
    regions = [SharedRegion.create(f"r{number}", PAGE_NBYTES * (1 + number)) for number in range(8)]
    store = hosted("memory")
    await store.open(regions)
    for number, region in enumerate(regions):
        region.view()[:] = bytes([number]) * region.nbytes
    parts = [Part(number, 100 * number, 50) for number in range(8)]
    assert await store.put([Item("a", tuple(parts))]) == [DONE]
    assert await store.get_into([Item("a", (Part(7, 0, 400),))]) == [DONE]
    assert bytes(regions[7].view(0, 400)) == b"".join(bytes([number]) * 50 for number in range(8))
    await store.aclose()
    for region in regions:
        region.close()


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
        _, late = await asyncio.wait(self.tasks, timeout=20.0)
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


async def test_kill_ends_a_start_too():
    async with opened() as bench:
        await bench.store.kill("first")
        verb = asyncio.ensure_future(bench.store.exists_prefix(["a"]))
        await bench.until(lambda: bench.store.pid > 0)
        assert await bench.store.kill("second")
        await asyncio.wait([verb], timeout=20.0)
        with pytest.raises(StoreUnavailable, match="second"):
            verb.result()
        assert children() == []
        await bench.works()


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("odd/garbage", "sent what cannot be decoded"),
        ("odd/utf8", "sent what cannot be decoded"),
        ("odd/long", "above"),
        ("odd/stranger", "answered call 99, and nobody asked"),
        ("odd/again", "opened its store twice"),
        ("odd/kind", "answered a call with an odd Used"),
        ("odd/stopped", "answered a call with an odd Stopped"),
        ("odd/many", "answered a call with an odd Count"),
        ("odd/negative", "answered a call with an odd Count"),
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


async def test_answers_that_do_not_fit_their_call_break_the_protocol():
    async with opened() as bench:
        calls = [
            (lambda: bench.store.get_into([bench.item("odd/few")]), "odd Outcomes"),
            (lambda: bench.store.delete(["odd/negative"]), "odd Count"),
            (lambda: bench.store.delete(["odd/text"]), "cannot be decoded"),
        ]
        for call, words in calls:
            with pytest.raises(StoreUnavailable, match=words):
                await call()
            await bench.works()
        assert bench.store.spawned == 4


# -- starting again ---------------------------------------------------------------------------------


async def test_a_start_is_shared_by_those_who_need_it():
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
    async with opened(hosted(respawn_s=600.0)) as bench:
        pid = bench.store.pid
        os.kill(pid, signal.SIGKILL)
        await bench.until(lambda: bench.store.pid == -1)
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match=f"the odd store process {pid} ended by signal 9"):
                await bench.store.exists_prefix(["a"])
        assert bench.store.spawned == 1
        assert children() == []


@pytest.mark.parametrize(
    ("variable", "how", "error", "words"),
    [
        ("ODD_OPEN", "reject", StoreRejected, "store odd: wrong place; another"),
        ("ODD_OPEN", "unavailable", StoreUnavailable, "not now"),
        ("ODD_OPEN", "exit", StoreUnavailable, "ended with status 4"),
        # what is neither would be news to who calls a verb
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


async def test_a_failed_start_is_not_repeated_at_once(monkeypatch):
    store = hosted(respawn_s=0.2)
    async with opened(store) as bench:
        # the first start is long enough ago
        await asyncio.sleep(0.25)
        await store.kill("a test")
        monkeypatch.setenv("ODD_IMPORT", "broken")
        with pytest.raises(StoreRejected):
            await store.exists_prefix(["a"])
        # no start now: who asks is told what was wrong with the last
        with pytest.raises(StoreUnavailable, match="SystemExit"):
            await store.exists_prefix(["a"])
        assert store.spawned == 2
        monkeypatch.delenv("ODD_IMPORT")
        async with asyncio.timeout(20.0):
            while True:
                with contextlib.suppress(StoreUnavailable):
                    await bench.works()
                    break
                await asyncio.sleep(0.02)
        assert store.spawned == 3


# -- closing ----------------------------------------------------------------------------------------


async def test_closing_waits_for_what_runs_and_closes_the_store():
    async with opened() as bench:
        running = asyncio.ensure_future(bench.store.get_into([bench.item("odd/stubborn")]))
        await bench.until(lambda: bench.view()[0] != 0)
        closing = [asyncio.ensure_future(bench.store.aclose()) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable, match=r"^store odd: it is closed"):
            await bench.store.exists_prefix(["a"])
        await asyncio.wait(closing, timeout=0.05)
        assert not any(task.done() for task in [running, *closing])
        bench.go()
        await asyncio.gather(*closing)
        # the store had the last word
        with pytest.raises(StoreUnavailable, match=r"^store memory: it is closed"):
            running.result()
        assert children() == []
        assert bytes(bench.region.view(bench.region.nbytes - 6)) == b"closed"
        with pytest.raises(StoreUnavailable, match=r"^store odd: it is closed"):
            await bench.store.usage()


async def test_closing_has_a_deadline():
    async with opened(hosted(config={"close": "hang"}, close_deadline_s=0.2)) as bench:
        await bench.store.aclose()
        assert children() == []


async def test_closing_a_stopped_child_has_the_deadline_too():
    async with opened(hosted(close_deadline_s=0.2)) as bench:
        stop_process(bench.store.pid)
        call = asyncio.ensure_future(bench.store.exists_prefix(["a"]))
        await asyncio.sleep(0)
        await bench.store.aclose()
        with pytest.raises(StoreUnavailable, match=r"^store odd: it is closed"):
            await call


async def test_a_store_that_cannot_be_closed_says_so():
    bench = Bench(hosted(config={"close": "fail"}))
    await bench.store.open([bench.region])
    with pytest.raises(StoreUnavailable, match="closing it failed: its process ended with status 1"):
        await bench.store.aclose()
    await bench.store.aclose()
    assert children() == []
    bench.region.close()


async def test_the_end_of_the_channel_closes_the_store():
    async with opened() as bench:
        pidfd = os.pidfd_open(bench.store.pid)
        # as if the engine had gone, but for the signal that the kernel would send
        assert bench.store._child is not None
        bench.store._child.process.channel.close()
        assert select.select([pidfd], [], [], 20.0)[0]
        os.close(pidfd)
        assert bytes(bench.region.view(bench.region.nbytes - 6)) == b"closed"


async def test_keys_at_the_terminal_are_not_for_the_child():
    async with opened() as bench:
        assert os.getpgid(bench.store.pid) == bench.store.pid != os.getpgid(0)


def test_a_child_dies_with_its_engine(tmp_path):
    script = """
        import asyncio, uvloop
        from fdasync.cache.store.process.proxy import HostedStore
        from fdasync.ipc.shared_memory import SharedRegion
        from fdasync.cache.store.base import Item, Part

        async def main():
            region = SharedRegion.create("r", 4096)
            store = HostedStore("odd", {}, close_deadline_s=5.0)
            await store.open([region])
            # it cannot see the end of its channel
            call = asyncio.ensure_future(store.get_into([Item("odd/hang", (Part(0, 0, 1),))]))
            while region.view()[0] != ord("h"):
                await asyncio.sleep(0.001)
            print(store.pid, flush=True)
            await asyncio.sleep(600)

        uvloop.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pidfd = os.pidfd_open(int(engine.stdout.readline()))
        engine.kill()
        assert select.select([pidfd], [], [], 20.0)[0]
        os.close(pidfd)


# -- blocks -----------------------------------------------------------------------------------------

SCHEMA = BlockSchema(
    layout="pages", kv_dtype="bfloat16", block_tokens=4,
    sections=(Section("kv", "bfloat16", (500,), 1000), Section("routing", "uint8", (4, 3), 12)),
    zeros=Part(0, 0, PAGE_NBYTES), trash=Part(0, PAGE_NBYTES, PAGE_NBYTES),
)  # fmt: skip
NAME = object_key(bytes(16), bytes(range(16)))
BLOCK = Item(NAME, (Part(0, 2 * PAGE_NBYTES, PAGE_NBYTES), Part(0, 3 * PAGE_NBYTES, 1000), Part(1, 24, 12)))


@contextlib.asynccontextmanager
async def with_blocks(store: HostedStore) -> AsyncIterator[list[SharedRegion]]:
    regions = [SharedRegion.create("host", 5 * PAGE_NBYTES), SharedRegion.create("aux", PAGE_NBYTES)]
    try:
        await store.open(regions)
        yield regions
    finally:
        await store.aclose()
        for region in regions:
            region.close()


async def test_blocks_are_sealed_in_the_child():
    store = hosted("memory", schema=SCHEMA)
    async with with_blocks(store) as regions:
        kv, rows = regions[0].view(3 * PAGE_NBYTES, 1000), regions[1].view(24, 12)
        kv[:], rows[:] = b"k" * 1000, b"r" * 12
        assert await store.put([BLOCK]) == [DONE]
        assert (await store.usage()) == StoreUsage(objects=1, nbytes=SCHEMA.object_nbytes)
        kv[:], rows[:] = bytes(1000), bytes(12)
        assert await store.get_into([BLOCK]) == [DONE]
        assert (bytes(kv), bytes(rows)) == (b"k" * 1000, b"r" * 12)
        assert store.capabilities.max_parts == 3
        with pytest.raises(StoreRejected, match="a block has"):
            await store.put([Item(NAME, BLOCK.parts[:2])])
        kv.release()
        rows.release()


async def test_damage_is_found_in_the_child():
    store = hosted(config={"flip": 2 * PAGE_NBYTES + 3}, schema=SCHEMA)
    async with with_blocks(store):
        assert await store.put([BLOCK]) == [DONE]
        [outcome] = await store.get_into([BLOCK])
        assert (outcome.status, outcome.problem.partition(":")[0]) == ("damaged", "checksum")
        assert "routing" in outcome.problem
        assert await store.get_into([BLOCK]) == [MISS]


async def test_a_schema_that_cannot_be_stored_is_refused_at_the_start():
    import msgspec

    store = hosted("memory", schema=msgspec.structs.replace(SCHEMA, layout="x" * 4096))
    with pytest.raises(StoreRejected, match="a header cannot say"):
        async with with_blocks(store):
            pass
