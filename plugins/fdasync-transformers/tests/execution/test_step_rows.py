"""Steps planned before the host knows where their sequences are, against a device that is played here."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from fdasync_transformers.execution.drafts.step_rows import RowPlanner, StepRows
from fdasync_transformers.sampling.plan import uniform
from step_driver import sampler_spec

from fdasync.errors import InvariantBroken
from fdasync.events.actions import BlockAppend, Chunk, RunStep, SeqStart
from fdasync.runner.drafts import Path, follow, path_tokens
from fdasync.runner.input_batch import InputBatch
from fdasync.testing.runners.drafts import drafts_of

SIZE, VOCAB, MOST, DEPTH, CONTEXT = 4, 20, 3, 2, 40
PENALTY = {"presence_penalty": 0.5}


@dataclass
class Played:
    """A sequence: where the device is, and what the host was told."""

    key: int
    spec: Any
    length: int
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    known: int = 0
    decodes: bool = False

    def place(self, position: int) -> tuple[int, int]:
        """Index and generation of the row of a position."""
        _, slot, generation = self.blocks[position // SIZE]
        return slot * SIZE + position % SIZE, generation


class Play:
    """Steps of random joins, leaves, blocks and drafts, two in flight; `own`: the device drafts, too."""

    def __init__(self, seed: int, *, own: bool = False) -> None:
        self.random = random.Random(seed)
        self.table = InputBatch(3, CONTEXT, SIZE, 400, MOST + 1)
        self.own = own
        self.planner = RowPlanner(self.table, MOST, DEPTH, own=own)
        self.live: dict[int, Played] = {}
        self.flights: deque[tuple[StepRows, Any]] = deque()
        self.numbers = iter(range(10_000))
        self.blocks = iter(self.random.sample(range(400), 400))
        self.longest = self.none = self.behind = self.owned = 0

    def block(self) -> tuple[int, int, int]:
        return next(self.blocks), self.random.randrange(1000), self.random.randrange(1, 9)

    def turn(self) -> None:
        starts, chunks, appends, leaves = [], [], [], []
        for one in list(self.live.values()):
            if self.random.random() < 0.1:
                # also while a step of it is in flight
                leaves.append(one.key)
                del self.live[one.key]
        going = [one for one in self.live.values() if one.decodes]
        while len(self.live) < 3 and self.random.random() < 0.5:
            # a key may come back on another lane, as after a preemption
            one = self.start(leaves)
            if one is None:
                break
            starts.append(self.entry(one))
            chunks.append(Chunk(one.key, one.length, True))
        paths = {}
        for one in going:
            # sometimes none, and sometimes several at once
            while len(one.blocks) * SIZE < min(one.known + 8, CONTEXT) and self.random.random() < 0.6:
                one.blocks.append(self.block())
                appends.append(BlockAppend(one.key, *one.blocks[-1]))
            if self.random.random() < 0.7:
                count = self.random.randint(1, path_tokens(MOST, DEPTH))
                tokens = [self.random.choice([1, 2, 3, VOCAB, -1]) for _ in range(count)]
                start = max(one.known + self.random.choice([-2, -1, 0, 0, 0, 1, 3]), 1)
                paths[one.key] = (start, tokens, self.random.randint(1, MOST))
        step = RunStep(
            next(self.numbers), tuple(leaves), tuple(starts), tuple(appends), (), tuple(chunks),
            drafts=drafts_of(paths) if paths else None,
        )  # fmt: skip
        self.launch(step, going, paths)
        if len(self.flights) == DEPTH:
            self.end()

    def start(self, leaves: list[int]) -> Played | None:
        key = self.random.choice([*[key for key in leaves if key not in self.live], 1000 + next(self.numbers)])
        if key in self.live:
            return None
        length = self.random.randint(1, 9)
        asked = self.random.choice([{}, {"temperature": 1.0, "seed": key}, PENALTY])
        one = Played(key, sampler_spec(length, **asked), length)
        one.blocks = [self.block() for _ in range(-(-length // SIZE))]
        self.live[key] = one
        return one

    @staticmethod
    def entry(one: Played) -> SeqStart:
        tokens = np.ones(one.length, "<i4").tobytes()
        blocks, slots, generations = zip(*one.blocks, strict=True)
        return SeqStart(one.key, tokens, 0, blocks, slots, generations, one.spec)

    def launch(self, step: RunStep, going: list[Played], paths: dict[int, Any]) -> None:
        planned = self.planner.plan(step)
        assert [self.table.keys[lane] for lane in planned.lanes] == [one.key for one in going]
        starts, counts, rows, kept, samples = [], [], [], [], []
        used_rows, own_drafts = [], []
        for number, one in enumerate(going):
            row, width = planned.runs[number, 1:3].tolist()
            start = one.length
            assert planned.runs[number, 3] == -1
            room = min(len(one.blocks) * SIZE, CONTEXT)
            assert planned.runs[number, 4] == room
            drafts: Any = []
            takes = one.spec.presence_penalty == 0.0
            owns = self.own and takes and one.key not in paths
            assert bool(planned.owns[number]) == owns == (planned.runs[number, 6] == -1)
            if owns:
                drafts = [1] * self.random.randint(0, MOST)
            elif one.key in paths and takes:
                begin, tokens, most = paths[one.key]
                drafts = follow(Path(begin, most, np.array(tokens, np.int32)), start, VOCAB)
            # there are rows for all that the device could verify
            used = max(min(1 + len(drafts), room - start), 0)
            assert used <= width
            stands = self.random.randint(1, used) if used else 0
            used_rows.append(used)
            own_drafts.append(max(used - 1, 0) if owns else 0)
            self.owned += own_drafts[-1]
            self.behind += start > planned.known[number]
            self.longest = max(self.longest, stands)
            self.none += not used
            starts.append(start)
            counts.append(stands)
            kept += range(row, row + stands)
            samples += range(row, row + stands)
            rows += [(position, *one.place(position)) for position in range(start, start + stands)]
            if one.spec.temperature:
                assert planned.noise is not None
                for position in range(start + 1, start + used + 1):
                    noise = planned.noise[number, position - planned.runs[number, 9]]
                    assert noise == uniform(one.spec.seed, 0, position)
            one.length += stands
        at = planned.rows.num_decodes
        for number, chunk in enumerate(step.chunks):
            one = self.live[chunk.key]
            rows += [(position, *one.place(position)) for position in range(chunk.count)]
            kept += range(at, at + chunk.count)
            at += chunk.count
            samples.append(planned.rows.num_decodes + number)
            assert planned.runs[len(going) + number, 1:4].tolist() == [samples[-1], 1, chunk.count - 1]
            counts.append(1)
            own_drafts.append(0)
            one.decodes, one.known = True, one.length
        sampling = [*going, *[self.live[chunk.key] for chunk in step.chunks]]
        self.check_own(planned, sampling)
        told = [(one, one.length) for one in going]
        self.flights.append((planned, (starts, counts, used_rows, own_drafts, rows, kept, samples, told)))

    def check_own(self, planned: StepRows, sampling: list[Played]) -> None:
        """What the device needs to draft behind the step: the noise of as many positions behind its samples."""
        takes = [number for number, one in enumerate(sampling) if one.spec.presence_penalty == 0.0]
        assert planned.drafting.tolist() == (takes if self.own else [])
        for number in planned.drafting.tolist():
            one = sampling[number]
            assert planned.runs[number, 4] == min(len(one.blocks) * SIZE, CONTEXT)
            if one.spec.temperature:
                assert planned.noise is not None
                for position in range(one.length + 1, one.length + 1 + MOST):
                    noise = planned.noise[number, position - planned.runs[number, 9]]
                    assert noise == uniform(one.spec.seed, 0, position)

    def end(self) -> None:
        planned, (starts, counts, used, own_drafts, rows, kept, samples, told) = self.flights.popleft()
        columns = [np.array(column, np.int32) for column in (starts, counts, used)]
        settled = self.planner.settle(planned, *columns)
        assert np.flatnonzero(settled.stands).tolist() == kept
        assert settled.own_drafts == tuple(own_drafts)
        columns = [settled.positions, settled.aux_index, settled.generations]
        assert list(zip(*[column.tolist() for column in columns], strict=True)) == rows
        assert settled.samples.tolist() == samples
        assert settled.counts == tuple(counts)
        for one, length in told:
            one.known = length


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.ci), True])
def test_rows_stand_where_the_device_was(own: bool) -> None:
    longest = none = behind = owned = 0
    for seed in range(60):
        play = Play(seed, own=own)
        for _ in range(25):
            play.turn()
        while play.flights:
            play.end()
        longest, none, behind = max(longest, play.longest), none + play.none, behind + play.behind
        owned += play.owned
    # long runs, sequences without room, and steps planned from where a sequence was before
    assert longest == MOST + 1
    assert none > 20
    assert behind > 200
    assert (owned > 200) == own


def one_sequence() -> tuple[RowPlanner, RunStep]:
    table = InputBatch(2, CONTEXT, SIZE, 30, MOST + 1)
    planner = RowPlanner(table, MOST, DEPTH)
    start = SeqStart(7, np.ones(3, "<i4").tobytes(), 0, (1, 2, 3), (1, 2, 3), (1, 1, 1), sampler_spec(3))
    first = planner.plan(RunStep(0, (), (start,), (), (), (Chunk(7, 3, True),)))
    planner.settle(first, np.zeros(0, np.int32), np.ones(1, np.int32), np.zeros(0, np.int32))
    return planner, RunStep(1, (), (), (), (), (), drafts=drafts_of({7: (4, [1, 2, 3], 3)}))


@pytest.mark.parametrize(("start", "count"), [(2, 1), (3, 5), (4, 4), (9, 1), (3, -1)])
def test_runs_outside_their_rows_are_a_defect(start: int, count: int) -> None:
    planner, step = one_sequence()
    planned = planner.plan(step)
    with pytest.raises(InvariantBroken, match="outside the rows of step 1"):
        planner.settle(planned, np.array([start], np.int32), np.array([count], np.int32), np.ones(1, np.int32))


@pytest.mark.parametrize("number", [-1, MOST + 1])
def test_more_drafts_than_are_verified_are_refused(number: int) -> None:
    planner = RowPlanner(InputBatch(2, CONTEXT, SIZE, 30, MOST + 1), MOST, DEPTH, own=True)
    with pytest.raises(InvariantBroken, match=f"step 5 asks for {number} drafts, up to {MOST}"):
        planner.plan(RunStep(5, own_drafts=number))


def test_more_steps_than_may_be_in_flight_are_refused() -> None:
    planner, step = one_sequence()
    planner.plan(step)
    planner.plan(step)
    with pytest.raises(InvariantBroken, match="too many in flight"):
        planner.plan(step)


@pytest.mark.parametrize(
    ("start", "most", "rows"),
    [(4, 3, 4), (4, 1, 2), (2, 3, 2), (1, 3, 1), (5, 3, 1), (1 << 40, 3, 1)],
)
def test_a_path_has_rows_for_what_the_device_may_follow(start: int, most: int, rows: int) -> None:
    """Of three tokens; no step is in flight, and position 4 is the first without a token."""
    planner, _ = one_sequence()
    assert planner.plan(RunStep(1, drafts=drafts_of({7: (start, [1, 1, 1], most)}))).widths.tolist() == [rows]


@pytest.mark.parametrize(("start", "rows"), [(3, 3), (4, 4), (5, 4), (6, 4), (7, 1)])
def test_a_path_has_rows_wherever_the_step_in_flight_ends(start: int, rows: int) -> None:
    """That step takes one token or two."""
    planner, _ = one_sequence()
    planner.plan(RunStep(1, drafts=drafts_of({7: (4, [1, 1, 1], 1)})))
    assert planner.plan(RunStep(2, drafts=drafts_of({7: (start, [1, 1, 1], 3)}))).widths.tolist() == [rows]
