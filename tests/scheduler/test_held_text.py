"""What drafters are told late, and what not at all (`held_text.py`, `drafts.py`)."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from fdasync.drafting import Drafter, DrafterLimits, DrafterStats, DraftPlanner
from fdasync.scheduler import held_text
from fdasync.scheduler.held_text import HeldText

LIMITS = DrafterLimits(path_tokens=7, max_running=16)


class Listener(Drafter):
    """Proposes nothing, and remembers all that it is told. Its clock must not go back."""

    def __init__(self, outlasts):
        super().__init__(None, LIMITS)
        self.keeps = outlasts
        self.texts, self.over = {}, []
        self.calls = 0
        self.clock = 0.0

    @property
    def outlasts(self):
        return self.keeps

    def begin(self, key, group, prompt, answer, *, salt="", now=0.0):
        assert key not in self.texts
        assert now >= self.clock
        self.clock = now
        self.calls += 1
        self.texts[key] = (salt, prompt, np.frombuffer(answer, "<i4").tolist())

    def take(self, keys, counts, tokens):
        self.calls += 1
        for key, some in zip(keys, np.split(tokens, np.cumsum(counts)[:-1]), strict=True):
            self.texts[key][2].extend(some.tolist())

    def propose(self, keys, most):
        return np.zeros(len(keys), np.int64), np.zeros(0, np.int32)

    def end(self, key, *, now=0.0):
        assert now >= self.clock
        self.clock = now
        self.calls += 1
        self.over.append(self.texts.pop(key))

    def stats(self):
        return DrafterStats(sequences=len(self.texts), prompts=0, nbytes=0, limit_nbytes=0)


class World:
    """Sequences of a few prompts that get a token a step, none of them by a draft."""

    def __init__(self, outlasts):
        self.listener = Listener(outlasts)
        self.planner = DraftPlanner(self.listener, name="listener", max_drafts=3, depth=1)
        self.held = HeldText(self.planner)
        self.live = {}
        self.ended = []
        self.steps = {}
        self.now = 0.0

    def begin(self, key, group, prompt, salt=""):
        tokens = [*prompt, key]
        self.live[key] = SimpleNamespace(
            key=key, group=group, tokens=tokens, prompt_len=len(prompt), max_len=10**6, salt=salt
        )
        self.steps[key] = 0
        self.held.begin(self.live[key])
        # a second time it goes on
        self.held.begin(self.live[key])

    def step(self, keys=None, resumed=()):
        """A step without paths; the last chunk of those that were preempted gives a token, too."""
        self.now += 1.0
        decodes = tuple(self.live) if keys is None else keys
        self.planner._flights.append(self.planner_flight(decodes))
        for key in decodes:
            self.live[key].tokens.append(1000 + len(self.live[key].tokens))
            self.steps[key] += 1
        self.held.step_done([self.live[key] for key in resumed], is_told=False)
        self.planner.passed(decodes)
        for key in resumed:
            self.live[key].tokens.append(5)

    @staticmethod
    def planner_flight(keys):
        return SimpleNamespace(keys=keys, rows=len(keys), has_paths=False)

    def end(self, key):
        seq = self.live.pop(key)
        assert self.held.end(seq, self.now) == (self.steps.pop(key), 0, 0)
        assert self.held.end(seq, self.now) == (0, 0, 0)
        self.ended.append(self.text(seq))

    def tell(self):
        self.held.tell(self.now)
        assert self.listener.texts == {key: self.text(seq) for key, seq in self.live.items()}

    @staticmethod
    def text(seq):
        prompt = np.array(seq.tokens[: seq.prompt_len], "<i4").tobytes()
        return seq.salt, prompt, seq.tokens[seq.prompt_len :]


def test_nothing_is_told_before_it_is_asked_for():
    world = World(outlasts=True)
    for key in range(8):
        world.begin(key, 0, (1, 2, 3))
    for _ in range(50):
        world.step()
    world.end(3)
    assert world.listener.calls == 0
    world.tell()
    assert world.listener.over == world.ended
    # 8 begin, one of them ends; the tokens came with them
    assert world.listener.calls == 9
    for _ in range(50):
        world.step()
    assert world.listener.calls == 9
    world.tell()
    assert world.listener.calls == 10


@pytest.mark.parametrize("outlasts", [False, True])
def test_sequences_of_a_prompt_that_is_over_are_told_of_where_they_are_kept(outlasts):
    world = World(outlasts)
    for key, group, salt in ((1, 1, ""), (2, 1, ""), (3, 3, "s"), (4, 4, "")):
        world.begin(key, group, (1, 2), salt=salt)
    world.step()
    # 4 is of the same prompt as 1 and 2, and lives on; no other is of the salt of 3
    for key in (1, 2, 3):
        world.end(key)
    world.tell()
    assert world.listener.over == (world.ended if outlasts else world.ended[:2])
    world.step()
    world.end(4)
    # it was told of, so its end is, too: at once, or with its last token
    assert bool(world.listener.texts) is outlasts
    world.tell()
    last = ("", *world.ended[3][1:])
    assert world.listener.over[-1] == (last if outlasts else (*last[:2], last[2][:-1]))


@pytest.mark.parametrize("outlasts", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_all_texts_arrive_whole(seed, outlasts):
    """Sequences come, are preempted, resume, end, and come again under an old key."""
    random, world = Random(seed), World(outlasts)
    for turn in range(400):
        free = [key for key in range(12) if key not in world.live]
        if free and random.random() < 0.5:
            key = random.choice(free)
            world.begin(key, key // 3 + turn * 100, [(1,), (1, 2), (3,)][random.randrange(3)], random.choice(("", "s")))
        running = [key for key in world.live if random.random() < 0.9]
        resumed = [key for key in world.live if key not in running and random.random() < 0.2]
        world.step(tuple(running), resumed)
        if world.live and random.random() < 0.45:
            world.end(random.choice(list(world.live)))
        if random.random() < 0.1:
            world.tell()
    for key in list(world.live):
        world.end(key)
    world.tell()
    assert not world.listener.texts
    if outlasts:
        assert sorted(world.listener.over) == sorted(world.ended)
    else:
        assert len(world.listener.over) < len(world.ended)
    assert list(world.held.keys) == []


def test_a_group_may_go_on_after_all_of_it_has_ended():
    world = World(outlasts=False)
    for key in (1, 2, 3):
        world.begin(key, 7, (1, 2))
        world.step()
        world.end(key)
    assert list(world.held.keys) == []


def test_what_is_not_told_takes_no_room(monkeypatch):
    """Prompts that are over are forgotten with their answers, so the limit is never reached."""
    monkeypatch.setattr(held_text, "_MOST_ENDED_TOKENS", 50)
    world = World(outlasts=False)
    world.begin(999, 999, (9,))
    for key in range(0, 200, 2):
        for each in (key, key + 1):
            world.begin(each, key, (1, 2, key))
        world.step((key, key + 1))
        world.end(key)
        world.end(key + 1)
    assert world.listener.calls == 0


def test_tokens_that_the_planner_has_of_a_step_are_not_counted_again():
    """The first token after a preemption is of no decode step, whoever tells of it."""
    world = World(outlasts=True)
    world.begin(1, 0, (1, 2))
    world.tell()
    seq = world.live[1]
    seq.tokens.append(9)
    world.planner.take((1,), [0], [1], [9])
    world.held.step_done([seq], is_told=True)
    world.step()
    world.end(1)
    world.tell()
    assert world.listener.over == world.ended


@pytest.mark.parametrize("limit", ["_MOST_ENDED", "_MOST_ENDED_TOKENS"])
def test_what_ended_is_held_up_to_a_limit(monkeypatch, limit):
    monkeypatch.setattr(held_text, limit, 20)
    world = World(outlasts=True)
    for key in range(100):
        world.begin(key, key, (1, 2))
        for _ in range(3):
            world.step()
        world.end(key)
        assert len(world.ended) - len(world.listener.over) <= 20
    assert world.listener.over


def test_prompts_of_those_that_ended_count(monkeypatch):
    monkeypatch.setattr(held_text, "_MOST_ENDED_TOKENS", 2000)
    world = World(outlasts=True)
    for key in range(5):
        world.begin(key, key, [key] * 900)
        world.end(key)
    assert len(world.listener.over) == 3


@pytest.mark.parametrize("outlasts", [False, True])
def test_samples_of_one_prompt_serve_each_other_in_whatever_request(outlasts):
    """A request that ends is told of while one of the same prompt lives."""
    world = World(outlasts)
    world.begin(0, 0, (1, 2))
    for key in range(1, 6):
        world.begin(key, key, (1, 2))
        world.step()
        world.end(key)
    world.tell()
    assert world.listener.over == world.ended
