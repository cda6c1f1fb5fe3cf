"""In front of instances: `fdasync.connect([...])` gives the face of an `Engine`, served by many.

    async with fdasync.connect(["ipc:///run/p0", "ipc:///run/d0"]) as router:
        result = await router.complete("Once upon a time")

Picks who prefills and who decodes by load and by the prefix that each has, sends a request again where that is allowed
(nothing of it has reached the caller), and gives every caller exactly one end. Instances may join, drain and leave
while requests run. Knows no blocks and no schedule. Retries keep the seed, so they give the same tokens.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fdasync.cache.prefix import block_keys, root_key
from fdasync.errors import (
    BadInput,
    DeadlineExceeded,
    DuplicateRequestId,
    EngineClosed,
    FdasyncError,
    InstanceLost,
    PeerBusy,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
    RemoteError,
)
from fdasync.pd.barrier import Commands
from fdasync.pd.fleet import Fleet, Member
from fdasync.pd.link import Links
from fdasync.pd.messages import (
    PROTOCOL,
    Abort,
    BlockNews,
    Done,
    Ended,
    Failed,
    Heartbeat,
    Hello,
    Moved,
    Piece,
    Progress,
    Refused,
    Rows,
    Submit,
)
from fdasync.pd.overview import RouterStats, stats_of
from fdasync.pd.results import Incoming, delta_of
from fdasync.pd.routed import Routed, RoutedGeneration
from fdasync.pd.zmq_wire import ZmqWire
from fdasync.request import SamplingParams

if TYPE_CHECKING:
    from fdasync.pd.messages import Message
    from fdasync.pd.peer import Peer
    from fdasync.pd.session import LinkConfig
    from fdasync.pd.wire import Frame, Wire
    from fdasync.result import Result

    Prompt = str | Sequence[int]

_HASH_SLICE_BLOCKS = 256
_GRACE_S = 5.0
_RETRY_S = 0.05
_MAX_ID_CHARS = 200


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attributes:
    retries: how often a request is sent again.
    direct_below_tokens: prompts that lack fewer tokens on a decode instance are not prefilled elsewhere.
    request_deadline_s: of requests that name none.
    connect_s: how long `start` waits for the first instances.
    absent_s: how long a request waits while no instance is there at all; it may wait for a busy one to its deadline.
    handoff_s: how long a weight update waits for requests that are being handed over, before it starts them again.
    command_s: how long an instance may take for a weight update, a pause or a resume.
    """

    retries: int = 3
    direct_below_tokens: int = 0
    request_deadline_s: float = 3600.0
    connect_s: float = 60.0
    absent_s: float = 30.0
    handoff_s: float = 10.0
    command_s: float = 900.0


def connect(addresses: Sequence[str], config: RouterConfig | None = None, **options: Any) -> Router:
    """A router for these instances: `async with fdasync.connect(["ipc:///run/d0"]) as router`. See `Router`."""
    return Router(addresses, config, **options)


class Router:
    """See the module. `async with` connects: every address must answer within `connect_s`, and fit the others.

    Args:
        addresses: of instances, `ipc://path` or `tcp://127.0.0.1:port`.
        links: times and bounds of the links.
        wire: another than ZMQ (tests).
        seed: of what the router draws (missing sampling seeds, request ids); None: from the system.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        config: RouterConfig | None = None,
        *,
        links: LinkConfig | None = None,
        wire: Wire | None = None,
        seed: int | None = None,
    ) -> None:
        if isinstance(addresses, str) or not all(isinstance(address, str) for address in addresses):
            raise BadInput("addresses", "a list of addresses is needed")
        self.config = config or RouterConfig()
        self.fleet = Fleet(self.config.direct_below_tokens)
        self.failure: Exception | None = None
        self._addresses = list(addresses)
        self._link_config = links
        self._wire = wire
        self._rng = random.Random(seed)
        self._base = ""
        self._count = 0
        self._live: dict[str, Routed] = {}
        self._by_name: dict[str, Routed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: Links | None = None
        self._closed = False

    # -- life ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Router:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Connect. Raises PeerRefused, DeadlineExceeded naming who does not answer, ConfigError for an address."""
        self._loop = asyncio.get_running_loop()
        self._links = Links(self._wire or ZmqWire(), self, self._link_config)
        self._base = self._links.incarnation[:8].hex()
        self.commands = Commands(self, self._links)
        try:
            members = [self._dial(address) for address in self._addresses]
            async with asyncio.timeout(self.config.connect_s):
                for member in members:
                    await member.peer.ready(self.config.connect_s)
        except TimeoutError:
            missing = ", ".join(member.address for member in self.fleet.members.values() if not member.peer.is_up)
            await self.aclose()
            raise DeadlineExceeded(f"connecting to {missing}", self.config.connect_s) from None
        except BaseException:
            await self.aclose()
            raise

    def _dial(self, address: str) -> Member:
        assert self._links is not None
        return self.fleet.add(self._links.dial(address))

    async def add(self, address: str) -> None:
        """Another instance joins. Raises PeerRefused, DeadlineExceeded, ConfigError."""
        self._check_open()
        await self._dial(address).peer.ready(self.config.connect_s)

    async def drain(self, address: str, limit_s: float = 3600.0) -> None:
        """An instance takes no new requests; returns when all of its requests ended. Raises BadInput, PeerUnreachable,
        DeadlineExceeded, RemoteError."""
        await self.commands.drain(self._member(address), limit_s)

    def remove(self, address: str) -> None:
        """Forget an instance; what it still serves ends as if it had gone. Raises BadInput."""
        assert self._links is not None
        member = self._member(address)
        member.leaving = True
        self._gone(member, "it was removed")
        self.commands.on_lost(member, PeerUnreachable(address, "it was removed"))
        self._links.hang_up(member.peer)
        del self.fleet.members[member.peer]

    def _member(self, address: str) -> Member:
        self._check_open()
        member = self.fleet.find(address)
        if member is None:
            known = ", ".join(other.address for other in self.fleet.members.values())
            raise BadInput("address", f"{address!r} is no instance of this router", limit=known)
        return member

    async def aclose(self) -> None:
        """Abort what is live, hang up; idempotent. Callers get what there is."""
        if self._closed:
            return
        self._closed = True
        for request in list(self._live.values()):
            self._abort_everywhere(request)
            self._finish(request, request.so_far("abort"), None)
        for task in list(self._tasks):
            task.cancel()
        if self._links is not None:
            await self._links.aclose()

    def _check_open(self) -> None:
        if self._closed or self._links is None:
            raise EngineClosed("closed" if self._closed else "new")
        if self.failure is not None:
            raise self.failure

    # -- requests -----------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        routing: bool | None = None,
        start: int = 0,
        cache_salt: str = "",
        prefill: str = "",
        decoders: Sequence[str] = (),
    ) -> RoutedGeneration:
        """As `Engine.generate`.

        Args:
            prefill, decoders: addresses of who shall serve it, instead of whom the router would choose.

        Entering waits for an instance. What an instance finds wrong with a request is raised when it is read. Reading
        raises `InstanceLost` with what came so far, where the instance that served it is gone.
        """
        words = self._words(prompt, params, priority, deadline_s, routing, start, cache_salt, streams=True)
        return RoutedGeneration(self, self._request(words, request_id, prefill, decoders))

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        routing: bool | None = None,
        start: int = 0,
        cache_salt: str = "",
        prefill: str = "",
        decoders: Sequence[str] = (),
    ) -> Result:
        """The end only; see `generate`. Cancelling it aborts the request."""
        words = self._words(prompt, params, priority, deadline_s, routing, start, cache_salt, streams=False)
        request = self._request(words, request_id, prefill, decoders)
        try:
            await self.submit(request)
            await asyncio.shield(request.done)
        except asyncio.CancelledError:
            self._abort_everywhere(request)
            self._finish(request, request.so_far("abort"), None)
            raise
        if request.error is not None:
            raise request.error
        assert request.result is not None
        return request.result

    def abort(self, request_id: str) -> None:
        """End a request with what it has; unknown and ended ones are left alone."""
        request = self._live.get(request_id)
        if request is None or request.aborted:
            return
        request.aborted = True
        self._abort_everywhere(request)
        if not request.name:
            self._finish(request, request.so_far("abort"), None)
        else:
            # whoever has it answers; if nobody does, it ends all the same
            self._set_timer(request, _GRACE_S)

    def _words(
        self, prompt: Any, params: Any, priority: int, deadline_s: Any, routing: bool | None, start: int, salt: str,
        *, streams: bool,
    ) -> Submit:  # fmt: skip
        self._check_open()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise BadInput("params", f"a SamplingParams is needed, not {type(params).__name__}")
        known = [member.facts for member in self.fleet.up()]
        params = params.validated(vocab_size=min((facts.vocab_size for facts in known), default=1 << 31))
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._rng.getrandbits(63))
        deadline_s = self.config.request_deadline_s if deadline_s is None else deadline_s
        if not isinstance(deadline_s, int | float) or isinstance(deadline_s, bool) or not 0 < deadline_s <= 1e9:
            raise BadInput("deadline_s", f"{deadline_s!r} is out of range", limit="above 0, up to 1e9")
        text = prompt if isinstance(prompt, str) else None
        return Submit(
            "-", "-", text, b"" if text is not None else _token_bytes(prompt), (), params, streams, priority,
            float(deadline_s), routing, start, salt,
        )  # fmt: skip

    def _request(self, words: Submit, request_id: Any, prefill: str, decoders: Sequence[str]) -> Routed:
        if request_id is None:
            request_id = f"{self._rng.getrandbits(64):016x}"
        if not isinstance(request_id, str) or not 0 < len(request_id) <= _MAX_ID_CHARS:
            raise BadInput("request_id", f"{request_id!r} is no name", limit=f"1 to {_MAX_ID_CHARS} characters")
        if request_id in self._live:
            raise DuplicateRequestId(request_id)
        for address in (*([prefill] if prefill else []), *decoders):
            self._member(address)
        request = Routed(request_id, words, (), len(words.tokens) // 4 or len(words.text or "") // 4, self._loop.time())
        request.prefill, request.wanted_decoders = prefill, tuple(decoders)
        return request

    async def submit(self, request: Routed) -> None:
        """Find it an instance. Raises BadInput, DeadlineExceeded, EngineClosed; PeerUnreachable where none is there."""
        self._check_open()
        if request.request_id in self._live:
            raise DuplicateRequestId(request.request_id)
        self._live[request.request_id] = request
        self._set_timer(request, request.words.deadline_s + _GRACE_S)
        try:
            await self._send(request)
        except BaseException as error:
            self._finish(request, None, error if isinstance(error, Exception) else EngineClosed("cancelled"))
            raise

    async def leave(self, request: Routed) -> None:
        """Its caller leaves: abort it if it has not ended, and wait until it has."""
        if not request.done.done():
            self.abort(request.request_id)
            await asyncio.wait([request.done], timeout=2 * _GRACE_S)

    async def _send(self, request: Routed) -> None:
        """The next try: to whom, under a new name."""
        pause_s = _RETRY_S
        seen_at = self._loop.time()
        while not request.done.done():
            self._check_open()
            await self.commands.wait_open(max(request.ends_at - self._loop.time(), 0.0))
            if request.done.done():
                return
            keys = await self._keys(request)
            route = self.fleet.choose(
                keys, request.num_tokens, request.failed, request.prefill, request.wanted_decoders
            )
            left_s = request.ends_at - self._loop.time()
            if route is not None and left_s > 0 and self._give(request, route.first, route.decoders, keys, left_s):
                return
            if left_s <= pause_s:
                raise DeadlineExceeded("waiting for an instance that takes requests", request.words.deadline_s)
            if self.fleet.up():
                seen_at = self._loop.time()
            elif self._loop.time() - seen_at >= self.config.absent_s:
                raise PeerUnreachable("router", f"no instance was there for {self.config.absent_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    def _give(
        self, request: Routed, first: Member, decoders: tuple[Member, ...], keys: tuple[bytes, ...], left_s: float
    ) -> bool:
        self._count += 1
        name = f"{self._base}-{self._count}.{request.tries}"
        words = msgspec.structs.replace(
            request.words,
            request=name,
            request_id=request.request_id,
            decoders=tuple([member.address for member in decoders]),
            deadline_s=left_s,
        )
        try:
            first.peer.send(words)
        except (PeerBusy, PeerUnreachable, PeerRefused):
            return False
        except ProtocolError as error:
            raise BadInput("prompt", str(error)) from None
        request.tries += 1
        request.keys = keys
        request.name, request.first, request.decoders, request.server = name, first, decoders, None
        request.sessions = {member.address: member.sessions for member in decoders}
        shape = first.hello.shape
        request.incoming = Incoming(
            () if shape is None else shape.aux, request.words.params.n, first.facts.max_context_tokens
        )
        self._by_name[name] = request
        first.live += 1
        first.tokens += request.num_tokens
        self._count_on(request, decoders[0] if decoders else None)
        return True

    async def _keys(self, request: Routed) -> tuple[bytes, ...]:
        """Identities of a prompt's full blocks; long ones yield to the loop. Text is not tokenised here."""
        member = next(iter(self.fleet.up()), None)
        if member is None or member.hello.shape is None or not request.words.tokens:
            return ()
        size = member.hello.shape.block_tokens
        tokens = array("i", request.words.tokens)
        parent = root_key(member.namespace, request.words.salt.encode(errors="surrogatepass"))
        keys: list[bytes] = []
        step = size * _HASH_SLICE_BLOCKS
        for first in range(0, len(tokens), step):
            if first:
                await asyncio.sleep(0)
            keys += block_keys(keys[-1] if keys else parent, tokens[first : first + step], size)
        return tuple(keys)

    # -- what comes back ------------------------------------------------------------------------------

    def on_message(self, peer: Peer, message: Message, payload: Frame | None) -> None:
        member = self.fleet.members.get(peer)
        if member is None:
            return
        if isinstance(message, BlockNews):
            member.learn(message)
        elif isinstance(message, Done):
            self.commands.on_done(member, message)
        elif isinstance(message, Progress):
            for piece in message.pieces:
                self._take(member, piece, None)
        elif isinstance(message, Rows | Moved | Ended | Failed):
            self._take(member, message, payload)

    def _take(self, member: Member, message: Piece | Rows | Moved | Ended | Failed, payload: Frame | None) -> None:
        request = self._by_name.get(message.request)
        if request is not None:
            try:
                self._on_news(request, member, message, payload)
            except ProtocolError as error:
                self._fail_try(request, member, str(error))

    def _on_news(
        self, request: Routed, member: Member, message: Piece | Rows | Moved | Ended | Failed, payload: Frame | None
    ) -> None:
        if isinstance(message, Moved):
            if member is request.first:
                self._settle(request)
                if request.server is None:
                    self._follow(request, member, message.address)
            return
        if request.server is not None and request.server is not member:
            # whoever decodes it alone answers, from the first token on (DECISIONS 17)
            return
        if isinstance(message, Failed):
            self._on_failed(request, member, message)
            return
        if request.server is None and request.first is not member:
            self._settle(request)
            self._count_on(request, member)
        request.server = member
        assert request.incoming is not None
        if isinstance(message, Piece):
            if message.index >= len(request.pending):
                raise ProtocolError(f"news of sample {message.index} of {len(request.pending)}")
            request.add(delta_of(message), self._loop.time())
        elif isinstance(message, Rows):
            request.incoming.add(message, payload)
        else:
            result = request.incoming.result(message, request.request_id, member.facts, request.words.start)
            self._finish(request, result, None)

    def _follow(self, request: Routed, member: Member, address: str) -> None:
        """It was handed over: to whom, unless that is another process by now, which knows nothing of it."""
        server = self.fleet.find(address)
        if server is None or not server.peer.is_up or request.sessions.get(address) != server.sessions:
            self._fail_try(request, member, f"{address}, where it went, is gone")
        else:
            request.server = server
            self._count_on(request, server)

    def _on_failed(self, request: Routed, member: Member, message: Failed) -> None:
        if message.retriable:
            self._fail_try(request, member, message.problem)
        elif message.error in ("BadInput", "ConfigError", "DuplicateRequestId"):
            error = BadInput(message.field, message.problem, limit=message.limit or None, hint=message.hint)
            self._finish(request, None, error)
        else:
            self._finish(request, None, RemoteError(member.peer.name, message.error, message.problem))

    def _settle(self, request: Routed) -> None:
        """Whoever prefilled it is done with it."""
        if request.first is not None:
            request.first.live -= 1
            request.first.tokens -= request.num_tokens
            request.first = None

    def _fail_try(self, request: Routed, member: Member, problem: str) -> None:
        """The try in hand came to nothing: once more, unless the caller has seen something of it."""
        request.failed.append(member.address)
        self._abort_everywhere(request)
        self._drop_try(request)
        if request.done.done():
            return
        if request.aborted:
            self._finish(request, request.so_far("abort"), None)
        elif self._loop.time() >= request.ends_at:
            # what an instance ended for want of time may look like a loss to another
            self._finish(request, request.so_far("deadline"), None)
        elif request.delivered or request.tries > self.config.retries:
            partial = request.so_far("failed")
            self._finish(request, None, InstanceLost(request.request_id, f"{member.peer.name}: {problem}", partial))
        else:
            self._spawn(self._again(request))

    async def _again(self, request: Routed) -> None:
        try:
            await asyncio.sleep(_RETRY_S * request.tries)
            await self._send(request)
        except FdasyncError as error:
            self._finish(request, None, error)

    @staticmethod
    def _count_on(request: Routed, decoder: Member | None) -> None:
        """Who decodes it, or most likely will: the next request should know before the instance can say so."""
        if request.decoder is not None:
            request.decoder.live -= 1
        request.decoder = decoder
        if decoder is not None:
            decoder.live += 1

    def _drop_try(self, request: Routed) -> None:
        self._settle(request)
        self._count_on(request, None)
        self._by_name.pop(request.name, None)
        request.name = ""
        request.server = None
        request.incoming = None

    def restart(self, request: Routed) -> None:
        """Take a request back from where it is, and send it anew when intake is open. For weight updates."""
        self._abort_everywhere(request)
        self._drop_try(request)
        self._spawn(self._again(request))

    def being_handed_over(self) -> list[Routed]:
        """Requests of which it is not known yet who decodes them."""
        return [request for request in self._by_name.values() if request.decoders and request.server is None]

    def _abort_everywhere(self, request: Routed) -> None:
        if not request.name:
            return
        members = {id(member): member for member in (request.first, request.server, *request.decoders) if member}
        for member in members.values():
            if member.peer.is_up:
                try:
                    member.peer.send(Abort(request.name))
                except (PeerBusy, PeerUnreachable, PeerRefused):
                    # what is not aborted ends by its deadline
                    continue

    def _finish(self, request: Routed, result: Result | None, error: Exception | None) -> None:
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
        self._drop_try(request)
        if self._live.get(request.request_id) is request:
            del self._live[request.request_id]
        request.end(result, error, self._loop.time())

    def _set_timer(self, request: Routed, delay_s: float) -> None:
        if request.timer is not None:
            request.timer.cancel()
        request.timer = self._loop.call_later(delay_s, self._overdue, request)

    def _overdue(self, request: Routed) -> None:
        """Nobody ended it in time."""
        request.timer = None
        self._abort_everywhere(request)
        self._finish(request, request.so_far("abort" if request.aborted else "deadline"), None)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- instances (pd/owner.py) ------------------------------------------------------------------------

    def hello(self) -> Hello:
        return Hello(PROTOCOL, f"router-{self._base}", "router", "")

    def check(self, hello: Hello) -> Refused | None:
        if hello.role == "router" or hello.shape is None or hello.facts is None:
            return Refused("role", "a router serves instances, not routers")
        for member in self.fleet.up():
            ours = member.hello.shape
            differs = None if ours is None else ours.difference(hello.shape)
            if differs is not None:
                field, one, other = differs
                return Refused(f"shape.{field}", f"{member.peer.name} has {one}, {hello.name} has {other}"[:4096])
        return None

    def beat(self, peer: Peer) -> Heartbeat:  # noqa: ARG002 - the contract's
        return Heartbeat()

    def on_up(self, peer: Peer) -> None:
        if peer in self.fleet.members:
            self.fleet.members[peer].came_up()

    def on_heartbeat(self, peer: Peer, heartbeat: Heartbeat) -> None:
        member = self.fleet.members.get(peer)
        if member is not None and heartbeat.status is not None:
            member.status, member.status_at = heartbeat.status, self._loop.time()

    def on_lost(self, peer: Peer, error: PeerUnreachable) -> None:
        member = self.fleet.members.get(peer)
        if member is not None:
            self._gone(member, error.problem)
            self.commands.on_lost(member, error)

    def on_failure(self, error: Exception) -> None:
        self.failure = error
        for request in list(self._live.values()):
            self._finish(request, None, error)

    def _gone(self, member: Member, problem: str) -> None:
        for request in list(self._by_name.values()):
            serves = request.server is member
            if serves or (request.server is None and request.first is member):
                self._fail_try(request, member, problem)

    # -- weights ----------------------------------------------------------------------------------------

    async def update_weights(self, version: int, source: str, mode: Literal["abort", "keep"] = "abort") -> None:
        """New weights from a checkpoint folder for all instances, under one weights id; see `Engine.update_weights`.

        A barrier (DECISIONS 22): requests that come meanwhile wait, requests that are being handed over get `handoff_s`
        to arrive and are started again after that. Who fails is dropped and named in `stats().dropped`. Raises
        BadInput, and the error of the instances where none took the weights.
        """
        if not isinstance(source, str):
            raise BadInput("source", f"{type(source).__name__} is no folder", hint="a router updates from a folder")
        await self.commands.update_weights(version, source, mode)

    async def pause(self) -> None:
        """Have every instance plan no more steps; returns when none runs. Raises as `Engine.pause` does."""
        await self.commands.all("pause")

    async def resume(self) -> None:
        await self.commands.all("resume")

    def stats(self) -> RouterStats:
        """What it knows of every instance now, and whom it dropped. Raises EngineClosed before the start."""
        if self._links is None:
            raise EngineClosed("new")
        return stats_of(self, self._loop.time())

    @property
    def live(self) -> list[Routed]:
        """Requests that have not ended."""
        return list(self._live.values())


def _token_bytes(prompt: Any) -> bytes:
    tolist = getattr(prompt, "tolist", None)
    values = tolist() if callable(tolist) else prompt
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray):
        raise BadInput("prompt", f"{type(prompt).__name__} is neither text nor a sequence of token ids")
    if not values:
        raise BadInput("prompt", "is empty", limit="at least one token")
    if bool in set(map(type, values)):
        raise BadInput("prompt", "holds a bool, which is no token id")
    try:
        return array("i", values).tobytes()
    except (TypeError, OverflowError) as error:
        raise BadInput("prompt", f"holds something that is no token id: {error}") from None
