"""Sends a router's requests to instances, reads the replies, tries again where that is allowed, and ends each request.

Each try has a new name, so that late messages of an earlier try have no effect. A request is tried again as long as no
output of it has reached its caller (docs/design.md, rule 21). Every caller gets exactly one end.

Knows no sockets; `choice.py` chooses the instances, `router/request.py` is the request. Called by
`router/router.py`, which has the callers and the links.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fdasync.cache.aux import wanted_specs
from fdasync.errors import (
    BadInput,
    DeadlineExceeded,
    DuplicateRequestId,
    EngineClosed,
    GrammarFailed,
    InstanceLost,
    PeerBusy,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
    RemoteError,
    WeightsBroken,
)
from fdasync.ipc.deadlines import DeadlineTimer, wait_within
from fdasync_fleet.messages import (
    Abort,
    Answered,
    Ended,
    Failed,
    Moved,
    Outputs,
    PromptTokens,
    Rows,
    SampleEnd,
    ScoredPrompt,
)
from fdasync_fleet.results import Incoming, delta_of, prompt_logprobs_of, tokens_of
from fdasync_fleet.router.blocks.prompt_keys import PromptKeys
from fdasync_fleet.router.choice import Route, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from fdasync.result import Result
    from fdasync_fleet.link.wire import Frame
    from fdasync_fleet.messages import Piece
    from fdasync_fleet.router.config import RouterConfig
    from fdasync_fleet.router.instances import InstanceHandle, InstanceTable
    from fdasync_fleet.router.request import RoutedRequest

#: a message of an instance about one request, but for new output
RequestMessage = Answered | PromptTokens | Rows | Outputs | SampleEnd | ScoredPrompt | Moved | Ended | Failed
# messages that only the answering instance sends; the frequent ones first
_OF_SERVER = Answered, Outputs, SampleEnd, Ended, Rows, ScoredPrompt
REQUEST_MESSAGES = *_OF_SERVER, PromptTokens, Moved, Failed

_RETRY_S = 0.05


def grace_s(deadline_s: float) -> float:
    """How long the router waits beyond a request's deadline for the instance to end it, before it ends the request
    itself: a tenth of the request's time, so that a silent instance does not hold up a short request, but 0.25 to 5 s,
    since the instance may be busy or the network slow."""
    return min(5.0, max(0.25, deadline_s / 10))


class Dispatch:
    """See the module.

    Args:
        base: prefix of this router's request names; no other router has it.
        check_open: raises unless the router takes requests.
    """

    def __init__(
        self,
        config: RouterConfig,
        table: InstanceTable,
        base: str,
        check_open: Callable[[], None],
    ) -> None:
        self._config = config
        self._table = table
        self._base = base
        self._check_open = check_open
        self._loop = asyncio.get_running_loop()
        self._is_held = False
        # each looks again when the barrier opens
        self._held: dict[asyncio.Future[None], None] = {}
        self._count = 0
        self._live: dict[str, RoutedRequest] = {}
        self._by_name: dict[str, RoutedRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._prompt_keys = PromptKeys()

    def hold(self) -> None:
        """Send no request to any instance until `release`."""
        self._is_held = True

    def release(self) -> None:
        self._is_held = False
        for waiter in self._held:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_open(self, limit_s: float, ended: asyncio.Future[None] | None = None) -> None:
        """Wait until requests are not held, or `ended` is done. Raises DeadlineExceeded."""
        until = self._loop.time() + limit_s
        while self._is_held and (ended is None or not ended.done()):
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._held[waiter] = None
            try:
                waits = [waiter] if ended is None else [waiter, ended]
                done, _ = await wait_within(waits, until - self._loop.time(), return_when=asyncio.FIRST_COMPLETED)
            finally:
                del self._held[waiter]
            if not done:
                raise DeadlineExceeded("waiting for a weight update to end", limit_s)

    @property
    def live(self) -> list[RoutedRequest]:
        """Requests that have not ended."""
        return list(self._live.values())

    @property
    def num_held(self) -> int:
        """Number of requests, tries and tasks; 0 when the router is idle."""
        return len(self._live) + len(self._by_name) + len(self._tasks)

    def find(self, request_id: str) -> RoutedRequest | None:
        """A live request by its caller's name for it."""
        return self._live.get(request_id)

    async def aclose(self, limit_s: float) -> None:
        """End every request with what it has. Instances have so long to send what only they know of it."""
        live = self.live
        for request in live:
            self.abort(request)
        for task in list(self._tasks):
            task.cancel()
        try:
            if left := [request.done for request in live if not request.done.done()]:
                await wait_within(left, limit_s)
        finally:
            for request in self.live:
                self._cut(request, "abort", "the router closes, and no instance has ended the request")

    def abort(self, request: RoutedRequest) -> None:
        """End a request with the output that it has."""
        if request.aborted or request.done.done():
            return
        request.aborted = True
        self.abort_everywhere(request)
        if not request.name:
            self._cut(request, "abort", "it was aborted")
        else:
            # the instance that has the request ends it; the timer does if that instance is silent
            self.set_timer(request, grace_s(request.submit.deadline_s))

    async def submit(self, request: RoutedRequest) -> None:
        """Send a request to an instance. A request that finds no instance before its deadline ends with
        finish_reason "deadline" (docs/design.md, rule 13). Raises BadInput, EngineClosed; PeerUnreachable where no
        instance is up."""
        self._check_open()
        if request.request_id in self._live:
            raise DuplicateRequestId(request.request_id)
        self._live[request.request_id] = request
        self.set_timer(request, request.submit.deadline_s + grace_s(request.submit.deadline_s))
        try:
            await self._send(request)
        except BaseException as error:
            self.finish(request, None, error if isinstance(error, Exception) else EngineClosed("cancelled"))
            raise

    async def leave(self, request: RoutedRequest) -> None:
        """The caller leaves: abort the request if it has not ended, and wait until it has."""
        if not request.done.done():
            self.abort(request)
            await wait_within([request.done], 2 * grace_s(request.submit.deadline_s))

    async def _send(self, request: RoutedRequest) -> None:
        """Make the next try, as soon as an instance can take the request."""
        pause_s = _RETRY_S
        absent_s = 0.0
        while not request.done.done():
            self._check_open()
            if self._is_held:
                try:
                    await self.wait_open(max(request.ends_at - self._loop.time(), 0.0), request.done)
                except DeadlineExceeded:
                    self._cut(request, "deadline", "its deadline passed while the weights were updated")
                if request.done.done():
                    return
            keys = await self._keys(request)
            if request.done.done():
                return
            need = request.need
            route = choose(
                self._table, keys, request.num_tokens, request.failed, request.prefill, request.wanted_decoders,
                need=need, whole=request.whole, direct_below_tokens=self._config.direct_below_tokens,
            )  # fmt: skip
            if route is None and (broken := self._last_resort(request)) is not None:
                # it replies with the reason, or was mended a moment ago
                route = Route(broken, (), request.num_tokens)
            if route is None and (refusal := self._table.refusal(need, request.prefill, request.wanted_decoders)):
                raise refusal
            left_s = request.ends_at - self._loop.time()
            if route is not None and left_s > 0 and self._give(request, route, keys, left_s):
                return
            if left_s <= 0:
                self._cut(request, "deadline", "no instance took it before its deadline")
                return
            if self._table.may_serve(request.prefill, request.wanted_decoders, need):
                absent_s = 0.0
            elif absent_s >= self._config.absent_s:
                problem = f"no instance was there for {self._config.absent_s:g} s that takes it"
                if away := [each.address for each in self._table.instances.values() if not each.peer.is_up]:
                    problem += f"; missing: {', '.join(away)}"
                if waiting := [f"{each.peer.name}: {each.why}" for each in self._table.up() if each.why]:
                    problem += f"; {'; '.join(waiting)}"
                raise PeerUnreachable("router", problem)
            before = self._loop.time()
            # bare deadline: a pause before the next look
            await asyncio.wait([request.done], timeout=min(pause_s, left_s))
            # while the loop is blocked no instance can come up, so that time does not count
            absent_s += min(self._loop.time() - before, pause_s)
            pause_s = min(2 * pause_s, 1.0)

    def _give(self, request: RoutedRequest, route: Route, keys: Sequence[bytes], left_s: float) -> bool:
        first, decoders = route.first, route.decoders
        self._count += 1
        name = f"{self._base}-{self._count}.{request.tries}"
        submit = msgspec.structs.replace(
            request.submit,
            request=name,
            request_id=request.request_id,
            decoders=tuple([instance.address for instance in decoders]),
            seen=tuple([instance.seen for instance in decoders]),
            deadline_s=left_s,
            waited_s=max(self._loop.time() - request.started_at, 0.0),
        )
        try:
            first.peer.send(submit)
        except (PeerBusy, PeerUnreachable, PeerRefused):
            return False
        except ProtocolError as error:
            raise BadInput("prompt", str(error)) from None
        request.tries += 1
        request.name, request.first, request.decoders, request.server = name, first, decoders, None
        request.sessions = {instance.address: instance.sessions for instance in decoders}
        submit = request.submit
        specs = wanted_specs(first.facts.aux_specs, submit.routing, submit.aux)
        rooms = [room for instance in (first, *decoders) if (room := instance.room) is not None]
        most = max([room.facts.max_context_tokens for room in rooms])
        scores = prompt_logprobs_of(submit.params)
        request.incoming = Incoming(specs, submit.params.n, most, submit.start, scores)
        request.samples = [None] * submit.params.n
        self._by_name[name] = request
        request.missing, request.num_blocks, request.beats = route.missing, len(keys), first.beats
        request.expected = first.sent(route.missing, keys)
        self._count_on(request, decoders[0] if decoders else None)
        return True

    def _last_resort(self, request: RoutedRequest) -> InstanceHandle | None:
        return self._table.last_resort(request.prefill, request.wanted_decoders, request.need)

    async def _keys(self, request: RoutedRequest) -> Sequence[bytes]:
        """Identities of a prompt's full blocks; none for a text, which the router does not tokenise."""
        size, submit = self._table.block_tokens, request.submit
        if not size or not submit.tokens:
            return ()
        return await self._prompt_keys.of(self._table.namespace, submit.salt, submit.tokens, size)

    # -- messages of instances ------------------------------------------------------------------------

    def take_pieces(self, instance: InstanceHandle, pieces: Sequence[Piece]) -> None:
        """New output of some requests; a router that serves many streams spends most of its time here."""
        now = self._loop.time()
        for piece in pieces:
            request = self._by_name.get(piece.request)
            if request is None or not self._serves(request, instance):
                continue
            if piece.index < len(request.outputs):
                request.add(delta_of(piece), now)
            else:
                self._fail_try(request, instance, f"output of sample {piece.index} of {len(request.outputs)}")

    def take(self, instance: InstanceHandle, message: RequestMessage, payload: Frame | None) -> None:
        request = self._by_name.get(message.request)
        if request is not None:
            try:
                self._on_change(request, instance, message, payload)
            except ProtocolError as error:
                self._fail_try(request, instance, str(error))

    def _on_change(
        self,
        request: RoutedRequest,
        instance: InstanceHandle,
        message: RequestMessage,
        payload: Frame | None,
    ) -> None:
        if isinstance(message, _OF_SERVER):
            if request.server is instance or self._serves(request, instance):
                self._on_output(request, instance, message, payload)
        elif isinstance(message, PromptTokens):
            if request.submit.text is not None:
                request.add_prompt(tokens_of(message.tokens))
        elif isinstance(message, Failed):
            if request.server is None or request.server is instance:
                self._on_failed(request, instance, message)
        elif instance is request.first:
            self._settle(request)
            if request.server is None:
                self._follow(request, instance, message.address)

    def _on_output(
        self,
        request: RoutedRequest,
        instance: InstanceHandle,
        message: Answered | Outputs | SampleEnd | Ended | Rows | ScoredPrompt,
        payload: Frame | None,
    ) -> None:
        incoming = request.incoming
        assert incoming is not None
        if isinstance(message, Answered):
            incoming.add_outputs(message.outputs)
            request.add_sample(incoming.add_end(message.end, instance.facts))
            self.finish(request, incoming.result(request.request_id, request.prompt), None)
        elif isinstance(message, Outputs):
            incoming.add_outputs(message)
        elif isinstance(message, SampleEnd):
            request.add_sample(incoming.add_end(message, instance.facts))
        elif isinstance(message, Ended):
            self.finish(request, incoming.result(request.request_id, request.prompt), None)
        elif isinstance(message, Rows):
            incoming.add(message, payload)
        else:
            incoming.add_scores(message, instance.facts.vocab_size)

    def _serves(self, request: RoutedRequest, instance: InstanceHandle) -> bool:
        """Whether output of this instance is the request's; the first instance that sends some serves it."""
        if request.server is None:
            if request.first is not instance:
                self._count_on(request, instance)
            request.server = instance
        # from the first token on the decode instance alone answers (docs/design.md, rule 17)
        return request.server is instance

    def _follow(self, request: RoutedRequest, instance: InstanceHandle, address: str) -> None:
        """The request was handed to the instance at this address. If another process is there by now, which does not
        know the request, the try has failed."""
        server = self._table.find(address)
        if server is None or not server.peer.is_up or request.sessions.get(address) != server.sessions:
            self._fail_try(request, instance, f"{address}, where it went, is gone")
        else:
            request.server = server
            self._count_on(request, server)

    def _on_failed(self, request: RoutedRequest, instance: InstanceHandle, message: Failed) -> None:
        if message.prompt_tokens > request.need.prompt_tokens:
            self._learn(request, instance, message)
        elif message.retriable:
            request.whole = request.whole or message.whole
            self._fail_try(request, instance, message.problem)
        elif message.error in ("BadInput", "ConfigError", "DuplicateRequestId"):
            error = BadInput(message.field, message.problem, limit=message.limit or None, hint=message.hint)
            self.finish(request, None, error)
        elif message.error == "GrammarFailed":
            self.finish(request, None, GrammarFailed(message.problem, request.so_far("failed")))
        elif message.error == "WeightsBroken":
            # its latest status is of before
            instance.was_told("broken")
            tries = not request.delivered and request.tries <= self._config.retries
            if tries and self._last_resort(request) is None:
                self._fail_try(request, instance, message.problem)
            else:
                self.finish(request, None, WeightsBroken(f"{instance.peer.name}: {message.problem}"))
        else:
            self.finish(request, None, RemoteError(instance.peer.name, message.error, message.problem))

    def _learn(self, request: RoutedRequest, instance: InstanceHandle, message: Failed) -> None:
        """An instance reports that a text has too many tokens for it. Choose again with that number. This does not
        count as a try: it happens once, or twice where the first instance did not tokenise the text."""
        request.tries -= 1
        self._fail_try(request, instance, message.problem)
        request.need = msgspec.structs.replace(request.need, prompt_tokens=message.prompt_tokens)
        request.num_tokens = message.prompt_tokens

    def _settle(self, request: RoutedRequest) -> None:
        """The instance that got the request has no more work with it."""
        if request.first is not None:
            request.first.settled(request.missing, request.num_blocks, request.beats, request.expected)
            request.first, request.expected = None, ()

    def _fail_try(self, request: RoutedRequest, instance: InstanceHandle, problem: str) -> None:
        """The current try failed: try again, unless output has reached the caller or no try is left."""
        request.failed.append(instance.address)
        self.abort_everywhere(request)
        self._drop_try(request)
        if request.done.done():
            return
        if request.aborted:
            self._cut(request, "abort", f"{instance.peer.name}: {problem}")
        elif self._loop.time() >= request.ends_at:
            # a request that one instance ended by deadline may look lost to another
            self._cut(request, "deadline", f"{instance.peer.name}: {problem}")
        elif request.delivered or request.tries > self._config.retries:
            partial = request.so_far("failed")
            self.finish(request, None, InstanceLost(request.request_id, f"{instance.peer.name}: {problem}", partial))
        else:
            self._spawn(self._again(request))

    async def _again(self, request: RoutedRequest) -> None:
        try:
            # bare deadline: a pause that ends with the request
            await asyncio.wait([request.done], timeout=_RETRY_S * request.tries)
            await self._send(request)
        except Exception as error:
            # a defect must reach the caller too, or the caller would wait until the deadline
            self.finish(request, None, error)

    @staticmethod
    def _count_on(request: RoutedRequest, decoder: InstanceHandle | None) -> None:
        """Count the request in the load of the instance that decodes it, or most likely will. The choice for the next
        request needs this before that instance's next heartbeat."""
        if request.decoder is not None:
            request.decoder.live -= 1
        request.decoder = decoder
        if decoder is not None:
            decoder.live += 1

    def _drop_try(self, request: RoutedRequest) -> None:
        self._settle(request)
        self._count_on(request, None)
        self._by_name.pop(request.name, None)
        request.name = ""
        request.server = None
        request.incoming = None

    def restart(self, request: RoutedRequest) -> None:
        """Abort a request's try, and send the request again when requests are not held. For weight updates."""
        self.abort_everywhere(request)
        self._drop_try(request)
        self._spawn(self._again(request))

    def being_handed_over(self) -> list[RoutedRequest]:
        """Requests with a sample at an instance that may still hand it over to another."""
        return [request for request in self._by_name.values() if request.is_between]

    def abort_everywhere(self, request: RoutedRequest) -> None:
        if not request.name:
            return
        for instance in dict.fromkeys((request.first, request.server, *request.decoders)):
            if instance is not None and instance.peer.is_up:
                # an instance that is not reached ends the request by its deadline
                with contextlib.suppress(PeerBusy, PeerUnreachable, PeerRefused):
                    instance.peer.send(Abort(request.name))

    def finish(self, request: RoutedRequest, result: Result | None, error: Exception | None) -> None:
        """End a request with one of the two."""
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
        self._drop_try(request)
        if self._live.get(request.request_id) is request:
            del self._live[request.request_id]
        request.end(result, error, self._loop.time())

    def set_timer(self, request: RoutedRequest, delay_s: float) -> None:
        if request.timer is not None:
            request.timer.cancel()
        request.timer = DeadlineTimer(self._loop, self._loop.time() + delay_s, partial(self._overdue, request))

    def _overdue(self, request: RoutedRequest) -> None:
        """No instance ended the request in time."""
        request.timer = None
        self.abort_everywhere(request)
        silent = [one.peer.name for one in (request.first, request.server) if one is not None]
        problem = f"{' and '.join(dict.fromkeys(silent)) or 'no instance'} did not end it in time"
        self._cut(request, "abort" if request.aborted else "deadline", problem)

    def _cut(self, request: RoutedRequest, reason: Literal["abort", "deadline"], problem: str) -> None:
        """End a request that no instance ends. Rows and weights of a sample that is not whole are not known here, so if
        it has tokens it is no result (docs/design.md, rule 13)."""
        if request.is_torn:
            self.finish(request, None, InstanceLost(request.request_id, problem, request.so_far("failed")))
        else:
            self.finish(request, request.so_far(reason), None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def gone(self, instance: InstanceHandle, problem: str) -> None:
        """An instance is lost or removed: the tries that it serves have failed."""
        for request in list(self._by_name.values()):
            serves = request.server is instance
            if serves or (request.server is None and request.first is instance):
                self._fail_try(request, instance, problem)
            elif request.first is instance:
                self._settle(request)
