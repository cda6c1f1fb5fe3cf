"""The capture buffer: expert ids of the tokens of one step, on the device, until the step's end.

Each MoE layer writes its ids into its row as it routes; at the end the used rows are copied aside on the device
(`stage`), from where they go to the host while the next step runs. It is as large as the largest step, not as the
requests: a few megabytes. Knows no sequences and no streams: all it does is put on the current stream. Called by
the plugins' runners, on CUDA and on the CPU.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fdasync.errors import BadInput, RunnerError

if TYPE_CHECKING:
    from fdasync.cache.aux import AuxSpec


class CaptureBuffer:
    """Buffer [max_step_tokens, L, K] of expert ids, and the copies of it that are on their way to the host.

    A pass is `begin`, one `put` or `claim` per layer row in any order, `expect`, `stage`. Where passes are replayed
    from a CUDA graph, Python runs none of the `put`s: call `begin` and `expect` when the graph is captured, only
    `stage` after a replay. `begin`, `claim` and `expect` do nothing on the device.

    Attributes:
        spec: shape (L, K) and dtype of a token's rows.
        max_step_tokens: most tokens of a pass.
        debug: digits of positions are written instead of ids (`routing_debug`, see `fdasync.cache.debug_rows`).
        buffer: [max_step_tokens, L, K] uint8, or int16 that holds the bits of uint16; zero where nothing was ever
            written, so columns past a layer's own k stay zero. Its own; never replaced.
    """

    def __init__(self, max_step_tokens: int, spec: AuxSpec, device: torch.device, *, debug: bool = False) -> None:
        """Allocate the buffer, zeroed.

        Raises BadInput: `spec` is not uint8 or uint16 (L, K), or a number is below 1.
        """
        if len(spec.shape) != 2 or spec.dtype not in ("uint8", "uint16"):
            raise BadInput("spec", f"{spec.dtype} {spec.shape} where uint8 or uint16 (layers, k) was expected")
        for name, number in (("max_step_tokens", max_step_tokens), ("spec", math.prod(spec.shape))):
            if number < 1:
                raise BadInput(name, "is below 1")
        self.spec = spec
        self.max_step_tokens = max_step_tokens
        self.debug = debug
        dtype = torch.uint8 if spec.dtype == "uint8" else torch.int16
        shape = (max_step_tokens, *spec.shape)
        self.buffer = torch.zeros(shape, dtype=dtype, device=device)
        self._filled: set[int] = set()
        self._kernel = device.type == "cuda"
        self._bits, digits = (8, 4) if spec.dtype == "uint8" else (16, 2)
        layers, slots = spec.shape
        cell = torch.arange(layers * slots, dtype=torch.int64).view(layers, slots)
        # made now: a host tensor must not be copied to the device while a graph is captured
        self._shifts = (cell % digits * self._bits).to(device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, without what `stage` gives away."""
        return self.buffer.nbytes

    @property
    def filled(self) -> int:
        """Layer rows that were written since `begin`."""
        return len(self._filled)

    def begin(self) -> None:
        """Begin a pass: no row is filled. What the rows hold stays until it is written over."""
        self._filled.clear()

    def expect(self) -> None:
        """Raise RunnerError unless every layer row was written since `begin`."""
        if len(self._filled) != self.spec.shape[0]:
            missing = sorted(set(range(self.spec.shape[0])) - self._filled)
            raise RunnerError(
                f"routing of {len(self._filled)} layers was captured, {self.spec.shape[0]} were to be; rows without: "
                + ", ".join(map(str, missing))
            )

    def put(self, ids: torch.Tensor, row: int, k: int, positions: torch.Tensor | None = None) -> None:
        """Write one layer's ids of the pass's tokens into buffer[:T, row, :k]; one kernel, no synchronising.

        May be captured in a CUDA graph. Under `debug` the digits of the positions are written instead, to all K
        slots, by a few kernels.

        Args:
            ids: [T, k] int64 or int32, any strides, on the buffer's device. Read when the stream gets there.
            row: layer row.
            k: ids per token of this layer.
            positions: [T] int64 absolute positions; needed under `debug`, else not looked at.

        Raises:
            RunnerError: ids of another shape or dtype, more tokens than a pass has, a row written twice in a pass,
                no positions under `debug`.
        """
        if ids.dim() != 2 or ids.shape[1] != k or ids.dtype not in (torch.int64, torch.int32):
            raise RunnerError(f"expert ids {ids.dtype} of shape {tuple(ids.shape)} where [tokens, {k}] was expected")
        if self.debug:
            self._put_digits(len(ids), row, k, positions)
            return
        place = self.claim(row, len(ids), k)
        if self._kernel:
            # imported here: a machine without CUDA may have no triton either
            from fdasync.gpu.kernels.router import write_ids

            write_ids(ids, place)
        else:
            place.copy_(ids)

    def claim(self, row: int, count: int, k: int) -> torch.Tensor:
        """The place of one layer's ids of `count` tokens, for a kernel that writes it itself; counts as written.

        Returns:
            buffer[:count, row, :k], a view: rows are strided, columns are not.

        Raises:
            RunnerError: more tokens than a pass has, or a row that is written twice in a pass.
        """
        layers, slots = self.spec.shape
        if not 0 <= row < layers or not 0 < k <= slots:
            raise RunnerError(f"layer row {row} with {k} ids a token where rows are [{layers}, {slots}]")
        if count > self.max_step_tokens:
            raise RunnerError(f"expert ids of {count} tokens, a step has at most {self.max_step_tokens}")
        if row in self._filled:
            raise RunnerError(f"routing of layer row {row} was captured twice in a pass")
        self._filled.add(row)
        return self.buffer[:count, row, :k]

    def stage(self, count: int) -> torch.Tensor:
        """Copy the rows of the pass's first `count` tokens aside, on the device and the current stream.

        So the next pass may write over the buffer while these rows are on their way to the host. Call it on the stream
        that computes, after the pass.

        Returns:
            [count, L, K] of the buffer's dtype, contiguous, on the device; the caller's, who keeps it until whatever
            reads it on another stream is done.

        Raises:
            RunnerError: more tokens than a pass has.
        """
        if not 0 <= count <= self.max_step_tokens:
            raise RunnerError(f"rows of {count} tokens, a step has at most {self.max_step_tokens}")
        return self.buffer[:count].clone()

    def _put_digits(self, count: int, row: int, k: int, positions: torch.Tensor | None) -> None:
        if positions is None or positions.dim() != 1 or len(positions) != count:
            raise RunnerError(f"routing_debug needs the absolute positions of the pass's {count} tokens")
        self.claim(row, count, k)
        digits = (positions[:, None] + 1) >> self._shifts[row][None, :]
        self.buffer[:count, row] = (digits + row & (1 << self._bits) - 1).to(self.buffer.dtype)
