"""What callers are told of their requests, and routers of an instance's blocks."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

from fdasync.errors import BadInput, EngineBusy
from fdasync.events.actions import FinishRequest, TellBlocks
from fdasync.pd.instance.kv_events import KvEvents
from fdasync.pd.instance.responses import Responses
from fdasync.pd.messages import Abort, Ended, Failed, KvEventBatch, Moved, Outputs, Progress
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
    (end,) = desk.caller.take(Ended)
    assert (end.request, end.samples[0].finish_reason) == ("r", "length")
    assert desk.responses.num_live == 0


@played
async def test_one_that_wants_only_the_end_gets_only_that(desk):
    stage = desk.begin(streams=False)
    await desk.settle()
    stage.finish((5, 6))
    await desk.settle()
    assert [type(message) for message in desk.caller.sent] == [Outputs, Ended]
    assert desk.caller.sent[0].token_ids == array("i", [5, 6]).tobytes()


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
    assert len(desk.caller.take(Ended)) == 1


@played
async def test_the_same_request_again_is_served_once(desk):
    stage = desk.begin()
    desk.responses.submit(desk.caller, "r", stage.request.asked[0])
    await desk.settle()
    assert desk.responses.num_live == 1
    stage.finish((5,))
    await desk.settle()
    assert len(desk.caller.take(Ended)) == 1


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


# -- events of blocks


def kv_events_of(peer):
    return [(kv_events.reset, kv_events.added, kv_events.removed) for kv_events in peer.take(KvEventBatch)]


def test_routers_are_told_of_blocks_together_and_late_comers_of_all():
    async def main():
        stage = Stage()
        keys = [bytes([number]) * 16 for number in range(4)]
        version = "3", 3
        kv_events = KvEvents(stage.context, lambda: version)
        early, late = FakePeer("one", "router"), FakePeer("two", "router")
        kv_events.add(early)
        await stage.settle(0.1)
        assert kv_events_of(early) == [(True, (), ())]
        kv_events.tell(TellBlocks((keys[0], keys[1]), ()))
        kv_events.tell(TellBlocks((keys[2],), (keys[0],)))
        await stage.settle(0.1)
        assert kv_events_of(early)[1:] == [(False, (keys[1], keys[2]), (keys[0],))]
        kv_events.add(late)
        await stage.settle(0.1)
        assert kv_events_of(late) == [(True, (keys[1], keys[2]), ())]
        # who does not keep up is told everything anew when it does, and nobody waits for it
        late.busy = True
        kv_events.tell(TellBlocks((keys[3],), ()))
        await stage.settle(0.2)
        assert kv_events_of(early)[-1] == (False, (keys[3],), ())
        late.busy = False
        await stage.settle(0.2)
        assert kv_events_of(late)[-1] == (True, (keys[1], keys[2], keys[3]), ())
        # of new weights nothing is known
        stage.context.namespace, version = lambda: b"o" * 16, ("4", 4)
        kv_events.tell(TellBlocks((keys[0],), ()))
        await stage.settle(0.2)
        for peer in (early, late):
            last = peer.take(KvEventBatch)[-1]
            assert (last.namespace, last.reset, last.added) == (b"o" * 16, True, (keys[0],))
            assert (last.weight_version, last.weight_order) == ("4", 4)
        # of another label every router is told, though no block has changed
        version = "again", 5
        kv_events.announce()
        kv_events.announce()
        await stage.settle(0.2)
        for peer in (early, late):
            last = peer.take(KvEventBatch)[-1]
            assert (last.weight_version, last.weight_order, last.reset, last.added) == ("again", 5, False, ())
        early.is_up = False
        kv_events.remove(late)
        count = len(late.sent)
        kv_events.tell(TellBlocks((keys[1],), ()))
        await stage.settle(0.2)
        assert len(late.sent) == count
        await stage.close()

    run_sim(main())
