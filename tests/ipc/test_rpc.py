"""Numbered calls to a child process, both sides of them: `ipc/rpc.py` and `ipc/service.py`."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import textwrap
from typing import TYPE_CHECKING

import msgspec
import pytest

from fdasync.errors import ProtocolError, RunnerError, WorkerDied, WorkerStuck
from fdasync.ipc.channel import Channel
from fdasync.ipc.errors import ErrorTable, Failed
from fdasync.ipc.remote import Fd, method_of, remote
from fdasync.ipc.rpc import Call, RpcClient
from fdasync.ipc.service import Service, _Server
from fdasync.ipc.shared_memory import PAGE_NBYTES, SharedRegion
from fdasync.testing.harness.leaks import children

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ERRORS = ErrorTable(RunnerError)


class Host:
    """What the child does, as its parent knows it."""

    @remote()
    async def do(self, what: str) -> str: ...

    @remote()
    async def read(self, fd: Fd, left: Fd) -> str: ...

    @remote()
    async def files(self) -> int: ...

    @remote()
    async def undo(self) -> None:
        """The child knows no such method."""


class Wrong:
    """What the child does, with other answers."""

    @remote()
    async def files(self) -> str: ...


class Less:
    @remote(fits=lambda count: count < 0)
    async def files(self) -> int: ...


_CHILD = """
    import asyncio, os, time
    import msgspec
    from fdasync.errors import RunnerError
    from fdasync.ipc.channel import MAX_FRAME_NBYTES
    from fdasync.ipc.errors import ErrorTable
    from fdasync.ipc.remote import Fd, remote
    from fdasync.ipc.service import Service, serve

    class Host(Service):
        errors = ErrorTable(RunnerError)

        def __init__(self):
            self.first = None

        def perform(self, method, message, fds):
            if getattr(message, "what", "") == "refuse":
                raise ValueError("not this")
            return super().perform(method, message, fds)

        @remote()
        async def files(self) -> int:
            return len(os.listdir("/proc/self/fd"))

        @remote()
        async def read(self, fd: Fd, left: Fd) -> str:
            with open(os.dup(fd), "rb") as file:
                return file.read().decode()

        @remote()
        async def do(self, what: str) -> str:
            match what:
                case "object": return object()
                case "huge": return bytes(MAX_FRAME_NBYTES)
                case "hang": time.sleep(600)
                case "exit": os._exit(3)
                case "first":
                    self.first = asyncio.get_running_loop().create_future()
                    return await self.first
                case "second": self.first.set_result("first")
                case "wait": await asyncio.get_running_loop().create_future()
                case "give up": asyncio.current_task().cancel(); await asyncio.sleep(0)
            return what

        def otherwise(self, message, problem):
            return RunnerError(f"{message.what}: {problem}", 7)

        async def aclose(self, calls):
            for call in calls:
                call.cancel()
            if calls:
                await asyncio.wait(calls)

    def main():
        serve(Host())
"""


@pytest.fixture
def host(tmp_path, monkeypatch) -> str:
    """The name of a module whose `main` is the child."""
    (tmp_path / "fdasync_host.py").write_text(textwrap.dedent(_CHILD))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "fdasync_host"


@pytest.fixture
async def client(host) -> AsyncIterator[RpcClient]:
    client = RpcClient(asyncio.get_running_loop(), "test", host, ERRORS)
    async with asyncio.timeout(300):
        yield client
        await client.kill(WorkerStuck("test", client.process.pid, "its test", 30.0))
    assert children() == []


@pytest.mark.both_loops
async def test_calls_run_at_the_same_time_and_are_answered_in_any_order(client):
    ended: list[str] = []
    calls = [client.call(Host.do, what) for what in ("first", "second", "third")]
    for call in calls:
        call.add_done_callback(lambda done: ended.append(done.result()))
    assert await asyncio.gather(*calls) == ["first", "second", "third"]
    assert ended.index("second") < ended.index("first")
    assert client.unanswered == 0


async def test_a_call_that_its_caller_left_stays_known_until_it_is_answered(client):
    left = client.call(Host.do, "first")
    await asyncio.sleep(0)
    left.cancel()
    assert await client.ask(Host.do, "other") == "other"
    assert client.unanswered == 1
    await client.ask(Host.do, "second")
    # the first was answered before this one
    assert await client.ask(Host.do, "other") == "other"
    assert client.unanswered == 0


@pytest.mark.both_loops
async def test_a_call_that_is_asked_to_stop_ends_when_it_has_stopped(client):
    task = asyncio.ensure_future(client.ask(Host.do, "wait"))
    assert await client.ask(Host.do, "other") == "other"
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([task])
    assert task.cancelled()
    assert client.unanswered == 0
    assert await client.ask(Host.do, "other") == "other"


@pytest.mark.ci(after=2)
@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("refuse", "refuse: ValueError: not this"),
        ("object", "object: TypeError: Encoding objects of type object"),
        ("give up", "give up: CancelledError: it cancelled its own call"),
        ("huge", "huge: ProtocolError: a frame of .* is above the limit"),
    ],
)
async def test_a_call_that_fails_is_an_error_of_its_own(client, what, problem):
    with pytest.raises(RunnerError, match=problem) as caught:
        await client.ask(Host.do, what)
    assert caught.value.step_id == 7
    assert await client.ask(Host.do, "other") == "other"


async def test_an_error_of_a_call_waits_for_no_garbage_collector(client):
    async def fails() -> None:
        with pytest.raises(RunnerError):
            await client.ask(Host.do, "refuse")

    await fails()
    gc.collect()
    gc.disable()
    try:
        # tests of errors may keep some; the type, because `isinstance` reads attributes of objects that warn
        before = {id(found): found for found in gc.get_objects() if type(found) is RunnerError}
        await fails()
        assert not [found for found in gc.get_objects() if type(found) is RunnerError and id(found) not in before]
    finally:
        gc.enable()


async def test_fds_that_a_service_does_not_take_are_closed(client):
    before = await client.ask(Host.files)
    region = SharedRegion.create("words", PAGE_NBYTES)
    region.view(0, 4)[:] = b"wall"
    asked = client.call(Host.read, Fd(region.fd), Fd(region.fd))
    # what is sent is a copy
    region.close()
    assert (await asked).startswith("wall")
    assert await client.ask(Host.files) == before


async def test_a_value_of_another_type_or_that_does_not_fit_ends_the_child(client):
    with pytest.raises(ProtocolError, match="the test process sent what cannot be decoded"):
        await client.ask(Wrong.files)
    await client.gone


async def test_a_value_that_does_not_fit_its_call_ends_the_child(client):
    with pytest.raises(ProtocolError, match="answered a call with an odd int"):
        await client.ask(Less.files)
    assert isinstance(await client.gone, ProtocolError)


async def test_a_message_that_the_child_does_not_know_ends_the_child(client):
    with pytest.raises(WorkerDied):
        await client.call(Host.undo)


class Waits(Service):
    """Its calls end when it is closed."""

    serves = (Host,)
    errors = ERRORS

    def perform(self, method, message, fds):
        return asyncio.get_running_loop().create_future()

    def otherwise(self, message, problem):
        return RunnerError(problem)

    async def aclose(self, calls):
        for call in calls:
            call.cancel()


@pytest.mark.both_loops
async def test_a_number_that_two_calls_have_at_a_time_ends_the_service():
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    server = _Server(loop, theirs, Waits())
    parent = Channel(loop, ours, lambda *_: None, lambda *_: None)
    serving = asyncio.ensure_future(server.serve())
    for number in (1, 2, 1):
        parent.send(msgspec.msgpack.encode(Call(number, method_of(Host.do).pack(("wait",), {})[0])))
    with pytest.raises(ProtocolError, match="call 1 came twice"):
        await asyncio.wait_for(serving, 300)
    parent.close()


async def test_what_cannot_be_sent_is_no_call(client):
    with pytest.raises(TypeError):
        client.call(Host.do, object())
    assert client.unanswered == 0
    assert await client.ask(Host.do, "other") == "other"


@pytest.mark.both_loops
async def test_a_death_answers_every_call_after_the_owner_was_told(client):
    told: list[str] = []
    client.gone.add_done_callback(lambda gone: told.append(f"gone: {type(gone.result()).__name__}"))
    calls = [client.call(Host.do, what) for what in ("wait", "exit", "wait")]
    for call in calls:
        call.add_done_callback(lambda done: told.append(type(done.exception()).__name__))
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [(type(end), end.exit_status) for end in ends] == [(WorkerDied, 3)] * 3
    assert told == ["gone: WorkerDied", *["WorkerDied"] * 3]
    with pytest.raises(WorkerDied):
        await client.call(Host.do, "other")


async def test_calls_of_a_killed_child_end_when_it_was_reaped(client):
    pid = client.process.pid
    reaped: list[bool] = []
    stuck = client.call(Host.do, "hang")
    stuck.add_done_callback(lambda _: reaped.append(children() == []))
    why = WorkerStuck("test", pid, "a call", 0.5)
    killing = asyncio.ensure_future(client.kill(why))
    await asyncio.sleep(0)
    # it is ending: nothing is sent to it any more
    late = client.call(Host.do, "other")
    assert not late.done()
    await killing
    assert [call.exception() for call in (stuck, late)] == [why, why]
    await asyncio.sleep(0)
    assert reaped == [True]
    # the first reason stays
    await client.close(RunnerError("later"), 5.0)
    assert await client.gone is why


async def test_closing_lets_the_child_end_by_itself(client):
    waiting = client.call(Host.do, "wait")
    assert await client.ask(Host.do, "other") == "other"
    closed = RunnerError("closed")
    await client.close(closed, 20.0)
    assert client.process.exited.result() == 0
    assert waiting.exception() is closed


def test_errors_are_made_of_the_table_only():
    assert RunnerError("x") in ERRORS
    assert ProtocolError("x") not in ERRORS
    for failed in (Failed(1, "ProtocolError", {"problem": "x"}), Failed(1, "RunnerError", {"problem": "x"})):
        with pytest.raises(ProtocolError, match="has no name here"):
            ERRORS.unpack(failed)


class InTurn(Service):
    """Its methods note when they begin: one waits, the other returns at once."""

    errors = ERRORS

    def __init__(self):
        self.began: list[str] = []

    @remote()
    async def slow(self) -> None:
        self.began.append("slow")
        await asyncio.sleep(0)

    @remote()
    def quick(self) -> None:
        self.began.append("quick")

    def otherwise(self, message, problem):
        return RunnerError(problem)

    async def aclose(self, calls):
        await asyncio.gather(*calls)


@pytest.mark.both_loops
async def test_calls_that_come_in_one_read_begin_in_the_order_sent():
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    service = InTurn()
    serving = asyncio.ensure_future(_Server(loop, theirs, service).serve())
    parent = Channel(loop, ours, lambda *_: None, lambda *_: None)
    for number, function in enumerate((InTurn.slow, InTurn.quick, InTurn.slow), 1):
        parent.send(msgspec.msgpack.encode(Call(number, method_of(function).pack((), {})[0])))
    parent.close()
    await asyncio.wait_for(serving, 300)
    assert service.began == ["slow", "quick", "slow"]


async def test_a_call_without_a_descriptor_for_its_copies_is_no_call(client, monkeypatch):
    def none_left(fd):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "dup", none_left)
    with pytest.raises(RunnerError, match="cannot be sent to the test process: Too many open files"):
        client.call(Host.read, Fd(0), Fd(1))
    monkeypatch.undo()
    assert client.unanswered == 0
    assert await client.ask(Host.do, "other") == "other"
