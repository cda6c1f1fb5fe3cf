"""The part of the conformance suite for stores about values, parts and order. Used by `stores/suite.py`."""

from __future__ import annotations

from fdasync.cache.store.base import Item
from fdasync.testing.harness.bounded import on_loop, skip
from fdasync.testing.harness.guarded_memory import value
from fdasync.testing.harness.verdicts import check, equal
from fdasync.testing.stores.harness import StoreHooks


class ValueTests(StoreHooks):
    """A get reads the bytes that were put."""

    @on_loop
    async def test_what_is_put_is_read(self) -> None:
        async with self.on_store() as on:
            for nbytes in (1, 2, 7, 511, 512, 4095, 4096, 4097, 65_537, 300_001):
                if nbytes <= on.store.capabilities.max_item_nbytes:
                    data = value(nbytes, nbytes)
                    equal((await on.keep(on.key(nbytes), data)).status, "done", f"put of {nbytes} bytes")
                    await on.assert_holds(on.key(nbytes), data)

    @on_loop
    async def test_bytes_of_zero_and_any_other_value_are_kept(self) -> None:
        async with self.on_store() as on:
            for data in (bytes(5000), b"\xff" * 5000, bytes(range(256)) * 20, b"a\r\nb\x00", b" "):
                key = on.key(f"{len(data)}-{data[0]}")
                equal((await on.keep(key, data)).status, "done", f"put of {key}")
                await on.assert_holds(key, data)

    @on_loop
    async def test_parts_are_joined_in_order_whatever_their_cut(self) -> None:
        async with self.on_store() as on:
            for pieces in (1, 2, 3, 7, 20):
                data = value(pieces, 20_011)
                item = on.filled(on.key(pieces), data, pieces)
                before = on.snapshot()
                equal([one.status for one in await on.put([item])], ["done"], f"put of {pieces} parts")
                on.assert_only(before)  # a put writes nowhere
                for other in (1, 2, 5, 20):
                    into = on.item(on.key(pieces), len(data), other)
                    before = on.snapshot()
                    (outcome,) = await on.get([into])
                    on.assert_only(before, [into])
                    cut = f"get of {other} parts, put as {pieces}"
                    if outcome.status == "done":
                        equal(on.read(into), data, cut)
                    else:
                        check(self.may_forget, cut, outcome)
                on.free()

    @on_loop
    async def test_parts_may_be_shared(self) -> None:
        # padding: many items write the same zeros, and read unwanted bytes into the same place
        async with self.on_store() as on:
            zeros, trash = on.part(4096), on.part(4096)
            on.write(Item("zeros", (zeros,)), bytes(4096))
            stored = [on.filled(on.key(number), value(number, 3001)) for number in range(6)]
            padded = [Item(item.key, (*item.parts, zeros, zeros)) for item in stored]
            equal({one.status for one in await on.put(padded)}, {"done"}, "put of items that share a part")
            room = [on.item(item.key, 3001, 2) for item in stored]
            into = [Item(item.key, (*item.parts, trash, trash)) for item in room]
            before = on.snapshot()
            outcomes = await on.get(into)
            on.assert_only(before, into)
            for number, (outcome, item) in enumerate(zip(outcomes, room, strict=True)):
                if outcome.status == "done":
                    equal(on.read(item), value(number, 3001), f"get of item {number}, which shares a part with others")
                else:
                    check(self.may_forget, f"get of item {number}, which shares a part with others", outcome)
            whole = padded[2].nbytes
            await on.assert_holds(on.key(2), value(2, 3001) + bytes(whole - 3001))

    @on_loop
    async def test_the_buffer_is_the_callers_again_after_a_put(self) -> None:
        async with self.on_store() as on:
            items = [on.filled(on.key(number), value(number, 50_000 + number), 3) for number in range(5)]
            await on.put(items)
            on.scribble(items)
            for number in range(5):
                await on.assert_holds(on.key(number), value(number, 50_000 + number))

    @on_loop
    async def test_the_buffer_is_the_callers_again_after_a_get(self) -> None:
        async with self.on_store() as on:
            data = value("kept", 50_000)
            await on.keep(on.key("a"), data)
            into = on.item(on.key("a"), len(data), 3)
            await on.get([into])
            on.scribble([into])
            await on.assert_holds(on.key("a"), data)
            equal(set(on.read(into)), {0xEE}, "the buffer of a get, written by its owner after the end of the get")

    @on_loop
    async def test_exists_counts_the_leading_run(self) -> None:
        async with self.on_store() as on:
            if self.may_forget:
                skip("the store may forget: the run cannot be foretold")
            there = [on.random.random() < 0.7 for _ in range(24)]
            there[:3] = [True, True, True]
            there[9] = False
            keys = [on.key(number) for number in range(24)]
            for key, kept in zip(keys, there, strict=True):
                if kept:
                    await on.keep(key, b"x")
            for start in range(24):
                run = [*there[start:], False].index(False)
                equal(await on.exists(keys[start:]), run, f"exists_prefix of keys that are there: {there[start:]}")
            gap = [keys[0], keys[1], keys[9], keys[2]]
            equal(await on.exists(gap), 2, "exists_prefix of 4 keys of which the third is missing")
            equal(await on.exists([keys[9], keys[0]]), 0, "exists_prefix of keys of which the first is missing")
            equal(await on.exists([keys[0], keys[0], keys[1]]), 3, "exists_prefix with a key twice")

    @on_loop
    async def test_a_batch_is_as_good_as_singles(self) -> None:
        async with self.on_store() as on:
            data = {on.key(number): value(number, 1 + 977 * number) for number in range(12)}
            batch = [on.filled(key, data[key], 2) for key in list(data)[:6]]
            equal({one.status for one in await on.put(batch)}, {"done"}, "put of a batch")
            for key in list(data)[6:]:
                equal((await on.keep(key, data[key])).status, "done", "put of one item")
            for key, want in data.items():
                await on.assert_holds(key, want)
            into = [on.item(key, len(want), 3) for key, want in data.items()]
            for item, outcome in zip(into, await on.get(into), strict=True):
                if outcome.status == "done":
                    equal(on.read(item), data[item.key], f"get of {item.key} in a batch")
                else:
                    check(self.may_forget, f"get of {item.key} in a batch", outcome)

    @on_loop
    async def test_outcomes_are_in_the_order_of_the_items(self) -> None:
        async with self.on_store() as on:
            if self.may_forget:
                skip("the store may forget: outcomes cannot be foretold")
            sizes = [on.random.randrange(1, 60_000) for _ in range(16)]
            first = [on.filled(on.key(number), value(number, sizes[number])) for number in range(0, 16, 3)]
            await on.put(first)
            everything = [on.filled(on.key(number), value(f"new {number}", sizes[number])) for number in range(16)]
            statuses = [one.status for one in await on.put(everything)]
            wanted = ["exists" if number % 3 == 0 else "done" for number in range(16)]
            equal(statuses, wanted, "put of a batch of which every third is there, in the order of the items")
            into = [
                on.item(on.key(f"never-{number}" if number % 5 == 1 else number), sizes[number] + (number % 5 == 2))
                for number in range(16)
            ]
            outcomes = [one.status for one in await on.get(into)]
            wanted = [{1: "miss", 2: "damaged"}.get(number % 5, "done") for number in range(16)]
            equal(outcomes, wanted, "get of a batch with keys that are missing and sizes that are wrong, in its order")
            for number in range(16):
                if outcomes[number] == "done":
                    tag = number if number % 3 == 0 else f"new {number}"
                    equal(on.read(into[number]), value(tag, sizes[number]), f"get of item {number} of a batch")

    @on_loop
    async def test_an_empty_call_does_nothing(self) -> None:
        async with self.on_store() as on:
            equal(await on.put([]), [], "put of nothing")
            equal(await on.get([]), [], "get_into of nothing")
            equal(await on.exists([]), 0, "exists_prefix of nothing")
            equal(await on.delete([]), 0, "delete of nothing")

    @on_loop
    async def test_a_key_twice_in_one_call(self) -> None:
        async with self.on_store() as on:
            twice = [on.filled(on.key("a"), value(number, 4000)) for number in range(2)]
            statuses = [one.status for one in await on.put(twice)]
            check(set(statuses) <= {"done", "exists"} and "done" in statuses, "put of a key twice in a call", statuses)
            if self.tells_races:
                equal(sorted(statuses), ["done", "exists"], "put of a key twice in a call: one is there")
            found = await on.fetch(on.key("a"), 4000)
            winners = [value(number, 4000) for number in range(2) if statuses[number] == "done"]
            check(found in winners or (self.may_forget and found == "miss"), "get of a key that was put twice", found)
            into = [on.item(on.key("a"), 4000, pieces) for pieces in (1, 3)]
            outcomes = await on.get(into)
            if not self.may_forget:
                equal([one.status for one in outcomes], ["done", "done"], "get of a key twice in a call")
                equal([on.read(item) for item in into], [found, found], "get of a key twice in a call")
                equal(await on.delete([on.key("a"), on.key("a")]), 1, "delete of a key twice in a call")

    @on_loop
    async def test_a_put_of_what_exists_changes_nothing(self) -> None:
        async with self.on_store() as on:
            if self.may_forget:
                skip("the store may forget: another put may find room")
            old = value("old", 9000)
            await on.keep(on.key("a"), old)
            for nbytes in (9000, 10, 20_000):
                status = (await on.keep(on.key("a"), value("new", nbytes))).status
                equal(status, "exists", f"put of {nbytes} bytes under a key that is there")
                await on.assert_holds(on.key("a"), old)

    @on_loop
    async def test_another_size_is_damage_and_never_data(self) -> None:
        async with self.on_store() as on:
            data = value("a", 10_000)
            await on.keep(on.key("a"), data)
            for nbytes in (1, 9999, 10_001, 14_096, 100_000):
                into = on.item(on.key("a"), nbytes, 3)
                before = on.snapshot()
                (outcome,) = await on.get([into])
                on.assert_only(before, [into])
                right = outcome.status == "damaged" or (self.may_forget and outcome.status == "miss")
                check(right, f'get of {nbytes} bytes where {len(data)} are stored is "damaged"', outcome)
            await on.assert_holds(on.key("a"), data)

    @on_loop
    async def test_what_is_missing_is_no_error(self) -> None:
        async with self.on_store() as on:
            into = [on.item(on.key(number), 5000) for number in range(3)]
            equal([one.status for one in await on.get(into)], ["miss"] * 3, "get of keys that are not there")
            equal(await on.exists([item.key for item in into]), 0, "exists_prefix of keys that are not there")
            equal(await on.delete([item.key for item in into]), 0, "delete of keys that are not there")

    @on_loop
    async def test_delete_counts_and_makes_room_for_another(self) -> None:
        async with self.on_store() as on:
            keys = [on.key(number) for number in range(5)]
            for key in keys[:3]:
                await on.keep(key, value(key, 3000))
            deleted = await on.delete([keys[0], keys[3], keys[1], keys[4]])
            check(deleted == 2 or (self.may_forget and deleted < 2), "delete of 4 keys, 2 of them there", deleted)
            equal([await on.fetch(key, 3000) for key in keys[:2]], ["miss", "miss"], "get of what was deleted")
            equal(await on.exists(keys[:1]), 0, "exists_prefix of what was deleted")
            await on.assert_holds(keys[2], value(keys[2], 3000))
            for nbytes in (3000, 777):
                status = (await on.keep(keys[0], value(nbytes, nbytes))).status
                equal(status, "done", f"put of {nbytes} bytes under a key that was deleted")
                await on.assert_holds(keys[0], value(nbytes, nbytes))
                await on.delete(keys[:1])

    @on_loop
    async def test_a_key_may_begin_another(self) -> None:
        # a key is text, not a path: "a" and "a/b" are two objects, in whatever order they come and go
        async with self.on_store() as on:
            for number, names in enumerate((("a", "a/b", "a/b/c"), ("a/b/c", "a/b", "a"))):
                keys = [on.key(f"{number}/{name}") for name in names]
                data = {key: value(key, 2000 + 7 * place) for place, key in enumerate(keys)}
                for key in keys:
                    equal(
                        (await on.keep(key, data[key])).status,
                        "done",
                        f"put of {key}, which begins another key or ends one",
                    )
                for key in keys:
                    await on.assert_holds(key, data[key])
                if not self.may_forget:
                    equal(await on.exists(keys), 3, f"exists_prefix of {keys}")
                deleted = await on.delete(keys[1:2])
                check(deleted == 1 or (self.may_forget and not deleted), f"delete of {keys[1]} alone", deleted)
                equal(await on.fetch(keys[1], 2007), "miss", f"get of {keys[1]}, which was deleted")
                for key in (keys[0], keys[2]):
                    await on.assert_holds(key, data[key])
                equal((await on.keep(keys[1], b"again")).status, "done", f"put of {keys[1]}, which was deleted")
                await on.assert_holds(keys[1], b"again")
                await on.delete(keys)
