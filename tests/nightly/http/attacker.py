"""Attacks a front over raw sockets, in a process of its own and at a bounded rate.

    python -m tests.nightly.http.attacker NAME PORT

Prints "ready" when the attack is under way, goes on until its standard input ends, and prints one JSON object: answers
by status, the slowest answer, connections held. It runs at the lowest priority, so that the cores that it shares are no
part of what it costs. Run by `attack.py` and by tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

HOST = "127.0.0.1"
IDLE = 10_000
LARGE_NBYTES = 200 << 20
_PIECE = b" " * (1 << 20)
_ANSWER_S = 60.0
_POST = b"POST /generate HTTP/1.1\r\nhost: x\r\n"


class Attack:
    """What came back.

    Attributes:
        port: of the front.
        statuses: answers by status; "closed": the server closed without one.
        slowest_s: longest wait for an answer, from the last byte that was sent.
        held: connections that are open.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.statuses: Counter[str] = Counter()
        self.slowest_s = 0.0
        self.held = 0

    async def once(self, *pieces: bytes, close: bool = True) -> None:
        """One connection: send, and wait for an answer."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    if reader.at_eof():
                        break
            begin = time.monotonic()
            line = b""
            with contextlib.suppress(ConnectionError):
                # `wait_for` loses a cancellation that comes with the answer
                async with asyncio.timeout(_ANSWER_S):
                    line = await reader.readline()
            self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
            self.statuses[line[9:12].decode() or "closed"] += 1
        finally:
            if close:
                writer.transport.abort()

    async def hold(self, head: bytes, drip: bytes, every_s: float) -> None:
        """A connection that is never done; opened again when the server ends it."""
        while True:
            try:
                reader, writer = await asyncio.open_connection(HOST, self.port)
            except OSError:
                self.statuses["not connected"] += 1
                await asyncio.sleep(1.0)
                continue
            self.held += 1
            try:
                writer.write(head)
                answer = asyncio.ensure_future(reader.readline())
                while not answer.done():
                    await asyncio.wait([answer], timeout=every_s)
                    if drip:
                        writer.write(drip)
                line = b"" if answer.exception() else answer.result()  # of a task that is done
                self.statuses[line[9:12].decode() or "closed"] += 1
            finally:
                self.held -= 1
                writer.transport.abort()

    async def hold_many(self, count: int, head: bytes, drip: bytes, every_s: float) -> None:
        """So many of them, opened a few at a time."""
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(self.hold(head, drip, every_s))
                if number % 100 == 99:
                    await asyncio.sleep(0.02)

    async def again(self, every_s: float, *pieces: bytes) -> None:
        """The same request again and again."""
        while True:
            await self.once(*pieces)
            await asyncio.sleep(every_s)


def _body(data: bytes) -> bytes:
    return _POST + b"content-length: %d\r\n\r\n" % len(data) + data


def _chunked(nbytes: int) -> list[bytes]:
    piece = b"%x\r\n" % len(_PIECE) + _PIECE + b"\r\n"
    return [_POST + b"transfer-encoding: chunked\r\n\r\n", *[piece] * (nbytes // len(_PIECE)), b"0\r\n\r\n"]


def _told(nbytes: int) -> list[bytes]:
    return [_POST + b"content-length: %d\r\n\r\n" % nbytes, *[_PIECE] * (nbytes // len(_PIECE))]


def _headers(count: int, nbytes: int) -> bytes:
    lines = b"".join([b"x-%d: %s\r\n" % (number, b"y" * nbytes) for number in range(count)])
    return b"GET /ping HTTP/1.1\r\nhost: x\r\n" + lines + b"\r\n"


_DEEP = _body(b'{"input_ids": ' + b"[" * 10_000 + b"]" * 10_000 + b"}")
_WIDE = _body(b'{"sampling_params": [' + b"[]," * 900_000 + b"[]]}")

ATTACKS: dict[str, Callable[[Attack], Awaitable[Any]]] = {
    "nothing": lambda _: asyncio.get_running_loop().create_future(),
    "slow_headers": lambda one: one.hold_many(500, b"GET /ping HTTP/1.1\r\n", b"x", 0.5),
    "half_bodies": lambda one: one.hold_many(200, _POST + b"content-length: 1000000\r\n\r\n{", b" " * 1000, 0.5),
    "idle_10000": lambda one: one.hold_many(IDLE, b"", b"", 60.0),
    "body_200_mb": lambda one: one.again(1.0, *_told(LARGE_NBYTES)),
    "chunked_200_mb": lambda one: one.again(1.0, *_chunked(LARGE_NBYTES)),
    "json_10000_deep": lambda one: one.again(0.05, _DEEP),
    "json_900000_parts": lambda one: one.again(1.0, _WIDE),
    "headers_10_mb": lambda one: one.again(0.2, _headers(10_000, 1000)),
    "headers_60_kb": lambda one: one.again(0.05, _headers(800, 64)),
    "pipelined_5000": lambda one: one.again(0.2, b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n" * 5000),
}


def _sampling(**fields: Any) -> bytes:
    return _body(json.dumps({"input_ids": [1, 2, 3], "sampling_params": fields}).encode())


async def _grammars(
    attack: Attack, make: Callable[[int], bytes], *, leaves: bool = False, every_s: float = 0.0
) -> None:
    """Requests of grammars that are all different, several at a time.

    `leaves`: the client is gone before its answer.
    """
    numbers = itertools.count()

    async def ask() -> None:
        while True:
            body = make(next(numbers))
            if leaves:
                _, writer = await asyncio.open_connection(HOST, attack.port)
                writer.write(body)
                await writer.drain()
                await asyncio.sleep(0.05)
                writer.transport.abort()
                attack.statuses["left"] += 1
            else:
                await attack.once(body)
            await asyncio.sleep(every_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(ask())


_AT_ONCE = 4


def _endless(number: int) -> bytes:
    return _sampling(json_schema=json.dumps({"type": "integer", "multipleOf": 9_999_991 + 2 * number}))


def _costly(number: int) -> bytes:
    """Some 20 to 40 ms of CPU to compile, and none to keep."""
    return _sampling(json_schema=json.dumps({"type": "integer", "multipleOf": 9973 + number}), max_new_tokens=2)


def _large(number: int) -> bytes:
    names = [f"p{number}_{at}" for at in range(1500)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    return _sampling(json_schema=json.dumps(schema), max_new_tokens=2)


def _nested(number: int) -> bytes:
    text = "root ::= " + "(" * (10_000 + number) + '"a"' + ")" * (10_000 + number)
    return _sampling(ebnf=text)


def _wide(number: int) -> bytes:
    """Long answers, each mask of which is as dear as may be."""
    alternatives = "|".join(f"[a-z]{{{at % 40 + 1}}}[0-9]{{{at % 7}}}" for at in range(60))
    return _sampling(regex=f"(({alternatives}) ){{{number + 100}}}", max_new_tokens=300)


def _free(_number: int) -> bytes:
    """As `_wide`, without a grammar."""
    return _sampling(max_new_tokens=300, ignore_eos=True)


#: against a model whose runner keeps real grammars
GRAMMAR_ATTACKS: dict[str, Callable[[Attack], Awaitable[Any]]] = {
    "grammars_endless": lambda one: _grammars(one, _endless),
    "grammars_left": lambda one: _grammars(one, _endless, leaves=True, every_s=0.1),
    "grammars_costly": lambda one: _grammars(one, _costly, every_s=0.1),
    "grammars_large": lambda one: _grammars(one, _large, every_s=0.1),
    "grammars_nested": lambda one: _grammars(one, _nested, every_s=0.1),
    "grammars_wide": lambda one: _grammars(one, _wide, every_s=0.1),
    # what others' answers cost without any
    "free_answers": lambda one: _grammars(one, _free, every_s=0.1),
}


async def run(name: str, port: int) -> dict[str, Any]:
    attack = Attack(port)
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(sys.stdin.fileno(), lambda: ended.done() or ended.set_result(None))
    task = asyncio.ensure_future((ATTACKS | GRAMMAR_ATTACKS)[name](attack))
    wanted = IDLE if name == "idle_10000" else 0
    try:
        while attack.held < wanted and not ended.done() and not task.done():
            await asyncio.wait([ended, task], timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
        print("ready", flush=True)
        await asyncio.wait([ended, task], return_when=asyncio.FIRST_COMPLETED)
        held = attack.held
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()  # of a task that is done
    return {"statuses": attack.statuses, "slowest_s": attack.slowest_s, "held": held}


def main() -> None:
    os.nice(9)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps(asyncio.run(run(sys.argv[1], int(sys.argv[2])))))


if __name__ == "__main__":
    main()
