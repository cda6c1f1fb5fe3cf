"""A reset of the cache: what nobody uses is gone, what is used becomes private (docs/design.md, rule 37)."""

from __future__ import annotations

import pytest

from fdasync.events.actions import TellBlocks
from tests.scheduler.table import Table
from tests.scheduler.tiers.scenes import leave_on_host, make_table
from tests.support.pd_table import PdTable, of, only

A, B = range(9), range(100, 109)


def test_blocks_without_a_user_are_gone_from_device_and_host():
    table = Table(num_host_blocks=8)
    leave_on_host(table, A)
    table.run(table.request(1, B, 1))
    assert table.places(B) == ["device"] * 2
    table.turn(table.reset())
    assert (table.places(A), table.places(B)) == (["", ""], ["", ""])
    assert (table.stats.free_blocks, table.stats.free_host_blocks) == (64, 8)
    assert table.turn(table.request(2, A, 1), table.request(3, B, 1)).cached == {2: 0, 3: 0}
    table.run()
    # what is computed later is cached as ever
    assert table.turn(table.request(4, A, 1)).cached == {4: 8}
    table.run()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_one_that_runs_goes_on_and_shares_nothing_before_or_after(depth, steps):
    table = Table(pipeline_depth=depth, max_step_tokens=8)
    (start,) = table.turn(table.request(1, A, 12)).steps[0].starts
    for _ in range(steps):
        table.turn(table.done())
    # with steps in flight, and blocks pending
    turned = table.turn(table.reset())
    assert turned.starts == []
    assert table.turn(table.request(2, A, 12)).cached.get(2, 0) == 0
    table.run()
    for key in (1, 2):
        assert (len(table.finished[key].token_ids), table.finished[key].num_rows) == (12, 20)
    assert start.num_cached == 0
    # those of the first one are free, those of the second one are cached
    assert table.is_empty()
    assert table.stats.idle_blocks == 5
    assert table.places([*A, *table.finished[1].token_ids])[3:] == ["", ""]


def test_a_block_that_an_aborted_sequence_fills_after_a_reset_is_free():
    table = Table(pipeline_depth=2)
    table.turn(table.request(1, range(11), 20))
    table.turn(table.done())
    # the step in flight fills the third block
    table.turn(table.abort(1), table.reset())
    while table.flying:
        table.turn(table.done())
    assert table.stats.free_blocks == 64


def test_one_that_is_preempted_later_is_hashed_again_and_shares_again():
    table = Table(num_blocks=8, decode_reserve_blocks=0)
    table.turn(table.request(1, range(4), 20), table.request(2, [50, 51], 22))
    table.turn(table.done())
    table.turn(table.reset())
    while not table.hashes:
        table.turn(table.done())
    table.run()
    assert table.stats.preemptions == 1
    whole = [50, 51, *table.finished[2].token_ids][:23]
    assert table.places(whole) == ["device"] * 5
    assert (table.finished[2].num_rows, table.num_rows(2)) == (23, 23)
    assert table.is_empty()


def test_one_that_loads_goes_on_with_what_arrives():
    table = Table(num_host_blocks=8)
    leave_on_host(table, A)
    table.turn(table.request(1, A, 2))
    assert len(table.copies) == 1
    table.turn(table.reset())
    assert table.turn(table.request(2, A, 2)).cached == {2: 0}
    table.turn(table.copied())
    assert table.turn(table.done()).cached == {1: 8}
    table.run()
    assert table.stats.free_host_blocks == 8
    assert table.is_empty()


def test_the_store_keeps_its_blocks_and_what_waits_has_them_brought_again():
    table = make_table(A)
    table.turn(table.request(1, A, 1), table.pause())
    table.turn(table.looked_up())
    table.turn(table.fetched())
    assert table.places(A) == ["host", "host"]
    assert table.turn(table.reset()).fetches == []
    assert table.places(A) == ["", ""]
    assert table.stats.free_host_blocks == 64
    turned = table.turn(table.resume())
    assert len(turned.lookups) == 1
    table.run()
    assert table.finished[1].cached_tokens == (0, 0, 8)
    assert table.is_empty()


def test_a_fetch_under_way_is_of_the_store_and_counts():
    table = make_table(A)
    table.turn(table.request(1, A, 1))
    table.turn(table.looked_up())
    table.turn(table.reset())
    table.turn(table.fetched())
    table.run()
    assert table.finished[1].cached_tokens == (0, 0, 8)


def test_what_waits_to_be_written_is_not():
    table = make_table(write_through="all", prefill_tokens_per_s=1e9)
    table.turn(table.request(1, A, 1))
    table.turn(table.done())
    assert len(table.copies) == 1
    table.turn(table.reset())
    turned = table.turn(table.copied())
    assert turned.puts == []
    assert table.stats.writing == 0
    assert table.is_empty()


def test_what_is_computed_again_is_written_again_whatever_becomes_of_the_first_write():
    table = make_table(write_through="all", prefill_tokens_per_s=1e9)
    for key in (1, 2):
        table.turn(table.request(key, A, 1))
        table.turn(table.done())
        (put,) = table.turn(table.copied()).puts
        assert list(put.keys) == table.keys(A)
        table.turn(*[table.looked_up() for _ in list(table.lookups)], table.reset())
    # other blocks under the same identities: the store takes one of them, whole
    first, second = table.puts.values()
    assert not set(first.host) & set(second.host)
    table.turn(table.stored(second.put_id), table.stored(first.put_id, "--"))
    assert table.stats.writing == 0
    assert table.is_empty()


def test_routers_are_told_of_each_block_that_is_gone():
    table = Table(kv_events=True)
    turned = table.turn(table.request(1, A, 1))
    told = []
    while table.flying:
        told += of(table.turn(table.done()), TellBlocks)
    assert [set(one.added) for one in told] == [set(table.keys(A))]
    table.turn(table.request(2, B, 2))
    turned = table.turn(table.reset())
    # what is pending was not told of yet
    assert only(turned, TellBlocks) == TellBlocks((), tuple(table.keys(A)))
    assert of(table.turn(table.done()), TellBlocks) == []
    assert of(table.turn(table.reset()), TellBlocks) == []


def test_without_a_cache_there_is_nothing_to_forget():
    table = Table(prefix_cache=False)
    table.turn(table.request(1, A, 3))
    table.turn(table.reset())
    table.run()
    assert table.finished[1].reason == "length"


# -- prefill and decode apart


def test_a_lease_keeps_its_blocks_and_shares_neither_those_nor_later_ones():
    table = PdTable(num_blocks=16)
    table.run(table.request(900, A, 1))
    assert only(table.turn(table.lease(1, range(18), 3)), type(table.answered[0])).prefix_blocks == 2
    table.turn(table.reset())
    assert table.places(A) == ["", ""]
    table.arrive(1, range(18), prefix=2)
    assert set(table.places(range(18))) == {""}
    table.run()
    assert table.finished[1].reason == "length"
    assert table.stats.free_blocks == 16
    # one that comes later shares again
    table.turn(table.lease(2, range(18), 3))
    table.arrive(2, range(18))
    assert table.places(range(18)) == ["both"] * 4
    table.run()


def test_a_hand_off_under_way_goes_on():
    table = PdTable(max_step_tokens=4)
    table.turn(*table.hand_off(1, range(10)))
    table.turn(table.granted(1))
    table.turn(table.done())
    table.turn(table.reset())
    table.work()
    while table.offers:
        table.turn(table.sent())
        table.work()
    table.turn(table.handed())
    assert table.finished[1].reason == "handed_over"
    assert table.stats.free_blocks == 64
    assert table.is_empty()
