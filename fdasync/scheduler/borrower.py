"""Requests that are prefilled here and decoded elsewhere: finding them room, sending their blocks, handing them over.

A group of samples is one *errand*. It is admitted once an instance has granted a lease, and not before: P holds no
block while it waits for D, and a D that does not answer costs the errands of other D's nothing. Asks are bounded per
instance and overall; `ahead_tokens` bounds the work that is leased and not begun, so that D's memory does not wait on
our queue. Sealed blocks go as they seal, by way of the host; a sample's first token and its open block close its
hand-over.
Where a lease is lost before any hand-over, another one is looked for, and what was computed is sent there.

Pure. Called by `core.py` and `planner.py`; whoever carries the questions is `pd/courier.py`. The other side is
`lender.py`.
"""

from __future__ import annotations

import heapq
from bisect import insort
from typing import TYPE_CHECKING

from fdasync.actions import AskLease, GiveUpLease, HandOver, SendBlocks
from fdasync.errors import InvariantBroken
from fdasync.events.catalog import BlocksSent, Event, HandedOver, LeaseAnswered, LeaseLost
from fdasync.scheduler.sequence import Sequence, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.actions import Action
    from fdasync.events.catalog import RequestPrepared
    from fdasync.scheduler.config import SchedulerConfig
    from fdasync.scheduler.copier import Copier, Export
    from fdasync.scheduler.tiers import Tiers

_MAX_OFFER_BLOCKS = 16
_RETRY_MIN_S = 0.05
_RETRY_MAX_S = 1.0
# in place of an attempt: the time to find room is over
_STOP = -2


class Errand:
    """A group of samples on its way to another instance.

    Attributes:
        state: "waiting" to be asked for, "asked", "granted", "failed" until its samples have ended, "ended".
        decoders: instances that may still be asked; `at`: the next of them; `rounds`: times that all were
            asked; `losses`: leases lost.
        attempt: of the ask in flight or granted; -1 before the first.
        full: full blocks of the prompt; the next one to be sent is `next_block`.
        begun: its first sample entered prefill under this lease.
        exports: blocks on their way to be offered, in order.
        hands: samples that have their first token, and their open blocks once those are on their way.
        sent: some sample's hand-over was sent.
        handed: samples that the other instance goes on with.
        stop_at: when to stop looking for room; over_at: when not to begin again.
    """

    __slots__ = (
        "at", "attempt", "begun", "decoders", "exports", "full", "group", "handed", "hands", "losses", "next_block",
        "order", "over_at", "peer", "ready_at", "rounds", "samples", "sent", "seqs", "state", "stop_at", "tokens",
    )  # fmt: skip

    def __init__(
        self, event: RequestPrepared, order: tuple[int, int], block_tokens: int, stop_at: float, over_at: float
    ) -> None:
        self.group = event.group
        self.order = order
        self.decoders = list(event.decoders)
        self.samples = event.samples
        self.tokens = len(event.tokens)
        self.full = self.tokens // block_tokens
        self.stop_at = stop_at
        self.over_at = over_at
        self.state = "waiting"
        self.at = self.rounds = self.losses = 0
        self.attempt = -1
        self.peer = ""
        self.ready_at = 0.0
        self.next_block = 0
        self.begun = self.sent = False
        self.handed = 0
        self.seqs: list[Sequence] = []
        self.exports: list[tuple[int, Export]] = []
        self.hands: dict[int, Export | None] = {}

    @property
    def granted(self) -> bool:
        return self.state == "granted"


class _Peer:
    """One decode instance, as seen from here: errands that would ask it next, and what it was asked."""

    __slots__ = ("asked_tokens", "asks", "exported", "queue", "silent")

    def __init__(self) -> None:
        self.queue: list[Errand] = []
        self.asks = 0
        self.asked_tokens = 0
        self.exported = 0
        self.silent = False


class Borrower:
    """See the module.

    Attributes:
        ends: (sequence, finish reason, why), taken by `core.py`.
        handlers: of the events that belong here.
    """

    def __init__(self, config: SchedulerConfig, copier: Copier, tiers: Tiers) -> None:
        self._rules = config.leases
        self._block_tokens = config.block_tokens
        self._ahead_tokens = config.leases.ahead_tokens or 2 * config.max_step_tokens
        self._staging = config.leases.staging_blocks or max(config.num_host_blocks // 2, 1)
        self._copier = copier
        self._tiers = tiers
        self._errands: dict[int, Errand] = {}
        self._peers: dict[str, _Peer] = {}
        self._granted: dict[int, Errand] = {}
        self._asks: dict[tuple[int, int], tuple[_Peer, int]] = {}
        self._offers: dict[int, tuple[str, list[Export]]] = {}
        self._hand_overs: dict[int, tuple[Errand, int, Sequence, Export | None]] = {}
        self._timers: list[tuple[float, int, int]] = []
        self._leased_tokens = 0
        self._exported = 0
        self._next_offer = 0
        self._actions: list[Action] = []
        self.ends: list[tuple[Sequence, str, str]] = []
        self.handlers: dict[type[Event], Callable[..., None]] = {
            LeaseAnswered: self._on_answered,
            LeaseLost: self._on_lost,
            BlocksSent: self._on_sent,
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
        return len(self._offers) + len(self._hand_overs) + len(self._timers)

    @property
    def wake_at(self) -> float:
        return self._timers[0][0] if self._timers else float("inf")

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
        errand = seq.errand
        if errand is not None and errand.granted and not errand.begun:
            errand.begun = True
            self._leased_tokens -= errand.tokens

    def computed(self, seq: Sequence) -> None:
        """Its first token is there: hand it over when its open block is on the host."""
        errand = seq.errand
        assert errand is not None
        self._want_hand(errand, seq)

    def _want_hand(self, errand: Errand, seq: Sequence) -> None:
        if errand.granted and seq.key not in errand.hands and len(seq.tokens) > seq.prompt_len:
            errand.hands[seq.key] = None

    def leave(self, seq: Sequence) -> None:
        """It ended, however that came about; what of it is being read by another instance stays until that ends."""
        errand = seq.errand
        if errand is None:
            return
        seq.errand = None
        errand.seqs.remove(seq)
        export = errand.hands.pop(seq.key, None)
        if export is not None:
            self._copier.release(export)
        if not errand.seqs:
            self._close(errand, tell=errand.handed < errand.samples)
            errand.state = "ended"
            del self._errands[errand.group]
            if not self._errands:
                # nobody looks at the clock again before the next one comes
                self._timers.clear()

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

    def _peer(self, name: str) -> _Peer:
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = _Peer()
        return peer

    def _enqueue(self, errand: Errand) -> None:
        errand.state = "waiting"
        errand.ready_at = 0.0
        insort(self._peer(errand.decoders[errand.at]).queue, errand, key=lambda other: other.order)

    def plan(self, now: float, *, paused: bool) -> list[Action]:
        """Whom to ask, what to send, what to hand over now. A pause ends nothing, and asks for nothing."""
        if not paused:
            self._ask(now)
        for errand in list(self._granted.values()):
            self._pump(errand)
        return self.take_actions()

    def take_actions(self) -> list[Action]:
        """What has to be said by now."""
        actions, self._actions = self._actions, []
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
                    self._fail(errand, f"no instance had room for it within {self._rules.find_s:g} s")
            elif errand.granted:
                self._lost(errand, f"it was not handed over within {self._rules.total_s:g} s", now)
            elif errand.state == "waiting" and errand.ready_at:
                self._enqueue(errand)

    def _ask(self, now: float) -> None:
        rules = self._rules
        heads = sorted([peer for peer in self._peers.values() if peer.queue], key=lambda peer: peer.queue[0].order)
        for peer in heads:
            position = 0
            while position < len(peer.queue) and len(self._asks) < rules.asks:
                errand = peer.queue[position]
                if any(seq.hashing for seq in errand.seqs):
                    # who waits for something else than an answer holds nobody up
                    position += 1
                    continue
                ahead = self._leased_tokens + peer.asked_tokens
                # at least one may always be leased, however long
                full = ahead and ahead + errand.tokens > self._ahead_tokens
                if peer.asks >= (1 if peer.silent else rules.asks_per_peer) or full:
                    break
                peer.queue.pop(position)
                self._send_ask(errand, peer, now)

    def _send_ask(self, errand: Errand, peer: _Peer, now: float) -> None:
        rules = self._rules
        errand.peer = errand.decoders[errand.at]
        errand.attempt += 1
        errand.state = "asked"
        self._asks[errand.group, errand.attempt] = (peer, errand.tokens)
        peer.asks += 1
        peer.asked_tokens += errand.tokens
        seq = errand.seqs[0]
        others = len(errand.decoders) > 1
        answer_by = min(errand.stop_at, now + rules.queue_s) if others else errand.stop_at
        self._actions.append(
            AskLease(
                errand.group,
                errand.attempt,
                errand.peer,
                self._tiers.namespace,
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
        peer, tokens = asked
        peer.asks -= 1
        peer.asked_tokens -= tokens
        errand = self._errands.get(event.group)
        if errand is None or errand.attempt != event.attempt or errand.state != "asked":
            # it ended while it asked; the other instance was told
            return
        peer.silent = event.silent
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
        if event.retry_after_s < 0:
            errand.decoders.remove(errand.peer)
        else:
            errand.at += 1
        errand.state = "denied"
        if not errand.decoders or event.at >= errand.stop_at:
            self._fail(errand, f"{errand.peer}: {event.reason}")
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

    def _fail(self, errand: Errand, reason: str) -> None:
        """Its samples end in this turn; until then nothing more is asked or sent for it."""
        self._close(errand, tell=True)
        errand.state = "failed"
        self.ends += [(seq, "no_lease", reason) for seq in errand.seqs]

    def _close(self, errand: Errand, *, tell: bool) -> None:
        """Nothing more happens under its lease. What is offered stays in place until the courier says that it ended."""
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
        for _, export in errand.exports:
            self._unexport(errand.peer, export)
        errand.exports.clear()
        for hand in errand.hands.values():
            if hand is not None:
                self._copier.release(hand)
        errand.hands.clear()
        errand.sent = False

    # -- blocks -----------------------------------------------------------------------------------

    def _pump(self, errand: Errand) -> None:
        """Send what is sealed as far as there is room on the host, and hand over who is ready."""
        holder = next((seq for seq in errand.seqs if seq.blocks), None)
        peer = self._peer(errand.peer)
        share = max(self._staging // 2, 1)
        gone = next((number for number, (_, export) in enumerate(errand.exports) if export.gone), None)
        if gone is not None:
            # whoever had them was preempted: they are sent when they were computed again
            errand.next_block = errand.exports[gone][0]
            for _, export in errand.exports[gone:]:
                self._unexport(errand.peer, export)
            del errand.exports[gone:]
        while holder is not None and errand.next_block < errand.full:
            block = holder.blocks[errand.next_block]
            if not block.sealed or not block.usable:
                break
            if self._exported and (self._exported >= self._staging or peer.exported >= share):
                break
            errand.exports.append((errand.next_block, self._copier.export(block)))
            errand.next_block += 1
            self._exported += 1
            peer.exported += 1
        while errand.exports and errand.exports[0][1].ready:
            count = 0
            while count < min(len(errand.exports), _MAX_OFFER_BLOCKS) and errand.exports[count][1].ready:
                count += 1
            self._offer(errand, errand.exports[:count])
            del errand.exports[:count]
        if errand.next_block < errand.full:
            return
        tail = errand.tokens % self._block_tokens
        for seq in errand.seqs:
            if seq.key not in errand.hands:
                continue
            hand = errand.hands[seq.key]
            if tail and hand is None:
                # last, or open blocks could hold the room on the host that the others wait for
                hand = errand.hands[seq.key] = self._copier.export(seq.blocks[-1])
            # a hand-over closes: until all else was offered, another lease may still be found
            if not errand.exports and (hand is None or hand.ready):
                self._hand_over(errand, seq, hand)

    def _offer(self, errand: Errand, batch: list[tuple[int, Export]]) -> None:
        number = self._take_offer()
        exports = [export for _, export in batch]
        self._offers[number] = (errand.peer, exports)
        self._actions.append(
            SendBlocks(
                number,
                errand.group,
                errand.attempt,
                errand.peer,
                tuple([index for index, _ in batch]),
                tuple([export.block.host for export in exports]),
                tuple([export.block.slot.id for export in exports if export.block.slot is not None]),
            )
        )

    def _hand_over(self, errand: Errand, seq: Sequence, export: Export | None) -> None:
        number = self._take_offer()
        errand.sent = True
        del errand.hands[seq.key]
        self._hand_overs[number] = (errand, errand.attempt, seq, export)
        block = None if export is None else export.block
        self._actions.append(
            HandOver(
                number,
                errand.group,
                errand.attempt,
                errand.peer,
                seq.key,
                seq.sampler.index,
                seq.tokens[seq.prompt_len],
                -1 if block is None else errand.full,
                seq.prompt_len % self._block_tokens,
                -1 if block is None else block.host,
                -1 if block is None or block.slot is None else block.slot.id,
                seq.cached_tokens or (0, 0, 0),
            )
        )

    def _take_offer(self) -> int:
        self._next_offer += 1
        return self._next_offer - 1

    def _on_sent(self, event: BlocksSent) -> None:
        entry = self._offers.pop(event.offer, None)
        if entry is None:
            raise InvariantBroken(f"offer {event.offer} ended, and was not out")
        for export in entry[1]:
            self._unexport(entry[0], export)

    def _unexport(self, peer: str, export: Export) -> None:
        self._copier.release(export)
        self._exported -= 1
        self._peer(peer).exported -= 1

    def _on_handed_over(self, event: HandedOver) -> None:
        entry = self._hand_overs.pop(event.offer, None)
        if entry is None:
            raise InvariantBroken(f"hand-over {event.offer} ended, and was not out")
        errand, attempt, seq, export = entry
        if export is not None:
            self._copier.release(export)
        if errand.state == "ended" or errand.attempt != attempt or not errand.granted:
            return
        if not event.taken:
            self._lost(errand, "it did not take the hand-over", event.at)
            return
        errand.handed += 1
        if seq.errand is errand:
            # its blocks are not needed here any more; the others of its group may still share them
            self.ends.append((seq, "handed_over", ""))


def _pause_s(times: int) -> float:
    """How long to wait after something went wrong so many times."""
    return min(_RETRY_MIN_S * 2.0 ** min(times, 16), _RETRY_MAX_S)
