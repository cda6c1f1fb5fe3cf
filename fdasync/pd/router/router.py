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
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fdasync.errors import (
    BadInput,
    DuplicateRequestId,
    EngineClosed,
    PeerRefused,
    PeerUnreachable,
)
from fdasync.pd.link.address import absolute
from fdasync.pd.link.links import Links
from fdasync.pd.link.zmq_wire import ZmqWire
from fdasync.pd.messages import (
    PROTOCOL,
    BlockNews,
    Done,
    Ended,
    Failed,
    Heartbeat,
    Hello,
    Moved,
    Outputs,
    Progress,
    PromptTokens,
    Refused,
    Rows,
)
from fdasync.pd.router.config import RouterConfig
from fdasync.pd.router.control import Commands
from fdasync.pd.router.dispatch import Dispatch
from fdasync.pd.router.gathering import gather, misfit, misfits
from fdasync.pd.router.instances import Fleet, Member
from fdasync.pd.router.request import Routed
from fdasync.pd.router.stats import RouterStats, stats_of
from fdasync.pd.router.stream import RoutedGeneration
from fdasync.pd.router.validation import check_path, check_request_id, check_whole, words_of
from fdasync.request import MAX_VOCAB_SIZE, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.pd.link.peer import Peer
    from fdasync.pd.link.session import LinkConfig
    from fdasync.pd.link.wire import Frame, Wire
    from fdasync.pd.messages import Message, Submit
    from fdasync.result import Result

    Prompt = str | Sequence[int]


def connect(addresses: Sequence[str], config: RouterConfig | None = None, **options: Any) -> Router:
    """A router for these instances: `async with fdasync.connect(["ipc:///run/d0"]) as router`. See `Router`."""
    return Router(addresses, config, **options)


class Router:
    """See the module. `async with` connects; see `start`.

    Args:
        addresses: of instances, `ipc://path` or `tcp://127.0.0.1:port`; at least one. Paths may be relative to the
            working directory, wherever an address is given.
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
        if not addresses:
            raise BadInput("addresses", "is empty", limit="at least one address")
        self.config = config or RouterConfig()
        if self.config.require not in ("serving", "all"):
            raise BadInput("config.require", f"{self.config.require!r} is unknown", limit="'serving' or 'all'")
        self.fleet = Fleet(self.config.direct_below_tokens)
        self.failure: Exception | None = None
        # two spellings of one address are one instance
        self._addresses = list(dict.fromkeys(map(absolute, addresses)))
        self._link_config = links
        self._wire = wire
        self._rng = random.Random(seed)
        self._base = ""
        self._links: Links | None = None
        self._started = self._closed = False

    # -- life ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Router:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Connect, until those that are there can serve, as each can: prefill or decode instances alone serve requests
        whole until the other half comes. The others have `settle_s` to answer. Who is missing then stands in
        `stats().missing`, is called on, and serves when it comes, with the weights of the others. One that does not fit
        most others stands there too, and is not called again until it is added.

        With `require="all"` every instance must answer within `connect_s` and fit the others.

        Raises DeadlineExceeded naming who does not answer, where nobody does (or not all); PeerRefused where not most
        fit together (or not all); ConfigError for an address, whoever is there.
        """
        self._loop = asyncio.get_running_loop()
        self._links = Links(self._wire or ZmqWire(), self, self._link_config)
        self._base = self._links.incarnation[:8].hex()
        self.dispatch = Dispatch(self.config, self.fleet, self._base, self._check_open)
        self.commands = Commands(self.fleet, self.dispatch, self._links, self.config, self._drop, self.on_failure)
        config = self.config
        try:
            members = [self._dial(address) for address in self._addresses]
            await gather(members, config.require, config.connect_s, config.settle_s)
            for member, refused in misfits(members, config.require):
                self._links.turn_away(member.peer, refused)
            self._started = True
            self.commands.agreement.begin()
        except BaseException:
            await self.aclose()
            raise

    def _dial(self, address: str) -> Member:
        assert self._links is not None
        return self.fleet.add(self._links.dial(address))

    async def _ready(self, member: Member) -> None:
        """Until it is up, or came with weights for which it is not used."""
        try:
            await member.peer.ready(self.config.connect_s)
        except PeerUnreachable:
            if not member.dropped:
                raise

    async def add(self, address: str) -> None:
        """Another instance joins, or one that was refused is called again. One that has other weights is brought up to
        date first, with this router's last update (within `command_s`). Raises PeerRefused if that fails, or if it does
        not fit; DeadlineExceeded, ConfigError. Cancelling stops the waiting only.

        Where this router has made no update, one with an older version than the others gets no requests until somebody
        updates it (`stats()` tells); one with other weights of no older version is refused.
        """
        self._check_open()
        member = self._dial(address)
        await self._ready(member)
        await self.dispatch.wait_open(self.config.command_s)
        await self.commands.agreement.quiet(self.config.command_s, member)
        if member.dropped:
            raise PeerRefused(address, "weights", member.dropped)

    async def drain(self, address: str, limit_s: float = 3600.0) -> None:
        """An instance takes no new requests; returns when all of its requests ended.

        It takes none any more afterwards, also where this raises or is cancelled: drain it again to wait longer,
        `remove` it, or start it anew to have it back. Raises BadInput, PeerUnreachable, DeadlineExceeded where they did
        not end within `limit_s`, RemoteError.
        """
        await self.commands.drain(self._member(address), limit_s)

    def remove(self, address: str) -> None:
        """Forget an instance; what it still serves ends as if it had gone. Raises BadInput."""
        assert self._links is not None
        member = self._member(address)
        member.leaving = True
        self.dispatch.gone(member, "it was removed")
        self.commands.on_lost(member, PeerUnreachable(address, "it was removed"))
        self._links.hang_up(member.peer)
        del self.fleet.members[member.peer]

    def _drop(self, address: str) -> None:
        """An instance that is not used any more; of a router that failed nobody is told any more."""
        if self.failure is None:
            self.remove(address)

    def _member(self, address: Any) -> Member:
        self._check_open()
        member = self.fleet.find(absolute(address)) if isinstance(address, str) else None
        if member is None:
            known = ", ".join(other.address for other in self.fleet.members.values())
            raise BadInput("address", f"{address!r} is no instance of this router", limit=known)
        return member

    async def aclose(self) -> None:
        """Abort what is live, hang up; idempotent. Callers get what there is."""
        if self._closed:
            return
        self._closed = True
        if self._links is not None:
            self.dispatch.close()
            try:
                await self.commands.aclose()
            finally:
                await self._links.aclose()

    def _check_started(self) -> None:
        if self._links is None:
            raise EngineClosed("new")

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
        aux: bool | Sequence[str] | None = None,
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
        words = self._words(prompt, params, priority, deadline_s, routing, aux, start, cache_salt, streams=True)
        return RoutedGeneration(self.dispatch, self._request(words, request_id, prefill, decoders))

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        routing: bool | None = None,
        aux: bool | Sequence[str] | None = None,
        start: int = 0,
        cache_salt: str = "",
        prefill: str = "",
        decoders: Sequence[str] = (),
    ) -> Result:
        """The end only; see `generate`. Cancelling it aborts the request. `ttft_s` of the result is None: no tokens
        are sent before the end. (An engine has it where log-probs or stop strings are asked for.)"""
        words = self._words(prompt, params, priority, deadline_s, routing, aux, start, cache_salt, streams=False)
        request = self._request(words, request_id, prefill, decoders)
        try:
            await self.dispatch.submit(request)
            await asyncio.shield(request.done)
        except asyncio.CancelledError:
            self.dispatch.abort_everywhere(request)
            self.dispatch.finish(request, request.so_far("abort"), None)
            raise
        if request.error is not None:
            raise request.error
        assert request.result is not None
        return request.result

    def abort(self, request_id: str) -> None:
        """End a request with what it has; unknown and ended ones are left alone."""
        self._check_started()
        request = self.dispatch.find(request_id)
        if request is not None:
            self.dispatch.abort(request)

    def _words(
        self, prompt: Any, params: Any, priority: Any, deadline_s: Any, routing: Any, aux: Any, start: Any, salt: Any,
        *, streams: bool,
    ) -> Submit:  # fmt: skip
        self._check_open()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise BadInput("params", f"a SamplingParams is needed, not {type(params).__name__}")
        known = [member.facts for member in self.fleet.up()]
        params = params.validated(vocab_size=min((facts.vocab_size for facts in known), default=MAX_VOCAB_SIZE))
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._rng.getrandbits(63))
        return words_of(
            prompt, params, priority=priority, routing=routing, aux=aux, start=start, salt=salt, streams=streams,
            deadline_s=self.config.request_deadline_s if deadline_s is None else deadline_s,
        )  # fmt: skip

    def _request(self, words: Submit, request_id: Any, prefill: str, decoders: Sequence[str]) -> Routed:
        if request_id is None:
            request_id = f"{self._rng.getrandbits(64):016x}"
        check_request_id(request_id)
        check_whole("prompt", msgspec.structs.replace(words, request_id=request_id))
        if self.dispatch.find(request_id) is not None:
            raise DuplicateRequestId(request_id)
        if not isinstance(decoders, list | tuple):
            raise BadInput("decoders", "a list of addresses is needed")
        first = self._member(prefill).address if prefill else ""
        for member in map(self._member, decoders):
            if member.peer.role == "prefill":
                problem = f"{member.address} is a prefill instance"
                raise BadInput("decoders", problem, hint="name instances that decode, or are mixed")
        others = tuple(dict.fromkeys([self._member(address).address for address in decoders]))
        request = Routed(request_id, words, (), len(words.tokens) // 4 or len(words.text or "") // 4, self._loop.time())
        request.prefill, request.wanted_decoders = first, others
        return request

    # -- what comes back ------------------------------------------------------------------------------

    def on_message(self, peer: Peer, message: Message, payload: Frame | None) -> None:
        member = self.fleet.members.get(peer)
        if member is None:
            return
        if isinstance(message, BlockNews):
            member.learn(message)
            self.commands.agreement.judge(member)
        elif isinstance(message, Done):
            self.commands.on_done(member, message)
        elif isinstance(message, Progress):
            for piece in message.pieces:
                self.dispatch.take(member, piece, None)
        elif isinstance(message, PromptTokens | Rows | Outputs | Moved | Ended | Failed):
            self.dispatch.take(member, message, payload)

    # -- instances (pd/owner.py) ------------------------------------------------------------------------

    def hello(self) -> Hello:
        return Hello(PROTOCOL, f"router-{self._base}", "router", "")

    def check(self, hello: Hello) -> Refused | None:
        if hello.role == "router" or hello.shape is None or hello.facts is None:
            return Refused("role", "a router serves instances, not routers")
        # those of the start are compared when all are there (`start`)
        members = self.fleet.up() if self._started else []
        return next((refused for member in members if (refused := misfit(member, hello)) is not None), None)

    def beat(self, peer: Peer) -> Heartbeat:  # noqa: ARG002 - the contract's
        return Heartbeat()

    def on_up(self, peer: Peer) -> None:
        member = self.fleet.members.get(peer)
        if member is not None:
            member.came_up()
            self.commands.agreement.judge(member)

    def on_heartbeat(self, peer: Peer, heartbeat: Heartbeat) -> None:
        member = self.fleet.members.get(peer)
        if member is not None and heartbeat.status is not None:
            member.status, member.status_at = heartbeat.status, self._loop.time()

    def on_lost(self, peer: Peer, error: PeerUnreachable) -> None:
        member = self.fleet.members.get(peer)
        if member is not None:
            self.dispatch.gone(member, error.problem)
            self.commands.on_lost(member, error)

    def on_failure(self, error: Exception) -> None:
        self.failure = error
        for request in self.dispatch.live:
            self.dispatch.finish(request, None, error)

    # -- weights ----------------------------------------------------------------------------------------

    async def update_weights(self, version: int, source: str, mode: Literal["abort", "keep"] = "abort") -> None:
        """New weights from a checkpoint folder for all instances, under one weights id; see `Engine.update_weights`.

        A barrier (DECISIONS 22): requests that come meanwhile wait, requests that are being handed over get `handoff_s`
        to arrive and are started again after that. Who fails is dropped and named in `stats().dropped`. Who was not
        there is brought up to date when it comes (again), before it gets requests, so the folder has to stay what it is
        until the next update.

        Cancelling stops the waiting only: the update goes on to its end. Give the same again to wait for that, and to
        hear of it if it has ended. Raises BadInput; UpdateUnderWay where this or another router updates them already,
        which changes nothing; EngineClosed; and the error of the instances where none took the weights.
        """
        if not isinstance(source, str):
            raise BadInput("source", f"{type(source).__name__} is no folder", hint="a router updates from a folder")
        check_path("source", source)
        await self.commands.update_weights(version, source, mode)

    async def pause(self) -> None:
        """Have every instance plan no more steps; returns when none runs. Raises as `Engine.pause` does."""
        await self.commands.all("pause")

    async def resume(self) -> None:
        await self.commands.all("resume")

    def stats(self) -> RouterStats:
        """What it knows of every instance now, and whom it dropped. Raises EngineClosed before the start."""
        self._check_started()
        return stats_of(self.fleet, len(self.live), self.commands.dropped, self._loop.time())

    @property
    def live(self) -> list[Routed]:
        """Requests that have not ended."""
        return self.dispatch.live if self._links is not None else []
