"""The part of the conformance suite about other processes: killed, stopped, overwriting. See `transports/suite.py`.

`SenderProcess` runs `python -m fdasync.testing.transports.sender`. Processes are started and ended outside of the loop.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.ipc.shared_memory import Part
from fdasync.pd.messages import Source
from fdasync.testing.harness.verdicts import check
from fdasync.testing.stores.harness import run_bounded, skip
from fdasync.testing.stores.lifetimes import moment
from fdasync.testing.transports.harness import Side, TransportHooks, statuses_are, whole_or_failed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

_START_S = 30.0


class Told(msgspec.Struct):
    """What a sender says when it is ready: where its blocks lie; block `i` has the bytes of the tag `i`."""

    source: Source
    blocks: list[tuple[tuple[Part, ...], tuple[int, ...]]]


class SenderProcess:
    """A sender with blocks on offer, as a context.

    Args:
        sizes: of the parts of each of its `count` blocks.
        overwrites: it changes its blocks back and forth, as fast as it can.
    """

    def __init__(self, factory: str, count: int, sizes: tuple[int, ...], *, overwrites: bool = False) -> None:
        self._command = [sys.executable, "-P", "-m", "fdasync.testing.transports.sender", factory, str(count)]
        self._command += [",".join(map(str, sizes)), str(int(overwrites))]

    def __enter__(self) -> Told:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            out = self._process.stdout
            assert out is not None, f"the sender's process has no stdout: {self._command}"
            line = b""
            while not line.endswith(b"\n"):
                ready, _, _ = select.select([out], [], [], _START_S)
                found = os.read(out.fileno(), 1 << 16) if ready else b""
                if not found:
                    status = self._process.poll()
                    how = f"ended with status {status}" if status is not None else f"said nothing for {_START_S:g} s"
                    raise AssertionError(f"the sender's process did not start: it {how}: {self._command}")
                line += found
            self.told = msgspec.msgpack.decode(base64.b64decode(line), type=Told)
        except BaseException:
            self.__exit__()
            raise
        return self.told

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class ProcessTests(TransportHooks):
    """A sender may end in any way at any moment."""

    def test_process_whole_and_checked(self) -> None:
        async def play(receiver: Side, told: Told) -> None:
            receipts = [receiver.receipt(*block) for block in told.blocks]
            before = receiver.snapshot()
            tasks = [receiver.start(told.source, receipts[at::3]) for at in range(3)]
            await receiver.ended(tasks, "three receives")
            receiver.assert_only(before, receipts)
            for task in tasks:
                statuses_are(task.result(), ["done"] * 4, "one of three receives from another process")
            for number, receipt in enumerate(receipts):
                receiver.assert_has(receipt, number)

        self._with_sender(play, 12, (1 << 20, 12_288, 100))

    def test_process_that_overwrites_its_blocks(self) -> None:
        async def play(receiver: Side, told: Told) -> None:
            receipts = [receiver.receipt(*block) for block in told.blocks]
            for _ in range(10):
                receiver.scribble(receipts)
                statuses = await receiver.take(told.source, receipts)
                check(set(statuses) <= {"done", "damaged"}, "blocks that their process overwrites", statuses)
                for number, status in enumerate(statuses):
                    if status == "done":
                        receiver.assert_has(receipts[number], number, 'a "done" receive of what is overwritten')

        self._with_sender(play, 4, (1 << 20, 100), overwrites=True)

    def test_process_killed_in_the_middle(self) -> None:
        for when in (0, 2, 0.001, 0.004):

            async def play(receiver: Side, told: Told, when: float = when) -> None:
                receipts = [receiver.receipt(*block) for block in told.blocks]
                task = receiver.start(told.source, receipts, 3.0)
                await moment(when)
                os.kill(told.source.pid, signal.SIGKILL)
                await receiver.ended([task], "a receive from a killed process")
                for number, outcome in enumerate(task.result()):
                    check(outcome.status in ("done", "failed"), "a receive from a process that is killed", outcome)
                    if outcome.status == "done":
                        receiver.assert_has(receipts[number], number)
                receiver.transport.forget(told.source)
                await receiver.expect(["failed"], "a receive from a killed process", told.source, receipts[:1], 2.0)

            self._with_sender(play, 24, (1 << 20,))

    def test_process_stopped_in_the_middle(self) -> None:
        async def play(receiver: Side, told: Told) -> None:
            async with self.sides(1) as (other,):
                blocks = [receiver.receipt(*block) for block in told.blocks]
                good = [receiver.wanted(other, f"good {number}", 50_000) for number in range(10)]
                await receiver.expect(["done"], "a receive from another process", told.source, blocks[:1])
                with _stopped(told.source.pid):
                    waiting = receiver.start(told.source, blocks, 0.5)
                    for number, receipt in enumerate(good):
                        beside = "a receive beside one from a stopped process"
                        await receiver.expect(["done"], beside, other.source, [receipt], 5.0)
                        receiver.assert_has(receipt, f"good {number}")
                    await receiver.ended([waiting], "a receive from a stopped process")
                    whole_or_failed(waiting.result(), "a receive from a stopped process")
                    for number, outcome in enumerate(waiting.result()):
                        if outcome.status == "done":
                            receiver.assert_has(blocks[number], number)
                    receiver.scribble(blocks)
                # what it sends when it goes on is for nobody
                await asyncio.sleep(0.2)
                receiver.assert_scribbled(blocks, "after a receive from a stopped process")
                after = "a receive from a process that goes on"
                await receiver.expect(["done"] * len(blocks), after, told.source, blocks)
                for number, receipt in enumerate(blocks):
                    receiver.assert_has(receipt, number)

        self._with_sender(play, 24, (1 << 20,))

    def _with_sender(
        self,
        play: Callable[[Side, Told], Coroutine[Any, Any, None]],
        count: int,
        sizes: tuple[int, ...],
        *,
        overwrites: bool = False,
    ) -> None:
        if not self.factory:
            skip("it cannot cross processes")

        async def main(told: Told) -> None:
            async with self.sides(1) as (receiver,):
                await play(receiver, told)

        with SenderProcess(self.factory, count, sizes, overwrites=overwrites) as told:
            run_bounded(self.new_loop(), main(told), self.limit_s)


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
