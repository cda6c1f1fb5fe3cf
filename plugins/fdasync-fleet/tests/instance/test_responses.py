"""What callers are told of their requests."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import msgspec
from fdasync_fleet.instance.responses import Responses
from fdasync_fleet.messages import (
    Abort,
    Answered,
    Ended,
    Failed,
    Moved,
    Outputs,
    Progress,
    PromptTokens,
    SampleEnd,
)
from fdasync_fleet.results import RUN_TOKENS

from fdasync.errors import BadInput, EngineBusy
from fdasync.events.actions import FinishRequest
from fdasync.request import GenerateRequest, HandOffTarget, SamplingParams
from fdasync.testing.sim.loop import run_sim
from tests.engine.output_stage import OutputStage
from tests.support.helpers import make_capacity
from tests.support.pd_stage import FakePeer, Stage


class Desk(Stage):
    """Answers to one caller; requests are the test's, by name."""

    def __init__(self):
        super().__init__()
        self.caller = FakePeer("router", "router")
        self.callers[self.caller.incarnation] = self.caller
        self.moved = {}
        self.requests = {}
        self.aborted = []
        self.refusal = None
        self.context.frontend = SimpleNamespace(
            submit=self.submit, find=self.requests.get, abort=self.aborted.append,
            result=lambda request: request.result(make_capacity()),
        )  # fmt: skip
        self.responses = Responses(self.context, SimpleNamespace(take_moved=lambda name: self.moved.pop(name, "")))

    async def submit(self, ask):
        if self.refusal is not None:
            raise self.refusal
        return self.requests[ask.request_id].request

    def make(self, name="r", *, streams=True, hand_off=False, n=1):
        """A request in a hub of its own."""
        stage = self.requests[name] = OutputStage(n=n, streams=streams)
        stage.request.request_id = name
        ask = GenerateRequest(
            prompt=(1, 2, 3), params=SamplingParams(n=n), streams=streams, request_id=name, priority=0, deadline_s=None,
            routing=None, start=0, cache_salt="",
            hand_off=HandOffTarget(name=name, caller=b"", decoders=()) if hand_off else None,
        )  # fmt: skip
        stage.request.asked = (ask, None)
        return stage, ask

    def begin(self, name="r", **fields):
        stage, ask = self.make(name, **fields)
        self.responses.submit(self.caller, name, ask)
        return stage

    def tokens(self):
        return [
            (piece.index, piece.token_ids) for kv_events in self.caller.take(Progress) for piece in kv_events.pieces
        ]


def played(test):
    def run():
        async def main():
            stage = Desk()
            await test(stage)
            assert stage.responses.num_live == 0
            assert stage.context.tasks() == []
            await stage.close()

        run_sim(main())

    run.__name__ = test.__name__
    return run


@played
async def test_tokens_come_as_they_are_made_and_then_the_end(desk):
    stage = desk.begin()
    await desk.settle()
    stage.emit(5)
    await desk.settle()
    stage.emit(6)
    await desk.settle()
    assert desk.tokens() == [(0, (5,)), (0, (6,))]
    stage.finish((5, 6))
    await desk.settle()
    (answer,) = desk.caller.take(Answered)
    assert (answer.request, answer.end.request, answer.end.finish_reason) == ("r", "r", "length")
    assert desk.responses.num_live == 0


@played
async def test_the_end_of_a_request_leaves_the_callers_other_one_its_tokens(desk):
    first, second = desk.begin("a"), desk.begin("b")
    await desk.settle()
    first.finish(())
    await desk.settle()
    assert [answer.request for answer in desk.caller.take(Answered)] == ["a"]
    second.emit(6)
    await desk.settle()
    assert desk.tokens()[-1] == (0, (6,))
    second.finish((6,))
    await desk.settle()


@played
async def test_a_sample_is_sent_once_and_when_it_has_ended(desk):
    stage = desk.begin(n=3)
    await desk.settle()
    for count, index in enumerate((2, 0), 1):
        stage.emit(5, keys=[index])
        stage.finish((5,), "length", index)
        await desk.settle()
        ends = desk.caller.take(SampleEnd)
        assert (len(ends), ends[-1].index, ends[-1].num_tokens) == (count, index, 1)
        assert desk.caller.take(Ended) == []
    stage.finish((), "abort", 1)
    await desk.settle()
    for kind in (SampleEnd, Outputs):
        assert [message.index for message in desk.caller.take(kind)] == [2, 0, 1]
    # its caller sent the prompt's tokens
    assert (len(desk.caller.take(PromptTokens)), len(desk.caller.take(Ended))) == (0, 1)


@played
async def test_samples_wait_for_a_busy_caller_and_none_is_lost(desk):
    stage = desk.begin(n=3)
    await desk.settle()
    desk.caller.busy = True
    for index in range(3):
        stage.finish((5,), "length", index)
        await desk.settle()
    assert desk.caller.sent == []
    desk.caller.busy = False
    await desk.settle()
    assert sorted(sample.index for sample in desk.caller.take(SampleEnd)) == [0, 1, 2]
    assert isinstance(desk.caller.sent[-1], Ended)


@played
async def test_a_caller_that_goes_away_while_samples_are_sent_gets_no_end(desk):
    stage = desk.begin(n=2)
    await desk.settle()
    send = desk.caller.send

    def gone(message, payload=None):
        desk.caller.is_up = desk.caller.is_up and not isinstance(message, Outputs)
        send(message, payload)

    desk.caller.send = gone
    stage.finish((5,), "length", 0)
    await desk.settle()
    assert not desk.caller.is_up, "no sample was sent"
    stage.finish((5,), "length", 1)
    await desk.settle()
    assert desk.caller.take(Ended) == []


@played
async def test_one_that_wants_only_the_end_gets_only_that(desk):
    stage = desk.begin(streams=False)
    await desk.settle()
    stage.finish((5, 6))
    await desk.settle()
    # in one message, and without the prompt, whose tokens its caller sent
    (answer,) = desk.caller.sent
    assert isinstance(answer, Answered)
    assert answer.outputs.token_ids == array("i", [5, 6]).tobytes()
    assert (answer.end.num_tokens, answer.end.finish_reason) == (2, "length")


@played
async def test_a_busy_caller_gets_fewer_longer_deltas_and_every_token_once(desk):
    stage = desk.begin()
    await desk.settle()
    desk.caller.busy = True
    for token in range(5):
        stage.emit(token)
        await desk.settle()
    desk.caller.busy = False
    await desk.settle()
    assert desk.tokens() == [(0, (0, 1, 2, 3, 4))]
    stage.finish(range(5))
    await desk.settle()
    assert [tokens for _, tokens in desk.tokens() if tokens] == [(0, 1, 2, 3, 4)]
    assert len(desk.caller.take(Answered)) == 1


@played
async def test_the_same_request_again_is_served_once(desk):
    stage = desk.begin()
    desk.responses.submit(desk.caller, "r", stage.request.asked[0])
    await desk.settle()
    assert desk.responses.num_live == 1
    stage.finish((5,))
    await desk.settle()
    assert len(desk.caller.take(Answered)) == 1


@played
async def test_the_prompt_of_a_text_comes_before_the_first_sample_and_of_one_taken_over_too(desk):
    for name, taken_over in (("text", False), ("over", True)):
        stage, ask = desk.make(name, streams=False)
        if taken_over:
            desk.context.links.find = lambda incarnation: desk.callers[incarnation]
            desk.responses.follow(stage.request, desk.caller.incarnation, name)
        else:
            desk.responses.submit(desk.caller, name, msgspec.structs.replace(ask, prompt="a text"))
        await desk.settle()
        desk.caller.sent.clear()
        stage.finish((5,))
        await desk.settle()
        assert [type(message) for message in desk.caller.sent] == [PromptTokens, Answered]


@played
async def test_two_samples_or_one_of_many_tokens_come_in_parts(desk):
    for name, n, tokens in (("two", 2, (5,)), ("long", 1, range(RUN_TOKENS + 1))):
        desk.begin(name, n=n, streams=False)
        await desk.settle()
        desk.caller.sent.clear()
        for index in range(n):
            desk.requests[name].finish(tokens, "length", index)
        await desk.settle()
        assert desk.caller.take(Answered) == []
        assert len(desk.caller.take(SampleEnd)) == n
        assert len(desk.caller.take(Outputs)) == 2
        assert isinstance(desk.caller.sent[-1], Ended)


@played
async def test_what_the_frontend_refuses_is_answered(desk):
    desk.refusal = BadInput("max_tokens", "too many", limit="9", hint="fewer")
    desk.begin("one")
    desk.refusal = BadInput("max_tokens", "too many", limit="9", hint="fewer")
    await desk.settle()
    desk.refusal = EngineBusy(1, 1)
    desk.begin("two")
    await desk.settle()
    one, two = desk.caller.take(Failed)
    assert (one.request, one.error, one.field, one.limit, one.hint, one.retriable) == (
        "one", "BadInput", "max_tokens", "9", "fewer", False,
    )  # fmt: skip
    assert (two.error, two.retriable) == ("EngineBusy", True)


@played
async def test_one_that_went_elsewhere_is_told_of_where(desk):
    stage = desk.begin(hand_off=True, n=2)
    await desk.settle()
    desk.moved["r"] = "ipc:///run/d0"
    stage.finish((5,), "handed_over", 0)
    await desk.settle()
    assert desk.caller.sent == []
    stage.finish((5,), "handed_over", 1)
    await desk.settle()
    assert desk.caller.sent == [Moved("r", "ipc:///run/d0")]


@played
async def test_a_request_that_no_instance_took_may_be_sent_again(desk):
    stage = desk.begin(hand_off=True)
    await desk.settle()
    stage.processor.finish(FinishRequest(0, "no_lease", (), 0, (0, 0, 0), (), note="d0: full"))
    await desk.settle()
    (words,) = desk.caller.sent
    assert (words.error, words.retriable) == ("InstanceLost", True)
    assert "d0: full" in words.problem


@played
async def test_what_never_began_here_is_told_of_by_whoever_sent_it(desk):
    stage, _ = desk.make()
    desk.responses.follow(stage.request, desk.caller.incarnation, "r")
    stage.finish((), "lease_lost")
    await desk.settle()
    assert desk.caller.sent == []


@played
async def test_what_is_lost_though_it_began_is_told_as_lost(desk):
    stage, _ = desk.make(n=2)
    desk.responses.follow(stage.request, desk.caller.incarnation, "r")
    desk.responses.lose(stage.request)
    assert desk.aborted == [stage.request]
    stage.finish((5,), "abort", 0)
    stage.finish((), "lease_lost", 1)
    await desk.settle()
    (words,) = [message for message in desk.caller.sent if not isinstance(message, Progress)]
    assert (type(words), words.error, words.retriable) == (Failed, "InstanceLost", True)


@played
async def test_aborts_find_their_request_and_others_find_nothing(desk):
    stage = desk.begin()
    # still in the frontend
    desk.responses.abort(desk.caller, Abort("r"))
    await desk.settle()
    assert desk.aborted
    desk.responses.abort(FakePeer("stranger"), Abort("r"))
    desk.responses.abort(desk.caller, Abort("unheard of"))
    count = len(desk.aborted)
    desk.responses.on_lost(FakePeer("stranger"))
    assert len(desk.aborted) == count
    desk.caller.is_up = False
    desk.responses.on_lost(desk.caller)
    assert desk.aborted[-1] is stage.request
    stage.finish((), "abort")
    await desk.settle()
    assert desk.caller.take(Ended) == []
