"""An instance context of fakes that record messages, for tests of the services of instances, in virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fdasync_fleet.instance.context import InstanceContext
from fdasync_fleet.instance.decode_service import DecodeService
from fdasync_fleet.link.session import Counters, LinkConfig
from fdasync_fleet.messages import (
    PROTOCOL,
    BlockRef,
    BlocksOffer,
    HandOff,
    Hello,
    LeaseAnswer,
    LeaseRequest,
    Wanted,
    encode,
)
from fdasync_fleet.transfer.base import checksum_parts

from fdasync.cache.host_arena import HostArena
from fdasync.cache.identity import block_keys, root_key
from fdasync.cache.store.base import Outcome
from fdasync.errors import DeadlineExceeded, PeerBusy, PeerUnreachable
from fdasync.events.actions import AnswerLease, ReceiveBlocks
from fdasync.events.bus import EventBus
from fdasync.events.catalog import LeaseAsked
from fdasync.ipc.shared_memory import Part
from fdasync.request import GenerateRequest, HandOffTarget, SamplingParams
from fdasync.runner.prompt_scores import PromptLogprobs
from tests.support.helpers import make_capacity, make_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.ipc.shared_memory import SharedRegion

NAMESPACE = b"n" * 16
CALLER = b"c" * 16


class FakePeer:
    """Records what it is sent. `up_after`: comes up so long after it was dialed; None: never. `unacked`: number of the
    messages that it has not acknowledged."""

    def __init__(self, name: str, role: str = "decode", *, is_up: bool = True) -> None:
        self.name = self.address = name
        self.role = role
        self.incarnation = name.encode().ljust(16, b"-")
        self.hello = Hello(PROTOCOL, name, role, name)  # type: ignore[arg-type]
        self.is_up, self.busy, self.was_dialed = is_up, False, True
        self.error: Exception | None = None
        self.up_after: float | None = None
        self.sent: list[Any] = []
        self.payloads: list[Any] = []
        self.counters = Counters()
        self.unacked = 0

    def send(self, message: Any, payload: Any = None) -> None:
        if not self.is_up:
            raise PeerUnreachable(self.name, "is not up")
        if self.busy:
            raise PeerBusy(self.name, 1)
        encode(message)
        self.counters.sent += 1
        self.sent.append(message)
        self.payloads.append(payload)

    @property
    def has_room(self) -> bool:
        return self.is_up and not self.busy

    async def ready(self, deadline_s: float) -> None:
        if self.error is not None:
            raise self.error
        if self.up_after is None or self.up_after > deadline_s:
            await asyncio.sleep(deadline_s)
            raise DeadlineExceeded("connecting", deadline_s)
        await asyncio.sleep(self.up_after)
        self.is_up = True

    async def room(self, deadline_s: float) -> None:
        until = asyncio.get_running_loop().time() + deadline_s
        while self.busy:
            if not self.is_up:
                raise PeerUnreachable(self.name, "gone")
            if asyncio.get_running_loop().time() >= until:
                raise DeadlineExceeded("room", deadline_s)
            await asyncio.sleep(0.01)

    def take(self, kind: type) -> list[Any]:
        """What it was sent of one kind."""
        return [message for message in self.sent if isinstance(message, kind)]


class FakeTransports:
    """Counts what is on offer; receives end as `outcomes` says, after a while."""

    def __init__(self) -> None:
        self.on_offer: list[Any] = []
        self.received: list[Any] = []
        self.outcomes: list[Outcome] = []
        self.forgotten: list[Any] = []
        # whether other instances' devices can be read: None: not known before `maps` is
        self.reads: bool | None = False
        self.maps = True
        self.regions: Sequence[SharedRegion] = ()

    async def checksums(self, parts: Any) -> tuple[int, ...]:
        """Whoever has checksums of parts may read them at once."""
        assert all(part in self.on_offer for part in parts)
        return await checksum_parts(self.regions, parts)

    def offer(self, parts: Any) -> None:
        self.on_offer += parts

    def withdraw(self, parts: Any) -> None:
        for part in parts:
            self.on_offer.remove(part)

    async def receive(self, sources: Any, copy_specs: Any, deadline: float) -> list[Outcome]:
        self.received.append((sources, copy_specs, deadline))
        await asyncio.sleep(0.01)
        return self.outcomes or [Outcome("done")] * len(copy_specs)

    def forget(self, sources: Any) -> None:
        self.forgotten.append(sources)

    def reads_device(self, _sources: Any) -> bool | None:
        return self.reads

    async def prepared(self, _sources: Any, _limit_s: float) -> bool:
        await asyncio.sleep(0.01)
        return self.maps


class Stage:
    """An instance context, its bus and its fakes.

    Attributes:
        samples: requests and their samples that the output processor knows, by key.
        emitted: tokens that it was given.
        hung_up: peers that are not called any more; given_up: those whose session was ended, and why.
        failures: what ended the engine.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.bus = EventBus(self.loop.time)
        self.samples: dict[int, Any] = {}
        self.emitted: list[Any] = []
        self.failures: list[Any] = []
        self.loop.set_exception_handler(lambda _, context: self.failures.append(context))
        self.taken: list[Any] = []
        self.refusal: Exception | None = None
        self.grammars: list[Any] = []
        self.peers: dict[str, FakePeer] = {}
        self.callers: dict[bytes, Any] = {CALLER: object()}
        self.host = HostArena.create(8, 64)
        processor = SimpleNamespace(
            find=self.samples.get, emit=lambda action, output: self.emitted.append((action, output))
        )
        frontend = SimpleNamespace(take_over=self._take_over, check_grammar=self._check_grammar)
        self.transports = FakeTransports()
        self.hung_up: list[Any] = []
        self.given_up: list[Any] = []
        links = SimpleNamespace(
            dial=self.peer,
            find=self.callers.get,
            hang_up=self.hung_up.append,
            give_up=self._give_up,
            config=LinkConfig(),
        )
        self.context = InstanceContext(
            self.loop, self.bus, frontend, processor, self.host, None, None, make_capacity, lambda: NAMESPACE,
            self.failures.append, self.transports, links,  # type: ignore[arg-type]
        )  # fmt: skip
        self.transports.regions = self.context.regions

    def peer(self, name: str) -> FakePeer:
        if name not in self.peers:
            self.peers[name] = FakePeer(name)
        return self.peers[name]

    def _give_up(self, peer: FakePeer, problem: str) -> None:
        self.given_up.append((peer, problem))
        peer.is_up = False

    async def _check_grammar(self, grammar: Any) -> None:
        self.grammars.append(grammar)
        await asyncio.sleep(0.01)
        if self.refusal is not None:
            raise self.refusal

    def _take_over(self, name: str, ask: GenerateRequest, given: Any, limit_s: float) -> Any:
        if self.refusal is not None:
            raise self.refusal
        self.taken.append(name)
        first = 100 * len(self.taken)
        prompt = tuple(ask.prompt)
        events = [make_request(first + index, prompt, 8, 4, group=first) for index in range(ask.params.n)]
        scores = PromptLogprobs.wanted(ask.params.prompt_logprobs_start, ask.params.prompt_top_logprobs)
        request = SimpleNamespace(prompt=prompt, params=ask.params, request_id=name, scores=scores)
        for event in events:
            self.samples[event.key] = request, SimpleNamespace()
        return request, events

    def hand_off(self, key: int, tokens: Any = range(10), n: int = 1, **params: Any) -> Any:
        """A request of ours that another instance shall decode: its samples in the hub."""
        asked = GenerateRequest(
            prompt=tuple(tokens), params=SamplingParams(n=n, seed=1, **params), streams=True, request_id=None,
            priority=0, deadline_s=None, routing=None, start=0, cache_salt="",
            hand_off=HandOffTarget(name=f"r{key}", caller=CALLER, decoders=("d0",)),
        )  # fmt: skip
        event = make_request(key, tokens, 1, 4, deadline=1e6)
        scores = PromptLogprobs.wanted(asked.params.prompt_logprobs_start, asked.params.prompt_top_logprobs)
        request = SimpleNamespace(asked=(asked, event), scores=scores)
        for index in range(n):
            self.samples[key + index] = request, SimpleNamespace(raw=[-0.5], processed=[-0.25], top=None)
        return request

    async def settle(self, seconds: float = 0.05) -> list[Any]:
        """Let time pass; the events since the last time."""
        await asyncio.sleep(seconds)
        assert not self.failures, self.failures
        return self.bus.drain()

    async def close(self) -> None:
        for task in self.context.tasks():
            task.cancel()
        await asyncio.sleep(0)
        self.host.close()


PARTS = (Part(0, 0, 64),)


def ref(index):
    return BlockRef(index, PARTS, (1,))


class DecodeStage(Stage):
    """A `DecodeService` that two peers ask."""

    def __init__(self):
        super().__init__()
        self.followed, self.lost = [], []
        self.decode_service = DecodeService(
            self.context, 4, lambda *given: self.followed.append(given), self.lost.append
        )
        self.p0, self.p1 = self.peer("p0"), self.peer("p1")

    def question(self, name="r1", attempt=0, tokens=range(10), n=1, keys=None, caller=CALLER, **params):
        tokens = list(tokens)
        data = b"".join(token.to_bytes(4, "little") for token in tokens)
        keys = tuple(block_keys(root_key(NAMESPACE, b""), tokens, 4)) if keys is None else keys
        params = SamplingParams(n=n, **{"seed": 1, **params})
        wanted = Wanted(caller, data, keys, NAMESPACE, "", params, True, 0, 60.0, ("routing",), 0)
        return LeaseRequest(name, attempt, wanted, 3.0, 60.0)

    def ask(self, peer=None, **fields):
        """Returns our group, where it reached the scheduler."""
        self.decode_service.on_lease_request(peer or self.p0, self.question(**fields))
        asked = [event for event in self.bus.drain() if isinstance(event, LeaseAsked)]
        return asked[0].requests[0].group if asked else None

    def grant(self, **fields):
        group = self.ask(**fields)
        self.decode_service.answer(AnswerLease(group, "granted", 0))
        return group

    def responses(self, peer=None):
        return [(answer.verdict, answer.retry_after_s) for answer in (peer or self.p0).take(LeaseAnswer)]

    def offer(self, number, *indices, peer=None, name="r1", attempt=0):
        blocks = tuple([ref(index) for index in indices])
        self.decode_service.on_offer(peer or self.p0, BlocksOffer(name, attempt, number, blocks))

    def hand(self, index=0, *, peer=None, name="r1", **changes):
        values = {"offer": 9, "token": 5, "raw": None, "processed": None, "top": None, "cached": (0, 0, 0)}
        values |= {"tail": ref(2), "tail_rows": 2, **changes}
        self.decode_service.on_hand_off(peer or self.p0, HandOff(request=name, attempt=0, index=index, **values))

    def receive(self, number, group, offer, *indices, rows=4):
        count = len(indices)
        self.decode_service.receive(
            ReceiveBlocks(number, group, (offer,) * count, indices, tuple(range(count)), (), (), (rows,) * count, 99.0)
        )
