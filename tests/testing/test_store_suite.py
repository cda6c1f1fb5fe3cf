"""The conformance suite for stores finds broken stores: each way to be wrong is caught by the test named with it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import Phase

from fdasync.cache.store.base import DONE, EXISTS, Outcome, StoreUsage
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import StoreRejected, StoreUnavailable
from fdasync.testing import Deadlock, SimLoop, StoreTests
from fdasync.testing.stores.machine import run_machine

pytestmark = pytest.mark.ci


class SlowStore(MemoryStore):
    """In memory, but each object takes a while, so that there is something to cancel; it may outlive its end."""

    object_s = 0.0003
    durability = "none"

    def __init__(self, config, kept=None):
        super().__init__(config)
        self.kept = kept
        self.capabilities = msgspec.structs.replace(self.capabilities, durability=self.durability)

    async def open(self, regions):
        if self.config.max_nbytes < 0:
            raise StoreRejected("slow", "a negative size")
        await super().open(regions)
        for key, value in (self.kept or {}).items():
            self._objects[key] = value
            self._nbytes += len(value)

    async def aclose(self):
        if not self._closed:
            self.kept = dict(self._objects)
        await super().aclose()
        await asyncio.sleep(3 * self.object_s)

    async def _turn(self, item, era):
        await asyncio.sleep(self.object_s)
        self._check_era(era)


class DurableStore(SlowStore):
    durability = "process"


class SuiteInVirtualTime(StoreTests):
    """Not collected: the suite that broken stores are held against, fast and with short patience."""

    store = SlowStore
    verb_s = 5.0
    examples = 40

    def make(self):
        return self.store(MemoryConfig())

    def again(self, closed):
        return type(closed)(MemoryConfig(), closed.kept)

    def make_capped(self, max_nbytes):
        return self.store(MemoryConfig(max_nbytes=max_nbytes))

    def make_broken(self):
        return self.store(MemoryConfig(max_nbytes=-1))

    def new_loop(self):
        return SimLoop()


class TestSlowStore(SuiteInVirtualTime):
    examples = 15


class TestDurableStore(TestSlowStore):
    store = DurableStore


class TestForgetfulStore(TestSlowStore):
    """One that drops every seventh object is within the contract, if it says so."""

    may_forget = True

    class Forgetful(SlowStore):
        puts = 0

        def _put(self, item):
            outcome = super()._put(item)
            self.puts += 1
            if self.puts % 7 == 0:
                self._drop(item.key)
            return outcome

    store = Forgetful


# -- ways to be wrong -------------------------------------------------------------------------------------


class CountsThosePresent(SlowStore):
    async def exists_prefix(self, keys):
        await super().exists_prefix(keys)
        return sum(key in self._objects for key in keys)


class KeepsTheCallersBuffer(SlowStore):
    """What a store does that keeps a memoryview."""

    def _put(self, item):
        self.aliased = {**getattr(self, "aliased", {}), item.key: item}
        return super()._put(item)

    def _get(self, item):
        if (alias := self.aliased.get(item.key)) is not None and item.key in self._objects:
            held = [self._regions[part.region].view(part.offset, part.nbytes) for part in alias.parts]
            self._objects[item.key] = b"".join(held)
        return super()._get(item)


class Overwrites(SlowStore):
    def _put(self, item):
        outcome = EXISTS if item.key in self._objects else DONE
        self._drop(item.key)
        super()._put(item)
        return outcome


class SaysDoneForWhatExists(SlowStore):
    def _put(self, item):
        super()._put(item)
        return DONE


class ServesAnySize(SlowStore):
    """Short ones are cut, long ones are filled up."""

    def _get(self, item):
        value = self._objects.get(item.key)
        if value is not None and len(value) != item.nbytes:
            self._objects[item.key] = value[: item.nbytes].ljust(item.nbytes, b"\0")
            outcome = super()._get(item)
            self._objects[item.key] = value
            return outcome
        return super()._get(item)


class AnswersInOrderOfKeys(SlowStore):
    async def get_into(self, items):
        return await super().get_into(sorted(items, key=lambda item: item.key))


class AnswersForHitsOnly(SlowStore):
    async def get_into(self, items):
        return [one for one in await super().get_into(items) if one.status != "miss"]


class RaisesForWhatIsMissing(SlowStore):
    def _get(self, item):
        if item.key not in self._objects:
            raise KeyError(item.key)
        return super()._get(item)


class WritesWholeWords(SlowStore):
    def _get(self, item):
        outcome = super()._get(item)
        part = item.parts[-1]
        if outcome is DONE:
            self._regions[part.region].view(part.offset + part.nbytes, 8)[:] = bytes(8)
        return outcome


class ScratchesInTheCallersBuffer(SlowStore):
    def _put(self, item):
        outcome = super()._put(item)
        part = item.parts[0]
        self._regions[part.region].view(part.offset, 1)[0] ^= 1
        return outcome


class PutsInTheBackground(SlowStore):
    """Cancelling stops the waiting only: the put goes on and reads what is the caller's again."""

    async def put(self, items):
        return await asyncio.shield(super().put(items))


class GetsInTheBackground(SlowStore):
    async def get_into(self, items):
        return await asyncio.shield(super().get_into(items))


class SwallowsCancellation(SlowStore):
    async def put(self, items):
        task = asyncio.ensure_future(super().put(items))
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        return task.result()


class ShowsHalves(SlowStore):
    """Object and size are there before all of its bytes are."""

    async def put(self, items):
        outcomes = await super().put([])
        for item in items:
            outcomes.append(self._put(item))
            if outcomes[-1] is DONE:
                whole = self._objects[item.key]
                self._objects[item.key] = whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)
                await asyncio.sleep(self.object_s)
                if item.key in self._objects:
                    self._objects[item.key] = whole
        return outcomes


class ClosesUnderItsVerbs(SlowStore):
    """aclose returns soon, and what runs goes on."""

    def _check_era(self, era):
        if self._closed and era == self._era:
            super()._check_era(era)

    async def aclose(self):
        regions = self._regions
        await super().aclose()
        self._regions = regions


class WorksWhenClosed(SlowStore):
    async def exists_prefix(self, keys):
        return 0


class NeverCloses(SlowStore):
    async def aclose(self):
        self.closing = asyncio.get_running_loop().create_future()
        await self.closing


class ClosesOnce(SlowStore):
    async def aclose(self):
        if self._closed:
            raise RuntimeError("closed already")
        await super().aclose()


class LeavesATask(SlowStore):
    async def open(self, regions):
        await super().open(regions)
        self.task = asyncio.ensure_future(asyncio.sleep(3600))


class TakesAnyKey(SlowStore):
    async def put(self, items):
        return [self._put(item) for item in items if item.parts and item.nbytes > 0]


class RefusesAsIfItMightWork(SlowStore):
    async def get_into(self, items):
        try:
            return await super().get_into(items)
        except StoreRejected as error:
            raise StoreUnavailable("slow", error.problem) from None


class CountsKeysAsDeleted(SlowStore):
    async def delete(self, keys):
        await super().delete(keys)
        return len(keys)


class DeletesNothing(SlowStore):
    async def delete(self, keys):
        return sum(key in self._objects for key in keys)


class DropsWhatItKept(SlowStore):
    puts = 0

    def _put(self, item):
        outcome = super()._put(item)
        self.puts += 1
        if self.puts % 5 == 0:
            self._drop(item.key)
        return outcome


class RaisesWhenFull(SlowStore):
    def _put(self, item):
        if self._nbytes + item.nbytes > self._max_nbytes:
            raise StoreUnavailable("slow", "no room")
        return super()._put(item)


class GrowsWithoutEnd(SlowStore):
    def _put(self, item):
        self._max_nbytes = 1 << 40
        return super()._put(item)


class SaysFullWithoutAWord(SlowStore):
    def _put(self, item):
        if self._nbytes + item.nbytes > self._max_nbytes:
            return Outcome("full")
        return super()._put(item)


class CountsNothing(SlowStore):
    async def usage(self):
        return StoreUsage(objects=7, nbytes=7)


class SaysItKills(SlowStore):
    async def kill(self, why):
        return True


class IsDeadAfterAKill(SlowStore):
    async def kill(self, why):
        await self.aclose()
        return True


class ForgetsItsFirstPut(DurableStore):
    async def aclose(self):
        if self._objects and not self._closed:
            self._drop(next(iter(self._objects)))
        await super().aclose()


class RevivesWhatWasDeleted(DurableStore):
    async def delete(self, keys):
        gone = {key: self._objects[key] for key in keys if key in self._objects}
        self.dead = {**getattr(self, "dead", {}), **gone}
        return await super().delete(keys)

    async def aclose(self):
        was_open = not self._closed
        await super().aclose()
        if was_open:
            self.kept = {**getattr(self, "dead", {}), **self.kept}


class DeletesWhatIsBelow(SlowStore):
    """A key is taken for a folder."""

    async def delete(self, keys):
        for key in keys:
            for below in [each for each in self._objects if each.startswith(f"{key}/")]:
                self._drop(below)
        return await super().delete(keys)


class TakesKeysForPaths(SlowStore):
    """As a file system does: what is a file is no folder."""

    def _put(self, item):
        above = item.key.rsplit("/", 1)[0]
        if above in self._objects or any(key.startswith(f"{item.key}/") for key in self._objects):
            return Outcome("failed", f"{item.key} is a folder, or lies below a file")
        return super()._put(item)


class LosesAByte(SlowStore):
    """Wrong for one size, in an object of several parts."""

    def _put(self, item):
        outcome = super()._put(item)
        if outcome is DONE and item.nbytes == 4097 and len(item.parts) > 1:
            self._objects[item.key] = self._objects[item.key][:-1] + b"\0"
        return outcome


@pytest.mark.parametrize(
    ("store", "test"),
    [
        (CountsThosePresent, "test_exists_counts_the_leading_run"),
        (KeepsTheCallersBuffer, "test_the_buffer_is_the_callers_again_after_a_put"),
        (Overwrites, "test_a_put_of_what_exists_changes_nothing"),
        (SaysDoneForWhatExists, "test_a_put_of_what_exists_changes_nothing"),
        (SaysDoneForWhatExists, "test_of_writers_of_one_key_one_wins_whole"),
        (SaysDoneForWhatExists, "test_a_key_twice_in_one_call"),
        (Overwrites, "test_of_writers_of_one_key_one_wins_whole"),
        (ServesAnySize, "test_another_size_is_damage_and_never_data"),
        (AnswersInOrderOfKeys, "test_outcomes_are_in_the_order_of_the_items"),
        (AnswersForHitsOnly, "test_outcomes_are_in_the_order_of_the_items"),
        (RaisesForWhatIsMissing, "test_what_is_missing_is_no_error"),
        (WritesWholeWords, "test_parts_are_joined_in_order_whatever_their_cut"),
        (ScratchesInTheCallersBuffer, "test_parts_are_joined_in_order_whatever_their_cut"),
        (PutsInTheBackground, "test_a_cancelled_put_leaves_it_whole_or_absent"),
        (GetsInTheBackground, "test_a_cancelled_get_leaves_the_buffers_alone"),
        (SwallowsCancellation, "test_a_cancelled_put_leaves_it_whole_or_absent"),
        (ShowsHalves, "test_readers_see_whole_objects_only"),
        (ShowsHalves, "test_a_cancelled_put_leaves_it_whole_or_absent"),
        (ClosesUnderItsVerbs, "test_close_while_busy"),
        (WorksWhenClosed, "test_verbs_after_aclose_say_so"),
        (NeverCloses, "test_what_is_put_is_read"),
        (ClosesOnce, "test_aclose_of_what_was_never_open"),
        (ClosesOnce, "test_verbs_after_aclose_say_so"),
        (LeavesATask, "test_what_is_put_is_read"),
        (TakesAnyKey, "test_what_breaks_the_contract_is_refused"),
        (RefusesAsIfItMightWork, "test_what_breaks_the_contract_is_refused"),
        (RefusesAsIfItMightWork, "test_too_large_an_object_is_refused"),
        (CountsKeysAsDeleted, "test_delete_counts_and_makes_room_for_another"),
        (DeletesNothing, "test_delete_counts_and_makes_room_for_another"),
        (DropsWhatItKept, "test_what_is_put_is_read"),
        (RaisesWhenFull, "test_a_full_store_stays_right"),
        (GrowsWithoutEnd, "test_a_full_store_stays_right"),
        (SaysFullWithoutAWord, "test_a_full_store_stays_right"),
        (CountsNothing, "test_usage_follows"),
        (TakesKeysForPaths, "test_a_key_may_begin_another"),
        (DeletesWhatIsBelow, "test_a_key_may_begin_another"),
        (SaysItKills, "test_kill_ends_what_runs"),
        (IsDeadAfterAKill, "test_kill_ends_what_runs"),
        (ForgetsItsFirstPut, "test_what_was_done_is_there_after_its_end"),
        (RevivesWhatWasDeleted, "test_what_was_done_is_there_after_its_end"),
    ],
)
def test_the_suite_finds_broken_stores(store, test):
    suite = SuiteInVirtualTime()
    suite.store = store
    with pytest.raises((AssertionError, Deadlock, StoreUnavailable)):
        getattr(suite, test)()


@pytest.mark.parametrize(
    "store", [RevivesWhatWasDeleted, DeletesWhatIsBelow, LosesAByte, ShowsHalves, PutsInTheBackground, ServesAnySize]
)
def test_the_machine_finds_broken_stores(store):
    suite = SuiteInVirtualTime()
    suite.store = store
    only = {"phases": [Phase.generate], "database": None, "derandomize": True, "report_multiple_bugs": False}
    with pytest.raises(AssertionError):
        run_machine(suite, max_examples=300, **only)


def test_a_store_that_hangs_ends_the_test_in_real_time_too():
    class Suite(StoreTests):
        verb_s = 0.2

        def make(self):
            return NeverCloses(MemoryConfig())

    with pytest.raises(AssertionError, match=r"did not end within 0.2 s: aclose"):
        Suite().test_what_is_put_is_read()
