"""The part of the conformance suite about what arrives: whole, checked, and nothing else. See `transports/suite.py`."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import xxhash

from fdasync.ipc.shared_memory import Part
from fdasync.pd.messages import Source
from fdasync.pd.transfer.base import Receipt, checksum_parts
from fdasync.testing.harness.verdicts import check, equal
from fdasync.testing.stores.harness import skip
from fdasync.testing.transports.harness import Side, TransportHooks, on_loop, refused, statuses_are

_SIZES = (1, 7, 4095, 4096, 4097, 65_537, (256 << 10) + 1, 1 << 20, (3 << 19) + 5)


class ValueTests(TransportHooks):
    """What is sent is what arrives."""

    @on_loop
    async def test_what_is_sent_arrives_and_nothing_else_is_written(self) -> None:
        async with self.sides() as (sender, receiver):
            receipts = [receiver.wanted(sender, nbytes, nbytes, 100 + nbytes % 999, 3) for nbytes in _SIZES]
            before, of_sender = receiver.snapshot(), sender.snapshot()
            await receiver.expect(["done"] * len(_SIZES), "a receive of many sizes", sender.source, receipts)
            receiver.assert_only(before, receipts)
            sender.assert_only(of_sender)
            for receipt, nbytes in zip(receipts, _SIZES, strict=True):
                receiver.assert_has(receipt, nbytes)

    @on_loop
    async def test_parts_without_bytes_and_calls_without_receipts(self) -> None:
        async with self.sides() as (sender, receiver):
            await receiver.expect([], "a receive of nothing", sender.source, [])
            receipt = receiver.wanted(sender, "a", 0, 5000, 0)
            nothing = receiver.wanted(sender, "b", 0)
            await receiver.expect(["done", "done"], "parts without bytes", sender.source, [receipt, nothing])
            receiver.assert_has(receipt, "a")
            wrong = msgspec.structs.replace(nothing, checksums=(1,))
            await receiver.expect(["damaged"], "no bytes with a wrong checksum", sender.source, [wrong])

    @on_loop
    async def test_pages_that_nobody_wrote_are_zeros(self) -> None:
        async with self.sides() as (sender, receiver):
            far = Part(0, (20 << 20) + 1, 300_000)
            sender.transport.offer([far])
            receipt = receiver.receipt([far], [xxhash.xxh3_64_intdigest(bytes(300_000))])
            receiver.scribble([receipt])
            await receiver.expect(["done"], "pages that nobody wrote", sender.source, [receipt])
            equal(receiver.read(receipt.parts[0]), bytes(300_000), "a receive of pages that nobody wrote")

    @on_loop
    async def test_one_wrong_bit_is_damage(self) -> None:
        async with self.sides() as (sender, receiver):
            receipts = [receiver.wanted(sender, number, 600_000, 700) for number in range(7)]
            spoiled = {1: (0, 0), 2: (0, 599_999), 3: (1, 350), 4: (0, 300_000)}
            for number, (place, byte) in spoiled.items():
                part = receipts[number].ref_parts[place]
                sender.regions[part.region].view(part.offset + byte, 1)[0] ^= 16
            wanted = ["damaged" if number in spoiled else "done" for number in range(7)]
            await receiver.expect(wanted, "blocks of which some have one wrong bit", sender.source, receipts)
            for number in (0, 5, 6):
                receiver.assert_has(receipts[number], number)

    @on_loop
    async def test_checksums_are_of_each_part(self) -> None:
        async with self.sides() as (sender, receiver):
            parts, sums = sender.block("a", 700_000, 900)
            found = await receiver.within(checksum_parts(sender.regions, parts), "checksum_parts")
            equal(found, sums, "checksum_parts")
            swapped = receiver.receipt(parts, sums[::-1])
            await receiver.expect(["damaged"], "a block with its checksums swapped", sender.source, [swapped])

    @on_loop
    async def test_memory_that_is_used_again_too_early_is_damage_and_never_data(self) -> None:
        async with self.sides() as (sender, receiver):
            (part,), (checksum,) = sender.block("a", 2 << 20)
            first = sender.read(part)
            other = bytes(len(first))
            receipts = [receiver.receipt([part], [checksum]) for _ in range(3)]
            seen = set()
            for round_ in range(12):
                task = receiver.start(sender.source, receipts)
                turn = 0
                while not task.done():
                    # whole, but for some turns of each round
                    sender.write(part, other if turn % 12 == round_ else first)
                    turn += 1
                    # in virtual time nothing goes on while everybody is busy
                    await asyncio.sleep(0 if turn % 50 else 0.0001)
                sender.write(part, first)
                for outcome, receipt in zip(task.result(), receipts, strict=True):
                    seen.add(outcome.status)
                    if outcome.status == "done":
                        found = receiver.read(receipt.parts[0])
                        equal(found, first, 'bytes that are "done" of memory that is written meanwhile')
            check(seen <= {"done", "damaged"}, "memory that is written meanwhile is done or damaged", seen)

    @on_loop
    async def test_what_is_malformed_fails_and_harms_nobody(self) -> None:
        async with self.sides() as (sender, receiver):
            good = receiver.wanted(sender, "good", 50_000, 100)
            (theirs, rows), ours, sums = good.ref_parts, receiver.part(50_000), good.checksums
            room = receiver.part(100, 1)
            big = receiver.regions[0].nbytes
            bad: list[Any] = [
                Receipt((theirs,), (ours, room), sums),
                Receipt((theirs, rows), (ours, room), sums[:1]),
                Receipt((theirs,), (Part(0, ours.offset, 49_999),), sums[:1]),
                Receipt((Part(0, theirs.offset, 49_999),), (ours,), sums[:1]),
                Receipt((Part(0, theirs.offset, 1 << 62),), (Part(0, ours.offset, 1 << 62),), sums[:1]),
                Receipt((Part(2, 0, 10),), (Part(1, room.offset, 10),), sums[:1]),
                Receipt((Part(-1, 0, 10),), (Part(1, room.offset, 10),), sums[:1]),
                Receipt((Part(0, -10, 10),), (Part(1, room.offset, 10),), sums[:1]),
                Receipt((Part(0, big - 5, 10),), (Part(1, room.offset, 10),), sums[:1]),
                Receipt((theirs,), (Part(0, big - 5, 50_000),), sums[:1]),
                Receipt((theirs,), (Part(7, 0, 50_000),), sums[:1]),
                Receipt((theirs,), (Part(0, -1, 50_000),), sums[:1]),
                Receipt((theirs,), (ours,), (-1,)),
                Receipt((theirs,), (ours,), (1 << 64,)),
                Receipt((theirs,), (ours,), ("x",)),  # type: ignore[arg-type]
                Receipt((None,), (ours,), sums[:1]),  # type: ignore[arg-type]
                Receipt((Part("0", 0, 1),), (Part(1, room.offset, 1),), sums[:1]),  # type: ignore[arg-type]
                Receipt(None, (ours,), sums[:1]),  # type: ignore[arg-type]
                None,
                # overlaps with itself, and with a good one
                Receipt((theirs, theirs), (ours, Part(0, ours.offset + 49_999, 50_000)), (sums[0], sums[0])),
                Receipt((theirs,), (Part(0, good.parts[0].offset - 1, 50_000),), sums[:1]),
            ]
            before = receiver.snapshot()
            outcomes = await receiver.within(receiver.start(sender.source, [good, *bad]), "receive")
            statuses_are(outcomes[:1], ["done"], "a good receipt beside malformed ones")
            for receipt, outcome in zip(bad, outcomes[1:], strict=True):
                right = (outcome.status, outcome.transient) == ("failed", False)
                check(right, f"a malformed receipt fails for good: {receipt}", outcome)
            receiver.assert_only(before, [good])
            receiver.assert_has(good, "good")

    @on_loop
    async def test_a_source_can_say_what_it_likes(self) -> None:
        async with self.sides() as (sender, receiver):
            receipt = receiver.wanted(sender, "a", 50_000, 100)
            before = receiver.snapshot()
            for number in range(150):
                source = _mutated(sender, number)
                outcomes = await receiver.within(receiver.start(source, [receipt], 1.0), f"receive from {source}")
                if outcomes[0].status == "done":
                    receiver.assert_has(receipt, "a", f"a receive from {source}")
                receiver.transport.forget(source)
                # nothing but these parts, whatever is said
                receiver.assert_only(before, [receipt])
            await receiver.expect(["done"], "the true source, after false ones", sender.source, [receipt])

    @on_loop
    async def test_only_what_is_on_offer_can_be_read(self) -> None:
        if not self.keeps_offers:
            skip("who maps memory can read all of it")
        async with self.sides() as (sender, receiver):
            receipt = receiver.wanted(sender, "a", 50_000, 100)
            theirs, sums = receipt.ref_parts, receipt.checksums
            inside = receiver.receipt([Part(0, theirs[0].offset + 1, 5)], [0])
            beside = receiver.receipt([sender.part(5)], [0])
            before = receiver.snapshot()
            outcomes = await receiver.within(receiver.start(sender.source, [inside, beside]), "receive")
            gone = all((one.status, one.transient) == ("failed", False) for one in outcomes)
            check(gone, "what is not on offer fails for good", outcomes)
            receiver.assert_only(before)
            sender.transport.offer(theirs[:1])
            sender.transport.withdraw(theirs)
            first = receiver.receipt(theirs[:1], sums[:1])
            half = "two parts of which one was withdrawn, and the other alone"
            await receiver.expect(["failed", "done"], half, sender.source, [receipt, first])
            sender.transport.withdraw(theirs[:1])
            await receiver.expect(["failed"], "what was withdrawn", sender.source, [first])
            sender.transport.offer(theirs)
            await receiver.expect(["done"], "what is on offer again", sender.source, [receipt])

    @on_loop
    async def test_books_of_offers_are_kept(self) -> None:
        async with self.sides() as (sender, _):
            transport = sender.transport
            parts = (sender.part(10), sender.part(20, 1))
            outside = Part(0, sender.regions[0].nbytes - 5, 10)
            for wrong in (outside, Part(5, 0, 1), Part(0, -1, 1)):
                with refused(f"an offer of {wrong}, which lies in no region,"):
                    transport.offer([parts[0], wrong])
            # of a call that was refused nothing was done
            with refused("withdrawing what is not on offer"):
                transport.withdraw(parts[:1])
            transport.offer([*parts, parts[0]])
            with refused("withdrawing three times what was offered twice"):
                transport.withdraw([parts[0], parts[0], parts[0]])
            transport.withdraw([parts[0], parts[0]])
            with refused("withdrawing parts of which one was withdrawn"):
                transport.withdraw(parts)
            transport.withdraw(parts[1:])

    @on_loop
    async def test_everyone_reads_from_everyone(self) -> None:
        async with self.sides(3) as sides:
            tasks = []
            for sender in sides:
                for receiver in sides:
                    tag = f"{sides.index(sender)} to {sides.index(receiver)}"
                    receipts = [receiver.wanted(sender, tag, 300_000, 40) for _ in range(3)]
                    tasks.append((receiver, receipts, tag, receiver.start(sender.source, receipts)))
            await sides[0].ended([task for *_, task in tasks], "nine receives")
            for receiver, receipts, tag, task in tasks:
                statuses_are(task.result(), ["done"] * 3, f"receives {tag}")
                for receipt in receipts:
                    receiver.assert_has(receipt, tag, f"a receive {tag}")


def _mutated(sender: Side, number: int) -> Source:
    """The sender's source, wrong in one place or more; now and then of a wrong type."""
    random = sender.random
    source = sender.source
    strange: list[Any] = [None, -1, 2**70, 1.5, "x", b"", (), [], True]
    fields = {name: getattr(source, name) for name in source.__struct_fields__}
    for _ in range(1 + number % 2):
        name = random.choice(list(fields))
        choices: dict[str, list[Any]] = {
            "machine": ["", "another", source.machine.upper(), "x" * 5000],
            "pid": [0, 1, source.pid + 1, 2**31, 2**40, 2**63],
            "token": [random.randbytes(16), random.randbytes(15), source.token[:15] + b"\0"],
            "address": ["", ":", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "192.0.2.1:80", "localhost:80", "[::1"],
            "regions": [
                (),
                source.regions[::-1],
                source.regions[:1],
                source.regions * 9,
                tuple([(fd, nbytes * 2) for fd, nbytes in source.regions]),
                tuple([(fd, 2**62) for fd, _ in source.regions]),
                tuple([(0, nbytes) for _, nbytes in source.regions]),
                tuple([(fd + 1, nbytes) for fd, nbytes in source.regions]),
                tuple([(2**40, nbytes) for _, nbytes in source.regions]),
                ((1, 2, 3),),
            ],
        }
        fields[name] = random.choice(choices[name] + (strange if number % 5 == 0 else []))
    return Source(**fields)
