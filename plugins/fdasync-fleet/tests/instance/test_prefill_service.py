"""The prefill side's service: every action ends in one event, whatever the other side does."""

from __future__ import annotations

import numpy as np
import pytest
from fdasync_fleet.instance.prefill_service import PrefillService
from fdasync_fleet.messages import (
    BlocksOffer,
    BlocksTaken,
    HandOff,
    HandOffTaken,
    LeaseAnswer,
    LeaseDrop,
    LeaseRequest,
    ScoredPrompt,
)

from fdasync.errors import InvariantBroken, PeerRefused, PeerUnreachable
from fdasync.events.actions import AskLease, GiveUpLease, HandOver, SendBlocks
from fdasync.events.catalog import BlocksSent, HandedOver, LeaseAnswered, LeaseLost
from fdasync.runner.base import PromptScores
from fdasync.testing.sim.loop import run_sim
from tests.support.pd_stage import CALLER, NAMESPACE, Stage


class Asker(Stage):
    def __init__(self):
        super().__init__()
        self.prefill_service = PrefillService(self.context)
        self.d0 = self.peer("d0")

    def ask(self, group=1, attempt=0, n=1, **params):
        self.hand_off(group, n=n, **params)
        now = self.loop.time()
        self.prefill_service.ask(
            AskLease(group, attempt, "d0", NAMESPACE, (b"k" * 16,) * 2, now + 1, now + 5, now + 60, 3.0)
        )

    def answer(self, verdict, group=1, attempt=0, peer=None, **fields):
        self.prefill_service.on_answer(peer or self.d0, LeaseAnswer(f"r{group}", attempt, verdict, **fields))

    async def grant(self, group=1, n=1, **params):
        self.ask(group, n=n, **params)
        await self.settle()
        self.answer("granted", group)
        await self.settle()

    def send(self, offer=7, group=1, attempt=0):
        self.prefill_service.send(SendBlocks(offer, group, attempt, "d0", (0, 1), (2, 3), (), ()))

    def hand(self, offer=8, index=0, group=1, attempt=0):
        key = group + index
        self.prefill_service.hand_over(
            HandOver(offer, group, attempt, "d0", key, index, 55, 2, 2, 4, -1, -1, (0, 0, 0))
        )

    def drop(self, group=1, attempt=0, peer=None):
        self.prefill_service.on_drop(peer or self.d0, LeaseDrop(f"r{group}", attempt, "no such lease"))


def played(test):
    """Run a test that takes an `Asker` in virtual time; nothing is left on offer at its end."""

    def run():
        async def main():
            stage = Asker()
            await test(stage)
            stage.prefill_service.close()
            await stage.settle()
            assert stage.transports.on_offer == []
            assert stage.prefill_service._by_name == {}
            assert stage.context.tasks() == []
            await stage.close()

        run_sim(main())

    run.__name__ = test.__name__
    return run


def only(events):
    (event,) = events
    return event


@played
async def test_a_question_carries_the_request_and_is_answered(stage):
    stage.ask(logprobs="raw")
    assert await stage.settle() == []
    asked = only(stage.d0.sent)
    assert isinstance(asked, LeaseRequest)
    assert (asked.request, asked.attempt, asked.ttl_s) == ("r1", 0, 3.0)
    assert asked.total_s == pytest.approx(60, abs=0.1)
    wanted = asked.wanted
    assert (wanted.caller, wanted.namespace, len(wanted.tokens), wanted.params.seed) == (CALLER, NAMESPACE, 40, 0)
    stage.answer("granted", prefix_blocks=2)
    event = only(await stage.settle())
    assert (event.group, event.attempt, event.granted, event.prefix_blocks) == (1, 0, True, 2)
    assert stage.prefill_service.leases(stage.d0) == (("r1", 0),)


@played
async def test_a_denial_says_when_to_ask_again_and_is_not_answered(stage):
    stage.ask()
    await stage.settle()
    stage.answer("denied", retry_after_s=0.5, reason="full")
    event = only(await stage.settle())
    assert (event.granted, event.retry_after_s, event.reason, event.silent) == (False, 0.5, "full", False)
    assert stage.prefill_service.leases(stage.d0) == ()


@played
async def test_silence_is_told_apart_from_standing_in_line(stage):
    stage.ask(1)
    stage.ask(2)
    await stage.settle()
    stage.answer("queued", 1)
    event = only(await stage.settle(1.0))
    assert (event.group, event.granted, event.silent) == (2, False, True)
    event = only(await stage.settle(4.0))
    assert (event.group, event.granted, event.silent) == (1, False, False)
    # either way the other side is told
    assert [drop.request for drop in stage.d0.take(LeaseDrop)] == ["r2", "r1"]
    # and what it says later counts for nothing
    stage.answer("granted", 1)
    stage.answer("granted", 2)
    assert await stage.settle() == []
    assert stage.prefill_service.late == 2


@played
async def test_an_instance_that_is_away_busy_or_refuses_is_answered_for_at_once_or_in_time(stage):
    stage.d0.is_up = False
    stage.ask(1)
    event = only(await stage.settle(1.1))
    assert (event.granted, event.silent) == (False, True)
    stage.d0.error = PeerRefused("d0", "shape", "differs")
    stage.ask(2)
    event = only(await stage.settle())
    assert (event.retry_after_s, event.silent) == (-1.0, False)
    stage.d0.error = PeerUnreachable("d0", "gone")
    stage.ask(3)
    assert only(await stage.settle()).silent
    stage.d0.is_up = stage.d0.busy = True
    stage.ask(4)
    assert only(await stage.settle()).silent
    assert stage.d0.sent == []


@played
async def test_an_instance_that_comes_up_in_time_is_asked(stage):
    stage.d0.is_up, stage.d0.up_after = False, 0.5
    stage.ask()
    await stage.settle(0.6)
    assert len(stage.d0.take(LeaseRequest)) == 1
    stage.answer("granted")
    assert only(await stage.settle()).granted


@played
async def test_a_peer_lost_at_every_stage(stage):
    stage.ask(1)
    await stage.settle()
    stage.prefill_service.on_lost(stage.d0, "gone")
    event = only(await stage.settle())
    assert (type(event), event.granted, event.silent) == (LeaseAnswered, False, True)
    await stage.grant(2)
    stage.send(7, 2)
    stage.hand(8, group=2)
    await stage.settle()
    stage.prefill_service.on_lost(stage.d0, "gone")
    events = await stage.settle()
    assert {type(event) for event in events} == {LeaseLost, BlocksSent, HandedOver}
    assert len(events) == 3
    assert stage.transports.on_offer == []
    stage.prefill_service.on_lost(stage.d0, "gone")
    assert await stage.settle() == []


@played
async def test_a_drop_before_the_answer_is_a_denial(stage):
    stage.ask()
    await stage.settle()
    stage.drop()
    event = only(await stage.settle())
    assert (event.granted, event.silent, event.reason) == (False, False, "no such lease")


@played
async def test_a_drop_right_behind_the_grant_ends_in_one_answer(stage):
    stage.ask()
    await stage.settle()
    stage.answer("granted")
    stage.drop()
    responses = [event for event in await stage.settle() if isinstance(event, LeaseAnswered)]
    assert [answer.granted for answer in responses] == [False]


@played
async def test_giving_up_at_every_stage_tells_the_other_side_once(stage):
    stage.ask(1)
    await stage.settle()
    stage.prefill_service.give_up(GiveUpLease(1, 0, "d0"))
    assert [event.granted for event in await stage.settle()] == [False]
    await stage.grant(2)
    stage.send(7, 2)
    stage.prefill_service.give_up(GiveUpLease(2, 0, "d0"))
    stage.prefill_service.give_up(GiveUpLease(2, 0, "d0"))
    event = only(await stage.settle())
    assert (type(event), event.offer, event.taken) == (BlocksSent, 7, False)
    assert [drop.request for drop in stage.d0.take(LeaseDrop)] == ["r1", "r2"]
    # blocks whose checksums were still being made are never offered
    assert stage.d0.take(BlocksOffer) == []


@played
async def test_blocks_are_offered_until_they_are_taken(stage):
    await stage.grant()
    stage.send()
    assert await stage.settle() == []
    offer = only(stage.d0.take(BlocksOffer))
    assert (offer.offer, [ref.index for ref in offer.blocks]) == (7, [0, 1])
    assert len(stage.transports.on_offer) == 2
    assert all(len(ref.parts) == len(ref.checksums) == 1 for ref in offer.blocks)
    stage.prefill_service.on_taken(stage.d0, BlocksTaken("r1", 0, 99))
    assert await stage.settle() == []
    stage.prefill_service.on_taken(stage.d0, BlocksTaken("r1", 0, 7))
    event = only(await stage.settle())
    assert (event.offer, event.taken) == (7, True)
    assert stage.transports.on_offer == []
    stage.prefill_service.on_taken(stage.d0, BlocksTaken("r1", 0, 7))
    assert await stage.settle() == []


@played
async def test_hand_overs_carry_token_log_probs_and_tail(stage):
    await stage.grant(n=2, logprobs="both")
    # computed again under new weights: the last one counts
    stage.samples[1][1].raw = [-9.0, -0.5]
    stage.hand(8, 0)
    stage.hand(9, 1)
    await stage.settle()
    first, second = stage.d0.take(HandOff)
    assert (first.index, first.token, first.raw, first.processed, first.tail.index, first.tail_rows) == (
        0, 55, -0.5, -0.25, 2, 2,
    )  # fmt: skip
    stage.prefill_service.on_hand_taken(stage.d0, HandOffTaken("r1", 0, 1))
    event = only(await stage.settle())
    assert (event.offer, event.taken) == (second.offer, True)
    assert stage.prefill_service.take_moved("r1") == ""
    stage.prefill_service.on_hand_taken(stage.d0, HandOffTaken("r1", 0, 1))
    stage.prefill_service.on_hand_taken(stage.d0, HandOffTaken("r1", 0, 5))
    assert await stage.settle() == []
    stage.prefill_service.on_hand_taken(stage.d0, HandOffTaken("r1", 0, 0))
    assert only(await stage.settle()).offer == 8
    # all of it is there: nothing to renew, nothing to give up
    assert stage.prefill_service.leases(stage.d0) == ()
    assert stage.d0.take(LeaseDrop) == []
    assert stage.prefill_service.take_moved("r1") == "d0"
    assert stage.prefill_service.take_moved("r1") == ""


@played
async def test_what_is_sent_under_a_lease_that_is_over_comes_back(stage):
    await stage.grant()
    stage.drop()
    await stage.settle()
    stage.send()
    stage.hand()
    assert sorted((type(event).__name__, event.taken) for event in await stage.settle()) == [
        ("BlocksSent", False),
        ("HandedOver", False),
    ]


@played
async def test_the_first_samples_hand_over_carries_the_log_probs_of_the_prompt(stage):
    await stage.grant(n=2, prompt_logprobs_start=4)
    scores = stage.samples[1][0].scores
    for start in (4, 7):
        scores.add(PromptScores(1, start, np.full(3, -1.0, "<f4").tobytes()))
    stage.hand(8, 1)
    await stage.settle()
    assert stage.d0.take(ScoredPrompt) == []
    stage.hand(9, 0)
    await stage.settle()
    # in the order of positions, and before the hand-over
    kinds = [type(message) for message in stage.d0.sent if type(message) in (ScoredPrompt, HandOff)]
    assert kinds[-3:] == [ScoredPrompt, ScoredPrompt, HandOff]
    runs = stage.d0.take(ScoredPrompt)
    found = [(run.request, run.attempt, run.first, len(run.logprobs)) for run in runs]
    assert found == [("r1", 0, 4, 12), ("r1", 0, 7, 12)]


@played
async def test_a_hand_over_whose_lease_ends_while_its_checksums_are_made_shows_nothing(stage):
    await stage.grant()
    stage.hand()
    stage.prefill_service.give_up(GiveUpLease(1, 0, "d0"))
    event = only(await stage.settle())
    assert (type(event), event.offer, event.taken) == (HandedOver, 8, False)
    assert stage.d0.take(HandOff) == []
    assert stage.transports.on_offer == [], "it can be read, and nobody takes it back"


@played
async def test_a_sample_that_ended_in_the_same_turn_is_not_handed_over(stage):
    await stage.grant()
    del stage.samples[1]
    stage.hand()
    assert [event.taken for event in await stage.settle()] == [False]


@played
async def test_words_of_strangers_count_for_nothing(stage):
    await stage.grant()
    stage.send()
    stage.hand()
    await stage.settle()
    stranger = stage.peer("d1")
    stage.answer("denied", peer=stranger)
    stage.drop(peer=stranger)
    stage.prefill_service.on_taken(stranger, BlocksTaken("r1", 0, 7))
    stage.prefill_service.on_hand_taken(stranger, HandOffTaken("r1", 0, 0))
    stage.prefill_service.on_taken(stage.d0, BlocksTaken("r1", 1, 7))
    stage.prefill_service.on_taken(stage.d0, BlocksTaken("unheard of", 0, 7))
    assert await stage.settle() == []
    assert stage.prefill_service.late == 6


@played
async def test_a_busy_peer_is_waited_for_and_a_lost_one_is_not(stage):
    await stage.grant()
    stage.d0.busy = True
    stage.send()
    stage.hand()
    assert await stage.settle(1.0) == []
    stage.d0.busy = False
    await stage.settle()
    assert len(stage.d0.take(BlocksOffer)) == len(stage.d0.take(HandOff)) == 1
    stage.d0.is_up = False
    stage.send(9)
    events = await stage.settle()
    assert sorted(type(event).__name__ for event in events) == ["BlocksSent", "BlocksSent", "HandedOver", "LeaseLost"]


@played
async def test_closing_ends_everything(stage):
    await stage.grant(1)
    stage.send()
    stage.ask(2)
    await stage.settle()
    stage.prefill_service.close()
    events = await stage.settle()
    assert sorted(type(event).__name__ for event in events) == ["BlocksSent", "LeaseAnswered", "LeaseLost"]


@played
async def test_a_question_for_an_unknown_request_is_a_defect(stage):
    with pytest.raises(InvariantBroken):
        stage.prefill_service.ask(AskLease(77, 0, "d0", NAMESPACE, (), 1.0, 5.0, 60.0, 3.0))
