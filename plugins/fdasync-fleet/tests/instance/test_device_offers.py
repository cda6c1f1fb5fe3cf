"""Blocks of devices on the decode side: which are read, which are refused, and what a lease's answer says of it."""

from __future__ import annotations

import msgspec
import pytest
from fdasync_fleet.messages import BlockRef, BlocksOffer, LeaseAnswer, LeaseDrop
from fdasync_fleet.transfer.base import CopySpec
from fdasync_fleet.transfer.transports import Transports

from fdasync.cache.store.base import Outcome
from fdasync.errors import InvariantBroken
from fdasync.events.actions import AnswerLease, ReceiveBlocks
from fdasync.events.catalog import BlocksReceived
from fdasync.ipc.shared_memory import DEVICE_REGION, Part
from fdasync.testing.sim.loop import run_sim
from tests.support.pd_stage import DecodeStage


def offer(stage, *regions):
    blocks = tuple([BlockRef(index, (Part(region, 64 * index, 64),), (1,)) for index, region in enumerate(regions)])
    stage.decode_service.on_offer(stage.p0, BlocksOffer("r1", 0, 5, blocks))


def play(test):
    async def main():
        stage = DecodeStage()
        await test(stage)
        await stage.close()

    run_sim(main())


def test_a_grant_says_that_devices_are_read_once_that_is_known():
    async def test(stage):
        stage.transports.reads = True
        stage.grant()
        assert [answer.reads_device for answer in stage.p0.take(LeaseAnswer)] == [True]
        # they are being mapped: the answer waits for that
        stage.transports.reads = None
        group = stage.ask(name="r2")
        stage.decode_service.answer(AnswerLease(group, "granted", 0))
        assert len(stage.p0.take(LeaseAnswer)) == 1
        await stage.settle()
        assert [answer.reads_device for answer in stage.p0.take(LeaseAnswer)] == [True, True]
        # the same question gets the same answer
        stage.decode_service.on_lease_request(stage.p0, stage.question("r2"))
        assert stage.p0.take(LeaseAnswer)[-1] == stage.p0.take(LeaseAnswer)[-2]
        # the lease ends meanwhile: no answer
        group = stage.ask(name="r3")
        stage.decode_service.answer(AnswerLease(group, "granted", 0))
        stage.decode_service.drop_all("test")
        await stage.settle()
        assert len(stage.p0.take(LeaseAnswer)) == 3

    play(test)


@pytest.mark.parametrize(
    ("reads", "regions", "on_device"),
    [
        (True, (DEVICE_REGION, DEVICE_REGION), True),
        (True, (0, 0), False),
        (False, (0, 0), False),
        (False, (DEVICE_REGION, DEVICE_REGION), None),
        (True, (DEVICE_REGION, 0), None),
    ],
)
def test_blocks_of_devices_are_taken_where_the_lease_says_so(reads, regions, on_device):
    async def test(stage):
        stage.transports.reads = reads
        stage.grant()
        offer(stage, *regions)
        events = await stage.settle()
        if on_device is None:
            assert len(stage.p0.take(LeaseDrop)) == 1
        else:
            assert [event.on_device for event in events] == [on_device]

    play(test)


def test_a_receive_fills_the_device_blocks_that_it_names():
    async def test(stage):
        stage.transports.reads = True
        group = stage.grant()
        offer(stage, DEVICE_REGION, DEVICE_REGION)
        stage.transports.outcomes = [Outcome("done"), Outcome("damaged", "x")]
        action = ReceiveBlocks(1, group, (5, 5), (0, 1), (), (), (), (4, 4), 99.0, (7, 3))
        stage.decode_service.receive(action)
        (event,) = [event for event in await stage.settle() if isinstance(event, BlocksReceived)]
        assert event.arrived == (True, False)
        ((_, copy_specs, _),) = stage.transports.received
        nbytes = stage.context.host.block_nbytes
        assert [spec.parts[0] for spec in copy_specs] == [Part(DEVICE_REGION, at * nbytes, nbytes) for at in (7, 3)]

    play(test)


def test_without_devices_no_part_of_them_is_offered_or_copied():
    async def main():
        transports = Transports([])
        part = Part(DEVICE_REGION, 0, 64)
        for verb in (transports.offer, transports.withdraw):
            with pytest.raises(InvariantBroken):
                verb([part])
        spec = CopySpec((part,), (part,), (1,))
        outcomes = await transports.receive((), [spec, msgspec.structs.replace(spec)], 99.0)
        assert [(outcome.status, outcome.transient) for outcome in outcomes] == [("failed", False)] * 2
        assert transports.reads_device(()) is False
        assert not await transports.prepared((), 1.0)
        await transports.aclose()

    run_sim(main())
