"""What a drafter is told, and when, of sequences that begin, go on and end while it is off (`drafts.py`)."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from fdasync.drafting import Drafter, DrafterLimits, DrafterStats
from fdasync.scheduler.drafts import StepDrafts
from fdasync.scheduler.state.config import SchedulerConfig

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
        config = SchedulerConfig(
            block_tokens=4, num_blocks=8, max_running=16, max_step_tokens=64, max_run_tokens=4,
            drafter="listener",
        )  # fmt: skip
        self.drafts = StepDrafts(config, self.listener)
        self.drafts.core = self
        self.is_on = False
        self.drafts._planner._asks = lambda _: self.is_on
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
        self.drafts.answers(self.live[key])
        # a second time it goes on
        self.drafts.answers(self.live[key])

    def step(self, keys=None, resumed=()):
        """A step without paths; the last chunk of those that were preempted gives a token, too."""
        self.now += 1.0
        decodes = [self.live[key] for key in (self.live if keys is None else keys)]
        samplers = [self.live[key] for key in resumed]
        plan = SimpleNamespace(decodes=decodes, chunks=samplers)
        self.drafts.planned(plan)
        tokens = [1000 + len(seq.tokens) for seq in decodes] + [5] * len(samplers)
        for seq, token in zip([*decodes, *samplers], tokens, strict=True):
            seq.tokens.append(token)
        for seq in decodes:
            self.steps[seq.key] += 1
        self.drafts.stepped(plan, samplers, SimpleNamespace(counts=None, tokens=tokens), None)

    def end(self, key):
        seq = self.live.pop(key)
        for steps in (self.steps.pop(key), 0):
            self.drafts.ended(seq, "length", 1)
            assert seq.drafts == (steps, 0, 0)
        self.ended.append(self.text(seq))

    def check(self):
        """Of those that live the drafter knows everything, as of a step that asks it."""
        self.is_on = True
        self.step(())
        assert self.listener.texts == {key: self.text(seq) for key, seq in self.live.items()}

    @staticmethod
    def text(seq):
        prompt = np.array(seq.tokens[: seq.prompt_len], "<i4").tobytes()
        return seq.salt, prompt, seq.tokens[seq.prompt_len :]


def test_nothing_is_told_while_it_is_off_and_everything_before_it_is_asked():
    world = World(outlasts=False)
    for key in range(8):
        world.begin(key, key, (1, 2, 3))
    for _ in range(50):
        world.step()
    world.end(3)
    assert world.listener.calls == 0
    world.check()
    assert world.listener.calls == 7
    world.is_on = False
    for _ in range(50):
        world.step()
    assert world.listener.calls == 7
    world.check()
    assert world.listener.calls == 8


def test_while_it_is_on_it_is_told_of_each_step():
    world = World(outlasts=False)
    world.is_on = True
    world.begin(1, 1, (1, 2))
    for number in range(1, 10):
        world.step()
        assert world.listener.calls == 1 + number
    assert world.listener.texts == {1: world.text(world.live[1])}


@pytest.mark.parametrize("outlasts", [False, True])
def test_what_ends_while_it_is_off_is_told_where_it_can_serve_others(outlasts):
    world = World(outlasts)
    for key, group in ((1, 1), (2, 1), (3, 3)):
        world.begin(key, group, (1, 2))
    world.step()
    world.end(1)
    world.end(3)
    assert world.listener.over == (world.ended if outlasts else [])
    world.check()
    # 2 lives on beside 1; nobody was left beside 3
    assert world.listener.over == (world.ended if outlasts else world.ended[:1])


def test_a_group_that_has_ended_costs_a_drafter_nothing_that_is_off():
    world = World(outlasts=False)
    for key in range(8):
        world.begin(key, 0, (1, 2))
    world.step()
    for key in range(8):
        world.end(key)
    world.check()
    assert world.listener.calls == 0
    assert not world.drafts._over


def test_what_it_knew_is_told_to_its_end():
    world = World(outlasts=True)
    world.begin(1, 1, (1, 2))
    world.check()
    world.is_on = False
    for _ in range(5):
        world.step()
    world.end(1)
    assert world.listener.over == world.ended


@pytest.mark.parametrize("outlasts", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_all_texts_arrive_whole(seed, outlasts):
    """Sequences of a few groups come, are preempted, resume and end, while the drafter is on or off."""
    random, world = Random(seed), World(outlasts)
    for turn in range(400):
        if len(world.live) < 12 and random.random() < 0.5:
            prompt = [(1,), (1, 2), (3,)][random.randrange(3)]
            world.begin(turn, turn // 10, prompt, random.choice(("", "s")))
        running = [key for key in world.live if random.random() < 0.9]
        resumed = [key for key in world.live if key not in running and random.random() < 0.2]
        world.is_on = random.random() < (0.9 if world.is_on else 0.1)
        world.step(tuple(running), resumed)
        if world.live and random.random() < 0.45:
            world.end(random.choice(list(world.live)))
        if random.random() < 0.1:
            world.check()
    for key in list(world.live):
        world.end(key)
    assert not world.listener.texts
    world.drafts.check(())
    if outlasts:
        assert world.listener.over == world.ended
    else:
        assert len(world.listener.over) < len(world.ended)
