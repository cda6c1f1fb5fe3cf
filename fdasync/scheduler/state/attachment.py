"""The contract of an attachment: an object that takes part in decisions of the scheduler about sequences. Pure.

Snapshots of recurrent state, drafts and both sides of a hand-off are attachments. The core does not know what they are
for: it tells each of them what happens to a sequence, and asks the questions below where it decides. An attachment
answers the questions that concern it and leaves the others as they are here, where every answer is "as you like". The
core binds the answers once, so a question that nobody answers costs nothing. This one lets no request start from blocks
that are cached:

    class NoHits(Attachment):
        def usable(self, seq, hits, step_id):
            return []

    scheduler = make_scheduler(config, more=(NoHits(),))

`make.py` says which attachments a scheduler has of its own, and in which order they are asked: `usable`, `cut` and
`ended` get what the one before them said. Like all of the scheduler an attachment is pure: it has no clock but
`core.now`, awaits nothing, and iterates over no set, so that a trace replays. It moves and ends sequences by `Core`,
the queues and the index, and keeps what it knows of one by its key, or in fields that `Sequence` declares for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Concatenate, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from fdasync.cache.blocks import Block, HostHold
    from fdasync.cache.snapshots import Snapshot
    from fdasync.events.actions import Action, FinishReason
    from fdasync.events.catalog import Event, RequestPrepared, StepDone
    from fdasync.scheduler.state.sequence import Sequence
    from fdasync.scheduler.state.step_plan import StepPlan

P = ParamSpec("P")
R = TypeVar("R")
#: why `Attachment.start_anew` is called
Anew = Literal["weights", "sleep"]


class Core(Protocol):
    """What an attachment may do to sequences.

    Attributes:
        now: time of the last event.
        sequences: the live ones by key.
    """

    now: float
    sequences: dict[int, Sequence]

    def add(self, event: RequestPrepared, first: Sequence | None = None) -> Sequence:
        """A new sequence, which the caller puts into a queue; `first`: the first sample of its request, if it is not
        that. Raises InvariantBroken where the key is in use."""

    def end(self, seq: Sequence, reason: FinishReason, keep: int, matched: int = -1, note: str = "") -> None:
        """End a live sequence, with the first `keep` tokens of its output."""

    def took(self, seq: Sequence, token: int) -> None:
        """The sequence got `token` from elsewhere: end it if that is its last one."""

    def bind(self) -> None:
        """An attachment woke, or rests."""


class Holds(NamedTuple):
    """What an attachment keeps in place, for the check that nothing else does.

    Attributes:
        blocks: device blocks, once for each pin.
        snapshots: once for each hold.
        host: by reason, how many host blocks it holds.
        waits: sequences may wait for it alone.
    """

    blocks: Iterable[Block] = ()
    snapshots: Iterable[Snapshot] = ()
    host: Mapping[HostHold, int] = {}
    waits: bool = False


class Attachment:
    """See the module. In the order of a sequence's life.

    Attributes:
        core: the scheduler that it is attached to, which sets this.
        handlers: handlers of its own events, by type; no event has two.
        also: by type, what it does about events of others, when their handlers have done their part.
        awake: False: it has nothing to do, and is told of its own events and of new sequences alone.
        concerns: `prepared` is called for requests with this field of `RequestPrepared` set; "": for all.
    """

    core: Core
    handlers: Mapping[type[Event], Callable[..., None]] = {}
    also: Mapping[type[Event], Callable[..., None]] = {}
    awake = True
    concerns = ""

    def wake(self, awake: bool = True) -> None:
        """From now on ask it all questions; False: until it wakes, an engine pays nothing for it in its turns."""
        if self.awake is not awake:
            self.awake = awake
            self.core.bind()

    def ring(self, now: float) -> None:
        """Called first in each turn, behind its events: handle the timers that are due, end what has to end."""

    def begin(self, now: float) -> list[Action]:
        """Called before steps are planned; returns actions that come before all others of the turn."""
        return []

    def plan(self, now: float) -> list[Action]:
        """Called when the steps are planned; returns actions that come behind them."""
        return []

    def wake_at(self) -> float:
        """Engine time at which `ring` and `begin` have work without an event; inf: none."""
        return float("inf")

    def prepared(self, seq: Sequence, event: RequestPrepared) -> None:
        """The sequence came to the queue; see `concerns`. Called while it rests, too."""

    def may_begin(self, seq: Sequence) -> bool:
        """Whether a sequence that could start otherwise may do so now; others pass it meanwhile."""
        return True

    def usable(self, seq: Sequence, hits: list[Block], step_id: int) -> list[Block] | None:
        """The leading blocks among `hits` that it may go on from in this step; None: it waits, and others pass it."""
        return hits

    def admitted(self, seq: Sequence, hits: list[Block], known: int) -> None:
        """There is room: it gets `hits` and free blocks at once, and starts when no copy for it is on its way. `known`:
        so many leading tokens have KV here, be it of use to it or not."""

    def cut(self, seq: Sequence, start: int, stop: int) -> int:
        """Where its next chunk, planned as [start, stop), shall stop; `start`: it waits for the next step, unless this
        is its first chunk, which `may_begin` holds back. While a prompt is cut, others are computed beside it; those
        with the same tokens share its blocks from the step on that has planned them."""
        return stop

    def chunk(self, seq: Sequence, start: int, stop: int, step_id: int) -> None:
        """The step computes its positions [start, stop). The first chunk starts it; one that ends with its last token
        samples the next one."""

    def due(self, seq: Sequence) -> int:
        """While it decodes: the length from which on `decodes` has to be called for each step."""
        return seq.max_len

    def decodes(self, seq: Sequence, least: int, most: int, step_id: int) -> None:
        """When the step is done it will have forwarded `least` to `most` tokens of the sequence."""

    def planned(self, plan: StepPlan) -> None:
        """The step is planned: fill in what it has besides chunks and decodes. Called for every step."""

    def stepped(self, plan: StepPlan, samplers: list[Sequence], event: StepDone, seconds: float) -> None:
        """The oldest step in flight is done, `seconds` after it could begin. Its decodes have their tokens; `samplers`,
        the sequences whose last chunk it computed, do not yet."""

    def sealed(self, seq: Sequence, number: int, key: bytes | None) -> None:
        """A block of the sequence is complete. `key`: its identity, which its `Block.key` may not be (another
        computation has it); None: it is not shared."""

    def answers(self, seq: Sequence) -> None:
        """The sequence has a token behind what was computed as its prompt, and goes on to decode here."""

    def computed(self, seq: Sequence) -> bool:
        """The sequence has all its tokens. True: it is kept, and this attachment ends it later; at a stop id it has to
        take it out of the decoding ones, too."""
        return False

    def ended(self, seq: Sequence, reason: FinishReason, keep: int) -> int:
        """The sequence ends, with its first `keep` output tokens or fewer; returns how many. It has its blocks still.
        Called once for each sequence, whatever ends it."""
        return keep

    def has_begun(self, seq: Sequence) -> bool:
        """Whether a sequence that was never admitted goes on during a pause that waits for requests to end."""
        return False

    def start_anew(self, why: Anew) -> None:
        """The weights changed, or a sleep is about to give the device's memory up: what was computed for others, or
        comes from them, is of no use. No step is in flight. Called in every turn until the sleep is deep."""

    def stats(self) -> dict[str, Any]:
        """Fields of `SchedulerStats` that are its own; `fdasync/stats.py` declares them."""
        return {}

    def check(self, live: Iterable[Sequence]) -> Holds:
        """Raise InvariantBroken unless its own state is sound; see `Holds`. For tests and idle time."""
        return Holds()


def asked(question: Callable[Concatenate[Any, P], R], attachments: Iterable[Attachment]) -> list[Callable[P, R]]:
    """The bound answers of the attachments that answer a question of `Attachment`, in order."""
    name = question.__name__
    return [getattr(one, name) for one in attachments if getattr(type(one), name) is not question]
