"""Transports in a process beside the loop keep the contract of transports, and end by name."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import msgspec
import pytest
from fdasync_fleet.testing import TransportTests
from fdasync_fleet.testing.transports.harness import TransportHooks
from fdasync_fleet.transfer.base import checksum_parts
from fdasync_fleet.transfer.plugins import TransportSpec
from fdasync_fleet.transfer.process import proxy
from fdasync_fleet.transfer.process.proxy import TransferProcess
from transports_in_process import shm_in_process, tcp_in_process

from fdasync.errors import InvariantBroken, PluginError, WorkerDied, WorkerStuck
from fdasync.ipc.shared_memory import Part
from fdasync.testing import until
from fdasync.testing.harness.leaks import children, no_leaks
from fdasync.testing.harness.processes import stop_process


# two processes and more for each test
@pytest.mark.nightly
class TestShmInProcess(TransportTests):
    keeps_offers = False
    factory = "transports_in_process:shm_in_process"

    def make(self):
        return shm_in_process()


@pytest.mark.nightly
class TestTcpInProcess(TransportTests):
    factory = "transports_in_process:tcp_in_process"

    def make(self):
        return tcp_in_process()


# -- what the contract does not say ------------------------------------------------------------------------


class Hooks(TransportHooks):
    def __init__(self, name="shm"):
        self.name = name
        self.processes = []

    def make(self):
        self.processes.append(TransferProcess([TransportSpec(self.name)]))
        return self.processes[-1].transports[0]


@pytest.mark.ci
async def test_checksums_are_those_of_the_loop_and_follow_offers():
    hooks = Hooks("tcp")
    with no_leaks():
        async with hooks.sides() as (sender, receiver):
            parts = [sender.part(700_001), sender.part(3, 1), sender.part(0)]
            sender.write(parts[0], os.urandom(700_001))
            sums = await hooks.processes[0].checksums(parts)
            assert sums == await checksum_parts(sender.regions, parts)
            assert await hooks.processes[0].checksums([]) == ()
            with pytest.raises(InvariantBroken, match="outside"):
                await hooks.processes[0].checksums([Part(0, 1 << 40, 8)])
            # no answer to an offer is awaited, and a receiver elsewhere may come at once
            for number in range(20):
                part = sender.part(1000 + number)
                sender.transport.offer([part])
                sums = await hooks.processes[0].checksums([part])
                assert await receiver.take(sender.source, [receiver.copy_spec([part], sums)]) == ["done"]
                sender.transport.withdraw([part])
        with pytest.raises(InvariantBroken, match="not open"):
            await hooks.processes[0].checksums(parts)


@pytest.mark.ci
async def test_outcomes_stand_in_their_places_and_what_is_withdrawn_is_not_read():
    hooks = Hooks("tcp")
    async with hooks.sides() as (sender, receiver):
        wanted = [receiver.wanted(sender, number, 1000) for number in range(3)]
        sender.transport.withdraw(wanted[0].ref_parts)
        # answered behind the withdrawal
        await hooks.processes[0].checksums(wanted[1].ref_parts)
        assert await receiver.take(sender.source, wanted) == ["failed", "done", "done"]


@pytest.mark.ci
async def test_at_its_deadline_a_receive_ends_and_the_process_goes_on():
    hooks = Hooks("tcp")
    with no_leaks(), socket.create_server(("127.0.0.1", 0)) as silent:
        async with hooks.sides() as (sender, receiver):
            pid, copy_spec = hooks.processes[1].pid, receiver.wanted(sender, "a", 1000)
            source = msgspec.structs.replace(sender.source, address=f"127.0.0.1:{silent.getsockname()[1]}")
            loop = asyncio.get_running_loop()
            began = loop.time()
            (outcome,) = await receiver.transport.receive(source, [copy_spec], began + 0.3)
            assert (outcome.status, outcome.transient) == ("failed", True)
            assert 0.25 < loop.time() - began < 120.0
            assert await receiver.take(sender.source, [copy_spec]) == ["done"]
            assert hooks.processes[1].pid == pid


@pytest.mark.ci
async def test_several_transports_share_one_process(tmp_path):
    process = TransferProcess([TransportSpec("shm"), TransportSpec("tcp")])
    shm, tcp = process.transports
    assert (shm.name, tcp.name, process.pid) == ("shm", "tcp", -1)
    hooks = Hooks()
    with no_leaks():
        async with hooks.sides(1) as (other,):
            await shm.open(other.regions)
            await tcp.open(other.regions)
            assert len(children()) == 2
            assert shm.source().pid == tcp.source().pid == process.pid
            assert shm.source().token != tcp.source().token
            await shm.aclose()
            # the other one goes on
            part = other.part(10)
            tcp.offer([part])
            assert len(await process.checksums([part])) == 1
            await asyncio.gather(tcp.aclose(), tcp.aclose())
            assert process.pid == -1
            await shm.aclose()


@pytest.mark.ci
async def test_a_plugin_that_does_not_open_is_named():
    with no_leaks():
        async with Hooks().sides(1) as (other,):
            process = TransferProcess([TransportSpec("bogus")])
            with pytest.raises(PluginError, match="bogus"):
                await process.transports[0].open(other.regions)
            assert len(children()) == 1
            await process.transports[0].aclose()


@pytest.mark.ci
async def test_a_source_that_the_process_could_not_read_is_refused_before():
    hooks = Hooks()
    async with hooks.sides() as (sender, receiver):
        copy_spec = receiver.wanted(sender, "a", 100)
        source = msgspec.structs.replace(sender.source, address="x" * 100_000)
        (outcome,) = await receiver.start(source, [copy_spec])
        assert (outcome.status, outcome.transient) == ("failed", False)
        assert "out of their bounds" in outcome.problem
        receiver.transport.forget(source)
        assert await receiver.take(sender.source, [copy_spec]) == ["done"]


@pytest.mark.ci
async def test_a_process_that_dies_is_told_once_and_fails_what_runs():
    hooks = Hooks()
    with no_leaks():
        async with hooks.sides() as (sender, receiver):
            ends = []
            hooks.processes[1].on_end = ends.append
            copy_specs = [receiver.wanted(sender, number, 8 << 20) for number in range(4)]
            pid = hooks.processes[1].pid
            stop_process(pid)
            task = receiver.start(sender.source, copy_specs)
            sums = asyncio.create_task(hooks.processes[1].checksums(copy_specs[0].parts))
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            outcomes = await task
            assert {(one.status, one.transient) for one in outcomes} == {("failed", True)}
            assert "by signal 9" in outcomes[0].problem
            with pytest.raises(WorkerDied, match="transfer process"):
                await sums
            assert [type(each) for each in ends] == [WorkerDied]
            # from here on at once
            assert await receiver.take(sender.source, copy_specs[:1]) == ["failed"]
            with pytest.raises(WorkerDied):
                await hooks.processes[1].checksums(copy_specs[0].parts)
            part = receiver.part(10)
            receiver.transport.offer([part])
            receiver.transport.withdraw([part])
        assert len(ends) == 1


@pytest.mark.ci
@pytest.mark.parametrize("how", ["deadline", "cancelled", "forgotten", "checksums"])
async def test_a_process_that_stands_still_is_killed_before_the_parts_are_the_callers(monkeypatch, how):
    monkeypatch.setattr(proxy, "STOP_S", 0.2)
    monkeypatch.setattr(proxy, "_CHECKSUMS_S", 0.2)
    hooks = Hooks()
    with no_leaks():
        async with hooks.sides() as (sender, receiver):
            ends = []
            process = hooks.processes[1]
            process.on_end = ends.append
            copy_spec = receiver.wanted(sender, "a", 1 << 20)
            stop_process(process.pid)
            if how == "checksums":
                with pytest.raises(WorkerStuck, match="checksums"):
                    await process.checksums(copy_spec.parts)
            else:
                loop = asyncio.get_running_loop()
                limit_s = 0.1 if how == "deadline" else 60.0
                task = asyncio.create_task(
                    receiver.transport.receive(sender.source, [copy_spec], loop.time() + limit_s)
                )
                await until(lambda: process._client.unanswered, 300)
                if how == "forgotten":
                    receiver.transport.forget(sender.source)
                if how == "cancelled":
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                else:
                    (outcome,) = await task
                    assert (outcome.status, outcome.transient) == ("failed", True)
            assert process.pid == -1
            assert [type(each) for each in ends] == [WorkerStuck]
