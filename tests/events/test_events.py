"""The bus, its taps, and traces: `events/`."""

from __future__ import annotations

import asyncio
import json
import time

import msgspec
import pytest

from fdasync.errors import InvariantBroken
from fdasync.events.actions import FinishRequest, WakeAt
from fdasync.events.bus import EventBus
from fdasync.events.catalog import (
    AbortRequested,
    AnyEvent,
    BlockDamaged,
    BreakerChanged,
    Event,
    StepDone,
    StopChecked,
    StoreCalled,
    TimerFired,
)
from fdasync.events.trace import TraceRing
from fdasync.scheduler.replay import replay
from tests.scheduler.table import Table
from tests.support.helpers import make_request


class Ticks:
    """A clock that counts its readings."""

    def __init__(self):
        self.time = 10.0

    def __call__(self):
        self.time += 1.0
        return self.time


@pytest.fixture
def wakes():
    return []


@pytest.fixture
def bus(wakes):
    bus = EventBus(Ticks())
    bus.attach(lambda: wakes.append(len(wakes)))
    return bus


# -- publish and drain


def test_events_before_the_reader_wait_for_it_and_wake_it_at_once(wakes):
    bus, event = EventBus(Ticks()), TimerFired()
    bus.publish(event)
    bus.attach(lambda: wakes.append(len(wakes)))
    assert len(wakes) == 1
    assert bus.drain() == [event]


def test_a_bus_without_an_engine_hands_its_events_to_its_taps(run_sim):
    async def main():
        bus = EventBus()
        # before and after: what waits is handed out, too
        first, tap = TimerFired(), bus.subscribe()
        bus.publish(first)
        bus.feed_itself()
        assert await anext(tap) is first
        for _ in range(2):
            bus.publish(TimerFired())
        assert [(await anext(tap)).seq for _ in range(2)] == [1, 2]
        assert abs(first.at - time.monotonic()) < 600.0

    run_sim(main())


def test_a_reader_of_an_empty_queue_is_not_woken(bus, wakes):
    assert wakes == []


def test_publish_stamps_number_and_time(bus):
    events = [TimerFired(), StopChecked(key=1, num_tokens=2, at=99.0, seq=99), TimerFired()]
    for event in events:
        bus.publish(event)
    assert bus.drain() == events
    assert [(event.seq, event.at) for event in events] == [(0, 11.0), (1, 12.0), (2, 13.0)]


def test_events_stay_frozen_for_everybody_else(bus):
    event = TimerFired()
    bus.publish(event)
    with pytest.raises(AttributeError):
        event.at = 5.0


def test_one_wake_for_each_turn(bus, wakes):
    bus.publish(TimerFired())
    bus.publish(TimerFired())
    assert len(wakes) == 1
    first = bus.drain()
    assert len(first) == 2
    assert bus.drain() == []
    bus.publish(TimerFired())
    assert len(wakes) == 2
    assert [event.seq for event in bus.drain()] == [2]


def test_what_is_published_after_the_drain_is_of_the_next_turn(bus):
    bus.publish(TimerFired())
    turn = bus.drain()
    bus.publish(StopChecked(key=1, num_tokens=1))
    assert [type(event) for event in turn] == [TimerFired]
    assert [type(event) for event in bus.drain()] == [StopChecked]


def test_events_reach_the_scheduler_in_order_whatever_the_taps_do(bus):
    tap = bus.subscribe(limit=1)
    for key in range(5):
        bus.publish(StopChecked(key=key, num_tokens=1))
    events = bus.drain()
    bus.feed_taps(events)
    assert [event.key for event in events] == [0, 1, 2, 3, 4]
    assert (tap.pending, tap.dropped) == (1, 4)


# -- taps


async def test_a_tap_gets_the_kinds_it_asked_for_in_order(bus):
    every, some = bus.subscribe(), bus.subscribe(StopChecked, AbortRequested)
    events = [TimerFired(), StopChecked(key=1, num_tokens=1), AbortRequested(keys=(1,)), TimerFired()]
    bus.feed_taps(events)
    bus.close()
    assert [event async for event in every] == events
    assert [event async for event in some] == events[1:3]
    assert (every.delivered, some.delivered, some.dropped) == (4, 2, 0)


async def test_a_new_tap_is_told_first_what_still_holds_and_never_twice():
    facts = [TimerFired(), AbortRequested(keys=(1,))]
    bus = EventBus(Ticks(), lambda: facts)
    bus.publish(facts[0])
    bus.feed_taps(bus.drain())
    # this one comes with the next turn anyway
    bus.publish(facts[1])
    tap = bus.subscribe(TimerFired, AbortRequested)
    bus.feed_taps(bus.drain())
    assert [await anext(tap), await anext(tap)] == facts
    assert (tap.pending, bus.subscribe(StopChecked).pending) == (0, 0)


async def test_a_slow_tap_loses_the_newest_and_counts_them(bus):
    slow, fast = bus.subscribe(limit=2), bus.subscribe()
    events = [StopChecked(key=key, num_tokens=1) for key in range(5)]
    bus.feed_taps(events[:3])
    assert await anext(slow) == events[0]
    bus.feed_taps(events[3:])
    bus.close()
    assert [event async for event in slow] == [events[1], events[3]]
    assert (slow.delivered, slow.dropped) == (3, 2)
    assert [event async for event in fast] == events


async def test_a_waiting_tap_is_woken_by_what_it_wants_only(bus):
    async with bus.subscribe(StopChecked) as tap:
        waiting = asyncio.ensure_future(anext(tap))
        await asyncio.sleep(0)
        bus.feed_taps([TimerFired()])
        assert not tap._waiter.done()
        event = StopChecked(key=1, num_tokens=1)
        bus.feed_taps([event])
        assert await waiting == event


async def test_closing_ends_a_waiting_tap_and_feeds_it_no_more(bus):
    tap = bus.subscribe()
    waiting = asyncio.ensure_future(anext(tap))
    await asyncio.sleep(0)
    tap.close()
    with pytest.raises(StopAsyncIteration):
        await waiting
    tap.close()
    bus.feed_taps([TimerFired()])
    assert tap.pending == 0


async def test_a_cancelled_wait_loses_nothing(bus):
    tap = bus.subscribe()
    waiting = asyncio.ensure_future(anext(tap))
    await asyncio.sleep(0)
    waiting.cancel()
    event = TimerFired()
    bus.feed_taps([event])
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert await anext(tap) == event


async def test_a_second_reader_is_refused_and_the_first_still_served(bus):
    tap = bus.subscribe()
    waiting = asyncio.ensure_future(anext(tap))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one reader at a time"):
        await anext(tap)
    event = TimerFired()
    bus.feed_taps([event])
    assert await waiting == event


# -- traces


@pytest.fixture
def played():
    """A trace with every kind of event and action, and what there was to record."""
    table = Table(pipeline_depth=2, num_blocks=8)
    ring = TraceRing(table.scheduler.config, 1000)

    def turn(*events):
        ring.add(list(events), table.turn(*events).actions)

    turn(
        table.request(1, range(9), 6, deadline=50.0, stop_ids=frozenset({3, 1, 2}), emits=True),
        table.request(2, range(9), 6, checks_stops=True, emits=True),
        table.request(3, [7], 3),
    )
    turn(table.done())
    turn(table.done(), table.checked(2, 1), table.abort(3))
    turn(table.done(), table.matched(2, 1))
    turn(table.timer(60.0))
    while table.flying:
        turn(table.done())
    return ring, table


def test_a_trace_replays(played):
    ring, table = played
    assert len(table.finished) == 3
    assert replay(ring.encode()) == len(ring.encode().splitlines()) - 1 >= 5


def test_a_trace_is_saved_as_lines_of_json(played, tmp_path):
    ring, _ = played
    path = tmp_path / "trace.jsonl"
    ring.save(path)
    header, *turns = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert (header["format"], header["complete"], header["scheduler"]["num_blocks"]) == (1, True, 8)
    kinds = {event["type"] for turn in turns for event in turn["events"]}
    assert kinds == {"RequestPrepared", "StepDone", "AbortRequested", "StopChecked", "StopMatched", "TimerFired"}
    assert {action[0] for turn in turns for action in turn["actions"]} == {
        "run_step", "emit", "copy_rows", "finish", "wake_at",
    }  # fmt: skip
    assert replay(path.read_bytes()) == len(turns)


@pytest.fixture
def tiered():
    """A trace with all that tiers, a store and new weights bring."""
    table = Table(num_blocks=4, num_host_blocks=4, store=True, prefill_tokens_per_s=10.0, namespace=b"\x00\xff raw")
    ring = TraceRing(table.scheduler.config, 1000)

    def turn(*events):
        ring.add(list(events), table.turn(*events).actions)

    def settle():
        while table.flying or table.in_flight:
            turn(*([table.done()] if table.flying else []), *table.answers())

    turn(table.request(1, range(9), 2))
    settle()
    turn(table.request(2, range(100, 113), 2))
    settle()
    turn(table.request(3, range(9), 2))
    settle()
    table.kept.update({(table.namespace, key): None for key in table.keys(range(200, 209))})
    turn(table.request(4, range(200, 209), 2, salt=""))
    turn(table.looked_up())
    turn(table.fetched(arrived="+-", late=True))
    turn(table.returned(min(table.late), "++"), StoreCalled(store="s", verb="put", items=1, nbytes=2, seconds=0.5))
    stale = table.request(5, range(9), 2)
    settle()
    turn(table.pause())
    turn(table.weights(2), table.resume(), stale)
    turn(BlockDamaged(store="s", key="k", problem="p"), BreakerChanged(store="s", state="open", problem="p"))
    settle()
    return ring, table


def test_words_that_are_no_text_do_not_keep_a_trace_from_being_saved(tiered, tmp_path):
    ring, table = tiered
    # as the error of a file whose name is not UTF-8
    problem = "no such file: '/tmp/a\udcff'"
    events = [BlockDamaged(store="\ud800", key="k", problem=problem)]
    ring.add(events, table.turn(*events).actions)
    events = [table.request(6, range(3), 2)]
    ring.add(events, table.turn(*events).actions)
    ring.save(tmp_path / "trace")
    lines = (tmp_path / "trace").read_bytes().splitlines()
    told = json.loads(lines[-2])["events"][0]
    assert (told["store"], told["problem"]) == ("?", "no such file: '/tmp/a?'")
    assert replay(b"\n".join(lines) + b"\n") == len(lines) - 1


def test_a_trace_with_tiers_and_new_weights_replays(tiered):
    ring, table = tiered
    lines = [json.loads(line) for line in ring.encode().splitlines()]
    assert {action[0] for turn in lines[1:] for action in turn["actions"]} >= {
        "swap_out", "swap_in", "look_up", "fetch", "store", "hash_again",
    }  # fmt: skip
    assert {event["type"] for turn in lines[1:] for event in turn["events"]} >= {
        "SwapDone", "LookedUp", "FetchEnded", "StoreEnded", "LateTransferEnded", "Hashed", "PauseRequested",
        "ResumeRequested", "WeightsChanged", "StoreCalled", "BlockDamaged", "BreakerChanged",
    }  # fmt: skip
    assert replay(ring.encode()) == len(lines) - 1
    assert sorted(table.finished) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[0]["scheduler"].__setitem__("num_host_blocks", 3),
        lambda lines: lines[0]["scheduler"].__setitem__("store", False),
        lambda lines: lines[0]["scheduler"].__setitem__("write_through", "off"),
        lambda lines: lines[0]["scheduler"].__setitem__("namespace", "AAAA"),
        lambda lines: first_event(lines, "SwapDone").__setitem__("type", "TimerFired"),
        lambda lines: first_event(lines, "LookedUp").__setitem__("seconds", 9.0),
        lambda lines: first_event(lines, "FetchEnded", late=True).__setitem__("arrived", [True, True]),
        lambda lines: first_event(lines, "WeightsChanged").__setitem__("version", "3"),
        lambda lines: first(lines, "swap_out")[2].__setitem__(0, 3),
    ],
)
def test_a_trace_with_tiers_that_was_tampered_with_does_not_replay(tiered, change):
    with pytest.raises(InvariantBroken):
        replay(tamper(tiered[0].encode(), change))


def first_event(lines, kind, **fields):
    events = [event for turn in lines[1:] for event in turn["events"] if event["type"] == kind]
    return next(event for event in events if fields.items() <= event.items())


def test_what_is_told_to_taps_only_is_passed_over_by_the_scheduler():
    table = Table()
    told = [
        StoreCalled(store="s", verb="put", items=1, nbytes=2, seconds=0.5),
        BlockDamaged(store="s", key="k", problem="p"),
        BreakerChanged(store="s", state="open", problem="p"),
    ]
    assert table.turn(*told).actions == []
    with pytest.raises(InvariantBroken, match="knows no event"):
        table.turn(Event())


def tamper(trace, change):
    lines = [json.loads(line) for line in trace.splitlines()]
    change(lines)
    return b"\n".join(json.dumps(line).encode() for line in lines)


def first(turns, kind):
    return next(action for turn in turns[1:] for action in turn["actions"] if action[0] == kind)


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[1]["events"][0]["tokens"].__setitem__(0, 299),
        lambda lines: lines[1]["events"].reverse(),
        lambda lines: lines[2]["events"][0]["tokens"].__setitem__(0, 1),
        lambda lines: first(lines, "finish").__setitem__(2, "length"),
        lambda lines: first(lines, "run_step")[3][0][4].__setitem__(0, 5),
        lambda lines: first(lines, "copy_rows")[1][0].__setitem__(4, 1),
        lambda lines: lines[3]["actions"].pop(),
        lambda lines: lines[0]["scheduler"].__setitem__("max_running", 1),
        lambda lines: lines[0]["scheduler"].__setitem__("max_step_tokens", 8),
    ],
)
def test_a_trace_that_was_tampered_with_does_not_replay(played, change):
    with pytest.raises(InvariantBroken, match="replays to other actions") as caught:
        replay(tamper(played[0].encode(), change))
    assert any(line.startswith("recorded: ") for line in caught.value.story)


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (b"", "not a trace"),
        (b"{}", "not a trace"),
        (b'{"format":2,"complete":true,"scheduler":{}}', "format 2"),
        (b'{"format":1,"complete":false,"scheduler":{}}', "complete=False"),
    ],
)
def test_what_is_no_complete_trace_is_refused(trace, message):
    with pytest.raises(ValueError, match=message):
        replay(trace)


def test_a_broken_line_is_named(played):
    lines = played[0].encode().splitlines()
    lines[2] = lines[2][:-5]
    with pytest.raises(ValueError, match="line 3 is not a turn"):
        replay(b"\n".join(lines))


def test_a_full_ring_keeps_the_latest_and_says_that_it_is_not_complete():
    table = Table()
    ring = TraceRing(table.scheduler.config, 2)
    for number in range(4):
        ring.add([StepDone(step_id=number, tokens=())], [WakeAt(1.0)])
    lines = ring.encode().splitlines()
    assert len(lines) == 3
    assert [json.loads(line)["events"][0]["step_id"] for line in lines[1:]] == [2, 3]
    with pytest.raises(ValueError, match="complete=False"):
        replay(ring.encode())


def test_the_story_is_the_latest_events_in_words():
    ring = TraceRing(Table().scheduler.config, 100)
    for number in range(30):
        ring.add([StepDone(step_id=number, tokens=()), TimerFired()], [])
    story = ring.story(3)
    assert [("step_id=29" in line, "TimerFired" in line) for line in story[-2:]] == [(True, False), (False, True)]
    assert len(story) == 3
    assert len(ring.story()) == 20


def test_events_and_actions_survive_json():
    event = make_request(1, range(9), 3, 4, stop_ids=frozenset({1, 2}))
    text = msgspec.json.encode(event)
    assert msgspec.json.decode(text, type=AnyEvent) == event
    action = FinishRequest(1, "stop", (1, 2), 3, (4, 0, 8), ((0, "0", "a" * 32),), 2)
    assert msgspec.json.decode(msgspec.json.encode(action), type=FinishRequest) == action
    assert issubclass(type(event), Event)
