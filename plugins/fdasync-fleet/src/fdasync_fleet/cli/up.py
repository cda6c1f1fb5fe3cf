"""`fdasync up`: runs several instances on this machine, shows a table of them, and ends them.

Owns a `LocalFleet` of `fdasync serve` children, starts a child again that ends by itself (`restarts.py`), and has a
`Router` that reads their status. It sends no requests. A router that updated the weights gives them to an instance that
was started again (`router/weights/agreement.py`). No engine runs here: a terminal that is stopped holds up the table
alone, and a reader that ends costs the table alone (`stdout.py`). Called by `serve.py`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvloop
from msgspec.structs import replace
from rich.console import Console
from rich.live import Live

from fdasync.cli.common.signals import Signals
from fdasync.cli.common.stdout import StdoutWriter
from fdasync.errors import ConfigError
from fdasync.ipc.child import allow_files
from fdasync_fleet.cli.local.child import Child, ChildEnded, Role, in_words
from fdasync_fleet.cli.local.fleet import LocalFleet, plans_for
from fdasync_fleet.cli.local.restarts import RestartRules, Restarts
from fdasync_fleet.cli.up_table import Rates, fleet_table
from fdasync_fleet.link.keys import keys_of
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.router import Router, connect

if TYPE_CHECKING:
    from typing import TextIO

    from fdasync.engine.config import EngineConfig
    from fdasync_fleet.cli.local.options import UpOptions
    from fdasync_fleet.router.stats import RouterStats

_EXIT_FAILED = 1
_EXIT_ERROR = 2
_EXIT_INTERRUPTED = 130
_REFRESH_S = 0.5
_SHORT_S = 0.001
_CONNECT_S = 30.0
_SHOWN_LINES = 8
# open files of this process, and more for each instance
_FILES, _CHILD_FILES = 48, 8


def run_up(config: EngineConfig, options: UpOptions, rules: RestartRules | None = None) -> int:
    """Run the instances until a signal; returns the exit code. Raises FdasyncError where they cannot start.

    Args:
        rules: when an instance that ended by itself is started again; None: as the options say.
    """
    allow_files(_FILES + _CHILD_FILES * (options.prefill + options.decode + options.mixed))
    rules = rules or (RestartRules() if options.restart == "on-failure" else RestartRules(limit=0))
    return uvloop.run(_Up(config, options, rules, StdoutWriter(sys.stdout, "fdasync up")).run())


class _Up:
    """See the module."""

    def __init__(self, config: EngineConfig, options: UpOptions, rules: RestartRules, out: StdoutWriter) -> None:
        self._out = out
        self._console = Console(file=cast("TextIO", out))
        self._options = options
        self._failed = False
        self._running = self._draining = False
        # read before there is a loop
        self._keys = keys_of(options.keys or None)
        counts: dict[Role, int] = {"prefill": options.prefill, "decode": options.decode, "mixed": options.mixed}
        plans = plans_for(config, counts, options, shares_stderr=True)
        if options.json_log:
            folder = Path(options.json_log).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            plans = [replace(plan, extra=("--json-log", f"{folder}/{plan.name}.jsonl")) for plan in plans]
        self._fleet = LocalFleet(plans, Path(options.folder) if options.folder else None, self._on_end)
        self._restarts = {plan.name: Restarts(rules) for plan in plans}
        self._gives_up = not rules.limit
        self._store_problems = {plan.name: "" for plan in plans}
        # problem, and whether events were lost, as told of each instance
        self._tap_states = {plan.name: ("", False) for plan in plans}

    async def run(self) -> int:
        fleet = self._fleet
        with Signals() as signals:
            try:
                fleet.open()
                code = await self._load(signals)
                return code if code is not None else await self._watch(signals)
            finally:
                await self._close(signals)

    async def _load(self, signals: Signals) -> int | None:
        """Wait until all are ready; returns an exit code where that failed."""
        names = ", ".join(child.name for child in self._fleet.children)
        self._say(f"loading {names} in {len(self._fleet.children)} processes")
        loading = asyncio.ensure_future(self._fleet.ready())
        try:
            while not loading.done() and not signals.count:
                await signals.wait(loading, count=1, timeout_s=_CONNECT_S)
            if not loading.done():
                self._say("interrupted while they loaded")
                return _EXIT_INTERRUPTED
            loading.result()  # of a task that is done
        except ChildEnded as error:
            was_ready = any(child.name == error.name and child.ready_at is not None for child in self._fleet.children)
            what = "ended before all were ready" if was_ready else "did not start"
            self._say(f"[red]{error.name} {what}: it {in_words(error.status)}[/]")
            self._show(error.lines)
            return _EXIT_ERROR if error.status == _EXIT_ERROR else _EXIT_FAILED
        finally:
            loading.cancel()
            await asyncio.wait([loading])
        self._running = True
        for child in self._fleet.children:
            if child.state == "ended":
                # it ended in the turn in which the last child became ready
                self._on_end(child)
        return None

    async def _watch(self, signals: Signals) -> int:
        """Show the table until a signal, or until all have ended for good; returns the exit code."""
        listed = ", ".join(f'"{address}"' for address in self._fleet.addresses)
        router = connect(self._fleet.addresses, RouterConfig(connect_s=_CONNECT_S), keys=self._keys)
        try:
            code = await self._connect(router, signals)
            if code is not None:
                return code
            self._say("ready; connect with")
            keys = f', keys="{self._options.keys}"' if self._options.keys else ""
            self._print(f"    fdasync.connect([{listed}]{keys})")
            for child in self._fleet.children:
                if child.gpus:
                    self._print(f"    {child.name} has GPUs {', '.join(child.gpus)}")
            for note in self._fleet.notes:
                self._print(f"    note: {note}")
            rates = Rates()
            with Live(console=self._console, auto_refresh=False, transient=False) as live:
                while (self._fleet.alive() or self._waiting()) and not signals.count:
                    self._start_again()
                    self._refresh(live, router, rates)
                    await self._look(signals, 1)
                self._draining = True
                self._stop_restarts()
                cut_short = await self._drain(signals, live, router, rates)
                self._refresh(live, router, rates)
        finally:
            await router.aclose()
        if not cut_short and not self._failed:
            self._say("all drained")
        return _EXIT_FAILED if cut_short or self._failed else 0

    async def _connect(self, router: Router, signals: Signals) -> int | None:
        """Start the router, and children again that end meanwhile; returns an exit code where that failed."""
        connecting = asyncio.ensure_future(router.start())
        try:
            while not connecting.done() and (self._fleet.alive() or self._waiting()) and not signals.count:
                self._start_again()
                await self._look(signals, 1, connecting)
            if signals.count:
                self._say("interrupted while it connected to them")
                return _EXIT_INTERRUPTED
            if not connecting.done():
                # all were given up, each by name
                return _EXIT_FAILED
            connecting.result()  # of a task that is done
        finally:
            connecting.cancel()
            await asyncio.wait([connecting])
        return None

    async def _drain(self, signals: Signals, live: Live, router: Router, rates: Rates) -> bool:
        """Drain prefill instances first: their requests still need decode instances. True: requests were cut short."""
        if not self._fleet.alive() or signals.count > 1:
            return bool(self._fleet.alive())
        self._say("draining; another signal ends all at once")
        order: tuple[tuple[Role, ...], ...] = (("prefill",), ("decode", "mixed"))
        for roles in order:
            for child in self._fleet.alive(*roles):
                child.drain()
            while self._fleet.alive(*roles) and signals.count < 2:
                self._refresh(live, router, rates)
                await self._look(signals, 2)
        drained = [child.exited.result() == 0 for child in self._fleet.children if child.exited.done()]
        return not all(drained) or bool(self._fleet.alive())

    async def _look(self, signals: Signals, count: int, *others: asyncio.Future[Any]) -> None:
        """Wait for a signal, a child's end or `others`; at most until the next refresh or restart."""
        alive = [child.exited for child in self._fleet.alive()]
        left_s = min(self._waiting(), default=float("inf")) - asyncio.get_running_loop().time()
        await signals.wait(*alive, *others, count=count, timeout_s=min(_REFRESH_S, max(left_s, _SHORT_S)))

    def _waiting(self) -> list[float]:
        """When children that ended are due to be started again."""
        return [one.due for one in self._restarts.values() if one.due is not None]

    def _stop_restarts(self) -> None:
        """Start no child again; each that was due counts as failed."""
        for one in self._restarts.values():
            self._failed = self._failed or one.due is not None
            one.due = None

    def _start_again(self) -> None:
        now = asyncio.get_running_loop().time()
        for child in list(self._fleet.children):
            if self._restarts[child.name].take(now):
                try:
                    self._fleet.start_again(child)
                except ConfigError as error:
                    self._say(f"[red]{error}[/]; {self._next(child, None)}")

    async def _close(self, signals: Signals) -> None:
        """End all children; the third signal kills them."""
        if signals.count >= 2 and self._fleet.alive():
            self._say("ending all at once; another signal kills")
        count = max(signals.count + 1, 3)
        closing = asyncio.ensure_future(self._fleet.aclose())
        while not closing.done() and signals.count < count:
            await signals.wait(closing, count=count, timeout_s=_CONNECT_S)
        if not closing.done():
            for child in self._fleet.alive():
                child.kill()
        await asyncio.wait([closing])
        closing.result()  # of a task that is done

    # -- what is said -----------------------------------------------------------------------------

    def _tell_of_stores(self, stats: RouterStats) -> None:
        """Say which instance serves without its store, or uses it again."""
        for one in stats.instances:
            problem = "" if one.status is None else one.status.stats.store_problem
            if one.name in self._store_problems and bool(problem) != bool(self._store_problems[one.name]):
                self._store_problems[one.name] = problem
                told = (
                    f"without its store for now, it is tried again: {problem}" if problem else "its store is used again"
                )
                self._print(f"fdasync up: {one.name}: {told}")

    def _tell_of_taps(self, stats: RouterStats) -> None:
        """Say which instance has taps that failed, and which has taps that begin to lose events."""
        for one in stats.instances:
            if one.name not in self._tap_states or one.status is None:
                continue
            told = one.status.stats
            state = (told.tap_problem, told.dropped_events > 0)
            known, self._tap_states[one.name] = self._tap_states[one.name], state
            if state[0] and state[0] != known[0]:
                self._print(f"fdasync up: {one.name}: goes on without taps that failed: {state[0]}")
            if state[1] and not known[1]:
                self._print(f"fdasync up: {one.name}: its taps have lost {told.dropped_events} events so far")

    def _on_end(self, child: Child) -> None:
        """A child ended by itself: it is started again, and the others go on."""
        if not self._running:
            return
        status = child.exited.result()  # a process that was reaped
        what = f"[red]{child.name} ({child.role}) {in_words(status)}[/]"
        if self._draining or not status or self._gives_up:
            # it was asked to end, or no child is started again
            self._failed = True
            self._say(f"{what}; the others go on")
        else:
            self._say(f"{what}; {self._next(child, child.ready_at)}")
        self._show(tuple(child.lines))

    def _next(self, child: Child, ready_at: float | None) -> str:
        """Plan the restart of a child that ended; returns that in words."""
        restarts = self._restarts[child.name]
        wait_s = restarts.ended(asyncio.get_running_loop().time(), ready_at)
        if wait_s is not None:
            return f"it is started again in {wait_s:g} s"
        self._failed = True
        return f"it was started again {restarts.count} times, and is given up; the others go on"

    def _say(self, text: str) -> None:
        self._print(f"fdasync up: {text}", markup=True)

    def _show(self, lines: tuple[str, ...]) -> None:
        for line in lines[-_SHOWN_LINES:]:
            self._print(f"    {line}")

    def _print(self, text: str, *, markup: bool = False) -> None:
        if not self._out.lost:
            self._console.print(text, markup=markup, highlight=False, soft_wrap=True)
        if self._out.lost:
            self._out.complain(text, markup=markup)

    def _refresh(self, live: Live, router: Router, rates: Rates) -> None:
        stats = router.stats()
        rates.take(stats)
        self._tell_of_stores(stats)
        self._tell_of_taps(stats)
        now = asyncio.get_running_loop().time()
        live.update(fleet_table(self._fleet.children, stats, rates, self._restarts, now))
        if self._console.is_terminal:
            live.refresh()
