"""An engine that other instances and routers can reach: links, leases, transports and answers around one `Engine`.

    async with Instance(config, listen="ipc:///run/d0") as instance: ...

Joins the services of `fdasync/pd` to the driver and bus of an engine; decides nothing. Made by `fdasync serve`.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Any

from fdasync.cache.prefix import root_key
from fdasync.engine.engine import Engine
from fdasync.engine.inputs import Ask, Errand
from fdasync.errors import BadInput, ConfigError, EngineClosed, FdasyncError, PeerUnreachable, UpdateUnderWay
from fdasync.events.actions import (
    AnswerLease,
    AskLease,
    ConfirmHandOver,
    DropLease,
    GiveUpLease,
    HandOver,
    ReceiveBlocks,
    SendBlocks,
    TellBlocks,
)
from fdasync.events.catalog import LinkChanged
from fdasync.ipc.deadlines import wait_within
from fdasync.pd.instance.context import Site
from fdasync.pd.instance.decode_service import Lending
from fdasync.pd.instance.kv_events import News
from fdasync.pd.instance.prefill_service import Asking
from fdasync.pd.instance.responses import Answers, failed
from fdasync.pd.instance.text_digest import text_digest
from fdasync.pd.link.address import check_address, check_free
from fdasync.pd.link.links import Links
from fdasync.pd.link.zmq_wire import ZmqWire
from fdasync.pd.messages import (
    PROTOCOL,
    Abort,
    BlocksOffer,
    BlocksTaken,
    Command,
    Done,
    Facts,
    HandOff,
    HandOffTaken,
    Heartbeat,
    Hello,
    LeaseAnswer,
    LeaseAsk,
    LeaseDrop,
    Refused,
    Shape,
    Status,
    Submit,
    Totals,
    brief,
)
from fdasync.pd.transfer.shm import shm_problem
from fdasync.pd.transfer.transports import Carriers
from fdasync.registry.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fdasync.cache.store.base import Store
    from fdasync.engine.config import EngineConfig
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.events.actions import Action
    from fdasync.pd.link.peer import Peer
    from fdasync.pd.link.session import LinkConfig
    from fdasync.pd.link.wire import Frame, Wire
    from fdasync.pd.messages import Message
    from fdasync.pd.transfer.base import Transport
    from fdasync.runner.base import Capacity, Runner
    from fdasync.scheduler import SchedulerStats

# as Hello says
_NAME_CHARS = 256


def shape_of(capacity: Capacity, text: bytes = b"") -> Shape:
    """What the blocks and answers of a runner are made of, whatever its weights; `text`: see `text_digest.py`."""
    return Shape(
        root_key(capacity.fingerprint.encode()),
        capacity.kv_layout,
        capacity.kv_dtype,
        capacity.block_tokens,
        capacity.block_nbytes,
        capacity.aux_specs,
        capacity.vocab_size,
        tuple(sorted(capacity.eos_ids)),
        capacity.routing_debug,
        text,
    )


def _auto(listen: str) -> tuple[tuple[str, ...], str]:
    """The transports of an instance that names none, in order of preference, and what to say of them."""
    if not listen.startswith("ipc://"):
        # whoever can call it at all can reach a port
        return ("shm", "tcp"), ""
    problem = shm_problem()
    if not problem:
        return ("shm",), ""
    return ("tcp",), f"blocks go over tcp, by a port that all users of this machine reach: no shared memory: {problem}"


class Instance:
    """See the module.

    Args:
        config: of the engine; its role must not be "alone".
        listen: `ipc://path` or `tcp://127.0.0.1:port` (0: any).
        peers: addresses of decode instances to connect to at once; others are when a router names them.
        name: for people; default: where it listens.
        transport: how it reads blocks of others, and lets others read its own: the name of one in
            `fdasync.transports`, or "auto": shm, and tcp besides where it listens at a tcp address itself, or instead
            where memory cannot be shared. A tcp transport has a port on the loopback, open to all users of the machine
            (who cannot read anything without its token); where it listens at an ipc address there is none otherwise.
        wire, transports, runner, tokenizer, store: objects instead of what the configuration names (tests).

    Attributes:
        engine: the engine; it may be used directly as well.
        address: where it listens, once entered.
        notice: what its user should know of how blocks go, "" where there is nothing to say.
    """

    def __init__(
        self,
        config: EngineConfig | Mapping[str, Any],
        *,
        listen: str,
        peers: Sequence[str] = (),
        name: str = "",
        transport: str = "auto",
        links: LinkConfig | None = None,
        wire: Wire | None = None,
        transports: Sequence[Transport] | None = None,
        runner: Runner | None = None,
        tokenizer: Tokenizer | None = None,
        store: Store | None = None,
    ) -> None:
        # a model takes minutes to load: what is wrong is said before
        if len(name) > _NAME_CHARS:
            raise ConfigError("name", f"has {len(name)} characters", limit=_NAME_CHARS)
        check_address(listen, listens=True)
        for peer in peers:
            check_address(peer)
        self.engine = Engine(config, runner=runner, tokenizer=tokenizer, store=store)
        if self.engine.config.role == "alone":
            raise ConfigError("config.role", "is 'alone'", hint="an instance is mixed, prefill or decode")
        self.address = listen
        self._listen = listen
        self._names = peers
        self._name = name
        self._link_config = links
        self._wire = wire
        self.notice = ""
        if transports is None:
            registry = Registry()
            kinds, self.notice = _auto(listen) if transport == "auto" else ((transport,), "")
            transports = [registry.make_transport(kind) for kind in kinds]
        self._carriers = Carriers(transports)
        self._links: Links | None = None
        self._site: Site | None = None
        self._hanging_up: asyncio.Task[None] | None = None
        # who is about to update weights, and until when
        self._claimed: tuple[Peer | None, float] = (None, 0.0)
        self._on: dict[type[Message], Callable[[Peer, Any], None]] = {}
        self._does: dict[type[Any], Callable[[Any], None]] = {}

    # -- life ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Instance:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Start the engine, then be reachable. Raises what `Engine.start` raises, ConfigError for the address."""
        if self._wire is None:
            check_free(self._listen)
        await self.engine.start()
        try:
            self._site = site = Site(asyncio.get_running_loop(), *self.engine.share(self._carriers.aclose))
            self._asking = Asking(site, self._names)
            self._answers = Answers(site, self._asking)
            capacity = self.engine.capacity
            self._shape = shape_of(capacity, text_digest(self.engine.tokenizer, capacity.vocab_size))
            self._lending = Lending(site, capacity.block_tokens, self._answers.follow, self._answers.lose)
            self._dispatch()
            site.carriers = self._carriers
            await self._carriers.open(site.regions)
            site.links = self._links = Links(self._wire or ZmqWire(on_doors=self._on_doors), self, self._link_config)
            self._news = News(site, self._version)
            self.address = self._links.listen(self._listen)
            self.engine.attend(self.perform, self._failed)
            for address in self._names:
                self._links.dial(address)
        except BaseException:
            await self.aclose()
            raise

    def _dispatch(self) -> None:
        asking, lending = self._asking, self._lending
        self._on = {
            LeaseAsk: lending.on_ask,
            LeaseAnswer: asking.on_answer,
            BlocksOffer: lending.on_offer,
            BlocksTaken: asking.on_taken,
            HandOff: lending.on_hand_off,
            HandOffTaken: asking.on_hand_taken,
            LeaseDrop: self._on_drop,
            Submit: self._on_submit,
            Abort: self._answers.abort,
            Command: self._on_command,
        }
        self._does = {
            AskLease: asking.ask,
            GiveUpLease: asking.give_up,
            SendBlocks: asking.send,
            HandOver: asking.hand_over,
            AnswerLease: lending.answer,
            DropLease: lending.drop,
            ReceiveBlocks: lending.receive,
            ConfirmHandOver: lending.confirm,
            TellBlocks: lambda action: self._news.tell(action),
        }

    def perform(self, action: Action) -> None:
        """One of the scheduler's actions that concern other instances; called by the driver."""
        self._does[type(action)](action)

    def _failed(self) -> None:
        """The engine is no more: nobody else shall wait for it. Its callers are told as all callers are, then all links
        are hung up: whoever goes on asking would be refused for ever, and whoever asks elsewhere is served."""
        assert self._site is not None
        assert self._links is not None
        self._site.draining = True
        self._asking.give_up_all("the engine failed")
        self._lending.drop_all("the engine failed")
        if self._hanging_up is None:
            self._hanging_up = self._site.start(self._links.aclose(), "hanging up")

    async def drain(self, limit_s: float) -> None:
        """Take no new work, and wait until what is here ended or went elsewhere. Raises DeadlineExceeded."""
        assert self._site is not None
        self._site.draining = True
        await self.engine.drain(limit_s)

    async def aclose(self) -> None:
        """Abort what is live, tell its callers, hang up, close the engine; idempotent."""
        site = self._site
        try:
            if site is not None and self._links is not None:
                site.draining = True
                self._asking.close()
                await self._end_live(site)
                await self._links.aclose()
                if self._hanging_up is not None:
                    await asyncio.wait([self._hanging_up])
        finally:
            try:
                await self.engine.aclose()
            finally:
                if site is not None:
                    for task in site.tasks():
                        task.cancel()
                    if site.tasks():
                        await wait_within(site.tasks(), self.engine.config.close_deadline_s)
                await self._carriers.aclose()

    async def _end_live(self, site: Site) -> None:
        """Requests end with what they have, and their callers are told."""
        if self.engine.state not in ("running", "draining"):
            return
        until = site.loop.time() + self.engine.config.close_deadline_s
        while self._answers.num_live and site.loop.time() < until:
            # also those who were on their way through the door
            requests = site.door.requests()
            for request in requests:
                site.door.abort(request)
            # first their ends, then those who tell of them
            waits = [*site.tasks(), *[request.done for request in requests if not request.done.done()]]
            if waits:
                # bare deadline: a look around every so often; the loop above has the end
                await asyncio.wait(waits, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(0)

    # -- what links ask and tell (pd/owner.py) ---------------------------------------------------------

    def hello(self) -> Hello:
        engine, capacity = self.engine, self.engine.capacity
        facts = Facts(
            brief(capacity.model),
            capacity.vocab_size,
            capacity.max_context_tokens,
            capacity.num_blocks,
            capacity.moe_layer_ids,
            capacity.num_experts,
            capacity.top_k_by_layer,
            capacity.tokenizer,
            engine.config.model,
            engine.config.max_step_tokens,
            self._version(),
            engine.config.max_requests,
        )
        role = engine.config.role
        assert role != "alone"
        assert self._site is not None
        return Hello(
            PROTOCOL,
            self._name or self.address,
            role,
            self.address,
            self._shape,
            self._carriers.sources(),
            self._site.namespace(),
            facts,
        )

    def _version(self) -> int:
        return self.engine.stats().scheduler.weight_version

    def check(self, hello: Hello) -> Refused | None:
        if hello.shape is None:
            return None if hello.role == "router" else Refused("shape", "an instance did not say what its blocks are")
        differs = self._shape.difference(hello.shape)
        if differs is None:
            return None
        field, ours, theirs = differs
        return Refused(f"shape.{field}", brief(f"{self._name or self.address} has {ours}, {hello.name} has {theirs}"))

    def beat(self, peer: Peer) -> Heartbeat:
        if peer.was_dialed:
            return Heartbeat(self._asking.leases(peer))
        return Heartbeat((), self.status()) if peer.role == "router" else Heartbeat()

    def status(self) -> Status:
        """How it is doing."""
        assert self._site is not None
        told = self.engine.stats()
        stats = told.scheduler
        state = "draining" if self._site.draining else "paused" if stats.paused else "running"
        return Status(
            state,  # type: ignore[arg-type]
            stats.waiting,
            stats.queued_tokens,
            stats.running,
            stats.leased,
            # what is promised to leases is as good as taken; more may be promised than is free at once
            max(stats.free_blocks + stats.idle_blocks - stats.reserved_blocks, 0),
            stats.num_blocks,
            self._totals(stats),
            brief(told.store_problem),
        )

    def _totals(self, stats: SchedulerStats) -> Totals:
        assert self._site is not None
        live = sum([len(sample.tokens) for request in self._site.hub.requests() for sample in request.samples])
        return Totals(
            tokens=stats.generated_tokens + live,
            finished=stats.finished,
            steps=stats.steps,
            preemptions=stats.preemptions,
            prompt_tokens=stats.prompt_tokens,
            hit_tokens=stats.hit_tokens,
            hit_tokens_host=stats.hit_tokens_host,
            hit_tokens_store=stats.hit_tokens_store,
            written_blocks=stats.written_blocks,
            fetched_blocks=stats.fetched_blocks,
            received_blocks=stats.received_blocks,
            received_nbytes=self._lending.received_nbytes,
            leases_granted=stats.leases_granted,
            leases_denied=stats.leases_denied,
            asked=self._asking.granted,
            asked_s=self._asking.granted_s,
            asked_most_s=self._asking.granted_most_s,
        )

    def on_up(self, peer: Peer) -> None:
        self.engine.bus.publish(LinkChanged(peer=peer.name, role=peer.role or "", up=True))
        if peer.role == "router" and not peer.was_dialed:
            self._news.add(peer)

    def on_message(self, peer: Peer, message: Message, payload: Frame | None) -> None:  # noqa: ARG002 - the contract's
        handler = self._on.get(type(message))
        if handler is not None:
            handler(peer, message)

    def on_heartbeat(self, peer: Peer, heartbeat: Heartbeat) -> None:
        if not peer.was_dialed:
            self._lending.on_heartbeat(peer, heartbeat.leases)

    def on_lost(self, peer: Peer, error: PeerUnreachable) -> None:
        self.engine.bus.publish(LinkChanged(peer=peer.name, role=peer.role or "", up=False, problem=error.problem))
        if peer.was_dialed:
            self._asking.on_lost(peer, str(error))
        else:
            self._news.remove(peer)
            self._lending.on_lost(peer, str(error))
            self._answers.on_lost(peer)

    def _on_doors(self, address: str, problem: str) -> None:
        self.engine.bus.publish(LinkChanged(peer=address, role="listener", up=not problem, problem=problem))

    def on_failure(self, error: Exception) -> None:
        self.engine.fail(error)

    # -- messages -------------------------------------------------------------------------------------

    def _on_drop(self, peer: Peer, message: LeaseDrop) -> None:
        if peer.was_dialed:
            self._asking.on_drop(peer, message)
        else:
            self._lending.on_drop(peer, message)

    def _on_submit(self, peer: Peer, message: Submit) -> None:
        assert self._site is not None
        try:
            if self._site.draining:
                raise EngineClosed("draining")
            ask = self._ask_of(peer, message)
        except FdasyncError as error:
            self._site.tell(peer, failed(message.request, error))
            return
        self._answers.submit(peer, message.request, ask)

    def _ask_of(self, peer: Peer, message: Submit) -> Ask:
        if message.text is None and len(message.tokens) % 4:
            raise BadInput("prompt", f"{len(message.tokens)} bytes are no token ids")
        errand = None
        if message.decoders:
            errand = Errand(name=message.request, caller=peer.incarnation, decoders=message.decoders)
        return Ask(
            prompt=message.text if message.text is not None else array("i", message.tokens),
            params=message.params,
            streams=message.streams,
            request_id=message.request,
            priority=message.priority,
            deadline_s=message.deadline_s,
            routing=message.routing,
            aux=message.aux,
            start=message.start,
            cache_salt=message.salt,
            errand=errand,
        )

    def _on_command(self, peer: Peer, message: Command) -> None:
        assert self._site is not None
        self._site.start(self._command(peer, message), message.verb)

    async def _command(self, peer: Peer, message: Command) -> None:
        assert self._site is not None
        error, problem = "", ""
        try:
            if message.verb == "claim":
                self._claim(peer, message.limit_s)
            elif message.verb == "release":
                self._release(peer)
            elif message.verb == "update_weights":
                self._claim(peer)
                try:
                    await self.engine.update_weights(message.version, message.path, message.mode)
                finally:
                    self._release(peer)
                    self._news.announce()
            elif message.verb == "pause":
                await self.engine.pause()
            elif message.verb == "resume":
                await self.engine.resume()
            else:
                await self.drain(message.limit_s)
        except FdasyncError as caught:
            error, problem = type(caught).__name__, brief(str(caught))
        words = Done(message.number, error, problem, self._site.namespace(), self._version())
        self._site.tell(peer, words)

    def _claim(self, peer: Peer, limit_s: float = 0.0) -> None:
        """For so long no other router may update weights; 0: as it is. Raises UpdateUnderWay."""
        assert self._site is not None
        holder, until = self._claimed
        if holder is not None and holder is not peer and holder.is_up and self._site.loop.time() < until:
            raise UpdateUnderWay(f"of {holder.name}")
        if limit_s:
            self._claimed = peer, self._site.loop.time() + limit_s

    def _release(self, peer: Peer) -> None:
        if self._claimed[0] is peer:
            self._claimed = None, 0.0
