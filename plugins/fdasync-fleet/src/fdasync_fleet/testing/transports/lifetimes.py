"""The part of the conformance suite for transports about concurrent, cancelled, late, closed and forgotten receives.

Used by `transports/suite.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from time import thread_time
from typing import TYPE_CHECKING

from fdasync.testing.harness.bounded import moment, on_loop, skip, span, turns
from fdasync.testing.harness.leaks import Resources
from fdasync.testing.harness.verdicts import check, equal
from fdasync.testing.stores.lifetimes import MOMENTS
from fdasync_fleet.testing.transports.harness import TransportHooks, refused, statuses_are, whole_or_failed

if TYPE_CHECKING:
    from fdasync.ipc.shared_memory import Part
    from fdasync_fleet.testing.transports.harness import Side
    from fdasync_fleet.transfer.base import CopySpec

_MIB = 1 << 20
# a write after the end of a receive would show within this time
_LATE_S = 0.05
_LONG_MIB = 32


def _cpu_of_a_copy(side: Side, part: Part) -> float:
    """Seconds of CPU that this thread takes here to write a part in one go; the part keeps its bytes."""
    data, taken_s = side.read(part), []
    for _ in range(3):
        began = thread_time()
        side.write(part, data)
        taken_s.append(thread_time() - began)
    return min(taken_s)


class EndTests(TransportHooks):
    """Every receive ends, and then the parts are the caller's."""

    # -- at once --------------------------------------------------------------------------------------

    @on_loop
    async def test_many_receives_at_once(self) -> None:
        async with self.sides(4) as (receiver, *senders):
            copy_specs = [
                [receiver.wanted(sender, (number, place), 1 + 7919 * (number % 8), 60) for place in range(4)]
                for number in range(16)
                for sender in senders
            ]
            tasks = [receiver.start(senders[place % 3].source, each) for place, each in enumerate(copy_specs)]
            await receiver.ended(tasks, "many receives")
            for place, task in enumerate(tasks):
                statuses_are(task.result(), ["done"] * 4, f"receive {place} of {len(tasks)} at once")
                for inner, copy_spec in enumerate(copy_specs[place]):
                    receiver.assert_has(copy_spec, (place // 3, inner))

    @on_loop
    async def test_a_short_receive_does_not_wait_for_a_long_one(self) -> None:
        async with self.sides() as (sender, receiver):
            theirs, sums = sender.block("long", 30 * _MIB)
            long = receiver.start(sender.source, [receiver.copy_spec(theirs, sums)])
            small = receiver.wanted(sender, "short", 1000)
            await turns(3)
            short = receiver.start(sender.source, [small])
            await receiver.ended([short], "the short receive")
            statuses_are(short.result(), ["done"], "a short receive beside a long one")
            check(not long.done(), "a short receive ends before a long one that began before it", "the long one first")
            await receiver.ended([long], "the long receive")
            statuses_are(long.result(), ["done"], "a long receive beside a short one")

    @on_loop
    async def test_the_loop_runs_meanwhile(self) -> None:
        async with self.sides() as (sender, receiver):
            theirs, sums = sender.block("long", _LONG_MIB * _MIB)
            copy_spec = receiver.copy_spec(theirs, sums)
            receiver.scribble([copy_spec])
            part = copy_spec.parts[0]
            in_one_go_s = _cpu_of_a_copy(receiver, part)
            probes = [receiver.regions[0].view(part.offset + at, 8) for at in range(0, part.nbytes, _MIB)]
            task = receiver.start(sender.source, [copy_spec])
            seen, turn, longest_s = set(), 0, 0.0
            while not task.done():
                seen.add(sum(probe != b"\xee" * 8 for probe in probes))
                began = thread_time()
                # virtual time stands still while any task is ready
                await asyncio.sleep(0 if turn % 50 else 0.0001)
                longest_s = max(longest_s, thread_time() - began)
                turn += 1
            for probe in probes:
                probe.release()
            statuses_are(task.result(), ["done"], "a long receive")
            # in another process they may come faster than this task looks; then nothing holds this loop
            fair = len(seen) > 8 or longest_s < in_one_go_s / 2
            check(fair, f"the loop runs while {_LONG_MIB} MiB come; another task saw so many of them", sorted(seen))

    @on_loop
    async def test_a_silent_sender_costs_the_others_nothing(self) -> None:
        async with self.sides(3) as (silent, sender, receiver):
            stuck = [receiver.wanted(silent, number, 2 * _MIB) for number in range(3)]
            good = [receiver.wanted(sender, number, 100_000) for number in range(20)]
            if not self.silence(silent.transport):
                skip("nothing makes this sender silent")
            waiting = receiver.start(silent.source, stuck)
            for copy_spec in good:
                await receiver.expect(["done"], "a receive beside a silent sender", sender.source, [copy_spec])
            check(not waiting.done(), "a receive from a silent sender waits, and no other waits for it", "its end")
            await self._cancel(receiver, waiting, stuck)
            loop = asyncio.get_running_loop()
            began = loop.time()
            late = receiver.start(silent.source, stuck, 0.5)
            await receiver.ended([late], "a receive from a silent sender")
            failed = all((one.status, one.transient) == ("failed", True) for one in late.result())
            check(failed, "a receive from a silent sender fails for now", late.result())
            check(loop.time() - began >= 0.49, "it waits until its deadline of 0.5 s", loop.time() - began)

    # -- cancelled, late ------------------------------------------------------------------------------

    @on_loop
    async def test_after_a_cancel_the_parts_are_the_callers(self) -> None:
        async with self.sides() as (sender, receiver):
            blocks = [sender.block(number, 700_000, 300) for number in range(8)]
            for when in MOMENTS:
                copy_specs = [receiver.copy_spec(*block) for block in blocks]
                task = receiver.start(sender.source, copy_specs)
                await moment(when)
                await self._cancel(receiver, task, copy_specs)
                await receiver.expect(
                    ["done"], f"a receive after a cancel after {span(when)}", sender.source, copy_specs[:1]
                )
                receiver.assert_has(copy_specs[0], 0)
                receiver.free()

    @on_loop
    async def test_a_cancel_harms_no_other_receive(self) -> None:
        async with self.sides() as (sender, receiver):
            theirs = [sender.block(number, _MIB) for number in range(10)]
            for when in MOMENTS[:8]:
                gone, kept = ([receiver.copy_spec(*block) for block in theirs[at : at + 5]] for at in (0, 5))
                tasks = [receiver.start(sender.source, each) for each in (gone, kept)]
                await moment(when)
                await self._cancel(receiver, tasks[0], gone)
                await receiver.ended(tasks[1:], "the other receive")
                statuses_are(
                    tasks[1].result(), ["done"] * 5, f"a receive beside one that was cancelled after {span(when)}"
                )
                for place, copy_spec in enumerate(kept):
                    receiver.assert_has(copy_spec, 5 + place)
                receiver.free()

    @on_loop
    async def test_the_deadline_ends_it(self) -> None:
        async with self.sides() as (sender, receiver):
            blocks = [sender.block(number, _MIB) for number in range(16)]
            loop = asyncio.get_running_loop()
            for seconds in (-1.0, 0.0, 0.0002, 0.001, 0.003, 0.006):
                copy_specs = [receiver.copy_spec(*block) for block in blocks]
                began = loop.time()
                task = receiver.start(sender.source, copy_specs, seconds)
                await receiver.ended([task], "a receive with a short deadline")
                took_s = loop.time() - began
                check(took_s < self.verb_s, f"seconds of a receive with {seconds} s to its deadline", took_s)
                whole_or_failed(task.result(), f"a receive with {seconds} s to its deadline")
                for number, (outcome, copy_spec) in enumerate(zip(task.result(), copy_specs, strict=True)):
                    if outcome.status == "done":
                        check(seconds > 0, "a receive whose time was over before it began fails", outcome)
                        receiver.assert_has(copy_spec, number)
                receiver.scribble(copy_specs)
                await asyncio.sleep(_LATE_S)
                receiver.assert_scribbled(copy_specs, f"after the deadline, {seconds} s")
                receiver.free()
            after = [receiver.copy_spec(*blocks[0])]
            await receiver.expect(["done"], "a receive after some that were late", sender.source, after)

    # -- gone, forgotten, closed ----------------------------------------------------------------------

    @on_loop
    async def test_a_sender_that_closes(self) -> None:
        for when in MOMENTS[::2]:
            async with self.sides(3) as (sender, other, receiver):
                copy_specs = [receiver.wanted(sender, number, 700_000) for number in range(8)]
                more = receiver.wanted(other, "other", _MIB)
                source = sender.source
                task = receiver.start(source, copy_specs, 5.0)
                await moment(when)
                await sender.within(sender.transport.aclose(), "aclose")
                await receiver.ended([task], "a receive from a closed sender")
                for number, (outcome, copy_spec) in enumerate(zip(task.result(), copy_specs, strict=True)):
                    check(outcome.status in ("done", "failed"), "a receive whose sender closes", outcome)
                    if outcome.status == "done":
                        receiver.assert_has(copy_spec, number)
                receiver.transport.forget(source)
                await receiver.expect(["failed"], "a receive from a closed sender", source, copy_specs[:1], 1.0)
                await receiver.expect(["done"], "a receive from another sender", other.source, [more])

    @on_loop
    async def test_forget_ends_receives_and_is_not_for_ever(self) -> None:
        async with self.sides(3) as (sender, other, receiver):
            blocks = [sender.block(number, 700_000) for number in range(8)]
            others = other.block("other", 8 * _MIB)
            for when in MOMENTS:
                copy_specs = [receiver.copy_spec(*block) for block in blocks]
                kept = receiver.copy_spec(*others)
                tasks = [receiver.start(sender.source, copy_specs), receiver.start(other.source, [kept])]
                await moment(when)
                receiver.transport.forget(sender.source)
                receiver.transport.forget(sender.source)
                await receiver.ended(tasks[:1], "a receive from a sender that was forgotten")
                whole_or_failed(tasks[0].result(), "a receive from a sender that was forgotten")
                receiver.scribble(copy_specs)
                await receiver.ended(tasks[1:], "a receive from another sender")
                statuses_are(tasks[1].result(), ["done"], "a receive beside one from a sender that was forgotten")
                receiver.assert_scribbled(copy_specs, f"after it was forgotten after {span(when)}")
                await receiver.expect(
                    ["done"], "a receive after its sender was forgotten", sender.source, copy_specs[:1]
                )
                receiver.free()

    @on_loop
    async def test_forget_ends_a_receive_that_waits(self) -> None:
        async with self.sides() as (silent, receiver):
            copy_spec = receiver.wanted(silent, "a", 2 * _MIB)
            if not self.silence(silent.transport):
                skip("nothing makes this sender silent")
            task = receiver.start(silent.source, [copy_spec], 2 * self.verb_s)
            await asyncio.sleep(_LATE_S)
            receiver.transport.forget(silent.source)
            await receiver.ended([task], "a receive from a silent sender that was forgotten")
            (outcome,) = task.result()
            right = (outcome.status, outcome.transient) == ("failed", True)
            check(right, "a receive that waits for a sender that is forgotten fails for now", outcome)

    @on_loop
    async def test_aclose_ends_receives(self) -> None:
        for when in MOMENTS[::2]:
            async with self.sides() as (sender, receiver):
                copy_specs = [receiver.wanted(sender, number, 700_000) for number in range(8)]
                task = receiver.start(sender.source, copy_specs)
                await moment(when)
                await asyncio.gather(*[receiver.within(receiver.transport.aclose(), "aclose") for _ in range(3)])
                receiver.scribble(copy_specs)
                await receiver.ended([task], "a receive of a transport that was closed")
                right = all(one.status in ("done", "failed") for one in task.result())
                check(right, "a receive of a transport that closes is done, or failed", task.result())
                await asyncio.sleep(_LATE_S)
                receiver.assert_scribbled(copy_specs, "after aclose")
                await receiver.expect(["failed"] * 8, "a receive of a closed transport", sender.source, copy_specs)

    @on_loop
    async def test_life(self) -> None:
        async with self.sides() as (sender, receiver):
            equal(sender.source, sender.source, "the source of one transport, asked twice")
            tokens = [side.source.token for side in (sender, receiver)]
            check(tokens[0] != tokens[1], "tokens of two transports, which differ", tokens)
            copy_spec = receiver.wanted(sender, "a", 100)
            unopened = self.make()
            with refused("source() before open"):
                unopened.source()
            with refused("receive before open"):
                await unopened.receive(sender.source, [copy_spec], asyncio.get_running_loop().time() + 1)
            for never in (float("inf"), float("nan")):
                with refused(f"a deadline of {never}"):
                    await receiver.transport.receive(sender.source, [copy_spec], never)
            unopened.forget(sender.source)
            with refused("open for the second time"):
                await receiver.transport.open(receiver.regions)
            await receiver.within(unopened.aclose(), "aclose without open")
            source = sender.source
            await sender.within(sender.transport.aclose(), "aclose")
            with refused("source() after aclose"):
                sender.transport.source()
            sender.transport.withdraw(copy_spec.ref_parts)
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
        equal(left, [], "what is left after transports were used and closed")

    async def _play(self) -> None:
        async with self.sides(3) as (one, two, receiver):
            copy_specs = [receiver.wanted(sender, "a", 700_000, 10) for sender in (one, two)]
            for sender, copy_spec in zip((one, two), copy_specs, strict=True):
                await receiver.expect(["done"], "a receive", sender.source, [copy_spec])
            task = receiver.start(one.source, copy_specs[:1])
            await turns(2)
            await self._cancel(receiver, task, copy_specs[:1])
            receiver.transport.forget(one.source)
            _ = receiver.start(two.source, copy_specs[1:])
            await turns(2)

    async def _cancel(self, receiver: Side, task: asyncio.Task[object], copy_specs: list[CopySpec]) -> None:
        """Cancel a receive; after its end nothing may write to the parts."""
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await receiver.within(task, "a cancelled receive")
        receiver.scribble(copy_specs)
        await asyncio.sleep(_LATE_S)
        receiver.assert_scribbled(copy_specs, "after it was cancelled")
