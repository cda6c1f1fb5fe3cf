"""Slots and their generations: `cache/aux.py`."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fdasync.cache.aux import AuxSpec, Slot, SlotPool
from fdasync.errors import BadInput, InvariantBroken
from tests.support.helpers import machine_settings


@pytest.mark.parametrize(
    ("spec", "nbytes"),
    [
        (AuxSpec("routing", (48, 8), "uint8"), 384),
        (AuxSpec("routing", (3, 2), "uint16"), 12),
        (AuxSpec("values", (4,), "float16"), 8),
        (AuxSpec("stamp", (1,), "uint32"), 4),
    ],
)
def test_bytes_of_a_token(spec, nbytes):
    assert spec.token_nbytes == nbytes


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [("", (1,), "uint8"), ("a", (), "uint8"), ("a", (0,), "uint8"), ("a", (2, -1), "uint8"), ("a", (1,), "int64")],
)
def test_specs_that_cannot_be_are_refused(name, shape, dtype):
    with pytest.raises(BadInput, match="aux_specs"):
        AuxSpec(name, shape, dtype)


def test_generations_are_32_bits_wide_and_never_0():
    pool = SlotPool(1)
    pool._generation[0] = 0xFFFF_FFFE
    last = pool.acquire()
    assert last.generation == 0xFFFF_FFFF
    pool.release(last)
    assert pool.acquire().generation == 1


@pytest.mark.parametrize("wrong", [Slot(0, 2), Slot(0, 0), Slot(1, 1)])
def test_a_stale_generation_cannot_be_released(wrong):
    pool = SlotPool(2)
    slot = pool.acquire()
    assert slot == Slot(0, 1)
    with pytest.raises(InvariantBroken, match="is not in use"):
        pool.release(wrong)
    pool.release(slot)
    with pytest.raises(InvariantBroken, match="is not in use"):
        pool.release(slot)


def test_running_out_is_a_defect():
    pool = SlotPool(1)
    pool.acquire()
    with pytest.raises(InvariantBroken, match="no aux slot left of 1"):
        pool.acquire()


class SlotMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(1, 5))
    def begin(self, num_slots):
        self.pool = SlotPool(num_slots)
        self.uses: dict[int, int] = {}  # slot -> generation, while in use
        self.last: dict[int, int] = {}

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def acquire(self):
        slot = self.pool.acquire()
        assert slot.id not in self.uses
        assert slot.generation == self.last.get(slot.id, 0) + 1
        self.uses[slot.id] = self.last[slot.id] = slot.generation

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.uses)))
        self.pool.release(Slot(slot, self.uses.pop(slot)))

    @rule(slot=st.integers(0, 4), generation=st.integers(0, 4))
    def release_what_is_not_in_use(self, slot, generation):
        if slot < self.pool.num_slots and self.uses.get(slot) != generation:
            with pytest.raises(InvariantBroken):
                self.pool.release(Slot(slot, generation))

    @invariant()
    def checks_pass(self):
        self.pool.check()
        assert self.pool.num_free == self.pool.num_slots - len(self.uses)


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = machine_settings(30, 25)
