"""New weights into a worker: chunks of shared memory in turn, typed errors, every end of the process."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from fdasync.errors import InvariantBroken, RunnerError, WeightsBroken, WeightsRejected, WorkerDied
from fdasync.ipc.errors import Failed
from fdasync.ipc.shared_memory import SharedRegion
from fdasync.runner.base import RunnerLimits, TensorMeta
from fdasync.runner.worker.main import RunnerService
from fdasync.runner.worker.proxy import WorkerRunner
from fdasync.runner.worker.weight_transfer import Piece, TensorReceiver, TensorSender
from fdasync.testing.harness.leaks import children
from tests.support.helpers import case_settings
from tests.support.plugins import install_runners

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.usefixtures("forked_children")

DTYPES = ("uint8", "bfloat16", "float32", "int64")
ITEMSIZE = {"uint8": 1, "bfloat16": 2, "float32": 4, "int64": 8}


def meta(name, dtype, count):
    return TensorMeta(name, dtype, (count,))


def bytes_of(count, seed):
    return np.random.default_rng(seed).integers(0, 255, count, np.uint8).tobytes()


# -- the two sides without a process ----------------------------------------------------------------------


class Recorder:
    """Takes pieces; may fail at one of them."""

    def __init__(self, metas, fail_at=None):
        self.itemsizes = [ITEMSIZE[tensor.dtype] for tensor in metas]
        self.held = [bytearray() for _ in metas]
        self.pieces = 0
        self.fail_at = fail_at

    async def begin_tensors(self, tensors):
        assert len(tensors) == len(self.held)

    async def write_tensor(self, number, offset_nbytes, data):
        if self.pieces == self.fail_at:
            self.fail_at = None
            raise WeightsBroken(f"piece {self.pieces} is bad")
        self.pieces += 1
        assert offset_nbytes == len(self.held[number]), "out of order"
        assert len(data) % self.itemsizes[number] == 0, "a torn element"
        self.held[number] += data


class Line:
    """Carries calls to a receiver and answers late: a chunk is read just before its answer."""

    def __init__(self, metas, chunk_nbytes, fail_at=None):
        self.runner = Recorder(metas, fail_at)
        self.sender = TensorSender(metas, [self.ask], chunk_nbytes)
        self.receiver = TensorReceiver(self.runner)
        self.chunk_nbytes = 0
        # chunks, and their pieces
        self.sent: list[tuple[int, list[Piece]]] = []
        self.unanswered = 0
        self.most_unanswered = 0
        self.late = asyncio.Queue()
        self.task = asyncio.ensure_future(self.answer())
        (self.begun,) = self.sender.begin()

    def ask(self, function, *args):
        done = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda done: done.cancelled() or done.exception())
        if function is TensorReceiver.begin_tensors:
            tensors, chunks = args
            self.chunk_nbytes = chunks[0].nbytes
            args = tensors, [SharedRegion(os.dup(chunk.fd), chunk.nbytes) for chunk in chunks]
        else:
            self.sent.append(args)
            self.unanswered += 1
            self.most_unanswered = max(self.most_unanswered, self.unanswered)
        self.late.put_nowait((function, args, done))
        return done

    async def answer(self):
        while True:
            function, args, done = await self.late.get()
            if function is not TensorReceiver.begin_tensors:
                for _ in range(20):
                    await asyncio.sleep(0)
                self.unanswered -= 1
            try:
                await function(self.receiver, *args)
            except WeightsBroken as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    async def send(self, values, cuts):
        for number, value in enumerate(values):
            offset = 0
            for cut in [*cuts[number], len(value)]:
                await self.sender.write(number, offset, memoryview(value)[offset:cut])
                offset = cut
        await self.sender.end()

    async def aclose(self):
        await self.begun
        self.task.cancel()
        await asyncio.wait([self.task])
        self.sender.close()
        self.sender.close()
        self.receiver.close()


def run(test):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test, 300))


@st.composite
def updates(draw):
    metas, values, cuts = [], [], []
    for number in range(draw(st.integers(1, 12))):
        dtype = draw(st.sampled_from(DTYPES))
        count = draw(st.one_of(st.integers(0, 40), st.integers(0, 3000)))
        size = ITEMSIZE[dtype]
        metas.append(meta(f"t{number}", dtype, count))
        values.append(bytes_of(count * size, number))
        cuts.append(sorted(size * cut for cut in draw(st.lists(st.integers(0, count), max_size=3))))
    return metas, values, cuts


@pytest.mark.ci
@case_settings(60)
@given(updates(), st.sampled_from([1, 4096, 8192, 1 << 20]))
def test_every_byte_arrives_in_order_in_whole_elements(update, chunk_nbytes):
    metas, values, cuts = update

    async def test():
        line = Line(metas, chunk_nbytes)
        try:
            await line.send(values, cuts)
            assert [bytes(held) for held in line.runner.held] == values
            assert line.most_unanswered <= 2
            chunks = [chunk for chunk, _ in line.sent]
            assert chunks == [number % 2 for number in range(len(chunks))], "chunks are used in turn"
            # nothing is sent for nothing
            assert all(pieces for _, pieces in line.sent)
        finally:
            await line.aclose()

    run(test())


async def test_small_tensors_share_a_chunk():
    metas = [meta(f"t{number}", "bfloat16", 7) for number in range(100)]
    line = Line(metas, 1 << 20)
    await line.send([bytes_of(14, number) for number in range(100)], [[]] * 100)
    assert len(line.sent) == 1
    assert len(line.sent[0][1]) == 100
    await line.aclose()


@pytest.mark.parametrize(
    ("limit", "nbytes", "chunk"), [(1 << 28, 5000, 8192), (4096, 1 << 20, 4096), (1 << 28, 0, 4096)]
)
async def test_chunks_are_no_larger_than_what_is_sent(limit, nbytes, chunk):
    line = Line([meta("t", "uint8", nbytes)], limit)
    assert line.chunk_nbytes == chunk
    await line.send([bytes_of(nbytes, 1)], [[]])
    await line.aclose()


async def test_the_loop_has_its_turn_while_a_chunk_is_filled():
    size = 8 << 20
    line = Line([meta("t", "uint8", size)], 1 << 28)
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    await line.sender.write(0, 0, memoryview(bytes_of(size, 1)))
    counting.cancel()
    assert turns >= 8
    assert not line.sent, "the turns were those of a wait for the worker"
    await line.aclose()


@pytest.mark.parametrize("fail_at", [0, 1, 5])
async def test_a_failure_is_raised_and_nothing_is_written_after_it(fail_at):
    metas = [meta("t", "uint8", 40_000)]
    line = Line(metas, 4096, fail_at)
    with pytest.raises(WeightsBroken, match=f"piece {fail_at} is bad"):
        await line.send([bytes_of(40_000, 1)], [[]])
    while line.unanswered:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert line.runner.pieces == fail_at
    assert len(line.sent) <= fail_at + 2, "chunks were sent long after the failure"
    await line.aclose()


async def test_a_failure_in_the_last_chunk_is_raised_at_the_end():
    line = Line([meta("t", "uint8", 10)], 4096, fail_at=0)
    await line.sender.write(0, 0, memoryview(bytes(10)))
    with pytest.raises(WeightsBroken, match="piece 0 is bad"):
        await line.sender.end()
    await line.aclose()


def test_a_dtype_that_does_not_exist_is_refused():
    with pytest.raises(WeightsRejected, match="float1"):
        TensorSender([meta("t", "float1", 3)], [pytest.fail])


@pytest.mark.parametrize("error", [WeightsRejected("a"), WeightsBroken("b")])
def test_errors_of_weights_cross_the_wire_whole(error):
    back = RunnerService.errors.unpack(
        msgspec.msgpack.decode(msgspec.msgpack.encode(RunnerService.errors.pack(1, error)), type=Failed)
    )
    assert (type(back), back.problem) == (type(error), error.problem)


# -- through a real worker ----------------------------------------------------------------------------------

_PLUGIN = """
    import asyncio, hashlib, os, time
    from fdasync.errors import WeightsBroken, WeightsRejected
    from fdasync.runner.synthetic import SyntheticRunner

    class Slow(SyntheticRunner):
        # keeps what it is given; its answer to `load_folder` is the digest of that, or what the path says
        async def begin_tensors(self, tensors):
            if any(tensor.name == "bad" for tensor in tensors):
                raise WeightsRejected("bad is not a tensor of this model")
            self.tensors, self.held = tensors, [bytearray() for _ in tensors]

        async def write_tensor(self, number, offset_nbytes, data):
            name = self.tensors[number].name
            if name == "die":
                os._exit(4)
            if name == "hang":
                time.sleep(600)
            if name == "broken":
                raise WeightsBroken("the disk of the mind is full")
            if name == "odd":
                raise ZeroDivisionError("by zero")
            assert offset_nbytes == len(self.held[number])
            self.held[number] += data

        async def end_tensors(self):
            if any(tensor.name == "late" for tensor in self.tensors):
                raise WeightsBroken("at the very end")

        async def load_folder(self, path):
            if path == "rejected":
                raise WeightsRejected("shard 2 is missing")
            if path == "broken":
                raise WeightsBroken("shard 2 is damaged")
            if path == "unsayable":
                return object()
            if path == "hang":
                await asyncio.Event().wait()
            return hashlib.sha256(b"|".join(self.held)).hexdigest()
"""


@pytest.fixture
def slow_runner(tmp_path, monkeypatch):
    install_runners(tmp_path, monkeypatch, _PLUGIN, {"slow": "fdasync_bad:Slow"})


@asynccontextmanager
async def opened(chunk_nbytes: int = 4096, close_deadline_s: float = 600.0) -> AsyncIterator[WorkerRunner]:
    """A worker with that runner; it must be gone at the end, however that comes."""
    limits = RunnerLimits(max_running=4, max_step_tokens=64, num_blocks=8, block_tokens=16)
    worker = WorkerRunner(
        "slow", {"num_moe_layers": 0}, limits, close_deadline_s=close_deadline_s, chunk_nbytes=chunk_nbytes
    )
    try:
        async with asyncio.timeout(300):
            await worker.open()
            await worker.bind(8, None)
            yield worker
    finally:
        await worker.aclose()
        assert children() == []


async def send(worker, tensors):
    await worker.begin_tensors([meta(name, "uint8", len(value)) for name, value in tensors])
    for number, (_, value) in enumerate(tensors):
        await worker.write_tensor(number, 0, memoryview(value))
    await worker.end_tensors()


@pytest.mark.both_loops
async def test_tensors_arrive_and_arrive_again(slow_runner):
    async with opened() as worker:
        for seed in range(2):
            tensors = [(f"t{number}", bytes_of(size, seed)) for number, size in enumerate((10, 20_000, 0, 4096, 1))]
            await send(worker, tensors)
            want = hashlib.sha256(b"|".join(value for _, value in tensors)).hexdigest()
            assert await worker.load_folder("any") == want


async def test_a_refusal_names_the_tensor_and_is_no_failure(slow_runner):
    async with opened() as worker:
        with pytest.raises(WeightsRejected) as caught:
            await worker.begin_tensors([meta("bad", "uint8", 3)])
        assert caught.value.problem == "bad is not a tensor of this model"
        with pytest.raises(InvariantBroken, match="without begin_tensors"):
            await worker.write_tensor(0, 0, memoryview(b"123"))
        with pytest.raises(InvariantBroken, match="without begin_tensors"):
            await worker.end_tensors()
        await send(worker, [("t", b"123")])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("broken", "the disk of the mind is full"),
        ("odd", "ZeroDivisionError: by zero"),
        ("late", "at the very end"),
    ],
)
async def test_a_failure_half_way_is_told_and_the_next_update_works(slow_runner, name, problem):
    async with opened() as worker:
        with pytest.raises(WeightsBroken) as caught:
            await send(worker, [("t", bytes(9000)), (name, bytes(30_000))])
        assert caught.value.problem == problem
        await send(worker, [("t", b"123")])
        assert await worker.load_folder("any") == hashlib.sha256(b"123").hexdigest()


@pytest.mark.parametrize(("path", "error"), [("rejected", WeightsRejected), ("broken", WeightsBroken)])
async def test_what_a_folder_lacks_is_told(slow_runner, path, error):
    async with opened() as worker:
        with pytest.raises(error, match="shard 2"):
            await worker.load_folder(path)


async def test_a_worker_that_dies_half_way_is_told(slow_runner):
    async with opened() as worker:
        told = []
        worker.on_failure = told.append
        with pytest.raises(WorkerDied) as caught:
            await send(worker, [("t", bytes(9000)), ("die", bytes(100_000))])
        assert caught.value.exit_status == 4
        assert [type(error) for error in told] == [WorkerDied]
        with pytest.raises(WorkerDied):
            await worker.load_folder("any")


async def test_a_worker_that_is_killed_while_it_loads_is_told(slow_runner):
    async with opened() as worker:
        loading = asyncio.ensure_future(worker.load_folder("hang"))
        await asyncio.sleep(0)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await loading


async def test_an_answer_that_cannot_be_sent_is_an_error_that_says_why(slow_runner):
    async with opened() as worker:
        with pytest.raises(RunnerError, match="TypeError: Encoding objects of type object"):
            await worker.load_folder("unsayable")
        await send(worker, [("t", b"123")])
        assert await worker.load_folder("any") == hashlib.sha256(b"123").hexdigest()


@pytest.mark.parametrize("how", ["folder", "tensors"])
async def test_closing_a_worker_in_the_middle_of_an_update_kills_it(slow_runner, how):
    async with opened() as worker:
        update = worker.load_folder("hang") if how == "folder" else send(worker, [("hang", bytes(100_000))])
        updating = asyncio.ensure_future(update)
        for _ in range(10):
            await asyncio.sleep(0)
        # it would not read the question, and the deadline for an answer is later than this
        async with asyncio.timeout(300):
            await worker.aclose()
        with pytest.raises(RunnerError, match="closed"):
            await updating


@pytest.mark.parametrize("announced", [False, True])
async def test_an_update_that_nobody_waits_for_any_more_makes_room_for_the_next(slow_runner, announced):
    async with opened() as worker:
        if announced:
            await worker.begin_tensors([meta("t", "uint8", 1 << 20)])
            updating = asyncio.ensure_future(worker.write_tensor(0, 0, memoryview(bytes(1 << 20))))
        else:
            updating = asyncio.ensure_future(worker.begin_tensors([meta("t", "uint8", 1 << 20)]))
        await asyncio.sleep(0)
        # whether it has ended by now is no matter
        updating.cancel()
        await asyncio.wait([updating])
        await send(worker, [("t", b"123")])
        assert await worker.load_folder("any") == hashlib.sha256(b"123").hexdigest()
