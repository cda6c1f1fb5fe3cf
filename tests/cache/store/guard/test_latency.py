"""The wrapper that makes a store slow."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from fdasync.errors import StoreUnavailable
from fdasync.testing import run_sim
from fdasync.testing.stores.latency import Latency
from tests.cache.store.guard.scripted_store import Scripted, item, items, now, opened, simulated

# -- latency --------------------------------------------------------------------------------------------


@simulated
async def test_latency_is_by_the_call_and_by_its_bytes():
    store = Latency(Scripted(), call_s=1.0, gib_s=float(1 << 30))
    async with opened(store):
        await store.exists_prefix(["a"])
        assert now() == pytest.approx(1.0)
        await store.put([item("a", 4)])
        assert now() == pytest.approx(6.0)


def test_jitter_is_drawn_within_its_share():
    async def times(seed):
        scripted = Scripted()
        store = Latency(scripted, call_s=1.0, jitter=0.25, random=Random(seed))
        async with opened(store):
            for _ in range(50):
                await store.exists_prefix(["a"])
        return [later - sooner for sooner, later in zip(scripted.times, scripted.times[1:], strict=False)]

    first = run_sim(times(1))
    assert first == run_sim(times(1))
    assert first != run_sim(times(2))
    assert 0.75 <= min(first) < 0.85
    assert 1.15 < max(first) <= 1.25


@pytest.mark.parametrize("how", ["kill", "aclose", "cancel"])
@simulated
async def test_what_waits_for_its_delay_never_begins_once_it_is_ended(how):
    scripted = Scripted()
    store = Latency(scripted, call_s=10.0)
    async with opened(store):
        putting = asyncio.ensure_future(store.put(items("a")))
        await asyncio.sleep(1.0)
        if how == "cancel":
            putting.cancel()
        else:
            await (store.kill("a test") if how == "kill" else store.aclose())
        await asyncio.wait([putting])
        assert now() == pytest.approx(1.0)
        assert putting.cancelled() if how == "cancel" else isinstance(putting.exception(), StoreUnavailable)
    assert scripted.calls == []
