"""The part of the conformance suite for stores about concurrent, cancelled, killed, closed and reopened calls.

Used by `stores/suite.py`; its `MOMENTS` by the suite for transports too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fdasync.errors import StoreRejected, StoreUnavailable
from fdasync.testing.harness.bounded import moment, on_loop, skip, span, turns
from fdasync.testing.harness.guarded_memory import value
from fdasync.testing.harness.verdicts import check, equal, in_words
from fdasync.testing.stores.harness import StoreHooks, verb_result

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from fdasync.cache.store.base import Item
    from fdasync.testing.stores.harness import StoreBench

# when to cancel or close: after so many turns of the loop (int) or seconds (float)
MOMENTS: tuple[int | float, ...] = (0, 1, 2, 3, 5, 8, 13, 0.0002, 0.0005, 0.001, 0.002, 0.004)
_NBYTES = 60_001
# a write after the end of a verb would show within this time
_LATE_S = 0.05


class EndTests(StoreHooks):
    """An object is whole or absent, and no buffer is touched after the end of a verb."""

    # -- at once --------------------------------------------------------------------------------------

    @on_loop
    async def test_many_verbs_at_once(self) -> None:
        async with self.on_store() as on:

            async def play(number: int) -> None:
                keys = [on.key(f"{number}/{place}") for place in range(3)]
                items = [on.filled(key, value(key, 9000 + number), 2) for key in keys]
                equal({one.status for one in await on.put(items)}, {"done"}, "put among many verbs at once")
                if not self.may_forget:
                    equal(await on.exists([*keys, on.key("never")]), 3, "exists_prefix among many verbs at once")
                for key in keys:
                    await on.assert_holds(key, value(key, 9000 + number), 2)
                equal(await on.fetch(on.key("never"), 10), "miss", "get of what was never put, among many")

            await asyncio.gather(*[play(number) for number in range(32)])

    @on_loop
    async def test_of_writers_of_one_key_one_wins_whole(self) -> None:
        async with self.on_store() as on:
            for round_ in range(6):
                key = on.key(round_)
                data = [value(f"{round_} {number}", _NBYTES + 1000 * (number % 2)) for number in range(6)]
                items = [on.filled(key, each, 2) for each in data]
                outcomes = [found for (found,) in await asyncio.gather(*[on.put([item]) for item in items])]
                winners = [place for place, one in enumerate(outcomes) if one.status == "done"]
                check(winners, 'of 6 puts of one key at a time one at least is "done"', outcomes)
                check(
                    all(one.ok for one in outcomes),
                    "puts of one key at a time, by 6 writers",
                    outcomes,
                )
                if self.tells_races and not self.may_forget:
                    check(len(winners) == 1, 'of 6 puts of one key at a time one alone is "done"', outcomes)
                on.scribble(items)
                found = [await on.fetch(key, _NBYTES + more) for more in (0, 1000)]
                whole = [each for each in found if isinstance(each, bytes)]
                check(whole or self.may_forget, "get of what 6 writers put at a time, in both of their sizes", found)
                right = [data[place] for place in winners]
                check(
                    all(each in right for each in whole),
                    f"get where one of {in_words(right)} won",
                    found,
                )

    @on_loop
    async def test_readers_see_whole_objects_only(self) -> None:
        async with self.on_store() as on:
            key, versions = on.key("a"), 20
            seen: set[int] = set()

            async def write() -> None:
                item = on.item(key, _NBYTES, 3)
                for version in range(1, versions):
                    on.scribble([item], version)
                    (outcome,) = await on.put([item])
                    check(outcome.ok, "put of a key that was deleted", outcome)
                    await on.delete([key])

            async def read() -> None:
                item = on.item(key, _NBYTES, 2)
                while not writing.done():
                    on.scribble([item], 0)
                    (outcome,) = await on.get([item])
                    check(outcome.status in ("done", "miss"), "get of what is put and deleted meanwhile", outcome)
                    if outcome.status == "done":
                        found = set(on.read(item))
                        check(len(found) == 1, "get of what is put meanwhile: bytes of several versions", sorted(found))
                        seen.update(found)
                    await asyncio.sleep(0)

            writing = asyncio.ensure_future(write())
            await asyncio.gather(writing, *[read() for _ in range(4)])
            check(seen <= set(range(1, versions)), f"gets of versions 1 to {versions - 1}", sorted(seen))

    # -- cancelled ------------------------------------------------------------------------------------

    @on_loop
    async def test_a_cancelled_put_leaves_it_whole_or_absent(self) -> None:
        async with self.on_store() as on:
            for when in MOMENTS:
                data = {on.key(f"{when}/{number}"): value(f"{when} {number}", _NBYTES) for number in range(6)}
                items = [on.filled(key, each, 3) for key, each in data.items()]
                await self._cancelled(on, on.store.put(items), when)
                # the put has ended: the buffers are the caller's
                on.scribble(items)
                for key, each in data.items():
                    found = await on.fetch(key, _NBYTES, 2)
                    check(found in (each, "miss"), f"get of {key}, whose put was cancelled after {span(when)}", found)
                    outcome = await on.keep(key, each)
                    check(outcome.ok, f"put of {key} once more, after one that was cancelled", outcome)
                    await on.assert_holds(key, each)
                await on.delete(list(data))
                on.free()

    @on_loop
    async def test_a_cancelled_get_leaves_the_buffers_alone(self) -> None:
        async with self.on_store() as on:
            data = {on.key(number): value(number, _NBYTES) for number in range(6)}
            for key, each in data.items():
                await on.keep(key, each)
            rounds: list[Item] = []
            for when in MOMENTS:
                into = [on.item(key, _NBYTES, 3) for key in data]
                await self._cancelled(on, on.store.get_into(into), when)
                on.scribble(into)
                rounds += into
            before = on.snapshot()
            # later verbs work, and ended verbs write no more
            for key, each in data.items():
                await on.assert_holds(key, each)
            await asyncio.sleep(_LATE_S)
            await on.within(on.store.aclose(), "aclose")
            on.assert_only(before)
            late = [on.read(item) for item in rounds if set(on.read(item)) != {0xEE}]
            equal(late, [], "buffers of gets that were cancelled, after their ends")

    async def _cancelled(self, on: StoreBench, work: Any, when: float) -> None:
        """Cancel a verb after a while; it must end as cancelled, unless it had ended before."""
        task = asyncio.ensure_future(work)
        await moment(when)
        in_flight = task.cancel()
        await on.ended([task], "a cancelled verb")
        if in_flight:
            came = "CancelledError" if task.cancelled() else task.exception() or task.result()
            check(
                task.cancelled(), f"a verb that is cancelled in flight after {span(when)} raises CancelledError", came
            )
        else:
            check(all(one.ok for one in task.result()), "a verb that ended before it was cancelled", task.result())

    # -- closed and killed ----------------------------------------------------------------------------

    @on_loop
    async def test_close_while_busy(self) -> None:
        for when in (0, 1, 3, 0.001):
            async with self.on_store() as on:
                await on.keep(on.key("old"), value("old", _NBYTES))
                tasks, items = self._busy(on)
                await moment(when)
                await on.within(on.store.aclose(), "aclose")
                await turns(10)
                running = sum(not task.done() for task in tasks)
                check(not running, f"of {len(tasks)} verbs none runs on when aclose has returned", f"{running} running")
                self._ended_well(tasks)
                on.scribble(items)
                before = on.snapshot()
                await asyncio.sleep(_LATE_S)
                on.assert_only(before)

    @on_loop
    async def test_kill_ends_what_runs(self) -> None:
        async with self.on_store() as on:
            await on.keep(on.key("old"), value("old", _NBYTES))
            tasks, items = self._busy(on)
            await moment(1)
            if not await on.within(on.store.kill("a test"), "kill"):
                await on.ended(tasks, "verbs of a store that cannot be killed")
                self._ended_well(tasks)
                skip("it cannot be killed")
            # from here on no verb touches a buffer
            on.scribble(items)
            before = on.snapshot()
            await on.ended(tasks, "verbs that were killed")
            self._ended_well(tasks)
            await asyncio.sleep(_LATE_S)
            on.assert_only(before)
            # the store works again, maybe not at once
            loop = asyncio.get_running_loop()
            until = loop.time() + self.verb_s
            while True:
                try:
                    outcome = await on.keep(on.key("new"), value("new", _NBYTES))
                except StoreUnavailable as error:
                    check(loop.time() < until, f"a put {self.verb_s:g} s after a kill works again", error)
                    await asyncio.sleep(0.02)
                else:
                    break
            check(outcome.ok, "put after a kill", outcome)
            await on.assert_holds(on.key("new"), value("new", _NBYTES))

    def _busy(self, on: StoreBench) -> tuple[list[asyncio.Task[Any]], list[Item]]:
        """Verbs in flight, and the items that they read or write."""
        tasks: list[asyncio.Task[Any]] = []
        items: list[Item] = []
        for number in range(4):
            puts = [on.filled(on.key(f"{number}/{place}"), value(f"{number} {place}", _NBYTES)) for place in range(3)]
            gets = [on.item(on.key("old"), _NBYTES, 3) for _ in range(3)]
            tasks += [asyncio.ensure_future(on.store.put(puts)), asyncio.ensure_future(on.store.get_into(gets))]
            tasks += [asyncio.ensure_future(on.store.exists_prefix([on.key("old")]))]
            items += [*puts, *gets]
        return tasks, items

    def _ended_well(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        for task in tasks:
            error = task.exception()
            if error is not None:
                check(isinstance(error, StoreUnavailable), "a verb that is ended raises StoreUnavailable", error)

    @on_loop
    async def test_verbs_after_aclose_say_so(self) -> None:
        async with self.on_store() as on:
            item = on.filled(on.key("a"), b"a")
            await on.put([item])
            await on.within(on.store.aclose(), "aclose")
            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "put": lambda: on.store.put([item]),
                "get_into": lambda: on.store.get_into([item]),
                "exists_prefix": lambda: on.store.exists_prefix([item.key]),
                "delete": lambda: on.store.delete([item.key]),
            }
            for name, call in calls.items():
                try:
                    result = await on.within(call(), name)
                except StoreUnavailable:
                    continue
                raise AssertionError(f"{name} of a closed store: it returned {in_words(result)}")
            await on.within(on.store.aclose(), "aclose again")

    @on_loop
    async def test_aclose_of_what_was_never_open(self) -> None:
        store = self.make()
        for what in ("aclose before open", "aclose before open, again"):
            task = asyncio.ensure_future(store.aclose())
            await asyncio.wait([task], timeout=self.verb_s)
            check(task.done(), f"{what} ends within {self.verb_s:g} s", task)
            verb_result(task, what)

    @on_loop
    async def test_aclose_after_a_failed_open(self) -> None:
        store = self.make_broken()
        if store is None:
            skip("no store whose open fails (make_broken)")
        async with self.on_store() as other:
            opening = asyncio.ensure_future(store.open(other.regions))
            await other.ended([opening], "open")
            await other.within(store.aclose(), "aclose")
            error = opening.exception()
            right = isinstance(error, StoreUnavailable | StoreRejected)
            check(right, "an open that must fail raises StoreUnavailable or StoreRejected", error)
            await other.within(store.aclose(), "aclose again")

    # -- reopened -------------------------------------------------------------------------------------

    @on_loop
    async def test_what_was_done_is_there_after_its_end(self) -> None:
        async with self.on_store() as on:
            if on.store.capabilities.durability == "none":
                skip('durability is "none"')
            data = {on.key(number): value(number, 1 + 7001 * number) for number in range(8)}
            for key, each in data.items():
                equal((await on.keep(key, each)).status, "done", f"put of {key}")
            gone = on.key(3)
            await on.delete([gone])
            tasks, items = self._busy(on)
            await moment(2)
            await on.within(on.store.aclose(), "aclose")
            await on.ended(tasks, "verbs of a store that was closed")
            self._ended_well(tasks)
            on.scribble(items)
            store = self.again(on.store)
            check(store is not None, "a store that outlives its end needs the hook `again`", store)
            async with self.on_store(store) as later:
                for key, each in data.items():
                    if key == gone:
                        equal(await later.fetch(key, len(each)), "miss", "get of what was deleted before the end")
                    else:
                        await later.assert_holds(key, each)
                # puts that ended "done" before the close are there, other puts are whole or absent
                for number, task in enumerate(tasks[::3]):
                    done = [one.ok for one in task.result()] if task.exception() is None else [False] * 3
                    for place in range(3):
                        found = await later.fetch(on.key(f"{number}/{place}"), _NBYTES)
                        whole = value(f"{number} {place}", _NBYTES)
                        right = found == whole or (found == "miss" and (self.may_forget or not done[place]))
                        was = "done" if done[place] else "not ended well"
                        check(right, f"get, after the end of the store, of a put that was {was}", found)
                equal((await later.keep(gone, b"again")).status, "done", "put of what was deleted before the end")
