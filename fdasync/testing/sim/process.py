"""Processes in one loop of virtual time: each can stand still (SIGSTOP), go on, or die, at any moment.

The tasks, timers and callbacks that a process starts carry it in their context, and `SimLoop` asks here before it runs
one of them. So the code under test needs no change: a process that stands still runs no line, and its timers fire late
when it goes on.

Knows no instances, and nothing that connects processes. Called by `SimLoop` and by simulations of several processes.
"""

from __future__ import annotations

import asyncio
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

_OURS: ContextVar[SimProcess | None] = ContextVar("fdasync_sim_process", default=None)


def process_of(context: Context) -> SimProcess | None:
    """The process whose code runs in this context; None: code of no simulated process."""
    return context.get(_OURS)


class SimProcess:
    """See the module. Compared by identity.

    Attributes:
        name: for people.
        stopped: it stands still, or is dead.
        held: callbacks that it will run when it goes on, in order.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped = False
        self.held: list[Callable[[], None]] = []
        self._context = copy_context()
        self._context.run(_OURS.set, self)

    def __repr__(self) -> str:
        return f"<SimProcess {self.name}>"

    def stop(self) -> None:
        """Stand still: run no further callback."""
        self.stopped = True

    def go_on(self) -> None:
        """Run the callbacks that became due meanwhile, in order."""
        self.stopped = False
        held, self.held = self.held, []
        for each in held:
            asyncio.get_running_loop().call_soon(each, context=Context())

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task of this process."""
        return asyncio.get_running_loop().create_task(work, name=f"{self.name}: {name}", context=self._context.copy())

    def call(self, callback: Callable[..., object], *args: Any) -> None:
        """Call this soon, as the process."""
        asyncio.get_running_loop().call_soon(callback, *args, context=self._context.copy())


class Guarded:
    """A callback of a process, as the loop holds it."""

    __slots__ = ("_args", "_callback", "_context", "_process", "handle")

    def __init__(
        self, process: SimProcess, callback: Callable[..., object], args: tuple[Any, ...], context: Context
    ) -> None:
        self._process = process
        self._callback = callback
        self._args = args
        self._context = context
        self.handle: asyncio.Handle

    def __call__(self) -> None:
        if self._process.stopped:
            self._process.held.append(self._late)
        else:
            self._callback(*self._args)

    def _late(self) -> None:
        if self.handle.cancelled():
            return
        if self._process.stopped:
            # the process was stopped again before this callback had its turn
            self._process.held.append(self._late)
        else:
            self._context.run(self._callback, *self._args)
