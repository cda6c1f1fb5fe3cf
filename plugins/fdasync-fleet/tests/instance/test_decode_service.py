"""The decode side's service: what peers say is checked, and every action ends in one event."""

from __future__ import annotations

import msgspec
import pytest
from fdasync_fleet.messages import BlocksTaken, LeaseAnswer, LeaseDrop

from fdasync.cache.store.base import Outcome
from fdasync.errors import BadInput, DeadlineExceeded, DuplicateRequestId, EngineBusy
from fdasync.events.actions import AnswerLease, DropLease
from fdasync.events.catalog import BlocksOffered, BlocksReceived, LeaseAsked, LeaseGivenUp, LeasesRenewed
from fdasync.request import Grammar, SamplingParams
from fdasync.testing.sim.loop import run_sim
from tests.support.pd_stage import CALLER, DecodeStage, ref


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


# -- questions


@played
async def test_a_question_reaches_the_scheduler_and_its_answer_the_asker(stage):
    stage.decode_service.on_lease_request(stage.p0, stage.question(n=2))
    event = only(await stage.settle())
    assert (event.peer, event.ttl_s, len(event.requests)) == ("p0", 3.0, 2)
    assert event.over_by == pytest.approx(60, abs=0.1)
    ((request, caller, name),) = stage.followed
    assert (request.request_id, caller, name) == ("r1", CALLER, "r1")
    stage.decode_service.answer(AnswerLease(100, "queued"))
    stage.decode_service.answer(AnswerLease(100, "granted", 2))
    assert [answer.prefix_blocks for answer in stage.p0.take(LeaseAnswer)] == [0, 2]
    # the same question gets the same answer, and reaches nobody
    stage.decode_service.on_lease_request(stage.p0, stage.question(n=2))
    assert await stage.settle() == []
    assert [verdict for verdict, _ in stage.responses()] == ["queued", "granted", "granted"]
    assert stage.taken == ["r1"]


@played
async def test_a_question_that_is_not_answered_yet_is_not_asked_twice(stage):
    stage.ask()
    stage.decode_service.on_lease_request(stage.p0, stage.question())
    assert await stage.settle() == []
    assert stage.p0.sent == []


@played
async def test_a_denied_question_may_be_asked_again_under_another_attempt(stage):
    group = stage.ask()
    stage.decode_service.answer(AnswerLease(group, "denied", 0, 0.2, "full"))
    assert stage.responses() == [("denied", 0.2)]
    assert stage.ask(attempt=1) is not None


@played
async def test_questions_that_make_no_sense_are_denied_for_good(stage):
    good = stage.question()
    for wanted in (
        msgspec.structs.replace(good.wanted, tokens=b"12345"),
        msgspec.structs.replace(good.wanted, params=SamplingParams()),
        msgspec.structs.replace(good.wanted, block_keys=()),
        msgspec.structs.replace(good.wanted, block_keys=(b"k" * 16,) * 3),
        # the right number, of another prompt, under another salt, in another order
        msgspec.structs.replace(good.wanted, block_keys=stage.question(tokens=range(5, 15)).wanted.block_keys),
        msgspec.structs.replace(good.wanted, salt="x"),
        msgspec.structs.replace(good.wanted, block_keys=good.wanted.block_keys[::-1]),
    ):
        stage.decode_service.on_lease_request(stage.p0, msgspec.structs.replace(good, wanted=wanted))
    assert await stage.settle() == []
    assert stage.responses() == [("denied", -1.0)] * 7
    assert stage.taken == []


@played
async def test_identities_of_a_long_prompt_are_checked_in_slices_to_the_last(stage):
    long = stage.question(tokens=[number % 200 for number in range(4 * 1000)])
    keys = long.wanted.block_keys
    bad = msgspec.structs.replace(long.wanted, block_keys=(*keys[:-1], b"k" * 16))
    stage.decode_service.on_lease_request(stage.p0, msgspec.structs.replace(long, wanted=bad))
    assert await stage.settle() == []
    assert stage.responses() == [("denied", -1.0)]
    stage.decode_service.on_lease_request(stage.p0, msgspec.structs.replace(long, attempt=1))
    assert isinstance(only(await stage.settle()), LeaseAsked)
    assert len(stage.taken) == 1


@played
async def test_a_question_whose_asker_is_lost_while_it_is_checked_takes_no_room(stage):
    long = stage.question(tokens=[number % 200 for number in range(4 * 1000)])
    stage.decode_service.on_lease_request(stage.p0, long)
    stage.p0.is_up = False
    stage.decode_service.on_lost(stage.p0, "gone")
    assert await stage.settle() == []
    assert stage.taken == []
    assert len(stage.decode_service._leases) == 0


@played
async def test_what_the_frontend_refuses_is_denied_for_good_or_for_now(stage):
    for refusal, for_good in (
        (BadInput("prompt", "too long"), True),
        (EngineBusy(1, 1), False),
        # an earlier attempt of the same request ends in this turn
        (DuplicateRequestId("r1"), False),
    ):
        stage.refusal = refusal
        assert stage.ask() is None
        verdict, retry_after_s = stage.responses()[-1]
        assert verdict == "denied"
        assert (retry_after_s < 0) == for_good


@played
async def test_a_grammar_is_checked_before_the_request_is_taken(stage):
    grammar = Grammar("regex", "%2")
    asked = stage.question(grammar=grammar)
    stage.decode_service.on_lease_request(stage.p0, asked)
    stage.decode_service.on_lease_request(stage.p0, asked)
    assert stage.taken == []
    assert isinstance(only(await stage.settle()), LeaseAsked)
    # a check may take longer than an instance may be silent
    assert [verdict for verdict, _ in stage.responses()] == ["queued"]
    assert stage.grammars == [grammar]
    for attempt, refusal in ((1, BadInput("grammar", "of another library")), (2, DeadlineExceeded("checking", 1.0))):
        stage.refusal = refusal
        stage.decode_service.on_lease_request(stage.p0, msgspec.structs.replace(asked, attempt=attempt))
        assert await stage.settle() == []
    assert stage.responses()[1:] == [("queued", 0.0), ("denied", -1.0), ("queued", 0.0), ("denied", 0.5)]
    assert stage.taken == ["r1"]


@played
async def test_without_a_link_to_the_router_it_is_asked_again_soon(stage):
    assert stage.ask(caller=b"x" * 16) is None
    ((verdict, retry_after_s),) = stage.responses()
    assert (verdict, retry_after_s > 0) == ("denied", True)


@played
async def test_an_instance_that_drains_takes_nothing(stage):
    stage.context.draining = True
    assert stage.ask() is None
    assert stage.responses() == [("denied", -1.0)]


@played
async def test_a_cancel_that_overtakes_its_question_is_remembered(stage):
    stage.decode_service.on_drop(stage.p0, LeaseDrop("r1", 0, "not wanted"))
    assert stage.ask() is None
    assert stage.responses() == [("denied", -1.0)]
    assert stage.ask(attempt=1) is not None


@played
async def test_names_belong_to_the_sender_that_used_them(stage):
    first = stage.grant()
    second = stage.ask(peer=stage.p1)
    assert first != second
    stage.decode_service.on_drop(stage.p1, LeaseDrop("r1", 0, "not wanted"))
    assert only(await stage.settle()).groups == (second,)
    stage.decode_service.on_heartbeat(stage.p1, [("r1", 0), ("other", 3)])
    stage.decode_service.on_heartbeat(stage.p0, [("r1", 0), ("other", 3)])
    event = only(await stage.settle())
    assert (type(event), event.groups) == (LeasesRenewed, (first,))


@played
async def test_a_lost_peer_takes_its_leases_with_it(stage):
    first, second = stage.grant(name="r1"), stage.ask(name="r2")
    stage.ask(name="r3", peer=stage.p1)
    stage.decode_service.on_lost(stage.p0, "gone")
    event = only(await stage.settle())
    assert (type(event), event.groups) == (LeaseGivenUp, (first, second))
    assert stage.transports.forgotten == [stage.p0.hello.sources]
    # what the scheduler says of them after that has nobody to go to
    stage.decode_service.answer(AnswerLease(second, "granted"))
    stage.decode_service.drop(DropLease(first, "late"))
    assert [verdict for verdict, _ in stage.responses()] == ["granted"]
    assert stage.p0.take(LeaseDrop) == []


# -- blocks


@played
async def test_offers_reach_the_scheduler_and_are_acknowledged_when_all_of_them_is_here(stage):
    group = stage.grant()
    stage.offer(7, 0, 1)
    event = only(await stage.settle())
    assert (type(event), event.group, event.offer, event.indices) == (BlocksOffered, group, 7, (0, 1))
    stage.receive(0, group, 7, 0)
    event = only(await stage.settle())
    assert (type(event), event.receive_id, event.arrived, event.nbytes) == (BlocksReceived, 0, (True,), 64)
    assert stage.p0.take(BlocksTaken) == []
    stage.receive(1, group, 7, 1)
    await stage.settle()
    assert stage.p0.take(BlocksTaken) == [BlocksTaken("r1", 0, 7)]
    sources, copy_specs, deadline = stage.transports.received[0]
    assert (sources, deadline) == (stage.p0.hello.sources, 99.0)
    assert copy_specs[0].ref_parts == ref(0).parts


@played
async def test_blocks_that_do_not_arrive_are_told_and_not_acknowledged(stage):
    group = stage.grant()
    stage.offer(7, 0, 1)
    stage.transports.outcomes = [Outcome("done"), Outcome("damaged", "checksum")]
    stage.receive(0, group, 7, 0, 1)
    event = (await stage.settle())[-1]
    assert (event.arrived, event.problem) == ((True, False), "checksum")
    assert stage.p0.take(BlocksTaken) == []


@played
async def test_a_receive_ends_also_when_its_lease_is_over(stage):
    group = stage.grant()
    stage.offer(7, 0)
    stage.receive(0, group, 7, 0)
    stage.decode_service.on_drop(stage.p0, LeaseDrop("r1", 0, "not wanted"))
    stage.receive(1, group, 7, 0)
    stage.receive(2, 999, 7, 0)
    ends = {event.receive_id: event.arrived for event in await stage.settle() if isinstance(event, BlocksReceived)}
    assert sorted(ends) == [0, 1, 2]
    assert ends[1] == ends[2] == (False,)
    assert stage.p0.take(BlocksTaken) == []


@pytest.mark.parametrize("bad", ["twice", "empty", "same block twice", "beyond", "before the grant", "too many"])
def test_offers_that_make_no_sense_end_the_lease(bad):
    async def main():
        stage = DecodeStage()
        group = stage.ask() if bad == "before the grant" else stage.grant()
        if bad != "before the grant":
            stage.offer(7, 0)
            await stage.settle()
        if bad == "too many":
            stage.offer(6, 1)
            await stage.settle()
        indices = {
            "before the grant": (0,),
            "too many": (1,),
            "twice": (1,),
            "empty": (),
            "same block twice": (1, 1),
            "beyond": (2,),
        }[bad]
        stage.offer(7 if bad == "twice" else 8, *indices)
        event = only(await stage.settle())
        assert (type(event), event.groups) == (LeaseGivenUp, (group,))
        assert len(stage.p0.take(LeaseDrop)) == 1
        await stage.close()

    run_sim(main())


@played
async def test_words_about_unknown_leases_are_answered_with_a_drop(stage):
    stage.grant()
    stage.offer(7, 0, peer=stage.p1)
    stage.offer(7, 0, attempt=3)
    stage.hand(name="unheard of")
    assert await stage.settle() == []
    assert len(stage.p1.take(LeaseDrop)) == 1
    assert len(stage.p0.take(LeaseDrop)) == 2
    assert stage.decode_service.late == 3
