"""The part of the conformance suite about what a store keeps: values, parts, order. See `stores.py`."""

from __future__ import annotations

from fdasync.cache.store import Item
from fdasync.testing.store_bench import StoreHooks, on_loop, skip, value


class ValueTests(StoreHooks):
    """What is put is what is read."""

    @on_loop
    async def test_what_is_put_is_read(self) -> None:
        async with self.on_store() as on:
            for nbytes in (1, 2, 7, 511, 512, 4095, 4096, 4097, 65_537, 300_001):
                if nbytes <= on.store.capabilities.max_item_nbytes:
                    data = value(nbytes, nbytes)
                    assert (await on.keep(on.key(nbytes), data)).status == "done"
                    await on.assert_holds(on.key(nbytes), data)

    @on_loop
    async def test_bytes_of_zero_and_any_other_value_are_kept(self) -> None:
        async with self.on_store() as on:
            for data in (bytes(5000), b"\xff" * 5000, bytes(range(256)) * 20, b"a\r\nb\x00", b" "):
                key = on.key(f"{len(data)}-{data[0]}")
                assert (await on.keep(key, data)).status == "done"
                await on.assert_holds(key, data)

    @on_loop
    async def test_parts_are_joined_in_order_whatever_their_cut(self) -> None:
        async with self.on_store() as on:
            for pieces in (1, 2, 3, 7, 20):
                data = value(pieces, 20_011)
                item = on.filled(on.key(pieces), data, pieces)
                before = on.snapshot()
                assert [one.status for one in await on.put([item])] == ["done"]
                on.assert_only(before)  # a put writes nowhere
                for other in (1, 2, 5, 20):
                    into = on.item(on.key(pieces), len(data), other)
                    before = on.snapshot()
                    (outcome,) = await on.get([into])
                    on.assert_only(before, [into])
                    if outcome.status == "done":
                        whole = on.read(into) == data
                        assert whole
                    else:
                        assert self.may_forget
                on.free()

    @on_loop
    async def test_parts_may_be_shared(self) -> None:
        # padding: many items write the same zeros, and read what nobody wants into the same place
        async with self.on_store() as on:
            zeros, trash = on.part(4096), on.part(4096)
            on.write(Item("zeros", (zeros,)), bytes(4096))
            stored = [on.filled(on.key(number), value(number, 3001)) for number in range(6)]
            padded = [Item(item.key, (*item.parts, zeros, zeros)) for item in stored]
            assert {one.status for one in await on.put(padded)} == {"done"}
            room = [on.item(item.key, 3001, 2) for item in stored]
            into = [Item(item.key, (*item.parts, trash, trash)) for item in room]
            before = on.snapshot()
            outcomes = await on.get(into)
            on.assert_only(before, into)
            for number, (outcome, item) in enumerate(zip(outcomes, room, strict=True)):
                if not self.may_forget or outcome.status == "done":
                    assert on.read(item) == value(number, 3001)
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
            assert set(on.read(into)) == {0xEE}

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
                assert await on.exists(keys[start:]) == run
            assert await on.exists([keys[0], keys[1], keys[9], keys[2]]) == 2, "it counts those present, not the run"
            assert await on.exists([keys[9], keys[0]]) == 0
            assert await on.exists([keys[0], keys[0], keys[1]]) == 3

    @on_loop
    async def test_a_batch_is_as_good_as_singles(self) -> None:
        async with self.on_store() as on:
            data = {on.key(number): value(number, 1 + 977 * number) for number in range(12)}
            batch = [on.filled(key, data[key], 2) for key in list(data)[:6]]
            assert {one.status for one in await on.put(batch)} == {"done"}
            for key in list(data)[6:]:
                assert (await on.keep(key, data[key])).status == "done"
            for key, want in data.items():
                await on.assert_holds(key, want)
            into = [on.item(key, len(want), 3) for key, want in data.items()]
            for item, outcome in zip(into, await on.get(into), strict=True):
                if not self.may_forget or outcome.status == "done":
                    assert on.read(item) == data[item.key]

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
            assert statuses == ["exists" if number % 3 == 0 else "done" for number in range(16)]
            into = [
                on.item(on.key(f"never-{number}" if number % 5 == 1 else number), sizes[number] + (number % 5 == 2))
                for number in range(16)
            ]
            outcomes = [one.status for one in await on.get(into)]
            assert outcomes == [{1: "miss", 2: "damaged"}.get(number % 5, "done") for number in range(16)]
            for number in range(16):
                if outcomes[number] == "done":
                    tag = number if number % 3 == 0 else f"new {number}"
                    assert on.read(into[number]) == value(tag, sizes[number])

    @on_loop
    async def test_an_empty_call_does_nothing(self) -> None:
        async with self.on_store() as on:
            assert await on.put([]) == []
            assert await on.get([]) == []
            assert await on.exists([]) == 0
            assert await on.delete([]) == 0

    @on_loop
    async def test_a_key_twice_in_one_call(self) -> None:
        async with self.on_store() as on:
            twice = [on.filled(on.key("a"), value(number, 4000)) for number in range(2)]
            statuses = [one.status for one in await on.put(twice)]
            assert set(statuses) <= {"done", "exists"}
            assert "done" in statuses
            if self.tells_races:
                assert sorted(statuses) == ["done", "exists"], "two objects cannot both be there under one key"
            found = await on.fetch(on.key("a"), 4000)
            winners = [value(number, 4000) for number in range(2) if statuses[number] == "done"]
            assert found in winners or (self.may_forget and found == "miss")
            into = [on.item(on.key("a"), 4000, pieces) for pieces in (1, 3)]
            outcomes = await on.get(into)
            if not self.may_forget:
                assert [one.status for one in outcomes] == ["done", "done"]
                assert [on.read(item) for item in into] == [found, found]
                assert await on.delete([on.key("a"), on.key("a")]) == 1

    @on_loop
    async def test_a_put_of_what_exists_changes_nothing(self) -> None:
        async with self.on_store() as on:
            if self.may_forget:
                skip("the store may forget: another put may find room")
            old = value("old", 9000)
            await on.keep(on.key("a"), old)
            for nbytes in (9000, 10, 20_000):
                assert (await on.keep(on.key("a"), value("new", nbytes))).status == "exists"
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
                assert outcome.status == "damaged" or (self.may_forget and outcome.status == "miss"), f"{nbytes} bytes"
            await on.assert_holds(on.key("a"), data)

    @on_loop
    async def test_what_is_missing_is_no_error(self) -> None:
        async with self.on_store() as on:
            into = [on.item(on.key(number), 5000) for number in range(3)]
            assert [one.status for one in await on.get(into)] == ["miss"] * 3
            assert await on.exists([item.key for item in into]) == 0
            assert await on.delete([item.key for item in into]) == 0

    @on_loop
    async def test_delete_counts_and_makes_room_for_another(self) -> None:
        async with self.on_store() as on:
            keys = [on.key(number) for number in range(5)]
            for key in keys[:3]:
                await on.keep(key, value(key, 3000))
            deleted = await on.delete([keys[0], keys[3], keys[1], keys[4]])
            assert deleted == 2 or (self.may_forget and deleted < 2)
            assert [await on.fetch(key, 3000) for key in keys[:2]] == ["miss", "miss"]
            assert await on.exists(keys[:1]) == 0
            await on.assert_holds(keys[2], value(keys[2], 3000))
            for nbytes in (3000, 777):
                assert (await on.keep(keys[0], value(nbytes, nbytes))).status == "done"
                await on.assert_holds(keys[0], value(nbytes, nbytes))
                await on.delete(keys[:1])
