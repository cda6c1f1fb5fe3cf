"""What waits for a peer that does not keep up: bounded, in order, and never left out while its session lives."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
from fdasync_fleet.instance import context as context_module
from fdasync_fleet.instance.token_streams import TokenStreams
from fdasync_fleet.messages import BlocksTaken, Progress

from fdasync.errors import PeerUnreachable
from fdasync.result import Delta
from fdasync.testing.sim.loop import run_sim
from tests.support.pd_stage import Stage


def played(test):
    def run():
        async def main():
            stage = Stage()
            stage.p0 = stage.peer("p0")
            await test(stage)
            await stage.settle()
            assert stage.context.tasks() == []
            assert stage.context._backlogs == {}
            await stage.close()

        run_sim(main())

    run.__name__ = test.__name__
    return run


class Request:
    """What `TokenStreams` reads of a `RequestState`."""

    def __init__(self, delta):
        self.samples = [SimpleNamespace(delta=delta)]
        self.spoiled = self.on_change = None


def note(number, name="r"):
    return BlocksTaken(name, 0, number)


@played
async def test_what_found_no_room_goes_in_order_when_there_is(stage):
    stage.p0.busy = True
    for number in range(1000):
        stage.context.tell(stage.p0, note(number))
    await stage.settle(10.0)
    assert stage.p0.sent == []
    stage.p0.busy = False
    # not before what waits
    stage.context.tell(stage.p0, note(1000))
    await stage.settle()
    assert [message.offer for message in stage.p0.sent] == list(range(1001))
    assert stage.given_up == []


@pytest.mark.parametrize(("messages", "nbytes"), [(10, 1 << 20), (1000, 1000)])
def test_a_peer_for_which_too_much_waits_is_lost_once_and_no_more_is_kept(messages, nbytes, monkeypatch):
    @played
    async def play(stage):
        monkeypatch.setattr(context_module, "BACKLOG_MESSAGES", messages)
        monkeypatch.setattr(context_module, "BACKLOG_NBYTES", nbytes)
        stage.p0.busy = True
        fits = 10 if messages == 10 else 9
        for number in range(fits):
            stage.context.tell(stage.p0, note(number, "n" * 90))
        await stage.settle()
        assert stage.given_up == []
        for number in range(100):
            stage.context.tell(stage.p0, note(number, "n" * 90))
        assert len(stage.context._backlogs[stage.p0].messages) <= fits + 1
        # not from within what tells it
        assert stage.given_up == []
        await stage.settle()
        ((peer, problem),) = stage.given_up
        assert peer is stage.p0
        assert "wait for it" in problem
        assert stage.p0.sent == []

    play()


@played
async def test_a_peer_that_leaves_no_room_for_long_is_lost_and_nothing_is_left_out(stage):
    stage.p0.busy = True
    stage.context.tell(stage.p0, note(1))
    stage.context.tell(stage.p0, note(2))
    await stage.settle(59.0)
    assert stage.given_up == []
    await stage.settle(2.0)
    ((peer, problem),) = stage.given_up
    assert (peer, problem) == (stage.p0, "it left no room for 60 s")
    with pytest.raises(PeerUnreachable):
        await stage.context.say(stage.p0, note(3))


@pytest.mark.ci
@played
async def test_a_router_may_stand_still_as_long_as_its_link_allows(stage):
    stage.p0.role, stage.p0.busy = "router", True
    stage.context.tell(stage.p0, note(1))
    await stage.settle(stage.context.links.config.router_lost_s)
    stage.p0.busy = False
    await stage.settle()
    assert stage.p0.sent == [note(1)]
    assert stage.given_up == []


@pytest.mark.ci
@played
async def test_tokens_for_a_caller_without_room_merge_however_long_it_takes(stage):
    fresh = deque()

    def delta():
        tokens = tuple(fresh)
        fresh.clear()
        return Delta(index=0, token_ids=tokens) if tokens else None

    request = Request(delta)
    streams = TokenStreams(stage.context)
    stage.p0.busy = True
    streams.add(stage.p0, "r", request, lambda _index: None)
    for token in range(100):
        fresh.append(token)
        request.on_change(request)
        await stage.settle(0.01)
    # nothing new comes from here on, and it is told all the same
    await stage.settle(200.0)
    assert len(fresh) == 100, "made into pieces that nobody has room for"
    stage.p0.busy = False
    await stage.settle()
    (told,) = stage.p0.take(Progress)
    assert told.pieces[0].token_ids == tuple(range(100))
    streams.take_last(request)
