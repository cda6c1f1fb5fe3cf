"""Tokenising long texts in a child process, so that the loop never waits for it.

`TokenizerProcess` starts its child at the first use and again after a death; `main` is the child.
Called by `prepare.py`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from array import array
from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import DeadlineExceeded, EngineClosed, ProtocolError, TokenizerFailed, WorkerStuck
from fdasync.ipc.channel import Channel
from fdasync.ipc.child import ChildProcess, die_with_parent
from fdasync.ipc.deadlines import Within
from fdasync.registry.registry import Registry

if TYPE_CHECKING:
    from fdasync.engine.tokenizer import Tokenizer


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Use this tokenizer for the texts that follow."""

    name: str
    model: str


class Encode(msgspec.Struct, frozen=True, array_like=True, tag="encode"):
    """Tokenise."""

    number: int
    text: str


class Encoded(msgspec.Struct, frozen=True, array_like=True, tag="encoded"):
    """Token ids, int32 little-endian; or in words why there are none."""

    number: int
    tokens: bytes
    problem: str = ""


def token_ids(tokenizer: Tokenizer, text: str) -> array[int]:
    """int32 ids. Raises TokenizerFailed for whatever goes wrong, naming the tokenizer's class."""
    try:
        encoded = tokenizer.encode(text)
    except Exception as error:
        raise TokenizerFailed(type(tokenizer).__name__, f"encode raised {type(error).__name__}: {error}") from error
    try:
        return array("i", encoded)
    except (TypeError, ValueError, OverflowError) as error:
        problem = f"encode gave no token ids but {type(encoded).__name__}: {error}"
        raise TokenizerFailed(type(tokenizer).__name__, problem) from None


class TokenizerProcess:
    """One child for one tokenizer.

    Args:
        name: entry-point name in `fdasync.tokenizers`.
        model: folder given to its factory.
    """

    def __init__(self, name: str, model: str) -> None:
        self._name = name
        self._model = model
        self._child: ChildProcess | None = None
        self._waiting: dict[int, asyncio.Future[list[int]]] = {}
        self._number = 0
        self._closed = False
        self._decoder = msgspec.msgpack.Decoder(Encoded)

    async def encode(self, text: str, deadline_s: float) -> list[int]:
        """Token ids. Cancelling stops the waiting; the child finishes and its answer is dropped.

        Raises DeadlineExceeded (the child is killed then: it works text by text), WorkerDied, WorkerStuck
        if another text was stuck, EngineClosed, or TokenizerFailed.
        """
        loop = asyncio.get_running_loop()
        if self._closed:
            raise EngineClosed("closed")
        if self._child is None:
            self._child = ChildProcess(loop, "tokenizer", __name__, self._on_frame, self._on_death)
            self._child.send(msgspec.msgpack.encode(Load(self._name, self._model)))
        child = self._child
        number = self._number = self._number + 1
        answer: asyncio.Future[list[int]] = loop.create_future()
        self._waiting[number] = answer
        try:
            child.send(msgspec.msgpack.encode(Encode(number, text)))
            async with Within(deadline_s):
                return await answer
        except TimeoutError:
            # what is stuck would hold up every later text; somebody whose time ended as well may have replaced it
            if self._child is child:
                await self._replace(WorkerStuck("tokenizer", child.pid, "a text", deadline_s))
            raise DeadlineExceeded("tokenising", deadline_s) from None
        finally:
            self._waiting.pop(number, None)

    async def _replace(self, error: Exception) -> None:
        """Kill the child; the next text starts another. Who else waits is told to try again."""
        child, self._child = self._child, None
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
        if child is not None:
            await child.kill()

    async def aclose(self) -> None:
        """Kill the child (it holds nothing) and fail who still waits; idempotent."""
        self._closed = True
        await self._replace(EngineClosed("closed"))

    def _on_frame(self, payload: bytes, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        try:
            message = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"the tokenizer process sent what cannot be decoded: {error}") from None
        answer = self._waiting.get(message.number)
        if answer is None or answer.done():
            return
        if message.problem:
            answer.set_exception(TokenizerFailed(self._name, message.problem))
        else:
            answer.set_result(array("i", message.tokens).tolist())

    def _on_death(self, error: Exception) -> None:
        self._child = None
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)


def main() -> None:
    """The child: its end of the channel is the fd in argv[1]; serve until the other end closes."""
    die_with_parent()
    sock = socket.socket(fileno=int(sys.argv[1]))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        decoder: msgspec.msgpack.Decoder[Load | Encode] = msgspec.msgpack.Decoder(Load | Encode)
        tokenizer = None
        broken = ""

        def on_frame(payload: bytes, _fds: list[int]) -> None:
            nonlocal tokenizer, broken
            message = decoder.decode(payload)
            if isinstance(message, Load):
                try:
                    tokenizer = Registry().load_tokenizer(message.name)(message.model)
                except Exception as error:
                    broken = f"it cannot be loaded for {message.model}: {type(error).__name__}: {error}"
                return
            reply = Encoded(message.number, b"", broken)
            if tokenizer is not None:
                try:
                    reply = Encoded(message.number, token_ids(tokenizer, message.text).tobytes())
                except TokenizerFailed as error:
                    reply = Encoded(message.number, b"", error.problem)
            channel.send(msgspec.msgpack.encode(reply))

        def on_end(error: Exception | None) -> None:
            # an error goes to stderr and into the exit status, which the engine tells
            if error is None:
                ended.set_result(None)
            else:
                ended.set_exception(error)

        channel = Channel(loop, sock, on_frame, on_end)
        await ended

    asyncio.run(run())
