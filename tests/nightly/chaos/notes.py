"""What the chaos play has played, what of it struck, and what went wrong; and what faults act on. Used by all that
makes faults."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fdasync.testing.harness.engines import until

if TYPE_CHECKING:
    from random import Random

    from fdasync_fleet.router.router import Router

    from tests.nightly.chaos.fleet import Fleet
    from tests.nightly.chaos.versions import Versions

# from the end of a fault of the whole fleet to the next right answer
RECOVER_S = 20.0


class Notes:
    """See the module.

    Args:
        wrong: broken rules, in words; the caller's list.
        served_at: times of right answers; the load's list.

    Attributes:
        played: faults, by kind.
        struck: those of the whole fleet that were seen to do what they were to do, by kind.
        took: seconds of what is worth a figure, by name.
        at: start and kind of each fault.
    """

    def __init__(self, wrong: list[str], served_at: list[float]) -> None:
        self.played: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.took: dict[str, list[float]] = {}
        self.at: list[tuple[float, str]] = []
        self.wrong = wrong
        self._served_at = served_at

    def begin(self, kind: str, where: str = "") -> None:
        self.at.append((asyncio.get_running_loop().time(), f"{kind} {where}".rstrip()))
        self.played[kind] += 1

    def add(self, name: str, seconds: float) -> None:
        self.took.setdefault(name, []).append(seconds)

    async def recovered(self, kind: str) -> None:
        """Wait for the next right answer; a complaint of its own if there is none in time."""
        since = asyncio.get_running_loop().time()
        try:
            await until(lambda: bool(self._served_at) and self._served_at[-1] > since, RECOVER_S, 0.05)
        except TimeoutError:
            self.wrong.append(f"{kind}: the fleet was mended, and no request was served within {RECOVER_S:g} s")
        else:
            self.add("mended_to_success_s", self._served_at[-1] - since)

    def must_have_struck(self, kinds: tuple[str, ...], often: int) -> None:
        """Complain about kinds that were played so often and never struck."""
        self.wrong += [
            f"{kind} was played {self.played[kind]} times, and never struck"
            for kind in kinds
            if self.played[kind] >= often and not self.struck[kind]
        ]


@dataclass(eq=False)
class Stage:
    """What faults act on.

    Attributes:
        fleet, router: that are up.
        rng: what is drawn.
        versions: is told of new weights.
        notes: are told of faults.
    """

    fleet: Fleet
    router: Router
    rng: Random
    versions: Versions
    notes: Notes
