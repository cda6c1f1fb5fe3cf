"""Where a runner's weights and blocks lie, and how their memory is released and taken back.

All that holds their addresses (layers, graphs, copies) goes on unchanged: on a GPU they lie in the driver's virtual
memory, whose addresses stay while the memory behind them goes (`DeviceMemory`); on a CPU pages go in the same way
(`HostMemory`). Knows tensors; knows no steps, and no names of weights. Made by `runner.py` before it
loads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from abc import ABC, abstractmethod
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


class ModelMemory(ABC):
    """See the module.

    Attributes:
        released: the parts whose memory is not there.
    """

    def __init__(self) -> None:
        self.released: set[MemoryPart] = set()
        self._model: PreTrainedModel | None = None
        self._pool: KVPool | None = None
        self._states: States | None = None
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def held_nbytes(self) -> int:
        """Bytes on a device that torch does not know of."""
        return 0

    def maker(self, model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What makes memory for each of the model's tensors, which are on the meta device; None: torch does."""
        self._model = model
        return None

    def allocator(self) -> Callable[[int], torch.Tensor] | None:
        """What makes the memory of the blocks, as `KVPool` takes it, and of recurrent state; None: torch does."""
        return None

    def bind(self, pool: KVPool, states: States | None = None) -> None:
        """Take in the blocks, which lie in memory of `allocator`, and the recurrent state: it goes with them."""
        self._pool, self._states = pool, states

    def release(self, parts: Sequence[MemoryPart], *, keep_weights: bool) -> None:
        """As `Runner.release_memory`; no work of the device is in flight."""
        if "weights" in parts:
            if "weights" not in self.released:
                self._keep_buffers()
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
            elif part == "kv_cache" and self._pool is not None:
                self._regain_blocks()
        except (RunnerError, RuntimeError, MemoryError) as error:
            raise WakeFailed(part, str(error)) from error
        self.released.remove(part)

    def forget(self) -> None:
        """Hold the model and its blocks no more: nothing is released or taken back from now on. Idempotent."""
        self._model = self._pool = self._states = None
        self._kept = []

    def close(self) -> None:
        """Free what torch does not; idempotent. No tensor is used any more."""
        self.forget()

    def _keep_buffers(self) -> None:
        """Copy tensors that no update brings, and that may lie beside weights: some kilobytes."""
        assert self._model is not None
        self._kept = [(buffer, buffer.to("cpu", copy=True)) for buffer in self._model.buffers()]

    @abstractmethod
    def _release_weights(self, *, keep: bool, again: bool) -> None:
        """`again`: they are released, and an earlier call kept them."""

    @abstractmethod
    def _regain_weights(self) -> None: ...

    @abstractmethod
    def _release_blocks(self) -> None: ...

    @abstractmethod
    def _regain_blocks(self) -> None: ...


class HostMemory(ModelMemory):
    """A CPU's memory: the kernel takes pages back, and gives others, with zeros, when they are touched. Kept weights
    stay where they are, in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def _release_weights(self, *, keep: bool, again: bool) -> None:  # noqa: ARG002 - the contract's
        assert self._model is not None
        if not keep:
            storages = [tensor.untyped_storage() for tensor in (*self._model.parameters(), *self._model.buffers())]
            # several tensors may lie in one
            for storage in {storage.data_ptr(): storage for storage in storages}.values():
                self._give(storage)

    def _regain_weights(self) -> None:
        """The kernel does, page by page."""

    def _release_blocks(self) -> None:
        if self._pool is not None:
            self._give(self._pool.blocks.untyped_storage())
        if self._states is not None:
            self._give(self._states.memory.untyped_storage())

    def _regain_blocks(self) -> None:
        """As `_regain_weights`."""

    def _give(self, storage: torch.UntypedStorage) -> None:
        """Give back the pages that lie wholly in this storage, which is private memory of this process."""
        first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes > 0 and self._madvise(first, nbytes, mmap.MADV_DONTNEED):
            raise RunnerError(f"{nbytes} bytes cannot be released: {os.strerror(ctypes.get_errno())}")


class DeviceMemory(ModelMemory):
    """A GPU's memory.

    Raises RunnerError where the driver has no virtual memory.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._driver = Driver()
        self._weights: MappedMemory | None = None
        # of KV, and of recurrent state where there is any
        self._blocks: list[MappedMemory] = []
        self._copy: HostCopy | None = None
        self._is_kept = False

    @property
    def held_nbytes(self) -> int:
        return sum(memory.nbytes for memory in (self._weights, *self._blocks) if memory is not None)

    def maker(self, model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor] | None:
        super().maker(model)
        places, total = plan_places(model)
        # what torch keeps is not free for the driver
        torch.cuda.empty_cache()
        try:
            self._weights = MappedMemory.create(self._driver, self._device, total)
        except RunnerError as error:
            raise ConfigError("model", f"its weights find no memory: {error}") from error
        return taker(self._weights.tensor(), places)

    def allocator(self) -> Callable[[int], torch.Tensor]:
        return self._allocate

    def _allocate(self, nbytes: int) -> torch.Tensor:
        torch.cuda.empty_cache()
        self._blocks.append(MappedMemory.create(self._driver, self._device, nbytes))
        return self._blocks[-1].tensor()

    def release(self, parts: Sequence[MemoryPart], *, keep_weights: bool) -> None:
        torch.cuda.synchronize(self._device)  # blocking: no step is in flight, in a worker process
        super().release(parts, keep_weights=keep_weights)
        # what torch keeps of steps that ran
        torch.cuda.empty_cache()

    def regain(self, part: MemoryPart) -> None:
        super().regain(part)
        torch.cuda.synchronize(self._device)  # blocking: no step is in flight, in a worker process

    def _release_weights(self, *, keep: bool, again: bool) -> None:
        assert self._weights is not None
        if keep and not again:
            if self._copy is None:
                self._copy = HostCopy(self._driver, self._weights.nbytes)
            try:
                self._copy.save(self._weights.address, self._stream())
            finally:
                torch.cuda.synchronize(self._device)  # blocking: as in `release`
        elif not keep and self._copy is not None:
            # an update brings others: nobody will read it
            copy, self._copy = self._copy, None
            copy.close()
        self._is_kept = keep
        self._weights.release()

    def _regain_weights(self) -> None:
        assert self._weights is not None
        self._weights.regain()
        if self._is_kept and self._copy is not None:
            self._copy.restore(self._weights.address, self._stream())
            torch.cuda.synchronize(self._device)  # blocking: as in `release`

    def _release_blocks(self) -> None:
        for memory in self._blocks:
            memory.release()

    def _regain_blocks(self) -> None:
        for memory in self._blocks:
            memory.regain()
        if self._pool is not None:
            # an old NaN in a block that is filled in part must not reach a masked sum
            self._pool.blocks.zero_()

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def close(self) -> None:
        super().close()
        weights, blocks, copy = self._weights, self._blocks, self._copy
        self._weights = self._copy = None
        self._blocks = []
        for memory in (weights, *blocks):
            if memory is not None:
                memory.close()
        if copy is not None:
            copy.close()
