"""Where a runner's weights and blocks lie, and how their memory is released and taken back: the sleep of an engine.

All that holds their addresses (layers, graphs, copies) goes on unchanged: on a GPU they lie in the driver's virtual
memory, whose addresses stay while the memory behind them goes (`DeviceMemory`); on a CPU pages go in the same way
(`HostSleep`). Knows tensors; knows no steps, and no names of weights. Made by `runner.py` before it opens.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from typing import TYPE_CHECKING

import torch

from fdasync.errors import ConfigError, InvariantBroken, RunnerError, WakeFailed
from fdasync.gpu.cudart import Driver
from fdasync.gpu.host_copy import HostCopy
from fdasync.gpu.mapped_memory import MappedMemory
from fdasync_transformers.model.places import plan_places, taker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from fdasync.request import MemoryPart
    from fdasync_transformers.model.kv import KVPool
    from fdasync_transformers.model.recurrent.states import States


class ModelMemory:
    """Torch's own memory, which can be released on a CPU.

    Attributes:
        device: where it is.
        no_sleep: why it cannot be released, for people; "": it can.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._on_gpu = device, device.type == "cuda"
        self.no_sleep = "set runner_config.sleep: its memory must lie where it can be released" if self._on_gpu else ""

    @property
    def held_nbytes(self) -> int:
        """Bytes on a device that torch does not know of."""
        return 0

    def maker(self, model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor] | None:  # noqa: ARG002 - as below
        """What makes memory for each of the model's tensors, which are on the meta device; None: torch does."""
        return None

    def allocator(self) -> Callable[[int], torch.Tensor] | None:
        """What makes the memory of the blocks, as `KVPool` takes it, and of recurrent state; None: torch does."""
        return None

    def sleep(self, model: PreTrainedModel, pool: KVPool, states: States | None) -> Sleep:
        """What releases the memory of all of them, which lie here, and takes it back: state goes with the blocks."""
        return Sleep(model, pool) if self._on_gpu else HostSleep(model, pool, states)

    def close(self) -> None:
        """Give a GPU's memory back to it; idempotent. No tensor is used any more."""
        if self._on_gpu:
            # models are reference cycles: collect them, then give their memory back to the device
            gc.collect()
            torch.cuda.empty_cache()


class DeviceMemory(ModelMemory):
    """A GPU's memory, of the driver.

    Raises RunnerError where the driver has no virtual memory.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.no_sleep = ""
        self._driver = Driver()
        # of the weights, which are made first; of KV; of recurrent state where there is any
        self._mapped: list[MappedMemory] = []
        self._copies: list[HostCopy] = []

    @property
    def held_nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._mapped)

    def maker(self, model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
        places, total = plan_places(model)
        try:
            return taker(self._allocate(total), places)
        except RunnerError as error:
            raise ConfigError("model", f"its weights find no memory: {error}") from error

    def allocator(self) -> Callable[[int], torch.Tensor]:
        return self._allocate

    def _allocate(self, nbytes: int) -> torch.Tensor:
        # what torch keeps is not free for the driver
        torch.cuda.empty_cache()
        self._mapped.append(MappedMemory.create(self._driver, self.device, nbytes))
        return self._mapped[-1].tensor()

    def sleep(self, model: PreTrainedModel, pool: KVPool, states: States | None) -> Sleep:  # noqa: ARG002 - in `blocks`
        self._copies.append(HostCopy(self._driver, self._mapped[0].nbytes))
        return DeviceSleep(model, pool, self.device, self._mapped, self._copies[-1])

    def close(self) -> None:
        super().close()
        mapped, copies = self._mapped, self._copies
        self._mapped, self._copies = [], []
        for memory in mapped:
            memory.close()
        for copy in copies:
            copy.close()


class Sleep:
    """The memory of a model and its blocks while nothing runs.

    Attributes:
        released: the parts whose memory is not there.
    """

    def __init__(self, model: PreTrainedModel, pool: KVPool) -> None:
        self.released: set[MemoryPart] = set()
        self._model = model
        self._pool = pool
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def release(self, parts: Sequence[MemoryPart], *, keep_weights: bool) -> None:
        """As `Runner.release_memory`; no work of the device is in flight."""
        if "weights" in parts:
            if "weights" not in self.released:
                # tensors that no update brings, and that may lie beside weights: some kilobytes
                self._kept = [(buffer, buffer.to("cpu", copy=True)) for buffer in self._model.buffers()]
            self._release_weights(keep=keep_weights, again="weights" in self.released)
        if "kv_cache" in parts:
            self._release_blocks()
        self.released.update(parts)

    def regain(self, part: MemoryPart) -> None:
        """As `Runner.regain_memory`. Waits for the device."""
        if part not in self.released:
            raise InvariantBroken(f"{part} was to be taken back, and never released")
        try:
            if part == "weights":
                self._regain_weights()
                # buffers may have been made in it
                with torch.inference_mode():
                    for buffer, kept in self._kept:
                        buffer.copy_(kept)
                self._kept = []
            elif part == "kv_cache":
                self._regain_blocks()
        except (RunnerError, RuntimeError, MemoryError) as error:
            raise WakeFailed(part, str(error)) from error
        self.released.remove(part)

    def _release_weights(self, *, keep: bool, again: bool) -> None:
        """`again`: they are released, and an earlier call kept them."""
        raise InvariantBroken(f"a sleep of a runner that offers none (keep={keep}, again={again})")

    def _release_blocks(self) -> None:
        raise InvariantBroken("a sleep of a runner that offers none")

    def _regain_weights(self) -> None: ...

    def _regain_blocks(self) -> None: ...


class HostSleep(Sleep):
    """Of a CPU's memory: the kernel takes pages back, and gives others, with zeros, when they are touched. Kept weights
    stay where they are, in host memory."""

    def __init__(self, model: PreTrainedModel, pool: KVPool, states: States | None) -> None:
        super().__init__(model, pool)
        self._states = states
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def _release_weights(self, *, keep: bool, again: bool) -> None:  # noqa: ARG002 - the contract's
        if not keep:
            storages = [tensor.untyped_storage() for tensor in (*self._model.parameters(), *self._model.buffers())]
            # several tensors may lie in one
            for storage in {storage.data_ptr(): storage for storage in storages}.values():
                self._give(storage)

    def _release_blocks(self) -> None:
        self._give(self._pool.blocks.untyped_storage())
        if self._states is not None:
            self._give(self._states.memory.untyped_storage())

    def _give(self, storage: torch.UntypedStorage) -> None:
        """Give back the pages that lie wholly in this storage, which is private memory of this process."""
        first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes > 0 and self._madvise(first, nbytes, mmap.MADV_DONTNEED):
            raise RunnerError(f"{nbytes} bytes cannot be released: {os.strerror(ctypes.get_errno())}")


class DeviceSleep(Sleep):
    """Of a GPU's memory, which the driver maps.

    Args:
        mapped: all of it; the weights' is the first.
        copy: for weights that are kept; the caller closes it.
    """

    def __init__(
        self, model: PreTrainedModel, pool: KVPool, device: torch.device, mapped: Sequence[MappedMemory], copy: HostCopy
    ) -> None:
        super().__init__(model, pool)
        self._device = device
        self._weights, *self._blocks = mapped
        self._copy = copy
        self._is_kept = False

    def release(self, parts: Sequence[MemoryPart], *, keep_weights: bool) -> None:
        torch.cuda.synchronize(self._device)  # blocking: no step is in flight, in a worker process
        super().release(parts, keep_weights=keep_weights)
        # what torch keeps of steps that ran
        torch.cuda.empty_cache()

    def regain(self, part: MemoryPart) -> None:
        super().regain(part)
        torch.cuda.synchronize(self._device)  # blocking: no step is in flight, in a worker process

    def _release_weights(self, *, keep: bool, again: bool) -> None:
        if keep and not again:
            try:
                self._copy.save(self._weights.address, self._stream())
            finally:
                torch.cuda.synchronize(self._device)  # blocking: as in `release`
        elif not keep:
            # an update brings others: nobody will read it
            self._copy.close()
        self._is_kept = keep
        self._weights.release()

    def _regain_weights(self) -> None:
        self._weights.regain()
        if self._is_kept:
            self._copy.restore(self._weights.address, self._stream())
            torch.cuda.synchronize(self._device)  # blocking: as in `release`

    def _release_blocks(self) -> None:
        for memory in self._blocks:
            memory.release()

    def _regain_blocks(self) -> None:
        for memory in self._blocks:
            memory.regain()
        # an old NaN in a block that is filled in part must not reach a masked sum
        self._pool.blocks.zero_()

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)
