"""The index of blocks, against sets that are followed one by one."""

from __future__ import annotations

from random import Random

import pytest
from fdasync_fleet.router.blocks import index as room
from fdasync_fleet.router.blocks.index import BlockIndex, slots_of

SLOTS = (0, 1, 5, 64, 511)
KEYS = [bytes([number % 3]) + number.to_bytes(15, "big") for number in range(40)]


class Plain:
    """The same by sets: what each instance has reported, and is expected to have because of each prompt."""

    def __init__(self):
        self.known = {slot: set() for slot in SLOTS}
        self.expected = {slot: set() for slot in SLOTS}

    def depth(self, slot, keys):
        have = self.known[slot] | self.expected[slot]
        return next((number for number, key in enumerate(keys) if key not in have), len(keys))


def check(index, plain, rng):
    for slot in SLOTS:
        assert index.blocks(slot) == plain.known[slot]
        assert index.count(slot) == len(plain.known[slot])
    assert len(index) == len(set().union(*plain.known.values(), *plain.expected.values()))
    keys = KEYS[rng.randrange(len(KEYS)) :]
    among = rng.sample(SLOTS, rng.randrange(len(SLOTS) + 1))
    found = index.prefixes(keys, sum(1 << slot for slot in among))
    assert {slot: depth for depth, bits in found for slot in slots_of(bits)} == {
        slot: plain.depth(slot, keys) for slot in among
    }
    assert [depth for depth, _ in found] == sorted({depth for depth, _ in found})


@pytest.mark.ci(after=6)
@pytest.mark.parametrize("seed", range(30))
def test_the_index_knows_what_sets_know(seed, monkeypatch):
    monkeypatch.setattr(room, "_STALE", 20)
    rng = Random(seed)
    index, plain = BlockIndex(), Plain()
    for slot in SLOTS:
        index.open(slot)
    prompts = []
    for _ in range(300):
        slot, first = rng.choice(SLOTS), rng.randrange(len(KEYS))
        some = KEYS[first : first + rng.randrange(1, 12)]
        kind = rng.randrange(20)
        if kind < 8:
            index.add(slot, some)
            plain.known[slot].update(some)
            plain.expected[slot].difference_update(some)
        elif kind < 13:
            index.remove(slot, some)
            plain.known[slot].difference_update(some)
        elif kind == 13:
            index.clear(slot)
            plain.known[slot].clear()
        elif kind == 14:
            index.close(slot)
            index.open(slot)
            plain.known[slot].clear()
            plain.expected[slot].clear()
            prompts = [(other, new) for other, new in prompts if other != slot]
        elif kind < 18:
            # a chain: who has a block has those before it
            new = index.expect(slot, some)
            have = plain.known[slot] | plain.expected[slot]
            there = max((number for number, key in enumerate(some, 1) if key in have), default=0)
            assert set(new) == set(some[there:])
            plain.expected[slot].update(new)
            prompts.append((slot, new))
        elif prompts:
            other, new = prompts.pop(rng.randrange(len(prompts)))
            index.unexpect(other, new)
            plain.expected[other].difference_update(new)
        check(index, plain, rng)
    for slot in SLOTS:
        index.close(slot)
    assert not len(index)


def test_a_prompt_that_nobody_has_is_followed_no_further_than_its_first_block():
    index = BlockIndex()
    index.open(3)
    keys = (KEYS[0], "this one would be no identity")
    assert index.prefixes(keys, 1 << 3) == [(0, 1 << 3)]
    assert index.prefixes(keys, 0) == []


def test_blocks_with_the_same_holders_share_one_set():
    index = BlockIndex()
    for slot in (100, 200, 300):
        index.open(slot)
        index.add(slot, KEYS)
    sets = [index._holders[key[0]][key] for key in KEYS]
    assert sets[0] == 1 << 100 | 1 << 200 | 1 << 300
    assert len(set(map(id, sets))) == 1


def test_what_an_instance_lost_is_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(room, "_STALE", 20)
    index = BlockIndex()
    index.open(0)
    for number in range(1000):
        key = number.to_bytes(16, "big")
        index.add(0, [key])
        index.remove(0, [key] if number else [])
    assert index.count(0) == 1
    assert len(index._known[0].keys) <= 16 * (2 + 20 + 1)
