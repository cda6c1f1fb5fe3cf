"""A runner in a process of its own: the engine's side, a proxy. `worker/main.py` is the other.

Whatever a runner does (import torch, load for minutes, block in a forward pass, crash), the engine's
loop goes on. Memory is shared by fd, nothing is copied but the messages of `worker/messages.py` and new weights
(`weight_transfer.py`). The death of the worker fails everything in flight; a worker that is stuck is killed and reaped.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from fdasync.errors import ConfigError, FdasyncError, InvariantBroken, ProtocolError, RunnerError, WorkerStuck
from fdasync.ipc.child import ChildProcess
from fdasync.runner.base import Capacity, CopyOutput, Runner, RunnerLimits, StepOutput, TensorMeta
from fdasync.runner.worker.messages import (
    Answer,
    Bind,
    Close,
    CopyError,
    EndTensors,
    Failed,
    Hello,
    Loaded,
    LoadFolder,
    Open,
    Request,
    StepError,
    ToEngine,
    unpack_error,
)
from fdasync.runner.worker.weight_transfer import CHUNK_NBYTES, TensorSender

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.cache.aux import AuxSpec
    from fdasync.cache.aux_arena import AuxArena
    from fdasync.cache.host_arena import HostArena
    from fdasync.events.actions import RunStep, SwapIn, SwapOut

_CHILD = "fdasync.runner.worker.main"
_ENCODE = msgspec.msgpack.encode


class WorkerRunner(Runner):
    """Proxy of a runner in a child process.

    Args:
        name: entry-point name of the runner to host; it is imported in the child only.
        config: its raw configuration.
        close_deadline_s: how long an idle worker may take to end before it is killed.
        chunk_nbytes: bound on each of the two chunks that tensors cross in.
    """

    config_type: ClassVar[type[msgspec.Struct]] = msgspec.Struct

    def __init__(
        self,
        name: str,
        config: dict[str, Any],
        limits: RunnerLimits,
        *,
        close_deadline_s: float,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> None:
        super().__init__(config, limits)
        self._name = name
        self._close_deadline_s = close_deadline_s
        self._chunk_nbytes = chunk_nbytes
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._child: ChildProcess | None = None
        self._asked: deque[asyncio.Future[Answer]] = deque()
        self._steps: deque[tuple[int, asyncio.Future[StepOutput]]] = deque()
        self._copies: dict[int, asyncio.Future[CopyOutput]] = {}
        self._sender: TensorSender | None = None
        self._announced: asyncio.Future[Answer]
        self._dead: Exception | None = None

    @property
    def pid(self) -> int:
        """Of the worker; -1 before `open`."""
        return -1 if self._child is None else self._child.pid

    async def open(self) -> Capacity:
        self._loop = asyncio.get_running_loop()
        self._child = ChildProcess(self._loop, f"{self._name} worker", _CHILD, self._on_frame, self._on_death)
        hello = await self._ask(Open(self._name, self.config, self.limits))
        if not isinstance(hello, Hello):
            raise ProtocolError(f"the worker answered {type(hello).__name__} before it said hello")
        return hello.capacity

    async def bind(self, num_blocks: int, arena: AuxArena | None, host: HostArena | None = None) -> None:
        fds = []
        num_slots, block_tokens = 0, 0
        specs: tuple[AuxSpec, ...] = ()
        if arena is not None:
            num_slots, block_tokens, specs = arena.num_slots, arena.block_tokens, arena.specs
            fds.append(arena.region.fd)
        num_host_blocks, block_nbytes = 0, 0
        if host is not None:
            num_host_blocks, block_nbytes = host.num_blocks, host.block_nbytes
            fds.append(host.region.fd)
        await self._ask(Bind(num_blocks, num_slots, block_tokens, specs, num_host_blocks, block_nbytes), fds)

    def launch(self, step: RunStep) -> asyncio.Future[StepOutput]:
        done: asyncio.Future[StepOutput] = self._loop.create_future()
        if self._dead is not None or self._child is None:
            done.set_exception(self._dead or RunnerError("the worker is closed", step.step_id))
            return done
        self._child.send(self._encoder.encode(step))
        self._steps.append((step.step_id, done))
        return done

    def copy(self, copy: SwapOut | SwapIn) -> asyncio.Future[CopyOutput]:
        done: asyncio.Future[CopyOutput] = self._loop.create_future()
        if self._dead is not None or self._child is None:
            done.set_exception(self._dead or RunnerError("the worker is closed"))
        elif copy.copy_id in self._copies:
            done.set_exception(InvariantBroken(f"copy {copy.copy_id} is in flight already"))
        else:
            self._child.send(self._encoder.encode(copy))
            self._copies[copy.copy_id] = done
        return done

    async def load_folder(self, path: str) -> str:
        """See `Runner`. The engine's deadline for updates bounds the wait here and in the three that follow."""
        loaded = await self._ask(LoadFolder(path))
        if not isinstance(loaded, Loaded):
            raise ProtocolError(f"the worker answered {type(loaded).__name__} when weights were to be loaded")
        return loaded.weights_id

    async def begin_tensors(self, tensors: Sequence[TensorMeta]) -> None:
        self._end_transfer()
        sender = TensorSender(tensors, self._send, self._chunk_nbytes)
        try:
            answer = self._send(sender.request, sender.fds)
        except FdasyncError:
            sender.close()
            raise
        self._sender, self._announced = sender, answer
        try:
            await asyncio.shield(answer)
        except FdasyncError:
            self._end_transfer()
            raise

    async def write_tensor(self, number: int, offset_nbytes: int, data: memoryview) -> None:
        if self._sender is None:
            raise InvariantBroken("write_tensor without begin_tensors")
        try:
            await self._sender.write(number, offset_nbytes, data)
        except FdasyncError:
            self._end_transfer()
            raise

    async def end_tensors(self) -> None:
        if self._sender is None:
            raise InvariantBroken("end_tensors without begin_tensors")
        try:
            await self._sender.end()
            await self._ask(EndTensors())
        finally:
            self._end_transfer()

    def overdue(self, what: str, deadline_s: float) -> FdasyncError:
        return WorkerStuck(f"{self._name} worker", self.pid, what, deadline_s)

    async def aclose(self) -> None:
        if self._child is None:
            return
        if self._steps or self._copies or self._asked or self._sender is not None:
            # it is in the middle of something that nobody waits for any more
            await self._child.kill()
        else:
            await self._child.close(_ENCODE(Close()), self._close_deadline_s)
        self.on_failure = None
        self._on_death(RunnerError("the worker is closed"))
        self._end_transfer()
        self._child = None

    # -- from the child ---------------------------------------------------------------------------

    async def _ask(self, message: Request, fds: Sequence[int] = ()) -> Answer:
        """Send and wait for the answer. The engine's deadlines bound the wait; the answer comes even if it is over."""
        return await asyncio.shield(self._send(message, fds))

    def _send(self, message: Request, fds: Sequence[int] = ()) -> asyncio.Future[Answer]:
        """Send; the future ends with the answer, or with the error that it is. Answers come in the order asked.

        Nobody may cancel it: the worker is busy until it answers, and `aclose` must know. Raises ConfigError for what
        cannot be sent.
        """
        if self._dead is not None:
            raise self._dead
        if self._child is None:
            raise RunnerError("the worker is closed")
        try:
            payload = _ENCODE(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError("runner_config", f"cannot be sent to a worker: {error}") from None
        answer: asyncio.Future[Answer] = self._loop.create_future()
        # an answer that nobody comes to read is told by the next one, or by the death that caused it
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._asked.append(answer)
        self._child.send(payload, fds)
        return answer

    def _end_transfer(self) -> None:
        if self._sender is None:
            return
        # its fds ride on a frame that may not have left yet: the answer is the proof that it has
        close = self._sender.close
        self._sender = None
        if self._announced.done():
            close()
        else:
            self._announced.add_done_callback(lambda _: close())

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
        elif isinstance(message, (CopyOutput, CopyError)):
            copied = self._copies.pop(message.copy_id, None)
            if copied is None:
                raise ProtocolError(f"the worker answered copy {message.copy_id}, which is not in flight")
            if copied.done():
                return
            if isinstance(message, CopyOutput):
                copied.set_result(message)
            else:
                copied.set_exception(RunnerError(message.problem))
        elif not self._asked:
            raise ProtocolError(f"the worker sent {type(message).__name__}, and nobody asked")
        else:
            answer = self._asked.popleft()
            if isinstance(message, Failed):
                answer.set_exception(unpack_error(message))
            else:
                answer.set_result(message)

    def _on_death(self, error: Exception) -> None:
        if self._dead is None:
            self._dead = error
        waiting: list[asyncio.Future[Any]] = [*self._asked, *[done for _, done in self._steps], *self._copies.values()]
        self._asked.clear()
        self._steps.clear()
        self._copies.clear()
        for done in waiting:
            if not done.done():
                done.set_exception(error)
        if self.on_failure is not None:
            self.on_failure(error)
