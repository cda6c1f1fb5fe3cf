"""`fdasync serve`: runs one `Instance` from its start to its end, with signals, a ready line and lines for people.

The first signal drains: no new work is taken, live requests end here or go to other instances. The second signal ends
at once. Knows the instance by its public methods. Called by `serve.py`, which parses.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack, closing
from typing import TYPE_CHECKING

import msgspec
import uvloop

from fdasync.cli.common.signals import Signals
from fdasync.errors import BadInput, ConfigError, DeadlineExceeded
from fdasync.events.catalog import BreakerChanged, EngineDied, TapFailed
from fdasync.ipc.child import allow_files, die_with_parent, settle
from fdasync.telemetry.json_log import JsonLogTap
from fdasync.telemetry.line_writer import LineWriter
from fdasync.telemetry.logs import log_to, to_logger
from fdasync.telemetry.prometheus import PrometheusTap
from fdasync_fleet.instance.instance import Instance

if TYPE_CHECKING:
    from fdasync.engine.config import EngineConfig
    from fdasync.events.catalog import Event
    from fdasync_fleet.cli.local.options import ServeOptions

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_STDOUT, _STDERR = 1, 2
_MAX_WAITING_NBYTES = 64 << 10
_LOOK_S = 1.0
# open files of an instance with a worker, a store and a few links
_FILES = 64
# a signal or the engine's end comes before
_LONG_S = 3600.0


# of a runner's notes: a pipe of 64 KiB takes the ready line at once, whatever the characters
_MOST_NOTES, _MOST_NOTE_CHARS = 40, 300


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON line for `--ready-fd`, written when the instance takes requests.

    Attributes:
        name: as given, or the address.
        role: of the instance.
        address: where others reach it.
        listens: where it listens, which may differ from that (`--host`).
        pid: of this process.
        model: as the runner names it.
        block_tokens, num_blocks: of the KV blocks on the device.
        worker_pids: processes that compute, by rank.
        gpus: theirs, as `EngineConfig.gpus` names them; () where none were placed.
        metrics_port: of Prometheus metrics; None without them.
        notes: of the runner, for people: special cases in force.
    """

    name: str
    role: str
    address: str
    listens: str
    pid: int
    model: str
    block_tokens: int
    num_blocks: int
    worker_pids: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    metrics_port: int | None = None
    notes: tuple[str, ...] = ()


def run_serve(config: EngineConfig, options: ServeOptions) -> int:
    """Serve until a signal; returns the exit code. Raises FdasyncError where it cannot start."""
    if options.parent is not None:
        die_with_parent()
        if os.getppid() != options.parent:
            # the parent has ended already
            return EXIT_FAILED
    allow_files(_FILES)
    if options.ready_fd is not None:
        try:
            os.fstat(options.ready_fd)
        except OSError as error:
            raise BadInput("--ready-fd", f"{options.ready_fd} is no open descriptor: {error.strerror}") from None
    return uvloop.run(_logged(config, options))


async def _logged(config: EngineConfig, options: ServeOptions) -> int:
    async with log_to(options.log_fd, options.log_level, as_json=options.log_json, name=options.name):
        return await _serve(config, options)


async def _serve(config: EngineConfig, options: ServeOptions) -> int:
    instance = Instance(
        config,
        listen=options.listen,
        host=options.host,
        data_port=options.data_port,
        peers=options.peers,
        name=options.name,
        transport=options.transport,
        keys=options.keys or None,
        encrypt_blocks=options.encrypt_blocks,
        trusted_network=options.trusted_network,
    )
    voice = Voice(_STDOUT)
    with Signals() as signals:
        try:
            starting = asyncio.ensure_future(instance.start())
            await signals.wait(starting, count=1, timeout_s=config.start_deadline_s + _LONG_S)
            if not starting.done():
                starting.cancel()
                await asyncio.wait([starting])
            if starting.cancelled() or signals.count:
                voice.say("interrupted while it loaded")
                return EXIT_INTERRUPTED
            starting.result()  # of a task that is done
            return await _Service(instance, options, signals, voice).run()
        finally:
            try:
                await instance.aclose()
            finally:
                await voice.aclose()


class _Service:
    """Runs an instance that has started."""

    def __init__(self, instance: Instance, options: ServeOptions, signals: Signals, voice: Voice) -> None:
        self._instance = instance
        self._options = options
        self._signals = signals
        self._voice = voice

    async def run(self) -> int:
        """Run until a signal or the engine's end; returns the exit code."""
        engine, options = self._instance.engine, self._options
        async with AsyncExitStack() as stack:
            port = None
            name = options.name or None
            await stack.enter_async_context(JsonLogTap(engine, to_logger, level=options.log_level, name=name))
            if options.json_log:
                target: str | int = _STDERR if options.json_log == "-" else options.json_log
                await stack.enter_async_context(JsonLogTap(engine, target, name=name))
            if options.metrics_port is not None:
                labels = {"engine": options.name or self._instance.address}
                metrics = await stack.enter_async_context(PrometheusTap(engine, labels=labels))
                port = await metrics.serve(options.metrics_port)
            deaths = stack.enter_context(closing(engine.bus.subscribe(EngineDied, limit=1)))
            died = asyncio.ensure_future(anext(deaths))
            telling = asyncio.ensure_future(self._tell_of_failed_taps())
            try:
                settle()
                self._tell_ready(port)
                await self._tell_of_store()
                await self._until_signal(died)
                code = await (self._failed(died) if died.done() else self._drain(died))
                self._tell_of_lost_events()
                return code
            finally:
                died.cancel()
                telling.cancel()
                await asyncio.wait([died, telling])

    def _tell_ready(self, metrics_port: int | None) -> None:
        instance, capacity = self._instance, self._instance.engine.capacity
        ready = Ready(
            name=self._options.name or instance.address,
            role=instance.engine.config.role,
            address=instance.address,
            listens=instance.listens,
            pid=os.getpid(),
            model=capacity.model,
            block_tokens=capacity.block_tokens,
            num_blocks=capacity.num_blocks,
            worker_pids=instance.engine.worker_pids,
            gpus=instance.engine.gpus,
            metrics_port=metrics_port,
            notes=tuple(note[:_MOST_NOTE_CHARS] for note in capacity.notes[:_MOST_NOTES]),
        )
        self._voice.say(
            f"ready at {ready.address} as {ready.name} ({ready.role}): {ready.model}, {ready.num_blocks} blocks of"
            f" {ready.block_tokens} tokens"
        )
        if instance.listens != instance.address:
            self._voice.say(f"listens at {instance.listens}, which others reach at {instance.address}")
        if ready.gpus:
            self._voice.say(f"GPUs {', '.join(ready.gpus)}: processes {', '.join(map(str, ready.worker_pids))}")
        for note in ready.notes:
            self._voice.say(f"note: {note}")
        if instance.notice:
            self._voice.say(instance.notice)
        if metrics_port is not None:
            self._voice.say(f"metrics at http://127.0.0.1:{metrics_port}/metrics")
        fd = self._options.ready_fd
        if fd is not None:
            try:
                os.write(fd, msgspec.json.encode(ready) + b"\n")  # blocking: a pipe takes so short a line at once
            except OSError as error:
                self._voice.say(f"the ready line could not be written to descriptor {fd}: {error.strerror}")
            if fd > _STDERR:
                os.close(fd)

    async def _tell_of_store(self) -> None:
        """Say so if the instance started without its store."""
        with closing(self._instance.engine.bus.subscribe(BreakerChanged, limit=1)) as told:
            if told.pending:
                event = await anext(told)
                assert isinstance(event, BreakerChanged)
                self._voice.say(f"without store {event.store} for now, it is tried again: {event.problem}")

    async def _tell_of_failed_taps(self) -> None:
        """Say which taps of the configuration an error ended; runs until the service ends."""
        with closing(self._instance.engine.bus.subscribe(TapFailed)) as failures:
            async for event in failures:
                assert isinstance(event, TapFailed)
                self._voice.say(f"goes on without tap {event.tap}, which failed: {event.problem}")

    def _tell_of_lost_events(self) -> None:
        """Say which taps of the configuration lost events, being slow or having failed."""
        for tap in self._instance.engine.stats().taps:
            if tap.dropped:
                self._voice.say(f"tap {tap.name} lost {tap.dropped} events of {tap.delivered + tap.dropped}")

    async def _until_signal(self, died: asyncio.Future[Event]) -> None:
        while not self._signals.count and not died.done():
            await self._signals.wait(died, count=1, timeout_s=_LONG_S)

    async def _drain(self, died: asyncio.Future[Event]) -> int:
        """Take no new work, wait until live requests have ended; returns the exit code."""
        limit_s, signals, told = self._options.drain_s, self._signals, ""
        draining = asyncio.ensure_future(self._instance.drain(limit_s))
        try:
            while not draining.done() and not died.done() and signals.count < 2:
                waits_for = self._waits_for()
                if waits_for and waits_for != told:
                    self._voice.say(f"draining, {waits_for}; another signal ends them at once")
                    told = waits_for
                await signals.wait(draining, died, count=2, timeout_s=_LOOK_S)
            if not draining.done() and not died.done():
                waits_for = self._waits_for()
                self._voice.say(f"ending at once: {waits_for} no longer" if waits_for else "ending at once")
                return EXIT_FAILED
        finally:
            draining.cancel()
            await asyncio.wait([draining])
        if died.done():
            return await self._failed(died)
        error = None if draining.cancelled() else draining.exception()
        if isinstance(error, DeadlineExceeded):
            self._voice.say(f"ending: {error}")
            return EXIT_FAILED
        if error is not None:
            raise error
        self._voice.say("drained")
        return 0

    def _waits_for(self) -> str:
        stats = self._instance.engine.stats()
        count = stats.live + stats.waiting_for_place
        if not count:
            return ""
        running, handed = stats.scheduler.running, stats.scheduler.hand_offs
        return f"waits for {count} requests ({running} in blocks, {handed} on their way elsewhere)"

    async def _failed(self, died: asyncio.Future[Event]) -> int:
        event = died.result() if died.exception() is None else None  # a future that is done
        problem = event.problem if isinstance(event, EngineDied) else "it ended by itself"
        errors = Voice(_STDERR)
        errors.say(f"the engine failed: {problem}")
        await errors.aclose()
        return EXIT_FAILED


class Voice:
    """Writes lines for people to a descriptor, and never waits for its reader."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._writer: LineWriter | None = None
        try:
            self._writer = LineWriter(fd, _MAX_WAITING_NBYTES, lambda count, _why: b"(%d lines lost)\n" % count)
        except ConfigError:
            # a descriptor that cannot be opened anew, such as another user's terminal, is written to as it is
            return

    def say(self, text: str) -> None:
        line = f"fdasync serve: {text}\n".encode(errors="replace")
        if self._writer is not None:
            self._writer.offer(line)
            return
        try:
            os.write(self._fd, line)  # blocking: a short line, now and then
        except OSError:
            return

    async def aclose(self) -> None:
        if self._writer is not None:
            await self._writer.aclose(1.0)
