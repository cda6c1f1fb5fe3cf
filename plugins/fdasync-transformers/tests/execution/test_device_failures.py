"""The path of GPUs when something fails or is refused: nothing is left, and the failure names its cause."""

from __future__ import annotations

import importlib
import pkgutil
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import fdasync_kernels
import pytest
import torch
from fdasync_transformers import TransformersConfig, TransformersRunner
from fdasync_transformers.execution import copies, gpu_services, step, triton_paging
from fdasync_transformers.execution.executor import Executor
from fdasync_transformers.execution.model_memory import ModelMemory
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from step_driver import Driver
from written import write_tiny_checkpoint

from fdasync.cache.aux_arena import AuxArena
from fdasync.cache.host_arena import HostArena
from fdasync.errors import ConfigError, InvariantBroken, RunnerError, UnsupportedModel
from fdasync.events.actions import Chunk
from fdasync.gpu.block_copies import BlockCopies
from fdasync.gpu.ports.fake import FakePort
from fdasync.runner.base import RunnerLimits

if TYPE_CHECKING:
    from pathlib import Path

from device_path import DEVICE, ON_GPU


@pytest.mark.ci
async def test_a_capture_that_gives_other_rows_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE}, routing_debug=True)
    (capture,) = driver.runner.bound.executor._bound.aux.producers
    honest = capture.stage
    monkeypatch.setattr(capture, "stage", lambda count: honest(count).flip(0))
    one = driver.sequence([5, 6, 7, 8, 9], 2)
    with pytest.raises(RunnerError, match="row of position 0"):
        await driver.run([one])
    with pytest.raises(RunnerError, match="nothing more after a failure"):
        await driver.step()
    await driver.close()


@pytest.mark.ci
async def test_a_model_that_gives_nan_fails_the_step_by_row(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config={"self_check": False, "cuda_graphs": False, **DEVICE})
    with torch.no_grad():
        driver.runner.opened.model.step_model.model.lm_head.weight[7] = float("nan")
    with pytest.raises(RunnerError, match="row 0 of the logits has NaN"):
        await driver.run([driver.sequence([5, 6, 7], 2)])
    await driver.close()


@pytest.mark.skipif(ON_GPU, reason="what is refused where there is no GPU")
async def test_kernels_on_a_cpu_need_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    # kernels that were imported without it would be compiled in every later test
    for module in pkgutil.walk_packages(fdasync_kernels.__path__, "fdasync_kernels."):
        importlib.import_module(module.name)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
        await Driver.open(tmp_path, config=DEVICE)


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 1), (1, 1, 2), (-1,), (1, 5)])
async def test_sizes_of_graphs_that_make_no_sense_are_refused(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(ConfigError, match="graph_sizes"):
        await Driver.open(tmp_path, config={"device": "cpu", "graph_sizes": sizes})


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("error", [RuntimeError("no room"), torch.OutOfMemoryError("no room")])
async def test_what_fails_to_bind_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    """The port of the device path holds a timer; pages of the host tier are registered with the driver."""
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    closed = []
    honest = Executor.aclose

    async def close(self: Executor) -> None:
        await honest(self)
        closed.append(self)

    def refuses(*args: object) -> None:
        raise error

    monkeypatch.setattr(Executor, "aclose", close)
    monkeypatch.setattr(Executor, "warm", refuses)
    with pytest.raises(ConfigError if isinstance(error, torch.OutOfMemoryError) else RuntimeError, match="no room"):
        await Driver.open(tmp_path, config={"self_check": False, **DEVICE})
    assert len(closed) == 1
    assert closed[0]._services.port._stopped

    # and what fails before there is an executor closes the port all the same
    ports = []

    class Port(FakePort):
        async def aclose(self, deadline_s: float = 10.0) -> None:
            ports.append(self)
            await super().aclose(deadline_s)

    monkeypatch.setattr(gpu_services, "FakePort", Port)
    monkeypatch.setattr(step, "DeviceLanes", refuses)
    with pytest.raises(ConfigError if isinstance(error, torch.OutOfMemoryError) else RuntimeError, match="no room"):
        await Driver.open(tmp_path, config={"self_check": False, **DEVICE})
    assert len(ports) == 1


class PinsOnly:
    """A driver that registers pages, and knows which are."""

    has_batch = False

    def __init__(self) -> None:
        self.pages: dict[int, int] = {}
        self.calls = 0

    def register(self, address: int, nbytes: int) -> int:
        self.calls += 1
        self.pages[address] = nbytes
        return address

    def unregister(self, address: int) -> None:
        del self.pages[address]


async def test_pages_of_blocks_are_not_pinned_any_more_where_those_of_snapshots_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_checkpoint(tmp_path, "lfm2_moe")
    limits = RunnerLimits(
        model=str(tmp_path), max_running=2, max_step_tokens=16, max_context_tokens=64, block_tokens=4, num_blocks=8,
        num_snapshots=2,
    )  # fmt: skip
    runner = TransformersRunner(TransformersConfig(dtype="float32", **{**DEVICE, "self_check": False}), limits)
    capacity = await runner.open()
    arena = AuxArena.create(8, 4, capacity.aux_specs)
    host = HostArena.create(4, capacity.block_nbytes)
    # of another model: its pages are not even registered
    snapshots = HostArena.create(4, capacity.snapshot_nbytes // 2)
    driver: Any = PinsOnly()
    monkeypatch.setattr(copies, "BlockCopies", partial(BlockCopies, driver=driver))
    try:
        with pytest.raises(InvariantBroken, match="host blocks have"):
            await runner.bind(8, arena, host, snapshots)
        assert driver.calls
        assert driver.pages == {}
    finally:
        await runner.aclose()
        for one in (arena, host, snapshots):
            one.close()


async def test_a_launch_that_fails_half_way_gives_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was queued before it runs on: buffers return with its end, not before, and not never."""
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE}, pipeline_depth=2)
    executor: Any = driver.runner.bound.executor
    # operation by operation
    executor.passes.graphs, executor.passes.mixed, executor.passes.flat_tokens = None, None, 0

    def breaks(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("no room for this step")

    monkeypatch.setattr(executor.model, "forward", breaks)
    with pytest.raises(RunnerError, match="no room for this step"):
        await driver.run([driver.sequence([5, 6, 7], 2)])
    services = executor._services
    await driver.close()
    assert (services.events.outstanding, services.pinned.outstanding, services.port.lost) == ({}, {}, 0)


@pytest.mark.ci
async def test_a_step_that_cannot_start_fails_behind_those_in_flight(tmp_path: Path) -> None:
    """Whether or not a task still waits for them."""
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    for give_up in (False, True):
        driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE}, pipeline_depth=2)
        one = driver.sequence([5, 6, 7], 2)
        ended: list[str] = []
        flight = driver.launch(starts=[driver.start(one)], chunks=[Chunk(one.key, 3, True)])
        inner = driver.runner.bound.executor._flights.last
        inner.add_done_callback(lambda _, ended=ended: ended.append("the step"))
        wrong = driver.launch(leaves=(99,))
        wrong.add_done_callback(lambda _, ended=ended: ended.append("the wrong one"))
        if give_up:
            flight.cancel()
        with pytest.raises(RunnerError, match="99"):
            await wrong
        assert ended == ["the step", "the wrong one"]
        await driver.close()


@pytest.mark.ci
async def test_a_closed_runner_holds_nothing_when_it_empties_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE})
    runner = driver.runner
    held = [weakref.ref(runner.bound.executor._bound.pool), weakref.ref(runner.opened.model.step_model.model)]
    seen: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.extend(ref() is not None for ref in held))
    if not ON_GPU:
        # of a GPU, for all that the close looks at
        runner._memory = ModelMemory(torch.device("cuda", 0))
    await driver.close()
    assert seen == [False, False]


@pytest.mark.ci
async def test_after_a_device_error_steps_fail_and_the_close_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of a device that failed raises; a close makes none that it need not."""
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE}, pipeline_depth=2)
    executor = driver.runner.bound.executor

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    one = driver.sequence([5, 6, 7], 3)
    flight = driver.launch(starts=[driver.start(one)], chunks=[Chunk(one.key, 3, True)])
    executor._services.port._fail("an illegal memory access was encountered")
    with pytest.raises(RunnerError, match="illegal memory access"):
        await flight
    with pytest.raises(RunnerError, match="nothing more after a failure"):
        await driver.step()
    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    driver.runner._memory = ModelMemory(torch.device("cuda", 0))
    await driver.close()


@pytest.mark.nightly
async def test_the_self_check_would_find_a_decode_kernel_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")

    def zeros(*args: object, out: torch.Tensor, **kwargs: object) -> None:
        out.zero_()

    monkeypatch.setattr(triton_paging, "attend_decode", zeros)
    with pytest.raises(UnsupportedModel, match="differs from separate sequences"):
        await Driver.open(tmp_path, config=DEVICE)


@pytest.mark.gpu
async def test_torch_attention_is_refused_on_a_gpu(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(ConfigError, match="is for CPUs"):
        await Driver.open(tmp_path, config={"kernels": "torch", "device": "cuda"})
