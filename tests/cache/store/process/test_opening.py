"""Stores in a process of their own: how they open, and how they do not."""

from __future__ import annotations

import asyncio

import pytest

from fdasync.cache.store.base import DONE, Item
from fdasync.cache.store.process import proxy
from fdasync.cache.store.process.main import StoreService
from fdasync.errors import BadInput, ConfigError, PluginError, StoreRejected, StoreTimeout, StoreUnavailable
from fdasync.ipc.shared_memory import PAGE_NBYTES, Part, SharedRegion
from fdasync.testing.harness.leaks import children
from tests.cache.store.process.odd_store import Bench, in_process, opened

# -- opening ----------------------------------------------------------------------------------------


CI = pytest.mark.ci


@pytest.mark.ci(after=3)
@pytest.mark.parametrize(
    ("name", "config", "error", "words"),
    [
        ("nobody", {}, PluginError, "plugin 'nobody' of fdasync.stores: not installed"),
        pytest.param("missing", {}, PluginError, "AttributeError", marks=CI),
        pytest.param("none", {}, PluginError, "not a Store class", marks=CI),
        pytest.param(
            "odd", {"max_bytes": 1}, ConfigError, "store_config.max_bytes: is not a key that exists", marks=CI
        ),
        pytest.param("odd", {"max_nbytes": "much"}, ConfigError, "store_config.max_nbytes: Expected `int`", marks=CI),
        ("odd", {"max_nbytes": object()}, ConfigError, "store_config: cannot be sent"),
        ("odd", {"open": "reject"}, StoreRejected, "store odd: wrong place; another"),
        ("odd", {"open": "unavailable"}, StoreUnavailable, "store odd: not now"),
        ("odd", {"open": "fail"}, StoreUnavailable, "store odd: OSError: no such disk"),
        ("odd", {"open": "exit"}, StoreUnavailable, "the odd store process .* ended with status 4"),
        ("odd", {"open": "garbage"}, StoreUnavailable, "sent what cannot be decoded"),
        ("odd", {"open": "odd"}, StoreUnavailable, "answered call 9, which was not made"),
    ],
)
async def test_a_store_that_does_not_open_says_why(name, config, error, words):
    store = in_process(name, config)
    with pytest.raises(error, match=words) as caught:
        async with opened(store):
            pass
    assert type(caught.value) is error
    assert children() == []
    assert store.pid == -1


@pytest.mark.ci
async def test_fields_of_errors_come_whole():
    with pytest.raises(ConfigError) as caught:
        async with opened(in_process(config={"max_bytes": 1})):
            pass
    assert (caught.value.field, caught.value.limit) == ("store_config.max_bytes", None)
    with pytest.raises(PluginError) as missing:
        async with opened(in_process("missing")):
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
    service = StoreService()
    with pytest.raises(PluginError):
        await service.open("odd", {}, None, [])
    for error, wanted in told:
        found = service.errors.unpack(service.errors.pack(1, service.error_of(None, error)))
        assert (type(found), str(found)) == (type(wanted), str(wanted))


@pytest.mark.ci
async def test_one_that_did_not_open_is_opened_again_in_another_process(monkeypatch):
    monkeypatch.setenv("ODD_OPEN", "unavailable")
    store = in_process()
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
    store = in_process(config={"open": how}, open_deadline_s=1.0)
    with pytest.raises(StoreUnavailable, match="opening it did not end within 1 s"):
        async with opened(store):
            pass
    assert children() == []


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(("how", "deadline_s"), [("hang", 1.0), ("wait", 300.0)])
async def test_closing_while_it_opens(how, deadline_s, monkeypatch):
    monkeypatch.setattr(proxy, "_UNOPENED_S", deadline_s)
    bench = Bench(in_process(config={"open": how}, close_deadline_s=deadline_s))
    opening = asyncio.ensure_future(bench.store.open([bench.region]))
    await bench.until(lambda: bench.region.view(bench.region.nbytes - 7)[0] == ord("o"))
    async with asyncio.timeout(300):
        await bench.store.aclose()
    await asyncio.wait([opening], timeout=300)
    assert isinstance(opening.exception(), StoreUnavailable)
    assert children() == []
    if how == "wait":
        assert bytes(bench.region.view(bench.region.nbytes - 6)) == b"closed"
    bench.region.close()


async def test_closing_before_its_process_is_there():
    bench = Bench(in_process())
    opening = asyncio.ensure_future(bench.store.open([bench.region]))
    await asyncio.sleep(0)
    assert bench.store.pid == -1
    await bench.store.aclose()
    assert asyncio.all_tasks() <= {opening, asyncio.current_task()}
    await asyncio.wait([opening], timeout=300)
    with pytest.raises(StoreUnavailable, match="it is closed"):
        opening.result()
    assert bench.store.spawned == 0
    bench.region.close()


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 10])
async def test_an_opening_that_is_cancelled_leaves_nothing(turns):
    bench = Bench(in_process("memory"))
    opening = asyncio.ensure_future(bench.store.open([bench.region]))
    for _ in range(turns):
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening], timeout=300)
    assert opening.cancelled()
    await bench.store.aclose()
    assert children() == []
    bench.region.close()


async def test_more_regions_than_can_be_shared_are_refused():
    region = SharedRegion.create("one", PAGE_NBYTES)
    store = in_process("memory")
    with pytest.raises(StoreRejected, match="9 regions; at most 8"):
        await store.open([region] * 9)
    await store.aclose()
    assert store.spawned == 0
    region.close()


async def test_eight_regions_are_shared():
    regions = [SharedRegion.create(f"r{number}", PAGE_NBYTES * (1 + number)) for number in range(8)]
    store = in_process("memory")
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
