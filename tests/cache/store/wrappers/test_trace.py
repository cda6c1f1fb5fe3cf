"""The wrapper that tells of every call."""

from __future__ import annotations

import asyncio

import pytest

from fdasync.cache.store.base import DONE, EXISTS, MISS, Outcome
from fdasync.cache.store.wrappers import StoreCall, Trace
from fdasync.errors import StoreUnavailable
from fdasync.testing import run_sim
from tests.cache.store.wrappers.scripted_store import NBYTES, Scripted, items, opened

# -- trace ----------------------------------------------------------------------------------------------


def test_a_trace_tells_of_every_call():
    async def play():
        calls = []
        scripted = Scripted(
            2, 1.0, [EXISTS, DONE], [DONE, MISS, Outcome("damaged", "x")], 1, StoreUnavailable("scripted", "gone"), 50.0
        )
        store = Trace(scripted, calls.append)
        async with opened(store):
            await store.exists_prefix(["a", "b", "c"])
            await store.put(items("a", "b"))
            await store.put(items("a", "b"))
            await store.get_into(items("a", "b", "c"))
            await store.delete(["a", "b"])
            with pytest.raises(StoreUnavailable):
                await store.get_into(items("a"))
            putting = asyncio.ensure_future(store.put(items("a")))
            await asyncio.sleep(0.5)
            putting.cancel()
            await asyncio.wait([putting])
            await store.usage()

        def call(verb, count, nbytes=0, done=0, seconds=0.0, outcomes=None, error=""):
            return StoreCall(
                store="scripted",
                verb=verb,
                items=count,
                nbytes=nbytes,
                done_nbytes=done,
                seconds=pytest.approx(seconds, abs=1e-6),
                outcomes=outcomes or {},
                error=error,
            )

        assert calls == [
            call("exists_prefix", 3, outcomes={"exists": 2, "miss": 1}),
            call("put", 2, 2 * NBYTES, 2 * NBYTES, 1.0, {"done": 2}),
            call("put", 2, 2 * NBYTES, NBYTES, 0.0, {"exists": 1, "done": 1}),
            call("get_into", 3, 3 * NBYTES, NBYTES, 0.0, {"done": 1, "miss": 1, "damaged": 1}),
            call("delete", 2, outcomes={"done": 1, "miss": 1}),
            call("get_into", 1, NBYTES, error="StoreUnavailable: store scripted: gone"),
            call("put", 1, NBYTES, seconds=0.5, error="CancelledError"),
            call("usage", 0),
        ]

    run_sim(play())
