"""The prefill side: asks decode instances for leases, and hands off requests that it prefilled. Pure.

The samples of a request are one hand-off. A hand-off is admitted once a decode instance has granted a lease: a prefill
instance holds no block while it waits for one, and a decode instance that does not answer costs the hand-offs to others
nothing (docs/design.md, section 6). Questions are bounded per instance (`asks_per_peer`) and overall (`asks`).
`ahead_tokens` bounds the work that has a lease and is not begun, so that a decode instance's memory does not wait for
this instance's queue. The bound counts all leases granted and the questions to the one decode instance: instances that
answer at the same time may each grant as much. If a lease is lost before any hand-over, another one is looked for, and
the computed blocks are sent there.

This module knows no bytes, no links and no clock but the time of events. It is an attachment of the scheduler;
`disagg/sender.py` sends the blocks, `fdasync_fleet/instance/prefill_service.py` carries the questions. The other side
is `decode.py`.
"""

from __future__ import annotations

import heapq
from bisect import insort
from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken
from fdasync.events.actions import AskLease, GiveUpLease
from fdasync.events.catalog import (
    BlocksSent,
    HandedOver,
    LeaseAnswered,
    LeaseLost,
    PauseRequested,
    RequestPrepared,
    ResumeRequested,
)
from fdasync.scheduler.disagg.handoff import Decoder, HandOff
from fdasync.scheduler.disagg.sender import BlockSender
from fdasync.scheduler.state.attachment import Attachment, Holds
from fdasync.scheduler.state.sequence import Sequence, State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.events.actions import Action, FinishReason, PartEnd
    from fdasync.scheduler.state.attachment import Anew
    from fdasync.scheduler.state.policy import Order
    from fdasync.scheduler.tiers.parts import Parts

_RETRY_MIN_S = 0.05
_RETRY_MAX_S = 1.0
# of one instance's reason, and of all reasons, in the error that a caller gets
_REASON_CHARS = 300
_WHY_CHARS = 2000
# stands for an attempt in a timer: the time to find room is over
_STOP = -2
_ANEW = {"weights": "the weights changed during its hand-over", "sleep": "the engine fell asleep during its hand-over"}


class PrefillSide(Attachment):
    """See the module.

    Attributes:
        hand_offs: by group, until all samples have ended here.
        actions: actions of this turn; `plan` takes them.
        ends: (sequence, finish reason, note) of samples that end in this turn; `ring` takes them.
    """

    concerns = "decoders"

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        self.awake = False
        self._queues = parts.queues
        self._pausing = parts.pausing
        self._rules = config.leases
        self._block_tokens = config.block_tokens
        self._ahead_tokens = config.leases.ahead_tokens or 2 * config.max_step_tokens
        self._weights = parts.weights
        self.hand_offs: dict[int, HandOff] = {}
        self._peers: dict[str, Decoder] = {}
        self._granted: dict[int, HandOff] = {}
        self._asks: dict[tuple[int, int], tuple[Decoder, int]] = {}
        self._timers: list[tuple[float, int, int]] = []
        self._leased_tokens = 0
        self.actions: list[Action] = []
        self._sender = BlockSender(parts, self.actions)
        self.ends: list[tuple[Sequence, FinishReason, str]] = []
        self.handlers = {
            LeaseAnswered: self._on_answered,
            LeaseLost: self._on_lost,
            BlocksSent: self._sender.sent,
            HandedOver: self._on_handed_over,
        }
        self.also = {PauseRequested: self._on_pause, ResumeRequested: self._on_resume}

    # -- called by the rest of the scheduler ------------------------------------------------------

    def stats(self) -> dict[str, int]:
        return {"hand_offs": len(self.hand_offs)}

    def check(self, live: Iterable[Sequence]) -> Holds:
        waits = self._asks or self._sender.num_out or self._timers
        return Holds(snapshots=self._sender.held_snapshots, waits=bool(waits))

    def wake_at(self) -> float:
        return self._timers[0][0] if self._timers else float("inf")

    def prepared(self, seq: Sequence, event: RequestPrepared) -> None:
        """Another instance shall decode it."""
        self.wake()
        now = event.at
        hand_off = self.hand_offs.get(event.group)
        if hand_off is None:
            stop_at = min(now + self._rules.find_s, event.deadline)
            over_at = min(max(now + self._rules.total_s, stop_at), event.deadline)
            hand_off = HandOff(event, seq.order, self._block_tokens, stop_at, over_at)
            self.hand_offs[event.group] = hand_off
            self._set_timer(hand_off.stop_at, hand_off, _STOP)
        hand_off.seqs.append(seq)
        seq.hand_off = hand_off
        if len(hand_off.seqs) == hand_off.samples:
            self._enqueue(hand_off)

    def has_begun(self, seq: Sequence) -> bool:
        return seq.hand_off is not None and seq.hand_off.granted

    def chunk(self, seq: Sequence, start: int, stop: int, step_id: int) -> None:
        """Once it is in prefill, its tokens do not count for `ahead_tokens` any more."""
        hand_off = None if seq.hand_off is None else self.hand_offs.get(seq.group)
        if hand_off is not None and hand_off.granted and not hand_off.begun:
            hand_off.begun = True
            self._leased_tokens -= hand_off.tokens

    def computed(self, seq: Sequence) -> bool:
        """The sequence has its first token: hand it over when its open block is on the host."""
        if seq.hand_off is not None:
            self._want_hand(self.hand_offs[seq.group], seq)
        return seq.hand_off is not None

    def _want_hand(self, hand_off: HandOff, seq: Sequence) -> None:
        if hand_off.granted and seq.key not in hand_off.hands and len(seq.tokens) > seq.prompt_len:
            hand_off.hands[seq.key] = None

    def ended(self, seq: Sequence, reason: FinishReason, keep: int) -> int:
        """The decode instance gives its first token; a result is empty before. Blocks that a decode instance is reading
        stay until it has read them."""
        if seq.hand_off is None:
            return keep
        hand_off = self.hand_offs[seq.group]
        seq.hand_off = None
        hand_off.seqs.remove(seq)
        self._sender.forget(hand_off, seq)
        if not hand_off.seqs:
            ended: PartEnd = reason if reason in ("abort", "deadline") else ""
            self._close(hand_off, tell=hand_off.handed < hand_off.samples, ended=ended)
            hand_off.state = "ended"
            del self.hand_offs[hand_off.group]
            if not self.hand_offs:
                # neither is looked at before the next hand-off comes, and every sequence in `ends` has ended
                self._timers.clear()
                self.ends.clear()
        return keep if reason == "handed_over" else 0

    def start_anew(self, why: Anew) -> None:
        """No block that was computed may be sent any more: every hand-off starts anew, and one whose blocks were sent
        already ends. The sequences give their blocks up."""
        holders = []
        for hand_off in list(self.hand_offs.values()):
            for seq in hand_off.seqs:
                if seq.state is State.TAIL or seq.state is State.PREFILL:
                    holders.append(seq)
                seq.start_anew()
            if hand_off.sent:
                self._fail(hand_off, _ANEW[why])
            elif hand_off.state in ("asked", "granted"):
                self._seek_again(hand_off, self.core.now)
        for seq in holders:
            self._queues.leave(seq)

    # -- pauses -----------------------------------------------------------------------------------

    def _is_held(self, hand_off: HandOff) -> bool:
        """A pause keeps it from its next question, or from its steps: no time passes for it."""
        return any(not self._pausing.lets_begin(seq) for seq in hand_off.seqs)

    def _on_pause(self, event: PauseRequested) -> None:
        """A pause lets only the requests that have begun go on: take the questions of the others back. A lease that was
        granted now would keep the decode instance waiting for blocks."""
        for hand_off in self.hand_offs.values() if event.mode == "wait" else ():
            if hand_off.state == "asked" and self._is_held(hand_off):
                self._close(hand_off, tell=True)
                self._enqueue(hand_off)

    def _on_resume(self, _event: ResumeRequested) -> None:
        """A pause is over: it was no part of the time for any search or lease."""
        held_s = self._pausing.held_s
        for hand_off in self.hand_offs.values() if held_s > 0 else ():
            hand_off.stop_at += held_s
            hand_off.over_at += held_s
            hand_off.lost_at += held_s
            self._set_timer(hand_off.stop_at, hand_off, _STOP)
            if hand_off.granted:
                self._set_timer(hand_off.lost_at, hand_off, hand_off.attempt)

    # -- leases -----------------------------------------------------------------------------------

    def _peer(self, name: str) -> Decoder:
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = Decoder()
        return peer

    def _enqueue(self, hand_off: HandOff) -> None:
        hand_off.state = "waiting"
        hand_off.ready_at = 0.0
        insort(self._peer(hand_off.decoders[hand_off.at]).queue, hand_off, key=_order)

    def plan(self, now: float) -> list[Action]:
        """The questions, offers and hand-overs of this turn. A pause ends no lease and asks for none."""
        if not self._pausing.paused:
            self._ask(now)
        for hand_off in list(self._granted.values()):
            self._sender.pump(hand_off)
        actions = [*self.actions]
        self.actions.clear()
        self.wake(bool(self.hand_offs))
        return actions

    def _set_timer(self, time: float, hand_off: HandOff, attempt: int) -> None:
        heapq.heappush(self._timers, (time, hand_off.group, attempt))
        if len(self._timers) > 4 * len(self.hand_offs) + 64:
            # most belong to hand-offs that ended long before
            self._timers = [entry for entry in self._timers if entry[1] in self.hand_offs]
            heapq.heapify(self._timers)

    def ring(self, now: float) -> None:
        """Handle the timers that are due: a search or a lease lasted too long, or a pause is over."""
        while self._timers and self._timers[0][0] <= now:
            _, group, attempt = heapq.heappop(self._timers)
            hand_off = self.hand_offs.get(group)
            if hand_off is None or attempt not in (hand_off.attempt, _STOP):
                continue
            if self._is_held(hand_off) and (attempt == _STOP or hand_off.granted):
                # no time passes for it; `resumed` sets its timers again
                continue
            if attempt == _STOP:
                if hand_off.state == "waiting" and now >= hand_off.stop_at:
                    self._fail(hand_off, f"no instance had room for it within {self._rules.find_s:g} s", why=True)
            elif hand_off.granted and now >= hand_off.lost_at:
                self._lost(hand_off, f"it was not handed over within {self._rules.total_s:g} s", now)
            elif hand_off.state == "waiting" and hand_off.ready_at:
                self._enqueue(hand_off)
        # before anything is planned: sequences that end give back blocks that others wait for
        for seq, reason, note in self.ends:
            if seq.state is not State.ENDED:
                self.core.end(seq, reason, seq.num_output, note=note)
        self.ends.clear()

    def _ask(self, now: float) -> None:
        rules = self._rules
        heads = sorted([peer for peer in self._peers.values() if peer.queue], key=lambda peer: peer.queue[0].order)
        for peer in heads:
            position = 0
            while position < len(peer.queue) and len(self._asks) < rules.asks:
                hand_off = peer.queue[position]
                if any(seq.hashing for seq in hand_off.seqs) or self._is_held(hand_off):
                    # a hand-off that waits for its identities, or that a pause holds, does not hold up the others
                    position += 1
                    continue
                if peer.asks >= (1 if peer.silent else rules.asks_per_peer):
                    break
                # questions to other instances do not count: a silent instance must not hold this one up
                if not self._is_room(self._leased_tokens + peer.asked_tokens, hand_off):
                    break
                peer.queue.pop(position)
                self._send_ask(hand_off, peer, now)

    def _is_room(self, ahead: int, hand_off: HandOff) -> bool:
        # docs/design.md, rule 19: one request may always lease, however long
        return not ahead or ahead + hand_off.tokens <= self._ahead_tokens

    def _send_ask(self, hand_off: HandOff, peer: Decoder, now: float) -> None:
        rules = self._rules
        hand_off.peer = hand_off.decoders[hand_off.at]
        hand_off.attempt += 1
        hand_off.state = "asked"
        self._asks[hand_off.group, hand_off.attempt] = (peer, hand_off.tokens)
        peer.asks += 1
        peer.asked_tokens += hand_off.tokens
        seq = hand_off.seqs[0]
        # once all were asked it stays in the line that it stands in: leaving a line would cost it its age there
        others = len(hand_off.decoders) > 1 and not hand_off.rounds
        answer_by = min(hand_off.stop_at, now + rules.queue_s) if others else hand_off.stop_at
        self.actions.append(
            AskLease(
                group=hand_off.group,
                attempt=hand_off.attempt,
                peer=hand_off.peer,
                namespace=self._weights.namespace,
                keys=tuple(seq.keys[: hand_off.full]),
                silent_by=min(now + rules.silent_s, answer_by),
                answer_by=answer_by,
                over_by=now + rules.total_s,
                ttl_s=rules.ttl_s,
            )
        )

    def _on_answered(self, event: LeaseAnswered) -> None:
        asked = self._asks.pop((event.group, event.attempt), None)
        if asked is None:
            raise InvariantBroken(f"lease {event.group}/{event.attempt} was answered, and not asked for")
        peer, tokens = asked
        peer.asks -= 1
        peer.asked_tokens -= tokens
        hand_off = self.hand_offs.get(event.group)
        if hand_off is None or hand_off.attempt != event.attempt or hand_off.state != "asked":
            # it ended while its question was out, and `_close` has given the lease up
            return
        peer.silent = event.silent
        if event.granted:
            hand_off.state = "granted"
            hand_off.on_device = event.reads_device
            self._granted[hand_off.group] = hand_off
            hand_off.next_block = min(event.prefix_blocks, hand_off.full)
            hand_off.begun = any(seq.state not in (State.WAITING, State.LOADING) for seq in hand_off.seqs)
            if not hand_off.begun:
                self._leased_tokens += hand_off.tokens
            hand_off.lost_at = event.at + self._rules.total_s
            self._set_timer(hand_off.lost_at, hand_off, hand_off.attempt)
            for seq in hand_off.seqs:
                if seq.state is State.TAIL:
                    # it was computed under an earlier lease, which was lost
                    self._want_hand(hand_off, seq)
            return
        # the last reason of an instance counts, and stands last
        hand_off.refusals.pop(hand_off.peer, None)
        hand_off.refusals[hand_off.peer] = event.reason[:_REASON_CHARS]
        if event.retry_after_s < 0:
            hand_off.decoders.remove(hand_off.peer)
        else:
            hand_off.at += 1
        hand_off.state = "denied"
        if not hand_off.decoders:
            # no other answer can come: the router has to serve the request in another way
            self._fail(hand_off, "no instance can ever have room for it", "never_lease", why=True)
        elif event.at >= hand_off.stop_at and not self._is_held(hand_off):
            self._fail(hand_off, f"no instance had room for it within {self._rules.find_s:g} s", why=True)
        elif hand_off.at < len(hand_off.decoders):
            self._enqueue(hand_off)
        else:
            hand_off.at = 0
            hand_off.rounds += 1
            self._wait(hand_off, event.at + max(event.retry_after_s, _pause_s(hand_off.rounds)))

    def _on_lost(self, event: LeaseLost) -> None:
        hand_off = self.hand_offs.get(event.group)
        if hand_off is not None and hand_off.attempt == event.attempt and hand_off.granted:
            self._lost(hand_off, event.reason, event.at)

    def _lost(self, hand_off: HandOff, reason: str, now: float) -> None:
        """A granted lease is over. Before any hand-over another lease is looked for. After one, the request fails: only
        the router knows whether the caller has seen a token."""
        if hand_off.sent:
            self._fail(hand_off, f"{hand_off.peer}: {reason}")
        else:
            hand_off.at = (hand_off.at + 1) % len(hand_off.decoders)
            hand_off.losses += 1
            # when all instances have lost it, pause: the next round must not follow at once
            self._seek_again(
                hand_off, now, 0.0 if hand_off.losses % len(hand_off.decoders) else _pause_s(hand_off.losses)
            )

    def _seek_again(self, hand_off: HandOff, now: float, pause_s: float = 0.0) -> None:
        if now >= hand_off.over_at and not self._is_held(hand_off):
            self._fail(hand_off, f"{hand_off.peer}: its lease was lost, and it was not handed over before")
            return
        self._close(hand_off, tell=True)
        hand_off.stop_at = min(now + self._rules.find_s, hand_off.over_at)
        self._set_timer(hand_off.stop_at, hand_off, _STOP)
        if pause_s:
            self._wait(hand_off, now + pause_s)
        else:
            self._enqueue(hand_off)

    def _wait(self, hand_off: HandOff, until: float) -> None:
        """Ask no instance before `until`."""
        hand_off.state = "waiting"
        hand_off.ready_at = min(until, hand_off.stop_at)
        self._set_timer(hand_off.ready_at, hand_off, hand_off.attempt)

    def _fail(self, hand_off: HandOff, reason: str, end: FinishReason = "no_lease", *, why: bool = False) -> None:
        """Its samples end in this turn; until then nothing more is asked or sent for it.

        Args:
            why: name the reasons of the instances, too.
        """
        if why and hand_off.refusals:
            reason = f"{reason}; {hand_off.why}"[:_WHY_CHARS]
        self._close(hand_off, tell=True)
        hand_off.state = "failed"
        self.ends += [(seq, end, reason) for seq in hand_off.seqs]

    def _close(self, hand_off: HandOff, *, tell: bool, ended: PartEnd = "") -> None:
        """End what happens under its lease; `tell`: give the lease up, `ended`: see `GiveUpLease`. Offered blocks stay
        in place until their offer has ended."""
        if hand_off.state in ("asked", "granted") and tell:
            self.actions.append(GiveUpLease(hand_off.group, hand_off.attempt, hand_off.peer, ended))
        if hand_off.granted:
            del self._granted[hand_off.group]
            if not hand_off.begun:
                self._leased_tokens -= hand_off.tokens
        if hand_off.state == "waiting" and not hand_off.ready_at and hand_off.decoders:
            queue = self._peer(hand_off.decoders[hand_off.at]).queue
            if hand_off in queue:
                queue.remove(hand_off)
        self._sender.drop(hand_off)
        hand_off.sent = False

    # -- hand-overs ---------------------------------------------------------------------------------

    def _on_handed_over(self, event: HandedOver) -> None:
        hand_off, seq = self._sender.handed_over(event)
        if not hand_off.granted:
            # after a hand-over no other lease is looked for: the request has failed or ended
            return
        if not event.taken:
            self._lost(hand_off, "it did not take the hand-over", event.at)
            return
        hand_off.handed += 1
        if seq.hand_off is hand_off:
            # this sample needs its blocks no more; other samples of its group may still share them
            self.ends.append((seq, "handed_over", ""))


def _order(hand_off: HandOff) -> Order:
    return hand_off.order


def _pause_s(times: int) -> float:
    """How long to wait after the so-many-th failure."""
    return min(_RETRY_MIN_S * 2.0 ** min(times, 16), _RETRY_MAX_S)
