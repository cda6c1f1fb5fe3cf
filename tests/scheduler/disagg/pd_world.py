"""A prefill scheduler, decode schedulers, and the mail between them, for `test_pd_machine.py`: what
`prefill_service.py` and `decode_service.py` promise, without any link."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.engine.prepare import salted
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
    RequestPrepared,
    SampleOffered,
)
from tests.scheduler.disagg.pd_side import Side
from tests.support.helpers import make_sampler
from tests.support.paged_runner import whole_output

if TYPE_CHECKING:
    from fdasync.scheduler import SchedulerConfig


class Lease:
    """One question and what came of it. `over`: on the prefill side; `told`: the other side has heard of it."""

    def __init__(self, ask: AskLease, side: Side) -> None:
        self.ask, self.side = ask, side
        self.granted = self.over = self.told = False
        self.group = -1
        self.keys: list[int] = []
        self.offers: dict[int, list[tuple[int, list[Any]]]] = {}
        self.hands: dict[int, int] = {}
        self.unread: dict[int, int] = {}


class World:
    """Mail goes in order between two sides, as late as the machine wants.

    Attributes:
        whole: what each group's requests are where they are decoded.
        readers: sides that read the prefill side's device.
        started: by side, its samples that were handed over, and whose they are; `handed`: the opposite.
    """

    def __init__(
        self, config: SchedulerConfig, decode_configs: list[SchedulerConfig], readers: tuple[str, ...] = ()
    ) -> None:
        self.now = 1.0
        self.readers = readers
        self.started: dict[str, dict[int, int]] = {}
        self.prefill = Side("p", config, self)
        self.decodes = {f"d{number}": Side(f"d{number}", each, self) for number, each in enumerate(decode_configs)}
        self.sides = [self.prefill, *self.decodes.values()]
        self.leases: dict[tuple[int, int], Lease] = {}
        self.mail: dict[tuple[str, str], deque[tuple[str, Lease, Any]]] = {}
        for name in self.decodes:
            self.mail["p", name] = deque()
            self.mail[name, "p"] = deque()
        self.handed: dict[int, tuple[str, int]] = {}
        self.whole: dict[int, RequestPrepared] = {}

    def send(self, source: Side, target: Side, kind: str, lease: Lease, words: Any = None) -> None:
        self.mail[source.name, target.name].append((kind, lease, words))

    # -- actions

    def post(self, side: Side, action: Any) -> None:
        prefill = self.prefill
        if isinstance(action, AskLease):
            assert action.group not in side.finished
            lease = Lease(action, self.decodes[action.peer])
            assert (action.group, action.attempt) not in self.leases
            self.leases[action.group, action.attempt] = lease
            self.send(side, lease.side, "ask", lease)
        elif isinstance(action, GiveUpLease):
            self.end(self.leases[action.group, action.attempt], tell=True)
        elif isinstance(action, SendBlocks | HandOver):
            self.offer(self.leases[action.group, action.attempt], action)
        elif isinstance(action, ReceiveBlocks):
            side.runner.receive(action)
        else:
            lease = side.leases.get(action.group)  # type: ignore[assignment]
            assert lease is not None or not isinstance(action, ConfirmHandOver), "confirmed to nobody"
            if lease is None:
                return
            if isinstance(action, ConfirmHandOver):
                self.confirm(side, lease, action)
            elif isinstance(action, DropLease):
                del side.leases[action.group]
                self.send(side, prefill, "drop", lease)
            else:
                assert isinstance(action, AnswerLease)
                if action.verdict == "denied":
                    del side.leases[action.group]
                self.send(side, prefill, "answer", lease, action)

    def offer(self, lease: Lease, action: SendBlocks | HandOver) -> None:
        runner, size = self.prefill.runner, self.prefill.config.block_tokens
        if isinstance(action, SendBlocks):
            on_device = bool(action.device)
            assert on_device == (lease.side.name in self.readers)
            assert not (action.device and action.host)
            blocks = action.device or action.host
            slots = action.slots or (-1,) * len(blocks)
            assert len(slots) == len(blocks) == len(action.indices) > 0
            if lease.over:
                self.prefill.queue.append(BlocksSent(offer=action.offer, taken=False))
                return
            lease.offers[action.offer] = [
                (block, runner.export(block, slot, size, on_device=on_device))
                for block, slot in zip(blocks, slots, strict=True)
            ]
        else:
            if lease.over:
                self.prefill.queue.append(HandedOver(offer=action.offer, taken=False))
                return
            on_device = lease.side.name in self.readers
            block, other = (action.device, action.host) if on_device else (action.host, action.device)
            assert (action.tail >= 0) == (block >= 0) == (action.tail_rows > 0)
            assert other == -1
            out = []
            if action.tail >= 0:
                out = [(block, runner.export(block, action.slot, action.tail_rows, on_device=on_device))]
            lease.offers[action.offer] = out
            lease.hands[action.offer] = action.index
        self.send(self.prefill, lease.side, "offer", lease, action)

    def confirm(self, side: Side, lease: Lease, action: ConfirmHandOver) -> None:
        index = lease.keys.index(action.key)
        started = self.started.setdefault(side.name, {})
        assert action.key not in started
        started[action.key] = lease.ask.group + index
        if action.emit:
            request = side.requests[action.key]
            side.emit(action.key, whole_output(request.tokens, 1)[0])
        self.send(side, self.prefill, "handed", lease, index)
        if all(key in started for key in lease.keys):
            del side.leases[lease.group]

    def end(self, lease: Lease, *, tell: bool) -> None:
        """Nothing more happens under a lease, on the prefill side."""
        if lease.over:
            return
        lease.over = True
        group, attempt = lease.ask.group, lease.ask.attempt
        if not lease.granted:
            self.prefill.queue.append(LeaseAnswered(group=group, attempt=attempt, granted=False, reason="over"))
        for offer in list(lease.offers):
            self.end_offer(lease, offer, taken=False)
        if tell:
            self.send(self.prefill, lease.side, "give up", lease)

    def end_offer(self, lease: Lease, offer: int, *, taken: bool) -> None:
        for block, content in lease.offers.pop(offer):
            self.prefill.runner.end_export(block, content, on_device=lease.side.name in self.readers)
        if offer in lease.hands:
            del lease.hands[offer]
            self.prefill.queue.append(HandedOver(offer=offer, taken=taken))
        else:
            self.prefill.queue.append(BlocksSent(offer=offer, taken=taken))

    # -- mail

    def deliver(self, source: str, target: str) -> None:
        kind, lease, words = self.mail[source, target].popleft()
        if target == "p":
            self.to_prefill(kind, lease, words)
        else:
            self.to_decode(kind, lease, words)

    def to_prefill(self, kind: str, lease: Lease, words: Any) -> None:
        if lease.over:
            return
        group, attempt = lease.ask.group, lease.ask.attempt
        if kind == "answer" and words.verdict == "granted":
            lease.granted = True
            answer = LeaseAnswered(
                group=group, attempt=attempt, granted=True, prefix_blocks=words.prefix_blocks,
                reads_device=lease.side.name in self.readers,
            )  # fmt: skip
            self.prefill.queue.append(answer)
        elif kind == "answer" and words.verdict == "denied":
            lease.over = True
            answer = LeaseAnswered(
                group=group, attempt=attempt, granted=False, retry_after_s=words.retry_after_s, reason=words.reason
            )
            self.prefill.queue.append(answer)
        elif kind == "drop":
            self.lose(lease)
        elif kind == "taken" and words in lease.offers:
            self.end_offer(lease, words, taken=True)
        elif kind == "handed":
            offer = next(offer for offer, index in lease.hands.items() if index == words)
            self.handed[lease.ask.group + words] = (lease.side.name, lease.keys[words])
            self.end_offer(lease, offer, taken=True)

    def lose(self, lease: Lease) -> None:
        if not lease.over:
            granted = lease.granted
            self.end(lease, tell=False)
            if granted:
                group, attempt = lease.ask.group, lease.ask.attempt
                self.prefill.queue.append(LeaseLost(group=group, attempt=attempt, reason="lost"))

    def to_decode(self, kind: str, lease: Lease, words: Any) -> None:
        side = lease.side
        if kind == "ask":
            self.ask(side, lease)
        elif side.leases.get(lease.group) is not lease:
            return
        elif kind == "give up":
            del side.leases[lease.group]
            side.queue.append(LeaseGivenUp(groups=(lease.group,), reason="given up"))
        elif isinstance(words, SendBlocks):
            lease.unread[words.offer] = len(words.indices)
            side.queue.append(
                BlocksOffered(group=lease.group, offer=words.offer, indices=words.indices, on_device=bool(words.device))
            )
        else:
            key = lease.keys[words.index]
            side.queue.append(
                SampleOffered(
                    group=lease.group, key=key, offer=words.offer, token=words.token, tail_rows=words.tail_rows,
                    cached=words.cached, on_device=words.device >= 0,
                )
            )  # fmt: skip

    def ask(self, side: Side, lease: Lease) -> None:
        """A question arrives, also one that nobody wants answered any more: its giving up follows."""
        first = self.prefill.requests[lease.ask.group]
        samples = [self.prefill.requests[first.key + index] for index in range(first.samples)]
        lease.group = side.next_key()
        requests = []
        for sample in samples:
            whole = self.whole[sample.group]
            key = side.next_key()
            request = msgspec.structs.replace(
                whole, key=key, group=lease.group, namespace=lease.ask.namespace, block_keys=lease.ask.keys,
                root=salted(lease.ask.namespace, sample.salt), sampler=make_sampler(len(sample.tokens)), decoders=(),
            )  # fmt: skip
            side.add(request)
            side.runner.midway.add(key)
            requests.append(request)
        lease.keys = [request.key for request in requests]
        side.leases[lease.group] = lease
        side.queue.append(
            LeaseAsked(requests=tuple(requests), peer="p", ttl_s=lease.ask.ttl_s, over_by=lease.ask.over_by)
        )

    def end_receive(self, side: Side, number: int, fails: list[bool]) -> None:
        """Blocks arrive that are still on offer, unless they shall not."""
        receive = side.runner.receives[number]
        lease = next((each for each in self.leases.values() if each.side is side and each.group == receive.group), None)
        assert lease is not None
        contents: list[list[Any] | None] = []
        for at, (offer, fail) in enumerate(zip(receive.offers, fails, strict=True)):
            held = lease.offers.get(offer)
            contents.append(None if held is None or fail else self.content(held, receive.indices[at]))
        side.runner.end_receive(number, contents)
        arrived = tuple([content is not None for content in contents])
        side.queue.append(
            BlocksReceived(
                receive_id=number, arrived=arrived, seconds=0.01, nbytes=0, problem="" if all(arrived) else "x"
            )
        )
        if side.leases.get(receive.group) is not lease:
            return
        for offer, came in zip(receive.offers, arrived, strict=True):
            if came and offer in lease.unread:
                lease.unread[offer] -= 1
                if not lease.unread[offer]:
                    self.send(side, self.prefill, "taken", lease, offer)

    def content(self, held: list[tuple[int, list[Any]]], index: int) -> list[Any]:
        """Of the blocks of an offer the one with this place in the prompt."""
        start = index * self.prefill.config.block_tokens
        (content,) = [content for _, content in held if len(content[0].tokens) - 1 == start]
        return content
