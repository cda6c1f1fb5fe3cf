"""The decode side: grants leases to prefill instances, and starts samples whose blocks have arrived. Pure.

A lease reserves device blocks for the whole prompt and the first new token of each sample, and pins the prefix that
this instance has already. Offered blocks are copied to the host (a bounded number at a time: the staging ring), checked
there, and brought to the device; blocks on a device that this instance reads go straight to its own device. A sample
starts when its first token, all blocks before it and its recurrent state, if the model has one, are here. A lease is
dropped if it is not renewed, takes too long, or if its blocks do not arrive as promised; blocks that arrived whole stay
as cache. A lease that finds no room waits in line. Until it has aged, later leases and samples of this instance may
pass it, and it passes no lease or sample that has aged: so none starves.

This module knows no bytes, no links and no clock but the time of events. It is an attachment of the scheduler;
`receiver.py` enters the blocks that arrive, `fdasync_fleet/instance/decode_service.py` talks to the prefill instance.
The other side is `prefill.py`.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from typing import TYPE_CHECKING

from fdasync.cache.identity import block_keys
from fdasync.errors import InvariantBroken
from fdasync.events.actions import Action, AnswerLease, ConfirmHandOver, DropLease
from fdasync.events.catalog import (
    BlocksOffered,
    BlocksReceived,
    CacheResetRequested,
    LeaseAsked,
    LeaseGivenUp,
    LeasesRenewed,
    ResumeRequested,
    SampleOffered,
    SwapDone,
)
from fdasync.scheduler.disagg.lease import Lease
from fdasync.scheduler.disagg.receiver import BlockReceiver
from fdasync.scheduler.state.attachment import Attachment, Holds
from fdasync.scheduler.state.sequence import Sequence, State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.cache.blocks import Block
    from fdasync.cache.snapshots import Snapshot
    from fdasync.events.actions import FinishReason
    from fdasync.scheduler.state.attachment import Anew
    from fdasync.scheduler.state.policy import Order
    from fdasync.scheduler.tiers.parts import Parts

_RETRY_S = 0.2
_SWEEP_S = 0.25
_ANEW = {"weights": "the weights changed", "sleep": "the engine falls asleep"}


class DecodeSide(Attachment):
    """See the module.

    Attributes:
        leases: by group, granted and in line.
        copies: by number of a copy to the device, the leases that wait for it.
        actions: actions of this turn; `begin` takes them.
        ends: (sequence, finish reason, note) of samples that will not run here; `begin` takes them.
        ready: (sequence, offer with its first token) of samples that can run; `begin` takes them.
        granted, denied, dropped: how many leases were, so far.
    """

    def __init__(self, parts: Parts) -> None:
        self.awake = False
        self._config = config = parts.config
        self._rules = config.leases
        self._size = config.block_tokens
        self._index = parts.index
        self._queues = parts.queues
        self._swap_planner = parts.swap_planner
        self._weights = parts.weights
        self._pausing = parts.pausing
        self.leases: dict[int, Lease] = {}
        self._line: list[Lease] = []
        self._offering: dict[Lease, None] = {}
        self._stuck: dict[Lease, None] = {}
        self._sweep_at = float("inf")
        self.copies: dict[int, list[Lease]] = {}
        self.actions: list[Action] = []
        self._receiver = BlockReceiver(parts, self.actions)
        self.ends: list[tuple[Sequence, FinishReason, str]] = []
        self.ready: list[tuple[Sequence, SampleOffered]] = []
        self.granted = self.denied = self.dropped = 0
        self.handlers = {
            LeaseAsked: self._on_asked,
            LeasesRenewed: self._on_renewed,
            LeaseGivenUp: self._on_given_up,
            BlocksOffered: self._on_offered,
            SampleOffered: self._on_sample,
            BlocksReceived: self._on_received,
        }
        self.also = {ResumeRequested: self._on_resume, CacheResetRequested: self._on_reset, SwapDone: self._on_copied}

    def wake_at(self) -> float:
        """When to look for leases that are over."""
        return self._sweep_at if self.leases else float("inf")

    # -- questions --------------------------------------------------------------------------------

    def _on_asked(self, event: LeaseAsked) -> None:
        self.wake()
        seqs: list[Sequence] = []
        for request in event.requests:
            seqs.append(self.core.add(request, seqs[0] if seqs else None))
        lease = Lease(event, seqs, self._size, self._rules)
        for seq in seqs:
            seq.lease = lease.group
            self._queues.to_leased(seq)
        if not self.leases:
            self._sweep_at = event.at + _SWEEP_S
        self.leases[lease.group] = lease
        most = self._index.pool.num_blocks
        need = max(-(-(seq.max_len - 1) // self._size) for seq in seqs)
        at_once = lease.full + len(seqs)
        if event.requests[0].namespace != self._weights.namespace:
            self._deny(lease, _RETRY_S, "it has other weights")
        elif max(need, at_once) > most:
            self._deny(lease, -1.0, f"{max(need, at_once)} KV blocks are needed, it has {most}")
        elif len(self._line) >= self._rules.line:
            self._deny(lease, _RETRY_S, f"{len(self._line)} leases wait in line")
        else:
            insort(self._line, lease, key=lambda other: other.order)

    def _deny(self, lease: Lease, retry_after_s: float, reason: str) -> None:
        self.denied += 1
        self.actions.append(
            AnswerLease(
                group=lease.group, verdict="denied", prefix_blocks=0, retry_after_s=retry_after_s, reason=reason
            )
        )
        self._forget(lease, reason)

    def _forget(self, lease: Lease, reason: str) -> None:
        del self.leases[lease.group]
        self._close(lease)
        self.ends += [(seq, "lease_lost", reason) for seq in lease.seqs.values()]

    def _close(self, lease: Lease) -> None:
        """Give back the blocks that it still has; copies into them end by themselves."""
        if lease in self._line:
            self._line.remove(lease)
        if lease.granted:
            self._queues.num_leased -= len(lease.seqs)
        self._index.unreserve(lease.reserved)
        lease.reserved = 0
        self._index.release([*[block for block in lease.blocks if block is not None], *lease.open.values()])
        lease.blocks.clear()
        lease.open.clear()
        while lease.states:
            _, state = lease.states.popitem()
            if state is not None:
                self._receiver.let_go(lease, state)

    def _drop(self, lease: Lease, reason: str) -> None:
        self.dropped += 1
        self.actions.append(DropLease(lease.group, reason))
        self._forget(lease, reason)

    def begin(self, now: float) -> list[Action]:
        """The answers and copies of this turn: first tokens from another instance reach their requests before these can
        end. Samples whose blocks are here begin to decode, unless their first token is their last; samples that lost
        their lease end."""
        if now >= self._sweep_at:
            self._sweep(now)
        for lease in list(self._stuck):
            del self._stuck[lease]
            if self.leases.get(lease.group) is lease:
                self._load_states(lease)
                self._start_ready(lease)
        # what ends here gives back the blocks that leases wait for
        self._take()
        self._queues.held_for = self._grant_all(now) if self._line else None
        for lease in list(self._offering):
            if self.leases.get(lease.group) is lease:
                problem = self._receiver.receive(lease, now)
                if problem:
                    self._drop(lease, problem)
            if not lease.offered or self.leases.get(lease.group) is not lease:
                del self._offering[lease]
        self._take()
        actions = [*self.actions]
        self.actions.clear()
        self.wake(bool(self.leases or self.copies or self._receiver.is_receiving))
        return actions

    def _take(self) -> None:
        """Samples go on whose first tokens have come, or end; so do samples that have lost their lease."""
        for seq, hand in self.ready:
            seq.lease = -1
            self.core.took(seq, hand.token)
            if seq.state is State.LEASED:
                self._queues.handed_over(seq)
        self.ready.clear()
        for seq, reason, note in self.ends:
            if seq.state is not State.ENDED:
                self.core.end(seq, reason, 0, note=note)
        self.ends.clear()

    def _sweep(self, now: float) -> None:
        for lease in list(self.leases.values()):
            if now >= lease.over_by and not self._pausing.paused:
                self._drop(lease, "it was not handed over in time")
            elif now >= lease.renew_by:
                self._drop(lease, f"it was not renewed for {lease.ttl_s:g} s")
        self._sweep_at = now + _SWEEP_S if self.leases else float("inf")

    def _on_resume(self, _event: ResumeRequested) -> None:
        """A pause is over: it was no part of the time for any lease."""
        for lease in self.leases.values():
            lease.over_by += self._pausing.held_s

    def has_begun(self, seq: Sequence) -> bool:
        lease = self.leases.get(seq.lease)
        # without its lease a sample starts, or ends, in this turn
        return seq.lease >= 0 and (lease is None or lease.granted)

    def _grant_all(self, now: float) -> Order | None:
        """Grant the leases that fit; returns the order of the first lease that has aged and does not fit.

        Leases in line and samples that wait for room here have one order: none passes an aged one. A pause that lets
        requests end waits for every granted lease, so none is granted meanwhile, and no lease holds up the end. Nor is
        one granted during a sleep: its blocks would have no device, and its samples would wait here for the wake.
        """
        before = now - self._rules.age_s
        first = self._queues.first_aged(before)
        grants = self._pausing.stage in ("running", "paused")
        held_for = None
        for lease in list(self._line):
            if grants and held_for is None and (first is None or lease.order < first) and self._grant(lease):
                self._line.remove(lease)
                continue
            if not lease.queued:
                lease.queued = True
                self.actions.append(AnswerLease(lease.group, "queued"))
            if grants and held_for is None and lease.asked_at <= before:
                held_for = lease.order
        return held_for

    def _grant(self, lease: Lease) -> bool:
        index, queues = self._index, self._queues
        seqs = list(lease.seqs.values())
        most = self._config.max_running + self._rules.beyond_running
        alone = not queues.num_running and not queues.num_leased
        # docs/design.md, rule 19: one request may always lease, however many samples it has; they run in turn
        if not alone and queues.num_running + queues.num_leased + len(seqs) > most:
            return False
        hits: list[Block] = []
        if index.enabled:
            for key in lease.keys[: lease.full]:
                block = index.get(key)
                if block is None or not block.sealed:
                    break
                hits.append(block)
        away = [block for block in hits if block.id < 0]
        fresh = lease.full - len(hits) + len(seqs)
        needed = fresh + len(away) + (0 if alone else queues.reserve(self._config.decode_reserve_blocks))
        if needed > index.available_besides(hits):
            self._swap_planner.need(needed + sum(1 for block in hits if not block.ref_count))
            return False
        index.pin([block for block in hits if block.id >= 0])
        for block in away:
            index.bring(block)
        # blocks are only promised until they are offered: a lease that is given up has cost next to nothing
        index.reserve(fresh)
        lease.reserved = fresh
        lease.blocks = [*hits, *[None] * (lease.full - len(hits))]
        queues.num_leased += len(seqs)
        if seqs[0].prompt_len % self._size:
            lease.tails = dict.fromkeys(lease.seqs)
        self._swap_planner.bring(away)
        self._await(lease, sorted({block.arriving for block in hits if block.arriving >= 0}))
        lease.prefix = len(hits)
        lease.missing = lease.full - len(hits)
        lease.granted = True
        self.granted += 1
        self.actions.append(AnswerLease(lease.group, "granted", lease.prefix))
        return True

    def _await(self, lease: Lease, copies: list[int]) -> None:
        for number in copies:
            lease.arriving.add(number)
            self.copies.setdefault(number, []).append(lease)

    # -- messages of the prefill instance -----------------------------------------------------------

    def _on_renewed(self, event: LeasesRenewed) -> None:
        for group in event.groups:
            lease = self.leases.get(group)
            if lease is not None:
                lease.renew_by = event.at + lease.ttl_s

    def _on_given_up(self, event: LeaseGivenUp) -> None:
        for group in event.groups:
            lease = self.leases.get(group)
            if lease is not None:
                self._forget(lease, event.reason)
            self._take_back(group, event.reason)

    def _take_back(self, group: int, reason: str) -> None:
        """End samples that could start in this very turn, before they are confirmed to the prefill instance."""
        back = [entry for entry in self.ready if entry[0].lease == group]
        if back:
            self.ready = [entry for entry in self.ready if entry[0].lease != group]
            self.actions[:] = [
                action for action in self.actions if not isinstance(action, ConfirmHandOver) or action.group != group
            ]
            self.ends += [(seq, "lease_lost", reason) for seq, _ in back]

    def _on_offered(self, event: BlocksOffered) -> None:
        lease = self.leases.get(event.group)
        if lease is None or not lease.granted:
            return
        if any(not lease.prefix <= index < lease.full for index in event.indices):
            self._drop(lease, f"blocks {event.indices} were offered of {lease.prefix} to {lease.full - 1}")
            return
        lease.offered += [(event.offer, index, None, event.on_device) for index in event.indices]
        self._offering[lease] = None

    def _on_sample(self, event: SampleOffered) -> None:
        lease = self.leases.get(event.group)
        if lease is None or not lease.granted or event.key not in lease.seqs or event.key in lease.hands:
            return
        seq = lease.seqs[event.key]
        lease.hands[event.key] = event
        if event.key in lease.tails:
            lease.offered.append((event.offer, lease.full, seq, event.on_device))
            self._offering[lease] = None
        if event.with_state:
            self._want_state(lease, event.key)
        self._start_ready(lease)

    # -- blocks -------------------------------------------------------------------------------------

    def _on_received(self, event: BlocksReceived) -> None:
        lease = self._receiver.received(event, self._bring, self._bring_state)
        if self.leases.get(lease.group) is not lease:
            return
        if all(event.arrived):
            self._start_ready(lease)
        else:
            self._drop(lease, f"its blocks did not arrive: {event.problem}")

    def _bring(self, lease: Lease, blocks: list[Block]) -> None:
        if self.leases.get(lease.group) is lease:
            self._await(lease, self._swap_planner.bring(blocks))

    def _want_state(self, lease: Lease, key: int) -> None:
        """A sample comes with its state. All samples of a group share the state behind their prompt: a state that is
        here, or on its way, serves all that wait."""
        here = next(iter(lease.states.values()), None)
        comes = bool(lease.states)
        lease.states[key] = here
        if here is not None:
            here.hold()
            self._load_states(lease)
        elif not comes:
            self._fetch_state(lease, key)

    def _fetch_state(self, lease: Lease, key: int) -> None:
        lease.offered.append((lease.hands[key].offer, lease.full + 1, lease.seqs[key], False))
        self._offering[lease] = None

    def _bring_state(self, lease: Lease, state: Snapshot) -> bool:
        waiting = [key for key, held in lease.states.items() if held is None]
        if self.leases.get(lease.group) is not lease or not waiting:
            return False
        for number, key in enumerate(waiting):
            lease.states[key] = state
            if number:
                # the first one has the hold of the transfer
                state.hold()
        self._load_states(lease)
        return True

    def _load_states(self, lease: Lease) -> None:
        """Bring the states on the host to the device, as far as there are places; the next turn tries again."""
        pool = self._index.pool.snapshots
        for key, state in lease.states.items():
            seq = lease.seqs[key]
            if state is None or seq.resume is not None:
                continue
            assert pool is not None
            if state.place < 0 and not pool.bring(state):
                self._stuck[lease] = None
                return
            pool.pin(state)
            seq.resume = state
            if not state.on_device:
                self._await(lease, [self._swap_planner.bring_snapshot(state)])

    def _on_copied(self, event: SwapDone) -> None:
        for lease in self.copies.pop(event.copy_id, ()):
            lease.arriving.discard(event.copy_id)
            if self.leases.get(lease.group) is lease:
                self._start_ready(lease)

    def _start_ready(self, lease: Lease) -> None:
        """Start the samples whose first token and blocks are here."""
        if lease.missing or lease.arriving:
            return
        for key, hand in list(lease.hands.items()):
            if key in lease.tails or (key in lease.states and lease.seqs[key].resume is None):
                continue
            block = lease.open.pop(key, None)
            if block is None:
                # the prompt fills its blocks
                block = self._index.take_reserved()
                if block is None:
                    self._stuck[lease] = None
                    return
                lease.reserved -= 1
            seq = lease.seqs.pop(key)
            del lease.hands[key]
            state = lease.states.pop(key, None)
            if state is not None:
                self._receiver.let_go(lease, state)
            shared = [block for block in lease.blocks if block is not None]
            self._index.pin(shared)
            seq.blocks = [*shared, block]
            self._queues.num_leased -= 1
            seq.tokens.append(hand.token)
            seq.computed_prefill = seq.planned = seq.prompt_len
            seq.admitted(hand.cached)
            seq.midway = True
            if self._index.enabled:
                parent = seq.keys[-1] if seq.keys else seq.root
                seq.keys += block_keys(parent, seq.tokens, self._size, len(seq.keys) * self._size)
            self.actions.append(ConfirmHandOver(lease.group, key, seq.emits))
            self.ready.append((seq, hand))
        if not lease.seqs:
            del self.leases[lease.group]
            self._close(lease)

    # -- ends ---------------------------------------------------------------------------------------

    def ended(self, seq: Sequence, reason: FinishReason, keep: int) -> int:
        """A sample may end while it is leased: aborted, or at its deadline."""
        lease = self.leases.get(seq.lease)
        if lease is not None and lease.seqs.pop(seq.key, None) is not None:
            lease.hands.pop(seq.key, None)
            lease.tails.pop(seq.key, None)
            state = lease.states.pop(seq.key, None)
            if state is not None:
                self._receiver.let_go(lease, state)
            lost = any(index > lease.full and of is seq for _, index, of, _ in lease.offered)
            lease.offered = deque(entry for entry in lease.offered if entry[2] is not seq)
            if lost and lease.states:
                # its state was to be that of others, too
                self._fetch_state(lease, next(iter(lease.states)))
            if lease.granted:
                self._queues.num_leased -= 1
                block = lease.open.pop(seq.key, None)
                if block is None:
                    lease.reserved -= 1
                    self._index.unreserve(1)
                else:
                    self._index.release([block])
            if not lease.seqs:
                self.actions.append(DropLease(lease.group, "its request ended", ended=True))
                del self.leases[lease.group]
                self._close(lease)
        return keep

    def start_anew(self, why: Anew) -> None:
        """Blocks on their way can be used no more: every lease ends."""
        if self.leases or why == "weights":
            self._receiver.epoch += 1
        for lease in list(self.leases.values()):
            self._drop(lease, _ANEW[why])

    def _on_reset(self, _event: CacheResetRequested) -> None:
        """Granted leases keep the blocks that they have; neither these nor their later blocks are shared."""
        for lease in self.leases.values():
            if lease.granted:
                lease.shares = False
                for seq in lease.seqs.values():
                    seq.indexed = False

    def stats(self) -> dict[str, int]:
        return {
            "leases_granted": self.granted,
            "leases_denied": self.denied,
            "leases_dropped": self.dropped,
            "received_blocks": self._receiver.num_received,
        }

    def check(self, live: Iterable[Sequence]) -> Holds:
        """Raise InvariantBroken unless leases, the line and what is reserved agree."""
        reserved = sum(lease.reserved for lease in self.leases.values())
        if reserved != self._index.reserved:
            raise InvariantBroken(f"leases have {reserved} blocks to come, {self._index.reserved} are reserved")
        leased = sum(len(lease.seqs) for lease in self.leases.values() if lease.granted)
        if leased != self._queues.num_leased:
            raise InvariantBroken(f"{leased} samples hold leases, {self._queues.num_leased} were counted")
        for lease in self._line:
            if lease.granted or self.leases.get(lease.group) is not lease:
                raise InvariantBroken(f"lease {lease.group} stands in line, and should not")
        for lease in self.leases.values():
            if lease.granted == (lease in self._line):
                raise InvariantBroken(f"lease {lease.group} is neither granted nor in line, or both")
        blocks: list[Block] = []
        for lease in self.leases.values():
            blocks += [block for block in lease.blocks if block is not None]
            blocks += lease.open.values()
        states = [state for lease in self.leases.values() for state in lease.states.values() if state is not None]
        return Holds(
            blocks=blocks,
            snapshots=states + self._receiver.held_snapshots,
            host={"receive": self._receiver.num_receiving},
            waits=bool(self.leases),
        )
