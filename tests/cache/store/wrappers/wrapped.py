"""What tests of wrappers share."""

from __future__ import annotations

import asyncio

import pytest

from fdasync.cache.store.wrappers import Breaker
from fdasync.errors import StoreUnavailable
from tests.cache.store.wrappers.scripted_store import Scripted, items, now


def never_ends():
    return asyncio.get_running_loop().create_future()


class Watched(Breaker):
    """Notes its states and when they came."""

    def __init__(self, inner, **options):
        self.states = []
        defaults = {"failures": 3, "cooldown_s": 2.0, "max_cooldown_s": 10.0, "probe_s": 5.0}
        super().__init__(inner, on_state=self._note, **{**defaults, **options})

    def _note(self, state, why):
        assert why
        self.states.append((state, round(now(), 3)))

    async def refuses(self):
        calls = len(self.inner.calls) if isinstance(self.inner, Scripted) else None
        begun = now()
        with pytest.raises(StoreUnavailable, match="gets no calls for now"):
            await self.put(items("a"))
        assert now() == begun
        assert calls is None or len(self.inner.calls) == calls
