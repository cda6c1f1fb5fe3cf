"""Identities, sharing and eviction of blocks: `cache/prefix.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync.cache.aux import SlotPool
from fdasync.cache.blocks import BlockPool
from fdasync.cache.identity import KEY_NBYTES, block_key, block_keys, root_key
from fdasync.cache.prefix import PrefixIndex
from fdasync.errors import InvariantBroken
from tests.support.helpers import ROOT, case_settings


def make_index(num_blocks=8, num_host=0, **options):
    return PrefixIndex(BlockPool(num_blocks, SlotPool(num_blocks + num_host), num_host), **options)


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


def test_a_pin_counts_once_for_each_user():
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
        (lambda at: setattr(at.blocks[0], "key", b"x"), "index and pool disagree"),
        (lambda at: at.index._by_key.pop(KEYS[0]), "identity that is another's"),
        (lambda at: setattr(at.blocks[0], "ref_count", 0), "wrong list of the device"),
        (lambda at: setattr(at.blocks[1], "ref_count", 1), "wrong list of the device"),
        (lambda at: setattr(at.blocks[1], "ref_count", -1), "wrong list of the device"),
        (lambda at: setattr(at.blocks[1], "device_moves", 1), "wrong list of the device"),
        (lambda at: setattr(at.blocks[1], "on_host", True), "wrong list of the device"),
        (lambda at: setattr(at.blocks[2], "on_host", False), "wrong list of the device"),
        (lambda at: at.blocks[3].hold("copy"), "wrong list of the host"),
        (lambda at: setattr(at.blocks[3], "on_host", False), "wrong list of the host"),
        (lambda at: setattr(at.blocks[0], "on_host", True), "wrong list of the host"),
        (lambda at: setattr(at.blocks[0], "sealed", False), "neither pending nor sealed"),
        (lambda at: at.index._dirty.add(at.blocks[0]), "a list that it does not know"),
        (lambda at: at.index._host_used.add(at.blocks[0]), "a list that it does not know"),
        (lambda at: setattr(at.index.allocate(), "ref_count", 0), "is not in use"),
        (lambda at: at.index.pool.drop_host(at.blocks[3]), "index and pool disagree"),
    ],
)
def test_check_finds_what_is_broken(spoil, message):
    """One in use, one dirty, one clean, one on the host only."""
    index = make_index(8, 4)
    blocks = fill(index, KEYS[:3])
    copy_out(index, blocks[2:])
    index.release(blocks[1:])
    blocks.append(arrive(index, KEYS[3]))
    index.check()
    spoil(SimpleNamespace(index=index, blocks=blocks))
    with pytest.raises(InvariantBroken, match=message):
        index.check()


# -- two tiers


def copy_out(index, blocks):
    """What the swap planner does to blocks whose copy to the host is done."""
    for block in blocks:
        assert index.make_host_room()
        index.pool.add_host(block)
        block.on_host = True
        index.settle(block)


def arrive(index, key):
    """What the store planner does to a block that was fetched."""
    assert index.make_host_room(for_fetch=True)
    block = index.pool.allocate_host()
    block.sealed = block.on_host = True
    assert index.adopt(block, key)
    index.settle(block)
    return block


def places(index):
    return {key: (block.id >= 0, block.host >= 0) for key in KEYS if (block := index.get(key)) is not None}


def test_a_clean_block_goes_before_a_dirty_one_and_stays_on_the_host():
    index = make_index(2, 2)
    dirty, clean = fill(index, KEYS[:2])
    copy_out(index, [clean])
    index.release([dirty])
    index.release([clean])
    # the dirty one was used longer ago, and would be lost
    assert index.allocate() is not None
    assert places(index) == {KEYS[0]: (True, False), KEYS[1]: (False, True)}
    assert index.match(KEYS, 2, 1) == [dirty, clean]
    assert (index.evictions, index.host_evictions) == (1, 0)
    index.check()


def test_a_dirty_block_is_not_given_up_while_the_host_has_room_for_it():
    index = make_index(1, 1)
    index.release(fill(index, KEYS[:1]))
    assert (index.num_available, index.num_idle, index.num_dirty) == (0, 1, 1)
    assert index.has_host_room
    assert index.allocate() is None
    assert index.match(KEYS, 1, 1) != []


@pytest.mark.parametrize("num_host", [0, 1])
def test_a_dirty_block_is_dropped_only_where_the_host_has_no_room(num_host):
    index = make_index(2, num_host)
    if num_host:
        # a transfer holds it
        index.pool.allocate_host().hold("write")
    index.release(fill(index, KEYS[:2]))
    assert not index.has_host_room
    assert (index.num_available, index.num_dirty) == (2, 2)
    assert index.allocate() is not None
    assert index.allocate() is not None
    assert (index.evictions, index.num_dirty) == (2, 0)
    assert places(index) == {}
    index.check()


def test_what_was_promised_is_given_though_giving_makes_room_on_the_host():
    index = make_index(2, 1)
    clean, dirty = fill(index, KEYS[:2])
    copy_out(index, [clean])
    index.release([clean])
    index.release([dirty])
    # all of the host is a copy of an unused block: nowhere to go for the dirty one
    assert index.num_available == 2
    index.take()
    # now the host has a block that is nowhere else, which could make room
    assert index.has_host_room
    assert index.num_available == 0
    index.take()
    assert index.get(KEYS[1]) is None
    with pytest.raises(InvariantBroken, match="more blocks were taken than were available"):
        index.take()
    with pytest.raises(InvariantBroken, match="more blocks were brought than were available"):
        index.bring(clean)


def test_bringing_a_block_pins_it_and_keeps_its_place_on_the_host():
    index = make_index(2, 2)
    block = arrive(index, KEYS[0])
    assert block.ref_count == 0
    index.bring(block)
    assert (block.ref_count, block.id >= 0, block.host >= 0) == (1, True, True)
    index.check()
    index.release([block])
    assert index.num_available == 2
    assert places(index) == {KEYS[0]: (True, True)}


@pytest.mark.parametrize(("hit", "left"), [("clean", 0), ("dirty", 1), ("host", 1), ("pinned", 1)])
def test_what_is_about_to_be_pinned_is_no_room(hit, left):
    index = make_index(3, 3)
    clean, dirty, pinned = fill(index, KEYS[:3])
    copy_out(index, [clean])
    index.release([clean])
    index.release([dirty])
    host = arrive(index, KEYS[3])
    chosen = {"clean": clean, "dirty": dirty, "host": host, "pinned": pinned}[hit]
    # the host has room: the dirty one is not available anyway
    assert index.num_available == 1
    assert index.available_besides([chosen]) == left


def test_what_is_about_to_be_pinned_is_no_room_where_dirty_blocks_are():
    index = make_index(2)
    blocks = fill(index, KEYS[:2])
    index.release(blocks)
    assert index.available_besides(blocks[:1]) == 1
    assert index.available_besides(blocks) == 0


def test_room_on_the_host_is_made_of_what_is_nowhere_else_then_of_copies_in_use_then_for_a_fetch_of_unused_ones():
    index = make_index(3, 3)
    unused, used, gone = fill(index, KEYS[:3])
    copy_out(index, [unused, used, gone])
    index.release([unused])
    index.release([gone])
    index._leave_device(gone)
    assert index.pool.num_host_free == 0
    for key in (KEYS[2], KEYS[1]):
        assert index.has_host_room
        assert index.make_host_room()
        index.pool.allocate_host().hold("write")
        assert index.get(key) is None or index.get(key).host < 0
    # a copy outward would only change places with this one
    assert not index.has_host_room
    assert not index.make_host_room()
    assert unused.device_list is index._clean
    assert index.make_host_room(for_fetch=True)
    assert unused.device_list is index._dirty
    assert (index.host_evictions, index.get(KEYS[2])) == (3, None)
    index.check()


def test_a_block_on_its_way_to_the_store_takes_the_place_of_a_copy_that_needs_none():
    index = make_index(3, 2)
    first, second, third = fill(index, KEYS[:3])
    copy_out(index, [first, second])
    index.release([first])
    index.release([second])
    # it waits for the store itself
    first.wanted = True
    assert not index.make_host_room()
    assert not index.make_host_room(for_store=True)
    first.wanted = False
    assert index.make_host_room(for_store=True)
    assert (first.host, first.device_list is index._dirty) == (-1, True)
    index.release([third])
    index.check()


def test_the_host_gives_up_what_was_used_longest_ago():
    index = make_index(1, 3)
    blocks = [arrive(index, key) for key in KEYS[:3]]
    index.bring(blocks[0])
    index.release([blocks[0]])
    index._leave_device(blocks[0])
    for key in (KEYS[1], KEYS[2], KEYS[0]):
        assert index.get(key) is not None
        assert index.make_host_room()
        assert index.get(key) is None
        index.pool.allocate_host().hold("write")
    assert not index.make_host_room(for_fetch=True)


def hold(block, tier, count):
    """So many transfers touch it there."""
    if tier == "device":
        block.device_moves = count
    else:
        block.host_holds = ("copy",) * count


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_transfer_pins_its_end(tier):

    index = make_index(1, 1)
    (block,) = fill(index, KEYS[:1])
    copy_out(index, [block])
    hold(block, tier, 1)
    index.release([block])
    index.check()
    if tier == "device":
        assert index.allocate() is None
        assert index.num_idle == 0
    else:
        assert not index.make_host_room(for_fetch=True)
    hold(block, tier, 0)
    index.settle(block)
    assert index.num_available == 1
    assert index.make_host_room(for_fetch=True)


def test_dirty_blocks_are_named_in_the_order_of_eviction():
    index = make_index(4, 4)
    older = fill(index, KEYS[:2])
    newer = fill(index, KEYS[2:4])
    index.release(newer)
    index.release(older)
    assert index.next_dirty(3) == [newer[1], newer[0], older[1]]
    assert index.next_dirty(9) == [newer[1], newer[0], older[1], older[0]]


def test_a_second_computation_that_arrives_is_dropped():
    index = make_index(2, 2)
    (block,) = fill(index, KEYS[:1])
    late = index.pool.allocate_host()
    late.sealed = late.on_host = True
    assert not index.adopt(late, KEYS[0])
    index.settle(late)
    assert index.get(KEYS[0]) is block
    assert index.pool.num_host_free == 2
    index.check()


def test_after_forget_nothing_matches_and_what_nobody_uses_is_free():
    index = make_index(4, 4)
    used, unused, copied = fill(index, KEYS[:3])
    copy_out(index, [used, copied])
    index.release([unused])
    index.release([copied])
    host = arrive(index, KEYS[3])
    for block in (used, unused, copied, host):
        block.wanted = True
    index.forget()
    index.check()
    assert places(index) == {}
    assert index.match(KEYS, 4, 9) == []
    assert index.pool.live() == [used]
    assert (used.key, used.host, used.ref_count, used.wanted) == (None, -1, 1, False)
    assert (index.pool.num_free, index.pool.num_host_free) == (3, 4)
    assert (index.num_idle, index.has_host_room) == (0, True)
    # and the same tokens under a new root are other blocks
    index.release([used])
    assert index.pool.num_free == 4


@pytest.mark.parametrize("tier", ["device", "host"])
def test_what_a_transfer_uses_goes_with_its_end_after_forget(tier):
    index = make_index(1, 1)
    (block,) = fill(index, KEYS[:1])
    copy_out(index, [block])
    index.release([block])
    hold(block, tier, 1)
    index.settle(block)
    index.forget()
    index.check()
    assert index.pool.live() == [block]
    assert (block.id >= 0, block.host >= 0) == (tier == "device", tier == "host")
    hold(block, tier, 0)
    index.settle(block)
    assert index.pool.live() == []
    index.check()


def test_the_weights_cannot_change_under_a_pending_block():
    index = make_index()
    block = index.allocate()
    index.begin(block, KEYS[0], 0)
    with pytest.raises(InvariantBroken, match="while the weights change"):
        index.forget()
