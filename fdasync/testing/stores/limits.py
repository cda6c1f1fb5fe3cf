"""The part of the conformance suite for stores about limits: at them, beyond them, and a store that is full.

Used by `stores/suite.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.cache.store.base import Item
from fdasync.errors import StoreRejected, StoreUnavailable
from fdasync.ipc.shared_memory import Part
from fdasync.testing.harness.bounded import on_loop, skip
from fdasync.testing.harness.guarded_memory import value
from fdasync.testing.harness.verdicts import check, equal, in_words
from fdasync.testing.stores.harness import StoreHooks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fdasync.testing.stores.harness import StoreBench

BAD_KEYS = ("", "/a", "a/", ".a", "a.", "a/../b", "a..b", "A", "a b", "a\n", "\u00e9", "a\x00b", "a\\b", "a:b")


class LimitTests(StoreHooks):
    """A store takes every item within its limits, and raises StoreRejected for others."""

    @on_loop
    async def test_capabilities_make_sense(self) -> None:
        async with self.on_store() as on:
            limits = on.store.capabilities
            check(limits.name, "capabilities have a name", limits)
            check(limits.durability in ("none", "process", "machine"), "durability is one of three", limits)
            least = min(limits.max_batch, limits.max_parts, limits.max_item_nbytes)
            check(least >= 1, "an item of one byte in one part fits", limits)
            check(limits.max_key_chars >= 64, "keys may have 64 characters at least", limits)
            check(
                limits.capacity_nbytes is None or limits.capacity_nbytes > 0, "a capacity is above 0, or None", limits
            )
            config_type = on.store.config_type
            check(issubclass(config_type, msgspec.Struct), "config_type is a msgspec Struct", config_type)

    @on_loop
    async def test_up_to_the_limits(self) -> None:
        async with self.on_store() as on:
            limits = on.store.capabilities
            prefix = on.key("0az./_-x/")
            longest = prefix + "k" * (limits.max_key_chars - len(prefix))
            # two keys that differ in the last character only
            for key in (longest, longest[:-1] + "j"):
                equal((await on.keep(key, value(key, 100))).status, "done", f"put under a key of {len(key)} characters")
            await on.assert_holds(longest, value(longest, 100))
            count = min(limits.max_batch, 1024)
            batch = [on.filled(on.key(f"batch/{number}"), value(number, 33)) for number in range(count)]
            equal({one.status for one in await on.put(batch)}, {"done"}, f"put of {count} items")
            if not self.may_forget:
                equal(await on.exists([item.key for item in batch]), count, f"exists_prefix of {count} items")
            into = [on.item(item.key, 33) for item in batch]
            for number, outcome in enumerate(await on.get(into)):
                check(self.may_forget or outcome.status == "done", f"get of item {number} of {count}", outcome)
                if outcome.status == "done":
                    equal(on.read(into[number]), value(number, 33), f"get of item {number} of {count}")
            await on.delete([item.key for item in batch])
            pieces = min(limits.max_parts, 1024)
            data = value("pieces", 5 * pieces)
            item = on.filled(on.key("pieces"), data, pieces)
            equal(len(item.parts), pieces, "parts of an item")
            equal([one.status for one in await on.put([item])], ["done"], f"put of an item of {pieces} parts")
            await on.assert_holds(on.key("pieces"), data, pieces)

    @on_loop
    async def test_a_large_object(self) -> None:
        async with self.on_store() as on:
            limits = on.store.capabilities
            nbytes = min(limits.max_item_nbytes, 4 * (1 << 20) + 3, (limits.capacity_nbytes or 1 << 30) // 2)
            data = value("large", nbytes)
            equal((await on.keep(on.key("large"), data, 5)).status, "done", f"put of {nbytes} bytes")
            await on.assert_holds(on.key("large"), data, 3)

    @on_loop
    async def test_what_breaks_the_contract_is_refused(self) -> None:
        async with self.on_store() as on:
            limits = on.store.capabilities
            await on.keep(on.key("good"), b"good")
            part = on.part(10)
            for key in (*BAD_KEYS, "k" * (limits.max_key_chars + 1)):
                for call in self._calls(on, key, part):
                    await self._refused(on, call, f"key {key!r}")
            many = [Item(on.key(number), (part,)) for number in range(limits.max_batch + 1)]
            await self._refused(on, lambda: on.store.put(many), "too many items")
            await self._refused(on, lambda: on.store.get_into(many), "too many items")
            await self._refused(on, lambda: on.store.exists_prefix([item.key for item in many]), "too many keys")
            await self._refused(on, lambda: on.store.delete([item.key for item in many]), "too many keys")
            size = on.regions[1].nbytes
            wrong = {
                "too many parts": (part,) * (limits.max_parts + 1),
                "no bytes": (),
                "an unknown region": (Part(len(on.regions), 0, 10),),
                "a region before the first": (Part(-1, 0, 10),),
                "an end outside of its region": (Part(1, size - 9, 10),),
                "a start outside of its region": (Part(1, -1, 10),),
                "a negative size": (Part(1, 50, -10), part, part),
            }
            for what, parts in wrong.items():
                item = Item(on.key("bad"), parts)
                await self._refused(on, partial(on.store.put, [item]), what)
                await self._refused(on, partial(on.store.get_into, [item]), what)
            equal(await on.exists([on.key("bad")]), 0, "exists_prefix of a key of calls that were refused")
            await on.assert_holds(on.key("good"), b"good")

    @on_loop
    async def test_a_call_that_is_refused_does_nothing_for_its_good_items_either(self) -> None:
        async with self.on_store() as on:
            await on.keep(on.key("good"), b"good")
            good = Item(on.key("new"), (on.part(10),))
            for bad in (Item("no key", (on.part(10),)), Item(on.key("bad"), ())):
                await self._refused(on, partial(on.store.put, [good, bad]), "an item")
            equal(await on.exists([good.key]), 0, "exists_prefix of the good item of a put that was refused")
            await self._refused(on, lambda: on.store.delete([on.key("good"), "no key"]), "a key")
            await on.assert_holds(on.key("good"), b"good")

    @on_loop
    async def test_too_large_an_object_is_refused(self) -> None:
        async with self.on_store() as on:
            limits = on.store.capabilities
            # the same bytes again and again; no verb may read them
            part = Part(0, 0, min(on.regions[0].nbytes, limits.max_item_nbytes))
            count = limits.max_item_nbytes // part.nbytes + 1
            if count > limits.max_parts:
                skip("no item of so few parts can be that large here")
            item = Item(on.key("large"), (part,) * count)
            await self._refused(on, lambda: on.store.put([item]), "too large")
            await self._refused(on, lambda: on.store.get_into([item]), "too large")

    @on_loop
    async def test_usage_follows(self) -> None:
        async with self.on_store() as on:
            before = await on.within(on.store.usage(), "usage")
            keys = [on.key(number) for number in range(4)]
            for key in keys:
                await on.keep(key, value(key, 30_000))
            after = await on.within(on.store.usage(), "usage")
            if on.store.capabilities.shared or self.may_forget:
                skip("other processes may put and drop at the same time")
            if before.objects is not None and after.objects is not None:
                equal(
                    after.objects - before.objects, 4, f"objects of usage after 4 puts, {before} before, {after} after"
                )
            if before.nbytes is not None and after.nbytes is not None:
                more = after.nbytes - before.nbytes
                check(more >= 4 * 30_000, f"bytes of usage after puts of 120,000, which were {before.nbytes}", more)
            await on.delete(keys[:3])
            last = await on.within(on.store.usage(), "usage")
            if before.objects is not None and last.objects is not None:
                equal(
                    last.objects - before.objects,
                    1,
                    f"objects of usage, {before.objects} before, after 4 puts and 3 deletes",
                )

    @on_loop
    async def test_a_full_store_stays_right(self) -> None:
        cap_nbytes, nbytes = 400_000, 30_011
        store = self.make_capped(cap_nbytes)
        if store is None:
            skip("it has no cap (make_capped)")
        async with self.on_store(store) as on:
            kept = 0
            for number in range(40):
                outcome = await on.keep(on.key(number), value(number, nbytes))
                check(outcome.status in ("done", "full"), "put into a store that is full", outcome)
                kept += outcome.status == "done"
                on.free()
            least = cap_nbytes // nbytes // 2
            check(kept >= least, f"of 40 puts {least} at least fit in {cap_nbytes} bytes", kept)
            there = 0
            for number in range(40):
                found = await on.fetch(on.key(number), nbytes)
                check(found in (value(number, nbytes), "miss"), "get of what was put into a full store", found)
                there += isinstance(found, bytes)
                on.free()
            check(there, f"of 40 objects some are left in {cap_nbytes} bytes", there)
            usage = await on.within(on.store.usage(), "usage")
            limit = on.store.capabilities.capacity_nbytes
            if usage.nbytes is not None and limit is not None:
                check(usage.nbytes <= limit, f"usage is within the capacity of {limit} bytes", usage)
            try:
                outcome = await on.keep(on.key("never"), value("never", 2 * cap_nbytes))
            except StoreRejected as error:
                most = on.store.capabilities.max_item_nbytes
                if 2 * cap_nbytes <= most:
                    raise AssertionError(f"an item of {2 * cap_nbytes} bytes, of {most} at most: {error!r}") from error
            else:
                equal(outcome.status, "full", f"put of {2 * cap_nbytes} bytes into a store of {cap_nbytes}")
                equal(await on.exists([on.key("never")]), 0, 'exists_prefix of what was "full"')

    def _calls(self, on: StoreBench, key: str, part: Part) -> list[Callable[[], Awaitable[Any]]]:
        good = on.key("good")
        return [
            lambda: on.store.put([Item(key, (part,))]),
            lambda: on.store.get_into([Item(key, (part,))]),
            lambda: on.store.exists_prefix([good, key]),
            lambda: on.store.delete([key]),
        ]

    async def _refused(self, on: StoreBench, call: Callable[[], Awaitable[Any]], what: str) -> None:
        try:
            result = await on.within(call(), what)
        except StoreRejected:
            return
        except StoreUnavailable as error:
            raise AssertionError(f"{what} can never work, and the error says that it may: {error!r}") from error
        raise AssertionError(f"{what} was taken: it returned {in_words(result)}")
