"""The scheduler and a store that forgets or refuses: whole chains come back, and nothing is written in vain."""

from __future__ import annotations

import pytest

from fdasync.errors import InvariantBroken
from fdasync.events.catalog import LookedUp
from fdasync.scheduler.tiers import chains
from fdasync.scheduler.tiers.chains import TRUSTED_USES
from tests.scheduler.table import Table

A = range(13)  # three full blocks
# uses that may pass before a chain is asked about, and the one that asks
BOUND = TRUSTED_USES + 1


def make_table(**config):
    """Nothing is worth a lookup that somebody waits for: what is asked is about chains."""
    values = {
        "num_host_blocks": 64, "store": True, "prefill_tokens_per_s": 1e9, "write_through": "all", "block_nbytes": 1000,
    }  # fmt: skip
    return Table(**{**values, **config})


def use(table, times, tokens=A, first=100):
    """So many requests, one after the other; everything is answered."""
    for key in range(first, first + times):
        table.run(table.request(key, tokens, 1))


def asked():
    """A table whose store is asked about A, with no step in flight; and the number of the question."""
    table = make_table()
    use(table, BOUND)
    table.turn(table.request(1, A, 1))
    (number,) = table.lookups
    while table.flying:
        table.turn(table.done())
    return table, number


def kept(table):
    return {key for _, key in table.kept}


def test_a_store_that_forgot_everything_has_the_whole_chain_again_after_a_bounded_number_of_requests():
    table = make_table()
    use(table, 1)
    table.kept.clear()
    use(table, BOUND, first=200)
    assert kept(table) == set(table.keys(A))
    assert table.stats.forgotten_blocks == 3
    assert table.stats.written_blocks == 6
    assert table.is_empty()


def test_a_chain_is_asked_about_once_in_so_many_requests():
    table = make_table()
    use(table, 1)
    asked = 0
    for key in range(200, 200 + 10 * BOUND):
        asked += len(table.turn(table.request(key, A, 1)).lookups)
        table.run()
    assert asked == 10
    # what is there is not written again
    assert table.stats.written_blocks == 3
    assert table.stats.forgotten_blocks == 0


def test_a_chain_longer_than_a_lookup_is_asked_about_in_parts(monkeypatch):
    monkeypatch.setattr(chains, "MAX_LOOKUP_KEYS", 4)
    table, long = make_table(num_blocks=64), range(33)
    use(table, 1, long)
    keys = table.keys(long)
    assert len(keys) == 8
    assert kept(table) == set(keys)
    asked = []
    for key in range(200, 201 + 3 * BOUND):
        asked += table.turn(table.request(key, long, 1)).lookups
        table.run()
    # each part once in so many requests, and no other
    assert sorted(lookup.keys for lookup in asked) == sorted(3 * [tuple(keys[:4]), tuple(keys[4:])])
    table.kept.clear()
    use(table, BOUND + 2, long, first=300)
    assert kept(table) == set(keys)
    assert table.is_empty()


@pytest.mark.parametrize("num_host_blocks", [4, 8, 12])
def test_a_host_that_is_full_of_copies_lets_blocks_through_to_the_store(num_host_blocks):
    # the device holds more than the host: what is stored needs no copy there
    table = make_table(num_blocks=64, num_host_blocks=num_host_blocks)
    prompts = [range(first, first + 25) for first in (0, 100, 200)]
    wanted = {key for tokens in prompts for key in table.keys(tokens)}
    assert len(wanted) == 18
    for tries in range(1, 20):
        for number, tokens in enumerate(prompts):
            use(table, 1, tokens, first=1000 * tries + number)
        if wanted <= kept(table):
            break
    assert wanted <= kept(table), f"{len(wanted - kept(table))} were never written"
    table.kept.clear()
    for tries in range(20, 20 + 6 * BOUND):
        for number, tokens in enumerate(prompts):
            use(table, 1, tokens, first=1000 * tries + number)
    assert wanted <= kept(table), f"{len(wanted - kept(table))} never came back"
    assert table.is_empty()


def test_no_sequence_waits_for_the_question():
    table = make_table()
    use(table, BOUND)
    turned = table.turn(table.request(1, A, 1))
    assert [lookup.keys for lookup in turned.lookups] == [tuple(table.keys(A))]
    assert turned.starts == [1]
    assert table.stats.waiting_for_store == 0
    while table.flying:
        table.turn(table.done())
    assert 1 in table.finished
    table.run()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_only_what_is_missing_is_written_again_and_parents_first(count):
    table = make_table()
    use(table, BOUND)
    keys = table.keys(A)
    table.turn(table.request(1, A, 1))
    turned = table.turn(table.looked_up(count=count))
    assert [key for put in turned.puts for key in put.keys] == keys[count:]
    table.run()
    assert table.stats.forgotten_blocks == 3 - count


def test_a_question_that_was_not_answered_changes_nothing():
    table = make_table()
    use(table, BOUND)
    table.turn(table.request(1, A, 1))
    assert table.turn(table.looked_up(count=0, answered=False)).puts == []
    table.run()
    assert table.stats.written_blocks == 3
    assert table.stats.fetch_cut_offs == 0


def test_a_question_is_no_measurement_of_lookups():
    table = make_table()
    use(table, BOUND)
    before = table.scheduler.store_planner.rates.lookup_s
    table.turn(table.request(1, A, 1))
    table.turn(table.looked_up(seconds=9.0))
    assert table.scheduler.store_planner.rates.lookup_s == before
    table.run()


def test_questions_are_few_at_a_time():
    table = make_table(num_blocks=200, max_running=64, max_step_tokens=512)
    prompts = [range(at, at + 9) for at in range(0, 1000, 100)]
    for number, prompt in enumerate(prompts):
        use(table, BOUND, prompt, first=100 * number)
    turned = table.turn(*[table.request(5000 + number, prompt, 1) for number, prompt in enumerate(prompts)])
    assert len(turned.lookups) == 4
    table.run()
    # the others ask in their turn
    turned = table.turn(*[table.request(6000 + number, prompt, 1) for number, prompt in enumerate(prompts)])
    assert len(turned.lookups) == 4
    table.run()


def test_an_answer_of_more_than_was_asked_is_a_defect():
    table = make_table()
    use(table, BOUND)
    table.turn(table.request(1, A, 1))
    (number,) = table.lookups
    with pytest.raises(InvariantBroken, match="lookup"):
        table.turn(LookedUp(lookup_id=number, count=4, seconds=0.0, answered=True))


def test_what_a_shared_prefix_lost_is_written_whoever_uses_it():
    # each request goes its own way behind two blocks that all share, and comes once
    table = make_table(num_blocks=200, num_host_blocks=200)
    for key in range(20):
        table.run(table.request(key, [*range(9), 50 + key, *range(300, 304)], 1))
        if key == 3:
            table.kept.clear()
    assert set(table.keys(range(8))) <= kept(table)


def test_an_answer_under_old_weights_writes_nothing():
    table, number = asked()
    table.turn(table.pause())
    table.turn(table.weights(1), table.resume())
    assert table.turn(table.looked_up(number, count=0)).puts == []
    table.run()
    assert table.is_empty()


@pytest.mark.parametrize("count", [0, 2])
def test_an_answer_that_comes_while_a_block_is_computed_anew_copies_nothing_of_it(count):
    table, number = asked()
    index = table.scheduler.index
    for block in list(index._clean):
        index._leave_device(block)
        index._leave_host(block)
    # a step in flight computes all of them again
    assert table.turn(table.request(2, A, 1)).cached == {2: 0}
    turned = table.turn(table.looked_up(number, count=count))
    assert not turned.outs
    assert not turned.puts
    table.kept.clear()
    table.run()
    # they are written when they are sealed
    assert kept(table) == set(table.keys(A))
    assert table.is_empty()


@pytest.mark.parametrize("through", ["prompt", "all"])
def test_the_outputs_of_a_turn_are_written_when_they_are_part_of_the_next_prompt(through):
    table = make_table(write_through=through)
    table.run(table.request(1, A, 8))
    whole = [*A, *table.finished[1].token_ids]
    table.run(table.request(2, [*whole, 7, 8, 9, 10], 1))
    assert set(table.keys([*whole, 7, 8, 9, 10])) <= kept(table)


def test_where_writing_is_off_nothing_is_asked_about():
    table = make_table(write_through="off", write_back=False)
    table.kept.update({(table.namespace, key): None for key in table.keys(A)})
    asked = 0
    for key in range(3 * BOUND):
        asked += len(table.turn(table.request(key, A, 1)).lookups)
        table.run()
    assert (asked, table.stats.written_blocks) == (0, 0)


# -- broken chains


def refuse(table, *signs, tokens=A, key=1):
    """A first request whose blocks the store takes or refuses."""
    table.turn(table.request(key, tokens, 1))
    table.turn(table.done())
    table.turn(table.copied())
    for sign in signs:
        table.turn(table.stored(stored=sign))


def test_a_block_is_not_written_behind_one_that_the_store_lacks():
    table = make_table()
    refuse(table, "+-+")
    table.turn(table.request(2, range(21), 1))
    table.turn(table.done())
    # two more blocks, which nobody could find
    assert table.turn(table.copied()).puts == []
    assert table.stats.dropped_writes == 1 + 2
    table.run()
    assert table.is_empty()


def test_what_was_refused_is_tried_again_with_what_is_behind_it_and_not_sooner():
    table = make_table()
    refuse(table, "---")
    use(table, TRUSTED_USES)
    assert (kept(table), table.stats.written_blocks) == (set(), 0)
    use(table, 1, first=300)
    assert kept(table) == set(table.keys(A))


def test_a_store_that_keeps_refusing_is_asked_rarely():
    table = make_table()
    refuse(table, "---")
    tries = 0
    for key in range(100, 100 + 5 * BOUND):
        table.turn(table.request(key, A, 1))
        for _ in range(20):
            steps = [table.done()] if table.flying else []
            puts = [table.stored(number, stored="-" * len(put.keys)) for number, put in list(table.puts.items())]
            tries += len(puts)
            table.turn(*steps, *[table.copied() for _ in list(table.copies)], *puts)
    assert tries == 5


def test_what_has_lost_the_block_before_it_is_not_written():
    table = make_table(num_blocks=128)
    # four writes are under way: the fifth waits its turn on the host
    for key in range(4):
        refuse(table, tokens=range(key * 100, key * 100 + 5), key=key)
    refuse(table, tokens=range(500, 509), key=5)
    index = table.scheduler.index
    parent, child = [index.get(key) for key in table.keys(range(500, 509))]
    index._leave_host(parent)
    index._leave_device(parent)
    assert parent.key is None
    table.run()
    assert not child.stored
    assert child.absent
    assert table.keys(range(500, 509))[1] not in kept(table)
    # who computes it again has both written
    use(table, 2, range(500, 509))
    assert set(table.keys(range(500, 509))) <= kept(table)


def test_a_lookup_that_finds_less_has_what_is_behind_the_gap_written_again():
    table = make_table(prefill_tokens_per_s=10.0)
    use(table, 1)
    index = table.scheduler.index
    first = index.get(table.keys(A)[0])
    index._leave_host(first)
    index._leave_device(first)
    table.kept.clear()
    # the first block is looked up in vain and computed; the two behind it are here, and no longer there
    use(table, 1, first=200)
    assert table.stats.forgotten_blocks == 2
    use(table, 1, first=300)
    assert kept(table) == set(table.keys(A))


def test_a_chain_that_finds_no_room_on_the_host_is_written_bit_by_bit():
    table = make_table(num_host_blocks=4, num_blocks=32, max_step_tokens=64)
    whole = range(33)
    use(table, 1, whole)
    assert len(table.kept) == 4
    use(table, BOUND, whole, first=200)
    assert kept(table) == set(table.keys(whole))


def test_preempted_blocks_are_written_behind_those_that_the_store_has():
    table = make_table(num_blocks=5, decode_reserve_blocks=0, write_through="off", write_back=True)
    table.turn(table.request(1, range(8), 5), table.request(2, range(50, 58), 5))
    table.run()
    assert table.stats.preemptions == 1
    assert kept(table) == set(table.keys(range(50, 58)))
