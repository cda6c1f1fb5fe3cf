"""The child's side of `worker/proxy.py`: hosts a runner for one engine, which is at the other end of a socket.

Steps and copies go to the runner as they come; what takes its time (loading, binding, new weights) is done one
after the other. Knows no model. Started by `WorkerRunner`; `main` is the whole program.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.aux_arena import AuxArena
from fdasync.cache.host_arena import HostArena
from fdasync.errors import InvariantBroken, RunnerError
from fdasync.events.actions import RunStep, SwapIn, SwapOut
from fdasync.ipc.channel import Channel
from fdasync.ipc.child import die_with_parent, settle
from fdasync.registry.registry import Registry
from fdasync.runner.worker.messages import (
    Answer,
    BeginTensors,
    Bind,
    Close,
    CopyError,
    Hello,
    Loaded,
    LoadFolder,
    Open,
    Ready,
    Request,
    StepError,
    ToEngine,
    ToWorker,
    WriteChunk,
    pack_error,
)
from fdasync.runner.worker.weight_transfer import TensorReceiver

if TYPE_CHECKING:
    from fdasync.runner.base import CopyOutput, Runner, StepOutput

_ENCODE = msgspec.msgpack.encode


class _Host:
    """Performs the engine's messages one after the other on the child's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._inbox: asyncio.Queue[tuple[ToWorker, list[int]]] = asyncio.Queue()
        self._busy = False
        self._channel = Channel(loop, sock, self._on_frame, self._end)
        self._error: BaseException | None = None
        self._runner: Runner | None = None
        self._arena: AuxArena | None = None
        self._host: HostArena | None = None
        self._receiver: TensorReceiver | None = None

    def _on_frame(self, payload: bytes, fds: list[int]) -> None:
        message = self._decoder.decode(payload)
        if isinstance(message, Close):
            self._end()
        elif isinstance(message, (RunStep, SwapOut, SwapIn)) and not self._busy and self._inbox.empty():
            # the hot path: no task switch between the socket and the runner
            self._start(message)
        else:
            self._inbox.put_nowait((message, fds))

    def _end(self, error: BaseException | None = None) -> None:
        self._error = error
        if not self.ended.done():
            self.ended.set_result(None)

    def _send(self, message: ToEngine) -> None:
        self._channel.send(_ENCODE(message))

    def _start(self, message: RunStep | SwapOut | SwapIn) -> None:
        """Begin a step or a copy. What a runner must not raise here is the engine's to know all the same."""
        assert self._runner is not None
        if isinstance(message, RunStep):
            try:
                step = self._runner.launch(message)
            except Exception as error:
                self._send(StepError(message.step_id, f"launch raised {type(error).__name__}: {error}"))
                return
            step.add_done_callback(lambda done: self._stepped(message.step_id, done))
        else:
            try:
                copy = self._runner.copy(message)
            except Exception as error:
                self._send(CopyError(message.copy_id, f"copy raised {type(error).__name__}: {error}"))
                return
            copy.add_done_callback(lambda done: self._copied(message.copy_id, done))

    def _stepped(self, step_id: int, done: asyncio.Future[StepOutput]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._send(done.result())  # of a future that is done
        else:
            self._send(StepError(step_id, _problem(error)))

    def _copied(self, copy_id: int, done: asyncio.Future[CopyOutput]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        self._send(CopyError(copy_id, _problem(error)) if error is not None else done.result())  # of one that is done

    async def serve(self) -> None:
        """Until the engine closes or dies.

        Raises what broke the channel: it goes to stderr and into the exit status, which the engine tells.
        """
        work = asyncio.ensure_future(self._work())
        await asyncio.wait([work, self.ended], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            # it never ends by itself: the engine learns of what broke it by the end of this process
            self._end(work.exception())  # of a task that is done
        work.cancel()
        await asyncio.wait([work])
        if self._runner is not None:
            await self._runner.aclose()
        for memory in (self._arena, self._host, self._receiver):
            if memory is not None:
                memory.close()
        if self._error is not None and not isinstance(self._error, OSError):
            # the channel ends with the process: an engine that saw it end before would kill us in mid-sentence
            raise self._error
        self._channel.close()

    async def _work(self) -> None:
        """Everything that takes its time, one after the other; steps that came behind it keep their place."""
        while True:
            message, fds = await self._inbox.get()
            if isinstance(message, (RunStep, SwapOut, SwapIn)):
                self._start(message)
            elif not isinstance(message, Close):
                self._busy = True
                try:
                    answer = await self._perform(message, fds)
                except Exception as error:
                    answer = pack_error(error)
                self._busy = False
                self._send(answer)

    async def _perform(self, message: Request, fds: list[int]) -> Answer:
        if isinstance(message, Open):
            self._runner = Registry().make_runner(message.runner, message.config, message.limits)
            return Hello(await self._runner.open())
        runner = self._runner
        if runner is None:
            raise InvariantBroken(f"{type(message).__name__} before a runner was opened")
        if isinstance(message, Bind):
            if message.specs:
                self._arena = AuxArena.attach(fds.pop(0), message.num_slots, message.block_tokens, message.specs)
            if message.num_host_blocks:
                self._host = HostArena.attach(fds.pop(0), message.num_host_blocks, message.block_nbytes)
            await runner.bind(message.num_blocks, self._arena, self._host)
            settle()
        elif isinstance(message, LoadFolder):
            return Loaded(await runner.load_folder(message.path))
        elif isinstance(message, BeginTensors):
            self._forget_tensors()
            receiver = TensorReceiver(runner, fds, message.chunk_nbytes)
            try:
                await runner.begin_tensors(message.tensors)
            except BaseException:
                receiver.close()
                raise
            self._receiver = receiver
        elif self._receiver is None:
            raise InvariantBroken(f"{type(message).__name__} without BeginTensors")
        elif isinstance(message, WriteChunk):
            await self._receiver.write(message)
        else:
            self._forget_tensors()
            await runner.end_tensors()
        return Ready()

    def _forget_tensors(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def _problem(error: BaseException) -> str:
    return error.problem if isinstance(error, RunnerError) else f"{type(error).__name__}: {error}"


def main() -> None:
    """The child: its end of the channel is the fd in argv[1]; serve one engine, then exit."""
    die_with_parent()
    sock = socket.socket(fileno=int(sys.argv[1]))
    import uvloop

    async def run() -> None:
        await _Host(asyncio.get_running_loop(), sock).serve()

    uvloop.run(run())
