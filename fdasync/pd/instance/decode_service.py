"""The decode side of an instance: takes questions for room, fetches blocks, tells the other side what became of them.

Decides nothing: who gets room, and when a lease is over, the scheduler says (`decode.py`). What the other
side says is checked here, so that no peer can make the scheduler stumble. A question is answered once and the answer
kept: the same question again gets the same answer; a cancel that overtakes its question is remembered
(`lease_table.py`).

Called by `instance.py` with actions, messages and news of peers.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from typing import TYPE_CHECKING

from fdasync.cache.aux import ROUTING
from fdasync.cache.prefix import are_block_keys, root_key
from fdasync.engine.inputs import Ask, Given
from fdasync.errors import DuplicateRequestId, FdasyncError, PermanentError
from fdasync.events.actions import EmitTokens
from fdasync.events.catalog import (
    BlocksOffered,
    BlocksReceived,
    LeaseAsked,
    LeaseGivenUp,
    LeasesRenewed,
    SampleOffered,
)
from fdasync.pd.instance.lease_table import LeaseBook
from fdasync.pd.messages import BlocksTaken, HandOff, HandOffTaken, LeaseAnswer, LeaseAsk, LeaseDrop, brief
from fdasync.pd.transfer.base import Receipt
from fdasync.runner.base import StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync.engine.output import RequestOutput
    from fdasync.events.actions import AnswerLease, ConfirmHandOver, DropLease, ReceiveBlocks
    from fdasync.pd.instance.context import Site
    from fdasync.pd.link.peer import Peer
    from fdasync.pd.messages import BlockRef, BlocksOffer, LeaseName, Wanted
    from fdasync.result import TopLogprobs

_RETRY_S = 0.5
# identities that one callback checks: some 0.3 ms
_CHECK_BLOCKS = 256


class _Lease:
    """A lease of ours.

    Attributes:
        refs: where offered blocks can be read, by (offer, index); unread: how many of an offer are still to be copied.
        hands: first tokens that came, by sample's number.
    """

    def __init__(self, owner: Peer, name: LeaseName, request: RequestOutput, keys: tuple[int, ...]) -> None:
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


class Lending:
    """See the module.

    Args:
        block_tokens: of the engine.
        follow: told of each request that was taken over: its answer goes to this caller under this name.
        lose: told of each that is lost though it began here, at least in part.

    Attributes:
        late: messages about leases that are over, or never were.
        received_nbytes: of blocks of others that arrived whole.
    """

    def __init__(
        self,
        site: Site,
        block_tokens: int,
        follow: Callable[[RequestOutput, bytes, str], None],
        lose: Callable[[RequestOutput], None],
    ) -> None:
        self._site = site
        self._size = block_tokens
        self._follow = follow
        self._lose = lose
        self._book: LeaseBook[_Lease] = LeaseBook()
        self.late = 0
        self.received_nbytes = 0

    # -- questions ----------------------------------------------------------------------------------

    def on_ask(self, peer: Peer, message: LeaseAsk) -> None:
        name = (message.request, message.attempt)
        known = self._book.find(peer, name)
        if known is not None:
            if known.answer is not None:
                self._site.tell(peer, known.answer)
            return
        wanted = message.wanted
        full = len(wanted.tokens) // 4 // self._size
        if len(wanted.block_keys) != full:
            self._deny(peer, name, f"{len(wanted.block_keys)} identities were given for {full} full blocks", -1.0)
        elif full <= _CHECK_BLOCKS:
            root = root_key(wanted.namespace, wanted.salt.encode())
            self._decide(peer, name, message, are_block_keys(wanted.block_keys, root, wanted.tokens, self._size))
        else:
            self._site.start(self._check(peer, name, message), f"identities of {name[0]}")

    async def _check(self, peer: Peer, name: LeaseName, message: LeaseAsk) -> None:
        """The identities of a long prompt, in slices."""
        wanted = message.wanted
        parent = root_key(wanted.namespace, wanted.salt.encode())
        keys = wanted.block_keys
        good = True
        for first in range(0, len(keys), _CHECK_BLOCKS):
            slice_keys = keys[first : first + _CHECK_BLOCKS]
            good = good and are_block_keys(slice_keys, parent, wanted.tokens, self._size, first)
            parent = slice_keys[-1]
            await asyncio.sleep(0)
        if peer.is_up:
            self._decide(peer, name, message, good)

    def _deny(self, peer: Peer, name: LeaseName, reason: str, retry_after_s: float) -> None:
        self._site.tell(peer, LeaseAnswer(*name, "denied", 0, retry_after_s, brief(reason)))

    def _decide(self, peer: Peer, name: LeaseName, message: LeaseAsk, good: bool) -> None:
        if not good:
            # under a wrong name its blocks would be others' too (DESIGN section 8: wrong rows)
            self._deny(peer, name, "the identities given are not those of the prompt's blocks", -1.0)
            return
        problem = self._take(peer, name, message)
        if problem is not None:
            self._deny(peer, name, *problem)

    def _take(self, peer: Peer, name: LeaseName, message: LeaseAsk) -> tuple[str, float] | None:
        """Give a question to the scheduler; else why not, and when to ask again."""
        site, wanted = self._site, message.wanted
        if self._book.is_buried(name, site.loop.time()):
            return "it was cancelled before it was asked for", -1.0
        if site.draining:
            return "it is draining", -1.0
        if site.links.find(wanted.caller) is None:
            return "it has no link to the router that asks", _RETRY_S
        if len(wanted.tokens) % 4 or wanted.params.seed is None:
            return "the question makes no sense", -1.0
        try:
            request, events = site.door.take_over(
                message.request,
                _asked(message.request, wanted),
                Given(wanted.namespace, wanted.block_keys),
                wanted.deadline_s,
            )
        except DuplicateRequestId:
            # of the same request an earlier attempt, which is about to end
            return "an earlier attempt has not ended yet", _RETRY_S
        except PermanentError as error:
            return f"{type(error).__name__}: {error}", -1.0
        except FdasyncError as error:
            return f"{type(error).__name__}: {error}", _RETRY_S
        lease = _Lease(peer, name, request, tuple([event.key for event in events]))
        self._book.add(lease)
        now = site.loop.time()
        site.bus.publish(
            LeaseAsked(requests=tuple(events), peer=peer.name, ttl_s=message.ttl_s, over_by=now + message.total_s)
        )
        self._follow(request, wanted.caller, message.request)
        return None

    def on_drop(self, peer: Peer, message: LeaseDrop) -> None:
        """The other side gives up."""
        name = (message.request, message.attempt)
        lease = self._book.find(peer, name)
        if lease is None:
            self._book.bury(name, self._site.loop.time())
            return
        self._site.bus.publish(LeaseGivenUp(groups=(lease.group,), reason=message.reason))
        self._over(lease)

    def on_heartbeat(self, peer: Peer, names: Sequence[LeaseName]) -> None:
        leases = [self._book.find(peer, name) for name in names]
        groups = tuple([lease.group for lease in leases if lease is not None])
        if groups:
            self._site.bus.publish(LeasesRenewed(groups=groups))

    def on_lost(self, peer: Peer, reason: str) -> None:
        """A peer is gone: its leases are not wanted any more, and its blocks cannot be read."""
        if peer.hello is not None:
            self._site.carriers.forget(peer.hello.sources)
        leases = self._book.of(peer)
        if leases:
            self._site.bus.publish(LeaseGivenUp(groups=tuple([lease.group for lease in leases]), reason=reason))
        for lease in leases:
            self._over(lease)

    def _over(self, lease: _Lease) -> None:
        """A lease ended before everything was handed over: of a group that came in part, the rest is of no use."""
        self._book.remove(lease)
        if lease.confirmed:
            self._lose(lease.request)

    # -- blocks and first tokens --------------------------------------------------------------------

    def _live(self, peer: Peer, name: LeaseName) -> _Lease | None:
        """A lease of this peer's; one that is not known is told so."""
        lease = self._book.find(peer, name)
        if lease is None:
            self.late += 1
            self._site.tell(peer, LeaseDrop(*name, "there is no such lease"))
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
        else:
            lease.refs.update(new)
            lease.unread[message.offer] = len(new)
            indices = tuple([ref.index for ref in message.blocks])
            self._site.bus.publish(BlocksOffered(group=lease.group, offer=message.offer, indices=indices))

    def on_hand_off(self, peer: Peer, message: HandOff) -> None:
        lease = self._live(peer, (message.request, message.attempt))
        if lease is None:
            return
        full, rows = divmod(len(lease.request.prompt), self._size)
        tail = message.tail
        fits = rows == message.tail_rows and (tail is not None) == bool(rows) and (tail is None or tail.index == full)
        known = message.index >= len(lease.keys) or message.index in lease.hands
        if known or not fits or not self._is_whole(lease, message):
            self._refuse(lease, f"the hand-over of sample {message.index} makes no sense")
            return
        lease.hands[message.index] = message
        if tail is not None:
            lease.refs[message.offer, tail.index] = tail
        self._site.bus.publish(
            SampleOffered(
                group=lease.group,
                key=lease.keys[message.index],
                offer=message.offer,
                token=message.token,
                tail_rows=rows,
                cached=message.cached,
            )
        )

    def _is_whole(self, lease: _Lease, message: HandOff) -> bool:
        """A token of the vocabulary, and the log-probs that were asked for."""
        kinds = lease.request.params.logprobs
        vocab = self._site.capacity().vocab_size
        top = message.top
        return (
            message.token < vocab
            and (_is_logprob(message.raw) if kinds in ("raw", "both") else message.raw is None)
            and (_is_logprob(message.processed) if kinds in ("processed", "both") else message.processed is None)
            and (top is not None) == bool(lease.request.params.top_logprobs)
            and (top is None or _are_alternatives(top, vocab))
            and sum(message.cached) <= len(lease.request.prompt)
        )

    def _refuse(self, lease: _Lease, reason: str) -> None:
        """What the other side says under a lease is wrong: it is over."""
        self._site.tell(lease.owner, LeaseDrop(*lease.name, brief(reason)))
        self._site.bus.publish(LeaseGivenUp(groups=(lease.group,), reason=reason))
        self._over(lease)

    # -- actions ------------------------------------------------------------------------------------

    def answer(self, action: AnswerLease) -> None:
        lease = self._book.group(action.group)
        if lease is None:
            return
        lease.answer = LeaseAnswer(
            *lease.name,
            action.verdict,  # type: ignore[arg-type]
            action.prefix_blocks,
            action.retry_after_s,
            brief(action.reason),
        )
        if action.verdict == "denied":
            self._book.remove(lease)
        self._site.tell(lease.owner, lease.answer)

    def drop(self, action: DropLease) -> None:
        lease = self._book.group(action.group)
        if lease is not None:
            if action.ended:
                self._book.remove(lease)
            else:
                self._over(lease)
            self._site.tell(lease.owner, LeaseDrop(*lease.name, brief(action.reason)))

    def drop_all(self, reason: str) -> None:
        """Tell all others that nothing comes of what they were given."""
        for lease in self._book.all():
            self._over(lease)
            self._site.tell(lease.owner, LeaseDrop(*lease.name, brief(reason)))

    def confirm(self, action: ConfirmHandOver) -> None:
        """A sample goes on here: its first token is its caller's, and the other side may forget it."""
        lease = self._book.group(action.group)
        if lease is None:
            # it was over before this turn was
            live = self._site.hub.find(action.key)
            if live is not None:
                self._lose(live[0])
            return
        index = lease.keys.index(action.key)
        hand = lease.hands[index]
        if action.emit:
            output = StepOutput(
                -1,
                (hand.token,),
                None if hand.raw is None else (hand.raw,),
                None if hand.processed is None else (hand.processed,),
                None if hand.top is None else (hand.top,),
            )
            self._site.hub.emit(EmitTokens(-1, (action.key,), (hand.token,), (0,)), output)
        self._site.tell(lease.owner, HandOffTaken(*lease.name, index))
        lease.confirmed += 1
        if lease.confirmed == len(lease.keys):
            self._book.remove(lease)

    def receive(self, action: ReceiveBlocks) -> None:
        """Ends in `BlocksReceived`."""
        self._site.start(self._receive(action), f"receive {action.receive_id}")

    async def _receive(self, action: ReceiveBlocks) -> None:
        site = self._site
        started = site.loop.time()
        count = len(action.indices)
        lease = self._book.group(action.group)
        places = list(zip(action.offers, action.indices, strict=True))
        refs = [None if lease is None else lease.refs.pop(place, None) for place in places]
        arrived = [False] * count
        problem, nbytes = "", 0
        slots = action.slots or (-1,) * count
        if lease is None or lease.owner.hello is None or None in refs:
            problem = "the lease is over"
        else:
            receipts = [
                Receipt(ref.parts, site.parts(host, slot), ref.checksums)
                for ref, host, slot in zip(refs, action.host, slots, strict=True)
                if ref is not None
            ]
            outcomes = await site.carriers.receive(lease.owner.hello.sources, receipts, action.deadline)
            for number, outcome in enumerate(outcomes):
                arrived[number] = outcome.status == "done"
                if not arrived[number]:
                    problem = problem or outcome.problem or outcome.status
                    continue
                nbytes += sum(part.nbytes for part in receipts[number].parts)
                if site.arena is not None:
                    site.arena.adopt(slots[number], action.generations[number], action.rows[number])
        self.received_nbytes += nbytes
        site.bus.publish(
            BlocksReceived(
                receive_id=action.receive_id,
                arrived=tuple(arrived),
                seconds=site.loop.time() - started,
                nbytes=nbytes,
                problem=problem,
            )
        )
        if lease is not None and self._book.group(action.group) is lease:
            self._acknowledge(lease, [offer for offer, came in zip(action.offers, arrived, strict=True) if came])

    def _acknowledge(self, lease: _Lease, offers: list[int]) -> None:
        for offer in offers:
            left = lease.unread.get(offer, 0)
            if left > 1:
                lease.unread[offer] = left - 1
            elif left:
                lease.unread[offer] = 0
                self._site.tell(lease.owner, BlocksTaken(*lease.name, offer))


def _is_logprob(value: float | None) -> bool:
    """A little above 0 is rounding; of -inf is made what no filter let through."""
    return value is not None and not math.isnan(value) and value <= 1e-3


def _are_alternatives(top: TopLogprobs, vocab: int) -> bool:
    return (
        len(top.token_ids) == len(top.logprobs)
        and all(0 <= token < vocab for token in top.token_ids)
        and all(_is_logprob(value) for value in top.logprobs)
    )


def _asked(name: str, wanted: Wanted) -> Ask:
    """What another instance hands on, as a request of this one's."""
    return Ask(
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
    )
