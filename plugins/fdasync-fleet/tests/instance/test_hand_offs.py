"""Hand-overs as the decode side's service takes them, and whatever else a peer may say."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from fdasync_fleet.messages import BlocksOffer, HandOff, HandOffTaken, LeaseDrop, LeaseRequest, ScoredPrompt
from hypothesis import given
from hypothesis import strategies as st

from fdasync.cache.host_arena import HostArena
from fdasync.events.actions import ConfirmHandOver, ReceiveBlocks
from fdasync.events.catalog import BlocksOffered, LeaseGivenUp, SampleOffered
from fdasync.ipc.shared_memory import PAGE_NBYTES
from fdasync.result import TopLogprobs
from fdasync.testing.sim.loop import run_sim
from tests.support.helpers import case_settings
from tests.support.message_strategies import messages_of
from tests.support.pd_stage import DecodeStage, ref


def played(test):
    def run():
        async def main():
            stage = DecodeStage()
            await test(stage)
            await stage.settle()
            assert stage.context.tasks() == []
            await stage.close()

        run_sim(main())

    run.__name__ = test.__name__
    return run


def only(events):
    (event,) = events
    return event


# -- hand-overs


@played
async def test_a_hand_over_reaches_the_scheduler_and_is_confirmed(stage):
    group = stage.grant(n=2, logprobs="both")
    stage.hand(1, raw=-0.5, processed=-0.25)
    event = only(await stage.settle())
    assert (type(event), event.key, event.offer, event.token, event.tail_rows) == (SampleOffered, group + 1, 9, 5, 2)
    stage.decode_service.confirm(ConfirmHandOver(group, group + 1, True))
    ((action, output),) = stage.emitted
    assert (action.keys, action.tokens) == ((group + 1,), (5,))
    assert (output.tokens, output.raw, output.processed, output.top) == ((5,), (-0.5,), (-0.25,), None)
    assert stage.p0.take(HandOffTaken) == [HandOffTaken("r1", 0, 1)]
    stage.hand(0, raw=-0.5, processed=-0.25, offer=10)
    stage.decode_service.confirm(ConfirmHandOver(group, group, False))
    assert len(stage.emitted) == 1
    # everything is here: the lease is over, and nothing is lost with its peer
    await stage.settle()
    stage.decode_service.on_lost(stage.p0, "gone")
    assert await stage.settle() == []
    assert stage.lost == []


@played
async def test_a_state_comes_with_a_model_that_has_one_and_with_no_other(stage):
    group = stage.grant()
    stage.hand(0, state=ref(3))
    assert "makes no sense" in only(await stage.settle()).reason
    stage.context.snapshots = HostArena.create(2, 256)
    try:
        for state, good in ((None, False), (ref(2), False), (ref(3), True)):
            group = stage.grant(name=f"state {state}")
            stage.hand(0, name=f"state {state}", state=state)
            event = only(await stage.settle())
            assert (type(event) is SampleOffered) == good
        assert (event.key, event.with_state) == (group, True)
        state = ReceiveBlocks(7, group, (9,), (3,), (), (), (), (0,), 99.0, (), (1,))
        stage.decode_service.receive(state)
        await stage.settle()
        ((_, (copy_spec,), _),) = stage.transports.received
        (part,) = copy_spec.parts
        # behind the regions of KV and rows; here are no rows
        assert (part.region, part.offset, part.nbytes) == (1, stage.context.snapshots.stride_nbytes + PAGE_NBYTES, 256)
    finally:
        stage.context.snapshots.close()
        stage.context.snapshots = None


@pytest.mark.parametrize(
    "changes",
    [
        {"index": 2},
        {"token": 300},
        {"raw": None},
        {"processed": None},
        {"top": None},
        {"tail": None},
        {"tail": ref(1)},
        {"tail_rows": 3},
        {"tail": None, "tail_rows": 0},
        {"raw": float("nan")},
        {"processed": 5.0},
        {"top": TopLogprobs((1, 2), (-0.5,))},
        {"top": TopLogprobs((300,), (-0.5,))},
        {"top": TopLogprobs((1,), (float("nan"),))},
        {"cached": (0, 8, 4)},
    ],
)
def test_hand_overs_that_make_no_sense_never_reach_the_scheduler(changes):
    async def main():
        stage = DecodeStage()
        group = stage.grant(n=2, logprobs="both", top_logprobs=1)
        whole = {"index": 0, "raw": -0.5, "processed": -0.25, "top": TopLogprobs((1,), (-0.5,))}
        stage.hand(**{**whole, **changes})
        event = only(await stage.settle())
        assert (type(event), event.groups) == (LeaseGivenUp, (group,))
        assert len(stage.p0.take(LeaseDrop)) == 1
        await stage.close()

    run_sim(main())


def scored(first, *values, top=0):
    return ScoredPrompt("r1", 0, first, array("f", values).tobytes(), top, b"", b"")


@played
async def test_log_probs_of_the_prompt_come_before_the_first_sample(stage):
    stage.grant(n=2, prompt_logprobs_start=7)
    # another sample than the first brings none
    stage.hand(1)
    assert type(only(await stage.settle())) is SampleOffered
    for run in (scored(7, -1.0, -2.0), scored(9, -3.0)):
        stage.decode_service.on_scored(stage.p0, run)
    stage.hand(0, offer=10)
    assert type(only(await stage.settle())) is SampleOffered
    assert stage.samples[100][0].scores.values().tolist() == [-1.0, -2.0, -3.0]


@pytest.mark.parametrize(
    "runs",
    [
        (),
        (scored(7, -1.0),),
        (scored(8, -1.0, -1.0),),
        (scored(7, -1.0, -1.0, -1.0, -1.0),),
        (scored(7, -1.0, -1.0, float("nan")),),
        (scored(7, -1.0, -1.0, -1.0, top=1),),
    ],
)
def test_a_hand_over_without_all_log_probs_of_the_prompt_ends_the_lease(runs):
    async def main():
        stage = DecodeStage()
        group = stage.grant(prompt_logprobs_start=7)
        for run in runs:
            stage.decode_service.on_scored(stage.p0, run)
        stage.hand(0)
        event = only(await stage.settle())
        assert (type(event), event.groups) == (LeaseGivenUp, (group,))
        await stage.close()

    run_sim(main())


@played
async def test_log_probs_that_nobody_asked_for_end_the_lease(stage):
    group = stage.grant()
    stage.decode_service.on_scored(stage.p0, scored(1, -1.0))
    assert only(await stage.settle()).groups == (group,)


@played
async def test_a_second_hand_over_of_a_sample_ends_the_lease(stage):
    group = stage.grant(n=2)
    stage.hand(0)
    await stage.settle()
    stage.hand(0, offer=11)
    assert only(await stage.settle()).groups == (group,)


@played
async def test_a_group_that_came_in_part_is_lost_with_its_lease(stage):
    group = stage.grant(n=2)
    stage.hand(0)
    stage.decode_service.confirm(ConfirmHandOver(group, group, False))
    await stage.settle()
    stage.decode_service.on_lost(stage.p0, "gone")
    await stage.settle()
    assert [request.request_id for request in stage.lost] == ["r1"]


@played
async def test_a_confirmation_for_a_lease_that_is_over_loses_its_request(stage):
    group = stage.grant()
    stage.hand(0)
    stage.decode_service.on_drop(stage.p0, LeaseDrop("r1", 0, "not wanted"))
    await stage.settle()
    stage.decode_service.confirm(ConfirmHandOver(group, group, True))
    assert stage.emitted == []
    assert stage.p0.take(HandOffTaken) == []
    assert [request.request_id for request in stage.lost] == ["r1"]


# -- anything at all


@pytest.mark.heavy("messages of a stranger, in every order")
@case_settings(60)
@given(st.lists(st.tuples(messages_of(LeaseRequest, LeaseDrop, BlocksOffer, HandOff), st.booleans()), max_size=12))
def test_no_message_of_a_peer_raises_or_reaches_the_scheduler_unchecked(messages):
    async def main():
        stage = DecodeStage()
        group = stage.grant(n=2, logprobs="raw")
        full = 2
        for message, ours in messages:
            if ours:
                message = msgspec.structs.replace(message, request="r1", attempt=0)
            handler = {
                LeaseRequest: stage.decode_service.on_lease_request, LeaseDrop: stage.decode_service.on_drop,
                BlocksOffer: stage.decode_service.on_offer, HandOff: stage.decode_service.on_hand_off,
            }[type(message)]  # fmt: skip
            handler(stage.p0, message)
        hands = set()
        for event in await stage.settle():
            if isinstance(event, BlocksOffered):
                assert event.group == group
                assert event.indices
                assert all(index < full for index in event.indices)
            elif isinstance(event, SampleOffered):
                assert event.key in (group, group + 1)
                assert event.key not in hands
                assert event.token < 300
                assert event.tail_rows == 2
                hands.add(event.key)
        await stage.close()

    run_sim(main())
