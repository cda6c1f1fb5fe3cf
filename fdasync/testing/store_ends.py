"""The part of the conformance suite about ends: at once, cancelled, killed, closed, reopened. See `stores.py`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fdasync.errors import StoreRejected, StoreUnavailable
from fdasync.testing.store_bench import StoreHooks, brief, on_loop, skip, turns, value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from fdasync.cache.store import Item
    from fdasync.testing.store_bench import StoreBench

# when to cancel or close: after so many turns of the loop (int) or seconds (float)
MOMENTS: tuple[int | float, ...] = (0, 1, 2, 3, 5, 8, 13, 0.0002, 0.0005, 0.001, 0.002, 0.004)
_NBYTES = 60_001
# for what is written after its end, so that it may be seen
_LATE_S = 0.05


async def moment(when: float) -> None:
    if isinstance(when, int):
        await turns(when)
    else:
        await asyncio.sleep(when)


class EndTests(StoreHooks):
    """Whole or absent, and nobody's buffer is touched after the end."""

    # -- at once --------------------------------------------------------------------------------------

    @on_loop
    async def test_many_verbs_at_once(self) -> None:
        async with self.on_store() as on:

            async def play(number: int) -> None:
                keys = [on.key(f"{number}/{place}") for place in range(3)]
                items = [on.filled(key, value(key, 9000 + number), 2) for key in keys]
                assert {one.status for one in await on.put(items)} == {"done"}
                if not self.may_forget:
                    assert await on.exists([*keys, on.key("never")]) == 3
                for key in keys:
                    await on.assert_holds(key, value(key, 9000 + number), 2)
                assert await on.fetch(on.key("never"), 10) == "miss"

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
                assert winners, "nobody won"
                assert all(one.ok for one in outcomes), "it is there, whoever wrote it"
                if self.tells_races and not self.may_forget:
                    assert len(winners) == 1, "two objects cannot both be there under one key"
                on.scribble(items)
                found = [await on.fetch(key, _NBYTES + more) for more in (0, 1000)]
                whole = [each for each in found if isinstance(each, bytes)]
                assert whole or self.may_forget, f"nothing is there: {found}"
                assert all(each in [data[place] for place in winners] for each in whole), "mixed, or of a loser"

    @on_loop
    async def test_readers_see_whole_objects_only(self) -> None:
        async with self.on_store() as on:
            key, versions = on.key("a"), 20
            seen: set[int] = set()

            async def write() -> None:
                item = on.item(key, _NBYTES, 3)
                for version in range(1, versions):
                    on.scribble([item], version)
                    assert (await on.put([item]))[0].ok
                    await on.delete([key])

            async def read() -> None:
                item = on.item(key, _NBYTES, 2)
                while not writing.done():
                    on.scribble([item], 0)
                    (outcome,) = await on.get([item])
                    assert outcome.status in ("done", "miss"), outcome
                    if outcome.status == "done":
                        found = set(on.read(item))
                        assert len(found) == 1, f"parts of {sorted(found)}"
                        seen.update(found)
                    await asyncio.sleep(0)

            writing = asyncio.ensure_future(write())
            await asyncio.gather(writing, *[read() for _ in range(4)])
            assert seen <= set(range(1, versions)), f"{seen} were never written"

    # -- cancelled ------------------------------------------------------------------------------------

    @on_loop
    async def test_a_cancelled_put_leaves_it_whole_or_absent(self) -> None:
        async with self.on_store() as on:
            for when in MOMENTS:
                data = {on.key(f"{when}/{number}"): value(f"{when} {number}", _NBYTES) for number in range(6)}
                items = [on.filled(key, each, 3) for key, each in data.items()]
                await self._cancelled(on, on.store.put(items), when)
                # it has ended: the buffers are the caller's
                on.scribble(items)
                for key, each in data.items():
                    found = await on.fetch(key, _NBYTES, 2)
                    assert found in (each, "miss"), f"{key} cancelled after {when}: {brief(found)}"
                    assert (await on.keep(key, each)).ok
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
            # what goes on works, and what has ended writes nothing any more
            for key, each in data.items():
                await on.assert_holds(key, each)
            await asyncio.sleep(_LATE_S)
            await on.within(on.store.aclose(), "aclose")
            on.assert_only(before)
            assert all(set(on.read(item)) == {0xEE} for item in rounds)

    async def _cancelled(self, on: StoreBench, work: Any, when: float) -> None:
        """Cancel it after a while and wait for its end; it must end as cancelled, unless it had ended before."""
        task = asyncio.ensure_future(work)
        await moment(when)
        in_flight = task.cancel()
        await on.ended([task], "a cancelled verb")
        if in_flight:
            assert task.cancelled(), "a verb that is cancelled in flight raises CancelledError"
        else:
            assert all(one.ok for one in task.result())

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
                assert all(task.done() for task in tasks), "aclose returned before the verbs had ended"
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
            # and the store can be used further, maybe not at once
            loop = asyncio.get_running_loop()
            until = loop.time() + self.verb_s
            while True:
                try:
                    outcome = await on.keep(on.key("new"), value("new", _NBYTES))
                except StoreUnavailable:
                    assert loop.time() < until, "it did not come back after a kill"
                    await asyncio.sleep(0.02)
                else:
                    break
            assert outcome.ok
            await on.assert_holds(on.key("new"), value("new", _NBYTES))

    def _busy(self, on: StoreBench) -> tuple[list[asyncio.Task[Any]], list[Item]]:
        """Verbs in flight, and all that they read or write."""
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
                assert isinstance(error, StoreUnavailable), f"a verb ended by {error!r}"

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
                raise AssertionError(f"{name} of a closed store: {result!r}")
            await on.within(on.store.aclose(), "aclose again")

    @on_loop
    async def test_aclose_of_what_was_never_open(self) -> None:
        store = self.make()
        await asyncio.wait_for(store.aclose(), self.verb_s)
        await asyncio.wait_for(store.aclose(), self.verb_s)

    @on_loop
    async def test_aclose_after_a_failed_open(self) -> None:
        store = self.make_broken()
        if store is None:
            skip("no store whose open fails (make_broken)")
        async with self.on_store() as other:
            opening = asyncio.ensure_future(store.open(other.regions))
            await other.ended([opening], "open")
            await other.within(store.aclose(), "aclose")
            assert isinstance(opening.exception(), StoreUnavailable | StoreRejected), "open did not fail as it should"
            await other.within(store.aclose(), "aclose again")

    # -- reopened -------------------------------------------------------------------------------------

    @on_loop
    async def test_what_was_done_is_there_after_its_end(self) -> None:
        async with self.on_store() as on:
            if on.store.capabilities.durability == "none":
                skip('durability is "none"')
            data = {on.key(number): value(number, 1 + 7001 * number) for number in range(8)}
            for key, each in data.items():
                assert (await on.keep(key, each)).status == "done"
            gone = on.key(3)
            await on.delete([gone])
            tasks, items = self._busy(on)
            await moment(2)
            await on.within(on.store.aclose(), "aclose")
            await on.ended(tasks, "verbs of a store that was closed")
            self._ended_well(tasks)
            on.scribble(items)
            store = self.again(on.store)
            assert store is not None, "a store that outlives its end needs the hook `again`"
            async with self.on_store(store) as later:
                for key, each in data.items():
                    if key == gone:
                        assert await later.fetch(key, len(each)) == "miss", "what was deleted came back"
                    else:
                        await later.assert_holds(key, each)
                # puts that were told "done" before the end are there, the others whole or not
                for number, task in enumerate(tasks[::3]):
                    done = [one.ok for one in task.result()] if task.exception() is None else [False] * 3
                    for place in range(3):
                        found = await later.fetch(on.key(f"{number}/{place}"), _NBYTES)
                        whole = value(f"{number} {place}", _NBYTES)
                        assert found == whole or (found == "miss" and (self.may_forget or not done[place]))
                assert (await later.keep(gone, b"again")).status == "done"
