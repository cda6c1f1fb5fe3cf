"""Device blocks and aux slots by number: `cache/blocks.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fdasync.cache.aux import SlotPool
from fdasync.cache.blocks import Block, BlockPool
from fdasync.errors import InvariantBroken
from tests.helpers import machine_settings


def test_a_fresh_block_is_open_private_pinned_once_and_has_its_own_slot():
    pool = BlockPool(2, SlotPool(2))
    first, second = pool.allocate(), pool.allocate()
    assert (first.pins, first.key, first.sealed, first.step) == (1, None, False, -1)
    assert first.id != second.id
    assert first.slot is not None
    assert second.slot is not None
    assert first.slot.id != second.slot.id
    assert pool.num_free == 0


def test_without_capture_blocks_have_no_slot():
    pool = BlockPool(1, None)
    block = pool.allocate()
    assert block.slot is None
    block.pins = 0
    pool.free(block)
    pool.check()
    assert pool.num_free == 1


def test_allocating_from_an_empty_pool_is_a_defect():
    pool = BlockPool(1, None)
    pool.allocate()
    with pytest.raises(InvariantBroken, match="no free block"):
        pool.allocate()


@pytest.mark.parametrize("spoil", ["pinned", "indexed", "freed already", "of another life"])
def test_only_a_private_unpinned_live_block_can_be_freed(spoil):
    pool = BlockPool(2, SlotPool(2))
    block = pool.allocate()
    if spoil == "indexed":
        block.pins, block.key = 0, b"key"
    elif spoil == "freed already":
        block.pins = 0
        pool.free(block)
    elif spoil == "of another life":
        block = Block(block.id, block.slot)
        block.pins = 0
    with pytest.raises(InvariantBroken, match="cannot be freed"):
        pool.free(block)


def test_the_slot_comes_back_under_another_generation():
    pool = BlockPool(1, SlotPool(1))
    seen = set()
    for _ in range(5):
        block = pool.allocate()
        assert block.slot not in seen
        seen.add(block.slot)
        block.pins = 0
        pool.free(block)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda at: at.pool._free.append(at.pool._free[0]), "free twice"),
        (lambda at: at.pool._free.append(at.block.id), "add up"),
        (lambda at: at.pool._live.pop(at.block.id), "add up"),
        (lambda at: setattr(at.block, "slot", None), "without a block"),
        (lambda at: setattr(at.block, "slot", at.other.slot), "share a slot"),
        (lambda at: at.pool._slots._free.append(at.block.slot.id), "free and in use"),
        (lambda at: at.pool._slots._free.pop(), "are not 4"),
    ],
)
def test_check_finds_broken_books(spoil, message):
    pool = BlockPool(4, SlotPool(4))
    block, other = pool.allocate(), pool.allocate()
    pool.check()
    spoil(SimpleNamespace(pool=pool, block=block, other=other))
    with pytest.raises(InvariantBroken, match=message):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Against a set of ids: nothing handed out twice, no (slot, generation) ever seen again."""

    @initialize(num_blocks=st.integers(1, 6), capture=st.booleans())
    def begin(self, num_blocks, capture):
        self.pool = BlockPool(num_blocks, SlotPool(num_blocks) if capture else None)
        self.capture = capture
        self.held: dict[int, Block] = {}
        self.seen: set[object] = set()

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def allocate(self):
        block = self.pool.allocate()
        assert block.id not in self.held
        assert 0 <= block.id < self.pool.num_blocks
        self.held[block.id] = block
        assert (block.slot is not None) == self.capture
        if block.slot is not None:
            assert block.slot not in self.seen
            assert block.slot.generation > 0
            self.seen.add(block.slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        block = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        block.pins = 0
        self.pool.free(block)

    @invariant()
    def books_are_right(self):
        self.pool.check()
        assert self.pool.num_free == self.pool.num_blocks - len(self.held)
        assert {block.id for block in self.pool.live()} == set(self.held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = machine_settings(40, 30)
