"""Blocks of both tiers and aux slots by number: `cache/blocks.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fdasync.cache.aux import SlotPool
from fdasync.cache.blocks import Block, BlockPool
from fdasync.errors import InvariantBroken
from tests.support.helpers import machine_settings


def make_pool(num_blocks, num_host):
    return BlockPool(num_blocks, SlotPool(num_blocks + num_host), num_host)


def test_a_fresh_block_is_open_private_pinned_once_and_has_its_own_slot():
    pool = BlockPool(2, SlotPool(2))
    first, second = pool.allocate(), pool.allocate()
    assert (first.ref_count, first.key, first.sealed, first.step, first.host) == (1, None, False, -1, -1)
    assert first.usable
    assert first.id != second.id
    assert first.slot is not None
    assert second.slot is not None
    assert first.slot.id != second.slot.id
    assert pool.num_free == 0


def test_without_capture_blocks_have_no_slot():
    pool = BlockPool(1, None)
    block = pool.allocate()
    assert block.slot is None
    block.ref_count = 0
    pool.drop_device(block)
    pool.check()
    assert pool.num_free == 1


def test_allocating_from_an_empty_pool_is_a_defect():
    pool = BlockPool(1, None)
    pool.allocate()
    with pytest.raises(InvariantBroken, match="no free block"):
        pool.allocate()


def test_a_block_of_the_host_has_no_pin_and_a_slot_of_its_own():
    pool = make_pool(1, 2)
    first, second = pool.allocate_host(), pool.allocate_host()
    assert (first.id, first.ref_count, first.key, first.sealed, first.on_host) == (-1, 0, None, False, False)
    assert {first.host, second.host} == {0, 1}
    assert first.slot.id != second.slot.id
    assert (pool.num_free, pool.num_host_free) == (1, 0)
    with pytest.raises(InvariantBroken, match="no free host block"):
        pool.allocate_host()


@pytest.mark.parametrize("order", ["device first", "host first"])
def test_the_slot_goes_with_the_last_place_of_its_block(order):
    pool = make_pool(1, 1)
    block = pool.allocate()
    slot = block.slot
    pool.add_host(block)
    block.on_host, block.ref_count = True, 0
    assert (block.id, block.host, pool.num_free, pool.num_host_free) == (0, 0, 0, 0)
    drops = [pool.drop_device, pool.drop_host]
    first, second = drops if order == "device first" else reversed(drops)
    first(block)
    assert block.slot == slot
    assert pool.live() == [block]
    assert pool._slots.num_free == 1
    pool.check()
    second(block)
    assert pool.live() == []
    assert (pool.num_free, pool.num_host_free, pool._slots.num_free) == (1, 1, 2)
    assert not block.on_host
    pool.check()


def test_a_block_that_comes_back_to_the_device_keeps_its_slot():
    pool = make_pool(1, 1)
    block = pool.allocate_host()
    slot = block.slot
    assert not block.usable
    pool.add_device(block)
    assert block.usable
    block.arriving = 3
    assert not block.usable
    assert (block.id, block.slot) == (0, slot)
    pool.check()


@pytest.mark.parametrize(
    "spoil", ["pinned", "read by a copy", "not on the device", "dropped already", "of another life"]
)
def test_only_a_live_block_that_nobody_uses_leaves_the_device(spoil):
    pool = make_pool(2, 2)
    block = pool.allocate()
    block.ref_count = 0
    if spoil == "pinned":
        block.ref_count = 1
    elif spoil == "read by a copy":
        block.device_moves = 1
    elif spoil == "not on the device":
        block = pool.allocate_host()
    elif spoil == "dropped already":
        pool.drop_device(block)
    else:
        block = Block(block.id, -1, block.slot)
    with pytest.raises(InvariantBroken, match="cannot leave the device"):
        pool.drop_device(block)


def test_a_block_is_held_on_the_host_once_for_each_reason():
    pool = make_pool(1, 1)
    block = pool.allocate_host()
    block.hold("copy")
    block.hold("write")
    block.hold("copy")
    block.unhold("copy")
    assert sorted(block.host_holds) == ["copy", "write"]
    with pytest.raises(InvariantBroken, match="not held for export"):
        block.unhold("export")
    block.unhold("write")
    block.unhold("copy")
    pool.drop_host(block)
    assert pool.num_host_free == 1


@pytest.mark.parametrize("spoil", ["in a transfer", "not on the host", "dropped already", "of another life"])
def test_only_a_live_block_that_no_transfer_touches_leaves_the_host(spoil):
    pool = make_pool(2, 2)
    block = pool.allocate_host()
    if spoil == "in a transfer":
        block.hold("copy")
    elif spoil == "not on the host":
        block = pool.allocate()
    elif spoil == "dropped already":
        pool.drop_host(block)
    else:
        block = Block(-1, block.host, block.slot)
    with pytest.raises(InvariantBroken, match="cannot leave the host"):
        pool.drop_host(block)


def test_a_place_is_given_once_and_only_where_there_is_one():
    pool = make_pool(1, 1)
    block = pool.allocate()
    with pytest.raises(InvariantBroken, match="place on the device"):
        pool.add_device(block)
    pool.add_host(block)
    with pytest.raises(InvariantBroken, match="place on the host"):
        pool.add_host(block)
    other = make_pool(1, 1)
    first = other.allocate_host()
    other.allocate()
    with pytest.raises(InvariantBroken, match="place on the device"):
        other.add_device(first)
    third = make_pool(2, 1)
    third.allocate_host()
    with pytest.raises(InvariantBroken, match="place on the host"):
        third.add_host(third.allocate())


def test_the_slot_comes_back_under_another_generation():
    pool = BlockPool(1, SlotPool(1))
    seen = set()
    for _ in range(5):
        block = pool.allocate()
        assert block.slot not in seen
        seen.add(block.slot)
        block.ref_count = 0
        pool.drop_device(block)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda at: at.pool._free.append(at.pool._free[0]), "device block is free twice"),
        (lambda at: at.pool._host_free.append(at.pool._host_free[0]), "host block is free twice"),
        (lambda at: at.pool._free.append(at.block.id), "live device blocks do not add up"),
        (lambda at: at.pool._host_free.append(at.block.host), "live host blocks do not add up"),
        (lambda at: at.pool._host_free.pop(), "live host blocks do not add up"),
        (lambda at: at.pool._live.pop(at.other), "live device blocks do not add up"),
        (lambda at: at.pool._live.pop(at.third), "live host blocks do not add up"),
        (lambda at: setattr(at.block, "slot", None), "without a block"),
        (lambda at: setattr(at.block, "slot", at.other.slot), "share a slot"),
        (lambda at: at.pool._slots._free.append(at.block.slot.id), "free and in use"),
        (lambda at: at.pool._slots._free.pop(), "are not 8"),
    ],
)
def test_check_finds_what_is_broken(spoil, message):
    pool = make_pool(4, 4)
    block, other, third = pool.allocate(), pool.allocate(), pool.allocate_host()
    pool.add_host(block)
    pool.check()
    spoil(SimpleNamespace(pool=pool, block=block, other=other, third=third))
    with pytest.raises(InvariantBroken, match=message):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Against sets of ids: nothing handed out twice in either tier, no (slot, generation) ever seen again."""

    @initialize(num_blocks=st.integers(1, 5), num_host=st.integers(0, 5), capture=st.booleans())
    def begin(self, num_blocks, num_host, capture):
        self.pool = BlockPool(num_blocks, SlotPool(num_blocks + num_host) if capture else None, num_host)
        self.capture = capture
        #: block -> [device id or -1, host id or -1, its slot]
        self.held: dict[Block, list] = {}
        self.seen: set[object] = set()

    def ids(self, tier):
        return {place[tier] for place in self.held.values()} - {-1}

    def born(self, block, tier, number):
        assert block not in self.held
        assert number not in self.ids(tier)
        assert 0 <= number < (self.pool.num_host_blocks if tier else self.pool.num_blocks)
        assert (block.slot is not None) == self.capture
        if block.slot is not None:
            assert block.slot not in self.seen
            assert block.slot.generation > 0
            self.seen.add(block.slot)
        self.held[block] = [-1, -1, block.slot]
        self.held[block][tier] = number

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def allocate(self):
        block = self.pool.allocate()
        assert (block.ref_count, block.host) == (1, -1)
        block.ref_count = 0
        self.born(block, 0, block.id)

    @precondition(lambda self: self.pool.num_host_free)
    @rule()
    def allocate_host(self):
        block = self.pool.allocate_host()
        assert (block.ref_count, block.id) == (0, -1)
        self.born(block, 1, block.host)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tier=st.integers(0, 1))
    def add(self, data, tier):
        block = self.pick(data)
        place = self.held[block]
        free = self.pool.num_host_free if tier else self.pool.num_free
        add = self.pool.add_host if tier else self.pool.add_device
        if place[tier] >= 0 or not free:
            with pytest.raises(InvariantBroken):
                add(block)
            return
        add(block)
        number = block.host if tier else block.id
        assert number not in self.ids(tier)
        place[tier] = number

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tier=st.integers(0, 1), moves=st.sampled_from([0, 0, 0, 1]))
    def drop(self, data, tier, moves):
        block = self.pick(data)
        place = self.held[block]
        block.device_moves, block.host_holds = moves, ("copy",) * moves
        drop = self.pool.drop_host if tier else self.pool.drop_device
        if place[tier] < 0 or moves:
            with pytest.raises(InvariantBroken):
                drop(block)
            block.device_moves, block.host_holds = 0, ()
            return
        drop(block)
        place[tier] = -1
        if place[0] == place[1] == -1:
            del self.held[block]

    def pick(self, data):
        return data.draw(st.sampled_from(list(self.held)))

    @invariant()
    def checks_pass(self):
        self.pool.check()
        assert self.pool.num_free == self.pool.num_blocks - len(self.ids(0))
        assert self.pool.num_host_free == self.pool.num_host_blocks - len(self.ids(1))
        assert set(self.pool.live()) == set(self.held)
        for block, place in self.held.items():
            assert [block.id, block.host, block.slot] == place
        if self.capture:
            assert self.pool._slots.num_free == self.pool._slots.num_slots - len(self.held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = machine_settings(60, 40)
