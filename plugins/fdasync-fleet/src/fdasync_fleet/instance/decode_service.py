"""The decode side of an instance: takes lease requests, copies the blocks offered under leases, and acknowledges them.

The scheduler (`disagg/decode.py`) decides which requests get leases and when a lease is over; this module decides
nothing. It checks all messages of prefill instances, so that none can break the scheduler. A lease request gets one
reply, which is kept: the same request again gets the same reply. A cancel that overtakes its request is remembered
(`lease_table.py`).

Called by `instance.py` with actions, messages and changes of peers.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.aux import ROUTING
from fdasync.cache.identity import PromptHashes, are_block_keys, root_key
from fdasync.errors import DuplicateRequestId, FdasyncError, PermanentError, ProtocolError
from fdasync.events.actions import EmitTokens
from fdasync.events.catalog import (
    AbortRequested,
    BlocksOffered,
    BlocksReceived,
    LeaseAsked,
    LeaseGivenUp,
    LeasesRenewed,
    SampleOffered,
)
from fdasync.ipc.shared_memory import DEVICE_REGION
from fdasync.request import GenerateRequest
from fdasync.runner.base import StepOutput
from fdasync_fleet.instance.lease_table import LeaseTable
from fdasync_fleet.messages import (
    BlocksTaken,
    HandOff,
    HandOffTaken,
    LeaseAnswer,
    LeaseDrop,
    LeaseRequest,
    brief,
)
from fdasync_fleet.results import add_scores
from fdasync_fleet.transfer.base import CopySpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync.engine.request_state import RequestState
    from fdasync.events.actions import AnswerLease, ConfirmHandOver, DropLease, ReceiveBlocks
    from fdasync.ipc.shared_memory import Part
    from fdasync.result import TopLogprobs
    from fdasync_fleet.fields import LeaseName
    from fdasync_fleet.instance.context import InstanceContext
    from fdasync_fleet.link.peer import Peer
    from fdasync_fleet.messages import BlockRef, BlocksOffer, ScoredPrompt, Wanted
    from fdasync_fleet.transfer.transports import Sources

_RETRY_S = 0.5
# a lease is answered so long after it was granted at most, while another instance's devices are being mapped
_MAPPING_S = 1.0
# identities checked in one callback: some 0.3 ms
_CHECK_BLOCKS = 256


class _Lease:
    """A lease of a prefill instance.

    Attributes:
        owner: the prefill instance.
        name: its (request, attempt).
        request: the request that this instance takes over.
        keys: the scheduler's numbers of its samples; `group` is the first.
        answer: the reply; None before it is decided.
        refs: the offered blocks that are not copied yet, by (offer, index).
        unread: by offer, the number of blocks that are not copied yet; 0 once the offer is taken.
        hands: the hand-offs that have come, by number of the sample.
        confirmed: number of samples that go on here.
    """

    def __init__(self, owner: Peer, name: LeaseName, request: RequestState, keys: tuple[int, ...]) -> None:
        self.owner = owner
        self.name = name
        self.request = request
        self.keys = keys
        self.group = keys[0]
        self.answer: LeaseAnswer | None = None
        self.refs: dict[tuple[int, int], BlockRef] = {}
        self.unread: dict[int, int] = {}
        self.hands: dict[int, HandOff] = {}
        self.confirmed = 0


class DecodeService:
    """See the module.

    Args:
        block_tokens: tokens of a block.
        follow: called with each request that is taken over: its output goes to this caller under this name.
        lose: called with each request that is lost after a part of it began here.

    Attributes:
        late: number of messages about unknown leases.
        received_nbytes: bytes of blocks copied from other instances.
    """

    def __init__(
        self,
        context: InstanceContext,
        block_tokens: int,
        follow: Callable[[RequestState, bytes, str], None],
        lose: Callable[[RequestState], None],
    ) -> None:
        self._context = context
        self._size = block_tokens
        self._follow = follow
        self._lose = lose
        self._leases: LeaseTable[_Lease] = LeaseTable()
        self._checking: set[tuple[Peer, LeaseName]] = set()
        self.late = 0
        self.received_nbytes = 0

    # -- lease requests -----------------------------------------------------------------------------

    def on_lease_request(self, peer: Peer, message: LeaseRequest) -> None:
        name = (message.request, message.attempt)
        known = self._leases.find(peer, name)
        if known is not None:
            if known.answer is not None:
                self._context.tell(peer, known.answer)
            return
        wanted = message.wanted
        full = len(wanted.tokens) // 4 // self._size
        if len(wanted.block_keys) != full:
            self._deny(peer, name, f"{len(wanted.block_keys)} identities were given for {full} full blocks", -1.0)
        elif full <= _CHECK_BLOCKS and wanted.params.grammar is None:
            root = root_key(wanted.namespace, wanted.salt.encode())
            self._decide(peer, name, message, are_block_keys(wanted.block_keys, root, wanted.tokens, self._size))
        else:
            self._context.start(self._check(peer, name, message), f"check of {name[0]}")

    async def _check(self, peer: Peer, name: LeaseName, message: LeaseRequest) -> None:
        """Check the identities of a long prompt, in slices, and the grammar."""
        if (peer, name) in self._checking:
            return
        self._checking.add((peer, name))
        try:
            good = await self._has_its_identities(message.wanted)
            problem = await self._grammar_problem(peer, name, message.wanted) if good else None
        finally:
            self._checking.discard((peer, name))
        if not peer.is_up:
            return
        if problem is not None:
            self._deny(peer, name, *problem)
        else:
            self._decide(peer, name, message, good)

    async def _grammar_problem(self, peer: Peer, name: LeaseName, wanted: Wanted) -> tuple[str, float] | None:
        """Check a request's grammar here too, so that no step compiles it; or a reason to deny, and when to ask again.
        Other libraries may read it on the prefill side."""
        if wanted.params.grammar is None:
            return None
        # the first check starts a process, which takes longer than an instance may be silent
        self._context.tell(peer, LeaseAnswer(*name, "queued"))
        try:
            await self._context.frontend.check_grammar(wanted.params.grammar)
        except PermanentError as error:
            return f"{type(error).__name__}: {error}", -1.0
        except FdasyncError as error:
            return f"{type(error).__name__}: {error}", _RETRY_S
        return None

    async def _has_its_identities(self, wanted: Wanted) -> bool:
        parent = root_key(wanted.namespace, wanted.salt.encode())
        keys = wanted.block_keys
        good = True
        for first in range(0, len(keys), _CHECK_BLOCKS):
            slice_keys = keys[first : first + _CHECK_BLOCKS]
            good = good and are_block_keys(slice_keys, parent, wanted.tokens, self._size, first)
            parent = slice_keys[-1]
            await asyncio.sleep(0)
        return good

    def _deny(self, peer: Peer, name: LeaseName, reason: str, retry_after_s: float) -> None:
        self._context.tell(peer, LeaseAnswer(*name, "denied", retry_after_s=retry_after_s, reason=brief(reason)))

    def _decide(self, peer: Peer, name: LeaseName, message: LeaseRequest, good: bool) -> None:
        if not good:
            # blocks under wrong identities would serve other requests too (docs/design.md, section 6)
            self._deny(peer, name, "the identities given are not those of the prompt's blocks", -1.0)
            return
        problem = self._take(peer, name, message)
        if problem is not None:
            self._deny(peer, name, *problem)

    def _take(self, peer: Peer, name: LeaseName, message: LeaseRequest) -> tuple[str, float] | None:
        """Pass a lease request to the scheduler; or return a reason to deny it, and when it may be sent again."""
        context, wanted = self._context, message.wanted
        if self._leases.is_buried(name, context.loop.time()):
            return "it was cancelled before it was asked for", -1.0
        if context.draining:
            return "it is draining", -1.0
        if context.links.find(wanted.caller) is None:
            return "it has no link to the request's router", _RETRY_S
        if len(wanted.tokens) % 4 or wanted.params.seed is None:
            return "the lease request makes no sense", -1.0
        try:
            request, events = context.frontend.take_over(
                message.request,
                _asked(message.request, wanted),
                PromptHashes(wanted.namespace, wanted.block_keys),
                wanted.deadline_s,
            )
        except DuplicateRequestId:
            # an earlier attempt of the same request is about to end
            return "an earlier attempt has not ended yet", _RETRY_S
        except PermanentError as error:
            return f"{type(error).__name__}: {error}", -1.0
        except FdasyncError as error:
            return f"{type(error).__name__}: {error}", _RETRY_S
        lease = _Lease(peer, name, request, tuple([event.key for event in events]))
        self._leases.add(lease)
        now = context.loop.time()
        context.bus.publish(
            LeaseAsked(requests=tuple(events), peer=peer.name, ttl_s=message.ttl_s, over_by=now + message.total_s)
        )
        self._follow(request, wanted.caller, message.request)
        return None

    def on_drop(self, peer: Peer, message: LeaseDrop) -> None:
        """The prefill side gives a lease up. Where its request ended there, it waits for an answer: what is being read
        stays on offer until it is known here that nothing was lost."""
        self._dropped(peer, message)
        if message.ended:
            self._context.tell(peer, LeaseDrop(message.request, message.attempt, "its request ended"))

    def _dropped(self, peer: Peer, message: LeaseDrop) -> None:
        name = (message.request, message.attempt)
        lease = self._leases.find(peer, name)
        if lease is None:
            self._leases.bury(name, self._context.loop.time())
            return
        if message.ended and lease.confirmed:
            # a request ends as a whole: its samples that came have tokens and rows
            self._leases.remove(lease)
            keys = tuple([sample.key for sample in lease.request.samples if sample.finish is None])
            self._context.bus.publish(AbortRequested(keys=keys, reason=message.ended))
            return
        self._context.bus.publish(LeaseGivenUp(groups=(lease.group,), reason=message.reason))
        self._over(lease)

    def on_heartbeat(self, peer: Peer, names: Sequence[LeaseName]) -> None:
        leases = [self._leases.find(peer, name) for name in names]
        groups = tuple([lease.group for lease in leases if lease is not None])
        if groups:
            self._context.bus.publish(LeasesRenewed(groups=groups))

    def on_lost(self, peer: Peer, reason: str) -> None:
        """A peer is gone: its leases end, and its blocks cannot be read."""
        if peer.hello is not None:
            self._context.transports.forget(peer.hello.sources)
        leases = self._leases.of(peer)
        if leases:
            self._context.bus.publish(LeaseGivenUp(groups=tuple([lease.group for lease in leases]), reason=reason))
        for lease in leases:
            self._over(lease)

    def _over(self, lease: _Lease) -> None:
        """A lease ended before all samples were handed over: a group that came only in part is lost."""
        self._leases.remove(lease)
        if lease.confirmed:
            self._lose(lease.request)

    # -- blocks and first tokens --------------------------------------------------------------------

    def _live(self, peer: Peer, name: LeaseName) -> _Lease | None:
        """A lease of this peer; for an unknown one the peer gets a `LeaseDrop`."""
        lease = self._leases.find(peer, name)
        if lease is None:
            self.late += 1
            self._context.tell(peer, LeaseDrop(*name, "there is no such lease"))
        return lease

    def on_offer(self, peer: Peer, message: BlocksOffer) -> None:
        lease = self._live(peer, (message.request, message.attempt))
        if lease is None:
            return
        full = len(lease.request.prompt) // self._size
        if lease.answer is None or lease.answer.verdict != "granted" or len(lease.unread) >= max(full, 1):
            self._refuse(lease, f"offer {message.offer} came before the lease was granted, or is one too many")
            return
        new = {(message.offer, ref.index): ref for ref in message.blocks}
        if message.offer in lease.unread or not new or len(new) < len(message.blocks):
            self._refuse(lease, f"offer {message.offer} makes no sense")
        elif any(ref.index >= full for ref in message.blocks):
            self._refuse(lease, f"offer {message.offer} has blocks beyond the {full} of the prompt")
        elif not self._is_readable(lease, message.blocks):
            self._refuse(lease, f"offer {message.offer} has blocks of devices that are not read here")
        else:
            lease.refs.update(new)
            lease.unread[message.offer] = len(new)
            indices = tuple([ref.index for ref in message.blocks])
            on_device = _is_on_device(message.blocks[0])
            self._context.bus.publish(
                BlocksOffered(group=lease.group, offer=message.offer, indices=indices, on_device=on_device)
            )

    def on_scored(self, peer: Peer, message: ScoredPrompt) -> None:
        """The prefill side scored a run of the prompt."""
        lease = self._live(peer, (message.request, message.attempt))
        if lease is None:
            return
        try:
            if lease.answer is None or lease.answer.verdict != "granted":
                raise ProtocolError("log-probs of a prompt came before the lease was granted")
            request = lease.request
            add_scores(request.scores, message, len(request.prompt), self._context.capacity().vocab_size)
        except ProtocolError as error:
            self._refuse(lease, str(error))

    def on_hand_off(self, peer: Peer, message: HandOff) -> None:
        lease = self._live(peer, (message.request, message.attempt))
        if lease is None:
            return
        full, rows = divmod(len(lease.request.prompt), self._size)
        tail = message.tail
        fits = rows == message.tail_rows and (tail is not None) == bool(rows) and (tail is None or tail.index == full)
        known = message.index >= len(lease.keys) or message.index in lease.hands
        fits = fits and (tail is None or self._is_readable(lease, (tail,)))
        state = message.state
        fits = fits and (state is not None) == (self._context.snapshots is not None)
        fits = fits and (state is None or (state.index == full + 1 and not _is_on_device(state)))
        if known or not fits or not self._is_whole(lease, message):
            self._refuse(lease, f"the hand-over of sample {message.index} makes no sense")
            return
        lease.hands[message.index] = message
        if tail is not None:
            lease.refs[message.offer, tail.index] = tail
        if state is not None:
            lease.refs[message.offer, state.index] = state
        self._context.bus.publish(
            SampleOffered(
                group=lease.group,
                key=lease.keys[message.index],
                offer=message.offer,
                token=message.token,
                tail_rows=rows,
                cached=message.cached,
                on_device=tail is not None and _is_on_device(tail),
                with_state=state is not None,
            )
        )

    def _is_readable(self, lease: _Lease, refs: Sequence[BlockRef]) -> bool:
        """Whether blocks lie on the host, or all on devices that this instance said that it reads."""
        on_device = [_is_on_device(ref) for ref in refs]
        return not any(on_device) or (all(on_device) and lease.answer is not None and lease.answer.reads_device)

    def _is_whole(self, lease: _Lease, message: HandOff) -> bool:
        """Whether a hand-off has a token of the vocabulary, and whether the log-probs that the caller asked for have
        come."""
        kinds = lease.request.params.logprobs
        vocab = self._context.capacity().vocab_size
        top, scores = message.top, lease.request.scores
        return (
            message.token < vocab
            and (_is_logprob(message.raw) if kinds in ("raw", "both") else message.raw is None)
            and (_is_logprob(message.processed) if kinds in ("processed", "both") else message.processed is None)
            and (top is not None) == bool(lease.request.params.top_logprobs)
            and (top is None or _are_alternatives(top, vocab))
            and sum(message.cached) <= len(lease.request.prompt)
            and (message.index > 0 or scores is None or scores.stop == len(lease.request.prompt))
        )

    def _refuse(self, lease: _Lease, reason: str) -> None:
        """The prefill side sent a wrong message under a lease: end the lease."""
        self._context.tell(lease.owner, LeaseDrop(*lease.name, brief(reason)))
        self._context.bus.publish(LeaseGivenUp(groups=(lease.group,), reason=reason))
        self._over(lease)

    # -- actions ------------------------------------------------------------------------------------

    def answer(self, action: AnswerLease) -> None:
        lease = self._leases.group(action.group)
        if lease is None:
            return
        lease.answer = LeaseAnswer(
            *lease.name,
            action.verdict,
            prefix_blocks=action.prefix_blocks,
            retry_after_s=action.retry_after_s,
            reason=brief(action.reason),
        )
        if action.verdict == "denied":
            self._leases.remove(lease)
        sources = () if lease.owner.hello is None else lease.owner.hello.sources
        reads = self._context.transports.reads_device(sources) if action.verdict == "granted" else False
        if reads is None:
            self._context.start(self._answer_mapped(lease, sources), f"answer to {lease.name[0]}")
            return
        lease.answer = msgspec.structs.replace(lease.answer, reads_device=reads)
        self._context.tell(lease.owner, lease.answer)

    async def _answer_mapped(self, lease: _Lease, sources: Sources) -> None:
        """Answer a granted lease once it is known whether the other instance's devices can be read here."""
        reads = await self._context.transports.prepared(sources, _MAPPING_S)
        if self._leases.group(lease.group) is lease and lease.answer is not None:
            lease.answer = msgspec.structs.replace(lease.answer, reads_device=reads)
            self._context.tell(lease.owner, lease.answer)

    def drop(self, action: DropLease) -> None:
        lease = self._leases.group(action.group)
        if lease is not None:
            if action.ended:
                self._leases.remove(lease)
            else:
                self._over(lease)
            self._context.tell(lease.owner, LeaseDrop(*lease.name, brief(action.reason)))

    def drop_all(self, reason: str) -> None:
        """End all leases, and tell the prefill sides."""
        for lease in self._leases.all():
            self._over(lease)
            self._context.tell(lease.owner, LeaseDrop(*lease.name, brief(reason)))

    def confirm(self, action: ConfirmHandOver) -> None:
        """A sample goes on here: emit its first token, and let the prefill side forget the sample."""
        lease = self._leases.group(action.group)
        if lease is None:
            # the lease ended during this turn
            live = self._context.processor.find(action.key)
            if live is not None:
                self._lose(live[0])
            return
        index = lease.keys.index(action.key)
        hand = lease.hands[index]
        if action.emit:
            output = StepOutput(
                step_id=-1,
                tokens=(hand.token,),
                raw=None if hand.raw is None else (hand.raw,),
                processed=None if hand.processed is None else (hand.processed,),
                top=None if hand.top is None else (hand.top,),
            )
            self._context.processor.emit(EmitTokens(-1, (action.key,), (hand.token,), (0,)), output)
        self._context.tell(lease.owner, HandOffTaken(*lease.name, index))
        lease.confirmed += 1
        if lease.confirmed == len(lease.keys):
            self._leases.remove(lease)

    def receive(self, action: ReceiveBlocks) -> None:
        """Ends in `BlocksReceived`."""
        self._context.start(self._receive(action), f"receive {action.receive_id}")

    async def _receive(self, action: ReceiveBlocks) -> None:
        context = self._context
        started = context.loop.time()
        count = len(action.indices)
        lease = self._leases.group(action.group)
        places = list(zip(action.offers, action.indices, strict=True))
        refs = [None if lease is None else lease.refs.pop(place, None) for place in places]
        arrived = [False] * count
        problem, nbytes = "", 0
        slots = action.slots or (-1,) * count
        if lease is None or lease.owner.hello is None or None in refs:
            problem = "the lease is over"
        else:
            copy_specs = [
                CopySpec(ref.parts, parts, ref.checksums)
                for ref, parts in zip(refs, self._parts(action, slots), strict=True)
                if ref is not None
            ]
            for block, slot, generation in zip(action.device, action.slots, action.generations, strict=False):
                assert context.devices is not None
                context.devices.fill(block, slot, generation)
            outcomes = await context.transports.receive(lease.owner.hello.sources, copy_specs, action.deadline)
            for number, outcome in enumerate(outcomes):
                arrived[number] = outcome.status == "done"
                if not arrived[number]:
                    problem = problem or outcome.problem or outcome.status
                    continue
                nbytes += sum(part.nbytes for part in copy_specs[number].parts)
                if context.arena is not None and not action.snapshots_host:
                    context.arena.adopt(slots[number], action.generations[number], action.rows[number])
        self.received_nbytes += nbytes
        context.bus.publish(
            BlocksReceived(
                receive_id=action.receive_id,
                arrived=tuple(arrived),
                seconds=context.loop.time() - started,
                nbytes=nbytes,
                problem=problem,
            )
        )
        if lease is not None and self._leases.group(action.group) is lease:
            self._acknowledge(lease, [offer for offer, came in zip(action.offers, arrived, strict=True) if came])

    def _parts(self, action: ReceiveBlocks, slots: Sequence[int]) -> list[tuple[Part, ...]]:
        """Where each of the blocks, or of the states, goes."""
        context = self._context
        if action.snapshots_host:
            return [context.state_parts(place) for place in action.snapshots_host]
        parts = context.device_parts if action.device else context.parts
        return [parts(place, slot) for place, slot in zip(action.device or action.host, slots, strict=True)]

    def _acknowledge(self, lease: _Lease, offers: list[int]) -> None:
        for offer in offers:
            left = lease.unread.get(offer, 0)
            if left > 1:
                lease.unread[offer] = left - 1
            elif left:
                lease.unread[offer] = 0
                self._context.tell(lease.owner, BlocksTaken(*lease.name, offer))


def _is_on_device(ref: BlockRef) -> bool:
    return bool(ref.parts) and ref.parts[0].region == DEVICE_REGION


def _is_logprob(value: float | None) -> bool:
    """Whether a value can be a log-prob: rounding may lift it a little above 0, and a filtered token has -inf."""
    return value is not None and not math.isnan(value) and value <= 1e-3


def _are_alternatives(top: TopLogprobs, vocab: int) -> bool:
    return (
        len(top.token_ids) == len(top.logprobs)
        and all(0 <= token < vocab for token in top.token_ids)
        and all(_is_logprob(value) for value in top.logprobs)
    )


def _asked(name: str, wanted: Wanted) -> GenerateRequest:
    """The request that another instance hands on, as a request of this instance."""
    return GenerateRequest(
        prompt=array("i", wanted.tokens),
        params=wanted.params,
        streams=wanted.streams,
        request_id=name,
        priority=wanted.priority,
        deadline_s=wanted.deadline_s,
        routing=ROUTING in wanted.rows,
        aux=tuple([name for name in wanted.rows if name != ROUTING]),
        start=wanted.start,
        cache_salt=wanted.salt,
        waited_s=wanted.waited_s,
        trace=wanted.trace,
    )
