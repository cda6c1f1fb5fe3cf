"""The part of the conformance suite about ends: at once, cancelled, late, closed, forgotten. See `transports.py`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from fdasync.testing.leaks import Resources
from fdasync.testing.store_bench import skip, turns
from fdasync.testing.store_ends import MOMENTS, moment
from fdasync.testing.transport_bench import TransportHooks, on_loop, refused

if TYPE_CHECKING:
    from fdasync.pd.transport import Receipt
    from fdasync.testing.transport_bench import Side

_MIB = 1 << 20
# for what is written after its end, so that it may be seen
_LATE_S = 0.05


class EndTests(TransportHooks):
    """Every receive ends, and then the parts are the caller's."""

    # -- at once --------------------------------------------------------------------------------------

    @on_loop
    async def test_many_receives_at_once(self) -> None:
        async with self.sides(4) as (receiver, *senders):
            receipts = [
                [receiver.wanted(sender, (number, place), 1 + 7919 * (number % 8), 60) for place in range(4)]
                for number in range(16)
                for sender in senders
            ]
            tasks = [receiver.start(senders[place % 3].source, each) for place, each in enumerate(receipts)]
            await receiver.ended(tasks, "many receives")
            for place, task in enumerate(tasks):
                assert {one.status for one in task.result()} == {"done"}
                for inner, receipt in enumerate(receipts[place]):
                    assert receiver.has(receipt, (place // 3, inner))

    @on_loop
    async def test_a_short_receive_does_not_wait_for_a_long_one(self) -> None:
        async with self.sides() as (sender, receiver):
            theirs, sums = sender.block("long", 30 * _MIB)
            long = receiver.start(sender.source, [receiver.receipt(theirs, sums)])
            small = receiver.wanted(sender, "short", 1000)
            await turns(3)
            short = receiver.start(sender.source, [small])
            await receiver.ended([short], "the short receive")
            assert short.result()[0].status == "done"
            assert not long.done(), "the long receive went first"
            await receiver.ended([long], "the long receive")
            assert long.result()[0].status == "done"

    @on_loop
    async def test_the_loop_runs_meanwhile(self) -> None:
        async with self.sides() as (sender, receiver):
            theirs, sums = sender.block("long", 16 * _MIB)
            receipt = receiver.receipt(theirs, sums)
            receiver.scribble([receipt])
            part = receipt.parts[0]
            probes = [receiver.regions[0].view(part.offset + at, 8) for at in range(0, part.nbytes, _MIB)]
            task = receiver.start(sender.source, [receipt])
            seen, turn = set(), 0
            while not task.done():
                seen.add(sum(probe != b"\xee" * 8 for probe in probes))
                # in virtual time nothing goes on while everybody is busy
                await asyncio.sleep(0 if turn % 50 else 0.0001)
                turn += 1
            for probe in probes:
                probe.release()
            assert task.result()[0].status == "done"
            assert len(seen) > 8, f"others saw {sorted(seen)} MiB of 16 while they came"

    @on_loop
    async def test_a_silent_sender_costs_the_others_nothing(self) -> None:
        async with self.sides(3) as (silent, sender, receiver):
            stuck = [receiver.wanted(silent, number, 2 * _MIB) for number in range(3)]
            good = [receiver.wanted(sender, number, 100_000) for number in range(20)]
            if not self.silence(silent.transport):
                skip("nothing makes this sender silent")
            loop = asyncio.get_running_loop()
            began = loop.time()
            waiting = receiver.start(silent.source, stuck, 1.5)
            for receipt in good:
                assert await receiver.take(sender.source, [receipt], 1.0) == ["done"]
            await receiver.ended([waiting], "a receive from a silent sender")
            assert {(one.status, one.transient) for one in waiting.result()} == {("failed", True)}
            assert loop.time() - began >= 1.49

    # -- cancelled, late ------------------------------------------------------------------------------

    @on_loop
    async def test_after_a_cancel_the_parts_are_the_callers(self) -> None:
        async with self.sides() as (sender, receiver):
            blocks = [sender.block(number, 700_000, 300) for number in range(8)]
            for when in MOMENTS:
                receipts = [receiver.receipt(*block) for block in blocks]
                task = receiver.start(sender.source, receipts)
                await moment(when)
                await self._cancel(receiver, task, receipts)
                assert await receiver.take(sender.source, receipts[:1]) == ["done"], f"after a cancel at {when}"
                assert receiver.has(receipts[0], 0)
                receiver.free()

    @on_loop
    async def test_a_cancel_harms_no_other_receive(self) -> None:
        async with self.sides() as (sender, receiver):
            theirs = [sender.block(number, _MIB) for number in range(10)]
            for when in MOMENTS[:8]:
                gone, kept = ([receiver.receipt(*block) for block in theirs[at : at + 5]] for at in (0, 5))
                tasks = [receiver.start(sender.source, each) for each in (gone, kept)]
                await moment(when)
                await self._cancel(receiver, tasks[0], gone)
                await receiver.ended(tasks[1:], "the other receive")
                assert {one.status for one in tasks[1].result()} == {"done"}
                assert all(receiver.has(receipt, 5 + place) for place, receipt in enumerate(kept))
                receiver.free()

    @on_loop
    async def test_the_deadline_ends_it(self) -> None:
        async with self.sides() as (sender, receiver):
            blocks = [sender.block(number, _MIB) for number in range(16)]
            loop = asyncio.get_running_loop()
            for seconds in (-1.0, 0.0, 0.0002, 0.001, 0.003, 0.006):
                receipts = [receiver.receipt(*block) for block in blocks]
                began = loop.time()
                task = receiver.start(sender.source, receipts, seconds)
                await receiver.ended([task], "a receive with a short deadline")
                assert loop.time() - began < max(seconds, 0) + 1.0
                receiver_has = [receiver.has(receipt, number) for number, receipt in enumerate(receipts)]
                for outcome, has in zip(task.result(), receiver_has, strict=True):
                    assert (outcome.status, outcome.transient) in (("done", False), ("failed", True)), outcome
                    assert outcome.status != "done" or has
                    assert outcome.status != "done" or seconds > 0, "its time was over"
                receiver.scribble(receipts)
                await asyncio.sleep(_LATE_S)
                assert receiver.scribbled(receipts), f"written after the deadline, {seconds} s"
                receiver.free()
            assert await receiver.take(sender.source, [receiver.receipt(*blocks[0])]) == ["done"]

    # -- gone, forgotten, closed ----------------------------------------------------------------------

    @on_loop
    async def test_a_sender_that_closes(self) -> None:
        for when in MOMENTS[::2]:
            async with self.sides(3) as (sender, other, receiver):
                receipts = [receiver.wanted(sender, number, 700_000) for number in range(8)]
                more = receiver.wanted(other, "other", _MIB)
                source = sender.source
                task = receiver.start(source, receipts, 5.0)
                await moment(when)
                await sender.within(sender.transport.aclose(), "aclose")
                await receiver.ended([task], "a receive from a closed sender")
                for number, (outcome, receipt) in enumerate(zip(task.result(), receipts, strict=True)):
                    assert outcome.status in ("done", "failed"), outcome
                    assert outcome.status != "done" or receiver.has(receipt, number)
                receiver.transport.forget(source)
                assert await receiver.take(source, receipts[:1], 1.0) == ["failed"]
                assert await receiver.take(other.source, [more]) == ["done"]

    @on_loop
    async def test_forget_ends_receives_and_is_not_for_ever(self) -> None:
        async with self.sides(3) as (sender, other, receiver):
            blocks = [sender.block(number, 700_000) for number in range(8)]
            others = other.block("other", 8 * _MIB)
            for when in MOMENTS:
                receipts = [receiver.receipt(*block) for block in blocks]
                kept = receiver.receipt(*others)
                tasks = [receiver.start(sender.source, receipts), receiver.start(other.source, [kept])]
                await moment(when)
                receiver.transport.forget(sender.source)
                receiver.transport.forget(sender.source)
                await receiver.ended(tasks[:1], "a receive from a sender that was forgotten")
                for outcome in tasks[0].result():
                    assert (outcome.status, outcome.transient) in (("done", False), ("failed", True)), outcome
                receiver.scribble(receipts)
                await receiver.ended(tasks[1:], "a receive from another sender")
                assert [one.status for one in tasks[1].result()] == ["done"]
                assert receiver.scribbled(receipts), f"written after it was forgotten at {when}"
                assert await receiver.take(sender.source, receipts[:1]) == ["done"], "it was forgotten for ever"
                receiver.free()

    @on_loop
    async def test_forget_ends_a_receive_that_waits(self) -> None:
        async with self.sides() as (silent, receiver):
            receipt = receiver.wanted(silent, "a", 2 * _MIB)
            if not self.silence(silent.transport):
                skip("nothing makes this sender silent")
            task = receiver.start(silent.source, [receipt], 2 * self.verb_s)
            await asyncio.sleep(_LATE_S)
            receiver.transport.forget(silent.source)
            await receiver.ended([task], "a receive from a silent sender that was forgotten")
            assert [(one.status, one.transient) for one in task.result()] == [("failed", True)]

    @on_loop
    async def test_aclose_ends_receives(self) -> None:
        for when in MOMENTS[::2]:
            async with self.sides() as (sender, receiver):
                receipts = [receiver.wanted(sender, number, 700_000) for number in range(8)]
                task = receiver.start(sender.source, receipts)
                await moment(when)
                await asyncio.gather(*[receiver.within(receiver.transport.aclose(), "aclose") for _ in range(3)])
                receiver.scribble(receipts)
                await receiver.ended([task], "a receive of a transport that was closed")
                assert {one.status for one in task.result()} <= {"done", "failed"}
                await asyncio.sleep(_LATE_S)
                assert receiver.scribbled(receipts), "written after aclose"
                assert await receiver.take(sender.source, receipts) == ["failed"] * 8

    @on_loop
    async def test_life(self) -> None:
        async with self.sides() as (sender, receiver):
            assert sender.source == sender.source
            assert sender.source.token != receiver.source.token
            receipt = receiver.wanted(sender, "a", 100)
            unopened = self.make()
            with refused():
                unopened.source()
            with refused():
                await unopened.receive(sender.source, [receipt], asyncio.get_running_loop().time() + 1)
            for never in (float("inf"), float("nan")):
                with refused():
                    await receiver.transport.receive(sender.source, [receipt], never)
            unopened.forget(sender.source)
            with refused():
                await receiver.transport.open(receiver.regions)
            await receiver.within(unopened.aclose(), "aclose without open")
            source = sender.source
            await sender.within(sender.transport.aclose(), "aclose")
            with refused():
                sender.transport.source()
            sender.transport.withdraw(receipt.ref_parts)
            await sender.within(sender.transport.aclose(), "aclose again")
            receiver.transport.forget(source)

    @on_loop
    async def test_nothing_is_left(self) -> None:
        await self._play()
        await asyncio.sleep(_LATE_S)
        before = Resources.now()
        await self._play()
        await asyncio.sleep(_LATE_S)
        left = Resources.now().left_since(before)
        assert not left, "\n".join(left)

    async def _play(self) -> None:
        async with self.sides(3) as (one, two, receiver):
            receipts = [receiver.wanted(sender, "a", 700_000, 10) for sender in (one, two)]
            for sender, receipt in zip((one, two), receipts, strict=True):
                assert await receiver.take(sender.source, [receipt]) == ["done"]
            task = receiver.start(one.source, receipts[:1])
            await turns(2)
            await self._cancel(receiver, task, receipts[:1])
            receiver.transport.forget(one.source)
            _ = receiver.start(two.source, receipts[1:])
            await turns(2)

    async def _cancel(self, receiver: Side, task: asyncio.Task[object], receipts: list[Receipt]) -> None:
        """Cancel; from its end on nobody else may write to the parts."""
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await receiver.within(task, "a cancelled receive")
        receiver.scribble(receipts)
        await asyncio.sleep(_LATE_S)
        assert receiver.scribbled(receipts), "written after it was cancelled"
