"""Requests that are prefilled here and decoded elsewhere: finding them room, and what happens when it is lost.

A group of samples is one *errand*. It is admitted once an instance has granted a lease, and not before: P holds no
block while it waits for D, and a D that does not answer costs the errands of other D's nothing. Asks are bounded per
instance (`asks_per_peer`) and overall (`asks`); `ahead_tokens` bounds the work that is leased and not begun, so that
D's memory does not wait on our queue. What was asked counts too, at its own D, and for a moment at the others if this
D answers promptly; where D's that were slow grant more than that together, the youngest leases are given back. Where a
lease is lost before any hand-over, another one is looked for, and what was computed is sent there.

Pure. Called by `core.py` and `step_planner.py`; `disagg/sender.py` sends the blocks, `prefill_service.py` carries the
questions. The other side is `decode.py`."""

from __future__ import annotations

import heapq
from bisect import insort
from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken
from fdasync.events.actions import AskLease, GiveUpLease
from fdasync.events.catalog import BlocksSent, Event, HandedOver, LeaseAnswered, LeaseLost
from fdasync.scheduler.disagg.handoff import Decoder, Errand
from fdasync.scheduler.disagg.sender import Shipper
from fdasync.scheduler.state.sequence import Sequence, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.events.actions import Action
    from fdasync.events.catalog import RequestPrepared
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.weights import Weights
    from fdasync.scheduler.tiers.swap_planner import Copier

_RETRY_MIN_S = 0.05
_RETRY_MAX_S = 1.0
# a question that was not answered for so long holds no question to another instance up
_PROMPT_S = 0.05
# of what one instance said, in the words that a caller gets
_REASON_CHARS = 300
_WHY_CHARS = 2000
# in place of an attempt: the time to find room is over
_STOP = -2


class Borrower:
    """See the module.

    Attributes:
        ends: (sequence, finish reason, why), taken by `core.py`.
        handlers: of the events that belong here.
    """

    def __init__(self, config: SchedulerConfig, copier: Copier, weights: Weights) -> None:
        self._rules = config.leases
        self._block_tokens = config.block_tokens
        self._ahead_tokens = config.leases.ahead_tokens or 2 * config.max_step_tokens
        self._weights = weights
        self._errands: dict[int, Errand] = {}
        self._peers: dict[str, Decoder] = {}
        self._granted: dict[int, Errand] = {}
        self._asks: dict[tuple[int, int], tuple[Decoder, int, float]] = {}
        self._timers: list[tuple[float, int, int]] = []
        self._leased_tokens = 0
        self._look_at = float("inf")
        self._actions: list[Action] = []
        self._ship = Shipper(config, copier, self._actions)
        self.ends: list[tuple[Sequence, str, str]] = []
        self.handlers: dict[type[Event], Callable[..., None]] = {
            LeaseAnswered: self._on_answered,
            LeaseLost: self._on_lost,
            BlocksSent: self._ship.sent,
            HandedOver: self._on_handed_over,
        }

    # -- what the rest of the scheduler asks and tells --------------------------------------------

    @property
    def num_asked(self) -> int:
        """Asks in flight."""
        return len(self._asks)

    @property
    def num_out(self) -> int:
        """Offers and hand-overs that another instance has not answered yet, and errands that wait for time to pass."""
        return self._ship.num_out + len(self._timers)

    @property
    def num_held(self) -> int:
        """Leased tokens that are not begun, blocks in the staging ring, offers and hand-overs: 0 when all is quiet."""
        return self._leased_tokens + self._ship.num_exported + self._ship.num_out

    @property
    def wake_at(self) -> float:
        return min(self._timers[0][0] if self._timers else float("inf"), self._look_at)

    @property
    def num_errands(self) -> int:
        return len(self._errands)

    def enter(self, seq: Sequence, event: RequestPrepared, now: float) -> None:
        """One sample of a group came in."""
        errand = self._errands.get(event.group)
        if errand is None:
            stop_at = min(now + self._rules.find_s, event.deadline)
            over_at = min(max(now + self._rules.total_s, stop_at), event.deadline)
            errand = Errand(event, seq.order, self._block_tokens, stop_at, over_at)
            self._errands[event.group] = errand
            self._set_timer(errand.stop_at, errand, _STOP)
        errand.seqs.append(seq)
        seq.errand = errand
        if len(errand.seqs) == errand.samples:
            self._enqueue(errand)

    def begun(self, seq: Sequence) -> None:
        """It entered prefill: its work is not ahead any more."""
        errand = self._errands.get(seq.group)
        if errand is not None and errand.granted and not errand.begun:
            errand.begun = True
            self._leased_tokens -= errand.tokens

    def computed(self, seq: Sequence) -> None:
        """Its first token is there: hand it over when its open block is on the host."""
        self._want_hand(self._errands[seq.group], seq)

    def _want_hand(self, errand: Errand, seq: Sequence) -> None:
        if errand.granted and seq.key not in errand.hands and len(seq.tokens) > seq.prompt_len:
            errand.hands[seq.key] = None

    def leave(self, seq: Sequence) -> None:
        """It ended, however that came about; what of it is being read by another instance stays until that ends."""
        if seq.errand is None:
            return
        errand = self._errands[seq.group]
        seq.errand = None
        errand.seqs.remove(seq)
        self._ship.forget(errand, seq)
        if not errand.seqs:
            self._close(errand, tell=errand.handed < errand.samples)
            errand.state = "ended"
            del self._errands[errand.group]
            if not self._errands:
                # nobody looks at the clock again before the next one comes
                self._timers.clear()
                self._look_at = float("inf")

    def new_weights(self, now: float) -> list[Sequence]:
        """Nothing computed before may be sent: every errand starts anew. Returns whose blocks must go."""
        holders = []
        for errand in list(self._errands.values()):
            for seq in errand.seqs:
                if seq.state is State.TAIL or seq.state is State.PREFILL:
                    holders.append(seq)
                del seq.tokens[seq.prompt_len :]
            if errand.sent:
                self._fail(errand, "the weights changed during its hand-over")
            elif errand.state in ("asked", "granted"):
                self._seek_again(errand, now)
        return holders

    # -- leases -----------------------------------------------------------------------------------

    def _peer(self, name: str) -> Decoder:
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = Decoder()
        return peer

    def _enqueue(self, errand: Errand) -> None:
        errand.state = "waiting"
        errand.ready_at = 0.0
        insort(self._peer(errand.decoders[errand.at]).queue, errand, key=_order)

    def plan(self, now: float, *, paused: bool) -> list[Action]:
        """Whom to ask, what to send, what to hand over now. A pause ends nothing, and asks for nothing."""
        # also in a pause: a time that has passed would ring for ever
        self._look_at = float("inf")
        if not paused:
            self._trim(now)
            self._ask(now)
        for errand in list(self._granted.values()):
            self._ship.pump(errand)
        return self.take_actions()

    def take_actions(self) -> list[Action]:
        """What has to be said by now."""
        actions = [*self._actions]
        self._actions.clear()
        return actions

    def _set_timer(self, time: float, errand: Errand, attempt: int) -> None:
        heapq.heappush(self._timers, (time, errand.group, attempt))
        if len(self._timers) > 4 * len(self._errands) + 64:
            # most belong to errands that ended long before
            self._timers = [entry for entry in self._timers if entry[1] in self._errands]
            heapq.heapify(self._timers)

    def ring(self, now: float) -> None:
        """What is due by now: searches that lasted too long, leases that did, pauses that are over."""
        while self._timers and self._timers[0][0] <= now:
            _, group, attempt = heapq.heappop(self._timers)
            errand = self._errands.get(group)
            if errand is None or attempt not in (errand.attempt, _STOP):
                continue
            if attempt == _STOP:
                if errand.state == "waiting" and now >= errand.stop_at:
                    self._fail(errand, f"no instance had room for it within {self._rules.find_s:g} s", why=True)
            elif errand.granted:
                self._lost(errand, f"it was not handed over within {self._rules.total_s:g} s", now)
            elif errand.state == "waiting" and errand.ready_at:
                self._enqueue(errand)

    def _ask(self, now: float) -> None:
        rules = self._rules
        heads = sorted([peer for peer in self._peers.values() if peer.queue], key=lambda peer: peer.queue[0].order)
        fresh = self._fresh(now) if heads else []
        for peer in heads:
            position = 0
            while position < len(peer.queue) and len(self._asks) < rules.asks:
                errand = peer.queue[position]
                if any(seq.hashing for seq in errand.seqs):
                    # who waits for something else than an answer holds nobody up
                    position += 1
                    continue
                if peer.asks >= (1 if peer.silent else rules.asks_per_peer):
                    break
                ahead = self._leased_tokens + peer.asked_tokens
                if not self._is_room(ahead, errand):
                    break
                elsewhere = sum(tokens for other, tokens, _ in fresh if other is not peer)
                if not self._is_room(ahead + elsewhere, errand):
                    self._look_at = min([asked_at for _, _, asked_at in fresh]) + _PROMPT_S
                    break
                peer.queue.pop(position)
                self._send_ask(errand, peer, now)
                if peer.prompt:
                    fresh.append((peer, errand.tokens, now))

    def _fresh(self, now: float) -> list[tuple[Decoder, int, float]]:
        """What was asked a moment ago of instances that answer right away: it is as good as granted."""
        fresh = []
        for ask in reversed(self._asks.values()):
            if ask[2] + _PROMPT_S <= now:
                break
            if ask[0].prompt:
                fresh.append(ask)
        return fresh

    def _is_room(self, ahead: int, errand: Errand) -> bool:
        # at least one may always be leased, however long
        return not ahead or ahead + errand.tokens <= self._ahead_tokens

    def _trim(self, now: float) -> None:
        """Give back what was granted beyond `ahead_tokens`, youngest first: the oldest gets through."""
        while self._leased_tokens > self._ahead_tokens:
            ahead = sorted([errand for errand in self._granted.values() if not errand.begun], key=_order)
            if len(ahead) < 2 or now >= ahead[-1].over_at:
                return
            self._seek_again(ahead[-1], now)

    def _send_ask(self, errand: Errand, peer: Decoder, now: float) -> None:
        rules = self._rules
        errand.peer = errand.decoders[errand.at]
        errand.attempt += 1
        errand.state = "asked"
        self._asks[errand.group, errand.attempt] = (peer, errand.tokens, now)
        peer.asks += 1
        peer.asked_tokens += errand.tokens
        seq = errand.seqs[0]
        # once all were asked it stays where it stands in line: nobody grows older by leaving one
        others = len(errand.decoders) > 1 and not errand.rounds
        answer_by = min(errand.stop_at, now + rules.queue_s) if others else errand.stop_at
        self._actions.append(
            AskLease(
                errand.group,
                errand.attempt,
                errand.peer,
                self._weights.namespace,
                tuple(seq.keys[: errand.full]),
                min(now + rules.silent_s, answer_by),
                answer_by,
                now + rules.total_s,
                rules.ttl_s,
            )
        )

    def _on_answered(self, event: LeaseAnswered) -> None:
        asked = self._asks.pop((event.group, event.attempt), None)
        if asked is None:
            raise InvariantBroken(f"lease {event.group}/{event.attempt} was answered, and not asked for")
        peer, tokens, asked_at = asked
        peer.asks -= 1
        peer.asked_tokens -= tokens
        errand = self._errands.get(event.group)
        if errand is None or errand.attempt != event.attempt or errand.state != "asked":
            # it ended while it asked; the other instance was told
            return
        peer.silent = event.silent
        peer.prompt = not event.silent and event.at < asked_at + _PROMPT_S
        if event.granted:
            errand.state = "granted"
            self._granted[errand.group] = errand
            errand.next_block = min(event.prefix_blocks, errand.full)
            errand.begun = any(seq.state not in (State.WAITING, State.LOADING) for seq in errand.seqs)
            if not errand.begun:
                self._leased_tokens += errand.tokens
            self._set_timer(event.at + self._rules.total_s, errand, errand.attempt)
            for seq in errand.seqs:
                if seq.state is State.TAIL:
                    # it was computed under a lease that was lost
                    self._want_hand(errand, seq)
            return
        # the last word counts, and stands last
        errand.refusals.pop(errand.peer, None)
        errand.refusals[errand.peer] = event.reason[:_REASON_CHARS]
        if event.retry_after_s < 0:
            errand.decoders.remove(errand.peer)
        else:
            errand.at += 1
        errand.state = "denied"
        if not errand.decoders:
            # asking again would change nothing: it must be served in another way
            self._fail(errand, "no instance can ever have room for it", "never_lease", why=True)
        elif event.at >= errand.stop_at:
            self._fail(errand, f"no instance had room for it within {self._rules.find_s:g} s", why=True)
        elif errand.at < len(errand.decoders):
            self._enqueue(errand)
        else:
            errand.at = 0
            errand.rounds += 1
            self._wait(errand, event.at + max(event.retry_after_s, _pause_s(errand.rounds)))

    def _on_lost(self, event: LeaseLost) -> None:
        errand = self._errands.get(event.group)
        if errand is not None and errand.attempt == event.attempt and errand.granted:
            self._lost(errand, event.reason, event.at)

    def _lost(self, errand: Errand, reason: str, now: float) -> None:
        """A granted lease is over. Before any hand-over another one is sought; after, only the router knows whether
        the caller has seen something of it."""
        if errand.sent:
            self._fail(errand, f"{errand.peer}: {reason}")
        else:
            errand.at = (errand.at + 1) % len(errand.decoders)
            errand.losses += 1
            # what all of them lose at once must not be asked for again and again without a pause
            self._seek_again(errand, now, 0.0 if errand.losses % len(errand.decoders) else _pause_s(errand.losses))

    def _seek_again(self, errand: Errand, now: float, pause_s: float = 0.0) -> None:
        if now >= errand.over_at:
            self._fail(errand, f"{errand.peer}: its lease was lost, and it was not handed over before")
            return
        self._close(errand, tell=True)
        errand.stop_at = min(now + self._rules.find_s, errand.over_at)
        self._set_timer(errand.stop_at, errand, _STOP)
        if pause_s:
            self._wait(errand, now + pause_s)
        else:
            self._enqueue(errand)

    def _wait(self, errand: Errand, until: float) -> None:
        """Ask nobody before then."""
        errand.state = "waiting"
        errand.ready_at = min(until, errand.stop_at)
        self._set_timer(errand.ready_at, errand, errand.attempt)

    def _fail(self, errand: Errand, reason: str, end: str = "no_lease", *, why: bool = False) -> None:
        """Its samples end in this turn; until then nothing more is asked or sent for it.

        Args:
            why: say what the instances said, too.
        """
        if why and errand.refusals:
            reason = f"{reason}; {errand.why}"[:_WHY_CHARS]
        self._close(errand, tell=True)
        errand.state = "failed"
        self.ends += [(seq, end, reason) for seq in errand.seqs]

    def _close(self, errand: Errand, *, tell: bool) -> None:
        """Nothing more happens under its lease. What is offered stays in place until it is told that it ended."""
        if errand.state in ("asked", "granted") and tell:
            self._actions.append(GiveUpLease(errand.group, errand.attempt, errand.peer))
        if errand.granted:
            del self._granted[errand.group]
            if not errand.begun:
                self._leased_tokens -= errand.tokens
        if errand.state == "waiting" and not errand.ready_at and errand.decoders:
            queue = self._peer(errand.decoders[errand.at]).queue
            if errand in queue:
                queue.remove(errand)
        self._ship.drop(errand)
        errand.sent = False

    # -- hand-overs ---------------------------------------------------------------------------------

    def _on_handed_over(self, event: HandedOver) -> None:
        errand, seq = self._ship.handed_over(event)
        if not errand.granted:
            # once a hand-over was sent no other lease is sought: it failed, or it ended
            return
        if not event.taken:
            self._lost(errand, "it did not take the hand-over", event.at)
            return
        errand.handed += 1
        if seq.errand is errand:
            # its blocks are not needed here any more; the others of its group may still share them
            self.ends.append((seq, "handed_over", ""))


def _order(errand: Errand) -> tuple[int, int]:
    return errand.order


def _pause_s(times: int) -> float:
    """How long to wait after something went wrong so many times."""
    return min(_RETRY_MIN_S * 2.0 ** min(times, 16), _RETRY_MAX_S)
