"""Drafts of steps at several depths, against a runner that verifies them as `RunStep.drafts` says (`planning.py`)."""

from __future__ import annotations

from collections import deque
from random import Random

import numpy as np
import pytest

from fdasync.drafting import Beginning, Drafter, DrafterLimits, DrafterStats, DraftPlanner
from fdasync.drafting.ngram import NgramConfig, NgramDrafter
from fdasync.errors import InvariantBroken
from fdasync.events.actions import path_tokens
from tests.drafting.naive import packed


def truth(key, position):
    return (key * 7919 + position * 31) % 1000


class Seer(Drafter):
    """Knows the answers; each token of a path is wrong with a chance."""

    def __init__(self, wrong, seed=0, prompt=2):
        super().__init__(None, DrafterLimits(path_tokens=255, max_running=1))
        self.random, self.wrong, self.prompt = Random(seed), wrong, prompt
        self.known = {}
        self.asked = []

    def begin(self, key, group, prompt, answer, *, salt="", now=0.0):
        assert key not in self.known
        self.known[key] = (len(prompt) + len(answer)) // 4

    def take(self, keys, counts, tokens):
        tokens = deque(tokens.tolist())
        for key, count in zip(keys, counts.tolist(), strict=True):
            for _ in range(count):
                assert tokens.popleft() == truth(key, self.known[key])
                self.known[key] += 1
        assert not tokens

    def propose(self, keys, most):
        self.asked.append((keys, most.tolist()))
        tokens = []
        for key, count in zip(keys, most.tolist(), strict=True):
            positions = range(self.known[key], self.known[key] + count)
            tokens += [truth(key, at) if self.random.random() >= self.wrong else 5000 for at in positions]
        return most.copy(), np.array(tokens, np.int32)

    def end(self, key, *, now=0.0):
        del self.known[key]

    def stats(self):
        return DrafterStats(sequences=len(self.known), prompts=0, nbytes=0, limit_nbytes=0)


class Runner:
    """Launches steps in order, and verifies drafts; its tokens are told when a step is done."""

    def __init__(self, random, cuts=0.0):
        self.random, self.cuts = random, cuts
        self.lengths = {}
        self.launched = deque()
        self.drafted = self.accepted = 0

    def launch(self, keys, drafts):
        paths = {}
        if drafts is not None:
            tokens, at = np.frombuffer(drafts.tokens, "<i4").tolist(), 0
            for key, start, count, most in zip(drafts.keys, drafts.starts, drafts.counts, drafts.most, strict=True):
                assert 1 <= most <= count
                paths[key] = (start, tokens[at : at + count], most)
                at += count
            assert at == len(tokens)
        counts, answer = [], []
        for key in keys:
            length = self.lengths[key]
            start, path, most = paths.get(key, (length, [], 0))
            assert start <= length
            gone = length - start
            forwarded = path[gone : gone + most]
            if self.random.random() < self.cuts:
                # the block table has no room for more
                forwarded = forwarded[: self.random.randrange(4)]
            count = 0
            while count < len(forwarded) and forwarded[count] == truth(key, length + count):
                count += 1
            self.drafted += len(forwarded)
            self.accepted += count
            counts.append(count + 1)
            answer += [truth(key, position) for position in range(length, length + count + 1)]
            self.lengths[key] += count + 1
        self.launched.append((keys, counts, answer))


def seconds(rows):
    return 0.01 + rows * 1e-6


def play(wrong, depth, steps=400, most=3, seed=0, cuts=0.0, price=seconds, churn=0.2):
    """Returns the planner and the runner after some steps with sequences that come and go."""
    random = Random(seed)
    seer = Seer(wrong, seed)
    planner = DraftPlanner(seer, name="seer", max_drafts=most, depth=depth)
    runner = Runner(random, cuts)
    fresh = iter(range(10**6))
    planned = deque()
    live = []
    for _ in range(steps):
        if len(live) < 4 or (len(live) < 10 and random.random() < churn):
            key = next(fresh)
            live.append(key)
            runner.lengths[key] = 3
            planner.begin([Beginning(key, key, packed([1, 2]), packed([truth(key, 2)]))])
        keys = tuple(live)
        columns = planner.plan(keys)
        rows = len(keys) + (sum(columns.most) if columns else 0)
        runner.launch(keys, columns)
        planned.append(rows)
        if random.random() < churn / 2:
            # ends while steps are in flight
            planner.end(live.pop(random.randrange(len(live))))
        if len(planned) == depth:
            keys, counts, tokens = runner.launched.popleft()
            planner.done(keys, tuple(counts), tuple(tokens), seconds=price(planned.popleft()))
    return planner, runner


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_counts_are_the_runners(depth, wrong):
    """No sequence ends, so all that the runner did is told."""
    planner, runner = play(wrong, depth, churn=0.0)
    while runner.launched:
        planner.done(*runner.launched.popleft())
    counters = planner.counters
    assert (counters.drafted, counters.accepted) == (runner.drafted, runner.accepted)
    assert counters.steps > 0
    if wrong == 0.0:
        assert counters.accepted == counters.drafted > 1000
    if wrong == 1.0:
        assert counters.accepted == 0
        assert counters.drafted > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_runs_that_room_cuts_are_no_rejections(depth):
    planner, runner = play(0.0, depth, churn=0.0, cuts=0.5)
    while runner.launched:
        planner.done(*runner.launched.popleft())
    assert planner.counters.accepted == runner.accepted
    assert planner._acceptance[planner._rows[0]] > 0.99


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("seed", range(20))
def test_sequences_that_come_and_go_keep_their_tokens(seed):
    """The drafter that plays checks every token that it is given."""
    planner, runner = play(0.3, seed % 3 + 1, seed=seed, churn=0.5, cuts=0.2)
    assert planner.counters.accepted > 100
    assert planner.counters.accepted <= runner.accepted


def test_nothing_is_drafted_in_vain():
    """Drafts that are never right stop, but for a try now and then, less and less often."""
    planner, _ = play(1.0, 2, steps=5000, churn=0.0)
    counters = planner.counters
    assert planner._acceptance[planner._rows[0]] < 0.1
    assert counters.steps < 120


@pytest.mark.ci
def test_a_sequence_that_becomes_predictable_drafts_again():
    planner, runner = play(1.0, 1, steps=600, churn=0.0)
    seer = planner._drafter._drafter
    seer.wrong = 0.0
    before = planner.counters.accepted
    for _ in range(3000):
        keys = tuple(runner.lengths)
        columns = planner.plan(keys)
        runner.launch(keys, columns)
        rows = len(keys) + (sum(columns.most) if columns else 0)
        planner.done(*runner.launched.popleft(), seconds=seconds(rows))
    assert planner.counters.accepted - before > 3 * 2000


def test_dear_rows_are_not_used():
    planner, _ = play(0.3, 2, steps=2000, churn=0.0, price=lambda rows: rows * 1e-3)
    assert planner.counters.steps < 60


def test_few_sequences_draft_at_once_where_many_did_not():
    """The tail of a rollout: rows that are dear beside 32 sequences are free beside 8."""
    planner = DraftPlanner(Seer(0.1), name="seer", max_drafts=3, depth=1)
    runner = Runner(Random(0))
    for key in range(32):
        runner.lengths[key] = 3
        planner.begin([Beginning(key, key, packed([1, 2]), packed([truth(key, 2)]))])

    def step(keys):
        columns = planner.plan(keys)
        runner.launch(keys, columns)
        rows = len(keys) + (sum(columns.most) if columns else 0)
        planner.done(*runner.launched.popleft(), seconds=0.01 if rows <= 32 else rows * 1e-3)
        return columns is not None

    many = [step(tuple(range(32))) for _ in range(2000)]
    assert sum(many) < 20
    few = [step(tuple(range(8))) for _ in range(20)]
    # the first step tells the price without drafts
    assert few[1]
    assert sum(few) >= 18


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_paths_reach_over_the_steps_in_flight(depth):
    planner, _ = play(0.0, depth, churn=0.0)
    asked = [count for _, most in planner._drafter._drafter.asked for count in most]
    assert max(asked) == path_tokens(3, depth) == depth * 4 - 1


def test_no_drafts_before_a_step_was_measured():
    planner, _ = play(0.0, 2, price=lambda _rows: None)
    assert planner.counters == ("seer", 0, 0, 0)


def test_sequences_that_have_not_begun_are_passed_over():
    seer = Seer(0.0)
    planner = DraftPlanner(seer, name="seer", max_drafts=3, depth=1)
    planner.begin([Beginning(1, 1, packed([1, 2]), packed([truth(1, 2)]))])
    for _ in range(200):
        columns = planner.plan((9, 1, 8))
        assert columns is None or columns.keys == (1,)
        length = seer.known[1]
        run = [truth(1, position) for position in range(length, length + (1 if columns is None else 4))]
        # the last chunk of sequence 7 was computed
        planner.done((9, 1, 8, 7), (1, len(run), 0, 1), (0, *run, 5), seconds=0.01)
    assert planner.counters.accepted > 100
    planner.end(1)
    planner.end(1)
    assert planner.plan((1,)) is None
    planner.done((1,), None, (3,))


def test_calls_out_of_turn_are_told():
    planner = DraftPlanner(Seer(0.0), name="seer", max_drafts=3, depth=2)
    with pytest.raises(InvariantBroken, match="none was planned"):
        planner.done((), None, ())
    planner.begin([Beginning(1, 1, packed([1]), b"")])
    with pytest.raises(InvariantBroken, match="twice"):
        planner.begin([Beginning(1, 1, packed([1]), b"")])
    planner.plan((1,))
    planner.plan((1,))
    with pytest.raises(InvariantBroken, match="in flight"):
        planner.plan((1,))
    with pytest.raises(InvariantBroken, match="2 tokens"):
        planner.done((1,), None, (1, 2))


def test_equal_calls_give_equal_drafts():
    def drafts():
        drafter = NgramDrafter(NgramConfig(), DrafterLimits(path_tokens=path_tokens(3, 1), max_running=8))
        planner = DraftPlanner(drafter, name="ngram", max_drafts=3, depth=1)
        random = Random(1)
        keys = tuple(range(8))
        for key in keys:
            planner.begin([Beginning(key, 0, packed([1, 2]), b"")])
        out = []
        for _ in range(300):
            out.append(planner.plan(keys))
            planner.done(keys, None, tuple([random.randrange(2) for _ in keys]), seconds=random.random())
        return out

    first = drafts()
    assert any(first)
    assert first == drafts()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_that_was_preempted_goes_on(depth):
    """It is not among the decodes for some steps. Then its last chunk gives a token that no draft was made for, in a
    turn whose columns still hold its path of an earlier step."""
    planner = DraftPlanner(Seer(1.0), name="seer", max_drafts=3, depth=depth, weighs=False)
    runner = Runner(Random(0))
    runner.lengths = {1: 3, 2: 3}
    for key in (1, 2):
        planner.begin([Beginning(key, key, packed([1, 2]), packed([truth(key, 2)]))])

    def step(keys, sampler=None):
        runner.launch(keys, planner.plan(keys))
        if sampler is not None:
            _, counts, tokens = runner.launched[-1]
            runner.launched[-1] = ((*keys, sampler), [*counts, 1], [*tokens, truth(sampler, runner.lengths[sampler])])
            runner.lengths[sampler] += 1
        if len(runner.launched) == depth:
            planner.done(*runner.launched.popleft())

    for _ in range(6):
        step((1, 2))
        step((1, 2))
        step((2,))
        step((2,), sampler=1)
        step((2, 1))
    while runner.launched:
        planner.done(*runner.launched.popleft())
    counters = planner.counters
    assert (counters.drafted, counters.accepted) == (runner.drafted, 0)
    assert planner._drafter._drafter.known == runner.lengths


def test_nothing_is_drafted_for_the_last_token_or_behind():
    seer = Seer(0.0)
    planner = DraftPlanner(seer, name="seer", max_drafts=3, depth=2, weighs=False)
    planner.begin([Beginning(1, 1, packed([1, 2]), packed([truth(1, 2)]), limit=6)])
    first, second = planner.plan((1,)), planner.plan((1,))
    # positions 3 and 4 can be drafted; the step in flight gives one of them at least
    assert (first.counts, first.most) == ((2,), (2,))
    assert (second.counts, second.most) == ((2,), (1,))
    planner.done((1,), (2,), (truth(1, 3), truth(1, 4)))
    planner.done((1,), None, (truth(1, 5),))
    assert planner.plan((1,)) is None


def test_a_drafter_that_does_not_pay_is_off_and_told_everything_before_it_is_asked_again():
    """Then its paths go on from all tokens, and steps are counted."""
    seer = Seer(0.0)
    planner = DraftPlanner(seer, name="seer", max_drafts=3, depth=1)
    runner = Runner(Random(0))
    runner.lengths = {1: 3, 2: 3}
    told = {1: 3}
    calls = 0

    def catch_up():
        nonlocal calls
        calls += 1
        if 2 not in told:
            planner.begin(
                [Beginning(2, 2, packed([1, 2]), packed([truth(2, at) for at in range(2, runner.lengths[2])]))]
            )
            told[2] = runner.lengths[2]
        keys = tuple([key for key in told if told[key] < runner.lengths[key]])
        counts = [runner.lengths[key] - told[key] for key in keys]
        tokens = [truth(key, at) for key in keys for at in range(told[key], runner.lengths[key])]
        planner.take(keys, counts, counts, tokens)
        told.update(runner.lengths)

    planner.begin([Beginning(1, 1, packed([1, 2]), packed([truth(1, 2)]))])
    follows = 0
    for _ in range(400):
        # rows are as dear as tokens, so drafts pay in no step but those that try
        drafts = planner.plan((1, 2), catch_up)
        runner.launch((1, 2), drafts)
        keys, counts, tokens = runner.launched.popleft()
        seconds = len(keys) if drafts is None else 2.0 * len(keys) + sum(drafts.most) * 10.0
        is_told = planner.done(keys, counts, tokens, seconds=seconds)
        assert is_told or drafts is None
        if is_told:
            follows += 1
            told.update(runner.lengths)
    assert 1 <= follows <= calls <= 30
    catch_up()
    assert seer.known == runner.lengths == dict(zip((1, 2), planner.lengths((1, 2)), strict=True))
    assert planner.lengths((2, 1)) == [runner.lengths[2], runner.lengths[1]]
    assert planner.tally(1) == (400, planner.counters.drafted // 2, planner.counters.accepted // 2)
    with pytest.raises(InvariantBroken, match="none was planned"):
        planner.done((), None, (), seconds=0.1)


def test_a_step_that_is_told_as_another_one_is_refused():
    planner = DraftPlanner(Seer(0.0), name="seer", max_drafts=3, depth=1)
    planner.plan((1, 2))
    with pytest.raises(InvariantBroken, match="was told as one of"):
        planner.done((2, 1), None, (1, 2))
