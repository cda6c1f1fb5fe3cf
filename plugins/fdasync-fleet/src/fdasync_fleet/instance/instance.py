"""An `Instance` is an `Engine` that routers and other instances can reach.

    async with Instance(config, listen="ipc:///run/d0") as instance: ...

It joins links, transports and the services of this room to an engine's driver and bus. It knows no schedule and decides
nothing. `fdasync serve` makes it.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.cache.identity import root_key
from fdasync.engine import Engine
from fdasync.errors import (
    BadInput,
    ConfigError,
    EngineClosed,
    FdasyncError,
    PeerUnreachable,
    PluginError,
)
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
from fdasync.events.catalog import ConnectionsRefused, LinkChanged
from fdasync.ipc.deadlines import wait_within
from fdasync.ipc.home_loop import check_loop
from fdasync.request import GenerateRequest, HandOffTarget
from fdasync_fleet.instance.context import InstanceContext
from fdasync_fleet.instance.decode_service import DecodeService
from fdasync_fleet.instance.kv_events import KvEvents
from fdasync_fleet.instance.peer_verbs import Claims, PeerVerbs
from fdasync_fleet.instance.prefill_service import PrefillService
from fdasync_fleet.instance.responses import Responses
from fdasync_fleet.instance.result_sender import failed
from fdasync_fleet.instance.text_digest import text_digest
from fdasync_fleet.link.address import advertised, check_address, check_free, host_of, is_ipc, number_of
from fdasync_fleet.link.keys import FleetKeys, keys_of
from fdasync_fleet.link.links import Links
from fdasync_fleet.link.zmq_wire import ZmqWire
from fdasync_fleet.messages import (
    PROTOCOL,
    Abort,
    BlocksOffer,
    BlocksTaken,
    Call,
    HandOff,
    HandOffTaken,
    Heartbeat,
    Hello,
    LeaseAnswer,
    LeaseDrop,
    LeaseRequest,
    Refused,
    Reply,
    ScoredPrompt,
    Seen,
    Standing,
    Status,
    Submit,
    Watch,
    brief,
    difference,
)
from fdasync_fleet.transfer.device import DeviceTransport
from fdasync_fleet.transfer.device_blocks import BlockPuller
from fdasync_fleet.transfer.plugins import TransportSpec, make_transport, transport_class
from fdasync_fleet.transfer.process.proxy import TransferProcess
from fdasync_fleet.transfer.shm import shm_problem
from fdasync_fleet.transfer.transports import Transports
from fdasync_fleet.verbs import failure_of, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from fdasync.cache.store.base import Store
    from fdasync.drafting import Drafter
    from fdasync.engine import EngineConfig
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.events.actions import Action
    from fdasync.runner.base import Capacity, Runner
    from fdasync.stats import EngineStats
    from fdasync_fleet.link.peer import Peer
    from fdasync_fleet.link.session import LinkConfig
    from fdasync_fleet.link.wire import Frame, Wire
    from fdasync_fleet.messages import Message
    from fdasync_fleet.transfer.base import Transport

#: the transport over fast networks, where these are trusted
FAST = "mooncake"
# limit of `messages.Name`
_NAME_CHARS = 256
_MAX_PORT = 65535


def _auto(listen: str, trusted: bool) -> tuple[tuple[str, ...], str]:
    """The transports for "auto", in order of preference, and a notice for the user."""
    if not listen.startswith("ipc://"):
        # the instance has a port on the loopback already
        if not trusted:
            return ("shm", "tcp"), ""
        try:
            transport_class(FAST)
        except PluginError as error:
            return ("shm", "tcp"), f"the network is trusted, and blocks do not go by {FAST}: {error.problem}"
        return ("shm", FAST, "tcp"), ""
    if trusted:
        return _auto(listen, False)[0], "no block crosses a network: it listens at a socket of this machine"
    problem = shm_problem()
    if not problem:
        return ("shm",), ""
    return ("tcp",), f"blocks go over tcp, by a port that all users of this machine reach: no shared memory: {problem}"


class Instance:
    """See the module.

    Args:
        config: the engine's configuration; its role must not be "alone".
        listen: address to listen at: `ipc://path` or `tcp://127.0.0.1:port` (0: any).
        host: what others dial in place of the host of `listen`: behind address translation, or where it listens at all
            interfaces (`tcp://0.0.0.0:port`); a number, or an interface of this machine. "": that of `listen`.
        data_port: the port of the tcp transport, which address translation has to pass on, too; 0: any.
        peers: addresses of decode instances to connect to at once; the instance connects to others when a router names
            them.
        name: a name for people; default: the address.
        transport: the transport by which blocks travel: a name in `fdasync.transports`, "auto", or "device": from
            device to device of one machine where both instances say so and their devices reach each other, else as
            "auto"; the runner's KV lies in memory that processes of this user get a mapping of. "auto" is shm, with
            tcp besides if the instance listens at a tcp address, and tcp alone if memory cannot be shared. A tcp
            transport listens at a loopback port, which all users of the machine can reach, but not read from without
            its token. An instance that listens at an ipc address has no such port otherwise.
        trusted_network: whoever reaches this machine's ports may read and write the blocks that are on their way. With
            "auto" and a tcp address, blocks from other machines come by `mooncake` (`plugins/fdasync-mooncake`) where
            the other side trusts the network, too, and else by tcp. Without it such a transport is refused by name.
        transfer_process: blocks are copied and hashed in a process beside this loop, which copies of 200 MB would hold
            up for 50 ms in all. False: on this loop, as given `transports` do; one process less for each instance.
        links: times and bounds of the links.
        keys: keys of the fleet, or their file; needed for an address beyond the loopback.
        encrypt_blocks: blocks that go over tcp do so by TLS 1.3, both ways (`fdasync-fleet[tls]`); needs keys. Others
            are refused as senders.
        wire, transports, runner, tokenizer, store, drafter: objects in the place of the configured ones, for tests.

    Attributes:
        engine: the engine; it can be used directly as well.
        address: the address at which others reach it, once entered: where it listens, or `host` with that port.
        listens: the address at which it listens, once entered.
        notice: a notice for the user about the choice of transport; "" if there is none.
        shows_blocks: other instances of this machine may copy blocks from the devices.
    """

    def __init__(
        self,
        config: EngineConfig | Mapping[str, Any],
        *,
        listen: str,
        host: str = "",
        data_port: int = 0,
        peers: Sequence[str] = (),
        name: str = "",
        transport: str = "auto",
        transfer_process: bool = True,
        links: LinkConfig | None = None,
        keys: FleetKeys | str | Path | None = None,
        encrypt_blocks: bool = False,
        trusted_network: bool = False,
        wire: Wire | None = None,
        transports: Sequence[Transport] | None = None,
        runner: Runner | None = None,
        tokenizer: Tokenizer | None = None,
        store: Store | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        # a model takes minutes to load, so arguments are checked first
        if len(name) > _NAME_CHARS:
            raise ConfigError("name", f"has {len(name)} characters", limit=_NAME_CHARS)
        self._keys = keys_of(keys)
        check_address(listen, listens=True, keyed=self._keys is not None, anywhere=bool(host))
        check_address(advertised(listen, host), listens=True, keyed=self._keys is not None)
        if not 0 <= data_port <= _MAX_PORT or (data_port and is_ipc(listen)):
            raise ConfigError("data_port", f"is {data_port}", limit=f"0 to {_MAX_PORT}, where listen is tcp://")
        for peer in peers:
            check_address(peer, keyed=self._keys is not None)
        if encrypt_blocks and (self._keys is None or is_ipc(listen)):
            raise ConfigError(
                "encrypt_blocks",
                f"needs links with keys, and {listen} has none",
                hint="give keys, and listen at tcp://",
            )
        if encrypt_blocks and trusted_network:
            raise ConfigError(
                "trusted_network", "has blocks go in clear, and encrypt_blocks not", hint="give one of the two"
            )
        self._encrypt_blocks = encrypt_blocks
        self.shows_blocks = transport == "device"
        self.engine = Engine(config, runner=runner, tokenizer=tokenizer, store=store, attendant=self, drafter=drafter)
        if self.engine.config.role == "alone":
            raise ConfigError("config.role", "is 'alone'", hint="an instance is mixed, prefill or decode")
        self.address = self.listens = listen
        self._listen = listen
        self._host = host
        self._data_port = data_port
        self._names = peers
        self._name = name
        self._link_config = links
        self._wire = wire
        self.notice = ""
        self._process: TransferProcess | None = None
        optional: Sequence[str] = ()
        if transports is None:
            is_auto = transport in ("auto", "device")
            kinds, self.notice = _auto(listen, trusted_network) if is_auto else ((transport,), "")
            if not is_auto and not trusted_network and transport_class(transport).needs_trust:
                raise ConfigError(
                    "transport", f"is {transport!r}: whoever reaches its ports reads and writes blocks on their way",
                    hint="trust the network on all instances (--trusted-network), or choose another",
                )  # fmt: skip
            optional = [kind for kind in kinds if is_auto and kind == FAST]
            transports = self._make_transports(kinds, transfer_process, optional)
        self._transports = Transports(transports, self._process, optional)
        self._links: Links | None = None
        self._context: InstanceContext | None = None
        self._hanging_up: asyncio.Task[None] | None = None
        self._claims = Claims()
        self._on: dict[type[Message], Callable[[Peer, Any], None]] = {}
        self._does: dict[type[Any], Callable[[Any], None]] = {}

    def _make_transports(self, kinds: Sequence[str], in_process: bool, optional: Sequence[str]) -> Sequence[Transport]:
        keyed_host = "" if self._keys is None or is_ipc(self._listen) else number_of(self._listen)
        said = host_of(advertised(self._listen, self._host)) if self._host else ""
        specs = [
            TransportSpec(
                kind,
                keyed_host,
                tls=self._encrypt_blocks and kind == "tcp",
                said_host=said,
                port=self._data_port if kind == "tcp" else 0,
                optional=kind in optional,
            )
            for kind in kinds
        ]
        # made here in any case, so that a plugin that is missing is named before a model is loaded
        made = {}
        for spec in specs:
            try:
                made[spec] = make_transport(spec)
            except FdasyncError as error:
                if not spec.optional:
                    raise
                self.notice = f"blocks do not go by {spec.name}: {error}"
        if not in_process:
            return list(made.values())
        self._process = TransferProcess(list(made))
        return self._process.transports

    # -- life ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Instance:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Start the engine, then listen. Raises the errors of `Engine.start`, ConfigError for the address."""
        if self._wire is None:
            check_free(self._listen)
        if self._data_port:
            check_free(f"{self._listen.rpartition(':')[0]}:{self._data_port}")
        await self.engine.start()
        try:
            self._weights = self.engine.weights
            shared, capacity = self.engine.share(), self.engine.capacity
            self._text = text_digest(self.engine.tokenizer, capacity.vocab_size)
            wire = self._wire or ZmqWire(on_guard=self._on_guard, keys=self._keys, on_refused=self._on_refused)
            links = Links(wire, self, self._link_config)
            # from here to the services nothing waits: a close finds either none of them or all
            self._links = links
            self._context = context = InstanceContext(
                asyncio.get_running_loop(), *shared, transports=self._transports, links=links
            )
            self._prefill_service = PrefillService(context, self._names)
            self._responses = Responses(context, self._prefill_service)
            self._decode_service = DecodeService(
                context, capacity.block_tokens, self._responses.follow, self._responses.lose
            )
            self._kv_events = KvEvents(context, lambda: (self._weights.state.version, self._weights.state.order))
            self._dispatch()
            if self._process is not None:
                self._process.on_end = context.fail
            await self._transports.open(context.regions, self._make_device(context, capacity))
            if self._transports.device_problem:
                problem = self._transports.device_problem
                self.notice = f"blocks do not go from device to device: {problem}" + f"; {self.notice}" * bool(
                    self.notice
                )
            for kind, problem in self._transports.problems.items():
                self.notice = f"blocks do not go by {kind}: {problem}" + f"; {self.notice}" * bool(self.notice)
            # raises what ended the engine meanwhile
            self.engine.load()
            self.listens = links.listen(self._listen)
            self.address = context.address = advertised(self.listens, self._host)
            for address in self._names:
                links.dial(address)
        except BaseException:
            await self.aclose()
            raise

    def _make_device(self, context: InstanceContext, capacity: Capacity) -> DeviceTransport | None:
        """The transport between devices, where that was asked for."""
        if not self.shows_blocks:
            return None
        blocks = self.engine.peer_blocks()
        if blocks is None:
            self._transports.device_problem = "this runner shows its blocks to no other process"
            return None
        context.devices = BlockPuller(blocks, capacity.num_blocks, capacity.block_nbytes)
        return DeviceTransport(context.devices)

    def _dispatch(self) -> None:
        prefill_service, decode_service = self._prefill_service, self._decode_service
        self._on = {
            LeaseRequest: decode_service.on_lease_request,
            LeaseAnswer: prefill_service.on_answer,
            BlocksOffer: decode_service.on_offer,
            BlocksTaken: prefill_service.on_taken,
            HandOff: decode_service.on_hand_off,
            ScoredPrompt: decode_service.on_scored,
            HandOffTaken: prefill_service.on_hand_taken,
            LeaseDrop: self._on_drop,
            Submit: self._on_submit,
            Abort: self._responses.abort,
            Call: self._on_call,
            Watch: self._on_watch,
        }
        self._does = {
            AskLease: prefill_service.ask,
            GiveUpLease: prefill_service.give_up,
            SendBlocks: prefill_service.send,
            HandOver: prefill_service.hand_over,
            AnswerLease: decode_service.answer,
            DropLease: decode_service.drop,
            ReceiveBlocks: decode_service.receive,
            ConfirmHandOver: decode_service.confirm,
            TellBlocks: lambda action: self._kv_events.tell(action),
        }

    # -- what the engine calls (`Attendant` in engine/driver.py) ------------------------------------

    def perform(self, action: Action) -> None:
        """Perform an action of the scheduler that concerns other instances; called by the driver."""
        if self._context is None and type(action) is TellBlocks:
            # there is no router yet
            return
        self._does[type(action)](action)

    def weights_changed(self) -> None:
        """Tell routers of the weights in use."""
        if self._context is not None:
            self._kv_events.announce()

    async def close_transports(self) -> None:
        """End all copies of blocks from and to the engine's arenas."""
        await self._transports.aclose()

    def engine_failed(self) -> None:
        """The engine has failed: end all leases and hang up, so that other instances and routers use others. Callers
        get the engine's error as their requests end."""
        if self._context is None or self._links is None:
            # the start is about to raise
            return
        self._context.draining = True
        self._prefill_service.give_up_all("the engine failed")
        self._decode_service.drop_all("the engine failed")
        if self._hanging_up is None:
            self._hanging_up = self._context.start(self._links.aclose(), "hanging up")

    async def drain(self, limit_s: float) -> None:
        """Take no new work, and wait until all requests have ended or were handed over. Raises DeadlineExceeded."""
        assert self._context is not None
        check_loop(self._context.loop, "instance")
        self._context.draining = True
        await self.engine.drain(limit_s)

    async def aclose(self) -> None:
        """Abort live requests, send their ends to their callers, hang up, close the engine; idempotent."""
        context = self._context
        if context is not None and self.engine.state != "closed":
            check_loop(context.loop, "instance")
        try:
            if context is not None and self._links is not None:
                context.draining = True
                self._prefill_service.close()
                await self._end_live(context)
                await self._links.aclose()
                if self._hanging_up is not None:
                    await asyncio.wait([self._hanging_up])
        finally:
            try:
                await self.engine.aclose()
            finally:
                if context is not None:
                    for task in context.tasks():
                        task.cancel()
                    if context.tasks():
                        await wait_within(context.tasks(), self.engine.config.close_deadline_s)
                await self._transports.aclose()

    async def _end_live(self, context: InstanceContext) -> None:
        """Abort all requests, and wait until their callers have their ends."""
        if self.engine.state not in ("running", "draining"):
            return
        until = context.loop.time() + self.engine.config.close_deadline_s
        while self._responses.num_live and context.loop.time() < until:
            # again in every round: a request may have been in preparation
            requests = context.frontend.requests()
            for request in requests:
                context.frontend.abort(request)
            # the ends of requests, and the tasks that send them
            waits = [*context.tasks(), *[request.done for request in requests if not request.done.done()]]
            if waits:
                # bare deadline: the loop above ends the wait
                await asyncio.wait(waits, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(0)

    # -- what links call (fdasync_fleet/link/callbacks.py) --------------------------------------------------------

    def hello(self) -> Hello:
        engine, context, role = self.engine, self._context, self.engine.config.role
        assert role != "alone"
        assert context is not None
        return Hello(
            protocol=PROTOCOL,
            name=self._name or self.address,
            role=role,
            address=self.address,
            sources=self._transports.sources(),
            namespace=context.namespace(),
            facts=engine.facts(),
            namespace_base=root_key(engine.capacity.fingerprint.encode()),
            text=self._text,
            weight_order=self._weights.state.order,
        )

    def check(self, hello: Hello) -> Refused | None:
        if hello.facts is None:
            return None if hello.role == "router" else Refused("facts", "an instance told nothing of its model")
        differs = difference(self.hello(), hello)
        if differs is None:
            return None
        field, ours, theirs = differs
        return Refused(field, brief(f"{self._name or self.address} has {ours}, {hello.name} has {theirs}"))

    def beat(self, peer: Peer) -> Heartbeat:
        if peer.was_dialed:
            return Heartbeat(self._prefill_service.leases(peer))
        return Heartbeat((), self.status()) if peer.role == "router" else Heartbeat()

    def status(self) -> Status:
        """How it is, for heartbeats."""
        leases = self._prefill_service
        return Status(
            stats=self._told(self.engine.stats()),
            received_nbytes=self._decode_service.received_nbytes,
            asked=leases.granted,
            asked_s=leases.granted_s,
            asked_most_s=leases.granted_most_s,
            peer_problem=brief("; ".join(leases.unreached.values())),
        )

    def _told(self, stats: EngineStats) -> EngineStats:
        """The engine's numbers, and that the instance drains."""
        assert self._context is not None
        drains = self._context.draining and stats.state not in ("closing", "closed", "failed")
        return msgspec.structs.replace(stats, state="draining") if drains else stats

    def on_up(self, peer: Peer) -> None:
        self.engine.bus.publish(
            LinkChanged(peer=peer.name, role=peer.role or "", up=True, blocks=self._blocks_from(peer))
        )
        if peer.role == "router" and not peer.was_dialed:
            self._kv_events.add(peer)
        elif not peer.was_dialed and peer.hello is not None:
            self._transports.prepare(peer.hello.sources)

    def _blocks_from(self, peer: Peer) -> str:
        is_instance = peer.hello is not None and peer.role != "router"
        return self._transports.told(peer.hello.sources) if is_instance and peer.hello is not None else ""

    def on_message(self, peer: Peer, message: Message, payload: Frame | None) -> None:  # noqa: ARG002 - the contract's
        handler = self._on.get(type(message))
        if handler is not None:
            handler(peer, message)

    def on_heartbeat(self, peer: Peer, heartbeat: Heartbeat) -> None:
        if not peer.was_dialed:
            self._decode_service.on_heartbeat(peer, heartbeat.leases)

    def on_lost(self, peer: Peer, error: PeerUnreachable) -> None:
        self.engine.bus.publish(LinkChanged(peer=peer.name, role=peer.role or "", up=False, problem=error.problem))
        if peer.was_dialed:
            self._prefill_service.on_lost(peer, str(error))
        else:
            self._kv_events.remove(peer)
            self._decode_service.on_lost(peer, str(error))
            self._responses.on_lost(peer)
            if self._claims.joiner is peer:
                self._weights.groups.stop("its router went away")

    def _on_guard(self, address: str, problem: str) -> None:
        self.engine.bus.publish(LinkChanged(peer=address, role="listener", up=not problem, problem=problem))

    def _on_refused(self, reason: str, count: int) -> None:
        self.engine.bus.publish(ConnectionsRefused(address=self.address, reason=reason, count=count))

    def on_failure(self, error: Exception) -> None:
        self.engine.fail(error)

    # -- messages -------------------------------------------------------------------------------------

    def _on_drop(self, peer: Peer, message: LeaseDrop) -> None:
        if peer.was_dialed:
            self._prefill_service.on_drop(peer, message)
        else:
            self._decode_service.on_drop(peer, message)

    def _on_submit(self, peer: Peer, message: Submit) -> None:
        assert self._context is not None
        try:
            if self._context.draining:
                raise EngineClosed("draining")
            asked = self._request_of(peer, message)
        except FdasyncError as error:
            self._context.tell(peer, failed(message.request, error))
            return
        self._responses.submit(peer, message.request, asked)

    def _request_of(self, peer: Peer, message: Submit) -> GenerateRequest:
        if message.text is None and len(message.tokens) % 4:
            raise BadInput("prompt", f"{len(message.tokens)} bytes are no token ids")
        hand_off = None
        if message.decoders:
            hand_off = HandOffTarget(
                name=message.request, caller=peer.incarnation, decoders=message.decoders, seen=message.seen
            )
        return GenerateRequest(
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
            hand_off=hand_off,
            waited_s=message.waited_s,
            trace=message.trace,
        )

    def _on_watch(self, peer: Peer, message: Watch) -> None:
        assert self._context is not None
        try:
            sight = self.engine.sight(message.since, past_picks=message.past_picks)
            peer.send(Seen(message.number, msgspec.structs.replace(sight, stats=self._told(sight.stats))))
        except FdasyncError:
            # the link is full or lost, or the engine has ended: who looks on asks again, and waits for nothing
            return

    def _on_call(self, peer: Peer, message: Call) -> None:
        assert self._context is not None
        self._context.start(self._perform(peer, message), name_of(message.verb))

    async def _perform(self, peer: Peer, message: Call) -> None:
        assert self._context is not None
        value, failure = None, None
        try:
            value = await self._verbs_of(peer).perform(message.verb)
        except FdasyncError as error:
            failure = failure_of(error)
        weights = self._weights.state
        standing = Standing(
            namespace=self._context.namespace(),
            weight_version=weights.version,
            weight_order=weights.order,
            state=self._weights.control.doing,
            is_delta=weights.is_delta,
        )
        self._context.tell(peer, Reply(message.number, standing, brief(value or ""), failure))

    def _verbs_of(self, peer: Peer) -> PeerVerbs:
        """What a router may have this instance do."""
        return PeerVerbs(self.engine, self._claims, peer, self.drain)
