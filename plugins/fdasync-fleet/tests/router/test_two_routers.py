"""Two routers over the same two instances: of two changes that meet one is made at all instances, or both are, in one
order.

The meetings and what explains them are in `tests/support/weights_play/meetings.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fdasync_fleet.testing.sim.network import NetworkConditions

from fdasync import Router, RouterConfig
from tests.support.weights_play.meetings import UPDATE_S, all_of
from tests.support.weights_play.meetings_fleet import FleetStage
from tests.support.weights_play.play import write_folders

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.support.weights_play.meetings import Opens

_SLEEPS = ("sleep", "sleep 2", "wake")
_PAIRS = [
    pair for pair in itertools.product(("update", "label", *_SLEEPS), repeat=2) if not set(_SLEEPS).isdisjoint(pair)
]


class _EachHasOne:
    """A router for each caller, which is a task."""

    def __init__(self, routers: tuple[Router, Router]) -> None:
        self._left = list(routers)
        self._router_of: dict[object, Router] = {}

    def __getattr__(self, name: str) -> Any:
        task = asyncio.current_task()
        if task not in self._router_of:
            self._router_of[task] = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        return getattr(self._router_of[task], name)


class _TwoRouters(FleetStage):
    """See the module."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        # a call of one router is never one with a call of the other
        self.merges = False

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Any]:
        async with super().opened() as one:
            addresses = [instance.address for instance in self._instances]
            config = RouterConfig(request_deadline_s=3600.0, command_s=UPDATE_S)
            wires: list[Any] = [instance._wire for instance in self._instances]
            network = wires[0]._network
            async with Router(addresses, config, wire=network.wire("other"), seed=2) as two:
                # each is near to another instance: what both send comes in two orders
                for router, far in ((one, wires[1]), (two, wires[0])):
                    network.between(router._wire, far, NetworkConditions(delay_s=(0.02, 0.03)))
                yield _EachHasOne((one, two))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], FleetStage]:
    root = tmp_path_factory.mktemp("folders")
    write_folders(root)
    return lambda: _TwoRouters(root)


def check_pair(first: str, second: str, stage: Opens, **how: Any) -> None:
    for outcome in all_of(((first,), (second,)), stage, busy=False, **how):
        assert any(made.result in ("", "cancelled") for made in outcome.made)


@pytest.mark.parametrize(("first", "second"), _PAIRS)
def test_a_sleep_or_a_wake_and_another_routers_change_meet(first: str, second: str, stage: Opens) -> None:
    check_pair(first, second, stage, cancels=False, step=7)


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "second"), _PAIRS)
def test_they_meet_and_are_cancelled_at_many_turns(first: str, second: str, stage: Opens) -> None:
    check_pair(first, second, stage, cancels=False)
    check_pair(first, second, stage, cancels=True, step=5)
