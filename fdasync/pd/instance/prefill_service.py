"""The prefill side of an instance: carries its questions for room, its blocks and its hand-overs to other instances.

Decides nothing: whom to ask, and when to give up, the scheduler says (`disagg/prefill.py`); each of its actions
ends in one event here, whatever the other side and the network do. One coroutine for each question that is out, and
none for the leases that are granted: those are renewed together, in the heartbeats of their peer.

Called by `instance.py` with actions, messages and news of peers.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.aux import wanted_specs
from fdasync.errors import (
    ConfigError,
    DeadlineExceeded,
    InvariantBroken,
    PeerBusy,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
)
from fdasync.events.catalog import BlocksSent, HandedOver, LeaseAnswered, LeaseLost
from fdasync.ipc.deadlines import wait_within
from fdasync.pd.link.address import absolute
from fdasync.pd.messages import (
    BlockRef,
    BlocksOffer,
    BlocksTaken,
    HandOff,
    HandOffTaken,
    LeaseAnswer,
    LeaseAsk,
    LeaseDrop,
    LeaseName,
    Wanted,
    brief,
)
from fdasync.pd.transfer.base import checksum_parts

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from fdasync.engine.inputs import Ask
    from fdasync.engine.sample_output import SampleOutput
    from fdasync.events.actions import AskLease, GiveUpLease, HandOver, SendBlocks
    from fdasync.events.catalog import RequestPrepared
    from fdasync.ipc.shared_memory import Part
    from fdasync.pd.instance.context import Site
    from fdasync.pd.link.peer import Peer


class _Lease:
    """One lease that was asked for, from the question to its end.

    Attributes:
        sign: set when anything was answered; answer: set when it was answered for good, or is not wanted any more.
        told: the other side was asked.
        over: nothing more happens under it.
        out: offers and hand-overs that the other side has not answered, and the parts that it reads meanwhile.
    """

    def __init__(self, action: AskLease, name: str, ask: Ask, event: RequestPrepared, loop: asyncio.AbstractEventLoop):
        self.action = action
        self.name: LeaseName = (name, action.attempt)
        self.ask = ask
        self.event = event
        self.peer: Peer | None = None
        self.sign: asyncio.Future[None] = loop.create_future()
        self.answer: asyncio.Future[LeaseAnswered] = loop.create_future()
        self.told = self.granted = self.over = False
        self.offers: dict[int, tuple[Part, ...]] = {}
        self.hands: dict[int, tuple[int, tuple[Part, ...]]] = {}
        self.handed = 0


class Asking:
    """See the module.

    Args:
        kept: addresses that are called again for ever; others that do not answer are forgotten until they are named.

    Attributes:
        late: messages about leases that are over, or never were.
        granted: questions that were; granted_s, granted_most_s: how long those answers took, together and at most.
    """

    def __init__(self, site: Site, kept: Sequence[str] = ()) -> None:
        self._site = site
        self._kept = frozenset(map(absolute, kept))
        self._by_group: dict[tuple[int, int], _Lease] = {}
        self._by_name: dict[LeaseName, _Lease] = {}
        self._moved: dict[str, str] = {}
        self.late = self.granted = 0
        self.granted_s = self.granted_most_s = 0.0

    # -- actions ----------------------------------------------------------------------------------

    def ask(self, action: AskLease) -> None:
        """Ends in `LeaseAnswered`."""
        site = self._site
        live = site.hub.find(action.group)
        asked = None if live is None else live[0].asked
        if asked is None or asked[0].errand is None:
            raise InvariantBroken(f"a lease is asked for group {action.group}, which is no errand")
        lease = _Lease(action, asked[0].errand.name, *asked, site.loop)
        self._by_group[action.group, action.attempt] = self._by_name[lease.name] = lease
        site.start(self._ask(lease), f"lease {lease.name[0]}/{action.attempt}")

    async def _ask(self, lease: _Lease) -> None:
        group, attempt = lease.action.group, lease.action.attempt
        asked_at = self._site.loop.time()
        try:
            answer = await self._question(lease)
        except (PeerRefused, ConfigError, ProtocolError) as error:
            answer = _denied(group, attempt, str(error), retry_after_s=-1.0)
        except (PeerUnreachable, PeerBusy, DeadlineExceeded) as error:
            answer = _denied(group, attempt, str(error), silent=True)
        if lease.over and answer.granted:
            # it ended between the answer and now; the other side was told, or is gone
            answer = _denied(group, attempt, "it is not wanted any more")
        lease.granted = answer.granted
        if answer.granted:
            took_s = self._site.loop.time() - asked_at
            self.granted += 1
            self.granted_s += took_s
            self.granted_most_s = max(self.granted_most_s, took_s)
        else:
            self._end(lease, answer.reason, tell=True)
            if lease.peer is not None:
                self._forget(lease.peer)
        self._site.bus.publish(answer)

    def _forget(self, peer: Peer) -> None:
        """One that is not there, and of which nothing is wanted: it may never come back."""
        if peer.is_up or peer.address in self._kept or any(lease.peer is peer for lease in self._by_name.values()):
            return
        self._site.links.hang_up(peer)

    async def _question(self, lease: _Lease) -> LeaseAnswered:
        """Dial, ask, wait; the answer, or what stands in for one."""
        action, site = lease.action, self._site
        group, attempt = action.group, action.attempt
        peer = lease.peer = site.links.dial(action.peer)
        if not peer.is_up:
            await peer.ready(max(action.silent_by - site.loop.time(), 0.0))
        if lease.answer.done():
            return lease.answer.result()  # of a future that is done
        peer.send(self._words(lease))
        lease.told = True
        await wait_within([lease.sign], action.silent_by - site.loop.time())
        if not lease.sign.done():
            return _denied(group, attempt, "it did not answer", silent=True)
        await wait_within([lease.answer], action.answer_by - site.loop.time())
        if not lease.answer.done():
            return _denied(group, attempt, "it had no room in time")
        return lease.answer.result()  # of a future that is done

    def _words(self, lease: _Lease) -> LeaseAsk:
        action, ask, event = lease.action, lease.ask, lease.event
        now = self._site.loop.time()
        assert ask.errand is not None
        specs = wanted_specs(self._site.capacity().aux_specs, ask.routing, ask.aux)
        wanted = Wanted(
            caller=ask.errand.caller,
            tokens=array("i", event.tokens).tobytes(),
            block_keys=action.keys,
            namespace=action.namespace,
            salt=event.salt,
            params=msgspec.structs.replace(ask.params, seed=event.sampler.seed),
            streams=ask.streams,
            priority=event.priority,
            deadline_s=max(event.deadline - now, 1e-3),
            rows=tuple([spec.name for spec in specs]),
            start=ask.start,
        )
        return LeaseAsk(*lease.name, wanted, action.ttl_s, max(action.over_by - now, 0.0))

    def give_up(self, action: GiveUpLease) -> None:
        """Tell the other side; what is out under the lease ends."""
        lease = self._by_group.get((action.group, action.attempt))
        if lease is not None:
            self._end(lease, "it is not wanted any more", tell=True)

    def send(self, action: SendBlocks) -> None:
        """Ends in `BlocksSent`."""
        lease = self._by_group.get((action.group, action.attempt))
        if lease is None or lease.over:
            self._site.bus.publish(BlocksSent(offer=action.offer, taken=False))
            return
        lease.offers[action.offer] = ()
        self._site.start(self._send(lease, action), f"offer {action.offer}")

    async def _send(self, lease: _Lease, action: SendBlocks) -> None:
        site = self._site
        none = (-1,) * len(action.host)
        uses = zip(action.slots or none, action.generations or none, strict=True)
        refs = [
            await self._ref(index, host, *use)
            for index, host, use in zip(action.indices, action.host, uses, strict=True)
        ]
        if action.offer not in lease.offers:
            # the lease ended meanwhile, and the offer with it
            return
        parts = tuple([part for ref in refs for part in ref.parts])
        site.carriers.offer(parts)
        lease.offers[action.offer] = parts
        try:
            assert lease.peer is not None
            await site.say(lease.peer, BlocksOffer(*lease.name, action.offer, tuple(refs)))
        except (PeerUnreachable, PeerRefused) as error:
            self._lost(lease, str(error))

    async def _ref(self, index: int, host: int, slot: int, generation: int, num_rows: int | None = None) -> BlockRef:
        """A block of ours and its checksums. Nobody writes it: the scheduler holds it until it hears of its end.

        Raises InvariantBroken if its first `num_rows` rows (None: all) were not written for this use of their slot.
        """
        arena = self._site.arena
        if arena is not None:
            arena.check_written(slot, generation, 0, arena.block_tokens if num_rows is None else num_rows)
        parts = self._site.parts(host, slot)
        return BlockRef(index, parts, await checksum_parts(self._site.regions, parts))

    def hand_over(self, action: HandOver) -> None:
        """Ends in `HandedOver`."""
        lease = self._by_group.get((action.group, action.attempt))
        live = self._site.hub.find(action.key)
        if lease is None or lease.over or live is None:
            self._site.bus.publish(HandedOver(offer=action.offer, taken=False))
            return
        lease.hands[action.offer] = (action.index, ())
        self._site.start(self._hand_over(lease, action, live[1]), f"hand-over {action.offer}")

    async def _hand_over(self, lease: _Lease, action: HandOver, sample: SampleOutput) -> None:
        site = self._site
        raw, processed, top = sample.raw, sample.processed, sample.top
        tail = None
        if action.tail >= 0:
            tail = await self._ref(action.tail, action.host, action.slot, action.generation, action.tail_rows)
        if action.offer not in lease.hands:
            return
        if tail is not None:
            site.carriers.offer(tail.parts)
            lease.hands[action.offer] = (action.index, tail.parts)
        words = HandOff(
            *lease.name,
            action.index,
            action.offer,
            action.token,
            # the last: it was computed again where the weights changed
            raw[-1] if raw else None,
            processed[-1] if processed else None,
            top[-1] if top else None,
            action.cached,
            tail,
            action.tail_rows,
        )
        try:
            assert lease.peer is not None
            await site.say(lease.peer, words)
        except (PeerUnreachable, PeerRefused) as error:
            self._lost(lease, str(error))

    # -- what comes back ----------------------------------------------------------------------------

    def _known(self, peer: Peer, name: LeaseName) -> _Lease | None:
        lease = self._by_name.get(name)
        if lease is None or lease.peer is not peer or lease.over:
            self.late += 1
            return None
        return lease

    def on_answer(self, peer: Peer, message: LeaseAnswer) -> None:
        lease = self._known(peer, (message.request, message.attempt))
        if lease is None or lease.answer.done():
            return
        if not lease.sign.done():
            lease.sign.set_result(None)
        if message.verdict == "queued":
            return
        group, attempt = lease.action.group, lease.action.attempt
        if message.verdict == "granted":
            answer = LeaseAnswered(group=group, attempt=attempt, granted=True, prefix_blocks=message.prefix_blocks)
        else:
            answer = _denied(group, attempt, message.reason, retry_after_s=message.retry_after_s)
        lease.answer.set_result(answer)

    def on_drop(self, peer: Peer, message: LeaseDrop) -> None:
        """The other side says that there is no such lease (any more)."""
        lease = self._known(peer, (message.request, message.attempt))
        if lease is not None:
            self._lost(lease, message.reason, silent=False)

    def on_taken(self, peer: Peer, message: BlocksTaken) -> None:
        lease = self._known(peer, (message.request, message.attempt))
        if lease is not None and message.offer in lease.offers:
            self._site.carriers.withdraw(lease.offers.pop(message.offer))
            self._site.bus.publish(BlocksSent(offer=message.offer, taken=True))

    def on_hand_taken(self, peer: Peer, message: HandOffTaken) -> None:
        lease = self._known(peer, (message.request, message.attempt))
        if lease is None:
            return
        offer = next((offer for offer, (index, _) in lease.hands.items() if index == message.index), None)
        if offer is None:
            self.late += 1
            return
        _, parts = lease.hands.pop(offer)
        self._site.carriers.withdraw(parts)
        lease.handed += 1
        self._site.bus.publish(HandedOver(offer=offer, taken=True))
        if lease.handed == lease.ask.params.n:
            self._moved[lease.name[0]] = lease.action.peer
            self._end(lease, "", tell=False)

    def take_moved(self, name: str) -> str:
        """Where a request went that was handed over; "" where it is not known. Forgets it."""
        return self._moved.pop(name, "")

    def on_lost(self, peer: Peer, reason: str) -> None:
        """A peer is gone: everything with it ends."""
        for lease in [lease for lease in self._by_name.values() if lease.peer is peer and not lease.over]:
            self._lost(lease, reason)
        self._forget(peer)

    def leases(self, peer: Peer) -> tuple[LeaseName, ...]:
        """What a peer is told with each heartbeat: these are still wanted."""
        return tuple([lease.name for lease in self._by_name.values() if lease.peer is peer])

    def give_up_all(self, reason: str) -> None:
        """Tell all others that nothing more comes."""
        for lease in list(self._by_name.values()):
            self._end(lease, reason, tell=True)

    def close(self) -> None:
        """Everything ends."""
        for lease in list(self._by_name.values()):
            self._lost(lease, "the instance closes")

    # -- ends ---------------------------------------------------------------------------------------

    def _lost(self, lease: _Lease, reason: str, *, silent: bool = True) -> None:
        if lease.over:
            return
        if not lease.granted and not lease.answer.done():
            lease.answer.set_result(_denied(lease.action.group, lease.action.attempt, reason, silent=silent))
            if not lease.sign.done():
                lease.sign.set_result(None)
            return
        group, attempt = lease.action.group, lease.action.attempt
        self._end(lease, reason, tell=False)
        self._site.bus.publish(LeaseLost(group=group, attempt=attempt, reason=reason))

    def _end(self, lease: _Lease, reason: str, *, tell: bool) -> None:
        """Nothing more happens under it; idempotent."""
        if lease.over:
            return
        lease.over = True
        group, attempt = lease.action.group, lease.action.attempt
        del self._by_group[group, attempt]
        del self._by_name[lease.name]
        if not lease.answer.done():
            lease.answer.set_result(_denied(group, attempt, reason))
        if not lease.sign.done():
            lease.sign.set_result(None)
        for offer, parts in lease.offers.items():
            self._site.carriers.withdraw(parts)
            self._site.bus.publish(BlocksSent(offer=offer, taken=False))
        for offer, (_, parts) in lease.hands.items():
            self._site.carriers.withdraw(parts)
            self._site.bus.publish(HandedOver(offer=offer, taken=False))
        lease.offers.clear()
        lease.hands.clear()
        if tell and lease.told and lease.peer is not None and lease.peer.is_up:
            try:
                lease.peer.send(LeaseDrop(*lease.name, brief(reason)))
            except (PeerUnreachable, PeerRefused, PeerBusy):
                # it is not renewed any more, and ends by itself
                return


def _denied(
    group: int, attempt: int, reason: str, *, retry_after_s: float = 0.0, silent: bool = False
) -> LeaseAnswered:
    return LeaseAnswered(
        group=group, attempt=attempt, granted=False, retry_after_s=retry_after_s, reason=reason, silent=silent
    )
