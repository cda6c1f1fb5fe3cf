"""An attachment of a stranger has a say about sequences, and no line of the scheduler's core knows it."""

from __future__ import annotations

import inspect
from random import Random

import pytest

from fdasync.errors import InvariantBroken
from fdasync.events.catalog import (
    BreakerChanged,
    Event,
    RequestEnded,
    StepDone,
    SwapDone,
    TimerFired,
    WeightsRelabelled,
)
from fdasync.scheduler.state.attachment import Attachment
from tests.scheduler.table import Table
from tests.support.imports import ALL_MODULES, imports_of, within

A = range(14)
QUESTIONS = [name for name, _ in inspect.getmembers(Attachment, inspect.isfunction) if name != "wake"]
# rooms and modules of those who have a say about a sequence besides the scheduler's core (state/attachment.py)
_FEATURES = (
    "fdasync.scheduler.disagg", "fdasync.scheduler.drafts", "fdasync.scheduler.make",
    "fdasync.scheduler.tiers.snapshot_planner", "fdasync.cache.snapshots", "fdasync.drafting",
)  # fmt: skip
_CORE = tuple([f"fdasync.scheduler.{name}" for name in ("core", "step_planner", "results", "stats")])


class NoHits(Attachment):
    """Lets no sequence start from blocks that are cached, and counts the blocks that become complete."""

    def __init__(self):
        self.num_sealed = 0

    def usable(self, seq, hits, step_id):
        return []

    def sealed(self, seq, number, key):
        self.num_sealed += 1


class Let(Event, frozen=True, tag="let", kw_only=True):
    """The sequence may end."""

    key: int


class Keeper(Attachment):
    """Keeps sequences that have all their tokens until a `Let`, which gives them all but their last one."""

    def __init__(self):
        self.kept = {}
        self.handlers = {Let: lambda event: self.core.end(self.kept[event.key], "stop", 99, note="let")}

    def computed(self, seq):
        self.kept[seq.key] = seq
        return True

    def ended(self, seq, reason, keep):
        del self.kept[seq.key]
        return min(keep, seq.num_output - 1)


class Line(Attachment):
    """Lets one request at a time begin, has no chunk longer than three tokens, and wants a turn at a time."""

    def __init__(self):
        self.running = None
        self.wants = float("inf")
        self.rung = []

    def may_begin(self, seq):
        return self.running is None

    def admitted(self, seq, hits, known):
        self.running = seq.key

    def cut(self, seq, start, stop):
        return min(stop, start + 3)

    def ended(self, seq, reason, keep):
        self.running = None
        return keep

    def wake_at(self):
        return self.wants

    def ring(self, now):
        if now >= self.wants:
            self.rung.append(now)
            self.wants = float("inf")


class Sleeper(Attachment):
    """Wakes for requests with stop strings, until one of them has ended."""

    concerns = "checks_stops"

    def __init__(self):
        self.awake = False
        self.seen = []
        self.also = {StepDone: self._on_step}

    def _on_step(self, event):
        self.seen.append("step")

    def prepared(self, seq, event):
        self.wake()
        self.seen.append(seq.key)

    def ended(self, seq, reason, keep):
        self.wake(False)
        return keep


def test_one_that_refuses_all_hits():
    one = NoHits()
    table = Table(attachments=(one,))
    table.run(table.request(1, A, 2))
    assert one.num_sealed == 3
    assert table.turn(table.request(2, A, 4)).cached == {2: 0}
    table.run()
    # blocks of four tokens: three of the prompt again, and one of the answer
    assert one.num_sealed == 7


def test_one_that_keeps_sequences_and_shortens_results():
    table = Table(attachments=(Keeper(),))
    table.turn(table.request(1, A, 3))
    for _ in range(3):
        table.turn(table.done())
    assert table.finished == {}
    assert table.stats.running == 1
    table.turn(Let(key=1, at=table.now))
    assert (table.finished[1].reason, len(table.finished[1].token_ids), table.finished[1].note) == ("stop", 2, "let")
    assert table.is_empty()


def test_one_that_says_who_begins_and_what_a_step_computes():
    one = Line()
    table = Table(attachments=(one,))
    turned = table.turn(table.request(1, range(7), 1), table.request(2, range(100, 104), 1))
    assert (turned.step.starts[0].key, turned.step.chunks[0].count) == (1, 3)
    assert [chunk.count for chunk in table.turn(table.done()).step.chunks] == [3]
    assert [chunk.count for chunk in table.turn(table.done()).step.chunks] == [1]
    assert [start.key for start in table.turn(table.done()).step.starts] == [2]
    one.wants = 7.0
    assert table.turn().wakes[0].time == 7.0
    table.turn(TimerFired(at=7.0))
    assert one.rung == [7.0]
    table.run()


def test_one_that_rests_is_told_of_what_concerns_it_alone():
    one = Sleeper()
    table = Table(attachments=(one,))
    table.run(table.request(1, A, 3))
    assert one.seen == []
    table.turn(table.request(2, range(100, 104), 2, checks_stops=True))
    table.turn(table.done())
    assert one.seen == [2, "step"]
    table.turn(table.abort(2))
    table.run(table.request(3, A, 3))
    assert one.seen == [2, "step"]


@pytest.mark.parametrize(
    "event", [BreakerChanged(store="s", state="open", problem="", at=0.0), WeightsRelabelled(version="1", at=0.0)]
)
def test_one_that_hears_of_what_plans_nothing_is_asked_to_plan(event):
    class Hears(Attachment):
        def __init__(self):
            self.also = {type(event): lambda event: heard.append(type(event))}

        def plan(self, now):
            heard.append("plan")
            return []

    heard = []
    table = Table(attachments=(Hears(),))
    table.turn(event)
    assert heard == [type(event), "plan"]


def test_plans_go_on_behind_an_end():
    """A turn may end a request behind the plans that could have used its blocks."""
    asked = []

    class Counts(Attachment):
        def plan(self, now):
            asked.append(now)
            return []

    table = Table(attachments=(Counts(),))
    table.turn(BreakerChanged(store="s", state="open", problem="", at=0.0))
    assert asked == []
    ended = RequestEnded(
        request_id="r", group=1, reasons=("stop",), prompt_tokens=1, output_tokens=1, cached=(0, 0, 0), ttft_s=None,
        total_s=0.0, at=0.0,
    )  # fmt: skip
    table.turn(ended)
    assert asked == [0.0]


@pytest.mark.parametrize(
    ("beyond", "told"), [(1, "Cuts.cut cut .0, 6. of 1 at 7"), (-7, "at -1"), (-6, "starts and computes nothing")]
)
def test_a_chunk_is_cut_within_itself_and_the_first_one_not_to_nothing(beyond, told):
    class Cuts(Attachment):
        def cut(self, seq, start, stop):
            return stop + beyond

    table = Table(attachments=(Cuts(),))
    with pytest.raises(InvariantBroken, match=told):
        table.turn(table.request(1, range(6), 3))


def test_no_event_has_two_handlers():
    class Second(Attachment):
        def __init__(self):
            self.handlers = {SwapDone: print}

    with pytest.raises(InvariantBroken, match="two handle SwapDone"):
        Table(attachments=(Second(),))


def echo(log):
    """An attachment that answers each question as `Attachment` does."""

    def answer(name):
        def ask(self, *args):
            log.add(name)
            return getattr(Attachment, name)(self, *args)

        return ask

    return type("Echo", (Attachment,), {name: answer(name) for name in QUESTIONS})()


def play(table, seed):
    """All that a scheduler does for requests that share prompts, are preempted, aborted and paused."""
    random = Random(seed)
    done = []
    for key in range(40):
        start = random.choice((0, 4, 8))
        events = [table.request(key, range(start, start + random.randint(5, 14)), random.randint(1, 12), group=key)]
        if table.flying:
            events.insert(0, table.done())
        if not random.randrange(8):
            events.append(table.abort(random.randrange(key + 1)))
        if not random.randrange(10):
            events += [table.pause(random.choice(("wait", "retract"))), table.resume()]
        done += table.turn(*events).actions
    while table.flying:
        done += table.turn(table.done()).actions
    return done


@pytest.mark.parametrize("depth", [1, 2])
def test_one_that_answers_as_you_like_changes_nothing(depth):
    asked, preemptions = set(), 0
    for seed in range(6):
        config = {"num_blocks": 9, "pipeline_depth": depth, "decode_reserve_blocks": 0}
        plain, other = Table(**config), Table(attachments=(echo(asked),), **config)
        assert play(plain, seed) == play(other, seed)
        assert plain.stats == other.stats
        preemptions += plain.stats.preemptions
    assert preemptions
    # weights and sleeps alone start anew
    assert asked == {*QUESTIONS} - {"start_anew"}


def features_of(module: str, source: str) -> list[str]:
    """What the scheduler's core imports of features."""
    return [f"{module} imports {name}" for name in imports_of(source, types=True) if within(name, _FEATURES)]


def test_the_core_of_the_scheduler_knows_no_feature():
    found = [line for module in _CORE for line in features_of(module, ALL_MODULES[module].read_text())]
    assert found == [], "a feature that has a say about a sequence is an attachment, and needs no line there"


@pytest.mark.parametrize("line", [f"from {feature} import anything" for feature in _FEATURES])
def test_a_feature_in_the_core_is_found(line):
    assert len(features_of("fdasync.scheduler.core", f"if TYPE_CHECKING:\n    {line}\n")) == 1
