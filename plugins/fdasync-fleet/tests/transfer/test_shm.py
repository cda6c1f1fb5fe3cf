"""Copies between processes of one machine: what is mapped is what was meant, read-only, and given back."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal

import msgspec
import pytest
import uvloop
from fdasync_fleet.messages import Source
from fdasync_fleet.testing.transports.harness import TransportHooks
from fdasync_fleet.testing.transports.processes import SenderProcess
from fdasync_fleet.transfer.shm import ShmTransport, shm_problem
from fdasync_fleet.transfer.shm_peer import IDENTITY_NBYTES, Peer, make_identity
from fdasync_fleet.transfer.validation import boot_id

from fdasync.cache.store.base import Outcome
from fdasync.errors import InvariantBroken
from fdasync.ipc.shared_memory import SharedRegion
from fdasync.testing.harness.leaks import Resources


class Hooks(TransportHooks):
    def make(self):
        return ShmTransport()


async def refusal(regions=None, **fields) -> str:
    """What a receiver says to a source with other fields; `regions` makes them of the true ones."""
    async with Hooks().sides() as (sender, receiver):
        source = sender.source
        if regions is not None:
            fields["regions"] = regions(source.regions)
        copy_spec = receiver.wanted(sender, "a", 5000)
        before, held = receiver.snapshot(), Resources.now()
        (outcome,) = await receiver.start(msgspec.structs.replace(source, **fields), [copy_spec])
        assert Resources.now().left_since(held) == []
        receiver.assert_only(before)
        assert (outcome.status, outcome.transient) == ("failed", False)
        return outcome.problem


def test_whether_memory_can_be_shared_here(monkeypatch):
    assert shm_problem() == ""
    before = Resources.now()
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert "not dumpable" in shm_problem()
    monkeypatch.undo()

    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fdasync_fleet.transfer.shm_peer.os.memfd_create", refuse)
    assert "not implemented" in shm_problem()
    monkeypatch.undo()
    monkeypatch.setattr("fdasync_fleet.transfer.shm_peer.mmap.mmap", refuse)
    monkeypatch.setattr("fdasync_fleet.transfer.shm_peer._opened", refuse)
    assert "not implemented" in shm_problem()
    assert Resources.now().left_since(before) == []


@pytest.mark.both_loops
async def test_a_source_of_another_process_or_machine_is_refused():
    assert "another machine" in await refusal(machine="another")
    assert "another process" in await refusal(token=bytes(16))
    assert "no process" in await refusal(pid=0)
    assert "is gone" in await refusal(pid=2**31 - 1)
    assert "lacks its memfd seals" in await refusal(lambda true: true[:1])
    assert "another file" in await refusal(lambda true: (true[0], true[0], true[2]))
    assert "is gone" in await refusal(lambda true: ((9999, 40 << 20), *true[1:]))
    assert "another size" in await refusal(lambda true: ((true[0][0], 1 << 40), *true[1:]))


def test_the_process_id_of_another_process_is_seen():
    """Its fds have the right numbers, and are something else."""
    with SenderProcess("fdasync_fleet.transfer.shm:ShmTransport", 1, (100,)) as told:
        assert uvloop.run(refusal(pid=told.source.pid))
        problem = uvloop.run(refusal(lambda _: told.source.regions, pid=told.source.pid))
        assert "another process" in problem


def test_only_sealed_shared_memory_is_mapped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    held = [os.open(path, os.O_RDWR), os.open(tmp_path, os.O_RDONLY), *os.pipe(), os.open("/dev/zero", os.O_RDONLY)]
    held.append(os.open(fifo, os.O_RDWR))
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 40 << 20)
    try:
        for fd in held:
            for swap in (lambda true: ((fd, 40 << 20), *true[1:]), lambda true: (*true[:-1], (fd, 4096))):  # noqa: B023
                assert "not shared memory" in uvloop.run(refusal(swap))
        assert "lacks its memfd seals" in uvloop.run(refusal(lambda true: ((loose, 40 << 20), *true[1:])))
    finally:
        for fd in [*held, loose]:
            os.close(fd)


def test_a_file_of_a_disk_is_looked_at_and_never_opened(tmp_path, monkeypatch):
    # it may be far away, and take its time
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    opened, open_ = [], os.open

    def spy(name, flags, *more):
        opened.append(flags & os.O_PATH)
        return open_(name, flags, *more)

    with path.open("rb") as file:
        source = Source(boot_id(), os.getpid(), ((file.fileno(), 4096),), bytes(16), "")
        monkeypatch.setattr("fdasync_fleet.transfer.shm_peer.os.open", spy)
        found = Peer.map(source)
        monkeypatch.undo()
    assert "not shared memory" in found.problem
    assert opened == [os.O_PATH]


def test_a_frozen_page_of_something_else_is_no_identity():
    token = b"t" * 16
    fds = [make_identity(token, ())]
    try:
        for first in (b"fdasync-blocks-2", b"x" * 16):
            fds.append(os.memfd_create("other", os.MFD_ALLOW_SEALING))
            os.pwrite(fds[-1], (first + token).ljust(IDENTITY_NBYTES, b"\0"), 0)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            fcntl.fcntl(fds[-1], fcntl.F_ADD_SEALS, seals)
        found = [Peer.map(Source(boot_id(), os.getpid(), ((fd, IDENTITY_NBYTES),), token, "")) for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)
    assert isinstance(found[0], Peer)
    assert all("another process" in other.problem for other in found[1:])


async def test_an_fd_that_is_used_again_is_seen():
    async with Hooks().sides() as (sender, receiver):
        copy_spec = receiver.wanted(sender, "a", 5000)
        source = sender.source
        old = sender.regions[0]
        other = SharedRegion.create("other", old.nbytes)
        kept = os.dup(old.fd)
        os.dup2(other.fd, old.fd)
        (outcome,) = await receiver.start(source, [copy_spec])
        assert "another file" in outcome.problem
        os.dup2(kept, old.fd)
        assert await receiver.take(source, [copy_spec]) == ["done"]
        os.close(kept)
        other.close()


async def test_the_identity_page_cannot_be_changed_and_the_mapping_not_written():
    async with Hooks().sides(1) as (sender,):
        fd = sender.source.regions[-1][0]
        wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == wanted
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        peer = Peer.map(sender.source)
        assert isinstance(peer, Peer)
        with peer.view(0, 0, 10) as view:
            assert view.readonly
        peer.close()


async def test_mappings_are_kept_until_forgotten():
    async with Hooks().sides(3) as (one, two, receiver):
        before = Resources.now()
        copy_specs = [receiver.wanted(sender, "a", 5000) for sender in (one, two)]
        for _ in range(3):
            for sender, copy_spec in zip((one, two), copy_specs, strict=True):
                assert await receiver.take(sender.source, [copy_spec]) == ["done"]
        assert len(Resources.now().segments - before.segments) == 4, "two regions of two senders"
        receiver.transport.forget(one.source)
        assert len(Resources.now().segments - before.segments) == 2
        receiver.transport.forget(two.source)
        assert Resources.now().left_since(before) == []


def test_a_sender_that_is_stopped_or_dead_can_still_be_read_if_mapped():
    with SenderProcess("fdasync_fleet.transfer.shm:ShmTransport", 4, (300_000, 100)) as told:

        async def main():
            async with Hooks().sides(1) as (receiver,):
                copy_specs = [receiver.copy_spec(*block) for block in told.blocks]
                os.kill(told.source.pid, signal.SIGSTOP)
                assert set(await receiver.take(told.source, copy_specs[:2])) == {"done"}
                os.kill(told.source.pid, signal.SIGKILL)
                assert set(await receiver.take(told.source, copy_specs)) == {"done"}
                receiver.transport.forget(told.source)

        uvloop.run(main())


@pytest.mark.ci
def test_another_user_is_refused():
    """The kernel decides; what it says is an outcome."""
    if os.getuid():
        pytest.skip("only root can be another user")
    with SenderProcess("fdasync_fleet.transfer.shm:ShmTransport", 1, (100,)) as told:
        made = Peer.map(told.source)
        assert isinstance(made, Peer)
        made.close()
        child = os.fork()
        if not child:
            os.setgid(65534)
            os.setuid(65534)
            found = Peer.map(told.source)
            os._exit(0 if isinstance(found, Outcome) and "cannot be mapped" in found.problem else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


async def test_a_source_has_so_many_regions():
    regions = [SharedRegion.create(f"{number}", 4096) for number in range(16)]
    transport = ShmTransport()
    with pytest.raises(InvariantBroken, match="16 regions"):
        await transport.open(regions)
    await transport.aclose()
    for region in regions:
        region.close()
