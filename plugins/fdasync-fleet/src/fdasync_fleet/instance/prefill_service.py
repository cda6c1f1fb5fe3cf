"""The prefill side of an instance: sends lease requests, blocks and hand-offs to decode instances.

The scheduler (`disagg/prefill.py`) decides which instance gets a lease request and when to give up; this module decides
nothing. Each of the scheduler's actions ends in one event, whatever the other side and the network do. A lease request
has a task until it is decided; granted leases have none, since the heartbeats to their peer renew them.

Called by `instance.py` with actions, messages and changes of peers.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

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
from fdasync.ipc.deadlines import DeadlineTimer, wait_within
from fdasync.ipc.shared_memory import DEVICE_REGION
from fdasync_fleet.link.address import absolute
from fdasync_fleet.messages import (
    BlockRef,
    BlocksOffer,
    BlocksTaken,
    HandOff,
    HandOffTaken,
    LeaseAnswer,
    LeaseDrop,
    LeaseRequest,
    Wanted,
    brief,
)
from fdasync_fleet.results import score_messages

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Sequence

    from fdasync.engine.request_state import RequestState, SampleOutput
    from fdasync.events.actions import AskLease, GiveUpLease, HandOver, SendBlocks
    from fdasync.events.catalog import Event, RequestPrepared
    from fdasync.ipc.shared_memory import Part
    from fdasync.request import GenerateRequest
    from fdasync.result import PartEnd
    from fdasync_fleet.fields import LeaseName
    from fdasync_fleet.instance.context import InstanceContext
    from fdasync_fleet.link.peer import Peer

# for how many decode instances it is kept why they were not reached
_MAX_UNREACHED = 8


class _Lease:
    """One lease, from its request to its end.

    Attributes:
        action: the scheduler's action.
        name: its (request, attempt).
        asked, event: the caller's request, as it came and as it was prepared.
        peer: the decode instance; None before it was dialed.
        sign: set at the first reply.
        answer: set at the final reply, or when the lease is not wanted any more.
        sent: the lease request was sent.
        granted: the lease was granted.
        over: the lease is over.
        offers: by number, the offers that are not taken yet, and the parts that the other side reads.
        hands: by number, the hand-offs that are not taken yet: the sample's number, and the parts.
        handed: number of samples handed over.
    """

    def __init__(
        self,
        action: AskLease,
        name: str,
        asked: GenerateRequest,
        event: RequestPrepared,
        loop: asyncio.AbstractEventLoop,
    ):
        self.action = action
        self.name: LeaseName = (name, action.attempt)
        self.asked = asked
        self.event = event
        self.peer: Peer | None = None
        self.sign: asyncio.Future[None] = loop.create_future()
        self.answer: asyncio.Future[LeaseAnswered] = loop.create_future()
        self.sent = self.granted = self.over = False
        self.offers: dict[int, tuple[Part, ...]] = {}
        self.hands: dict[int, tuple[int, tuple[Part, ...]]] = {}
        self.handed = 0


class _Parting(NamedTuple):
    """What the other side may still read of a lease whose request ended here.

    Attributes:
        peer: the other side, which answers once it knows of the end.
        offered: what to publish for each offer when it may be read no more, and its parts.
        timer: lets go where no answer comes.
    """

    peer: Peer
    offered: tuple[tuple[Event, tuple[Part, ...]], ...]
    timer: DeadlineTimer


class PrefillService:
    """See the module.

    Args:
        kept: addresses that are dialed without end; another instance that does not answer is forgotten until a router
            names it again.

    Attributes:
        late: number of messages about unknown leases.
        granted: number of leases granted to this instance.
        granted_s, granted_most_s: seconds from request to grant, the sum and the longest.
        unreached: by address, why the decode instance that routers reach there was not reached from here at the last
            try.
    """

    def __init__(self, context: InstanceContext, kept: Sequence[str] = ()) -> None:
        self._context = context
        self._kept = frozenset(map(absolute, kept))
        self._by_group: dict[tuple[int, int], _Lease] = {}
        self._by_name: dict[LeaseName, _Lease] = {}
        self._partings: dict[LeaseName, _Parting] = {}
        self._moved: dict[str, str] = {}
        self.unreached: dict[str, str] = {}
        self.late = self.granted = 0
        self.granted_s = self.granted_most_s = 0.0

    # -- actions ----------------------------------------------------------------------------------

    def ask(self, action: AskLease) -> None:
        """Ends in `LeaseAnswered`."""
        context = self._context
        live = context.processor.find(action.group)
        asked = None if live is None else live[0].asked
        if asked is None or asked[0].hand_off is None:
            raise InvariantBroken(f"a lease is asked for group {action.group}, which has no hand-off")
        lease = _Lease(action, asked[0].hand_off.name, *asked, context.loop)
        self._by_group[action.group, action.attempt] = self._by_name[lease.name] = lease
        context.start(self._ask(lease), f"lease {lease.name[0]}/{action.attempt}")

    async def _ask(self, lease: _Lease) -> None:
        group, attempt = lease.action.group, lease.action.attempt
        asked_at = self._context.loop.time()
        try:
            answer = await self._ask_peer(lease)
        except (PeerRefused, ConfigError, ProtocolError) as error:
            answer = _denied(group, attempt, str(error), retry_after_s=-1.0)
        except (PeerUnreachable, PeerBusy, DeadlineExceeded) as error:
            answer = _denied(group, attempt, str(error), silent=True)
        if lease.over and answer.granted:
            # the lease ended after the reply; the other side knows, or is gone
            answer = _denied(group, attempt, "it is not wanted any more")
        lease.granted = answer.granted
        if answer.granted:
            took_s = self._context.loop.time() - asked_at
            self.granted += 1
            self.granted_s += took_s
            self.granted_most_s = max(self.granted_most_s, took_s)
        else:
            self._end(lease, answer.reason, tell=True)
            if lease.peer is not None:
                self._forget(lease.peer)
        self._context.bus.publish(answer)

    def _forget(self, peer: Peer) -> None:
        """Hang up on a peer that is not up and has no leases: it may never come back."""
        if peer.is_up or peer.address in self._kept or any(lease.peer is peer for lease in self._by_name.values()):
            return
        self._context.links.hang_up(peer)

    async def _ask_peer(self, lease: _Lease) -> LeaseAnswered:
        """Dial, send the lease request, wait for the reply; a silent peer counts as a denial."""
        action, context = lease.action, self._context
        group, attempt = action.group, action.attempt
        peer = lease.peer = context.links.dial(action.peer)
        incarnation, says = _seen(lease)
        if not peer.is_up:
            try:
                await peer.ready(max(action.silent_by - context.loop.time(), 0.0))
            except DeadlineExceeded:
                raise self._unreached(action.peer, says, "nobody answers") from None
        if incarnation and peer.incarnation != incarnation:
            where = "" if peer.hello is None else f" (it says that it listens at {peer.hello.address})"
            problem = str(self._unreached(action.peer, says, f"{peer.name} answers{where}"))
            # to ask again would find the same one: the router has the request served in another way
            return _denied(group, attempt, problem, retry_after_s=-1.0)
        self.unreached.pop(action.peer, None)
        if lease.answer.done():
            return lease.answer.result()  # of a future that is done
        peer.send(self._message(lease))
        lease.sent = True
        await wait_within([lease.sign], action.silent_by - context.loop.time())
        if not lease.sign.done():
            return _denied(group, attempt, "it did not answer", silent=True)
        await wait_within([lease.answer], action.answer_by - context.loop.time())
        if not lease.answer.done():
            return _denied(group, attempt, "it had no room in time")
        return lease.answer.result()  # of a future that is done

    def _unreached(self, address: str, says: str, found: str) -> PeerUnreachable:
        """A decode instance is not where its router reaches it: whoever reads it has to know what both sides see."""
        problem = f"the router reaches a decode instance there, which says that it listens at {says or 'no address'}"
        error = PeerUnreachable(
            address, f"{problem}; from {self._context.address} {found}: name addresses that all reach (--host)"
        )
        self.unreached.pop(address, None)
        self.unreached[address] = str(error)
        if len(self.unreached) > _MAX_UNREACHED:
            del self.unreached[next(iter(self.unreached))]
        return error

    def _message(self, lease: _Lease) -> LeaseRequest:
        action, asked, event = lease.action, lease.asked, lease.event
        now = self._context.loop.time()
        assert asked.hand_off is not None
        specs = wanted_specs(self._context.capacity().aux_specs, asked.routing, asked.aux)
        wanted = Wanted(
            caller=asked.hand_off.caller,
            tokens=array("i", event.tokens).tobytes(),
            block_keys=action.keys,
            namespace=action.namespace,
            salt=event.salt,
            params=msgspec.structs.replace(asked.params, seed=event.sampler.seed),
            streams=asked.streams,
            priority=event.priority,
            deadline_s=max(event.deadline - now, 1e-3),
            rows=tuple([spec.name for spec in specs]),
            start=asked.start,
            waited_s=0.0 if event.arrived_at is None else max(now - event.arrived_at, 0.0),
            trace=asked.trace,
        )
        return LeaseRequest(*lease.name, wanted, action.ttl_s, max(action.over_by - now, 0.0))

    def give_up(self, action: GiveUpLease) -> None:
        """End a lease, with all of its offers and hand-offs, and tell the other side."""
        lease = self._by_group.get((action.group, action.attempt))
        if lease is not None:
            self._end(lease, "it is not wanted any more", tell=True, ended=action.ended)

    def send(self, action: SendBlocks) -> None:
        """Ends in `BlocksSent`."""
        lease = self._by_group.get((action.group, action.attempt))
        if lease is None or lease.over:
            self._context.bus.publish(BlocksSent(offer=action.offer, taken=False))
            return
        lease.offers[action.offer] = ()
        self._context.start(self._send(lease, action), f"offer {action.offer}")

    async def _send(self, lease: _Lease, action: SendBlocks) -> None:
        context = self._context
        none = (-1,) * len(action.indices)
        uses = zip(action.slots or none, action.generations or none, strict=True)
        known = await context.device_sums(action.device) if action.device else none
        if action.offer not in lease.offers:
            # the lease and its offers ended meanwhile
            return
        places = zip(action.host or none, uses, action.device or none, strict=True)
        blocks = [self._parts(host, *use, device=device) for host, use, device in places]
        parts = tuple([part for block in blocks for part in block])
        context.transports.offer(parts)
        lease.offers[action.offer] = parts
        sums = await self._checksums(blocks, known)
        if action.offer not in lease.offers:
            return
        refs = map(BlockRef, action.indices, blocks, sums)
        try:
            assert lease.peer is not None
            await context.say(lease.peer, BlocksOffer(*lease.name, action.offer, tuple(refs)))
        except (PeerUnreachable, PeerRefused) as error:
            self._lost(lease, str(error))

    def _parts(
        self, host: int, slot: int, generation: int, num_rows: int | None = None, *, device: int
    ) -> tuple[Part, ...]:
        """The parts of a block. The scheduler holds the block, so that it does not change. `device`: its device block,
        from which it is read; -1: it is read from `host`.

        Raises InvariantBroken if its first `num_rows` rows (None: all) were not written for this use of their slot.
        """
        arena = self._context.arena
        if arena is not None:
            arena.check_written(slot, generation, 0, arena.block_tokens if num_rows is None else num_rows)
        return self._context.parts(host, slot) if device < 0 else self._context.device_parts(device, slot)

    async def _checksums(self, blocks: Sequence[tuple[Part, ...]], known: Sequence[int]) -> list[tuple[int, ...]]:
        """Checksums of the parts of offered blocks; `known`: of the first part of each block on the device."""
        memory = [part for block in blocks for part in block if part.region != DEVICE_REGION]
        sums = iter(await self._context.transports.checksums(memory))
        return [
            tuple([first if part.region == DEVICE_REGION else next(sums) for part in block])
            for block, first in zip(blocks, known, strict=True)
        ]

    def hand_over(self, action: HandOver) -> None:
        """Ends in `HandedOver`."""
        lease = self._by_group.get((action.group, action.attempt))
        live = self._context.processor.find(action.key)
        if lease is None or lease.over or live is None:
            self._context.bus.publish(HandedOver(offer=action.offer, taken=False))
            return
        lease.hands[action.offer] = (action.index, ())
        self._context.start(self._hand_over(lease, action, *live), f"hand-over {action.offer}")

    async def _hand_over(self, lease: _Lease, action: HandOver, request: RequestState, sample: SampleOutput) -> None:
        context = self._context
        raw, processed, top = sample.raw, sample.processed, sample.top
        full = len(lease.action.keys)
        device_sum = 0
        if action.device >= 0:
            (device_sum,) = await context.device_sums([action.device])
        if action.offer not in lease.hands:
            # the lease and its hand-overs ended meanwhile
            return
        # the open block and the state, by their numbers in the prompt
        blocks: dict[int, tuple[Part, ...]] = {}
        if action.tail >= 0:
            place = (action.host, action.slot, action.generation)
            blocks[full] = self._parts(*place, action.tail_rows, device=action.device)
        if action.snapshot_host >= 0:
            blocks[full + 1] = context.state_parts(action.snapshot_host)
        refs: dict[int, BlockRef] = {}
        if blocks:
            offered = tuple([part for parts in blocks.values() for part in parts])
            context.transports.offer(offered)
            lease.hands[action.offer] = (action.index, offered)
            # a state is never on a device
            sums = await self._checksums(list(blocks.values()), [device_sum] * len(blocks))
            if action.offer not in lease.hands:
                return
            refs = {at: BlockRef(at, blocks[at], each) for at, each in zip(blocks, sums, strict=True)}
        message = HandOff(
            *lease.name,
            index=action.index,
            offer=action.offer,
            token=action.token,
            # the last one: the token is computed again if the weights change
            raw=raw[-1] if raw else None,
            processed=processed[-1] if processed else None,
            top=top[-1] if top else None,
            cached=action.cached,
            tail=refs.get(full),
            tail_rows=action.tail_rows,
            state=refs.get(full + 1),
        )
        try:
            assert lease.peer is not None
            # the first sample scored the prompt for the whole request
            if action.index == 0 and request.scores is not None:
                for scored in score_messages(*lease.name, request.scores):
                    await context.say(lease.peer, scored)
                    if action.offer not in lease.hands:
                        return
            await context.say(lease.peer, message)
        except (PeerUnreachable, PeerRefused) as error:
            self._lost(lease, str(error))

    # -- messages of decode instances ---------------------------------------------------------------

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
            answer = LeaseAnswered(
                group=group,
                attempt=attempt,
                granted=True,
                prefix_blocks=message.prefix_blocks,
                # no device is shown to a peer that says so of its own accord
                reads_device=message.reads_device and self._context.devices is not None,
            )
        else:
            answer = _denied(group, attempt, message.reason, retry_after_s=message.retry_after_s)
        lease.answer.set_result(answer)

    def on_drop(self, peer: Peer, message: LeaseDrop) -> None:
        """The other side has no such lease (any more)."""
        parting = self._partings.get((message.request, message.attempt))
        if parting is not None and parting.peer is peer:
            self._part((message.request, message.attempt))
            return
        lease = self._known(peer, (message.request, message.attempt))
        if lease is not None:
            self._lost(lease, message.reason, silent=False)

    def on_taken(self, peer: Peer, message: BlocksTaken) -> None:
        lease = self._known(peer, (message.request, message.attempt))
        if lease is not None and message.offer in lease.offers:
            self._context.transports.withdraw(lease.offers.pop(message.offer))
            self._context.bus.publish(BlocksSent(offer=message.offer, taken=True))

    def on_hand_taken(self, peer: Peer, message: HandOffTaken) -> None:
        lease = self._known(peer, (message.request, message.attempt))
        if lease is None:
            return
        offer = next((offer for offer, (index, _) in lease.hands.items() if index == message.index), None)
        if offer is None:
            self.late += 1
            return
        _, parts = lease.hands.pop(offer)
        self._context.transports.withdraw(parts)
        lease.handed += 1
        self._context.bus.publish(HandedOver(offer=offer, taken=True))
        if lease.handed == lease.asked.params.n:
            self._moved[lease.name[0]] = lease.action.peer
            self._end(lease, "", tell=False)

    def take_moved(self, name: str) -> str:
        """The address of the instance that took a request over; "" if none did. Forgets it."""
        return self._moved.pop(name, "")

    def on_lost(self, peer: Peer, reason: str) -> None:
        """A peer is gone: its leases end."""
        for lease in [lease for lease in self._by_name.values() if lease.peer is peer and not lease.over]:
            self._lost(lease, reason)
        for name in [name for name, parting in self._partings.items() if parting.peer is peer]:
            self._part(name)
        self._forget(peer)

    def leases(self, peer: Peer) -> tuple[LeaseName, ...]:
        """The leases of a peer that its next heartbeat renews."""
        return tuple([lease.name for lease in self._by_name.values() if lease.peer is peer])

    def give_up_all(self, reason: str) -> None:
        """End all leases, and tell the other sides."""
        for lease in list(self._by_name.values()):
            self._end(lease, reason, tell=True)

    def close(self) -> None:
        """End all leases."""
        for lease in list(self._by_name.values()):
            self._lost(lease, "the instance closes")
        for name in list(self._partings):
            self._part(name)

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
        # before the ends of its offers and hand-offs, which do not say why
        self._context.bus.publish(LeaseLost(group=group, attempt=attempt, reason=reason))
        self._end(lease, reason, tell=False)

    def _end(self, lease: _Lease, reason: str, *, tell: bool, ended: PartEnd = "") -> None:
        """End a lease, with all of its offers and hand-offs; idempotent."""
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
        offered: list[tuple[Event, tuple[Part, ...]]] = [
            (BlocksSent(offer=offer, taken=False), parts) for offer, parts in lease.offers.items()
        ]
        offered += [(HandedOver(offer=offer, taken=False), parts) for offer, (_, parts) in lease.hands.items()]
        lease.offers.clear()
        lease.hands.clear()
        if tell and lease.sent and lease.peer is not None and lease.peer.is_up:
            try:
                lease.peer.send(LeaseDrop(*lease.name, brief(reason), ended))
            except (PeerUnreachable, PeerRefused, PeerBusy):
                # the lease is not renewed any more, and ends by itself
                pass
            else:
                if ended and offered:
                    # a read that fails before the other side knows of the end would be a loss to it
                    loop = self._context.loop
                    until = loop.time() + lease.action.ttl_s
                    timer = DeadlineTimer(loop, until, partial(self._part, lease.name))
                    self._partings[lease.name] = _Parting(lease.peer, tuple(offered), timer)
                    return
        self._withdraw(offered)

    def _part(self, name: LeaseName) -> None:
        """What was on offer may be read no more."""
        parting = self._partings.pop(name)
        parting.timer.cancel()
        self._withdraw(parting.offered)

    def _withdraw(self, offered: Iterable[tuple[Event, tuple[Part, ...]]]) -> None:
        for event, parts in offered:
            self._context.transports.withdraw(parts)
            self._context.bus.publish(event)


def _seen(lease: _Lease) -> tuple[bytes, str]:
    """The incarnation of the decode instance that is asked for the lease, and the address at which it says that it
    listens, as the router told; both may be empty."""
    hand_off, address = lease.asked.hand_off, lease.action.peer
    if hand_off is None or address not in hand_off.decoders[: len(hand_off.seen)]:
        return b"", ""
    return hand_off.seen[hand_off.decoders.index(address)]


def _denied(
    group: int, attempt: int, reason: str, *, retry_after_s: float = 0.0, silent: bool = False
) -> LeaseAnswered:
    return LeaseAnswered(
        group=group, attempt=attempt, granted=False, retry_after_s=retry_after_s, reason=reason, silent=silent
    )
