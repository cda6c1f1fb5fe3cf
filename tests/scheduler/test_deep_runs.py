"""Runs of tokens with one step and with two in flight: a model of a runner, with runs of lengths that a seed draws.

The model computes a step when it is launched, as a device does: it knows where each sequence is, and the scheduler does
not.
"""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random

import pytest

from fdasync.cache.identity import block_keys
from fdasync.errors import InvariantBroken
from tests.scheduler.table import Table

MOST = 4
STOP = 7
LONG = 60


class Machine:
    """Yields `stream(key)` token after token, in runs; never past the block table that a step came with."""

    def __init__(self, random: Random, table: Table) -> None:
        self.random = random
        self.table = table
        self.size = table.config.block_tokens
        self.streams: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.tables: dict[int, int] = {}
        self.positions: dict[int, int] = {}
        self.decoding: list[int] = []
        self.outputs: list[list[list[int]]] = []
        self.counts: Counter[int] = Counter()

    def request(self, key, length, max_tokens, **fields):
        self.prompts[key] = [100 * key + at for at in range(length)]
        # a stop id now and then
        answer = [STOP if self.random.random() < 0.03 else 1000 * key + at for at in range(LONG)]
        self.streams[key] = self.prompts[key] + answer
        return self.table.request(key, self.prompts[key], max_tokens, **fields)

    def launch(self, step):
        for key in step.leaves:
            del self.tables[key]
            self.decoding = [other for other in self.decoding if other != key]
        for start in step.starts:
            self.tables[start.key], self.positions[start.key] = len(start.blocks), start.num_cached
            known = array("i", start.tokens).tolist()
            assert known == self.streams[start.key][: len(known)]
        for append in step.appends:
            self.tables[append.key] += 1
        runs = [self._run(key) for key in self.decoding if key not in step.skips]
        self.counts.update(map(len, runs))
        for chunk in step.chunks:
            self.positions[chunk.key] += chunk.count
            if chunk.last:
                runs.append([self.streams[chunk.key][self.positions[chunk.key]]])
                self.decoding.append(chunk.key)
        self.outputs.append(runs)

    def _run(self, key):
        at, room = self.positions[key], self.tables[key] * self.size - self.positions[key]
        assert room >= 0
        count = min(self.random.randint(1, MOST), room)
        self.positions[key] += count
        return self.streams[key][at + 1 : at + 1 + count]

    def turn(self, *events):
        turned = self.table.turn(*events)
        for step in turned.steps:
            self.launch(step)
        return turned

    def step(self):
        return self.table.runs(*self.outputs.pop(0))

    def wanted(self, key, max_tokens, stops):
        answer = self.streams[key][len(self.prompts[key]) :][:max_tokens]
        ends = [at for at, token in enumerate(answer, 1) if stops and token == STOP]
        return tuple(answer[: ends[0]] if ends else answer)


def play(seed: int, depth: int) -> tuple[Machine, Counter[str]]:
    """Requests that share few blocks, some aborted, with pauses; every answer and every identity is checked."""
    random = Random(f"{seed} {depth}")
    table = Table(
        num_blocks=random.choice((9, 12, 20)), block_tokens=random.choice((2, 4)), max_running=4, max_step_tokens=40,
        max_run_tokens=MOST, pipeline_depth=depth, decode_reserve_blocks=random.choice((0, 1)),
    )  # fmt: skip
    machine = Machine(random, table)
    plans = {key: (random.randint(1, 6), random.randint(1, 11), random.random() < 0.5) for key in range(1, 8)}
    ends: Counter[str] = Counter()
    waiting = list(plans)
    paused = False
    for turn in range(600):
        events = [machine.step()] if table.flying and random.random() < 0.8 else []
        while waiting and random.random() < 0.4:
            key = waiting.pop(0)
            length, most, stops = plans[key]
            fields = {"stop_ids": frozenset({STOP})} if stops else {}
            events.append(machine.request(key, length, most, emits=True, **fields))
        if random.random() < 0.02:
            events.append(table.abort(random.choice(list(plans))))
        if paused or (turn < 200 and random.random() < 0.05):
            events.append(table.resume() if paused else table.pause(random.choice(("in_place", "retract"))))
            paused = not paused
        machine.turn(*events)
        if len(table.finished) == len(plans) and not table.flying:
            break
    else:
        raise AssertionError("it does not end")
    for key, (length, most, stops) in plans.items():
        end = table.finished[key]
        ends[end.reason] += 1
        wanted = machine.wanted(key, most, stops)
        assert end.token_ids == (wanted if end.reason != "abort" else wanted[: len(end.token_ids)])
        assert end.reason == "abort" or end.num_rows == length + len(wanted) - 1
        # a result has room for the rows of all tokens but the last one
        assert end.num_rows <= table.num_rows(key) <= length + most - 1
    true = {key for stream in machine.streams.values() for key in block_keys(table.root(b""), stream, machine.size)}
    assert {block.key for block in table.scheduler.index.pool.live() if block.key is not None} <= true
    assert table.is_empty()
    ends["preemptions"] = table.stats.preemptions
    ends["dropped"] = table.stats.dropped_tokens
    return machine, ends


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_rows_and_identities_are_those_of_the_stream(depth):
    ends: Counter[str] = Counter()
    counts: Counter[int] = Counter()
    for seed in range(60):
        machine, found = play(seed, depth)
        ends += found
        counts += machine.counts
    assert all(ends[name] for name in ("stop", "length", "abort", "preemptions", "dropped"))
    assert set(counts) == ({0, 1, 2, 3, 4} if depth == 2 else {1, 2, 3, 4})


# -- by hand


def deep_table(**config) -> Table:
    return Table(**{"max_run_tokens": 4, "max_step_tokens": 64, "pipeline_depth": 2, **config})


def test_room_is_taken_from_the_last_position_at_which_the_step_may_begin():
    table = deep_table()
    first, second = table.turn(table.request(1, range(6), 20)).steps
    assert first.appends == ()
    # it begins at position 6 for certain, for a run of 4
    assert [append.key for append in second.appends] == [1]
    # position 7 at least, position 10 at most
    assert len(table.turn(table.runs([100])).step.appends) == 1
    # one token came of four: position 8 at least, 11 at most, and there is room for 15
    assert table.turn(table.runs([101])).step.appends == ()


def test_a_sequence_that_filled_its_table_yields_nothing_in_the_next_step_and_goes_on():
    table = deep_table(num_blocks=3, decode_reserve_blocks=0)
    # the other one holds a block until its stop answer comes
    table.turn(table.request(1, range(5), 5), table.request(2, [50], 2, emits=True, checks_stops=True))
    table.turn(table.runs([100], [200]))
    turned = table.turn(table.runs([101, 102, 103], [201]))
    assert turned.finishes == []
    # its table held 8 positions, and 103 has the ninth
    turned = table.turn(table.runs([]))
    assert (turned.steps, table.flying) == ([], [])
    turned = table.turn(table.checked(2, 2))
    assert [append.key for append in turned.steps[0].appends] == [1]
    table.turn(table.runs([104]))
    assert table.finished[1].token_ids == (100, 101, 102, 103, 104)
    assert table.num_rows(1) == 9


def test_its_last_token_is_not_planned_behind_a_step_that_may_have_no_room():
    # a step in flight that found no room took it no further
    play(690, 2)


def test_a_run_that_is_empty_for_no_reason_fails_the_engine():
    table = deep_table()
    table.turn(table.request(1, range(6), 20))
    table.turn(table.runs([100]))
    with pytest.raises(InvariantBroken, match="returned 0 tokens of sequence 1"):
        table.turn(table.runs([]))


def test_what_follows_on_the_length_limit_is_dropped_while_a_stop_answer_is_awaited():
    table = deep_table()
    table.turn(table.request(1, range(6), 5, emits=True, checks_stops=True))
    table.turn(table.runs([100]))
    # all five tokens, and a step in flight that went on behind the last one
    assert table.turn(table.runs([101, 102, 103, 104])).finishes == []
    table.turn(table.runs([105, 106]))
    table.turn(table.checked(1, 5))
    assert table.finished[1].token_ids == (100, 101, 102, 103, 104)
    assert table.num_rows(1) == table.finished[1].num_rows == 10
    assert table.stats.dropped_tokens == 2
    assert table.is_empty()


def test_no_step_is_planned_behind_a_step_in_flight_that_gives_the_last_token():
    table = deep_table()
    table.turn(table.request(1, range(6), 5, emits=True, checks_stops=True))
    table.turn(table.runs([100]))
    # one of five is missing, and the step in flight gives it
    assert table.turn(table.runs([101, 102, 103])).steps == []
    table.turn(table.runs([104]))
    assert table.flying == []
    table.turn(table.checked(1, 5))
    assert table.num_rows(1) == table.finished[1].num_rows == 10
    assert table.stats.dropped_tokens == 0
    assert table.is_empty()


def test_what_follows_on_a_run_that_was_cut_is_dropped():
    table = deep_table()
    table.turn(table.request(1, range(6), 20, stop_ids=frozenset({STOP})))
    table.turn(table.runs([100]))
    turned = table.turn(table.runs([STOP, 102, 103]))
    assert turned.finish.token_ids == (100, STOP)
    table.turn(table.runs([104, 105, 106, 107]))
    assert table.stats.dropped_tokens == 6
    # no block of the tokens behind the cut, nor of those that seem to follow on the stop id
    assert table.places([*range(6), 100, STOP]) == ["device", ""]
    assert table.places([*range(6), 100, STOP, 104, 105, 106, 107]) == ["device", "", ""]
    assert table.is_empty()
