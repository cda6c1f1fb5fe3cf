"""`fdasync http`: starts instances, connects a router to them, and serves the app, until a signal.

The front is this process; engines are others, so that neither JSON nor slow readers cost an engine's loop. An instance
that ends by itself is started again as `fdasync up` does. With `front="in-process"` there is one engine, on this loop,
as in an application that mounts the app. Called by `command.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import click
import msgspec
import uvloop
from fdasync_fleet.cli.local.child import Child, ChildEnded, in_words
from fdasync_fleet.cli.local.fleet import LocalFleet, plans_for
from fdasync_fleet.cli.local.options import LinkOptions
from fdasync_fleet.cli.local.restarts import RestartRules, Restarts
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.router import Router, connect

from fdasync import Engine
from fdasync.cli.common.signals import Signals
from fdasync.engine.tokenizer import ChatTokenizer
from fdasync.errors import BadInput, ConfigError, FdasyncError
from fdasync.ipc.child import allow_files, settle
from fdasync.registry.registry import TOKENIZERS, Registry
from fdasync.telemetry.logs import log_to
from fdasync_http.access_log import LOGGER as ACCESS
from fdasync_http.application import app
from fdasync_http.front import model_name
from fdasync_http.server import Served, bind, check_certificates, check_exposure, serving

if TYPE_CHECKING:
    import socket

    from fdasync import Generator
    from fdasync.engine.config import EngineConfig
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.telemetry.otel import SpanLines
    from fdasync_http.config import HttpConfig, HttpOptions, Listen

_EXIT_FAILED = 1
_EXIT_ERROR = 2
_EXIT_INTERRUPTED = 130
_STDERR, _NAME = 2, "http"
_LOOK_S = 0.5
_DRAIN_LOOK_S = 0.05
# between two lines of a drain
_COUNT_S = 5.0
_LAST_S = 0.5
_MIB = 1 << 20
# of a token id in JSON, with what separates it from the next one
_ID_CHARS = 8
_SHOWN_LINES = 8
_TELL_S = 3.0
_FILES, _CHILD_FILES = 64, 8


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON line for `--ready-fd`.

    Attributes:
        url, port: where clients find it.
        pid: of this process.
        model: as answers name it.
    """

    url: str
    port: int
    pid: int
    model: str


def run_http(engine: EngineConfig | None, options: HttpOptions, config: HttpConfig, listen: Listen) -> int:
    """Serve until a signal; returns the exit code. Raises FdasyncError where it cannot start."""
    check_exposure(listen, has_key=bool(config.api_key))
    check_certificates(listen)
    if options.ready_fd is not None:
        try:
            os.fstat(options.ready_fd)
        except OSError as error:
            raise BadInput("--ready-fd", f"{options.ready_fd} is no open descriptor: {error.strerror}") from None
    allow_files(_FILES + listen.limits.max_connections + _CHILD_FILES * sum(options.counts().values()))
    return uvloop.run(_Service(engine, options, config, listen).run())


def _span_lines(path: str) -> SpanLines:
    from fdasync.telemetry.otel import SpanLines

    return SpanLines(path, "fdasync http")


class _Service:
    """See the module."""

    def __init__(self, engine: EngineConfig | None, options: HttpOptions, config: HttpConfig, listen: Listen) -> None:
        self._engine = engine
        self._options = options
        self._config = config
        self._listen = listen
        links = LinkOptions(drain_s=listen.drain_s, log_level=options.log_level, log_json=options.log_json)
        plans = [] if engine is None else plans_for(engine, options.counts(), links, shares_stderr=True)
        self._fleet = LocalFleet(plans, None, self._on_end)
        self._restarts = {plan.name: Restarts(RestartRules()) for plan in plans}
        self._bound: socket.socket | None = None
        self._inside: Engine | None = None
        self._running = self._ending = False
        # by address: why it gets no requests, as it was told
        self._unused: dict[str, str] = {}
        self._spans = _span_lines(options.traces) if options.traces else None

    async def run(self) -> int:
        with Signals() as signals:
            async with AsyncExitStack() as stack:
                logs = log_to(_STDERR, self._options.log_level, as_json=self._options.log_json, name=_NAME)
                await stack.enter_async_context(logs)
                logging.getLogger(ACCESS).setLevel("INFO" if self._options.access_log else "WARNING")
                # loading takes a while: an address that is in use must show before it
                self._bound = bind(self._listen)
                stack.callback(self._bound.close)
                if self._engine is not None and self._options.front == "in-process":
                    _say("loading")
                    self._inside = Engine(self._engine)
                    return await self._serve(self._inside, signals)
                addresses = list(self._options.addresses)
                if not addresses:
                    stack.push_async_callback(self._fleet.aclose)
                    self._fleet.open()
                    code = await self._load(signals)
                    if code is not None:
                        return code
                    addresses = self._fleet.addresses
                config = RouterConfig(connect_s=self._options.connect_s)
                return await self._serve(connect(addresses, config, keys=self._options.keys or None), signals)

    async def _load(self, signals: Signals) -> int | None:
        """Wait until all instances are ready; returns an exit code where that failed."""
        _say(f"loading {', '.join(child.name for child in self._fleet.children)}")
        loading = asyncio.ensure_future(self._fleet.ready())
        try:
            while not loading.done() and not signals.count:
                await signals.wait(loading, count=1, timeout_s=_TELL_S)
            if not loading.done():
                _say("interrupted while it loaded")
                return _EXIT_INTERRUPTED
            loading.result()  # of a task that is done
        except ChildEnded as error:
            _say(f"{error.name} did not start: it {in_words(error.status)}")
            _show(error.lines)
            return _EXIT_ERROR
        finally:
            loading.cancel()
            await asyncio.wait([loading])
        self._running = True
        return None

    async def _serve(self, generator: Engine | Router, signals: Signals) -> int:
        try:
            if not await self._start(generator, signals):
                _say("interrupted while it started")
                return _EXIT_INTERRUPTED
            self._tell_of_long_prompts(generator)
            async with AsyncExitStack() as stack:
                tracer = None if self._spans is None else await stack.enter_async_context(self._spans)
                service = app(
                    generator,
                    self._config,
                    tokenizer=self._tokenizer(generator),
                    is_draining=lambda: self._ending,
                    tracer=tracer,
                )
                served = await stack.enter_async_context(serving(service, self._listen, self._bound))
                model = model_name(self._config, generator.facts())
                settle()
                self._tell_ready(Ready(url=served.url, port=served.port, pid=os.getpid(), model=model))
                while not signals.count and not self._is_over():
                    self._start_again()
                    self._tell_of_unused(generator)
                    alive = [child.exited for child in self._fleet.alive()]
                    await signals.wait(*alive, count=1, timeout_s=_LOOK_S)
                self._ending = True
                is_whole = not self._is_over() and await self._drain(served, generator, signals)
                # clients of requests that failed or were aborted get what there is
                served.stop()
                await signals.wait(served.ended, count=signals.count + 1, timeout_s=_LAST_S)
                served.drop()
            return 0 if is_whole else _EXIT_FAILED
        finally:
            await generator.aclose()

    async def _start(self, generator: Engine | Router, signals: Signals) -> bool:
        """Start it, and say which instances are missing; False: a signal came first."""
        if addresses := self._options.addresses:
            # instances of others may not be there
            _say(f"connecting to {', '.join(addresses)}, for {self._options.connect_s:g} s at most (--connect-s)")
        # a router and an engine have deadlines of their own for this
        starting = asyncio.ensure_future(generator.start())
        while True:
            await signals.wait(starting, count=1, timeout_s=_TELL_S)
            if starting.done():
                break
            if signals.count:
                starting.cancel()
                await asyncio.wait([starting])
                return False
            if isinstance(generator, Router):
                _say(f"waits for {_missing(generator)}")
        starting.result()  # of a task that is done
        if isinstance(generator, Router) and (missing := _missing(generator)):
            _say(f"serves without {missing}, until it is there")
        return True

    def _tell_of_long_prompts(self, generator: Generator) -> None:
        """A limit of bodies below what the model can read shows here, and not at the first long prompt."""
        tokens, most = generator.facts().max_context_tokens, self._config.max_body_nbytes
        if tokens * _ID_CHARS > most:
            fits = f"bodies up to {most / _MIB:g} MiB hold some {most // _ID_CHARS} token ids"
            _say(f"{fits}, and the context {tokens}; --max-body-mib raises that")

    async def _drain(self, served: Served, generator: Generator, signals: Signals) -> bool:
        """Refuse requests that generate, and wait until all answers were sent, at most `drain_s`; returns whether they
        were. Connections are taken as long as a request is live: clients read that the server drains, and balancers
        that it is not ready."""
        loop, limit_s = asyncio.get_running_loop(), self._listen.drain_s
        until, live = loop.time() + limit_s, _live(generator)
        _say(f"draining {live} requests, {limit_s:g} s at most; another signal ends at once")
        tell_at = loop.time() + _COUNT_S
        while (live := _live(generator)) and signals.count < 2 and (now := loop.time()) < until:
            if now >= tell_at:
                _say(f"draining {live} requests, for {until - now:.0f} s more")
                tell_at += _COUNT_S
            await signals.wait(count=2, timeout_s=min(_DRAIN_LOOK_S, until - now))
        served.stop()
        await signals.wait(served.ended, count=2, timeout_s=max(until - loop.time(), 0.0))
        if served.ended.done():
            return True
        if signals.count < 2:
            _say(f"not all answers were sent within {limit_s:g} s; the rest is aborted")
        generator.abort_all()
        return False

    def _tokenizer(self, generator: Generator) -> Tokenizer | None:
        """The tokenizer of the front: chats are rendered and text is decoded here, not on the loop of an instance."""
        facts = generator.facts()
        folder = self._options.tokenizer or facts.model_path
        if not folder or not facts.tokenizer:
            return None
        tokenizer: Tokenizer = Registry().load_function(TOKENIZERS, facts.tokenizer)(folder)
        if isinstance(tokenizer, ChatTokenizer):
            # loads what chats need before the first one waits for it
            tokenizer.chat_template()
        return tokenizer

    def _is_over(self) -> bool:
        """The engine of this process failed, or every instance that it started was given up."""
        if self._inside is not None:
            return self._inside.state == "failed"
        return bool(self._restarts) and all(one.given_up for one in self._restarts.values())

    def _start_again(self) -> None:
        now = asyncio.get_running_loop().time()
        for child in list(self._fleet.children):
            if self._restarts[child.name].take(now):
                try:
                    self._fleet.start_again(child)
                except ConfigError as error:
                    _say(str(error))
                    self._restarts[child.name].ended(now, None)

    def _tell_of_unused(self, generator: Generator) -> None:
        """Tell of instances that run and get no requests, and of instances that the router has dropped."""
        if not isinstance(generator, Router):
            return
        stats = generator.stats()
        unused = {one.address: one.problem for one in stats.instances if one.is_up and one.problem}
        unused |= {one.address: f"it is not used any more: {one.problem}" for one in stats.dropped}
        for address, problem in unused.items():
            if self._unused.get(address) != problem:
                _say(f"{address}: {problem}")
        self._unused = unused

    def _on_end(self, child: Child) -> None:
        if not self._running or self._ending:
            return
        status = child.exited.result()  # a process that was reaped
        wait_s = self._restarts[child.name].ended(asyncio.get_running_loop().time(), child.ready_at)
        then = "it is given up" if wait_s is None else f"it is started again in {wait_s:g} s"
        _say(f"{child.name} {in_words(status)}; {then}")
        _show(tuple(child.lines))

    def _tell_ready(self, ready: Ready) -> None:
        key = "" if self._config.api_key else "; no key is asked for"
        _say(f"ready at {ready.url}: {ready.model}, {self._config.dialect}'s and OpenAI's paths{key}", err=False)
        for note in self._fleet.notes if self._inside is None else self._inside.capacity.notes:
            _say(f"note: {note}")
        if self._options.ready_fd is not None:
            # blocking: one short line, once, to a pipe of the parent's
            os.write(self._options.ready_fd, msgspec.json.encode(ready) + b"\n")


def _live(generator: Generator) -> int:
    """Requests that have not ended; 0 of a generator that failed, which ends them all."""
    try:
        return generator.load().live
    except FdasyncError:
        return 0


def _missing(router: Router) -> str:
    """The instances that have not answered, or do not fit, and what is known of why."""
    missing = router.stats().missing
    return ", ".join(each.address + (f" ({each.problem})" if each.problem else "") for each in missing)


def _say(text: str, *, err: bool = True) -> None:
    click.echo(f"fdasync http: {text}", err=err)


def _show(lines: tuple[str, ...]) -> None:
    for line in lines[-_SHOWN_LINES:]:
        click.echo(f"    {line}", err=True)
