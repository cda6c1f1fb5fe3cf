"""A Hypothesis machine that compares any store with `MemoryStore`, which is assumed to be perfect.

The machine is plain code, as Hypothesis wants it, and drives both stores on a loop of its own. After a rule with
several right outcomes (a cancelled put, two writers at once) it looks at the store, checks that the outcome is a right
one, and makes the model agree. Used by `stores/suite.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.testing.harness.bounded import end_loop, turns
from fdasync.testing.harness.guarded_memory import value
from fdasync.testing.harness.verdicts import check, equal, in_words
from fdasync.testing.stores.harness import StoreBench, StoreHooks

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from fdasync.cache.store.base import Item, Outcome

T = TypeVar("T")

_SLOW_REOPENS = 3

NAMES = st.sampled_from(["a", "b", "a/b", "a-b", "c.d", "0"])
SIZES = st.sampled_from([1, 2, 100, 4096, 4097, 30_001])

TAGS = st.integers(0, 3)
THINGS = st.lists(st.tuples(NAMES, SIZES, TAGS, st.integers(1, 4)), max_size=5)


class StoreMachine(RuleBasedStateMachine):
    """See the module."""

    # the adopter's suite
    hooks: StoreHooks
    # the store under test
    opened: _Opened

    def __init__(self) -> None:
        super().__init__()
        self.bench = self.opened.take()
        self.model = MemoryStore(MemoryConfig(max_nbytes=1 << 30))
        self.run(self.model.open(self.bench.regions))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        # bounded: every wait goes through the bench, which has a limit for each verb
        return self.opened.loop.run_until_complete(work)

    # -- one verb at a time ---------------------------------------------------------------------------

    @rule(things=THINGS)
    def put(self, things: list[tuple[str, int, int, int]]) -> None:
        names = [name for name, *_ in things]
        things = [thing for place, thing in enumerate(things) if thing[0] not in names[:place]]
        items = [self._filled(*thing) for thing in things]
        wanted = self.run(self.model.put(items))
        outcomes = self.run(self.bench.put(items))
        for item, want, outcome in zip(items, wanted, outcomes, strict=True):
            if outcome.status == "full":
                self.run(self._look(item.key))
            elif outcome.status == "done" and self.hooks.may_forget:
                self.run(self.model.delete([item.key]))
                self.run(self.model.put([item]))
            else:
                equal(outcome.status, want.status, f"put of {item.key}")
        self.bench.free()

    @rule(things=THINGS)
    def get(self, things: list[tuple[str, int, int, int]]) -> None:
        items = [self._blank(*thing) for thing in things]
        wanted = self.run(self.model.get_into(items))
        data = [self.bench.read(item) for item in items]
        self.bench.scribble(items)
        before = self.bench.snapshot()
        outcomes = self.run(self.bench.get(items))
        self.bench.assert_only(before, items)
        for item, want, outcome, each in zip(items, wanted, outcomes, data, strict=True):
            self._agree(item, want, outcome, each)
        self.bench.free()

    def _agree(self, item: Item, want: Outcome, outcome: Outcome, data: bytes) -> None:
        if outcome.status == "miss" and self.hooks.may_forget:
            self.run(self.model.delete([item.key]))
            return
        equal(outcome.status, want.status, f"get of {item.key}")
        if outcome.status == "done":
            equal(self.bench.read(item), data, f"get of {item.key}")

    @rule(names=st.lists(NAMES, max_size=8))
    def exists(self, names: list[str]) -> None:
        keys = [self.bench.key(name) for name in names]
        want = self.run(self.model.exists_prefix(keys))
        found = self.run(self.bench.exists(keys))
        right = found == want or (self.hooks.may_forget and found < want)
        check(right, f"exists_prefix of {names}, of which {want} are there", found)

    @rule(names=st.lists(NAMES, max_size=4))
    def delete(self, names: list[str]) -> None:
        keys = [self.bench.key(name) for name in names]
        want = self.run(self.model.delete(keys))
        found = self.run(self.bench.delete(keys))
        right = found == want or (self.hooks.may_forget and found < want)
        check(right, f"delete of {names}, of which {want} are there", found)

    # -- several at once, and none to its end ---------------------------------------------------------

    @rule(name=NAMES, size=SIZES, writers=st.integers(2, 4), turns_=st.integers(0, 3))
    def race(self, name: str, size: int, writers: int, turns_: int) -> None:
        key = self.bench.key(name)
        old = self.run(self._model_value(key, size))
        items = [self._filled(name, size, tag, 2) for tag in range(writers)]
        reader = self._blank(name, size, 0, 2)

        async def play() -> tuple[list[Outcome], Outcome]:
            puts = [asyncio.ensure_future(self.bench.put([item])) for item in items]
            await turns(turns_)
            (read,) = await self.bench.get([reader])
            return [outcome for (outcome,) in await asyncio.gather(*puts)], read

        outcomes, read = self.run(play())
        right = [self.bench.read(item) for item in items]
        if old is None:
            check(self.hooks.may_forget or any(one.ok for one in outcomes), f"puts of {key} at a time", outcomes)
        else:
            there = all(one.status == "exists" for one in outcomes)
            check(self.hooks.may_forget or there, f"puts at a time of {key}, which is there", outcomes)
            right = [*right, old] if self.hooks.may_forget else [old]
        if read.status == "done":
            found = self.bench.read(reader)
            check(found in right, f"get of {key} while {in_words(right)} are put", found)
        self.run(self._look(key, size, right))
        self.bench.free()

    @rule(things=THINGS, turns_=st.integers(0, 4))
    def cancelled_put(self, things: list[tuple[str, int, int, int]], turns_: int) -> None:
        names = [name for name, *_ in things]
        things = [thing for place, thing in enumerate(things) if thing[0] not in names[:place]]
        items = [self._filled(*thing) for thing in things]
        data = [self.bench.read(item) for item in items]
        held = [self.run(self._model_value(item.key, item.nbytes)) for item in items]

        async def play() -> None:
            task = asyncio.ensure_future(self.bench.store.put(items))
            await turns(turns_)
            task.cancel()
            await self.bench.ended([task], "a cancelled put")
            _ = task.cancelled() or task.result()

        self.run(play())
        self.bench.scribble(items)
        for item, each, old in zip(items, data, held, strict=True):
            if old is None:
                self.run(self._look(item.key, item.nbytes, [each]))
            elif self.hooks.may_forget:
                # the store may have forgotten the old object first
                self.run(self._look(item.key, item.nbytes, [each, old]))
        self.bench.free()

    @precondition(lambda self: self.bench.store.capabilities.durability != "none")
    @rule()
    def reopen(self) -> None:
        if self.hooks.slow_to_open and self.opened.reopens >= _SLOW_REOPENS:
            return
        self.opened.reopens += 1
        old = self.bench
        self.run(old.within(old.store.aclose(), "aclose"))
        store = self.hooks.again(old.store)
        if store is None:
            raise AssertionError(f"a store that outlives its end needs the hook `again`: it returned {store}")
        self.run(old.within(store.open(old.regions), "open"))
        old.store = store

    # -- the model --------------------------------------------------------------------------------------

    def _filled(self, name: str, size: int, tag: int, pieces: int) -> Item:
        return self.bench.filled(self.bench.key(name), value(f"{name} {tag}", size), pieces)

    def _blank(self, name: str, size: int, tag: int, pieces: int) -> Item:
        del tag
        item = self.bench.item(self.bench.key(name), size, pieces)
        self.bench.scribble([item])
        return item

    async def _model_value(self, key: str, nbytes: int) -> bytes | None:
        """The model's object, b"" if it has another size, None if there is none."""
        if not await self.model.exists_prefix([key]):
            return None
        item = self.bench.item(key, nbytes)
        (outcome,) = await self.model.get_into([item])
        return self.bench.read(item) if outcome.status == "done" else b""

    async def _look(self, key: str, nbytes: int = 1, right: list[bytes] | None = None) -> None:
        """Make the model agree with the object in the store, which must be one of these, or missing."""
        found = await self.bench.fetch(key, nbytes)
        if isinstance(found, bytes) and right is not None:
            check(found in right, f"get of {key}, where one of {in_words(right)} was put", found)
            await self.model.delete([key])
            await self.model.put([self.bench.filled(key, found)])
        elif found == "miss":
            await self.model.delete([key])
        else:
            # the object has another size; a model that has it too stays as it is
            equal(found, "damaged", f"get of {key} with a size that was not asked for")
            known = await self.model.exists_prefix([key])
            check(known or self.hooks.may_forget, f"get of {key}, which was never put or was deleted", found)

    def teardown(self) -> None:
        self.run(self.model.aclose())
        self.opened.give_back()


class _Opened:
    """The store under test: a new one for each run of the machine, or one for all where that is slow.

    Attributes:
        loop: the store's loop.
        reopens: how often the machine closed the store and opened it again.
    """

    def __init__(self, hooks: StoreHooks) -> None:
        self.loop: asyncio.AbstractEventLoop
        self.reopens = 0
        self._hooks = hooks
        self._bench: StoreBench | None = None

    def take(self) -> StoreBench:
        if self._bench is None:
            self.loop = self._hooks.new_loop()
            try:
                self._bench = self.loop.run_until_complete(self._open())
            except BaseException:
                end_loop(self.loop)
                raise
        self._bench.renew()
        return self._bench

    def give_back(self) -> None:
        if not self._hooks.slow_to_open:
            self.close()

    def close(self) -> None:
        bench, self._bench = self._bench, None
        if bench is not None:
            try:
                self.loop.run_until_complete(bench.close())
            finally:
                end_loop(self.loop)

    async def _open(self) -> StoreBench:
        bench = StoreBench(self._hooks.make(), self._hooks)
        try:
            await bench.within(bench.store.open(bench.regions), "open")
        except BaseException:
            await bench.close()
            raise
        return bench


def run_machine(hooks: StoreHooks, **options: Any) -> None:
    """Run the machine against the stores of a suite; `options` of `hypothesis.settings` override those chosen here."""
    opened = _Opened(hooks)
    machine = type("Machine", (StoreMachine,), {"hooks": hooks, "opened": opened})
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    chosen: dict[str, Any] = {
        "max_examples": hooks.examples,
        "stateful_step_count": hooks.steps,
        "deadline": None,
        "print_blob": True,
        "suppress_health_check": slow,
    }
    try:
        run_state_machine_as_test(machine, settings=settings(**{**chosen, **options}))
    finally:
        opened.close()
