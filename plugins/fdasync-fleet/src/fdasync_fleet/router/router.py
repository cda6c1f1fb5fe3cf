"""Serves the methods of an `Engine` with many instances: `fdasync.connect([...])`.

    async with fdasync.connect(["ipc:///run/p0", "ipc:///run/d0"]) as router:
        result = await router.complete("Once upon a time")

A router chooses the instances that prefill and decode a request, by their load and by the prefixes that they have. It
sends a request again if an instance fails before any output reached the caller; the seed stays, so a retry gives the
same tokens. Every caller gets exactly one end. Instances may join, drain and leave while requests run.

Knows no blocks and no schedule. `fdasync` exports it; `fdasync up` and `fdasync demo` use it.
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
from fdasync.generator import Generation, Generator, Load
from fdasync.ipc.home_loop import check_loop
from fdasync.registry.mapping import check
from fdasync.request import (
    GroupTensors,
    SamplingParams,
    ask_of,
    check_name,
    check_pause_mode,
    check_prefix,
    checked_profile_s,
)
from fdasync_fleet.link.address import absolute
from fdasync_fleet.link.keys import keys_of
from fdasync_fleet.link.links import Links
from fdasync_fleet.link.zmq_wire import ZmqWire
from fdasync_fleet.messages import (
    PROTOCOL,
    Heartbeat,
    Hello,
    KvEventBatch,
    Progress,
    Refused,
    Reply,
    Seen,
)
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.control import ControlPlane
from fdasync_fleet.router.dispatch import REQUEST_MESSAGES, Dispatch
from fdasync_fleet.router.gathering import gather, misfit, misfits
from fdasync_fleet.router.instances import InstanceHandle, InstanceTable
from fdasync_fleet.router.request import RoutedRequest
from fdasync_fleet.router.stats import RouterStats, facts_of, load_of, stats_of
from fdasync_fleet.router.stream import RoutedStream
from fdasync_fleet.router.validation import check_request_id, check_whole, folder_of, submit_of
from fdasync_fleet.router.watching import Watching
from fdasync_fleet.verbs import Verbs, verb

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Unpack

    from fdasync.request import (
        Doing,
        GenerateOptions,
        GenerateRequest,
        MemoryPart,
        PauseMode,
        Prompt,
        SleepMode,
        WakeTag,
        WeightsFingerprint,
        WeightsGroup,
        WeightSource,
    )
    from fdasync.result import Result
    from fdasync.runner.facts import ModelFacts
    from fdasync.telemetry.sight.sight import Watched
    from fdasync_fleet.link.keys import FleetKeys
    from fdasync_fleet.link.peer import Peer
    from fdasync_fleet.link.session import LinkConfig
    from fdasync_fleet.link.wire import Frame, Wire
    from fdasync_fleet.messages import Message


# how long instances have to end this router's requests when it closes
_LAST_WORD_S = 1.0


def connect(addresses: Sequence[str], config: RouterConfig | None = None, **options: Any) -> Router:
    """A router for these instances: `async with fdasync.connect(["ipc:///run/d0"]) as router`. See `Router`."""
    return Router(addresses, config, **options)


class Router(Generator):
    """See the module. `async with` connects; see `start`.

    Args:
        addresses: addresses of instances, `ipc://path` or `tcp://127.0.0.1:port`; at least one. Paths may be relative
            to the working directory, wherever an address is given.
        config: settings.
        links: times and bounds of the links.
        keys: keys of the fleet, or their file; needed for addresses beyond the loopback.
        wire: a wire instead of ZMQ, for tests.
        seed: seed of the sampling seeds and request ids that the router draws; None: from the system.

    Attributes:
        config: the settings.
        table: the instances.
        failure: the defect that stopped the router; None while it works.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        config: RouterConfig | None = None,
        *,
        links: LinkConfig | None = None,
        keys: FleetKeys | str | Path | None = None,
        wire: Wire | None = None,
        seed: int | None = None,
    ) -> None:
        if isinstance(addresses, str) or not all(isinstance(address, str) for address in addresses):
            raise BadInput("addresses", "a list of addresses is needed")
        if not addresses:
            raise BadInput("addresses", "is empty", limit="at least one address")
        self.config = config or RouterConfig()
        check(self.config, root="config")
        self.table = InstanceTable()
        self.failure: Exception | None = None
        # two spellings of one address are one instance
        self._addresses = list(dict.fromkeys(map(absolute, addresses)))
        self._link_config = links
        self._keys = keys_of(keys)
        self._wire = wire
        self._rng = random.Random(seed)
        self._base = ""
        self._links: Links | None = None
        self._started = self._closed = False
        self._home: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect until one instance is up; the others then have `settle_s` to answer. Each instance can serve:
        prefill or decode instances alone serve requests whole until the other kind comes up.

        `stats().missing` names the instances that have not answered. The router goes on dialing them, and each serves
        once it is up and has the weights of the others. `stats().missing` also names an instance that does not fit
        most of the others; it is not dialed again until it is added.

        With `require="all"` every instance must answer within `connect_s` and fit the others.

        Raises DeadlineExceeded, which names the silent instances, if none answers (or not all); PeerUnreachable if
        the socket files of these are missing (`RouterConfig.connect_s`); PeerRefused if fewer than half fit together
        (or not all); ConfigError for an address.
        """
        self._loop = self._home = asyncio.get_running_loop()
        self._links = Links(self._wire or ZmqWire(keys=self._keys), self, self._link_config)
        self._base = self._links.incarnation[:8].hex()
        self.dispatch = Dispatch(self.config, self.table, self._base, self._check_open)
        self._watching = Watching(self.table, self._loop)
        self.commands = ControlPlane(self.table, self.dispatch, self._links, self.config, self._drop, self.on_failure)
        config = self.config
        try:
            instances = [self._dial(address) for address in self._addresses]
            await gather(instances, config)
            for instance, refused in misfits(instances, config.require):
                self._links.turn_away(instance.peer, refused)
                self._links_changed(instance)
            self._started = True
            self.commands.agreement.begin()
        except BaseException:
            await self.aclose()
            raise

    def _dial(self, address: str) -> InstanceHandle:
        assert self._links is not None
        return self.table.add(self._links.dial(address))

    async def _ready(self, instance: InstanceHandle) -> None:
        """Wait until an instance is up, or was dropped for its weights."""
        try:
            await instance.peer.ready(self.config.connect_limit_s)
        except PeerUnreachable:
            if instance.standing != "dropped":
                raise

    async def add(self, address: str) -> None:
        """Add an instance, or dial one again that was refused. An instance with other weights first gets this router's
        last update (within `command_s`). Raises PeerRefused if that fails, or if the instance does not fit;
        DeadlineExceeded, ConfigError. Cancelling stops the waiting only.

        If this router has made no update, an instance with an older version than the others gets no requests until it
        is updated (`stats()` says so); an instance with other weights of the same or a later version is refused.
        """
        self._check_open()
        is_new = self.table.find(absolute(address)) is None
        instance = self._dial(address)
        if is_new:
            self.commands.wakes.joined(instance)
        await self._ready(instance)
        await self.dispatch.wait_open(self.config.command_s)
        await self.commands.agreement.quiet(self.config.command_s, instance)
        if instance.standing == "waits" and self.commands.agreement.lacking(instance.namespace) is not None:
            # it refused this router's update
            self.commands.agreement.drop(instance, instance.why)
        if instance.standing == "dropped":
            raise PeerRefused(address, "weights", instance.why)

    async def drain(self, address: str, limit_s: float = 3600.0) -> None:
        """Have an instance take no new requests, and wait until all of its requests have ended.

        The instance takes no more requests even if this raises or is cancelled: drain it again to wait longer, `remove`
        it, or restart it to use it again. Raises BadInput, PeerUnreachable, RemoteError, and DeadlineExceeded if
        requests did not end within `limit_s`.
        """
        await self.commands.drain(self._instance(address), limit_s)

    def remove(self, address: str) -> None:
        """Forget an instance; its requests end or are sent again as if it were lost. Raises BadInput."""
        assert self._links is not None
        instance = self._instance(address)
        instance.leaving = True
        self.dispatch.gone(instance, "it was removed")
        self.commands.on_lost(instance, PeerUnreachable(address, "it was removed"))
        self._links.hang_up(instance.peer)
        self.table.remove(instance)

    def _drop(self, address: str) -> None:
        """Remove an instance that is not used any more; a failed router changes nothing."""
        if self.failure is None:
            self.remove(address)

    def _instance(self, address: Any) -> InstanceHandle:
        self._check_open()
        instance = self.table.find(absolute(address)) if isinstance(address, str) else None
        if instance is None:
            known = ", ".join(other.address for other in self.table.instances.values())
            raise BadInput("address", f"{address!r} is no instance of this router", limit=known)
        return instance

    async def aclose(self) -> None:
        """Abort live requests, which end with their output so far, and hang up; idempotent. Instances have a second to
        say what only they know of it, as rows; without it a request that has tokens ends with InstanceLost, which has
        the output. A caller that is cancelled leaves the closing to go on."""
        if self._closing is None:
            check_loop(self._home, "router")
            self._closed = True
            if self._links is None:
                return
            self._closing = self._loop.create_task(self._close(self._links), name="fdasync-close")
        if not self._closing.done():
            check_loop(self._home, "router")
            # bounded by the limits of what it closes
            await asyncio.wait([self._closing])
        self._closing.result()  # of a task that is done

    async def _close(self, links: Links) -> None:
        try:
            await self.dispatch.aclose(_LAST_WORD_S)
            await self.commands.aclose()
        finally:
            await links.aclose()

    def _check_open(self) -> None:
        check_loop(self._home, "router")
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
        prefill: str = "",
        decoders: Sequence[str] = (),
        **options: Unpack[GenerateOptions],
    ) -> Generation[RoutedStream]:
        """See `Generator.generate`.

        Args:
            prefill, decoders: addresses of the instances that must serve it; "" and empty: the router chooses.

        Entering waits for an instance. An error that an instance finds in the request is raised when the stream is
        read. If the instance that serves the request is lost after it sent output, reading raises `InstanceLost` with
        the output so far.
        """
        request = self._request(ask_of(prompt, params, options, streams=True), prefill, decoders)
        return Generation(lambda: RoutedStream.open(self.dispatch, request))

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        prefill: str = "",
        decoders: Sequence[str] = (),
        **options: Unpack[GenerateOptions],
    ) -> Result:
        """See `Generator.complete`. `ttft_s` of the result is None, since instances send no tokens before the end. (An
        engine has it if the caller asks for log-probs or stop strings.)"""
        request = self._request(ask_of(prompt, params, options, streams=False), prefill, decoders)
        try:
            await self.dispatch.submit(request)
            # this call alone waits for the future, so its cancelling may cancel the future too. The request's timer
            # ends the request at its deadline
            await request.done
        except asyncio.CancelledError:
            self.dispatch.abort_everywhere(request)
            self.dispatch.finish(request, request.so_far("abort"), None)
            raise
        return request.outcome()

    def abort(self, request_id: str) -> bool:
        check_name(request_id)
        check_loop(self._home, "router")
        request = None if self._links is None else self.dispatch.find(request_id)
        if request is None:
            return False
        self.dispatch.abort(request)
        return True

    def abort_all(self, prefix: str = "") -> int:
        """See `Generator.abort_all`: ends requests of this router. Requests of other routers, and of the instances'
        own processes, go on."""
        check_prefix(prefix)
        check_loop(self._home, "router")
        live = [request for request in self.live if request.request_id.startswith(prefix)]
        for request in live:
            self.dispatch.abort(request)
        return len(live)

    def _request(self, asked: GenerateRequest, prefill: str, decoders: Sequence[str]) -> RoutedRequest:
        self._check_open()
        submit = submit_of(self._with_params(asked), self.config.request_deadline_s)
        request_id = f"{self._rng.getrandbits(64):016x}" if asked.request_id is None else asked.request_id
        check_request_id(request_id)
        check_whole("prompt", msgspec.structs.replace(submit, request_id=request_id))
        if self.dispatch.find(request_id) is not None:
            raise DuplicateRequestId(request_id)
        if not isinstance(decoders, list | tuple):
            raise BadInput("decoders", "a list of addresses is needed")
        first = self._instance(prefill).address if prefill else ""
        for instance in map(self._instance, decoders):
            if instance.peer.role == "prefill":
                problem = f"{instance.address} is a prefill instance"
                raise BadInput("decoders", problem, hint="name instances that decode, or are mixed")
        others = tuple(dict.fromkeys([self._instance(address).address for address in decoders])) if decoders else ()
        request = RoutedRequest(
            request_id, submit, len(submit.tokens) // 4 or len(submit.text or "") // 4, self._loop.time()
        )
        request.prefill, request.wanted_decoders = first, others
        return request

    def _with_params(self, asked: GenerateRequest) -> GenerateRequest:
        """The call with checked parameters and a seed. Token ids are checked against the vocabulary of the instances
        that are up."""
        params: Any = asked.params
        if not isinstance(params, SamplingParams):
            raise BadInput("params", f"a SamplingParams is needed, not {type(params).__name__}")
        params = params.validated(vocab_size=self.table.vocab_size)
        if params.chosen_positions_start is not None:
            problem = "was asked for, and no message between instances carries them"
            raise BadInput("chosen_positions_start", problem, hint="ask an engine that serves alone")
        if params.processors:
            problem = "were asked for, and a router does not know which instances have them"
            raise BadInput("processors", problem, hint="ask an engine that serves alone")
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._rng.getrandbits(63))
        return msgspec.structs.replace(asked, params=params)

    # -- what links call (fdasync_fleet/link/callbacks.py) -------------------------------------------------------

    def on_message(self, peer: Peer, message: Message, payload: Frame | None) -> None:
        instance = self.table.instances.get(peer)
        if instance is None:
            return
        if isinstance(message, KvEventBatch):
            instance.learn(message)
            self.commands.agreement.judge(instance)
        elif isinstance(message, Reply):
            self.commands.on_reply(instance, message)
        elif isinstance(message, Seen):
            self._watching.on_seen(instance, message)
        elif isinstance(message, Progress):
            self.dispatch.take_pieces(instance, message.pieces)
        elif isinstance(message, REQUEST_MESSAGES):
            self.dispatch.take(instance, message, payload)

    def hello(self) -> Hello:
        return Hello(PROTOCOL, f"router-{self._base}", "router", "")

    def check(self, hello: Hello) -> Refused | None:
        if hello.role == "router" or hello.facts is None:
            return Refused("role", "a router serves instances, not routers")
        # `start` compares the first instances, once all have answered
        instances = self.table.up() if self._started else []
        return next((refused for instance in instances if (refused := misfit(instance, hello)) is not None), None)

    def beat(self, peer: Peer) -> Heartbeat:  # noqa: ARG002 - the contract's
        return Heartbeat()

    def on_up(self, peer: Peer) -> None:
        instance = self.table.instances.get(peer)
        if instance is not None:
            if (refused := self._twin(peer)) is not None:
                assert self._links is not None
                self._links.turn_away(peer, refused)
                self._links_changed(instance)
                return
            instance.came_up()
            self.table.links_changed()
            self.commands.agreement.judge(instance)
            self.commands.wakes.on_up(instance)

    def _twin(self, peer: Peer) -> Refused | None:
        """Why a peer is no instance of its own: the process that answers at its address is another one of ours."""
        for other in self.table.instances:
            if other is not peer and other.is_up and other.incarnation == peer.incarnation:
                says = "" if peer.hello is None else peer.hello.address
                problem = f"the process that answers there also answers at {other.address}, and says that it listens at"
                return Refused("address", f"{problem} {says}: name it once, or mend what stands between")
        return None

    def on_heartbeat(self, peer: Peer, heartbeat: Heartbeat) -> None:
        instance = self.table.instances.get(peer)
        if instance is not None and heartbeat.status is not None:
            instance.status, instance.status_at = heartbeat.status, self._loop.time()
            self.commands.wakes.on_status(instance)

    def on_lost(self, peer: Peer, error: PeerUnreachable) -> None:
        instance = self.table.instances.get(peer)
        if instance is not None:
            self._links_changed(instance)
            self.dispatch.gone(instance, error.problem)
            self.commands.on_lost(instance, error)
            self._watching.on_lost(instance)

    def _links_changed(self, instance: InstanceHandle) -> None:
        instance.refresh()
        self.table.links_changed()

    def on_failure(self, error: Exception) -> None:
        self.failure = error
        for request in self.dispatch.live:
            self.dispatch.finish(request, None, error)

    # -- weights ----------------------------------------------------------------------------------------

    async def update_weights(
        self,
        version: str | int | None,
        source: WeightSource,
        mode: Literal["abort", "keep"] = "abort",
        *,
        expected: str | WeightsFingerprint | None = None,
    ) -> None:
        """See `Generator.update_weights`: all instances get the weights of one checkpoint folder, under one weights id.

        An update is a barrier (docs/design.md, rule 22). New requests wait. Hand-offs get `handoff_s` to finish; then
        their requests are started again. An instance that fails is dropped and named in `stats().dropped`. An instance
        that is down or asleep gets the update when it comes up or wakes, before it gets requests; so the folder must
        not change until the next update. A version in use that is given again is a barrier, too: every instance reads
        and hashes the folder, and new requests wait. Each instance compares its weights with the expected fingerprint;
        an instance that differs is dropped, and where all differ the call raises WeightsDiffer.

        Tensors of a group come once. So an instance that was down then, or is not in the group, gets no requests until
        it is updated; and a broadcast that fails leaves the weights of all instances broken.

        If the caller is cancelled, the update goes on; the same call meanwhile waits for it and gives its outcome, and
        after it is an update of its own. Raises
        SourceUnsupported for tensors, since instances are other processes and read a folder; UpdateUnderWay, and
        changes nothing, if this or another router is updating them; the first error if no instance took the weights.
        """
        self._check_open()
        brought = source if isinstance(source, GroupTensors) else folder_of(source)
        await self.commands.update_weights(version, brought, mode, expected)

    async def join_weights_group(self, group: WeightsGroup) -> None:
        """See `Generator.join_weights_group`: the instances that are up join, in the order of their addresses, each
        with a rank for every worker. Where one fails, all leave. An instance that comes up later is in no group."""
        self._check_open()
        await self.commands.join(group)

    async def leave_weights_group(self, name: str) -> None:
        """See `Generator.leave_weights_group`."""
        self._check_open()
        await self.commands.leave(name)

    async def begin_weight_update(self, mode: Literal["abort", "keep"] = "keep") -> None:
        """See `Generator.begin_weight_update`: a barrier as `update_weights` is, from here to the end of the update. A
        part may come up to `command_s` after the part before it."""
        self._check_open()
        await self.commands.begin(mode)

    async def end_weight_update(
        self, version: str | int | None = None, *, expected: str | WeightsFingerprint | None = None
    ) -> None:
        """See `Generator.end_weight_update`."""
        self._check_open()
        await self.commands.end(version, expected)

    async def abandon_weight_update(self) -> None:
        """See `Generator.abandon_weight_update`."""
        self._check_open()
        await self.commands.abandon()

    async def set_weight_version(self, version: str | int) -> None:
        """See `Generator.set_weight_version`: all instances give their weights the label, while new requests wait.

        An instance that fails is dropped and named in `stats().dropped`. An instance that comes up later with the same
        weights gets the label before it gets requests. Cancelling and UpdateUnderWay as in `update_weights`.
        """
        self._check_open()
        await self.commands.relabel(version)

    async def weights_fingerprint(self) -> str:
        """See `Generator.weights_fingerprint`: of every instance that is up and has the router's weights. Raises the
        first error of an instance, after all have answered."""
        self._check_open()
        return await self.commands.fingerprint()

    async def profile(self, seconds: float) -> dict[str, str]:
        """See `Generator.profile`: each instance that is up has `command_s` beyond the seconds. Raises the first error
        of an instance, after all have answered."""
        seconds = checked_profile_s(seconds)
        self._check_open()
        return await self.commands.profile(seconds)

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """See `Generator.pause`: pauses every instance that is up, with all of its requests, whichever router sent
        them. In mode "abort" the ends of requests may still be on their way when it returns.

        Each instance has `command_s` for it, and in mode "wait" `request_deadline_s` more. A call that is cancelled has
        the instances resume, unless another pause of this router is there. Raises as `Engine.pause` does, and
        DeadlineExceeded; then some instances are paused, and `resume` undoes that.
        """
        check_pause_mode(mode)
        self._check_open()
        if mode == "abort":
            # also requests that wait for an instance, or are about to be sent again
            self.abort_all()
        await self.commands.pause(mode)

    async def resume(self) -> None:
        self._check_open()
        await self.commands.resume()

    async def sleep(
        self, level: Literal[0, 1, 2] = 1, mode: SleepMode = "keep", *, tags: Sequence[MemoryPart] | None = None
    ) -> None:
        """See `Generator.sleep`: of every instance that is up, with all of its requests, whichever router sent them;
        hand-offs are ended, and their requests start again.

        Each instance has `command_s` for it, and in mode "wait" `request_deadline_s` more. If the caller is cancelled,
        instances that were told fall asleep all the same. Raises UpdateUnderWay where this or another router makes a
        change; the first error of an instance, after all have answered: some sleep then, and `wake` undoes that.
        """
        self._check_open()
        await self.commands.sleep(level, mode, tags)
        if mode == "abort":
            # instances have ended theirs; these wait for one, or are about to be sent again. A refused sleep ends none
            self.abort_all()

    async def wake(self, tags: Sequence[WakeTag] | None = None) -> Doing:
        """See `Generator.wake`: of every instance that is up, and of the others once they are. Raises UpdateUnderWay as
        `sleep` does; the first error of an instance, after all have answered: WakeFailed with its name, while the
        others are awake.

        An instance that missed weights while it slept has them when this returns, or "waits_for_weights" is returned,
        and `stats()` says why. If the caller is cancelled, instances wake all the same. An instance that has not woken
        gets no requests: if it did not answer the router wakes it again, if it failed the next call does.
        """
        self._check_open()
        return await self.commands.wake(tags)

    async def reset_cache(self) -> None:
        """See `Generator.reset_cache`: of every instance that is up. Raises the first error of an instance, after all
        have answered; DeadlineExceeded after `command_s`."""
        self._check_open()
        await self.commands.all(verb(Verbs.reset_cache), self.config.command_s)

    def stats(self) -> RouterStats:
        """The state of every instance as the router knows it, and the dropped ones. Raises EngineClosed before
        `start`."""
        if self._links is None:
            raise EngineClosed("new")
        return stats_of(self.table, len(self.live), self.commands.dropped, self._loop.time())

    def facts(self) -> ModelFacts:
        """See `Generator.facts`: as the handshakes of the instances told it, which all have one model."""
        if self._links is None:
            raise EngineClosed("new")
        return facts_of(self.table)

    def load(self) -> Load:
        """See `Generator.load`. Raises what stopped the router."""
        self._check_open()
        return load_of(self.table, len(self.live), self._loop.time(), updating=self.commands.is_updating)

    async def watch(self) -> tuple[Watched, ...]:
        """See `Generator.watch`. Raises what stopped the router."""
        self._check_open()
        return await self._watching.look()

    @property
    def live(self) -> list[RoutedRequest]:
        """Requests that have not ended."""
        return self.dispatch.live if self._links is not None else []
