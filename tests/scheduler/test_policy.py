"""Who goes first: the package's policies, and every line that is sorted by one (`scheduler/state/policy.py`)."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync import Engine, SamplingParams
from fdasync.engine.config import EngineConfig, make_policy, resolve
from fdasync.errors import ConfigError, InvariantBroken, PluginError
from fdasync.events.actions import AnswerLease, AskLease
from fdasync.events.trace import TraceHeader, TraceRing
from fdasync.registry.registry import POLICIES, Registry
from fdasync.scheduler import Candidate, make_scheduler
from fdasync.scheduler.replay import replay
from fdasync.scheduler.state.policy import (
    OWN_POLICIES,
    Arrival,
    NoSettings,
    ShortestPrompt,
    ShortestPromptConfig,
    own_policy,
)
from fdasync.testing import PolicyTests, synthetic_config
from tests.scheduler.table import Table
from tests.support.helpers import case_settings, make_capacity
from tests.support.pd_table import PdTable, of

SHORTEST: dict[str, Any] = {"policy": "shortest-prompt-first", "policy_config": {"ageing_s_per_token": 0.1}}
RATES = st.sampled_from([0.0, 1e-9, 1e-3, 0.1, 1e3])


def far(number, length):
    """A prompt that shares nothing with those of other numbers."""
    return range(1000 * number, 1000 * number + length)


def candidate(arrival=0, **values):
    return Candidate(
        **{"priority": 0, "arrived_at": 0.0, "prompt_tokens": 1, "group": arrival, **values}, arrival=arrival
    )


class TestArrival(PolicyTests):
    def make(self):
        return Arrival(NoSettings())


@pytest.mark.parametrize("rate", [0.0, 1e-9, 1e-3, 1e3])
class TestShortestPrompt(PolicyTests):
    @pytest.fixture(autouse=True)
    def _rate(self, rate):
        self.rate = rate

    def make(self):
        return ShortestPrompt(ShortestPromptConfig(self.rate))


def test_the_order_of_arrival_asks_for_priority_and_then_for_the_number_in_the_line():
    policy = own_policy("arrival", {})
    line = [candidate(0, prompt_tokens=9), candidate(1, arrived_at=-5.0), candidate(2, priority=1), candidate(3)]
    assert [each.arrival for each in sorted(line, key=policy.order)] == [2, 0, 1, 3]


def test_shorter_prompts_go_first_until_longer_ones_have_aged():
    policy = own_policy("shortest-prompt-first", {"ageing_s_per_token": 0.1})
    long = candidate(0, prompt_tokens=50)
    assert policy.passed_for_s(long) == 5.0
    assert policy.order(candidate(1, arrived_at=3.9, prompt_tokens=10)) < policy.order(long)
    assert policy.order(candidate(1, arrived_at=4.1, prompt_tokens=10)) > policy.order(long)
    assert policy.order(candidate(1, arrived_at=99.0, prompt_tokens=50, priority=1)) < policy.order(long)


# -- a bound on starvation, in every line

ARRIVALS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.01, 0.4]), st.integers(1, 30), st.integers(0, 1), st.sampled_from([0.0, 0.7])),
    min_size=2,
    max_size=12,
)
POLICY_OF_LINES = st.sampled_from([{}, SHORTEST, {**SHORTEST, "policy_config": {"ageing_s_per_token": 0.01}}])


def passed_too_late(policy, line, order):
    """Pairs in which a request of no higher priority went first although it came later than the bound allows."""
    place = {number: at for at, number in enumerate(order)}
    return [
        (first.arrival, later.arrival)
        for first in line
        for later in line
        if later.arrival > first.arrival
        and later.priority <= first.priority
        and later.arrived_at > first.arrived_at + policy.passed_for_s(first)
        and place[later.arrival] < place[first.arrival]
    ]


@pytest.mark.ci
@case_settings(60)
@given(arrivals=ARRIVALS, config=POLICY_OF_LINES)
def test_no_newcomer_passes_a_waiting_request_for_longer_than_its_bound(arrivals, config):
    """One lane, and newcomers while it is taken: they start in the policy's order, and none later than its bound."""
    table = Table(num_blocks=256, max_running=1, **config)
    policy = own_policy(table.config.policy, table.config.policy_config)
    table.turn(table.request(0, far(0, 3), 30))
    line = []
    for number, (pause, length, priority, waited) in enumerate(arrivals, 1):
        table.now += pause
        came = candidate(number, arrived_at=table.now - waited, prompt_tokens=length, priority=priority)
        line.append(came)
        table.turn(table.request(number, far(number, length), 1, arrived_at=came.arrived_at, priority=priority))
    order = []
    while table.flying:
        table.now += 0.1
        order += table.turn(table.done()).starts
    assert order == [each.arrival for each in sorted(line, key=policy.order)]
    assert not passed_too_late(policy, line, order)
    assert table.is_empty()


@pytest.mark.parametrize("config", [{}, SHORTEST], ids=["arrival", "shortest"])
def test_a_stream_of_newcomers_that_never_ends_lets_a_long_prompt_through(config):
    """Shortage, so that sequences are preempted all the time; a newcomer with a short prompt comes in every turn."""
    table = Table(num_blocks=14, max_running=4, max_step_tokens=16, decode_reserve_blocks=0, **config)
    policy = own_policy(table.config.policy, table.config.policy_config)
    long = candidate(0, arrived_at=table.now, prompt_tokens=30)
    table.turn(table.request(0, far(0, 30), 20))
    tick_s, key = 0.1, 0
    until = table.now + policy.passed_for_s(long) + 120 * tick_s
    while 0 not in table.finished:
        assert table.now < until, "newcomers kept it out for longer than its bound and its own work"
        table.now += tick_s
        key += 1
        newcomer = table.request(key, far(key, 3), 14)
        table.turn(newcomer, *([table.done()] if table.flying else []))
    assert table.finished[0].reason == "length"
    # there were newcomers all the time, and too little room
    assert key > 20
    assert table.stats.preemptions >= 3


def test_the_first_in_order_is_never_preempted():
    table = Table(num_blocks=8, max_running=4, decode_reserve_blocks=0, **SHORTEST)
    table.turn(table.request(0, far(0, 10), 16), table.request(1, far(1, 3), 16))
    left = []
    while 1 not in table.finished:
        turned = table.turn(table.done())
        left += [key for step in turned.steps for key in step.leaves]
    # the later one has the shorter prompt, and the blocks were not enough for both
    assert left[:1] == [0]
    assert table.stats.preemptions == 1
    table.run()
    assert table.finished[0].reason == "length"
    assert table.is_empty()


# -- the lines of both sides of a hand-over


def granted(turned):
    return [answer.group for answer in of(turned, AnswerLease) if answer.verdict == "granted"]


@pytest.mark.parametrize(("config", "order"), [({}, [10, 20, 30]), (SHORTEST, [20, 30, 10])])
def test_leases_are_granted_in_the_policys_order(config, order):
    table = PdTable({"age_s": 100.0}, num_blocks=12, **config)
    assert granted(table.turn(table.lease(1, far(1, 40)))) == [1]
    table.turn(table.lease(10, far(10, 40)), table.lease(20, far(20, 36)), table.lease(30, far(30, 38)))
    got, held = [], 1
    for _ in order:
        (held,) = granted(table.turn(table.gives_up(held)))
        got.append(held)
    assert got == order


def test_what_a_request_waited_elsewhere_counts_on_the_decode_side():
    table = PdTable({"age_s": 100.0}, num_blocks=12, **SHORTEST)
    table.turn(table.lease(1, far(1, 40)))
    asked = table.lease(10, far(10, 40))
    # it asked 0.5 s ago at another instance; the other prompt is 4 tokens shorter, which is worth 0.4 s
    old = tuple(msgspec.structs.replace(request, arrived_at=table.now - 0.5) for request in asked.requests)
    table.turn(table.lease(20, far(20, 36)), msgspec.structs.replace(asked, requests=old))
    assert granted(table.turn(table.gives_up(1))) == [10]


@pytest.mark.parametrize(("config", "order"), [({}, [1, 2, 3, 4]), (SHORTEST, [1, 3, 4, 2])])
def test_a_prefill_side_asks_in_the_policys_order(config, order):
    table = PdTable({"asks_per_peer": 1, "ahead_tokens": 10_000}, **config)
    lengths = {1: 10, 2: 30, 3: 5, 4: 7}
    turned = [table.turn(*table.hand_off(key, far(key, length))) for key, length in lengths.items()]
    asked = [ask.group for each in turned for ask in of(each, AskLease)]
    while len(asked) < 4:
        asked += [ask.group for ask in of(table.turn(table.granted(asked[-1])), AskLease)]
    assert asked == order


# -- its name: configuration, plugins, traces


def test_the_packages_own_are_installed_under_their_names():
    installed = {info.name: info.target for info in Registry().list() if info.group == POLICIES}
    own = {name: f"{policy.__module__}:{policy.__qualname__}" for name, policy in OWN_POLICIES.items()}
    assert own.items() <= installed.items()


def test_a_policy_that_is_not_there_is_told_with_those_that_are():
    told = r"'no-such-policy' of fdasync\.policies: not installed.*\barrival\b.*\bshortest-prompt\b"
    with pytest.raises(PluginError, match=told):
        make_policy("no-such-policy", {})
    with pytest.raises(PluginError, match="not installed"):
        Engine(synthetic_config(policy="no-such-policy"))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"policy": "arrival", "policy_config": {"x": 1}}, "policy_config.x"),
        ({**SHORTEST, "policy_config": {"ageing_s_per_token": -1}}, "policy_config.ageing_s_per_token"),
        ({**SHORTEST, "policy_config": {"ageing_s_per_token": float("nan")}}, "policy_config.ageing_s_per_token"),
        ({"policy_config": {"x": object()}}, "config.policy_config"),
    ],
)
def test_settings_that_a_policy_does_not_have_are_refused(config, field):
    with pytest.raises(ConfigError) as caught:
        Engine(synthetic_config(**config))
    assert caught.value.field == field


_PLUGIN = """
from fdasync.scheduler import Policy


class Last(Policy):
    def key(self, candidate):
        return (-candidate.priority, candidate.arrived_at - min(candidate.prompt_tokens, 100))

    def passed_for_s(self, candidate):
        return 100.0


class Unbounded(Last):
    def passed_for_s(self, candidate):
        return 0.0


def odd(config):
    return config
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A distribution that has the policies `last`, which takes the longest prompt first, `unbounded`, which says that
    no later request passes another one, and `odd`, which is none. None has settings."""
    info = tmp_path / "fdasync_plug-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fdasync-plug\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        f"[{POLICIES}]\nlast = policyplug:Last\nodd = policyplug:odd\nunbounded = policyplug:Unbounded\n"
    )
    (tmp_path / "policyplug.py").write_text(_PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("policyplug", None)


@pytest.mark.usefixtures("plugin")
def test_a_plugins_policy_is_found_by_its_name():
    assert type(make_policy("last", {})).__name__ == "Last"
    with pytest.raises(PluginError, match=r"'odd' of fdasync\.policies.*is not a Policy class"):
        make_policy("odd", {})


@pytest.mark.usefixtures("plugin")
def test_a_policy_without_settings_needs_no_config_type_and_takes_no_keys():
    assert make_policy("last", {}).config == NoSettings()
    with pytest.raises(ConfigError) as caught:
        make_policy("last", {"seconds": 1.0})
    assert caught.value.field == "policy_config.seconds"


@pytest.mark.usefixtures("plugin")
def test_a_policy_whose_bound_does_not_hold_is_refused_before_an_engine_starts():
    with pytest.raises(PluginError, match=r"Unbounded.*passed_for_s\(\) is 0.0 s .* goes before it"):
        Engine(synthetic_config(policy="unbounded"))


def recorded(made=None, **config):
    """The trace of one lane that is taken in turn by prompts of different lengths; and who started when."""
    table = Table(max_running=1)
    config = msgspec.structs.replace(table.config, **config)
    table.scheduler = make_scheduler(config, made)
    ring = TraceRing(config, 1000)
    events = [table.request(key, far(key, length), 1) for key, length in enumerate((9, 3, 6))]
    order = []
    while events:
        turned = table.turn(*events)
        ring.add(list(events), turned.actions)
        order += turned.starts
        events = [table.done()] if table.flying else []
    return ring.encode(), order


@pytest.mark.parametrize(("config", "order"), [({}, [0, 1, 2]), (SHORTEST, [1, 2, 0])])
def test_a_trace_names_its_policy_and_replays_under_it(config, order):
    trace, started = recorded(**config)
    header = msgspec.json.decode(trace.splitlines()[0], type=TraceHeader)
    assert header.scheduler["policy"] == config.get("policy", "arrival")
    assert header.scheduler["policy_config"] == config.get("policy_config", {})
    assert started == order
    assert replay(trace) == len(trace.splitlines()) - 1
    other = "arrival" if config else "shortest-prompt-first"
    with pytest.raises(InvariantBroken, match="replays to other actions"):
        replay(trace, lambda _name, _config: own_policy(other, {}))


@pytest.mark.usefixtures("plugin")
def test_a_trace_under_a_plugins_policy_replays_with_that_plugin():
    trace, started = recorded(make_policy("last", {}), policy="last")
    assert started == [0, 2, 1]
    with pytest.raises(ValueError, match="'last' is no policy of fdasync's own: arrival, shortest-prompt-first"):
        replay(trace)
    assert replay(trace, make_policy) == len(trace.splitlines()) - 1


def test_the_engines_scheduler_has_the_policy_of_its_configuration():
    config = resolve(EngineConfig(**SHORTEST), make_capacity())
    assert (config.policy, config.policy_config) == (SHORTEST["policy"], SHORTEST["policy_config"])


async def test_an_engine_serves_short_prompts_first_at_its_frontend_and_in_its_queue():
    config = synthetic_config(max_running=1, max_requests=2, max_step_tokens=64, trace_turns=1 << 20, **SHORTEST)
    prompts = {"a": 8, "b": 30, "c": 20, "d": 10}
    ended: list[str] = []
    async with Engine(config) as engine:

        async def ask(name):
            prompt = [ord(name) - 90, *range(prompts[name] - 1)]
            await engine.complete(prompt, SamplingParams(max_tokens=6, ignore_eos=True), request_id=name)
            ended.append(name)

        await asyncio.gather(*map(ask, prompts))
        # b came in with a, and was passed neither by c, which waited at the frontend, nor by d
        assert ended == ["a", "b", "d", "c"]
        assert replay(engine.trace().encode()) > 0
