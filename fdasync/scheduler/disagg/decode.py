"""Room for requests that others prefill: who gets a lease, what arrives under it, when its samples start here.

A lease holds device blocks for the whole prompt and the first new token of each sample, and pins the prefix that is
here already. Blocks that are offered are copied to the host (a bounded number at a time: the staging ring), checked
there, and brought to the device; a sample starts when its first token and everything before it are here. A lease that
is not renewed, takes too long, or whose blocks do not arrive as they were promised, is dropped: what arrived whole
stays as cache. What does not fit waits in line: others may pass it until it has aged, leases and samples of this
instance alike, and it passes none of those that have aged, so that nobody starves.

Pure. Called by `core.py`; `receiver.py` takes what arrives, `decode_service.py` talks to the other instance. The other
side is `disagg/prefill.py`."""

from __future__ import annotations

from bisect import insort
from collections import deque
from typing import TYPE_CHECKING

from fdasync.cache.prefix import block_keys
from fdasync.errors import InvariantBroken
from fdasync.events.actions import Action, AnswerLease, ConfirmHandOver, DropLease
from fdasync.events.catalog import BlocksOffered, BlocksReceived, Event, LeaseGivenUp, LeasesRenewed, SampleOffered
from fdasync.scheduler.disagg.lease import Lease
from fdasync.scheduler.disagg.receiver import Receiver

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.cache.blocks import Block
    from fdasync.cache.prefix import PrefixIndex
    from fdasync.events.catalog import LeaseAsked
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.queues import Roster
    from fdasync.scheduler.state.sequence import Sequence
    from fdasync.scheduler.tiers.swap_planner import Copier

_RETRY_S = 0.2
_SWEEP_S = 0.25


class Lender:
    """See the module.

    Attributes:
        ends: (sequence, finish reason, why) of samples that nothing comes of here, taken by `core.py`.
        started: (sequence, event) of samples that have everything, likewise.
        granted, denied, dropped: leases so far.
        handlers: of the events that belong here.
    """

    def __init__(self, config: SchedulerConfig, index: PrefixIndex, roster: Roster, copier: Copier) -> None:
        self._config = config
        self._rules = config.leases
        self._size = config.block_tokens
        self._index = index
        self._roster = roster
        self._copier = copier
        self._leases: dict[int, Lease] = {}
        self._line: list[Lease] = []
        self._offering: dict[Lease, None] = {}
        self._stuck: dict[Lease, None] = {}
        self._sweep_at = float("inf")
        self._copies: dict[int, list[Lease]] = {}
        self._actions: list[Action] = []
        self._receiver = Receiver(config, index, self._actions)
        self.ends: list[tuple[Sequence, str, str]] = []
        self.started: list[tuple[Sequence, SampleOffered]] = []
        self.granted = self.denied = self.dropped = 0
        self.handlers: dict[type[Event], Callable[..., None]] = {
            LeasesRenewed: self._on_renewed,
            LeaseGivenUp: self._on_given_up,
            BlocksOffered: self._on_offered,
            SampleOffered: self._on_sample,
            BlocksReceived: self._on_received,
        }

    @property
    def num_leases(self) -> int:
        """Granted, and in line."""
        return len(self._leases)

    @property
    def num_receiving(self) -> int:
        """Host blocks that are being filled."""
        return self._receiver.num_receiving

    @property
    def received(self) -> int:
        """Blocks that arrived from other instances."""
        return self._receiver.num_received

    @property
    def wake_at(self) -> float:
        """When to look for leases that are over."""
        return self._sweep_at

    # -- asking -----------------------------------------------------------------------------------

    def asked(self, event: LeaseAsked, seqs: list[Sequence], namespace: bytes) -> None:
        """Someone asks for room; the samples are in the roster, and hold nothing."""
        lease = Lease(event, seqs, self._size, self._rules)
        self._leases[lease.group] = lease
        self._sweep_at = min(self._sweep_at, event.at + _SWEEP_S)
        most = self._index.pool.num_blocks
        need = max(-(-(seq.max_len - 1) // self._size) for seq in seqs)
        at_once = lease.full + len(seqs)
        if event.requests[0].namespace != namespace:
            self._deny(lease, _RETRY_S, "it has other weights")
        elif max(need, at_once) > most:
            self._deny(lease, -1.0, f"{max(need, at_once)} KV blocks are needed, it has {most}")
        elif len(self._line) >= self._rules.line:
            self._deny(lease, _RETRY_S, f"{len(self._line)} leases wait in line")
        else:
            insort(self._line, lease, key=lambda other: other.order)

    def _deny(self, lease: Lease, retry_after_s: float, reason: str) -> None:
        self.denied += 1
        self._actions.append(AnswerLease(lease.group, "denied", 0, retry_after_s, reason))
        self._forget(lease, reason)

    def _forget(self, lease: Lease, reason: str) -> None:
        del self._leases[lease.group]
        self._close(lease)
        self.ends += [(seq, "lease_lost", reason) for seq in lease.seqs.values()]

    def _close(self, lease: Lease) -> None:
        """Give back what it still holds; what is on its way into its blocks ends by itself."""
        if lease in self._line:
            self._line.remove(lease)
        if lease.granted:
            self._roster.num_leased -= len(lease.seqs)
        self._index.unreserve(lease.reserved)
        lease.reserved = 0
        self._index.release([*[block for block in lease.blocks if block is not None], *lease.open.values()])
        lease.blocks.clear()
        lease.open.clear()

    def _drop(self, lease: Lease, reason: str) -> None:
        self.dropped += 1
        self._actions.append(DropLease(lease.group, reason))
        self._forget(lease, reason)

    def plan(self, now: float) -> list[Action]:
        """Whom to grant a lease, and what to copy now."""
        if now >= self._sweep_at:
            self._sweep(now)
        self._roster.held_for = self._grant_all(now) if self._line else None
        for lease in list(self._stuck):
            del self._stuck[lease]
            if self._leases.get(lease.group) is lease:
                self._start_ready(lease)
        for lease in list(self._offering):
            if self._leases.get(lease.group) is lease:
                problem = self._receiver.receive(lease, now)
                if problem:
                    self._drop(lease, problem)
            if not lease.offered or self._leases.get(lease.group) is not lease:
                del self._offering[lease]
        actions = [*self._actions]
        self._actions.clear()
        return actions

    def _sweep(self, now: float) -> None:
        for lease in list(self._leases.values()):
            if now >= lease.over_by:
                self._drop(lease, "it was not handed over in time")
            elif now >= lease.renew_by:
                self._drop(lease, f"it was not renewed for {lease.ttl_s:g} s")
        self._sweep_at = now + _SWEEP_S if self._leases else float("inf")

    def _grant_all(self, now: float) -> tuple[int, int] | None:
        """Grant what fits; returns the order of the first lease that has aged and does not.

        One order holds for leases in line and for samples that wait for room here: nobody passes one who has aged.
        """
        before = now - self._rules.age_s
        first = self._roster.first_aged(before)
        held_for = None
        for lease in list(self._line):
            if held_for is None and (first is None or lease.order < first) and self._grant(lease):
                self._line.remove(lease)
                continue
            if not lease.queued:
                lease.queued = True
                self._actions.append(AnswerLease(lease.group, "queued"))
            if held_for is None and lease.asked_at <= before:
                held_for = lease.order
        return held_for

    def _grant(self, lease: Lease) -> bool:
        index, roster = self._index, self._roster
        seqs = list(lease.seqs.values())
        most = self._config.max_running + self._rules.beyond_running
        alone = not roster.num_running and not roster.num_leased
        # one may always be leased, however many samples it has: they run in turn
        if not alone and roster.num_running + roster.num_leased + len(seqs) > most:
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
        needed = fresh + len(away) + (0 if alone else roster.reserve(self._config.decode_reserve_blocks))
        if needed > index.available_besides(hits):
            self._copier.need(needed + sum(1 for block in hits if not block.pins))
            return False
        index.pin([block for block in hits if block.id >= 0])
        for block in away:
            index.bring(block)
        # the rest is a number until it is offered: most of the work of a lease that comes to nothing is never done
        index.reserve(fresh)
        lease.reserved = fresh
        lease.blocks = [*hits, *[None] * (lease.full - len(hits))]
        roster.num_leased += len(seqs)
        if seqs[0].prompt_len % self._size:
            lease.tails = dict.fromkeys(lease.seqs)
        self._copier.bring(away)
        self._await(lease, sorted({block.arriving for block in hits if block.arriving >= 0}))
        lease.prefix = len(hits)
        lease.missing = lease.full - len(hits)
        lease.granted = True
        self.granted += 1
        self._actions.append(AnswerLease(lease.group, "granted", lease.prefix))
        return True

    def _await(self, lease: Lease, copies: list[int]) -> None:
        for number in copies:
            lease.arriving.add(number)
            self._copies.setdefault(number, []).append(lease)

    # -- what the other instance says ---------------------------------------------------------------

    def _on_renewed(self, event: LeasesRenewed) -> None:
        for group in event.groups:
            lease = self._leases.get(group)
            if lease is not None:
                lease.renew_by = event.at + lease.ttl_s

    def _on_given_up(self, event: LeaseGivenUp) -> None:
        for group in event.groups:
            lease = self._leases.get(group)
            if lease is not None:
                self._forget(lease, event.reason)
            self._take_back(group, event.reason)

    def _take_back(self, group: int, reason: str) -> None:
        """Samples that had everything in this very turn, which nobody has been told yet."""
        back = [entry for entry in self.started if entry[0].lease == group]
        if back:
            self.started = [entry for entry in self.started if entry[0].lease != group]
            self._actions[:] = [
                action for action in self._actions if not isinstance(action, ConfirmHandOver) or action.group != group
            ]
            self.ends += [(seq, "lease_lost", reason) for seq, _ in back]

    def _on_offered(self, event: BlocksOffered) -> None:
        lease = self._leases.get(event.group)
        if lease is None or not lease.granted:
            return
        if any(not lease.prefix <= index < lease.full for index in event.indices):
            self._drop(lease, f"blocks {event.indices} were offered of {lease.prefix} to {lease.full - 1}")
            return
        lease.offered += [(event.offer, index, None) for index in event.indices]
        self._offering[lease] = None

    def _on_sample(self, event: SampleOffered) -> None:
        lease = self._leases.get(event.group)
        if lease is None or not lease.granted or event.key not in lease.seqs or event.key in lease.hands:
            return
        seq = lease.seqs[event.key]
        lease.hands[event.key] = event
        if event.key in lease.tails:
            lease.offered.append((event.offer, lease.full, seq))
            self._offering[lease] = None
        self._start_ready(lease)

    # -- blocks -------------------------------------------------------------------------------------

    def _on_received(self, event: BlocksReceived) -> None:
        lease = self._receiver.received(event, self._bring)
        if self._leases.get(lease.group) is not lease:
            return
        if all(event.arrived):
            self._start_ready(lease)
        else:
            self._drop(lease, f"its blocks did not arrive: {event.problem}")

    def _bring(self, lease: Lease, blocks: list[Block]) -> None:
        if self._leases.get(lease.group) is lease:
            self._await(lease, self._copier.bring(blocks))

    def copied(self, copy_id: int) -> None:
        """Blocks are on the device."""
        for lease in self._copies.pop(copy_id, ()):
            lease.arriving.discard(copy_id)
            if self._leases.get(lease.group) is lease:
                self._start_ready(lease)

    def _start_ready(self, lease: Lease) -> None:
        """Start the samples that have everything."""
        if lease.missing or lease.arriving:
            return
        for key, hand in list(lease.hands.items()):
            if key in lease.tails:
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
            shared = [block for block in lease.blocks if block is not None]
            self._index.pin(shared)
            seq.blocks = [*shared, block]
            self._roster.num_leased -= 1
            seq.tokens.append(hand.token)
            seq.computed_prefill = seq.planned = seq.prompt_len
            seq.cached_tokens = hand.cached
            seq.midway = True
            if self._index.enabled:
                parent = seq.keys[-1] if seq.keys else seq.root
                seq.keys += block_keys(parent, seq.tokens, self._size, len(seq.keys) * self._size)
            self._actions.append(ConfirmHandOver(lease.group, key, seq.emits))
            self.started.append((seq, hand))
        if not lease.seqs:
            del self._leases[lease.group]
            self._close(lease)

    # -- ends ---------------------------------------------------------------------------------------

    def leave(self, seq: Sequence, group: int) -> None:
        """A sample ended while it was leased: aborted, or its deadline passed."""
        lease = self._leases.get(group)
        if lease is not None and lease.seqs.pop(seq.key, None) is not None:
            lease.hands.pop(seq.key, None)
            lease.tails.pop(seq.key, None)
            lease.offered = deque(entry for entry in lease.offered if entry[2] is not seq)
            if lease.granted:
                self._roster.num_leased -= 1
                block = lease.open.pop(seq.key, None)
                if block is None:
                    lease.reserved -= 1
                    self._index.unreserve(1)
                else:
                    self._index.release([block])
            if not lease.seqs:
                self._actions.append(DropLease(group, "its request ended", ended=True))
                del self._leases[group]
                self._close(lease)

    def new_weights(self) -> None:
        """Nothing that is on its way may be used."""
        self._receiver.epoch += 1
        for lease in list(self._leases.values()):
            self._drop(lease, "the weights changed")

    def held(self) -> list[Block]:
        """Blocks that leases pin, once for each of their pins."""
        blocks: list[Block] = []
        for lease in self._leases.values():
            blocks += [block for block in lease.blocks if block is not None]
            blocks += lease.open.values()
        return blocks

    def check(self) -> None:
        """Raise InvariantBroken unless leases, the line and what is reserved agree."""
        reserved = sum(lease.reserved for lease in self._leases.values())
        if reserved != self._index.reserved:
            raise InvariantBroken(f"leases have {reserved} blocks to come, {self._index.reserved} are reserved")
        leased = sum(len(lease.seqs) for lease in self._leases.values() if lease.granted)
        if leased != self._roster.num_leased:
            raise InvariantBroken(f"{leased} samples hold leases, {self._roster.num_leased} were counted")
        for lease in self._line:
            if lease.granted or self._leases.get(lease.group) is not lease:
                raise InvariantBroken(f"lease {lease.group} stands in line, and should not")
        for lease in self._leases.values():
            if lease.granted == (lease in self._line):
                raise InvariantBroken(f"lease {lease.group} is neither granted nor in line, or both")
