"""The scheduler where a step gives a run of tokens to a sequence: blocks, rows, ends, preemption; and its calendar."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest

from fdasync.errors import InvariantBroken
from fdasync.events.catalog import StepDone
from fdasync.scheduler.results import one_each
from fdasync.scheduler.state.step_plan import StepPlan
from fdasync.scheduler.step_planner import StepPlanner
from tests.scheduler.table import Table

STOPS = {"stop_ids": frozenset({7})}
CHECKS = {"emits": True, "checks_stops": True}


def runs_table(**config) -> Table:
    return Table(**{"max_run_tokens": 4, "max_step_tokens": 64, **config})


def kept(table: Table, key: int) -> tuple[int, ...]:
    return table.finished[key].token_ids


# -- blocks and rows


def test_a_run_that_crosses_the_end_of_a_block_seals_it():
    table = runs_table()
    table.turn(table.request(1, range(6), 20))
    # positions 0 to 5 are computed, 6 is known
    turned = table.turn(table.runs([100]))
    # one block holds 2 more positions, a run of 4 may fill 4
    assert [append.key for append in turned.step.appends] == [1]
    table.turn(table.runs([101, 102, 103]))
    assert table.places([*range(6), 100, 101, 102]) == ["device", "device"]
    table.turn(table.abort(1))
    assert table.num_rows(1) == 9


def test_a_run_may_fill_several_blocks():
    table = runs_table(block_tokens=2, max_run_tokens=6)
    table.turn(table.request(1, [1], 20))
    assert len(table.turn(table.runs([100])).step.appends) == 3
    # the first token forwarded is at position 1
    turned = table.turn(table.runs([101, 102, 103, 104, 105, 106]))
    assert table.places([1, *range(100, 106)]) == ["device"] * 3
    # room for 6 more from position 7 on, of which its block has one
    assert len(turned.step.appends) == 3


def test_what_a_run_did_not_fill_is_room_for_the_next_one():
    table = runs_table()
    table.turn(table.request(1, range(7), 20))
    assert len(table.turn(table.runs([100])).step.appends) == 1
    # three blocks hold 12: position 8 and three more
    assert table.turn(table.runs([101])).step.appends == ()
    # but not position 9 and three more
    assert len(table.turn(table.runs([102])).step.appends) == 1


@pytest.mark.parametrize("lengths", [(1,), (4,), (3, 1, 2), (4, 3, 2, 1), (1, 4)])
@pytest.mark.parametrize("block_tokens", [2, 4, 8])
def test_tokens_identities_and_rows_are_those_of_one_token_a_step(lengths, block_tokens):
    prompt = list(range(5))
    output = list(range(100, 117))
    tables = [Table(block_tokens=block_tokens), runs_table(block_tokens=block_tokens)]
    for table in tables:
        table.turn(table.request(1, prompt, len(output)))
        table.turn(table.done(output[0]))
        at, number = 1, 0
        while table.flying:
            if table is tables[0]:
                table.turn(table.done(output[at]))
                at += 1
                continue
            count = lengths[number % len(lengths)]
            table.turn(table.runs([*output, 0, 0, 0][at : at + count]))
            at, number = at + count, number + 1
        assert table.is_empty()
    one, many = tables
    assert many.finished[1] == one.finished[1]
    assert many.num_rows(1) == one.num_rows(1) == len(prompt) + len(output) - 1
    whole = [*prompt, *output]
    # a run that length cuts may have filled a block with the last token, which was never forwarded: it is not sealed
    assert many.places(whole[:-1]) == one.places(whole[:-1])


def test_a_run_of_an_ended_sequence_seals_its_blocks():
    table = runs_table()
    table.turn(table.request(1, range(6), 20, emits=True))
    table.turn(table.runs([100]))
    end = table.turn(table.abort(1)).finish
    assert (end.reason, end.token_ids) == ("abort", (100,))
    turned = table.turn(table.runs([101, 102, 103, 104]))
    assert turned.emits == []
    assert table.places([*range(6), 100, 101]) == ["device", "device"]
    assert table.stats.dropped_tokens == 4
    assert table.is_empty()


# -- ends


def test_a_run_is_cut_at_the_length_limit():
    table = runs_table()
    table.turn(table.request(1, range(4), 4, emits=True))
    table.turn(table.runs([100]))
    turned = table.turn(table.runs([101, 102, 103, 104]))
    assert (turned.finish.reason, turned.finish.token_ids) == ("length", (100, 101, 102, 103))
    assert turned.emitted == [(1, 101), (1, 102), (1, 103)]
    assert turned.finish.num_rows == table.num_rows(1) == 7
    assert table.stats.dropped_tokens == 1
    assert turned.steps == []
    assert table.is_empty()


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_run_is_cut_behind_a_stop_id(at):
    table = runs_table()
    table.turn(table.request(1, range(6), 20, emits=True, **STOPS))
    table.turn(table.runs([100]))
    run = [101, 102, 103, 104]
    run[at] = 7
    turned = table.turn(table.runs(run))
    assert (turned.finish.reason, turned.finish.matched_stop) == ("stop", 7)
    assert turned.finish.token_ids == (100, *run[: at + 1])
    assert turned.emitted == [(1, token) for token in run[: at + 1]]
    assert turned.finish.num_rows == table.num_rows(1) == 6 + 1 + at
    assert table.stats.dropped_tokens == 3 - at
    assert table.is_empty()


def test_a_stop_id_before_min_tokens_cuts_nothing():
    table = runs_table()
    table.turn(table.request(1, range(3), 20, min_tokens=4, **STOPS))
    table.turn(table.runs([7]))
    turned = table.turn(table.runs([7, 7, 7, 7]))
    assert turned.finish.token_ids == (7, 7, 7, 7)


def test_a_stop_string_in_a_run():
    table = runs_table()
    table.turn(table.request(1, range(3), 20, **CHECKS, **STOPS))
    table.turn(table.runs([100]))
    turned = table.turn(table.checked(1, 1), table.runs([101, 102, 103]))
    assert turned.emitted == [(1, 101), (1, 102), (1, 103)]
    turned = table.turn(table.checked(1, 2), table.matched(1, 3))
    assert (turned.finish.reason, turned.finish.token_ids) == ("stop", (100, 101, 102))
    assert turned.finish.num_rows == 5
    table.turn(table.runs([104, 105]))
    assert table.is_empty()


def test_a_run_that_ends_by_stop_id_waits_for_its_stop_check():
    table = runs_table()
    table.turn(table.request(1, range(3), 20, **CHECKS, **STOPS))
    table.turn(table.runs([100]))
    turned = table.turn(table.checked(1, 1), table.runs([101, 7, 103]))
    assert (turned.finishes, turned.steps) == ([], [])
    assert table.turn(table.checked(1, 2)).finishes == []
    assert table.turn(table.checked(1, 3)).finish.token_ids == (100, 101, 7)
    assert table.is_empty()


def test_rows_of_the_output_name_each_token():
    table = runs_table()
    table.turn(
        table.request(1, [1, 2], 20, emits=True), table.request(2, [3], 20), table.request(3, [4], 20, emits=True)
    )
    table.turn(table.runs([10], [20], [30]), table.request(4, [5], 20, emits=True))
    (emit,) = table.turn(table.runs([11, 12], [21, 22, 23], [31, 32, 33, 34], [40])).emits
    assert emit.keys == (1, 1, 3, 3, 3, 3, 4)
    assert emit.tokens == (11, 12, 31, 32, 33, 34, 40)
    assert emit.rows == (0, 1, 5, 6, 7, 8, 9)


# -- shortage


def test_no_sequence_is_preempted_for_room_that_a_run_may_not_need():
    table = runs_table(num_blocks=4, decode_reserve_blocks=0)
    table.turn(table.request(1, range(7), 8), table.request(2, range(10, 17), 8))
    # each has room for one position: all blocks are in use
    turned = table.turn(table.runs([100], [200]))
    assert (turned.step.appends, turned.step.skips) == ((), ())
    assert table.stats.preemptions == 0
    # now both need one
    turned = table.turn(table.runs([101], [201]))
    assert table.stats.preemptions == 1
    assert [append.key for append in turned.step.appends] == [1]
    table.run()
    assert [len(kept(table, key)) for key in (1, 2)] == [8, 8]


def test_preempted_in_between_it_goes_on_where_its_run_ended():
    table = runs_table(num_blocks=6, decode_reserve_blocks=0)
    table.turn(table.request(1, range(4), 20, priority=1), table.request(2, range(10, 14), 12))
    table.turn(table.runs([100], [200]))
    known = [200]
    while not table.stats.preemptions:
        count = min(4, 11 - len(known))
        run = list(range(200 + len(known), 200 + len(known) + count))
        known += run
        first = len(table.scheduler.sequences[1].tokens)
        table.turn(table.runs(list(range(first, first + 4)), run))
    rows = table.num_rows(2)
    assert rows == 4 + len(known) - 1
    while 1 not in table.finished:
        table.turn(table.runs([300]))
    (start,) = table.flying[0].starts
    assert array("i", start.tokens).tolist() == [*range(10, 14), *known]
    table.run()
    assert kept(table, 2)[: len(known)] == tuple(known)
    assert table.num_rows(2) == table.finished[2].num_rows == 15


def test_the_budget_holds_the_longest_run_of_each():
    table = runs_table(max_step_tokens=32)
    table.turn(*(table.request(key, [key], 20) for key in (1, 2, 3)))
    turned = table.turn(table.runs([10], [20], [30]), table.request(4, range(40), 5))
    assert turned.chunks == [(4, 32 - 3 * 4, False)]


# -- the protocol


@pytest.mark.parametrize(
    "runs",
    [
        ([], [20, 21]),
        ([10, 11, 12, 13, 14], [20]),
        # its blocks end before
        ([10], [20, 21, 22]),
    ],
)
def test_runs_that_cannot_be_fail_the_engine(runs):
    table = runs_table(num_blocks=3, decode_reserve_blocks=0)
    table.turn(table.request(1, [1], 10), table.request(2, range(6), 3))
    table.turn(table.runs([1], [2]))
    with pytest.raises(InvariantBroken, match="returned"):
        table.turn(table.runs(*runs))


def test_a_first_token_is_no_run():
    table = runs_table()
    table.turn(table.request(1, [1], 10))
    with pytest.raises(InvariantBroken, match="in runs of"):
        table.turn(table.runs([1, 2]))


# -- the calendar


@pytest.mark.ci(after=20)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prompt_len", range(1, 9))
@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_blocks_come_with_the_step_that_needs_them_and_not_before(depth, prompt_len, max_tokens):
    table = Table(pipeline_depth=depth)
    positions = prompt_len + max_tokens - 1
    blocks = -(-prompt_len // 4)
    length = prompt_len
    turned = table.turn(table.request(1, range(prompt_len), max_tokens))
    decodes = 0
    while table.flying or turned.steps:
        for step in turned.steps:
            if step.chunks or 1 in step.leaves:
                assert step.appends == ()
                continue
            # position `length` is forwarded
            assert len(step.appends) == (length % 4 == 0)
            blocks += len(step.appends)
            length += 1
            decodes += 1
        turned = table.turn(table.done())
    assert decodes == max_tokens - 1
    assert (length, blocks) == (positions, -(-positions // 4))
    assert len(kept(table, 1)) == max_tokens
    assert table.is_empty()


def test_a_paused_engine_goes_on_at_the_right_position():
    table = Table(pipeline_depth=2)
    table.turn(table.request(1, range(3), 9))
    for _ in range(2):
        table.turn(table.pause(), table.done())
        while table.flying:
            table.turn(table.done())
        # two steps at once: the second one is planned before the first one's token is known
        assert len(table.turn(table.resume()).steps) == 2
    table.run()
    assert (len(kept(table, 1)), table.num_rows(1)) == (9, 11)


@pytest.mark.parametrize(("depth", "most"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_a_steady_step_looks_at_those_alone_that_are_due(depth, most, monkeypatch):
    looked: list[list[int]] = []
    attend = StepPlanner._attend

    def watched(planner: StepPlanner, *args):
        looked.append(sorted(planner.due))
        return attend(planner, *args)

    monkeypatch.setattr(StepPlanner, "_attend", watched)
    table = Table(num_blocks=64, block_tokens=8, max_step_tokens=64, pipeline_depth=depth, max_run_tokens=most)
    table.turn(*(table.request(key, range(100 * key, 101 * key), 60) for key in range(1, 9)))
    # their lengths differ by one, so that one of the eight needs a block in each step
    for _ in range(5):
        table.turn(table.done())
    looked.clear()
    for _ in range(16):
        table.turn(table.done())
    assert [len(keys) for keys in looked] == [1] * 16
    assert sorted(key for keys in looked for key in keys) == [key for key in range(1, 9) for _ in range(2)]


@pytest.mark.parametrize(
    ("counts", "tokens", "change", "full", "same"),
    [
        ((1, 1, 1), 3, {}, {}, True),
        ((1, 1), 2, {}, {}, False),
        ((1, 2, 1), 4, {}, {}, False),
        ((1, 0, 1), 2, {}, {}, False),
        ((1, 1, 1), 4, {}, {}, False),
        ((1, 1, 1), 3, {"is_cut": True}, {}, False),
        ((1, 1, 1), 3, {"tokens": [0] * 8}, {}, False),
        ((1, 1, 1), 3, {}, {7: 16}, False),
    ],
)
def test_a_step_is_as_one_without_counts_where_nothing_can_be_cut(counts, tokens, change, full, same):
    """Two sequences decode, one begins to. One that was cut, is at its limit, or has a full table needs a look."""
    plain = {"is_cut": False, "tokens": [0] * 3, "max_len": 8}
    decodes = [SimpleNamespace(**plain), SimpleNamespace(**{**plain, **change})]
    event = StepDone(step_id=0, tokens=tuple(range(tokens)), at=0.0, counts=counts)
    plan = StepPlan(0, decodes, [], frozenset(), 0.0, full)
    assert one_each(plan, 1, event, maybe_cut=True) is same
    # where no step in flight gave runs, no sequence is looked at
    assert one_each(plan, 1, event, maybe_cut=False) is (same or bool(change))
