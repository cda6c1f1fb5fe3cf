"""A runner in a process of its own: `WorkerRunner` on the engine's side, `main` on the other.

Whatever a runner does (import torch, load for minutes, block in a forward pass, crash), the engine's
loop goes on. Memory is shared by fd, nothing is copied but the messages of `wire.py`. The death of the
worker fails every step in flight; a worker that is stuck is killed and reaped.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from fdasync.cache.arena import AuxArena
from fdasync.channel import Channel
from fdasync.errors import ConfigError, FdasyncError, ProtocolError, RunnerError, WorkerStuck
from fdasync.process import ChildProcess, die_with_parent
from fdasync.registry import Registry
from fdasync.runner.base import Capacity, Runner, RunnerLimits, StepOutput
from fdasync.runner.wire import (
    Bind,
    Close,
    Failed,
    Hello,
    Open,
    Ready,
    StepError,
    ToEngine,
    ToWorker,
    pack_error,
    unpack_error,
)

if TYPE_CHECKING:
    from fdasync.actions import RunStep

_ENCODE = msgspec.msgpack.encode


class WorkerRunner(Runner):
    """Proxy of a runner in a child process.

    Args:
        name: entry-point name of the runner to host; it is imported in the child only.
        config: its raw configuration.
        close_deadline_s: how long an idle worker may take to end before it is killed.
    """

    config_type: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(self, name: str, config: dict[str, Any], limits: RunnerLimits, *, close_deadline_s: float) -> None:
        super().__init__(config, limits)
        self._name = name
        self._close_deadline_s = close_deadline_s
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._child: ChildProcess | None = None
        self._reply: asyncio.Future[Capacity | None] | None = None
        self._steps: deque[tuple[int, asyncio.Future[StepOutput]]] = deque()
        self._dead: Exception | None = None

    @property
    def pid(self) -> int:
        """Of the worker; -1 before `open`."""
        return -1 if self._child is None else self._child.pid

    async def open(self) -> Capacity:
        self._loop = asyncio.get_running_loop()
        self._child = ChildProcess(self._loop, f"{self._name} worker", __name__, self._on_frame, self._on_death)
        capacity = await self._ask(Open(self._name, self.config, self.limits))
        if capacity is None:
            raise ProtocolError("the worker is ready before it said hello")
        return capacity

    async def bind(self, num_blocks: int, arena: AuxArena | None) -> None:
        if arena is None:
            await self._ask(Bind(num_blocks, 0, 0, ()))
        else:
            await self._ask(Bind(num_blocks, arena.num_slots, arena.block_tokens, arena.specs), [arena.fd])

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        done: asyncio.Future[StepOutput] = self._loop.create_future()
        if self._dead is not None or self._child is None:
            done.set_exception(self._dead or RunnerError("the worker is closed", step.step_id))
            return done
        self._child.send(self._encoder.encode(step))
        self._steps.append((step.step_id, done))
        return done

    def overdue(self, what: str, deadline_s: float) -> FdasyncError:
        return WorkerStuck(f"{self._name} worker", self.pid, what, deadline_s)

    async def aclose(self) -> None:
        if self._child is None:
            return
        if self._steps or self._reply is not None:
            # it is in the middle of something that nobody waits for any more
            await self._child.kill()
        else:
            await self._child.close(_ENCODE(Close()), self._close_deadline_s)
        self.on_failure = None
        self._on_death(RunnerError("the worker is closed"))
        self._child = None

    # -- from the child ---------------------------------------------------------------------------

    async def _ask(self, message: Open | Bind, fds: list[int] | None = None) -> Capacity | None:
        """Send and wait for the answer. The engine's start deadline bounds the wait."""
        if self._dead is not None:
            raise self._dead
        assert self._child is not None
        try:
            payload = _ENCODE(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError("runner_config", f"cannot be sent to a worker: {error}") from None
        self._reply = self._loop.create_future()
        self._child.send(payload, fds or [])
        answer = await self._reply
        # only now: a wait that was cancelled leaves the worker busy, and `aclose` must know
        self._reply = None
        return answer

    def _on_frame(self, payload: bytes, fds: list[int]) -> None:
        """Raises ProtocolError for what is not allowed: the channel ends then, and the worker is killed."""
        for fd in fds:
            os.close(fd)
        try:
            message = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"the worker sent what cannot be decoded: {error}") from None
        if isinstance(message, (StepOutput, StepError)):
            if not self._steps or self._steps[0][0] != message.step_id:
                raise ProtocolError(f"the worker answered step {message.step_id} out of order")
            _, done = self._steps.popleft()
            if done.done():
                return
            if isinstance(message, StepOutput):
                done.set_result(message)
            else:
                done.set_exception(RunnerError(message.problem, message.step_id))
        elif self._reply is None or self._reply.done():
            raise ProtocolError(f"the worker sent {type(message).__name__}, and nobody asked")
        elif isinstance(message, Failed):
            self._reply.set_exception(unpack_error(message))
        else:
            self._reply.set_result(message.capacity if isinstance(message, Hello) else None)

    def _on_death(self, error: Exception) -> None:
        if self._dead is None:
            self._dead = error
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)
            self._reply = None
        while self._steps:
            _, done = self._steps.popleft()
            if not done.done():
                done.set_exception(error)
        if self.on_failure is not None:
            self.on_failure(error)


# -- the child's side -------------------------------------------------------------------------------


class _Host:
    """Performs the engine's messages one after the other on the child's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._inbox: asyncio.Queue[tuple[ToWorker, list[int]]] = asyncio.Queue()
        self._channel = Channel(loop, sock, self._on_frame, self._end)
        self._error: Exception | None = None
        self._runner: Runner | None = None
        self._arena: AuxArena | None = None

    def _on_frame(self, payload: bytes, fds: list[int]) -> None:
        message = self._decoder.decode(payload)
        if isinstance(message, Close):
            self._end()
        elif type(message) is not Open and type(message) is not Bind and self._inbox.empty():
            # the hot path: no task switch between the socket and the runner
            self._launch(message)
        else:
            self._inbox.put_nowait((message, fds))

    def _end(self, error: Exception | None = None) -> None:
        self._error = error
        if not self.ended.done():
            self.ended.set_result(None)

    def _send(self, message: Hello | Ready | Failed | StepOutput | StepError) -> None:
        self._channel.send(_ENCODE(message))

    def _launch(self, step: Any) -> None:
        assert self._runner is not None
        try:
            done = self._runner.launch(step)
        except Exception as error:
            # a runner's launch must not raise; what it raised is the engine's to know all the same
            self._send(StepError(step.step_id, f"launch raised {type(error).__name__}: {error}"))
            return
        done.add_done_callback(lambda done: self._stepped(step.step_id, done))

    def _stepped(self, step_id: int, done: asyncio.Future[StepOutput]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._send(done.result())  # of a future that is done
        else:
            problem = error.problem if isinstance(error, RunnerError) else f"{type(error).__name__}: {error}"
            self._send(StepError(step_id, problem))

    async def serve(self) -> None:
        """Until the engine closes or dies.

        Raises what broke the channel: it goes to stderr and into the exit status, which the engine tells.
        """
        setup = asyncio.ensure_future(self._set_up())
        await asyncio.wait([setup, self.ended], return_when=asyncio.FIRST_COMPLETED)
        if not setup.done():
            setup.cancel()
        await asyncio.wait([self.ended])
        if self._runner is not None:
            await self._runner.aclose()
        if self._arena is not None:
            self._arena.close()
        self._channel.close()
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error

    async def _set_up(self) -> None:
        try:
            message, _ = await self._inbox.get()
            assert isinstance(message, Open)
            self._runner = Registry().make_runner(message.runner, message.config, message.limits)
            self._send(Hello(await self._runner.open()))
            bind, fds = await self._inbox.get()
            assert isinstance(bind, Bind)
            if bind.specs:
                self._arena = AuxArena(fds[0], bind.num_slots, bind.block_tokens, bind.specs)
            await self._runner.bind(bind.num_blocks, self._arena)
            self._send(Ready())
        except Exception as error:
            self._send(pack_error(error))


def main() -> None:
    """The child: its end of the channel is the fd in argv[1]; serve one engine, then exit."""
    die_with_parent()
    sock = socket.socket(fileno=int(sys.argv[1]))
    import uvloop

    async def run() -> None:
        await _Host(asyncio.get_running_loop(), sock).serve()

    uvloop.run(run())
