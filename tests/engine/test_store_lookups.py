"""Lookups of an engine's store: in runs of as many keys as a call takes, one after the other, up to the first gap."""

from __future__ import annotations

import msgspec
import pytest

from fdasync import Engine
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.events.catalog import LookedUp
from fdasync.testing import until
from tests.engine.tiers import ask, play, prompt, tiers_config


class Sized(MemoryStore):
    """Has a length, so that an empty one is false; takes so many keys a call; notes its lookups."""

    def __init__(self, most=65536):
        super().__init__(MemoryConfig())
        self.capabilities = msgspec.structs.replace(self.capabilities, max_batch=most)
        self.lookups = []
        self.stays = False

    def __len__(self):
        return 0

    async def exists_prefix(self, keys):
        found = await super().exists_prefix(keys)
        if len(keys) > 1 or self.lookups:
            self.lookups.append((len(keys), found))
        return found

    async def aclose(self):
        if not self.stays:
            await super().aclose()


def test_a_store_that_is_false_is_the_store():
    async def work():
        store = Sized()
        async with Engine(tiers_config(store="memory"), store=store) as engine:
            assert store.in_use
            await ask(engine, prompt(0))
            await until(lambda: engine.stats().scheduler.written_blocks)

    play(work)


@pytest.mark.parametrize("stored", [False, True])
def test_the_keys_behind_a_gap_are_not_asked_for(stored):
    async def work():
        store = Sized(most=4)
        config = tiers_config({"num_blocks": 40}, store="memory")
        if stored:
            store.stays = True
            async with Engine(config, store=store) as engine:
                await ask(engine, prompt(0))
                await until(lambda: engine.stats().scheduler.written_blocks >= 10)
            store.lookups.clear()
        async with Engine(config, store=store) as engine, engine.bus.subscribe(LookedUp) as ends:
            store.stays = False
            await ask(engine, prompt(0))
            first = await anext(ends)
        assert first.answered
        if stored:
            # nine of ten blocks: the last token is computed
            assert first.count == 9
            assert [asked for asked, _ in store.lookups[:3]] == [4, 4, 1]
        else:
            assert first.count == 0
            assert store.lookups[0] == (4, 0)
            assert len(store.lookups) == 1

    play(work)
