"""The scheduler of a recurrent model: where snapshots are taken, and what a sequence starts from."""

from __future__ import annotations

import pytest

from tests.scheduler.table import Table

A = range(100, 118)  # 4 full blocks and 2 tokens


def recurrent(**config) -> Table:
    values = {"recurrent": True, "num_snapshots": 8, "state_every_tokens": 1000, "max_step_tokens": 64}
    return Table(**{**values, **config})


def takes(turned) -> list[tuple[int, int]]:
    """(sequence, position) of the snapshots that the turn's step takes."""
    return [(take.key, take.position) for take in turned.step.snapshots]


def test_the_last_full_block_of_a_prompt_has_one_and_the_next_sample_starts_there():
    table = recurrent()
    turned = table.turn(table.request(1, A, 1))
    assert takes(turned) == [(1, 16)]
    (start,) = turned.step.starts
    assert (start.num_cached, start.snapshot) == (0, -1)
    place = turned.step.snapshots[0].place
    table.turn(table.done())
    turned = table.turn(table.request(2, A, 1))
    (start,) = turned.step.starts
    assert (start.num_cached, start.snapshot) == (16, place)
    table.run()
    assert table.finished[2].cached_tokens == (16, 0, 0)
    assert table.stats.resumed_snapshots == 1


def test_a_prompt_of_whole_blocks_has_one_for_itself_and_one_for_its_next_turn():
    table = recurrent()
    assert takes(table.turn(table.request(1, range(16), 2))) == [(1, 12), (1, 16)]
    table.run()
    (start,) = table.turn(table.request(2, range(16), 1)).step.starts
    assert start.num_cached == 12
    table.run()
    (start,) = table.turn(table.request(3, [*range(16), 500, 501], 1)).step.starts
    assert start.num_cached == 16
    table.run()
    assert table.is_empty()


def test_without_a_prefix_cache_none_is_taken():
    table = recurrent(prefix_cache=False)
    table.run(table.request(1, range(9), 12))
    assert table.stats.taken_snapshots == 0


def test_the_others_of_a_group_wait_for_the_step_that_takes_it():
    table = recurrent(pipeline_depth=2)
    turned = table.turn(table.request(1, A, 8), table.request(2, A, 8))
    first, second = turned.steps
    assert [start.key for start in first.starts] == [1]
    # the step in flight takes it: the next one may start from it
    (start,) = second.starts
    assert (start.key, start.num_cached, start.snapshot) == (2, 16, first.snapshots[0].place)


def test_kv_without_a_later_snapshot_is_computed_again_and_the_branch_gets_one():
    table = recurrent()
    table.run(table.request(1, range(30), 1))
    # 24 tokens are there, and the one snapshot lies at 28
    other = [*range(24), 500, 501, 502, 503, 504]
    turned = table.turn(table.request(2, other, 1))
    (start,) = turned.step.starts
    assert (start.num_cached, start.snapshot) == (0, -1)
    assert takes(turned) == [(2, 24), (2, 28)]
    table.run()
    third = [*range(24), 600, 601]
    (start,) = table.turn(table.request(3, third, 1)).step.starts
    assert start.num_cached == 24
    table.run()
    assert table.is_empty()


def test_two_that_need_the_same_missing_state_compute_it_once():
    table = recurrent()
    table.run(table.request(1, range(30), 1))
    branch = [*range(24), 500]
    turned = table.turn(table.request(2, branch, 1), table.request(3, branch, 1))
    assert [start.key for start in turned.step.starts] == [2]
    (start,) = table.turn(table.done()).step.starts
    assert (start.key, start.num_cached) == (3, 24)


def test_every_so_many_tokens_there_is_one():
    table = recurrent(state_every_tokens=8)
    assert takes(table.turn(table.request(1, range(30), 1))) == [(1, 8), (1, 16), (1, 24), (1, 28)]


def test_a_chunk_takes_those_that_it_reaches():
    table = recurrent(state_every_tokens=8, max_step_tokens=10)
    seen = takes(table.turn(table.request(1, range(30), 1)))
    seen += takes(table.turn(table.done()))
    seen += takes(table.turn(table.done()))
    assert seen == [(1, 8), (1, 16), (1, 24), (1, 28)]


def test_an_answer_keeps_the_snapshot_of_its_last_full_block():
    for depth in (1, 2):
        table = recurrent(pipeline_depth=depth)
        table.run(table.request(1, range(6), 16))
        # at 4 for the prompt; at 8, 12, 16 and 20 while it decodes, each giving way to the next
        assert table.stats.taken_snapshots == 5
        assert table.stats.num_snapshots - table.stats.free_snapshots == 2
        output = table.finished[1].token_ids
        (start,) = table.turn(table.request(2, [*range(6), *output, 7], 1)).step.starts
        assert start.num_cached == 20
        table.run()
        assert table.is_empty()


def test_one_that_somebody_started_from_does_not_give_way():
    table = recurrent()
    table.turn(table.request(1, range(6), 16))
    tokens = list(range(6))
    for _ in range(4):
        tokens.append(1000 + len(tokens) - 6)
        table.turn(table.done())
    # two of its blocks are full
    table.turn(table.request(2, [*tokens[:9], 77], 1))
    (start,) = table.turn(table.done()).step.starts
    assert (start.key, start.num_cached) == (2, 8)
    table.run()
    # at 4 of the prompt, at 8, where the second one started, and at 20, the last full block
    assert table.stats.num_snapshots - table.stats.free_snapshots == 3
    (start,) = table.turn(table.request(3, [*tokens[:9], 78], 1)).step.starts
    assert start.num_cached == 8


def test_the_next_turns_of_conversations_start_behind_their_last_answers():
    # a place for each, and one more: each turn takes a snapshot at its prompt's end and one in its answer
    table = recurrent(num_snapshots=3)
    histories = [list(range(100 * number, 100 * number + 9)) for number in (1, 2)]
    for turn in range(3):
        for number, history in enumerate(histories):
            key = 1 + 2 * turn + number
            (start,) = table.turn(table.request(key, history, 8)).step.starts
            # the block before the answer's last tokens
            assert start.num_cached == (0 if not turn else (len(history) - 2) // 4 * 4)
            table.run()
            history += [*table.finished[key].token_ids, 7, 8]
    assert table.is_empty()


@pytest.mark.parametrize("places", [4, 6, 8])
def test_a_shared_preface_keeps_its_snapshot_when_places_are_few(places):
    table = recurrent(num_snapshots=places, num_blocks=200)
    cached = []
    for number in range(8):
        preface = [*range(24), *range(1000 + 100 * number, 1010 + 100 * number)]
        table.run(table.request(3 * number + 1, preface, 2))
        cached.append(table.finished[3 * number + 1].cached_tokens[0])
        for other in (2, 3):
            first = 5000 + 200 * number + 50 * other
            table.run(table.request(3 * number + other, range(first, first + 34), 2))
    # the second one leaves what the first one computed; the third one may be the last that finds none
    assert cached[4:] == [24] * 4


def test_what_a_sequence_has_passed_makes_room_before_what_several_started_from():
    table = recurrent(num_snapshots=2)
    for key in (1, 2):
        table.run(table.request(key, [*range(9), 50 + key], 1))
    # the third goes on from there, takes one behind its prompt, and another further on for which there is no place
    table.run(table.request(3, [*range(9), 60, 61, 62, 63, 64], 6))
    assert table.scheduler.index.get(table.keys(range(8))[-1]).snapshot is not None


def test_a_snapshot_on_the_host_is_brought_before_its_sequence_starts():
    table = recurrent(num_blocks=5, num_snapshots=1, num_host_blocks=8, num_host_snapshots=4)
    table.run(table.request(1, range(9), 1))
    table.answer()
    # another prompt takes the place on the device, and the blocks
    table.run(table.request(2, range(200, 218), 1))
    table.answer()
    snapshot = table.scheduler.index.get(table.keys(range(8))[-1]).snapshot
    assert (snapshot.place, snapshot.on_host) == (-1, True)
    turned = table.turn(table.request(3, range(9), 1))
    bringing = []
    while table.copies:
        assert turned.steps == []
        turned = table.turn(table.copied())
        bringing += [copy for copy in turned.ins if copy.snapshots]
    assert [copy.snapshots_host for copy in bringing] == [(snapshot.host,)]
    (start,) = turned.step.starts
    assert (start.num_cached, start.snapshot) == (8, bringing[0].snapshots[0])
    table.run()
    assert table.finished[3].cached_tokens[1] == 8


def test_a_preempted_sequence_goes_on_from_its_last_full_block():
    table = recurrent(num_blocks=8, max_running=2, decode_reserve_blocks=0, num_host_blocks=32, num_host_snapshots=4)
    table.turn(table.request(1, range(8), 20), table.request(2, range(50, 58), 20))
    resumed, kept = [], []
    for _ in range(120):
        if not table.flying and not table.in_flight:
            break
        steps = [table.done()] if table.flying else []
        turned = table.turn(*steps, *table.answers())
        resumed += [start for step in turned.steps for start in step.starts if start.num_cached]
        kept += [place for copy in turned.outs for place in copy.snapshots]
    assert table.stats.preemptions > 0
    assert resumed
    assert kept, "they go to the host with the blocks"
    for start in resumed:
        # nothing but the open block is computed again
        assert len(start.tokens) // 4 - start.num_cached <= 4
    assert table.is_empty()


def test_one_that_is_preempted_in_the_very_plan_takes_none():
    table = recurrent(
        num_blocks=7, max_running=3, pipeline_depth=2, decode_reserve_blocks=0, num_host_blocks=16, num_host_snapshots=4
    )
    # the table checks that a step takes snapshots of what it computes
    table.run(table.request(1, range(6), 12), table.request(2, range(50, 57), 12), table.request(3, range(90, 99), 12))
    assert table.stats.preemptions > 0
    assert table.is_empty()


def test_new_weights_and_a_reset_leave_no_snapshot():
    for change in (lambda table: table.weights(1), lambda table: table.reset()):
        table = recurrent()
        table.run(table.request(1, A, 1))
        table.turn(change(table))
        assert table.stats.free_snapshots == table.stats.num_snapshots
        table.answer()
        (start,) = table.turn(table.request(2, A, 1)).step.starts
        assert (start.num_cached, start.snapshot) == (0, -1)


def test_a_reset_gives_back_the_snapshots_of_those_that_go_on():
    table = recurrent()
    table.turn(table.request(1, range(11), 8))
    table.turn(table.done())
    # one at 8; the step in flight takes another one
    assert table.stats.free_snapshots == 6
    assert table.flying[0].snapshots[0].position == 12
    table.turn(table.reset())
    table.turn(table.done())
    assert table.stats.free_snapshots == 8
    table.run()
    assert table.is_empty()


def test_a_second_computation_gives_its_snapshot_to_the_first():
    table = recurrent()
    answer = list(range(1, 9))

    def play(key: int, tokens: int) -> None:
        table.turn(table.request(key, range(6), 8))
        for token in answer[:tokens]:
            table.turn(table.done(token))

    play(1, 8)
    # its snapshot at 8 gave way to the one at 12
    first = table.scheduler.index.get(table.keys([*range(6), *answer])[1])
    assert first.snapshot is None
    play(2, 4)
    assert first.snapshot is not None
    assert first.snapshot.block is first


def test_a_block_that_goes_takes_its_snapshot_with_it():
    table = recurrent(num_blocks=5)
    table.run(table.request(1, range(9), 1))
    assert table.stats.free_snapshots == 7
    table.run(table.request(2, range(200, 218), 1))
    # two snapshots were taken, and the first one's block was evicted
    assert (table.stats.taken_snapshots, table.stats.free_snapshots) == (2, 7)


def test_without_a_free_place_sequences_go_on_without_snapshots():
    table = recurrent(num_snapshots=1, max_step_tokens=16)
    turned = table.turn(table.request(1, range(9), 1), table.request(2, range(50, 57), 1))
    assert takes(turned) == [(1, 8)]
    assert table.stats.refused_snapshots == 1
    table.run()
    assert table.is_empty()


def test_a_model_without_state_takes_none():
    table = Table()
    turned = table.turn(table.request(1, A, 4))
    assert turned.step.snapshots == ()
    table.run()
    assert (table.stats.num_snapshots, table.stats.taken_snapshots) == (0, 0)


def test_what_a_sequence_has_passed_is_lost_and_not_copied_to_the_host():
    table = recurrent(
        num_snapshots=2, num_host_blocks=32, num_host_snapshots=8, state_every_tokens=8, max_step_tokens=8
    )
    table.turn(table.request(1, range(42), 3))
    places = []
    while table.flying or table.copies:
        turned = table.turn(*([table.done()] if table.flying else []), *table.answers())
        places += [place for copy in turned.outs for place in copy.snapshots]
    # those at 8, 16, 24 and 32 gave way to the next ones; the last one may go out, since it would else be lost
    assert (table.stats.lost_snapshots, len(places) <= 1) == (4, True)
    assert table.is_empty()


@pytest.mark.parametrize("host", [0, 16])
def test_kv_behind_the_last_snapshot_goes_before_all_other(host: int):
    """No sequence can go on from there, so it is not copied out either."""
    table = recurrent(num_blocks=8, num_host_blocks=host, num_host_snapshots=4 * bool(host), max_step_tokens=8)
    table.run(table.request(1, range(9), 1))
    table.turn(table.request(2, range(100, 117), 1))
    # two of its blocks are computed, and its one snapshot would lie behind the fourth
    table.run(table.abort(2))
    assert table.places(range(100, 108)) == ["device"] * 2
    kept = table.places(range(8))
    table.turn(table.request(3, range(200, 217), 1))
    # it has 5 of 8 blocks: the last one of what nobody can use made room, though it was used last
    assert table.places(range(100, 108)) == ["device", ""]
    assert table.places(range(8)) == kept
    table.run()
    assert table.is_empty()
