"""Identities, sharing and eviction of blocks: `cache/prefix.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync.cache.aux import SlotPool
from fdasync.cache.blocks import BlockPool
from fdasync.cache.prefix import KEY_NBYTES, PrefixIndex, block_key, block_keys, root_key
from fdasync.errors import InvariantBroken
from tests.helpers import ROOT, case_settings


def make_index(num_blocks=8, **options):
    return PrefixIndex(BlockPool(num_blocks, SlotPool(num_blocks)), **options)


def fill(index, keys, step=0):
    """A chain of sealed, pinned, indexed blocks."""
    blocks = []
    for key in keys:
        block = index.allocate()
        index.begin(block, key, step)
        index.seal(block)
        blocks.append(block)
    return blocks


KEYS = block_keys(ROOT, range(16), 2)


# -- identity


def test_identity_is_chained():
    keys = block_keys(ROOT, [1, 2, 3, 4, 5], 2)
    assert keys == [block_key(ROOT, [1, 2]), block_key(block_key(ROOT, [1, 2]), [3, 4])]
    assert all(len(key) == KEY_NBYTES for key in keys)
    # the same tokens behind another parent, or in another namespace, are another block
    assert block_keys(ROOT, [9, 2, 3, 4], 2)[1] != keys[1]
    assert not set(block_keys(root_key(b"other"), [1, 2, 3, 4], 2)) & set(keys)


def test_parts_of_a_namespace_do_not_run_into_each_other():
    assert root_key(b"ab", b"c") != root_key(b"a", b"bc")
    assert root_key(b"a") != root_key(b"a", b"")


@case_settings(50)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.sampled_from([1, 2, 4]), st.integers(0, 9))
def test_keys_can_be_made_in_parts(tokens, size, cut):
    cut = min(cut, len(tokens) // size)
    whole = block_keys(ROOT, tokens, size)
    assert len(whole) == len(tokens) // size
    parent = whole[cut - 1] if cut else ROOT
    assert whole[:cut] + block_keys(parent, tokens, size, cut * size) == whole


# -- matching


def test_a_match_is_the_longest_unbroken_run_up_to_the_limit():
    index = make_index()
    fill(index, KEYS[:2])
    fill(index, KEYS[3:4])
    assert [block.key for block in index.match(KEYS, 8, 1)] == KEYS[:2]
    assert [block.key for block in index.match(KEYS, 1, 1)] == KEYS[:1]
    assert index.match(KEYS, 0, 1) == []
    assert index.match(KEYS[2:], 8, 1) == []


def test_a_pending_block_is_seen_by_later_steps_only():
    index = make_index()
    block = index.allocate()
    index.begin(block, KEYS[0], 5)
    assert index.match(KEYS, 8, 4) == []
    assert index.match(KEYS, 8, 5) == []
    assert index.match(KEYS, 8, 6) == [block]
    assert index.is_coming(KEYS[0], 5)
    assert not index.is_coming(KEYS[0], 6)
    index.seal(block)
    assert index.match(KEYS, 8, 0) == [block]
    assert not index.is_coming(KEYS[0], 0)


def test_an_identity_has_one_indexed_computation():
    index = make_index()
    first, second, third = index.allocate(), index.allocate(), index.allocate()
    index.begin(first, KEYS[0], 0)
    index.begin(second, KEYS[0], 0)
    index.seal(first)
    index.seal(second)
    index.seal(third, KEYS[0])
    assert index.match(KEYS, 1, 9) == [first]
    free = index.pool.num_free
    index.release([second])
    index.release([third])
    assert index.pool.num_free == free + 2
    assert index.match(KEYS, 1, 9) == [first]
    index.check()


def test_a_block_filled_by_decoding_is_indexed_when_it_is_sealed():
    index = make_index()
    block = index.allocate()
    assert index.match(KEYS, 1, 9) == []
    index.seal(block, KEYS[0])
    assert index.match(KEYS, 1, 0) == [block]


def test_disabled_shares_nothing():
    index = make_index(enabled=False)
    (block,) = fill(index, KEYS[:1])
    other = index.allocate()
    index.seal(other, KEYS[1])
    assert index.match(KEYS, 8, 9) == []
    index.release([block])
    index.release([other])
    assert index.pool.num_free == index.num_available == 8
    index.check()


# -- eviction


def test_eviction_takes_leaves_before_parents_and_the_longest_unused_chain_first():
    index = make_index(4)
    older = fill(index, KEYS[:2])
    newer = fill(index, block_keys(ROOT, [50, 51, 52, 53], 2))
    order = [older[1].key, older[0].key, newer[1].key, newer[0].key]
    index.release(older)
    index.release(newer)
    for number, key in enumerate(order):
        index.allocate()
        assert index.match([key], 1, 9) == []
        assert all(index.match([other], 1, 9) for other in order[number + 1 :])
    assert index.evictions == 4
    assert index.allocate() is None


def test_use_makes_a_chain_young_again():
    index = make_index(4)
    first = fill(index, KEYS[:2])
    second = fill(index, block_keys(ROOT, [50, 51, 52, 53], 2))
    index.release(first)
    index.release(second)
    hits = index.match(KEYS, 2, 9)
    index.pin(hits)
    index.release(hits)
    index.allocate()
    index.allocate()
    assert len(index.match(KEYS, 2, 9)) == 2


def test_a_pinned_block_is_never_evicted():
    index = make_index(2)
    blocks = fill(index, KEYS[:2])
    index.release(blocks)
    index.pin(index.match(KEYS, 1, 9))
    assert index.num_available == 1
    assert index.allocate() is not None
    assert index.allocate() is None
    assert index.match(KEYS, 2, 9) == blocks[:1]
    index.check()


def test_a_pin_counts_once_for_each_who_uses_it():
    index = make_index(2)
    (block,) = fill(index, KEYS[:1])
    index.pin([block])
    index.release([block])
    assert index.num_available == 1
    index.release([block])
    assert index.num_available == 2


def test_a_pending_block_cannot_lose_its_last_pin():
    index = make_index()
    block = index.allocate()
    index.begin(block, KEYS[0], 0)
    with pytest.raises(InvariantBroken, match="while pending"):
        index.release([block])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda at: setattr(at.blocks[0], "key", b"x"), "disagree"),
        (lambda at: setattr(at.blocks[0], "pins", 0), "idle and pinned, or neither"),
        (lambda at: setattr(at.blocks[1], "pins", 1), "idle and pinned, or neither"),
        (lambda at: setattr(at.blocks[0], "sealed", False), "neither pending nor sealed"),
        (lambda at: at.index._idle.update({b"x": at.blocks[0]}), "idle block is not indexed"),
        (lambda at: setattr(at.index.allocate(), "pins", 0), "pinned by nobody"),
    ],
)
def test_check_finds_broken_books(spoil, message):
    index = make_index()
    blocks = fill(index, KEYS[:2])
    index.release(blocks[1:])
    index.check()
    spoil(SimpleNamespace(index=index, blocks=blocks))
    with pytest.raises(InvariantBroken, match=message):
        index.check()
