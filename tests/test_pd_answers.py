"""What callers are told of their requests, and routers of an instance's blocks."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

from fdasync.engine.inputs import Ask, Errand
from fdasync.errors import BadInput, EngineBusy
from fdasync.events.actions import FinishRequest, TellBlocks
from fdasync.pd.instance.kv_events import News
from fdasync.pd.instance.responses import Answers
from fdasync.pd.messages import Abort, BlockNews, Ended, Failed, Moved, Outputs, Progress
from fdasync.request import SamplingParams
from fdasync.testing.sim.loop import run_sim
from tests.helpers import OutputStage, make_capacity
from tests.pd_site import FakePeer, Stage


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
        self.site.door = SimpleNamespace(
            submit=self.submit, find=self.requests.get, abort=self.aborted.append,
            result=lambda request: request.result(make_capacity()),
        )  # fmt: skip
        self.answers = Answers(self.site, SimpleNamespace(take_moved=lambda name: self.moved.pop(name, "")))

    async def submit(self, ask):
        if self.refusal is not None:
            raise self.refusal
        return self.requests[ask.request_id].request

    def make(self, name="r", *, streams=True, errand=False, n=1):
        """A request in a hub of its own."""
        stage = self.requests[name] = OutputStage(n=n, streams=streams)
        stage.request.request_id = name
        ask = Ask(
            prompt=(1, 2, 3), params=SamplingParams(n=n), streams=streams, request_id=name, priority=0, deadline_s=None,
            routing=None, start=0, cache_salt="", errand=Errand(name=name, caller=b"", decoders=()) if errand else None,
        )  # fmt: skip
        stage.request.asked = (ask, None)
        return stage, ask

    def begin(self, name="r", **fields):
        stage, ask = self.make(name, **fields)
        self.answers.submit(self.caller, name, ask)
        return stage

    def tokens(self):
        return [(piece.index, piece.token_ids) for news in self.caller.take(Progress) for piece in news.pieces]


def played(test):
    def run():
        async def main():
            stage = Desk()
            await test(stage)
            assert stage.answers.num_live == 0
            assert stage.site.tasks() == []
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
    assert desk.answers.num_live == 0


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
    desk.answers.submit(desk.caller, "r", stage.request.asked[0])
    await desk.settle()
    assert desk.answers.num_live == 1
    stage.finish((5,))
    await desk.settle()
    assert len(desk.caller.take(Ended)) == 1


@played
async def test_what_the_door_refuses_is_told(desk):
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
    stage = desk.begin(errand=True, n=2)
    await desk.settle()
    desk.moved["r"] = "ipc:///run/d0"
    stage.finish((5,), "handed_over", 0)
    await desk.settle()
    assert desk.caller.sent == []
    stage.finish((5,), "handed_over", 1)
    await desk.settle()
    assert desk.caller.sent == [Moved("r", "ipc:///run/d0")]


@played
async def test_one_that_nobody_took_may_be_sent_again(desk):
    stage = desk.begin(errand=True)
    await desk.settle()
    stage.hub.finish(FinishRequest(0, "no_lease", (), 0, (0, 0, 0), (), note="d0: full"))
    await desk.settle()
    (words,) = desk.caller.sent
    assert (words.error, words.retriable) == ("InstanceLost", True)
    assert "d0: full" in words.problem


@played
async def test_what_never_began_here_is_told_of_by_whoever_sent_it(desk):
    stage, _ = desk.make()
    desk.answers.follow(stage.request, desk.caller.incarnation, "r")
    stage.finish((), "lease_lost")
    await desk.settle()
    assert desk.caller.sent == []


@played
async def test_what_is_lost_though_it_began_is_told_as_lost(desk):
    stage, _ = desk.make(n=2)
    desk.answers.follow(stage.request, desk.caller.incarnation, "r")
    desk.answers.lose(stage.request)
    assert desk.aborted == [stage.request]
    stage.finish((5,), "abort", 0)
    stage.finish((), "lease_lost", 1)
    await desk.settle()
    (words,) = [message for message in desk.caller.sent if not isinstance(message, Progress)]
    assert (type(words), words.error, words.retriable) == (Failed, "InstanceLost", True)


@played
async def test_aborts_find_their_request_and_others_find_nothing(desk):
    stage = desk.begin()
    # still at the door
    desk.answers.abort(desk.caller, Abort("r"))
    await desk.settle()
    assert desk.aborted
    desk.answers.abort(FakePeer("stranger"), Abort("r"))
    desk.answers.abort(desk.caller, Abort("unheard of"))
    count = len(desk.aborted)
    desk.answers.on_lost(FakePeer("stranger"))
    assert len(desk.aborted) == count
    desk.caller.is_up = False
    desk.answers.on_lost(desk.caller)
    assert desk.aborted[-1] is stage.request
    stage.finish((), "abort")
    await desk.settle()
    assert desk.caller.take(Ended) == []


# -- news of blocks


def news_of(peer):
    return [(news.reset, news.added, news.removed) for news in peer.take(BlockNews)]


def test_routers_are_told_of_blocks_together_and_late_comers_of_all():
    async def main():
        stage = Stage()
        keys = [bytes([number]) * 16 for number in range(4)]
        version = 3
        news = News(stage.site, lambda: version)
        early, late = FakePeer("one", "router"), FakePeer("two", "router")
        news.add(early)
        await stage.settle(0.1)
        assert news_of(early) == [(True, (), ())]
        news.tell(TellBlocks((keys[0], keys[1]), ()))
        news.tell(TellBlocks((keys[2],), (keys[0],)))
        await stage.settle(0.1)
        assert news_of(early)[1:] == [(False, (keys[1], keys[2]), (keys[0],))]
        news.add(late)
        await stage.settle(0.1)
        assert news_of(late) == [(True, (keys[1], keys[2]), ())]
        # who does not keep up is told everything anew when it does, and nobody waits for it
        late.busy = True
        news.tell(TellBlocks((keys[3],), ()))
        await stage.settle(0.2)
        assert news_of(early)[-1] == (False, (keys[3],), ())
        late.busy = False
        await stage.settle(0.2)
        assert news_of(late)[-1] == (True, (keys[1], keys[2], keys[3]), ())
        # of new weights nothing is known
        stage.site.namespace, version = lambda: b"o" * 16, 4
        news.tell(TellBlocks((keys[0],), ()))
        await stage.settle(0.2)
        for peer in (early, late):
            last = peer.take(BlockNews)[-1]
            assert (last.namespace, last.reset, last.added) == (b"o" * 16, True, (keys[0],))
            assert last.weight_version == 4
        early.is_up = False
        news.remove(late)
        count = len(late.sent)
        news.tell(TellBlocks((keys[1],), ()))
        await stage.settle(0.2)
        assert len(late.sent) == count
        await stage.close()

    run_sim(main())
