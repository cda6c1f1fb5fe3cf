"""What the contract of transports does not say: strangers in the staging area, engines that end, and its bounds."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from fdasync_fleet.testing.transports.harness import TransportHooks
from fdasync_fleet.transfer.base import CopySpec
from fdasync_mooncake.transfer import engine as engine_module
from fdasync_mooncake.transfer.landing import slots_worth
from fdasync_mooncake.transfer.server import Receiver, Server
from fdasync_mooncake.transfer.staging import SLOT_NBYTES, SLOTS, STAGING_NBYTES, Slots
from fdasync_mooncake.transfer.transport import MooncakeTransport
from fdasync_mooncake.transfer.wire import ASKED, MAX_STAGES, Free, Stage, WireRun, check_stage, pack, unpack

from fdasync.errors import BadInput, PluginError, ProtocolError
from fdasync.ipc.shared_memory import Part
from fdasync.testing import until
from fdasync.testing.harness.leaks import no_leaks
from fdasync.testing.harness.processes import stop_process

MIB = 1 << 20


class Hooks(TransportHooks):
    def make(self):
        return MooncakeTransport()


# -- bounds, without an engine -----------------------------------------------------------------------------


class Unhurried:
    """An engine that takes a while to say that it runs."""

    protocol, segment, address = "tcp", "1.2.3.4:5", 0

    async def check(self):
        await asyncio.sleep(0.02)


class Wrote(asyncio.Transport):
    """What a connection was told, and whether it was ended; what was told stays unread."""

    def __init__(self):
        super().__init__()
        self.data, self.aborted = b"", False

    def write(self, data):
        self.data += data

    def get_write_buffer_size(self):
        return len(self.data)

    def abort(self):
        self.aborted = True


def receiver_of(slots):
    server = Server(b"x" * 16, [], (), Unhurried(), slots, None, 0.5)
    receiver, told = Receiver(server), Wrote()
    receiver.connection_made(told)
    receiver.greeted = True
    return server, receiver, told


STAGE = (WireRun(Part(0, 0, 10), 0, 10),)


async def test_a_request_that_is_freed_while_it_is_staged_gives_its_slot_back():
    slots = Slots(range(8))
    server, receiver, told = receiver_of(slots)
    receiver.data_received(pack(Stage(1, STAGE)))
    await until(lambda: slots.num_free == 7)
    receiver.data_received(pack(Free(1)))
    await until(lambda: slots.num_free == 8)
    assert not receiver._staged
    assert told.data == b""
    assert not told.aborted
    server.drop(receiver)


async def test_a_number_that_is_open_twice_ends_the_connection_and_loses_no_slot():
    slots = Slots(range(8))
    server, receiver, told = receiver_of(slots)
    for _ in range(3):
        receiver.data_received(pack(Stage(7, STAGE)))
    assert server.drops["protocol"] == 1
    assert told.aborted
    await until(lambda: slots.num_free == 8)


async def test_who_reads_no_answers_is_dropped():
    slots = Slots(range(8))
    server, receiver, told = receiver_of(slots)
    told.data = bytes(1 << 20)
    receiver.data_received(pack(Stage(7, STAGE)))
    await until(lambda: told.aborted)
    assert server.drops["stuck"] == 1
    await until(lambda: slots.num_free == 8)


async def test_who_keeps_its_slots_leaves_places_for_others():
    slots = Slots(range(8))
    held = [await slots.take("greedy") for _ in range(4)]
    more = asyncio.ensure_future(slots.take("greedy"))
    others = [await slots.take(name) for name in ("a", "b", "c")]
    assert len({*held, *others}) == 7
    assert not more.done()
    # a wait that is given up takes nothing with it
    more.cancel()
    await asyncio.wait([more])
    last = asyncio.ensure_future(slots.take("d"))
    await asyncio.sleep(0)
    assert last.done()
    assert slots.num_free == 0
    late = asyncio.ensure_future(slots.take("e"))
    slots.give("a", others[0])
    assert await late == others[0]


def test_what_a_peer_says_is_bounded_before_it_is_read():
    with pytest.raises(ProtocolError, match="4294967295 bytes"):
        unpack(bytearray(struct.pack("<I", 0xFFFFFFFF)), ASKED)
    part = Part(0, 0, 8 * MIB)
    runs = (WireRun(part, 0, SLOT_NBYTES), WireRun(part, 0, 1))
    with pytest.raises(ProtocolError, match="more than"):
        check_stage(Stage(1, runs))
    with pytest.raises(ProtocolError, match="of a part of 10"):
        check_stage(Stage(1, (WireRun(Part(0, 0, 10), 8, 4),)))
    for run in ((part, 0, SLOT_NBYTES + 1), (part, -1, 5), (part, 0, 0)):
        frame = bytearray(pack(Stage(1, (WireRun(*run),))))
        with pytest.raises(ProtocolError, match="decoded"):
            unpack(frame, ASKED)
    whole = pack(Stage(1, runs[1:]))
    assert unpack(bytearray(whole[:-1]), ASKED) is None
    data = bytearray(whole * 2)
    assert unpack(data, ASKED) == Stage(1, runs[1:])
    assert data == whole


def test_runs_fill_slots_and_cover_all_bytes_in_order():
    sizes = (3 * MIB + 5, 0, 700)
    parts = tuple([Part(0, place * 4 * MIB, nbytes) for place, nbytes in enumerate(sizes)])
    specs = [CopySpec(parts, parts, (0, 0, 0))] * 3
    batches = list(slots_worth(specs, [None, None, None]))
    assert [sum(run.length for run in runs) for runs in batches[:-1]] == [SLOT_NBYTES] * (len(batches) - 1)
    flat = [run for runs in batches for run in runs]
    for place in range(3):
        for number, nbytes in enumerate(sizes):
            mine = [run for run in flat if (run.place, run.part) == (place, number)]
            assert [run.start for run in mine] == [sum(one.length for one in mine[:at]) for at in range(len(mine))]
            assert sum(run.length for run in mine) == nbytes


@pytest.mark.parametrize(
    ("host", "keyed", "named"), [("10.0.0.1", False, "loopback"), ("::1", False, "IPv6"), ("0.0.0.0", True, "machine")]
)
def test_addresses_are_checked_at_once(host, keyed, named):
    with pytest.raises(BadInput, match=named):
        MooncakeTransport(host, keyed=keyed)


def memory_of(pid):
    return Path(f"/proc/{pid}/maps").read_text()


def kill(engine):
    # never a number that stands for several processes
    assert engine.pid is not None
    assert engine.pid > 1
    os.kill(engine.pid, signal.SIGKILL)


# -- with engines ------------------------------------------------------------------------------------------


@contextmanager
def stranger(*segments):
    script = Path(__file__).with_name("mooncake_stranger.py")
    command = [sys.executable, str(script), str(STAGING_NBYTES), *segments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "struck\n"
        yield
        assert process.poll() is None, "the stranger ended"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.nightly
@pytest.mark.usefixtures("network")
async def test_a_stranger_in_the_staging_areas_damages_copies_and_reaches_nothing_else():
    async with Hooks().sides() as (sender, receiver):
        blocks = [sender.block(number, MIB, 20_000) for number in range(12)]
        specs = [receiver.copy_spec(*block) for block in blocks]
        theirs = sender.snapshot()
        loop = asyncio.get_running_loop()
        engines = [side.transport.engine.segment for side in (sender, receiver)]
        seen = set()
        with stranger(*engines):
            for _ in range(15):
                receiver.scribble(specs)
                before = receiver.snapshot()
                outcomes = await receiver.transport.receive(sender.source, specs, loop.time() + 10)
                for number, outcome in enumerate(outcomes):
                    seen.add(outcome.status)
                    if outcome.status == "done":
                        receiver.assert_has(specs[number], number)
                receiver.assert_only(before, specs)
        assert "damaged" in seen, f"the stranger never struck: {seen}"
        assert seen <= {"done", "damaged"}
        sender.assert_unchanged(theirs, [])
        assert await receiver.take(sender.source, specs) == ["done"] * 12


@pytest.mark.nightly
@pytest.mark.usefixtures("network")
async def test_the_staging_area_has_one_size_and_no_instance_memory_is_in_the_engines_process():
    async with Hooks().sides() as (sender, receiver):
        sizes = {(os.fstat(side.transport._staging.fd).st_size) for side in (sender, receiver)}
        assert sizes == {STAGING_NBYTES}
        specs = [receiver.wanted(sender, number, 9 * MIB) for number in range(3)]
        tasks = [receiver.start(sender.source, [spec]) for spec in specs]
        await receiver.ended(tasks, "three large receives")
        assert [task.result()[0].status for task in tasks] == ["done"] * 3
        # all slots come back
        for side in (sender, receiver):
            await until(lambda side=side: side.transport._slots.num_free == SLOTS)
            await until(lambda side=side: side.transport._server.slots.num_free == SLOTS)
            maps = memory_of(side.transport.engine.pid)
            assert "fdasync-mooncake-staging" in maps
            assert "fdasync-side" not in maps
            # which the process of the transport has, so that the name is the right one
            assert "fdasync-side" in memory_of(os.getpid())


@pytest.mark.nightly
@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("whose", ["sender", "receiver"])
async def test_an_engine_that_is_killed_fails_copies_and_is_started_again(whose):
    with no_leaks():
        async with Hooks().sides() as (sender, receiver):
            specs = [receiver.wanted(sender, number, MIB) for number in range(24)]
            assert await receiver.take(sender.source, specs[:1]) == ["done"]
            engine = (sender if whose == "sender" else receiver).transport.engine
            for _ in range(2):
                task = receiver.start(sender.source, specs, 5.0)
                await asyncio.sleep(0.002)
                kill(engine)
                await receiver.ended([task], "a receive whose engine is killed")
                for outcome in task.result():
                    assert (outcome.status, outcome.transient) in (("done", False), ("failed", True)), outcome

                async def again():
                    return await receiver.take(sender.source, specs) == ["done"] * 24

                async with asyncio.timeout(300):
                    while not await again():  # noqa: ASYNC110 - as requests are retried
                        await asyncio.sleep(0.1)
            assert engine.restarts == 2


@pytest.mark.nightly
@pytest.mark.usefixtures("network")
async def test_an_engine_that_is_stopped_fails_its_copies_by_their_deadline_and_no_others():
    with no_leaks():
        async with Hooks().sides(3) as (stopped, sender, receiver):
            loop = asyncio.get_running_loop()
            first, other = receiver.wanted(stopped, "a", MIB), receiver.wanted(sender, "b", MIB)
            assert await receiver.take(stopped.source, [first]) == ["done"]
            pid = stopped.transport.engine.pid
            assert pid is not None
            stop_process(pid)
            try:
                began = loop.time()
                waiting = receiver.start(stopped.source, [first], 1.0)
                for _ in range(10):
                    assert await receiver.take(sender.source, [other], 2.0) == ["done"]
                await receiver.ended([waiting], "a receive from a stopped engine")
                assert [(one.status, one.transient) for one in waiting.result()] == [("failed", True)]
                assert loop.time() - began < 2.0
            finally:
                os.kill(pid, signal.SIGCONT)
            # its slot comes back when the engine has given the transfer up, or read it
            await until(lambda: receiver.transport._slots.num_free == SLOTS, deadline_s=300)
            assert await receiver.take(stopped.source, [first]) == ["done"]


@pytest.mark.nightly
@pytest.mark.usefixtures("network")
async def test_an_engine_that_was_stopped_before_it_is_met_is_started_again_and_holds_up_nobody(monkeypatch):
    async with Hooks().sides(3) as (stopped, sender, receiver):
        monkeypatch.setattr(engine_module, "_PING_S", 0.5)
        first, other = receiver.wanted(stopped, "a", MIB), receiver.wanted(sender, "b", MIB)
        pid = stopped.transport.engine.pid
        assert pid is not None
        stop_process(pid)
        waiting = receiver.start(stopped.source, [first], 8.0)
        for _ in range(10):
            assert await receiver.take(sender.source, [other], 2.0) == ["done"]
        await receiver.ended([waiting], "a receive from an engine that was stopped")
        (outcome,) = waiting.result()
        assert (outcome.status, outcome.transient) == ("failed", True)
        assert "did not answer" in outcome.problem or "stuck" in outcome.problem or "ping" in outcome.problem
        async with asyncio.timeout(300):
            while await receiver.take(stopped.source, [first]) != ["done"]:  # noqa: ASYNC110 - as requests are retried
                await asyncio.sleep(0.1)
        assert stopped.transport.engine.pid != pid


@pytest.mark.nightly
@pytest.mark.usefixtures("network")
async def test_addresses_at_which_there_is_no_sender():
    async with Hooks().sides() as (sender, receiver):
        spec = receiver.wanted(sender, "a", 1000)
        deadline = asyncio.get_running_loop().time() + 3
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        for address, transient, named in [
            (f"127.0.0.1:{port}", True, "cannot be reached"), ("10.0.0.1:80", False, "loopback"),
            ("nonsense", False, "no address"), ("", False, "no address"),
        ]:  # fmt: skip
            source = msgspec.structs.replace(sender.source, address=address)
            (outcome,) = await receiver.transport.receive(source, [spec], deadline)
            assert (outcome.status, outcome.transient) == ("failed", transient), outcome
            assert named in outcome.problem
        # another token: the sender says nothing
        source = msgspec.structs.replace(sender.source, token=bytes(16))
        (outcome,) = await receiver.transport.receive(source, [spec], deadline)
        assert (outcome.status, outcome.transient) == ("failed", True)
        assert sender.transport._server.drops["protocol"] == 1
        assert await receiver.take(sender.source, [spec]) == ["done"]


@pytest.mark.nightly
@pytest.mark.usefixtures("network")
async def test_strangers_at_the_senders_port_hear_nothing_and_are_dropped():
    async with Hooks().sides() as (sender, receiver):
        host, _, port = sender.source.address.rpartition(":")
        server = sender.transport._server
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        loud, writer = await asyncio.open_connection(host, int(port))
        writer.write(struct.pack("<I", 0xFFFFFFFF) * 64)
        assert await asyncio.wait_for(loud.read(), 300) == b""
        for reader, _ in silent:
            assert await asyncio.wait_for(reader.read(), 300) == b""
        assert (server.drops["protocol"], server.drops["stranger"]) == (1, 3)
        for each in (writer, *[one for _, one in silent]):
            each.close()
        assert await receiver.take(sender.source, [receiver.wanted(sender, "a", MAX_STAGES * 1000)]) == ["done"]


@pytest.mark.nightly
@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("how", ["missing", "pigeon", "rdma"])
async def test_where_there_is_no_engine_it_does_not_open_and_says_why(how, monkeypatch, tmp_path):
    if how == "missing":
        (tmp_path / "mooncake").mkdir()
        (tmp_path / "mooncake" / "__init__.py").write_text("")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    else:
        if how == "rdma" and Path("/sys/class/infiniband").is_dir():  # noqa: ASYNC240
            pytest.skip("this machine may have a device for rdma")
        monkeypatch.setenv("MOONCAKE_PROTOCOL", how)
    with no_leaks():
        with pytest.raises(PluginError) as caught:
            async with Hooks().sides(1):
                pass
        assert caught.value.name == "mooncake"
        assert ("mooncake-transfer-engine-non-cuda" if how == "missing" else how) in caught.value.problem
