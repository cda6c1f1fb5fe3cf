"""What simulated fleets found, each as a test of its own."""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace

import msgspec
import pytest
from fdasync_fleet.instance.lease_table import LeaseTable
from fdasync_fleet.messages import HandOffTaken, LeaseDrop, Source
from fdasync_fleet.router.router import Router
from fdasync_fleet.testing.sim.network import SimNetwork
from fdasync_fleet.transfer.base import CopySpec
from fdasync_fleet.transfer.transports import Transports
from fdasync_fleet.transfer.validation import broken, refused

from fdasync import Instance, SamplingParams
from fdasync.cache.aux import AuxSpec
from fdasync.cache.store.base import DONE
from fdasync.errors import InstanceLost
from fdasync.events.actions import AskLease, ConfirmHandOver, DropLease, FinishRequest, WakeAt
from fdasync.events.catalog import AbortRequested
from fdasync.scheduler.disagg.prefill import PrefillSide
from fdasync.testing import SimLoop, synthetic_config
from fdasync.testing.sim.loop import run_sim
from fdasync.testing.sim.process import SimProcess
from tests.support import router_scene as router_helpers
from tests.support.attached import attached
from tests.support.pd_stage import DecodeStage
from tests.support.pd_table import PdTable, of, only
from tests.support.router_scene import Script, in_scene, settle

A = range(10)
BRIEF = SamplingParams(max_tokens=8)


# -- finding room


def test_timers_of_ended_hand_offs_set_no_wake_up():
    table = PdTable({"find_s": 5.0})
    table.turn(*table.hand_off(1, A))
    turned = table.turn(AbortRequested(keys=(1,), at=table.now))
    assert of(turned, FinishRequest)
    # else a driver is woken for the past, again and again
    assert of(table.turn(table.timer(20.0)), WakeAt) == []
    assert attached(table.scheduler, PrefillSide).wake_at() == float("inf")


def test_a_sample_that_is_aborted_in_the_turn_of_its_hand_over_is_kept_by_nothing():
    table = PdTable()
    table.turn(*table.hand_off(1, A))
    table.run_steps(table.granted(1))
    table.work()
    turned = table.turn(table.handed(), AbortRequested(keys=(1,), at=table.now))
    assert only(turned, FinishRequest).reason == "abort"
    # the scheduler reads `ends` with the next hand-off, which may never come
    assert attached(table.scheduler, PrefillSide).ends == []


def test_a_lease_that_is_lost_again_and_again_is_asked_for_after_longer_and_longer_pauses():
    table = PdTable({"find_s": 60.0})
    table.turn(*table.hand_off(1, A))
    pauses = []
    for attempt in range(6):
        table.turn(table.granted(1))
        lost_at = table.now
        assert of(table.turn(*table.lost(1, attempt)), AskLease) == []
        while not table.asks:
            table.now += 0.01
            table.turn(table.timer(table.now))
            assert table.now < lost_at + 2.0
        pauses.append(table.now - lost_at)
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.2
    assert 0.9 < pauses[-1] < 1.2


def test_a_request_that_loses_a_lease_asks_the_others_at_once():
    table = PdTable()
    table.turn(*table.hand_off(1, A, ("d0", "d1")))
    table.turn(table.granted(1))
    assert only(table.turn(*table.lost(1, 0)), AskLease).peer == "d1"


def test_pauses_stay_bounded_after_thousands_of_rounds():
    table = PdTable({"find_s": 1e9, "total_s": 1e9})
    table.turn(*table.hand_off(1, A))
    attached(table.scheduler, PrefillSide).hand_offs[1].rounds = 5000
    table.turn(table.denied(1))
    assert table.now < attached(table.scheduler, PrefillSide).wake_at() <= table.now + 1.0


def test_a_hand_off_that_is_aborted_after_its_first_token_ends_without_one():
    """The other instance may have given it to the caller already, or never will."""
    table = PdTable()
    table.turn(*table.hand_off(1, range(8)))
    table.run_steps(table.granted(1))
    finish = only(table.turn(AbortRequested(keys=(1,), at=table.now)), FinishRequest)
    assert (finish.reason, finish.token_ids, finish.num_rows) == ("abort", (), 0)


# -- decoding


def staged(test):
    def run():
        async def main():
            stage = DecodeStage()
            await test(stage)
            await stage.settle()
            await stage.close()

        run_sim(main())

    run.__name__ = test.__name__
    return run


@staged
async def test_a_group_that_came_in_part_is_lost_with_its_lease(stage):
    group = stage.grant(n=2)
    stage.hand(0)
    stage.decode_service.confirm(ConfirmHandOver(group, group, False))
    assert stage.p0.take(HandOffTaken)
    stage.decode_service.on_drop(stage.p0, LeaseDrop("r1", 0, "not wanted"))
    assert stage.lost == [stage.followed[0][0]]


@staged
async def test_a_lease_that_ends_with_its_samples_loses_nothing(stage):
    group = stage.grant(n=2)
    stage.hand(0)
    stage.decode_service.confirm(ConfirmHandOver(group, group, False))
    stage.decode_service.drop(DropLease(group, "its request ended", ended=True))
    assert stage.lost == []
    assert stage.p0.take(LeaseDrop)


@staged
async def test_what_starts_in_the_turn_in_which_its_lease_ends_is_lost_not_aborted(stage):
    group = stage.grant()
    stage.hand(0)
    stage.decode_service.on_drop(stage.p0, LeaseDrop("r1", 0, "not wanted"))
    stage.decode_service.confirm(ConfirmHandOver(group, group, False))
    assert stage.lost == [stage.followed[0][0]]
    assert not [event for event in await stage.settle() if isinstance(event, AbortRequested)]


@staged
async def test_an_engine_that_fails_gives_all_its_leases_back(stage):
    stage.grant()
    stage.decode_service.drop_all("the engine failed")
    assert stage.p0.take(LeaseDrop) == [LeaseDrop("r1", 0, "the engine failed")]
    assert stage.decode_service._leases.all() == []


def test_a_book_names_all_its_leases():
    table: LeaseTable = LeaseTable()
    leases = [SimpleNamespace(owner=object(), name=("r", number), group=number) for number in range(3)]
    for lease in leases:
        table.add(lease)
    assert table.all() == leases


# -- closing


def test_an_instance_that_closes_takes_nothing_in_and_does_not_spin():
    """What comes while it closes is refused, and may be sent elsewhere."""

    async def main():
        network = SimNetwork(Random(1))
        config = synthetic_config({"step_s": 0.05}, role="mixed", host_blocks=16)
        one, other = [
            Instance(config, listen=f"ipc://m{number}", wire=network.wire(f"m{number}"), transports=[])
            for number in range(2)
        ]
        async with other:
            await one.start()
            async with Router([one.address, other.address], wire=network.wire("router"), seed=1) as router:
                tasks = [asyncio.ensure_future(router.complete((number, 2), BRIEF)) for number in range(8)]
                await asyncio.sleep(0.02)
                closing = asyncio.ensure_future(one.aclose())
                tasks += [asyncio.ensure_future(router.complete((number, 3), BRIEF)) for number in range(8)]
                await closing
                results = await asyncio.gather(*tasks)
        # those that it had ended with what they had
        assert {result.finish_reason for result in results[8:]} == {"length"}

    run_sim(main())


# -- carriers


class Way:
    """A transport that answers as the test says."""

    def __init__(self, name, *outcomes):
        self.name, self.outcomes, self.calls = name, list(outcomes), 0

    def source(self):
        return source()

    async def receive(self, source, copy_specs, deadline):
        self.calls += 1
        return [self.outcomes.pop(0)]


def source():
    return Source("here", 1, (), b"t" * 16, "")


COPY_SPECS = [CopySpec((), (), ())]


async def test_blocks_that_were_taken_back_do_not_make_their_sender_unreadable():
    way = Way("tcp", refused("a part is not on offer"), DONE)
    transports = Transports([way])
    assert (await transports.receive((("tcp", source()),), COPY_SPECS, 1.0))[0].status == "failed"
    assert (await transports.receive((("tcp", source()),), COPY_SPECS, 1.0))[0].status == "done"


async def test_a_sender_that_cannot_be_mapped_is_read_over_the_socket_from_then_on():
    shm, tcp = Way("shm", refused("no permission")), Way("tcp", DONE, broken("later"), DONE)
    transports = Transports([shm, tcp])
    sources = (("shm", source()), ("tcp", source()))
    ends = [(await transports.receive(sources, COPY_SPECS, 1.0))[0].status for _ in range(3)]
    assert ends == ["done", "failed", "done"]
    assert (shm.calls, tcp.calls) == (1, 3)


# -- the router


@in_scene("p0", "d0")
async def test_moved_to_another_process_at_the_same_address_is_a_retry(scene):
    task = asyncio.ensure_future(scene.router.complete((1, 2, 3)))
    await settle()
    scene.d0.die()
    old = scene.scripts.pop("d0")
    await settle(4.0)
    again = Script(scene.network, "d0", 9)
    scene.scripts["d0"] = again
    await settle(2.0)
    scene.p0.moved(scene.p0.submits[0].request, again)
    await settle(1.0)
    # nobody there knows of it
    assert len(scene.p0.submits) == 2
    scene.p0.end(scene.p0.submits[1].request, (7,))
    assert (await task).token_ids == (7,)
    await old.links.aclose(0.0)


@in_scene("p0", "d0")
async def test_the_prefillers_end_does_not_cut_what_the_decoder_answers(scene):
    """An abort reaches both; what the caller has seen came from the decoder."""
    async with scene.router.generate((1, 2, 3), request_id="mine") as stream:
        await settle()
        name = scene.p0.submits[0].request
        scene.d0.tokens(name, 7)
        await settle()
        scene.router.abort("mine")
        scene.p0.end(name, (), reason="abort")
        await settle()
        scene.d0.end(name, (7,), reason="abort")
        deltas = [delta.token_ids async for delta in stream]
    assert deltas == [(7,)]
    assert stream.result.token_ids == (7,)


@in_scene("m0")
async def test_a_loss_after_the_deadline_is_the_deadline(scene):
    task = asyncio.ensure_future(scene.router.complete((1, 2, 3), deadline_s=1.0))
    await settle(1.5)
    scene.m0.failed(scene.m0.submits[0].request, "InstanceLost")
    assert (await task).finish_reason == "deadline"


@pytest.mark.parametrize(
    ("specs", "wants"),
    [
        (("routing",), {}),
        (("routing",), {"routing": False}),
        (("routing", "values"), {"routing": False}),
        (("values",), {}),
        (("routing", "values"), {"routing": False, "aux": False}),
        (("values",), {"aux": ()}),
        ((), {}),
    ],
)
def test_a_sample_that_lacks_its_rows_does_not_pass_for_a_whole_one(specs, wants, monkeypatch):
    """All its tokens came; then its instance fell silent, before the rows, and before it told whose weights they are
    of."""
    aux = tuple([AuxSpec(name, (3, 2), "uint8") for name in specs])
    monkeypatch.setattr(router_helpers, "FACTS", msgspec.structs.replace(router_helpers.FACTS, aux_specs=aux))

    @in_scene("m0")
    async def play(scene):
        async with scene.router.generate((1, 2, 3), request_id="mine", **wants) as stream:
            await settle()
            scene.m0.tokens(scene.m0.submits[-1].request, 7, finish="stop")
            await settle()
            stream.abort()
            assert (await anext(stream)).finish_reason == "stop"
            with pytest.raises(InstanceLost) as caught:
                await anext(stream)
            with pytest.raises(InstanceLost):
                stream.sample(0)
        (sample,) = caught.value.partial.samples
        assert (sample.token_ids, sample.finish_reason, sample.weight_version) == ((7,), "failed", ())

    play()


# -- processes in virtual time


def test_a_process_that_stands_still_does_nothing_until_it_goes_on():
    async def main():
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        process, seen = SimProcess("p"), []

        async def work():
            while len(seen) < 4:
                seen.append(round(loop.time(), 3))
                await asyncio.sleep(1.0)

        task = process.start(work(), "work")
        await asyncio.sleep(1.5)
        process.stop()
        await asyncio.sleep(10.0)
        assert seen == [0.0, 1.0]
        process.go_on()
        await task
        # the timer was due long ago
        assert seen == [0.0, 1.0, 11.5, 12.5]

    run_sim(main())


def test_a_timer_that_is_cancelled_after_a_stop_does_not_fire():
    async def main():
        loop = asyncio.get_running_loop()
        process, fired, timers = SimProcess("p"), [], []
        process.call(lambda: timers.append(loop.call_later(1.0, fired.append, 1)))
        await asyncio.sleep(0.5)
        process.stop()
        await asyncio.sleep(2.0)
        timers[0].cancel()
        process.go_on()
        await asyncio.sleep(1.0)
        assert fired == []

    run_sim(main())
