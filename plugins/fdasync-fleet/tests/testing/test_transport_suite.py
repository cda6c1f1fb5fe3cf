"""The conformance suite for transports finds broken ones: each way to be wrong is caught by the test named with it."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import msgspec
import pytest
from fdasync_fleet.testing import TransportTests, transports
from fdasync_fleet.testing.sim.transport import SimFabric, SimTransport
from fdasync_fleet.testing.transports import lifetimes

from fdasync.cache.store.base import DONE, Outcome
from fdasync.testing import SimLoop
from tests.support.suite_messages import message_of, silent_assertions

pytestmark = pytest.mark.ci


class Suite(TransportTests):
    """Not collected: in virtual time, with short patience."""

    broken = SimTransport
    verb_s = 5.0

    def __init__(self):
        self.room = SimFabric(random.Random(3))

    def make(self):
        return self.broken(self.room)

    def silence(self, transport):
        self.room.freeze(transport)
        return True

    def new_loop(self):
        return SimLoop()


class Believes(SimTransport):
    """Never looks at checksums."""

    async def _copy(self, call, copy_spec, *, spoil):
        outcome = await super()._copy(call, copy_spec, spoil=spoil)
        return DONE if outcome.status == "damaged" else outcome


class ChecksTheirs(SimTransport):
    """Hashes the sender's memory and copies afterwards."""

    async def _copy(self, call, copy_spec, *, spoil):
        outcome = await super()._copy(call, copy_spec, spoil=spoil)
        sender = self._sender(call)
        for theirs, part in zip(copy_spec.ref_parts, copy_spec.parts, strict=True):
            if outcome.ok and sender is not None:
                from_ = sender.regions[theirs.region].view(theirs.offset, theirs.nbytes)
                self.regions[part.region].view(part.offset, part.nbytes)[:] = from_
        return outcome


class WritesBeside(SimTransport):
    """A byte too many."""

    async def _copy(self, call, copy_spec, *, spoil):
        outcome = await super()._copy(call, copy_spec, spoil=spoil)
        part = copy_spec.parts[0]
        self.regions[part.region].view(part.offset + part.nbytes, 1)[0] ^= 1
        return outcome


class WritesToTheSender(SimTransport):
    async def _copy(self, call, copy_spec, *, spoil):
        outcome = await super()._copy(call, copy_spec, spoil=spoil)
        theirs, sender = copy_spec.ref_parts[0], self._sender(call)
        sender.regions[theirs.region].view(max(theirs.offset - 1, 0), 1)[0] ^= 1
        return outcome


class Lazy(SimTransport):
    """Says done, and copies nothing."""

    async def _copy(self, call, copy_spec, *, spoil):
        return DONE


class GoesOn(SimTransport):
    """Works in a task that a cancellation, a deadline and a close do not reach."""

    async def receive(self, source, copy_specs, deadline):
        self.task = asyncio.ensure_future(super().receive(source, copy_specs, deadline))
        return await asyncio.shield(self.task)


class NoDeadline(SimTransport):
    async def receive(self, source, copy_specs, deadline):
        return await super().receive(source, copy_specs, deadline + 3600)


class OneAtATime(SimTransport):
    def __init__(self, fabric):
        super().__init__(fabric)
        self.lock = asyncio.Lock()

    async def receive(self, source, copy_specs, deadline):
        async with self.lock:
            return await super().receive(source, copy_specs, deadline)


class AllInOneGo(SimTransport):
    """Never lets the loop run."""

    async def _copy(self, call, copy_spec, *, spoil):
        sender = self._sender(call)
        for theirs, part in zip(copy_spec.ref_parts, copy_spec.parts, strict=True):
            from_ = sender.regions[theirs.region].view(theirs.offset, theirs.nbytes)
            self.regions[part.region].view(part.offset, part.nbytes)[:] = from_
        return DONE


class Raises(SimTransport):
    """Believes that a peer is always right."""

    async def receive(self, source, copy_specs, deadline):
        if any(copy_spec.ref_parts[0].offset < 0 for copy_spec in copy_specs):
            raise ValueError
        return await super().receive(source, copy_specs, deadline)


class BelievesSources(SimTransport):
    async def receive(self, source, copy_specs, deadline):
        _ = bytes(source.regions[0][1] >> 20)
        return await super().receive(source, copy_specs, deadline)


class OffersAll(SimTransport):
    async def open(self, regions):
        await super().open(regions)

        class All(type(self.offers)):
            def __contains__(self, part):
                return True

        old = self.offers
        self.offers = All()
        self.offers.__dict__.update(old.__dict__)


class WithdrawsAtOnce(SimTransport):
    """Does not count."""

    def withdraw(self, parts):
        self.offers.remove([part for part in parts for _ in range(self.offers._counts[part])])


class ForgetsForEver(SimTransport):
    def forget(self, source):
        super().forget(source)
        self.gone = {*getattr(self, "gone", ()), source}

    async def receive(self, source, copy_specs, deadline):
        if source in getattr(self, "gone", ()):
            return [Outcome("failed", "gone", transient=True)] * len(copy_specs)
        return await super().receive(source, copy_specs, deadline)


class ForgetsNothing(SimTransport):
    def forget(self, source):
        pass


class Shuffles(SimTransport):
    async def receive(self, source, copy_specs, deadline):
        return (await super().receive(source, copy_specs, deadline))[::-1]


class SameToken(SimTransport):
    async def open(self, regions):
        await super().open(regions)
        self._source = msgspec.structs.replace(self._source, token=bytes(16))


class NeverCloses(SimTransport):
    async def aclose(self):
        self._closed = True
        await asyncio.sleep(1000)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Believes, "test_one_wrong_bit_is_damage"),
        (ChecksTheirs, "test_memory_that_is_used_again_too_early_is_damage_and_never_data"),
        (Believes, "test_memory_that_is_used_again_too_early_is_damage_and_never_data"),
        (WritesBeside, "test_what_is_sent_arrives_and_nothing_else_is_written"),
        (WritesToTheSender, "test_what_is_sent_arrives_and_nothing_else_is_written"),
        (Lazy, "test_what_is_sent_arrives_and_nothing_else_is_written"),
        (Lazy, "test_pages_that_were_never_written_are_zeros"),
        (GoesOn, "test_after_a_cancel_the_parts_are_the_callers"),
        (NoDeadline, "test_the_deadline_ends_it"),
        (NoDeadline, "test_a_silent_sender_costs_the_others_nothing"),
        (OneAtATime, "test_a_silent_sender_costs_the_others_nothing"),
        (OneAtATime, "test_a_short_receive_does_not_wait_for_a_long_one"),
        (AllInOneGo, "test_the_loop_runs_meanwhile"),
        (Raises, "test_what_is_malformed_fails_and_harms_no_other"),
        (BelievesSources, "test_a_source_can_say_what_it_likes"),
        (OffersAll, "test_only_what_is_on_offer_can_be_read"),
        (WithdrawsAtOnce, "test_only_what_is_on_offer_can_be_read"),
        (ForgetsForEver, "test_forget_ends_receives_and_is_not_for_ever"),
        (ForgetsNothing, "test_forget_ends_a_receive_that_waits"),
        (Shuffles, "test_one_wrong_bit_is_damage"),
        (SameToken, "test_everyone_reads_from_everyone"),
        (NeverCloses, "test_life"),
    ],
)
def test_what_is_broken_is_found(broken, test):
    suite = Suite()
    suite.broken = broken
    with pytest.raises(AssertionError):
        getattr(suite, test)()


@pytest.mark.parametrize("slower", [0.001, 1.0, 1000.0])
@pytest.mark.parametrize(("transport", "fair"), [(AllInOneGo, False), (SimTransport, True)])
def test_whether_the_loop_runs_does_not_depend_on_how_fast_a_core_is(monkeypatch, slower, transport, fair):
    monkeypatch.setattr(lifetimes, "thread_time", lambda: slower * time.thread_time())
    suite = Suite()
    suite.broken = transport
    if fair:
        suite.test_the_loop_runs_meanwhile()
        return
    with pytest.raises(AssertionError, match="the loop runs while"):
        suite.test_the_loop_runs_meanwhile()


@pytest.mark.nightly  # `TestSim` of `test_transports.py` is the same suite, with more patience
def test_what_is_right_passes():
    suite = Suite()
    for name in sorted(dir(suite)):
        if name.startswith("test_") and "process" not in name:
            getattr(suite, name)()


@pytest.mark.parametrize(
    ("transport", "test", "said"),
    [
        ("Believes", "test_one_wrong_bit_is_damage", "it returned [done, done, "),
        ("WritesBeside", "test_what_is_sent_arrives_and_nothing_else_is_written", "it is 0xa4 instead of 0xa5"),
        ("Lazy", "test_pages_that_were_never_written_are_zeros", "it returned 300000 bytes eeee"),
        ("OneAtATime", "test_a_silent_sender_costs_the_others_nothing", "did not answer in time; transient)"),
        ("Raises", "test_what_is_malformed_fails_and_harms_no_other", "receive raised ValueError("),
        ("ForgetsForEver", "test_forget_ends_receives_and_is_not_for_ever", "it returned [failed (gone; transient)]"),
    ],
)  # fmt: skip
def test_a_broken_transport_is_told_what_it_did(transport, test, said):
    suite = Suite()
    suite.broken = globals()[transport]
    assert said in message_of(suite, test)


@pytest.mark.parametrize("path", sorted(Path(transports.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_every_assertion_of_the_suite_says_what_happened(path):
    assert not (silent := silent_assertions(path)), "\n".join(silent)
