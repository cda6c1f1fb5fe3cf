"""The writer under the JSON log: whole lines, and what it tells of those that were lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource

import pytest

from fdasync.telemetry.line_writer import LineWriter
from fdasync.testing import until
from tests.telemetry.lines import read_all

# -- the writer ---------------------------------------------------------------------------------------


def note(count: int, problem: str) -> bytes:
    return f"{count} lost: {problem}\n".encode()


@contextlib.contextmanager
def file_limit(nbytes: int):
    """Files of this process grow no further: a write gets so far and no farther."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_failing_write_loses_what_waits_and_later_lines_are_tried(tmp_path):
    path = tmp_path / "log"
    writer = LineWriter(path, 4096, note)
    with file_limit(100):
        for _ in range(3):
            assert writer.offer(b"a" * 49 + b"\n")
        await until(lambda: writer.dropped == 1)
    assert "too large" in writer.problem
    assert writer.offer(b"whole\n")
    await writer.aclose(300.0)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    assert read_all(fd).splitlines()[2:] == [b"1 lost: [Errno 27] File too large", b"whole"]
    os.close(fd)
    assert (writer.written, writer.dropped, writer.waiting_nbytes) == (3, 1, 0)


async def test_two_closes_at_once_wait_for_the_same_end():
    reader, fd = os.pipe()
    writer = LineWriter(fd, 1 << 20, note)
    os.close(fd)
    os.set_blocking(reader, False)
    assert writer.offer(b"x" * 200_000)
    closes = [asyncio.ensure_future(writer.aclose(300.0)) for _ in range(2)]
    async with asyncio.timeout(300):
        while not all(close.done() for close in closes):
            await asyncio.sleep(0)
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 1 << 20)
    os.close(reader)


async def test_what_was_lost_is_told_until_it_got_through(tmp_path):
    path = tmp_path / "log"
    writer = LineWriter(path, 100, note)
    with file_limit(0):
        for expected in (1, 2, 3):
            # behind a note of those before it, from the second on
            assert writer.offer(b"lost\n")
            await until(lambda expected=expected: writer.dropped == expected)
    writer.dropped += 4
    assert not writer.offer(bytes(101))
    assert not writer.offer(b"x" * 90 + b"\n"), "there is room for it, and not for the note"
    assert writer.offer(b"y\n")
    assert writer.offer(b"z\n")
    await writer.aclose(300.0)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    assert read_all(fd).splitlines() == [b"9 lost: [Errno 27] File too large", b"y", b"z"]
    os.close(fd)


@pytest.mark.both_loops
async def test_lines_longer_than_a_pipe():
    end, target = os.pipe()
    writer = LineWriter(target, 1 << 20, note)
    lines = [bytes([65 + number]) * 100_000 + b"\n" for number in range(8)]
    for line in lines:
        assert writer.offer(line)
    assert not writer.offer(bytes(300_000)), "too much waits already"
    text = bytearray()
    async with asyncio.timeout(300):
        while len(text) < 800_008:
            text += read_all(end)
            await asyncio.sleep(0)
    assert bytes(text) == b"".join(lines)
    await until(lambda: writer.written == 8)
    assert (writer.dropped, writer.waiting_nbytes) == (1, 0)
    assert not asyncio.get_running_loop().remove_writer(writer._fd), "an idle pipe would ring all the time"
    await writer.aclose(0.0)
    await writer.aclose(0.0)
    assert not writer.offer(b"late\n")
    os.close(end)
    os.close(target)


async def test_many_lines_are_written_in_turns(tmp_path):
    writer = LineWriter(tmp_path / "log", 1 << 20, note)
    for _ in range(500):
        writer.offer(b"x\n")
    seen = [0]
    while seen[-1] < 500:
        await asyncio.sleep(0)
        seen.append(writer.written)
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 64
    await writer.aclose(1.0)


async def test_closing_waits_for_a_reader_that_comes():
    end, target = os.pipe()
    writer = LineWriter(target, 1 << 20, note)
    for _ in range(5):
        writer.offer(bytes(100_000) + b"\n")
    closing = asyncio.create_task(writer.aclose(300.0))
    text = bytearray()
    async with asyncio.timeout(300):
        while not closing.done():
            text += read_all(end)
            await asyncio.sleep(0)
    text += read_all(end)
    assert (len(text), writer.dropped) == (500_005, 0)
    os.close(end)
    os.close(target)


def test_what_others_write_to_the_same_file_stands_behind_the_lines(tmp_path):
    # `( echo before; a server; echo after ) > log`
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)

    async def serve():
        writer = LineWriter(fd, 4096, note)
        assert writer.offer(b"line\n")
        await writer.aclose(300.0)

    os.write(fd, b"before\n")
    asyncio.run(serve())
    os.write(fd, b"after\n")
    os.close(fd)
    assert (tmp_path / "log").read_bytes() == b"before\nline\nafter\n"
