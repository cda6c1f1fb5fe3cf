"""The part of the conformance suite for transports about the bytes that arrive. Used by `transports/suite.py`."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import xxhash

from fdasync.ipc.shared_memory import Part
from fdasync.testing.harness.bounded import on_loop, skip
from fdasync.testing.harness.verdicts import check, equal
from fdasync_fleet.messages import Source
from fdasync_fleet.testing.transports.harness import Side, TransportHooks, refused, statuses_are
from fdasync_fleet.transfer.base import CopySpec, checksum_parts

_SIZES = (1, 7, 4095, 4096, 4097, 65_537, (256 << 10) + 1, 1 << 20, (3 << 19) + 5)


class ValueTests(TransportHooks):
    """The parts of a "done" receive hold the sender's bytes, and nothing else is written."""

    @on_loop
    async def test_what_is_sent_arrives_and_nothing_else_is_written(self) -> None:
        async with self.sides() as (sender, receiver):
            copy_specs = [receiver.wanted(sender, nbytes, nbytes, 100 + nbytes % 999, 3) for nbytes in _SIZES]
            before, of_sender = receiver.snapshot(), sender.snapshot()
            await receiver.expect(["done"] * len(_SIZES), "a receive of many sizes", sender.source, copy_specs)
            receiver.assert_only(before, copy_specs)
            sender.assert_only(of_sender)
            for copy_spec, nbytes in zip(copy_specs, _SIZES, strict=True):
                receiver.assert_has(copy_spec, nbytes)

    @on_loop
    async def test_parts_without_bytes_and_calls_without_copy_specs(self) -> None:
        async with self.sides() as (sender, receiver):
            await receiver.expect([], "a receive of nothing", sender.source, [])
            copy_spec = receiver.wanted(sender, "a", 0, 5000, 0)
            nothing = receiver.wanted(sender, "b", 0)
            await receiver.expect(["done", "done"], "parts without bytes", sender.source, [copy_spec, nothing])
            receiver.assert_has(copy_spec, "a")
            wrong = msgspec.structs.replace(nothing, checksums=(1,))
            await receiver.expect(["damaged"], "no bytes with a wrong checksum", sender.source, [wrong])

    @on_loop
    async def test_pages_that_were_never_written_are_zeros(self) -> None:
        async with self.sides() as (sender, receiver):
            far = Part(0, (20 << 20) + 1, 300_000)
            sender.transport.offer([far])
            copy_spec = receiver.copy_spec([far], [receiver.transport.checksum(bytes(300_000))])
            receiver.scribble([copy_spec])
            await receiver.expect(["done"], "pages that were never written", sender.source, [copy_spec])
            equal(receiver.read(copy_spec.parts[0]), bytes(300_000), "a receive of pages that were never written")

    @on_loop
    async def test_one_wrong_bit_is_damage(self) -> None:
        async with self.sides() as (sender, receiver):
            copy_specs = [receiver.wanted(sender, number, 600_000, 700) for number in range(7)]
            spoiled = {1: (0, 0), 2: (0, 599_999), 3: (1, 350), 4: (0, 300_000)}
            for number, (place, byte) in spoiled.items():
                part = copy_specs[number].ref_parts[place]
                sender.regions[part.region].view(part.offset + byte, 1)[0] ^= 16
            wanted = ["damaged" if number in spoiled else "done" for number in range(7)]
            await receiver.expect(wanted, "blocks of which some have one wrong bit", sender.source, copy_specs)
            for number in (0, 5, 6):
                receiver.assert_has(copy_specs[number], number)

    @on_loop
    async def test_checksums_are_of_each_part(self) -> None:
        async with self.sides() as (sender, receiver):
            parts, sums = sender.block("a", 700_000, 900)
            found = await receiver.within(checksum_parts(sender.regions, parts), "checksum_parts")
            wanted = tuple([xxhash.xxh3_64_intdigest(sender.read(part)) for part in parts])
            equal(found, wanted, "checksum_parts")
            swapped = receiver.copy_spec(parts, sums[::-1])
            await receiver.expect(["damaged"], "a block with its checksums swapped", sender.source, [swapped])

    @on_loop
    async def test_memory_that_is_used_again_too_early_is_damage_and_never_data(self) -> None:
        async with self.sides() as (sender, receiver):
            (part,), (checksum,) = sender.block("a", 2 << 20)
            first = sender.read(part)
            other = bytes(len(first))
            copy_specs = [receiver.copy_spec([part], [checksum]) for _ in range(3)]
            seen = set()
            for round_ in range(12):
                task = receiver.start(sender.source, copy_specs)
                turn = 0
                while not task.done():
                    # whole, except in some turns of each round
                    sender.write(part, other if turn % 12 == round_ else first)
                    turn += 1
                    # virtual time stands still while any task is ready
                    await asyncio.sleep(0 if turn % 50 else 0.0001)
                sender.write(part, first)
                for outcome, copy_spec in zip(task.result(), copy_specs, strict=True):
                    seen.add(outcome.status)
                    if outcome.status == "done":
                        found = receiver.read(copy_spec.parts[0])
                        equal(found, first, 'bytes that are "done" of memory that is written meanwhile')
            check(seen <= {"done", "damaged"}, "memory that is written meanwhile is done or damaged", seen)

    @on_loop
    async def test_what_is_malformed_fails_and_harms_no_other(self) -> None:
        async with self.sides() as (sender, receiver):
            good = receiver.wanted(sender, "good", 50_000, 100)
            (theirs, rows), ours, sums = good.ref_parts, receiver.part(50_000), good.checksums
            room = receiver.part(100, 1)
            big = receiver.regions[0].nbytes
            bad: list[Any] = [
                CopySpec((theirs,), (ours, room), sums),
                CopySpec((theirs, rows), (ours, room), sums[:1]),
                CopySpec((theirs,), (Part(0, ours.offset, 49_999),), sums[:1]),
                CopySpec((Part(0, theirs.offset, 49_999),), (ours,), sums[:1]),
                CopySpec((Part(0, theirs.offset, 1 << 62),), (Part(0, ours.offset, 1 << 62),), sums[:1]),
                CopySpec((Part(2, 0, 10),), (Part(1, room.offset, 10),), sums[:1]),
                CopySpec((Part(-1, 0, 10),), (Part(1, room.offset, 10),), sums[:1]),
                CopySpec((Part(0, -10, 10),), (Part(1, room.offset, 10),), sums[:1]),
                CopySpec((Part(0, big - 5, 10),), (Part(1, room.offset, 10),), sums[:1]),
                CopySpec((theirs,), (Part(0, big - 5, 50_000),), sums[:1]),
                CopySpec((theirs,), (Part(7, 0, 50_000),), sums[:1]),
                CopySpec((theirs,), (Part(0, -1, 50_000),), sums[:1]),
                CopySpec((theirs,), (ours,), (-1,)),
                CopySpec((theirs,), (ours,), (1 << 64,)),
                CopySpec((theirs,), (ours,), ("x",)),  # type: ignore[arg-type]  # wrong on purpose
                CopySpec((None,), (ours,), sums[:1]),  # type: ignore[arg-type]  # wrong on purpose
                # wrong on purpose
                CopySpec((Part("0", 0, 1),), (Part(1, room.offset, 1),), sums[:1]),  # type: ignore[arg-type]
                CopySpec(None, (ours,), sums[:1]),  # type: ignore[arg-type]  # wrong on purpose
                None,
                # overlaps with itself, and with a good one
                CopySpec((theirs, theirs), (ours, Part(0, ours.offset + 49_999, 50_000)), (sums[0], sums[0])),
                CopySpec((theirs,), (Part(0, good.parts[0].offset - 1, 50_000),), sums[:1]),
            ]
            before = receiver.snapshot()
            outcomes = await receiver.within(receiver.start(sender.source, [good, *bad]), "receive")
            statuses_are(outcomes[:1], ["done"], "a good copy spec beside malformed ones")
            for copy_spec, outcome in zip(bad, outcomes[1:], strict=True):
                right = (outcome.status, outcome.transient) == ("failed", False)
                check(right, f"a malformed copy spec fails for good: {copy_spec}", outcome)
            receiver.assert_only(before, [good])
            receiver.assert_has(good, "good")

    @on_loop
    async def test_a_source_can_say_what_it_likes(self) -> None:
        async with self.sides() as (sender, receiver):
            copy_spec = receiver.wanted(sender, "a", 50_000, 100)
            before = receiver.snapshot()
            for number in range(150):
                source = _mutated(sender, number)
                outcomes = await receiver.within(receiver.start(source, [copy_spec], 1.0), f"receive from {source}")
                if outcomes[0].status == "done":
                    receiver.assert_has(copy_spec, "a", f"a receive from {source}")
                receiver.transport.forget(source)
                # nothing but these parts is written, whatever the source says
                receiver.assert_only(before, [copy_spec])
            await receiver.expect(["done"], "the true source, after false ones", sender.source, [copy_spec])

    @on_loop
    async def test_only_what_is_on_offer_can_be_read(self) -> None:
        if not self.keeps_offers:
            skip("a receiver that maps memory can read all of it")
        async with self.sides() as (sender, receiver):
            copy_spec = receiver.wanted(sender, "a", 50_000, 100)
            theirs, sums = copy_spec.ref_parts, copy_spec.checksums
            inside = receiver.copy_spec([Part(0, theirs[0].offset + 1, 5)], [0])
            beside = receiver.copy_spec([sender.part(5)], [0])
            before = receiver.snapshot()
            outcomes = await receiver.within(receiver.start(sender.source, [inside, beside]), "receive")
            gone = all((one.status, one.transient) == ("failed", False) for one in outcomes)
            check(gone, "what is not on offer fails for good", outcomes)
            receiver.assert_only(before)
            sender.transport.offer(theirs[:1])
            sender.transport.withdraw(theirs)
            first = receiver.copy_spec(theirs[:1], sums[:1])
            half = "two parts of which one was withdrawn, and the other alone"
            await receiver.expect(["failed", "done"], half, sender.source, [copy_spec, first])
            sender.transport.withdraw(theirs[:1])
            await receiver.expect(["failed"], "what was withdrawn", sender.source, [first])
            sender.transport.offer(theirs)
            await receiver.expect(["done"], "what is on offer again", sender.source, [copy_spec])

    @on_loop
    async def test_offers_are_counted(self) -> None:
        async with self.sides() as (sender, _):
            transport = sender.transport
            parts = (sender.part(10), sender.part(20, 1))
            outside = Part(0, sender.regions[0].nbytes - 5, 10)
            for wrong in (outside, Part(5, 0, 1), Part(0, -1, 1)):
                with refused(f"an offer of {wrong}, which lies in no region,"):
                    transport.offer([parts[0], wrong])
            # a refused call does nothing
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
                    copy_specs = [receiver.wanted(sender, tag, 300_000, 40) for _ in range(3)]
                    tasks.append((receiver, copy_specs, tag, receiver.start(sender.source, copy_specs)))
            await sides[0].ended([task for *_, task in tasks], "nine receives")
            for receiver, copy_specs, tag, task in tasks:
                statuses_are(task.result(), ["done"] * 3, f"receives {tag}")
                for copy_spec in copy_specs:
                    receiver.assert_has(copy_spec, tag, f"a receive {tag}")


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
