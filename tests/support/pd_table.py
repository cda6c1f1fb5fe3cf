"""Builders for tests of prefill/decode disaggregation: a scheduler whose other instances are the test."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from fdasync.events.actions import (
    AnswerLease,
    AskLease,
    ConfirmHandOver,
    DropLease,
    GiveUpLease,
    HandOver,
    ReceiveBlocks,
    SendBlocks,
)
from fdasync.events.catalog import (
    BlocksOffered,
    BlocksReceived,
    BlocksSent,
    HandedOver,
    LeaseAnswered,
    LeaseAsked,
    LeaseGivenUp,
    LeaseLost,
    LeasesRenewed,
    SampleOffered,
)
from fdasync.scheduler.disagg.decode import DecodeSide
from fdasync.scheduler.disagg.prefill import PrefillSide
from fdasync.scheduler.state.config import LeaseRules
from tests.scheduler.table import Table
from tests.support.attached import attached, held_by_exports, held_for_others
from tests.support.helpers import make_sampler

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.events.actions import Action
    from fdasync.events.catalog import Event, RequestPrepared
    from tests.scheduler.table import Turned

T = TypeVar("T")


def of(turned: Turned, kind: type[T]) -> list[T]:
    """The actions of one kind."""
    return [action for action in turned.actions if isinstance(action, kind)]


def only(turned: Turned, kind: type[T]) -> T:
    (action,) = of(turned, kind)
    return action


class PdTable(Table):
    """A `Table` with other instances, which are the test: what the scheduler asked of them lies here.

    Attributes:
        asks: questions that are out, by (group, attempt); `offers`, `hands`: blocks and hand-overs that are, by offer.
        receives: blocks on their way here.
        given_up, answered, dropped, confirmed: all so far.
    """

    def __init__(self, rules: dict[str, Any] | None = None, **config: Any) -> None:
        values: dict[str, Any] = {"num_host_blocks": 64, "leases": LeaseRules(**(rules or {}))}
        super().__init__(**{**values, **config})
        self.asks: dict[tuple[int, int], AskLease] = {}
        self.offers: dict[int, SendBlocks] = {}
        self.hands: dict[int, HandOver] = {}
        self.receives: dict[int, ReceiveBlocks] = {}
        self.given_up: list[GiveUpLease] = []
        self.answered: list[AnswerLease] = []
        self.dropped: list[DropLease] = []
        self.confirmed: list[ConfirmHandOver] = []

    # -- the prefill side

    def hand_off(
        self, key: int, tokens: Iterable[int], decoders: tuple[str, ...] = ("d0",), n: int = 1, **fields: Any
    ) -> list[RequestPrepared]:
        """A group of samples that another instance shall decode, as `prepare.py` makes them."""
        prompt = tuple(tokens)
        return [
            self.request(
                key + index, prompt, 1, group=key, decoders=decoders, samples=n, start=-1,
                sampler=make_sampler(len(prompt), index=index), **fields,
            )
            for index in range(n)
        ]  # fmt: skip

    def granted(self, group: int, prefix: int = 0) -> LeaseAnswered:
        return self._answer(group, granted=True, prefix_blocks=prefix)

    def denied(self, group: int, retry_after_s: float = 0.0, reason: str = "no") -> LeaseAnswered:
        return self._answer(group, granted=False, retry_after_s=retry_after_s, reason=reason)

    def silent(self, group: int) -> LeaseAnswered:
        return self._answer(group, granted=False, silent=True, reason="silence")

    def _answer(self, group: int, **fields: Any) -> LeaseAnswered:
        """To the oldest question of a group."""
        name = next(name for name in self.asks if name[0] == group)
        del self.asks[name]
        return LeaseAnswered(group=group, attempt=name[1], at=self.now, **fields)

    def lost(self, group: int, attempt: int, reason: str = "gone") -> list[Event]:
        """A lease is over: so is what was offered under it, as the asking side tells it."""
        ends: list[Event] = [LeaseLost(group=group, attempt=attempt, reason=reason, at=self.now)]
        return ends + self.ends_of(group, attempt)

    def ends_of(self, group: int, attempt: int) -> list[Event]:
        """Everything that is out under a lease ends, not taken."""
        ends: list[Event] = []
        for offer, sent in list(self.offers.items()):
            if (sent.group, sent.attempt) == (group, attempt):
                ends.append(self.sent(offer, taken=False))
        for offer, hand in list(self.hands.items()):
            if (hand.group, hand.attempt) == (group, attempt):
                ends.append(self.handed(offer, taken=False))
        return ends

    def sent(self, offer: int | None = None, *, taken: bool = True) -> BlocksSent:
        """The offer, or the oldest, ended."""
        offer = min(self.offers) if offer is None else offer
        del self.offers[offer]
        return BlocksSent(offer=offer, taken=taken, at=self.now)

    def handed(self, offer: int | None = None, *, taken: bool = True) -> HandedOver:
        offer = min(self.hands) if offer is None else offer
        del self.hands[offer]
        return HandedOver(offer=offer, taken=taken, at=self.now)

    def work(self, turns: int = 50) -> None:
        """Steps and copies until nothing of them is left; other instances stay silent."""
        for _ in range(turns):
            if not self.flying and not self.copies:
                return
            self.turn(*([self.done()] if self.flying else []), *[self.copied() for _ in range(len(self.copies))])
        raise AssertionError(f"still working after {turns} turns")

    def run_steps(self, *events: Event, turns: int = 50) -> None:
        """These events, then steps until there are none; everything else stands still."""
        self.turn(*events)
        for _ in range(turns):
            if not self.flying:
                return
            self.turn(self.done())
        raise AssertionError(f"still running after {turns} turns")

    # -- the decode side

    def lease(
        self, group: int, tokens: Iterable[int], max_tokens: int = 8, n: int = 1, *, peer: str = "p0",
        ttl_s: float = 5.0, total_s: float = 120.0, **fields: Any,
    ) -> LeaseAsked:  # fmt: skip
        prompt = tuple(tokens)
        requests = tuple(
            [
                self.request(
                    group + index, prompt, max_tokens, group=group, samples=n,
                    sampler=make_sampler(len(prompt), index=index), **fields,
                )
                for index in range(n)
            ]
        )  # fmt: skip
        return LeaseAsked(requests=requests, peer=peer, ttl_s=ttl_s, over_by=self.now + total_s, at=self.now)

    def offered(self, group: int, offer: int, *indices: int) -> BlocksOffered:
        return BlocksOffered(group=group, offer=offer, indices=indices, at=self.now)

    def first(
        self, group: int, key: int, offer: int, token: int = 7, tail_rows: int = 0, *, with_state: bool = False
    ) -> SampleOffered:
        """A sample's first token."""
        return SampleOffered(
            group=group, key=key, offer=offer, token=token, tail_rows=tail_rows, cached=(0, 0, 0), at=self.now,
            with_state=with_state,
        )  # fmt: skip

    def received(self, number: int | None = None, arrived: str | None = None) -> BlocksReceived:
        """The receive of this number, or the oldest, ended; "+" or "-" for each block, or all came."""
        number = min(self.receives) if number is None else number
        action = self.receives.pop(number)
        came = tuple([sign == "+" for sign in arrived or "+" * len(action.indices)])
        problem = "" if all(came) else "damaged"
        return BlocksReceived(receive_id=number, arrived=came, seconds=0.01, nbytes=1, problem=problem, at=self.now)

    def renewed(self, *groups: int) -> LeasesRenewed:
        return LeasesRenewed(groups=groups, at=self.now)

    def gives_up(self, *groups: int) -> LeaseGivenUp:
        return LeaseGivenUp(groups=groups, reason="not wanted", at=self.now)

    def arrive(
        self, group: int, prompt: Iterable[int], n: int = 1, tokens: tuple[int, ...] = (), prefix: int = 0
    ) -> None:
        """Everything of a granted lease arrives: blocks, first tokens, open blocks; its samples start."""
        length = len(tuple(prompt))
        full, rows = divmod(length, self.config.block_tokens)
        events: list[Event] = []
        if full > prefix:
            events.append(self.offered(group, 10 * group, *range(prefix, full)))
        for index in range(n):
            token = tokens[index] if tokens else 7
            events.append(self.first(group, group + index, 10 * group + 1 + index, token, rows))
        self.turn(*events)
        self.settle()

    def settle(self, turns: int = 50) -> None:
        """All blocks on their way arrive, and are copied; steps stand still."""
        for _ in range(turns):
            if not self.receives and not self.copies:
                return
            self.turn(
                *[self.received() for _ in range(len(self.receives))], *[self.copied() for _ in range(len(self.copies))]
            )
        raise AssertionError(f"still arriving after {turns} turns")

    # -- turns

    def _lay_down(self, action: Action) -> None:
        if isinstance(action, AskLease):
            name = action.group, action.attempt
            assert name not in self.asks
            assert action.silent_by <= action.answer_by <= action.over_by
            # the service that sends the lease request looks its request up
            assert action.group not in self.finished, "a question for a group that has ended"
            self.asks[name] = action
        elif isinstance(action, SendBlocks | HandOver):
            held: dict[int, Any] = self.offers if isinstance(action, SendBlocks) else self.hands
            assert action.offer not in self.offers.keys() | self.hands.keys()
            held[action.offer] = action
        elif isinstance(action, ReceiveBlocks):
            assert action.receive_id not in self.receives
            count = len(action.indices)
            filled = action.host or action.snapshots_host
            assert count == len(action.offers) == len(filled) == len(action.rows) > 0
            assert len(action.slots) == len(action.generations) == (count if self.config.capture and action.host else 0)
            self.receives[action.receive_id] = action
        elif isinstance(action, GiveUpLease):
            self.given_up.append(action)
        elif isinstance(action, AnswerLease):
            self.answered.append(action)
        elif isinstance(action, DropLease):
            self.dropped.append(action)
        elif isinstance(action, ConfirmHandOver):
            assert action.key not in self.finished, "a sample that ended goes on"
            self.confirmed.append(action)
        else:
            super()._lay_down(action)

    def _check_places(self) -> None:
        super()._check_places()
        incoming = Counter(host for receive in self.receives.values() for host in receive.host)
        assert not incoming or max(incoming.values()) == 1, "a host block has two senders"
        outgoing = {host for sent in self.offers.values() for host in sent.host}
        outgoing |= {hand.host for hand in self.hands.values() if hand.host >= 0}
        copied = {host for copy in self.copies.values() for host in copy.host}
        assert not incoming.keys() & (outgoing | copied), "a host block is written to while it is read"

    def is_empty(self) -> bool:
        stats = self.stats
        out = self.asks or self.offers or self.hands or self.receives
        scheduler = self.scheduler
        held = held_by_exports(scheduler) or scheduler.index.reserved or attached(scheduler, DecodeSide).leases
        hand_offs = held_for_others(attached(scheduler, PrefillSide)) or stats.hand_offs
        return super().is_empty() and not (stats.leased or out or held or hand_offs)


def begin(
    table: PdTable, key: int, tokens: Iterable[int], decoders: tuple[str, ...] = ("d0",), n: int = 1, prefix: int = 0
) -> Turned:
    """A group that has its lease; its first step is planned where there is room."""
    table.turn(*table.hand_off(key, tokens, decoders, n))
    return table.turn(table.granted(key, prefix))


def sent_indices(table: PdTable) -> list[int]:
    """Which blocks are on offer."""
    return [index for sent in table.offers.values() for index in sent.indices]


def leave_on_host(table: PdTable, prompt: Iterable[int]) -> None:
    """Compute a prompt, and leave its full blocks on the host only."""
    table.run(table.request(900, prompt, 1))
    index = table.scheduler.index
    for block in index.pool.live():
        table.scheduler.swap_planner.keep(block)
    table.turn()
    table.answer()
    for block in list(index._clean):
        index._leave_device(block)
