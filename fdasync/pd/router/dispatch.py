"""A router's requests: to whom each is sent, what comes back, when it is sent again, how it ends.

A request is sent under a new name with every try, so that words about one that is over count for nothing. It is tried
again as long as nothing of it has reached its caller; every caller gets exactly one end. Called by `router/router.py`,
which has the callers and the links; `instances.py` says who is to serve, `router/request.py` is the request."""

from __future__ import annotations

import asyncio
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.cache.aux import wanted_specs
from fdasync.cache.prefix import block_keys, root_key
from fdasync.errors import (
    BadInput,
    DeadlineExceeded,
    DuplicateRequestId,
    EngineClosed,
    InstanceLost,
    PeerBusy,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
    RemoteError,
)
from fdasync.ipc.deadlines import DeadlineTimer, wait_within
from fdasync.pd.messages import Abort, Ended, Failed, Moved, Outputs, Piece, PromptTokens, Rows
from fdasync.pd.results import Incoming, delta_of, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.pd.link.wire import Frame
    from fdasync.pd.router.config import RouterConfig
    from fdasync.pd.router.instances import Fleet, Member
    from fdasync.pd.router.request import Routed
    from fdasync.result import Result

News = PromptTokens | Piece | Rows | Outputs | Moved | Ended | Failed

_HASH_SLICE_BLOCKS = 256
_RETRY_S = 0.05


def grace_s(deadline_s: float) -> float:
    """How long an end may come later than it should before it is made here: a tenth of the request's time, for an
    instance that does not answer must not hold up a short one; 0.25 to 5 s, for it may be busy or the network slow."""
    return min(5.0, max(0.25, deadline_s / 10))


class Dispatch:
    """See the module.

    Args:
        base: names of requests begin with it; no other router's do.
        check_open: raises unless the router takes requests.
    """

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        base: str,
        check_open: Callable[[], None],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._base = base
        self._check_open = check_open
        self._loop = asyncio.get_running_loop()
        self._held: asyncio.Future[None] | None = None
        self._count = 0
        self._live: dict[str, Routed] = {}
        self._by_name: dict[str, Routed] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def hold(self) -> None:
        """From now on no request is sent to any instance, until `release`."""
        self._held = self._loop.create_future()

    def release(self) -> None:
        held, self._held = self._held, None
        assert held is not None
        held.set_result(None)

    async def wait_open(self, limit_s: float) -> None:
        """Until requests are sent. Raises DeadlineExceeded."""
        while self._held is not None:
            done, _ = await wait_within([self._held], limit_s)
            if not done:
                raise DeadlineExceeded("waiting for a weight update to end", limit_s)

    @property
    def live(self) -> list[Routed]:
        """Requests that have not ended."""
        return list(self._live.values())

    @property
    def num_held(self) -> int:
        """Requests, tries and tasks: 0 when all is quiet."""
        return len(self._live) + len(self._by_name) + len(self._tasks)

    def find(self, request_id: str) -> Routed | None:
        """A live request by its caller's name for it."""
        return self._live.get(request_id)

    def find_try(self, name: str) -> Routed | None:
        """A live request by its name among instances."""
        return self._by_name.get(name)

    def close(self) -> None:
        """Every request ends with what there is."""
        for request in self.live:
            self.abort_everywhere(request)
            self.finish(request, request.so_far("abort"), None)
        for task in list(self._tasks):
            task.cancel()

    def abort(self, request: Routed) -> None:
        """End a request with what it has."""
        if request.aborted or request.done.done():
            return
        request.aborted = True
        self.abort_everywhere(request)
        if not request.name:
            self.finish(request, request.so_far("abort"), None)
        else:
            # whoever has it answers; if nobody does, it ends all the same
            self.set_timer(request, grace_s(request.words.deadline_s))

    async def submit(self, request: Routed) -> None:
        """Find it an instance. One that finds none in its time ends with what there is, as every deadline does
        (DECISIONS 13). Raises BadInput, EngineClosed; PeerUnreachable where none is there."""
        self._check_open()
        if request.request_id in self._live:
            raise DuplicateRequestId(request.request_id)
        self._live[request.request_id] = request
        self.set_timer(request, request.words.deadline_s + grace_s(request.words.deadline_s))
        try:
            await self._send(request)
        except BaseException as error:
            self.finish(request, None, error if isinstance(error, Exception) else EngineClosed("cancelled"))
            raise

    async def leave(self, request: Routed) -> None:
        """Its caller leaves: abort it if it has not ended, and wait until it has."""
        if not request.done.done():
            self.abort(request)
            await wait_within([request.done], 2 * grace_s(request.words.deadline_s))

    async def _send(self, request: Routed) -> None:
        """The next try: to whom, under a new name."""
        pause_s = _RETRY_S
        absent_s = 0.0
        while not request.done.done():
            self._check_open()
            try:
                await self.wait_open(max(request.ends_at - self._loop.time(), 0.0))
            except DeadlineExceeded:
                self.finish(request, request.so_far("deadline"), None)
            if request.done.done():
                return
            keys = await self._keys(request)
            if request.done.done():
                return
            need = request.need
            route = self._fleet.choose(
                keys, request.num_tokens, request.failed, request.prefill, request.wanted_decoders,
                need=need, whole=request.whole,
            )  # fmt: skip
            if route is None and (refusal := self._fleet.refusal(need, request.prefill, request.wanted_decoders)):
                raise refusal
            left_s = request.ends_at - self._loop.time()
            if route is not None and left_s > 0 and self._give(request, route.first, route.decoders, keys, left_s):
                return
            if left_s <= 0:
                self.finish(request, request.so_far("deadline"), None)
                return
            if self._fleet.may_serve(request.prefill, request.wanted_decoders, need):
                absent_s = 0.0
            elif absent_s >= self._config.absent_s:
                problem = f"no instance was there for {self._config.absent_s:g} s that takes it"
                if away := [each.address for each in self._fleet.members.values() if not each.peer.is_up]:
                    problem += f"; missing: {', '.join(away)}"
                if waiting := [f"{each.peer.name}: {each.waits}" for each in self._fleet.up() if each.waits]:
                    problem += f"; {'; '.join(waiting)}"
                raise PeerUnreachable("router", problem)
            before = self._loop.time()
            # bare deadline: a pause before the next look
            await asyncio.wait([request.done], timeout=min(pause_s, left_s))
            # time in which the loop was blocked is no absence: whoever came meanwhile could not say so
            absent_s += min(self._loop.time() - before, pause_s)
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
        words = request.words
        request.specs = wanted_specs(() if shape is None else shape.aux, words.routing, words.aux)
        rooms = [room for member in (first, *decoders) if (room := member.room) is not None]
        most = max(room.facts.max_context_tokens for room in rooms)
        request.incoming = Incoming(request.specs, words.params.n, most, words.start)
        self._by_name[name] = request
        first.live += 1
        first.tokens += request.num_tokens
        self._count_on(request, decoders[0] if decoders else None)
        return True

    async def _keys(self, request: Routed) -> tuple[bytes, ...]:
        """Identities of a prompt's full blocks; long ones yield to the loop. Text is not tokenised here."""
        member = next(iter(self._fleet.up()), None)
        if member is None or member.hello.shape is None or not request.words.tokens:
            return ()
        size = member.hello.shape.block_tokens
        tokens = array("i", request.words.tokens)
        parent = root_key(self._fleet.namespace, request.words.salt.encode())
        keys: list[bytes] = []
        step = size * _HASH_SLICE_BLOCKS
        for first in range(0, len(tokens), step):
            if first:
                await asyncio.sleep(0)
            keys += block_keys(keys[-1] if keys else parent, tokens[first : first + step], size)
        return tuple(keys)

    # -- what comes back ------------------------------------------------------------------------------

    def take(self, member: Member, message: News, payload: Frame | None) -> None:
        request = self._by_name.get(message.request)
        if request is not None:
            try:
                self._on_news(request, member, message, payload)
            except ProtocolError as error:
                self._fail_try(request, member, str(error))

    def _on_news(
        self,
        request: Routed,
        member: Member,
        message: News,
        payload: Frame | None,
    ) -> None:
        if isinstance(message, PromptTokens):
            # whoever made it need not be who answers, whose first news may come before it
            request.prompt_of_text = tokens_of(message.tokens)
            return
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
        elif isinstance(message, Outputs):
            request.incoming.add_outputs(message)
        else:
            result = request.incoming.result(message, request.request_id, member.facts)
            self.finish(request, result, None)

    def _follow(self, request: Routed, member: Member, address: str) -> None:
        """It was handed over: to whom, unless that is another process by now, which knows nothing of it."""
        server = self._fleet.find(address)
        if server is None or not server.peer.is_up or request.sessions.get(address) != server.sessions:
            self._fail_try(request, member, f"{address}, where it went, is gone")
        else:
            request.server = server
            self._count_on(request, server)

    def _on_failed(self, request: Routed, member: Member, message: Failed) -> None:
        if message.prompt_tokens > request.need.prompt_tokens:
            self._learn(request, member, message)
        elif message.retriable:
            request.whole = request.whole or message.whole
            self._fail_try(request, member, message.problem)
        elif message.error in ("BadInput", "ConfigError", "DuplicateRequestId"):
            error = BadInput(message.field, message.problem, limit=message.limit or None, hint=message.hint)
            self.finish(request, None, error)
        else:
            self.finish(request, None, RemoteError(member.peer.name, message.error, message.problem))

    def _learn(self, request: Routed, member: Member, message: Failed) -> None:
        """A text has more tokens than its characters told, and whoever got it could not serve it: others are chosen,
        knowing that. It does not count as a try: it happens once, or twice where nobody tokenised it the first time."""
        request.tries -= 1
        self._fail_try(request, member, message.problem)
        request.need = msgspec.structs.replace(request.need, prompt_tokens=message.prompt_tokens)
        request.num_tokens = message.prompt_tokens

    def _settle(self, request: Routed) -> None:
        """Whoever prefilled it is done with it."""
        if request.first is not None:
            request.first.live -= 1
            request.first.tokens -= request.num_tokens
            request.first = None

    def _fail_try(self, request: Routed, member: Member, problem: str) -> None:
        """The try in hand came to nothing: once more, unless the caller has seen something of it."""
        request.failed.append(member.address)
        self.abort_everywhere(request)
        self._drop_try(request)
        if request.done.done():
            return
        if request.aborted:
            self.finish(request, request.so_far("abort"), None)
        elif self._loop.time() >= request.ends_at:
            # what an instance ended for want of time may look like a loss to another
            self.finish(request, request.so_far("deadline"), None)
        elif request.delivered or request.tries > self._config.retries:
            partial = request.so_far("failed")
            self.finish(request, None, InstanceLost(request.request_id, f"{member.peer.name}: {problem}", partial))
        else:
            self._spawn(self._again(request))

    async def _again(self, request: Routed) -> None:
        try:
            # bare deadline: a pause, not longer than its caller waits
            await asyncio.wait([request.done], timeout=_RETRY_S * request.tries)
            await self._send(request)
        except Exception as error:
            # a defect too must reach the caller, who else would wait to the deadline
            self.finish(request, None, error)

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
        self.abort_everywhere(request)
        self._drop_try(request)
        self._spawn(self._again(request))

    def being_handed_over(self) -> list[Routed]:
        """Requests of which it is not known yet who decodes them."""
        return [request for request in self._by_name.values() if request.decoders and request.server is None]

    def abort_everywhere(self, request: Routed) -> None:
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

    def finish(self, request: Routed, result: Result | None, error: Exception | None) -> None:
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
        self._drop_try(request)
        if self._live.get(request.request_id) is request:
            del self._live[request.request_id]
        request.end(result, error, self._loop.time())

    def set_timer(self, request: Routed, delay_s: float) -> None:
        if request.timer is not None:
            request.timer.cancel()
        request.timer = DeadlineTimer(self._loop, self._loop.time() + delay_s, partial(self._overdue, request))

    def _overdue(self, request: Routed) -> None:
        """Nobody ended it in time."""
        request.timer = None
        self.abort_everywhere(request)
        self.finish(request, request.so_far("abort" if request.aborted else "deadline"), None)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def gone(self, member: Member, problem: str) -> None:
        for request in list(self._by_name.values()):
            serves = request.server is member
            if serves or (request.server is None and request.first is member):
                self._fail_try(request, member, problem)
