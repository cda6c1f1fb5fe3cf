"""Policies that break a promise: the conformance suite finds each, `check_policy` those that a few candidates show."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from fdasync.errors import PluginError
from fdasync.scheduler import Candidate, Policy
from fdasync.scheduler.state.policy import OWN_POLICIES, Arrival, NoSettings, check_policy, own_policy
from fdasync.testing import PolicyTests

if TYPE_CHECKING:
    from fdasync.scheduler.state.policy import Order


class _Odd(Policy):
    """Breaks one promise each: see `test_the_suite_finds`."""

    def key(self, candidate: Candidate) -> Order:
        return (-candidate.priority,)

    def passed_for_s(self, candidate: Candidate) -> float:
        return 0.0


class _Lifo(_Odd):
    def key(self, candidate: Candidate) -> Order:
        return (-candidate.priority, -candidate.arrived_at)


class _ShortestWithoutAgeing(_Odd):
    def key(self, candidate: Candidate) -> Order:
        return (-candidate.priority, candidate.prompt_tokens)


class _Counting(_Odd):
    def __init__(self, config):
        super().__init__(config)
        self.asked = 0

    def key(self, candidate: Candidate) -> Order:
        self.asked += 1
        return (self.asked,)


class _Ragged(_Odd):
    def key(self, candidate: Candidate) -> Order:
        return (-candidate.priority, 0.0)[: 1 + candidate.prompt_tokens % 2]


class _NoNumber(_Odd):
    def key(self, candidate: Candidate) -> Order:
        return (float("nan") if candidate.prompt_tokens == 2 else 0.0,)


class _Scattered(_Odd):
    def key(self, candidate: Candidate) -> Order:
        return (-candidate.priority, candidate.arrival % 2)


class _NoBound(_Odd):
    def passed_for_s(self, candidate: Candidate) -> float:
        return float("inf")


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (_Lifo, "test_newcomers_pass_for_a_bounded_time"),
        (_ShortestWithoutAgeing, "test_newcomers_pass_for_a_bounded_time"),
        (_NoBound, "test_newcomers_pass_for_a_bounded_time"),
        (_Counting, "test_a_key_never_changes"),
        (_Ragged, "test_keys_are_numbers_and_equally_many"),
        (_NoNumber, "test_keys_are_numbers_and_equally_many"),
        (_Scattered, "test_samples_of_a_group_stand_together"),
    ],
)
def test_the_suite_finds(policy, test):
    suite = PolicyTests()
    suite.make = lambda: policy(NoSettings())  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        getattr(suite, test)()


class _Breaks(Arrival):
    def key(self, candidate):
        if candidate.prompt_tokens == 1:
            raise KeyError("boom")
        return {2: 5.0, 3: (float("nan"),), 4: ("a",)}[candidate.prompt_tokens]


@pytest.mark.parametrize(("length", "words"), [(1, "raised KeyError"), (2, "5.0"), (3, "nan"), (4, "'a'")])
def test_a_policy_that_gives_no_key_is_named(length, words):
    with pytest.raises(PluginError, match=f"_Breaks.*{words}"):
        _Breaks(NoSettings()).order(Candidate(priority=0, arrival=0, arrived_at=0.0, prompt_tokens=length, group=0))


class _Cancels(Arrival):
    """Lets out what a future that it looked at was cancelled with."""

    def key(self, candidate):
        raise asyncio.CancelledError

    passed_for_s = key


@pytest.mark.parametrize("call", [_Cancels.order, _Cancels.bound_s])
def test_a_cancellation_that_a_policy_lets_out_is_its_own_error(call):
    with pytest.raises(PluginError, match=r"_Cancels.* raised CancelledError"):
        call(_Cancels(NoSettings()), Candidate(priority=0, arrival=0, arrived_at=0.0, prompt_tokens=1, group=0))


class _BoundOf(_Odd):
    """`bound`: what `passed_for_s` returns, or raises."""

    def __init__(self, bound):
        super().__init__(NoSettings())
        self.bound = bound

    def passed_for_s(self, candidate):
        if isinstance(self.bound, Exception):
            raise self.bound
        return self.bound


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (_BoundOf(-1.0), "returned -1.0, which is no time"),
        (_BoundOf(float("inf")), "returned inf"),
        (_BoundOf(float("nan")), "returned nan"),
        (_BoundOf("1"), "returned '1'"),
        (_BoundOf(None), "returned None"),
        (_BoundOf(KeyError("boom")), "raised KeyError"),
        (_Lifo(NoSettings()), "goes before it"),
        (_ShortestWithoutAgeing(NoSettings()), "goes before it"),
        (_Ragged(NoSettings()), "different lengths"),
        (_NoNumber(NoSettings()), "no tuple of numbers"),
    ],
)
def test_a_broken_promise_that_a_few_candidates_show_is_a_plugin_error(policy, words):
    with pytest.raises(PluginError, match=words):
        check_policy(policy)


@pytest.mark.parametrize("name", OWN_POLICIES)
def test_the_packages_own_policies_pass_the_check(name):
    check_policy(own_policy(name, {}))
