"""The part of the conformance suite for transports about senders in processes that die, stop or overwrite.

`SenderProcess` runs `python -m fdasync_fleet.testing.transports.sender`. Processes are started and ended outside of
the loop. Used by `transports/suite.py`.
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
from fdasync.testing.harness.bounded import moment, run_bounded, skip
from fdasync.testing.harness.verdicts import check
from fdasync_fleet.messages import Source
from fdasync_fleet.testing.transports.harness import Side, TransportHooks, statuses_are, whole_or_failed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

_START_S = 120.0


class Announcement(msgspec.Struct):
    """What a sender writes when it is ready.

    Attributes:
        source: of its transport.
        blocks: the parts and checksums of each block; block `i` has the bytes of the tag `i`.
    """

    source: Source
    blocks: list[tuple[tuple[Part, ...], tuple[int, ...]]]


class SenderProcess:
    """A sender with blocks on offer, as a context.

    Args:
        factory: "module:name" of a callable that makes its transport.
        count: of its blocks.
        sizes: of the parts of each block.
        overwrites: it changes its blocks back and forth, as fast as it can.
    """

    def __init__(self, factory: str, count: int, sizes: tuple[int, ...], *, overwrites: bool = False) -> None:
        self._command = [sys.executable, "-P", "-m", "fdasync_fleet.testing.transports.sender", factory, str(count)]
        self._command += [",".join(map(str, sizes)), str(int(overwrites))]

    def __enter__(self) -> Announcement:
        # the factory may stand in a test's module: the process imports it from where this process found it
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, env=environment)
        try:
            out = self._process.stdout
            assert out is not None, f"the sender's process has no stdout: {self._command}"
            line = b""
            while not line.endswith(b"\n"):
                ready, _, _ = select.select([out], [], [], _START_S)
                found = os.read(out.fileno(), 1 << 16) if ready else b""
                if not found:
                    status = self._process.wait(_START_S) if ready else None  # its stdout closes before its end
                    how = f"ended with status {status}" if status is not None else f"said nothing for {_START_S:g} s"
                    raise AssertionError(f"the sender's process did not start: it {how}: {self._command}")
                line += found
            self.announced = msgspec.msgpack.decode(base64.b64decode(line), type=Announcement)
        except BaseException:
            self.__exit__()
            raise
        return self.announced

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class ProcessTests(TransportHooks):
    """A sender may end in any way at any moment."""

    def test_process_whole_and_checked(self) -> None:
        async def play(receiver: Side, sender: Announcement) -> None:
            copy_specs = [receiver.copy_spec(*block) for block in sender.blocks]
            before = receiver.snapshot()
            tasks = [receiver.start(sender.source, copy_specs[at::3]) for at in range(3)]
            await receiver.ended(tasks, "three receives")
            receiver.assert_only(before, copy_specs)
            for task in tasks:
                statuses_are(task.result(), ["done"] * 4, "one of three receives from another process")
            for number, copy_spec in enumerate(copy_specs):
                receiver.assert_has(copy_spec, number)

        self._with_sender(play, 12, (1 << 20, 12_288, 100))

    def test_process_that_overwrites_its_blocks(self) -> None:
        async def play(receiver: Side, sender: Announcement) -> None:
            copy_specs = [receiver.copy_spec(*block) for block in sender.blocks]
            for _ in range(10):
                receiver.scribble(copy_specs)
                statuses = await receiver.take(sender.source, copy_specs)
                check(set(statuses) <= {"done", "damaged"}, "blocks that their process overwrites", statuses)
                for number, status in enumerate(statuses):
                    if status == "done":
                        receiver.assert_has(copy_specs[number], number, 'a "done" receive of what is overwritten')

        self._with_sender(play, 4, (1 << 20, 100), overwrites=True)

    def test_process_killed_in_the_middle(self) -> None:
        for when in (0, 2, 0.001, 0.004):

            async def play(receiver: Side, sender: Announcement, when: float = when) -> None:
                copy_specs = [receiver.copy_spec(*block) for block in sender.blocks]
                task = receiver.start(sender.source, copy_specs, 3.0)
                await moment(when)
                os.kill(sender.source.pid, signal.SIGKILL)
                await receiver.ended([task], "a receive from a killed process")
                for number, outcome in enumerate(task.result()):
                    check(outcome.status in ("done", "failed"), "a receive from a process that is killed", outcome)
                    if outcome.status == "done":
                        receiver.assert_has(copy_specs[number], number)
                receiver.transport.forget(sender.source)
                await receiver.expect(["failed"], "a receive from a killed process", sender.source, copy_specs[:1], 2.0)

            self._with_sender(play, 24, (1 << 20,))

    def test_process_stopped_in_the_middle(self) -> None:
        async def play(receiver: Side, sender: Announcement) -> None:
            async with self.sides(1) as (other,):
                blocks = [receiver.copy_spec(*block) for block in sender.blocks]
                good = [receiver.wanted(other, f"good {number}", 50_000) for number in range(10)]
                await receiver.expect(["done"], "a receive from another process", sender.source, blocks[:1])
                with _stopped(sender.source.pid):
                    waiting = receiver.start(sender.source, blocks, 0.5)
                    for number, copy_spec in enumerate(good):
                        beside = "a receive beside one from a stopped process"
                        await receiver.expect(["done"], beside, other.source, [copy_spec])
                        receiver.assert_has(copy_spec, f"good {number}")
                    await receiver.ended([waiting], "a receive from a stopped process")
                    whole_or_failed(waiting.result(), "a receive from a stopped process")
                    for number, outcome in enumerate(waiting.result()):
                        if outcome.status == "done":
                            receiver.assert_has(blocks[number], number)
                    receiver.scribble(blocks)
                # its late answers must go nowhere
                await asyncio.sleep(0.2)
                receiver.assert_scribbled(blocks, "after a receive from a stopped process")
                after = "a receive from a process that goes on"
                await receiver.expect(["done"] * len(blocks), after, sender.source, blocks)
                for number, copy_spec in enumerate(blocks):
                    receiver.assert_has(copy_spec, number)

        self._with_sender(play, 24, (1 << 20,))

    def _with_sender(
        self,
        play: Callable[[Side, Announcement], Coroutine[Any, Any, None]],
        count: int,
        sizes: tuple[int, ...],
        *,
        overwrites: bool = False,
    ) -> None:
        if not self.factory:
            skip("it cannot cross processes")

        async def main(sender: Announcement) -> None:
            async with self.sides(1) as (receiver,):
                await play(receiver, sender)

        with SenderProcess(self.factory, count, sizes, overwrites=overwrites) as sender:
            run_bounded(self.new_loop(), main(sender), self.limit_s)


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
