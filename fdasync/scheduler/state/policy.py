"""Policies: which request goes first. A policy is one pure object that gives every request its place in every line.

The frontend's line, the waiting queue, the lines of the prefill and of the decode side and the order of preemption are
sorted by the same kind of key. A key never changes with time, so no line is ever sorted again: a policy that lets a
request age says so by a key that counts from the request's arrival. A policy knows no queue, no block and no clock.

Called by `engine/frontend.py` and `core.py`; `engine/config.py` makes the policy that a configuration names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf, isnan, nextafter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from fdasync.errors import PLUGIN_ERRORS, PluginError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: a place in a line; the smallest goes first
Order = tuple[float, ...]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy knows of a request.

    Attributes:
        priority: the caller's; requests of higher priority want to go first.
        arrival: number in the line; of two candidates the later one has the higher number.
        arrived_at: engine time at which its caller asked. Time that the request waited at the frontend, at a router or
            at another instance has been taken off, so seniority travels with the request.
        prompt_tokens: length of its prompt. At the frontend, where a text is not tokenised yet, an estimate.
        group: number of the first sample of the same request in this engine.
    """

    priority: int
    arrival: int
    arrived_at: float
    prompt_tokens: int
    group: int


class NoSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a policy that has none."""


class Policy(ABC):
    """Says which request goes first.

    A policy is pure: equal candidates have equal keys, at any time and in any process, and nothing is written or drawn.
    All keys of a policy have the same length, and hold numbers that are not NaN. The samples of a group have the same
    key if they arrived at the same time. `config_type` is a frozen msgspec Struct that holds the policy's settings; a
    policy without settings leaves it out.

    The first of all live requests is admitted first and never preempted, so it gets through under any policy.
    `passed_for_s` promises that every request becomes the first of the requests of its priority or lower.
    `fdasync.testing.PolicyTests` holds a policy to all of this; `check_policy` looks at a few candidates.
    """

    config_type: ClassVar[type[msgspec.Struct]] = NoSettings

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def key(self, candidate: Candidate) -> Order:
        """The request with the smallest key goes first; of equal keys, the one with the smallest arrival number."""

    @abstractmethod
    def passed_for_s(self, candidate: Candidate) -> float:
        """A bound on starvation, in seconds and finite: of the requests that come to the line after this candidate,
        one goes before it only if its priority is higher or its caller asked at most so many seconds later."""

    def order(self, candidate: Candidate) -> Order:
        """The place in every line: of any two candidates of one line, one goes first. Raises PluginError where `key`
        raises or returns no tuple of numbers."""
        try:
            key: object = self.key(candidate)
        except PLUGIN_ERRORS as error:
            raise self._broken(f"key() raised {type(error).__name__}: {error}") from error
        if type(key) is not tuple or not all(isinstance(number, int | float) and not isnan(number) for number in key):
            raise self._broken(f"key() returned {key!r:.200}, which is no tuple of numbers")
        return (*key, candidate.arrival)

    def bound_s(self, candidate: Candidate) -> float:
        """`passed_for_s`, checked. Raises PluginError where it raises or returns no finite number from 0 on."""
        try:
            bound_s: object = self.passed_for_s(candidate)
        except PLUGIN_ERRORS as error:
            raise self._broken(f"passed_for_s() raised {type(error).__name__}: {error}") from error
        if not isinstance(bound_s, int | float) or not 0 <= bound_s < inf:
            raise self._broken(f"passed_for_s() returned {bound_s!r:.200}, which is no time in seconds")
        return bound_s

    def _broken(self, problem: str) -> PluginError:
        return PluginError("fdasync.policies", type(self).__name__, "", problem)


# far apart and close together; numbers and times rise
_SEEN = tuple(
    Candidate(priority=0, arrival=number, arrived_at=100.0 + number * 0.25, prompt_tokens=length, group=number)
    for number, length in enumerate((64, 1, 1 << 17, 2))
)


def check_policy(policy: Policy) -> None:
    """Look at what a policy says of a few candidates, before an engine trusts it. It is no proof: `PolicyTests` is.

    Raises PluginError where a key is no tuple of numbers, keys differ in length, or `passed_for_s` is no bound.
    """
    orders = [policy.order(candidate) for candidate in _SEEN]
    if len({len(order) for order in orders}) > 1:
        raise policy._broken("key() returned keys of different lengths")
    for candidate, order in zip(_SEEN, orders, strict=True):
        bound_s = policy.bound_s(candidate)
        late_at = nextafter(candidate.arrived_at + bound_s, inf)
        for other in _SEEN[candidate.arrival + 1 :]:
            late = msgspec.structs.replace(other, arrived_at=max(late_at, other.arrived_at))
            if policy.order(late) < order:
                raise policy._broken(f"passed_for_s() is {bound_s} s for {candidate}, and later {late} goes before it")


class Arrival(Policy):
    """Higher priority first, then in order of arrival in the line."""

    def key(self, candidate: Candidate) -> Order:
        return (-candidate.priority,)

    def passed_for_s(self, candidate: Candidate) -> float:
        return 0.0


class ShortestPromptConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `ShortestPrompt`.

    Attributes:
        ageing_s_per_token: a request goes before one whose prompt is shorter by n tokens if it arrived n times so many
            seconds earlier. 0: the order of arrival.
    """

    ageing_s_per_token: Annotated[float, msgspec.Meta(ge=0, le=1e3)] = 1e-3


class ShortestPrompt(Policy):
    """Higher priority first, then shorter prompts, with ageing: a request counts as due when it has waited a time that
    is proportional to its prompt, and the request that is due first goes first."""

    config_type = ShortestPromptConfig

    def key(self, candidate: Candidate) -> Order:
        return (-candidate.priority, candidate.arrived_at + self.passed_for_s(candidate))

    def passed_for_s(self, candidate: Candidate) -> float:
        rate: float = self.config.ageing_s_per_token
        return rate * candidate.prompt_tokens


#: the package's own policies, by the names of their entry points
OWN_POLICIES: Mapping[str, type[Policy]] = {"arrival": Arrival, "shortest-prompt-first": ShortestPrompt}


def own_policy(name: str, config: Mapping[str, Any]) -> Policy:
    """A policy of the package's own. Raises ValueError for another name and for settings that it does not have."""
    policy = OWN_POLICIES.get(name)
    if policy is None:
        raise ValueError(f"{name!r} is no policy of fdasync's own: {', '.join(OWN_POLICIES)}")
    return policy(msgspec.convert(dict(config), policy.config_type))
