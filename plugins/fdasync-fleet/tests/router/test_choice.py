"""The choice by columns and bitsets, against one that looks at every instance."""

from __future__ import annotations

from random import Random

import pytest
from fdasync_fleet.router.choice import choose
from fdasync_fleet.router.limits import Need
from instance_stage import KEYS, FakePeer, Stage, with_limits

from tests.support.router_scene import status_of

SIZE = 4


class Plain:
    """What each instance costs, and whom to take, one by one."""

    def __init__(self, stage, keys, num_tokens, without, need):
        self.stage, self.keys, self.num_tokens, self.without, self.need = stage, keys, num_tokens, without, need

    def had(self, one):
        return next((number for number, key in enumerate(self.keys) if key not in one.blocks), len(self.keys))

    def missing(self, one):
        return max(self.num_tokens - SIZE * self.had(one), 0)

    def prefill_cost(self, one):
        return (one.status.stats.scheduler.queued_tokens if one.status else 0) + 2 * self.missing(one)

    def mixed_cost(self, one):
        used = one.status.stats.scheduler.num_blocks - one.status.free_blocks if one.status else 0
        return self.prefill_cost(one) + used * SIZE / 16

    def decode_cost(self, one):
        used = one.status.stats.scheduler.num_blocks - one.status.free_blocks if one.status else 0
        told = one.status and one.status.stats.scheduler
        newer = max(one.live - (told.running + told.leased if told else 0), 0)
        return (used + newer * max(len(self.keys), 256 // SIZE) - self.had(one)) / one.facts.num_blocks

    def best(self, role, fits, cost):
        able = [one for one in self.stage.fleet.instances.values() if one.takes_work and one.hello.role == role]
        able = [one for one in able if one.may(fits)]
        able = [one for one in able if one.address not in self.without] or able
        return sorted(able, key=lambda one: (cost(one), one.live))

    def route(self):
        takers = self.best("decode", self.need.fits_decode, self.decode_cost)
        givers = self.best("prefill", self.need.fits_prefill, self.prefill_cost)
        mixed = self.best("mixed", self.need.fits_whole, self.mixed_cost)
        direct = takers and self.missing(takers[0]) < self.stage.direct
        if takers and givers and not direct:
            if mixed and self.prefill_cost(mixed[0]) < self.prefill_cost(givers[0]):
                return mixed[0].address, []
            return givers[0].address, [one.address for one in takers[:8]]
        able = [
            *mixed,
            *self.best("decode", self.need.fits_whole, self.decode_cost),
            *self.best("prefill", self.need.fits_whole, self.prefill_cost),
        ]
        return (able[0].address, []) if able else None


class Loaded(Plain):
    """With what was sent since the latest status."""

    def had(self, one):
        depths = self.stage.fleet.index.prefixes(self.keys, 1 << one.slot)
        return depths[0][0] if depths else 0

    def prefill_cost(self, one):
        return super().prefill_cost(one) + one.tokens

    def mixed_cost(self, one):
        return super().mixed_cost(one) + one._fresh * SIZE / 16

    def best(self, role, fits, cost):
        able = super().best(role, fits, cost)
        return sorted(able, key=lambda one: (cost(one), one.live, one.slot))


def random_stage(rng):
    roles = rng.choice(("m", "pd", "pdm", "d", "p"))
    # slots beyond one column of the first size
    names = [f"{rng.choice(roles)}{number}0" for number in range(rng.choice((3, 20, 90)))]
    stage = Stage(*names, direct=rng.choice((0, 16)))
    for name in names:
        if rng.random() < 0.2:
            with_limits(stage, name, blocks=rng.choice((10, 50)), context=rng.choice((40, 100)))
        total = stage[name].facts.num_blocks
        if rng.random() < 0.7:
            state = rng.choice(("running", "running", "paused", "draining"))
            # few values, so that some are alike
            queued, running = rng.choice((0, 8, 30)), rng.choice((0, 2))
            stage[name].status = status_of(state, 0, queued, running, total - rng.choice((0, 5)), total)
        stage[name].live = rng.choice((0, 0, 1, 3))
        for _ in range(rng.randrange(3)):
            stage.has(name, *range(rng.randrange(9)))
        stage[name].peer.is_up = rng.random() < 0.9
        stage[name].stands("behind" if rng.random() < 0.1 else "alike")
        stage[name].leaving = rng.random() < 0.1
    return stage, names


@pytest.mark.ci(after=12)
@pytest.mark.parametrize("seed", range(60))
def test_columns_choose_as_one_who_looks_at_every_instance(seed):
    rng = Random(seed)
    stage, names = random_stage(rng)
    for _ in range(10):
        keys = KEYS[: rng.randrange(9)]
        num_tokens = len(keys) * SIZE + rng.randrange(1, 20)
        without = rng.sample(names, rng.choice((0, 0, 1, 2)))
        need = rng.choice((Need(), Need(30, 11), Need(40, 50), Need(28, 4, 3)))
        route = stage.choose(num_tokens=num_tokens, without=without, keys=keys, need=need)
        plain = Plain(stage, keys, num_tokens, without, need)
        assert route == plain.route()
        if route is not None:
            first = stage[route[0]]
            chosen = choose(stage.fleet, keys, num_tokens, without, "", (), need=need, direct_below_tokens=stage.direct)
            assert chosen.missing == plain.missing(first)


@pytest.mark.ci(after=5)
@pytest.mark.parametrize("seed", range(20))
def test_what_a_choice_remembers_of_loads_is_never_above_them(seed):
    rng = Random(seed)
    names = [f"{rng.choice(('m', 'm', 'pdm'))[0]}{number}0" for number in range(rng.choice((12, 70)))]
    names = [rng.choice("mmp") + name[1:] for name in names]
    stage, sent = Stage(*names), []
    # all have something to do, so that what is remembered is above 0
    for name in names:
        stage.status(name, queued=rng.randrange(50, 90), free=100 - rng.randrange(10))
    for step in range(60):
        name = rng.choice(names)
        match rng.randrange(6):
            case 0:
                stage.status(name, queued=rng.choice((0, 10, 60)), free=100 - rng.randrange(10))
            case 1:
                stage[name].peer.is_up = not stage[name].peer.is_up
            case 2:
                stage.has(name, *range(rng.randrange(9)))
            case 3 if sent:
                one, beats, expected = sent.pop(rng.randrange(len(sent)))
                one.settled(20, 5, beats, expected)
            case 4 if step % 7 == 0:
                stage.fleet.remove(stage[name])
                names.remove(name)
                sent = [each for each in sent if each[0].address != name]
                names.append(f"m{100 + step}0")
                stage.fleet.add(FakePeer(names[-1], "mixed")).came_up()
            case _:
                sent.append((stage[name], stage[name].beats, stage[name].sent(20, KEYS[:5])))
        keys = KEYS[: rng.randrange(9)]
        num_tokens = len(keys) * SIZE + rng.randrange(1, 20)
        route = stage.choose(num_tokens=num_tokens, keys=keys)
        assert route == Loaded(stage, keys, num_tokens, (), Need()).route()


def test_a_load_that_no_other_can_be_below_ends_the_look(monkeypatch):
    stage = Stage(*[f"m{number}0" for number in range(40)])
    for name in [instance.address for instance in stage.fleet.instances.values()]:
        stage.status(name, queued=50)
    stage.has("m70", *range(8))
    looked = []
    loads = stage.fleet.loads
    real = loads.slots
    monkeypatch.setattr(loads, "slots", lambda bits: looked.append(bits) or real(bits))
    # what is remembered is 0, of the time before the statuses; the prompt's 32 tokens count twice
    assert stage.choose(num_tokens=34) == ("m70", [])
    assert stage.choose(num_tokens=34) == ("m70", [])
    assert len(looked) <= 1
    # another is below that now
    stage["m70"].sent(100, ())
    assert stage.choose(num_tokens=34) == ("m00", [])
    assert looked


def test_samples_of_one_prompt_that_come_together_go_to_one_instance():
    stage = Stage("m0", "m1", "m2")
    assert stage.choose() == ("m0", [])
    expected = stage["m0"].sent(32, KEYS)
    # it is worth the wait for the first of them
    assert stage.choose() == ("m0", [])
    stage["m0"].settled(32, len(KEYS), stage["m0"].beats, expected)
    stage.status("m0", queued=1)
    assert stage.choose() == ("m1", []), "nothing came of it"
    expected = stage["m0"].sent(32, KEYS)
    stage.has("m0", *range(8))
    stage["m0"].settled(32, len(KEYS), stage["m0"].beats, expected)
    assert stage.choose() == ("m0", []), "what was reported stays"


def test_a_prefix_draws_no_more_requests_than_it_is_worth():
    stage = Stage("m0", "m1")
    stage.has("m0", 0)
    # 8 tokens, against a sixteenth of those in use
    stage.status("m0", free=100 - 31)
    assert stage.choose() == ("m0", [])
    stage.status("m0", free=100 - 33)
    assert stage.choose() == ("m1", [])


def test_what_was_sent_counts_until_a_status_counts_it():
    stage = Stage("m0", "m1")
    expected = stage["m0"].sent(100, ())
    assert stage.choose(keys=()) == ("m1", [])
    beats = stage["m0"].beats - 0
    stage.status("m0", queued=0, running=1)
    assert stage["m0"].tokens == 0
    assert stage.choose(keys=(), num_tokens=8) == ("m1", []), "it is live there"
    # it was sent before that status: it is not taken off again
    stage["m0"].settled(100, 0, beats, expected)
    assert (stage["m0"].tokens, stage["m0"].live) == (0, 0)
    assert int(stage.fleet.loads.work.one[stage["m0"].slot]) == 0


def test_the_row_of_an_instance_that_was_removed_is_free_for_another():
    stage = Stage("m0", "m1", "m2")
    stage.has("m1", *range(8))
    expected = stage["m1"].sent(32, KEYS)
    gone = stage["m1"]
    slot = gone.slot
    stage.fleet.remove(gone)
    assert stage.fleet.find("m1") is None
    fresh = Stage("m3")["m3"].peer
    assert stage.fleet.add(fresh).slot == slot
    stage["m3"].came_up()
    assert stage["m3"].num_blocks == 0
    stage["m3"].sent(8, KEYS[:2])
    # what ends late on the one that is gone changes nothing of the other's
    gone.settled(32, len(KEYS), gone.beats, expected)
    gone.status = status_of("running", 0, 1000, 0, 0)
    assert (stage["m3"].live, stage["m3"].tokens) == (1, 8)
    assert int(stage.fleet.loads.work.one[slot]) == 8
    assert [depth for depth, bits in stage.fleet.index.prefixes(KEYS, 1 << slot)] == [2]
