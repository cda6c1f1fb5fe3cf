"""A store that fails on purpose, from a seed, in all ways in which stores fail.

Knows the contract of stores only. Used by tests and simulations of the wrappers around stores and of engines.
"""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec
import xxhash

from fdasync.cache.store.base import DONE, Item, Outcome, finish
from fdasync.errors import BadInput, StoreUnavailable
from fdasync.ipc.shared_memory import page_aligned
from fdasync.testing.stores.latency import Naps
from fdasync.testing.stores.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.store.base import Store
    from fdasync.events.catalog import StoreVerb
    from fdasync.ipc.shared_memory import Part, SharedRegion


class StoreFaults(msgspec.Struct, frozen=True, kw_only=True):
    """How often each fault strikes: rates from 0 (never) to 1 (always).

    Raises BadInput for a rate outside of that, and for a delay that takes no time.

    Attributes:
        seed: of all decisions.
        by: "random": decisions are drawn one after the other. "key": a decision is a function of seed, fault and key
            (of a call: its first key), so a key has the same faults whatever the order of calls.
        fail_call: the call raises StoreUnavailable; nothing was done.
        lose_answer: the call is done, then raises StoreUnavailable.
        fail_item: the item is "failed" for now; nothing was done for it.
        drop_put: the item is "done" and was never kept.
        delay: the call waits up to `delay_s` first.
        delay_s: in seconds.
        hang: the call does not end, cancelled or not, before the store is killed or closed.
        truncate: the item of a get is "done", and zeros from some byte on.
        flip_bit: the item of a get is "done", with one bit wrong. Neither this nor `truncate` spoils padding.
    """

    seed: int = 0
    by: Literal["random", "key"] = "random"
    fail_call: float = 0.0
    lose_answer: float = 0.0
    fail_item: float = 0.0
    drop_put: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.0
    hang: float = 0.0
    truncate: float = 0.0
    flip_bit: float = 0.0

    def __post_init__(self) -> None:
        for kind in KINDS:
            if not 0.0 <= getattr(self, kind) <= 1.0:
                raise BadInput(f"StoreFaults.{kind}", f"{getattr(self, kind)!r} is no rate: 0 never, 1 always")
        if not 0.0 <= self.delay_s < math.inf:
            raise BadInput("StoreFaults.delay_s", f"{self.delay_s!r} is no number of seconds")
        if self.delay > 0 and not self.delay_s:
            raise BadInput("StoreFaults.delay", "a delay of 0 s delays nothing", hint="set delay_s")


StoreFaultKind = Literal["fail_call", "lose_answer", "fail_item", "drop_put", "delay", "hang", "truncate", "flip_bit"]
KINDS: tuple[StoreFaultKind, ...] = get_args(StoreFaultKind)


class FaultyStore(Wrapper):
    """A store that fails by a plan.

    Attributes:
        plan: in force; may be replaced at any time, and is drawn from its own seed.
        counts: faults so far, by kind.
        calls: calls so far, by verb.
        hanging: calls that hang now.
    """

    def __init__(self, inner: Store, plan: StoreFaults) -> None:
        super().__init__(inner)
        self.counts: dict[StoreFaultKind, int] = {}
        self.calls: Counter[StoreVerb] = Counter()
        self.hanging = 0
        self._naps = Naps()
        self._regions: Sequence[SharedRegion] = ()
        self._planned: dict[StoreFaultKind, None] = {}
        self.plan = plan

    @property
    def plan(self) -> StoreFaults:
        return self._plan

    @plan.setter
    def plan(self, plan: StoreFaults) -> None:
        self._plan = plan
        self._random = Random(plan.seed)
        self._planned |= dict.fromkeys([kind for kind in KINDS if getattr(plan, kind) > 0])

    def assert_struck(self, *kinds: StoreFaultKind) -> None:
        """Raise AssertionError unless each of these faults has struck; without names, each fault that was planned so
        far, at least one. A test that injects a fault ends with this call: without it the test may pass because
        nothing happened. Raises BadInput for an unknown name."""
        for kind in kinds:
            if kind not in KINDS:
                raise BadInput("kinds", f"there is no fault {kind!r}", hint=f"faults: {', '.join(KINDS)}")
        wanted = kinds or tuple(self._planned)
        called = ", ".join(f"{verb} {count}" for verb, count in self.calls.items()) or "none"
        if not wanted:
            raise AssertionError(f"no fault of store {self.name} was planned (calls: {called})")
        missing = [kind for kind in wanted if not self.counts.get(kind)]
        if missing:
            struck = ", ".join(f"{kind} {count}" for kind, count in self.counts.items()) or "none"
            raise AssertionError(
                f"faults of store {self.name} never struck: {', '.join(missing)} (struck: {struck}; calls: {called})"
            )

    async def open(self, regions: Sequence[SharedRegion]) -> None:
        self._regions = tuple(regions)
        await super().open(regions)

    async def around(self, verb: StoreVerb, argument: Sequence[Any]) -> Any:
        era = self.era
        self.calls[verb] += 1
        items: Sequence[Item] = argument if verb in ("get_into", "put") else ()
        first = items[0].key if items else str(argument[0]) if argument else ""
        if self._strikes("delay", first):
            await self._naps.nap(self.plan.delay_s * self._draw("how long", first))
            # a call that was killed meanwhile does not hang
            self.check_era(era)
        if self._strikes("hang", first):
            await self._hang()
        if self._strikes("fail_call", first):
            raise StoreUnavailable(self.name, "a fault: the call failed")
        answer = await (self._items(verb, items, era) if items else self.ask(verb, argument, era))
        if self._strikes("lose_answer", first):
            raise StoreUnavailable(self.name, "a fault: the answer was lost")
        return answer

    def end(self) -> None:
        super().end()
        self._naps.end()

    async def _hang(self) -> None:
        self.hanging += 1
        try:
            # a cancellation is raised when the hanging call ends, as the contract says
            await finish(self._naps.begin())
        finally:
            self.hanging -= 1

    async def _items(self, verb: StoreVerb, items: Sequence[Item], era: int) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        for place, item in enumerate(items):
            if self._strikes("fail_item", item.key):
                outcomes[place] = Outcome("failed", "a fault: the item failed", transient=True)
            elif verb == "put" and self._strikes("drop_put", item.key):
                outcomes[place] = DONE
        left = [place for place in range(len(items)) if place not in outcomes]
        answer = await self.ask(verb, [items[place] for place in left], era)
        outcomes.update(zip(left, answer, strict=True))
        if verb == "get_into":
            for place in left:
                if outcomes[place].status == "done":
                    self._spoil(items[place])
        return [outcomes[place] for place in range(len(items))]

    def _spoil(self, item: Item) -> None:
        parts = _unpadded(item.parts)
        views = [self._regions[part.region].view(part.offset, part.nbytes) for part in parts]
        nbytes = sum(part.nbytes for part in parts)
        if self._draws("truncate", item.key):
            cut = int(self._draw("where", item.key) * nbytes)
            changed = False
            for view in views:
                lost = view[min(max(cut, 0), len(view)) :]
                changed |= any(lost)
                lost[:] = bytes(len(lost))
                cut -= len(view)
            # zeros over zeros are no fault
            if changed:
                self._count("truncate")
        if self._strikes("flip_bit", item.key):
            place = int(self._draw("which", item.key) * nbytes * 8)
            for view in views:
                if 0 <= place < len(view) * 8:
                    view[place // 8] ^= 1 << place % 8
                place -= len(view) * 8

    def _strikes(self, fault: StoreFaultKind, key: str) -> bool:
        struck = self._draws(fault, key)
        if struck:
            self._count(fault)
        return struck

    def _draws(self, fault: StoreFaultKind, key: str) -> bool:
        rate: float = getattr(self.plan, fault)
        # a fault of rate 0 draws nothing, so that it does not change the other faults of a plan
        return rate > 0 and self._draw(fault, key) < rate

    def _count(self, fault: StoreFaultKind) -> None:
        self.counts[fault] = self.counts.get(fault, 0) + 1

    def _draw(self, what: str, key: str) -> float:
        """A number from 0 to below 1."""
        if self.plan.by == "random":
            return self._random.random()
        return (xxhash.xxh3_64_intdigest(f"{self.plan.seed} {what} {key}".encode()) >> 11) / (1 << 53)


def _unpadded(parts: Sequence[Part]) -> list[Part]:
    """The parts without padding, which fills up the part before it to a page."""
    unpadded: list[Part] = []
    rest = 0
    for part in parts:
        if rest and part.nbytes == rest:
            rest = 0
            continue
        unpadded.append(part)
        rest = page_aligned(part.nbytes) - part.nbytes
    return unpadded
