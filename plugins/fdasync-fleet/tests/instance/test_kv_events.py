"""What routers are told of an instance's blocks."""

from __future__ import annotations

from random import Random

import pytest
from fdasync_fleet.instance import kv_events as room
from fdasync_fleet.instance.kv_events import KvEvents
from fdasync_fleet.messages import KvEventBatch

from fdasync.events.actions import TellBlocks
from fdasync.testing.sim.loop import run_sim
from tests.support.pd_stage import FakePeer, Stage


def kv_events_of(peer):
    return [(kv_events.reset, kv_events.added, kv_events.removed) for kv_events in peer.take(KvEventBatch)]


def test_routers_are_told_of_blocks_together_and_late_comers_of_all():
    async def main():
        stage = Stage()
        keys = [bytes([number]) * 16 for number in range(4)]
        version = "3", 3
        kv_events = KvEvents(stage.context, lambda: version)
        early, late = FakePeer("one", "router"), FakePeer("two", "router")
        kv_events.add(early)
        await stage.settle(0.1)
        assert kv_events_of(early) == [(True, (), ())]
        kv_events.tell(TellBlocks((keys[0], keys[1]), ()))
        kv_events.tell(TellBlocks((keys[2],), (keys[0],)))
        await stage.settle(0.1)
        assert kv_events_of(early)[1:] == [(False, (keys[1], keys[2]), (keys[0],))]
        kv_events.add(late)
        await stage.settle(0.1)
        assert kv_events_of(late) == [(True, (keys[1], keys[2]), ())]
        # who does not keep up is told everything anew when it does, and nobody waits for it
        late.busy = True
        kv_events.tell(TellBlocks((keys[3],), ()))
        await stage.settle(0.2)
        assert kv_events_of(early)[-1] == (False, (keys[3],), ())
        late.busy = False
        await stage.settle(0.2)
        assert kv_events_of(late)[-1] == (True, (keys[1], keys[2], keys[3]), ())
        # of new weights nothing is known
        stage.context.namespace, version = lambda: b"o" * 16, ("4", 4)
        kv_events.tell(TellBlocks((keys[0],), ()))
        await stage.settle(0.2)
        for peer in (early, late):
            last = peer.take(KvEventBatch)[-1]
            assert (last.namespace, last.reset, last.added) == (b"o" * 16, True, (keys[0],))
            assert (last.weight_version, last.weight_order) == ("4", 4)
        # of another label every router is told, though no block has changed
        version = "again", 5
        kv_events.announce()
        kv_events.announce()
        await stage.settle(0.2)
        for peer in (early, late):
            last = peer.take(KvEventBatch)[-1]
            assert (last.weight_version, last.weight_order, last.reset, last.added) == ("again", 5, False, ())
        early.is_up = False
        kv_events.remove(late)
        count = len(late.sent)
        kv_events.tell(TellBlocks((keys[1],), ()))
        await stage.settle(0.2)
        assert len(late.sent) == count
        await stage.close()

    run_sim(main())


class Learner(FakePeer):
    """A router that learns what it is told; it acknowledges when the test says so."""

    def __init__(self, name):
        super().__init__(name, "router")
        self.blocks = set()
        self.most = 0

    def send(self, message, payload=None):
        super().send(message, payload)
        self.unacked += 1
        assert isinstance(message, KvEventBatch)
        self.most = max(self.most, len(message.added))
        if message.reset:
            self.blocks.clear()
        self.blocks |= set(message.added)
        self.blocks -= set(message.removed)


def keys_of(count, first=0):
    return tuple([number.to_bytes(16, "big") for number in range(first, first + count)])


def test_a_router_that_comes_has_one_page_before_it_at_a_time():
    async def main():
        stage = Stage()
        kv_events = KvEvents(stage.context, lambda: ("0", 0))
        keys = keys_of(3 * room._PAGE_KEYS - 10)
        kv_events.tell(TellBlocks(keys, ()))
        router = Learner("one")
        kv_events.add(router)
        await stage.settle(1.0)
        assert router.blocks == set(keys[: room._PAGE_KEYS]), "it has not acknowledged the first page"
        # what changes meanwhile is told at once, and what is gone is not told after that
        kv_events.tell(TellBlocks(keys_of(1, 10**6), (keys[0], keys[-1])))
        await stage.settle(0.1)
        assert router.blocks == {*keys[1 : room._PAGE_KEYS], *keys_of(1, 10**6)}
        for pages in (2, 3):
            router.unacked = 0
            await stage.settle(1.0)
            assert len(router.blocks) == min(pages * room._PAGE_KEYS, len(keys) - 1)
        router.unacked = 0
        await stage.settle(1.0)
        assert router.blocks == {*keys[1:-1], *keys_of(1, 10**6)}
        assert router.most == room._PAGE_KEYS
        count = len(router.sent)
        await stage.settle(5.0)
        assert len(router.sent) == count, "it is caught up"
        await stage.close()

    run_sim(main())


@pytest.mark.ci(after=5)
@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_between_all_routers_know_all_blocks_at_the_end(seed, monkeypatch):
    monkeypatch.setattr(room, "_PAGE_KEYS", 8)
    rng = Random(seed)

    async def main():
        stage = Stage()
        kv_events = KvEvents(stage.context, lambda: ("0", 0))
        routers = [Learner(str(number)) for number in range(3)]
        known = {}
        for step in range(200):
            added = [key for key in keys_of(rng.randrange(6), 10 * step) if key not in known]
            known.update(dict.fromkeys(added))
            removed = rng.sample(list(known), min(len(known), rng.randrange(5)))
            for key in removed:
                del known[key]
            kv_events.tell(TellBlocks(tuple([key for key in added if key in known]), tuple(removed)))
            router = rng.choice(routers)
            kind = rng.randrange(6)
            if kind == 0:
                kv_events.remove(router)
                kv_events.add(router)
            elif kind == 1:
                router.busy = not router.busy
            elif kind == 2 and rng.random() < 0.1:
                # other weights
                name = bytes([step]) * 16
                stage.context.namespace = lambda name=name: name
                known.clear()
                kv_events.announce()
            for each in routers:
                each.unacked = rng.randrange(each.unacked + 1)
            await stage.settle(rng.random() / 10)
        for router in routers:
            kv_events.add(router) if router not in kv_events._peers else None
            router.busy = False
        for _ in range(200):
            for router in routers:
                router.unacked = 0
            await stage.settle(0.1)
        for router in routers:
            assert router.blocks == set(known)
        await stage.close()

    run_sim(main())
