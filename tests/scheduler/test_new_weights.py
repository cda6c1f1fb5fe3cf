"""The scheduler when the weights change: whatever runs no longer starts under the new ones (docs/design.md,
rules 1, 9, 10)."""

from __future__ import annotations

from array import array

import pytest

from fdasync.errors import InvariantBroken
from tests.scheduler.table import Table, span
from tests.scheduler.tiers.scenes import leave_on_host, make_table
from tests.scheduler.updates import stop_steps, update

A, B = range(9), range(100, 109)


# -- everyone else starts under the new weights


def test_no_old_block_is_matched_and_those_without_a_user_are_free_at_once():
    table = make_table(num_blocks=16, write_through="all", prefill_tokens_per_s=1e9)
    leave_on_host(table, A)
    table.run(table.request(1, B, 1))
    assert set(table.places(A)) | set(table.places(B)) == {"host", "both"}
    kept = dict(table.kept)
    assert len(kept) == 4
    turned = update(table, 2)
    assert turned.actions == []
    assert (table.stats.free_blocks, table.stats.free_host_blocks) == (16, 64)
    assert table.stats.weight_version == "2"
    for prompt in (A, B):
        assert set(table.places(prompt, b"")) == {""}
    table.scheduler.store_planner.rates.__init__(10.0, 1e6, 0.002)
    turned = table.turn(table.request(2, A, 1))
    (lookup,) = turned.lookups
    assert lookup.namespace == table.namespace
    assert not set(lookup.keys) & {key for _, key in kept}
    assert table.turn(table.looked_up()).cached == {2: 0}
    table.run()
    assert table.finished[2].spans == (span(0, "2"),)


def test_the_same_tokens_are_indexed_again_under_the_new_weights():
    table = Table()
    table.run(table.request(1, A, 1))
    update(table, 2)
    assert table.turn(table.request(2, A, 1)).cached == {2: 0}
    table.turn(table.done())
    assert table.turn(table.request(3, A, 1)).cached == {3: 8}
    table.run()


def test_the_waiting_are_hashed_again_and_planned_under_the_new_weights():
    table = Table(max_running=1)
    table.turn(table.request(1, [1], 4), table.request(2, A, 2, salt="s"))
    stop_steps(table)
    turned = update(table, 3)
    (again,) = turned.hashes
    assert (again.key, list(array("i", again.tokens)), again.salt) == (2, list(A), "s")
    while 1 not in table.finished:
        table.turn(table.done())
    # it would have room, but not its identities
    assert table.flying == []
    turned = table.turn(table.hashed())
    assert turned.cached == {2: 0}
    table.run()
    assert table.finished[2].spans == (span(0, "3"),)
    index = table.scheduler.index
    assert all(index.get(key) is None for key in table.keys(A))
    assert table.turn(table.request(4, A, 1, salt="s")).cached == {4: 8}
    table.run()


def test_others_are_not_held_up_by_one_that_is_being_hashed():
    table = Table(max_running=1)
    table.turn(table.request(1, [1], 3), table.request(2, A, 2))
    stop_steps(table)
    update(table, 3)
    table.turn(table.request(4, [9], 2))
    while 4 not in table.finished:
        table.turn(table.done())
    assert 2 not in table.finished
    table.run()
    assert table.finished[2].reason == "length"


def test_what_was_prepared_under_old_weights_is_hashed_again():
    table = Table()
    stale = table.request(1, A, 1)
    update(table, 3)
    turned = table.turn(stale)
    assert turned.steps == []
    (again,) = turned.hashes
    assert again.key == 1
    assert table.turn(table.hashed()).cached == {1: 0}
    table.run()
    assert table.places(A) == ["device", "device"]
    assert set(table.places(A, b"")) == {""}
    assert table.finished[1].spans == (span(0, "3"),)


@pytest.mark.parametrize("second", ["before the hash", "with the hash"])
def test_a_hash_that_is_stale_when_it_comes_is_made_again(second):
    table = Table()
    stale = table.request(1, A, 1)
    update(table, 3)
    table.turn(stale)
    if second == "before the hash":
        assert update(table, 4).hashes == []
        turned = table.turn(table.hashed(b"weights 3"))
    else:
        answer = table.hashed()
        turned = table.turn(table.weights(4), answer)
    assert turned.steps == []
    assert [again.key for again in turned.hashes] == [1]
    assert table.turn(table.hashed()).cached == {1: 0}
    table.run()
    assert table.places(A) == ["device", "device"]


def test_abort_while_being_hashed():
    table = Table()
    stale = table.request(1, A, 1)
    update(table, 3)
    table.turn(stale)
    assert table.turn(table.abort(1)).finish.reason == "abort"
    assert table.turn(table.hashed()).actions == []
    assert table.is_empty()


def test_without_prefix_cache_nothing_is_hashed():
    table = Table(prefix_cache=False, max_running=1)
    stale = table.request(1, A, 2, block_keys=())
    table.turn(table.request(2, [1], 3, block_keys=()), table.request(3, B, 3, block_keys=()))
    stop_steps(table)
    turned = update(table, 3)
    assert turned.hashes == []
    assert table.turn(stale).hashes == []
    table.run()
    assert [table.finished[key].spans for key in (2, 3, 1)] == [
        (span(0, "0"), span(1, "3")),
        (span(0, "3"),),
        (span(0, "3"),),
    ]


@pytest.mark.parametrize("arrived", [True, False])
@pytest.mark.parametrize("resume", [True, False])
def test_a_sequence_that_was_loading_starts_again_under_the_new_weights(arrived, resume):
    """The engine publishes the new weights and the end of the pause in one go."""
    table = Table(num_blocks=8, num_host_blocks=8)
    leave_on_host(table, A)
    table.turn(table.request(1, A, 2))
    table.turn(table.pause())
    if arrived:
        table.turn(table.copied())
    turned = update(table, 3, resume=resume)
    assert turned.starts == []
    assert [again.key for again in turned.hashes] == [1]
    if not arrived:
        # what the copy uses is freed with its end
        assert table.stats.free_blocks == 6
        table.turn(table.copied())
    assert (table.stats.free_blocks, table.stats.free_host_blocks) == (8, 8)
    turned = table.turn(table.hashed(), table.resume())
    assert turned.cached == {1: 0}
    assert turned.ins == []
    table.run()
    end = table.finished[1]
    assert (end.spans, end.cached_tokens, end.num_rows) == ((span(0, "3"),), (0, 0, 0), 10)
    assert table.places(A) == ["device", "device"]
    assert table.is_empty()


@pytest.mark.parametrize("what", ["lookup", "fetch", "late fetch"])
def test_a_sequence_that_waits_for_the_store_asks_again_under_the_new_weights(what):
    table = make_table(A)
    table.turn(table.request(1, A, 2))
    if what != "lookup":
        table.turn(table.looked_up())
    table.turn(table.pause())
    if what == "late fetch":
        table.turn(table.fetched(arrived="+-", late=True))
        assert table.places(A) == ["host", ""]
    turned = update(table, 3)
    assert [again.key for again in turned.hashes] == [1]
    # what is in flight ends cleanly, and brings nothing
    if what == "lookup":
        assert table.turn(table.looked_up(count=2)).actions == []
    elif what == "fetch":
        assert table.stats.free_host_blocks == 62
        assert table.turn(table.fetched()).actions == []
    else:
        assert table.stats.free_host_blocks == 63
        assert table.turn(table.returned(min(table.late), "++")).actions == []
    assert table.stats.free_host_blocks == 64
    assert set(table.places(A, b"")) == {""}
    turned = table.turn(table.hashed())
    (lookup,) = turned.lookups
    assert (lookup.namespace, lookup.keys) == (table.namespace, tuple(table.keys(A)))
    assert table.turn(table.looked_up()).cached == {1: 0}
    table.run()
    assert table.finished[1].cached_tokens == (0, 0, 0)
    assert table.is_empty()


def test_an_old_lookup_in_flight_does_not_answer_a_new_question():
    table = make_table(A)
    table.turn(table.request(1, A, 2))
    update(table, 3)
    table.turn(table.hashed())
    old, new = sorted(table.lookups)
    assert table.turn(table.looked_up(old, count=2)).actions == []
    assert table.stats.waiting == 1
    assert table.turn(table.looked_up(new, count=0)).cached == {1: 0}
    table.run()
    assert table.is_empty()


@pytest.mark.parametrize("late", [True, False])
def test_writes_of_old_weights_end_cleanly_and_no_more_of_them_begin(late):
    table = make_table(write_through="all", prefill_tokens_per_s=1e9, num_blocks=64, max_step_tokens=512)
    for key in range(5):
        table.turn(table.request(key, range(key * 100, key * 100 + 9), 1))
        table.turn(table.done())
        table.turn(table.copied())
    table.turn(table.request(5, range(500, 509), 1))
    table.turn(table.done())
    # four are being written, one waits for its turn, one is on its way to the host
    assert (len(table.puts), len(table.copies), table.stats.writing) == (4, 1, 10)
    turned = update(table, 3)
    assert turned.actions == []
    assert table.stats.free_host_blocks == 64 - 8 - 2
    table.turn(table.copied())
    assert table.stats.free_host_blocks == 64 - 8
    for number in list(table.puts):
        assert table.turn(table.stored(late=late, stored="+-" if late else "++")).actions == []
        if late:
            assert table.turn(table.returned(number, "++")).actions == []
    assert {namespace for namespace, _ in table.kept} == {b""}
    stats = table.stats
    assert (stats.free_blocks, stats.free_host_blocks) == (64, 64)
    assert (stats.written_blocks, stats.dropped_writes, stats.writing) == (8, 0, 0)
    assert table.is_empty()


def test_copies_outward_of_old_weights_end_cleanly():
    table = Table(num_blocks=4, num_host_blocks=8)
    table.run(table.request(1, A, 1))
    table.turn(table.request(2, range(50, 63), 2))
    assert len(table.copies) == 1
    turned = update(table, 1)
    assert turned.starts == []
    assert (table.stats.free_blocks, table.stats.free_host_blocks) == (2, 6)
    table.turn(table.copied())
    assert (table.stats.free_blocks, table.stats.free_host_blocks) == (4, 8)
    assert table.turn(table.hashed()).cached == {2: 0}
    table.run()
    assert table.is_empty()


def test_what_a_request_waits_for_with_room_made_by_old_blocks_comes_at_once():
    table = Table(num_blocks=4, num_host_blocks=8)
    table.turn(table.request(1, A, 5), table.request(2, range(50, 58), 1))
    stop_steps(table)
    update(table, 1)
    assert table.turn(table.hashed()).starts == []
    table.run()
    assert [table.finished[key].reason for key in (1, 2)] == ["length", "length"]
    assert table.is_empty()


def test_samples_of_one_prompt_go_on_apart_on_the_blocks_that_they_share():
    table = Table(num_blocks=16, pipeline_depth=2, max_step_tokens=64)
    table.turn(*(table.request(key, A, 12) for key in range(3)))
    table.turn(table.done())
    stop_steps(table)
    shared = [block for block in table.scheduler.index.pool.live() if block.ref_count == 3]
    assert len(shared) == 2
    update(table, 1)
    assert all(block.key is None for block in shared)
    table.turn(table.abort(0))
    assert all(block.ref_count >= 2 for block in shared)
    table.run()
    assert [table.finished[key].num_rows for key in (1, 2)] == [20, 20]
    assert table.stats.free_blocks == 16


def test_weights_cannot_change_under_a_step():
    table = Table()
    table.turn(table.request(1, A, 4))
    with pytest.raises(InvariantBroken, match="while a step was in flight"):
        table.turn(table.weights(1))


def test_aborting_all_before_an_update_leaves_nothing():
    table = Table(num_blocks=16, num_host_blocks=8)
    table.turn(table.request(1, A, 9), table.request(2, B, 9), table.request(3, range(30), 9))
    stop_steps(table)
    turned = table.turn(table.abort(1, 2, 3))
    assert [len(end.token_ids) for end in turned.finishes] == [1, 0, 0]
    update(table, 1)
    assert table.is_empty()
    assert table.stats.free_blocks == 16
