"""The conformance suite for policies: what `fdasync/scheduler/state/policy.py` promises, as tests.

Adopt it with a class of a few lines in a test module of your own:

    class TestMyPolicy(PolicyTests):
        def make(self):
            return MyPolicy(MyConfig(...))

Candidates are drawn from a fixed seed, close ones first. No test starts an engine.
"""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING

import msgspec

from fdasync.scheduler.state.policy import Candidate

if TYPE_CHECKING:
    from fdasync.scheduler.state.policy import Policy

__all__ = ["PolicyTests"]

_CANDIDATES = 200


class PolicyTests:
    """Subclass it, name the subclass Test..., define `make`."""

    def make(self) -> Policy:
        """A new policy, with equal settings at every call."""
        raise NotImplementedError

    def candidates(self) -> list[Candidate]:
        """Candidates in the order of a queue. An adopter may add candidates that its policy treats specially."""
        random = Random("candidates")
        return [
            Candidate(
                priority=random.choice((0, 0, 0, 1, -1, -(2**31), 2**31 - 1)),
                arrival=number,
                # a request that waited elsewhere enters the queue behind requests that arrived later
                arrived_at=random.choice((random.uniform(100.0, 101.0), random.uniform(-1e3, 1e6), 100.0)),
                prompt_tokens=random.choice((1, 2, random.randint(1, 64), random.randint(1, 1 << 18))),
                group=number,
            )
            for number in range(_CANDIDATES)
        ]

    def test_a_key_never_changes(self) -> None:
        """A key depends neither on time, nor on the calls before, nor on the process."""
        policy, candidates = self.make(), self.candidates()
        first = [policy.key(candidate) for candidate in candidates]
        backwards = [policy.key(candidate) for candidate in reversed(candidates)]
        assert first == backwards[::-1], "a key depends on the calls before"
        assert first == [self.make().key(candidate) for candidate in candidates], "equal policies give other keys"

    def test_keys_are_numbers_and_equally_many(self) -> None:
        policy = self.make()
        keys = [policy.key(candidate) for candidate in self.candidates()]
        assert all(isinstance(key, tuple) for key in keys), "a key is a tuple"
        assert len({len(key) for key in keys}) == 1, "keys differ in length"
        odd = [key for key in keys if any(map(math.isnan, key))]
        assert not odd, f"{odd[0]} can be compared with nothing"

    def test_samples_of_a_group_stand_together(self) -> None:
        policy = self.make()
        for candidate in self.candidates():
            sibling = msgspec.structs.replace(candidate, arrival=candidate.arrival + 1)
            assert policy.key(candidate) == policy.key(sibling), "the key depends on the number of the sample"
            assert policy.order(candidate) < policy.order(sibling), "of equal keys the earlier arrival goes first"

    def test_newcomers_pass_for_a_bounded_time(self) -> None:
        """The policy's own bound on starvation holds, for requests that enter the queue later."""
        policy, candidates = self.make(), self.candidates()
        for number, candidate in enumerate(candidates):
            bound_s = policy.passed_for_s(candidate)
            assert 0 <= bound_s < math.inf, f"{bound_s} s is no bound"
            order = policy.order(candidate)
            after = math.nextafter(candidate.arrived_at + bound_s, math.inf)
            late = [
                msgspec.structs.replace(
                    other, priority=min(other.priority, candidate.priority), arrived_at=max(other.arrived_at, after)
                )
                for other in candidates[number + 1 :]
            ]
            passing = [other for other in late if policy.order(other) < order]
            assert not passing, f"{passing[0]} goes before {candidate}, more than {bound_s} s later"
