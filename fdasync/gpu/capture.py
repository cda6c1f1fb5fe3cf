"""Rows of the tokens of one step, on the device, until the step's end: `StepRows` of any aux spec, `CaptureBuffer` of
expert ids.

Each layer writes its values into its row as it computes. At the end `stage` copies the used rows aside on the device,
and they go to the host while the next step runs. A buffer is as large as the largest step, not as the requests: a few
megabytes. Knows no sequences and no streams: all work goes to the current stream. Called by the plugins' runners, on
CUDA and on the CPU.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fdasync.errors import BadInput, RunnerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.cache.aux import AuxSpec

    Copy = Callable[[torch.Tensor, torch.Tensor], None]

# torch has no arithmetic on wide unsigned integers: signed ones hold their bits
_BITS_OF = {"uint16": torch.int16, "uint32": torch.int32}


class StepRows:
    """Buffer of one spec, a row for each token of a step, and the copies of it that are on their way to the host.

    A pass is `begin`, one `write` or `claim` per layer row in any order, `expect`, `stage`. Where passes are replayed
    from a CUDA graph, Python runs none of the writes: call `begin` and `expect` when the graph is captured, only
    `stage` after a replay. `begin`, `claim` and `expect` do nothing on the device.

    Attributes:
        spec: shape (layers,) or (layers, width) and dtype of a token's rows.
        max_step_tokens: most tokens of a pass.
        buffer: [max_step_tokens, *spec.shape] of the spec's dtype, or the signed dtype that holds its bits; zero at
            first, so columns past a layer's own width stay zero. Never replaced.
    """

    def __init__(self, max_step_tokens: int, spec: AuxSpec, device: torch.device) -> None:
        """Allocate the buffer, zeroed.

        Raises BadInput: `spec` has no layers or more than two dimensions, or a number is below 1.
        """
        if len(spec.shape) not in (1, 2):
            raise BadInput("spec", f"{spec.dtype} {spec.shape} where (layers,) or (layers, width) was expected")
        for name, number in (("max_step_tokens", max_step_tokens), ("spec", math.prod(spec.shape))):
            if number < 1:
                raise BadInput(name, "is below 1")
        self.spec = spec
        self.max_step_tokens = max_step_tokens
        dtype = _BITS_OF.get(spec.dtype) or getattr(torch, spec.dtype)
        self.buffer = torch.zeros((max_step_tokens, *spec.shape), dtype=dtype, device=device)
        self._filled: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes on the device, without the copies of `stage`."""
        return self.buffer.nbytes

    @property
    def filled(self) -> int:
        """Layer rows that were written since `begin`."""
        return len(self._filled)

    def begin(self) -> None:
        """Begin a pass: no row is filled. The buffer keeps its contents until layers write over them."""
        self._filled.clear()

    def expect(self) -> None:
        """Raise RunnerError unless every layer row was written since `begin`."""
        layers = self.spec.shape[0]
        if len(self._filled) != layers:
            missing = sorted(set(range(layers)) - self._filled)
            raise RunnerError(
                f"{self.spec.name} of {len(self._filled)} layers was captured, {layers} were to be; rows without: "
                + ", ".join(map(str, missing))
            )

    def write(self, values: torch.Tensor, row: int) -> None:
        """Write one layer's values of the pass's tokens, rounded to the spec's dtype; one kernel, no synchronising.

        May be captured in a CUDA graph.

        Args:
            values: [T] or [T, width], as the spec's rows are, on the buffer's device; any strides and dtype. Read when
                the stream gets there. Columns of the buffer from `width` on are left alone.
            row: layer row.

        Raises:
            RunnerError: values of another shape, more tokens than a pass has, a row written twice in a pass.
        """
        if values.dim() != len(self.spec.shape):
            raise RunnerError(f"{self.spec.name} of shape {tuple(values.shape)} where rows are {list(self.spec.shape)}")
        self.claim(row, len(values), values.shape[1] if values.dim() == 2 else 1).copy_(values)

    def claim(self, row: int, count: int, width: int = 1) -> torch.Tensor:
        """The place of one layer's values of `count` tokens, for a kernel that writes to it; the row counts as written.

        Returns:
            buffer[:count, row, :width], a view: rows are strided, columns are not. Where a layer has one value a token,
            buffer[:count, row].

        Raises:
            RunnerError: more tokens than a pass has, or a row that is written twice in a pass.
        """
        shape, name = self.spec.shape, self.spec.name
        if not 0 <= row < shape[0] or not 0 < width <= (shape[1] if len(shape) == 2 else 1):
            raise RunnerError(f"layer row {row} with {width} of {name} a token where rows are {list(shape)}")
        if count > self.max_step_tokens:
            raise RunnerError(f"{name} of {count} tokens, a step has at most {self.max_step_tokens}")
        if row in self._filled:
            raise RunnerError(f"{name} of layer row {row} was captured twice in a pass")
        self._filled.add(row)
        place = self.buffer[:count, row]
        return place[:, :width] if len(shape) == 2 else place

    def stage(self, count: int) -> torch.Tensor:
        """Copy the rows of the pass's first `count` tokens aside, on the device and the current stream.

        So the next pass may write over the buffer while these rows are on their way to the host. Call it on the stream
        that computes, after the pass.

        Returns:
            [count, *spec.shape] of the buffer's dtype, contiguous, on the device. The caller keeps it until copies of
            it on other streams are done.

        Raises:
            RunnerError: more tokens than a pass has.
        """
        if not 0 <= count <= self.max_step_tokens:
            raise RunnerError(f"rows of {count} tokens, a step has at most {self.max_step_tokens}")
        return self.buffer[:count].clone()


def copy_ids(ids: torch.Tensor, place: torch.Tensor) -> None:
    """Copy ids [T, k] into a place [T, k] of the buffer by torch's own kernel."""
    place.copy_(ids)


class CaptureBuffer(StepRows):
    """Expert ids: rows (L, K) of uint8 or uint16. Layers call `put` in the place of `write`.

    Attributes:
        debug: digits of positions are written instead of ids (`routing_debug`, see `fdasync.cache.debug_rows`).
    """

    def __init__(
        self, max_step_tokens: int, spec: AuxSpec, device: torch.device, *, debug: bool = False, copy: Copy = copy_ids
    ) -> None:
        """As `StepRows`.

        Args:
            copy: copies a layer's ids into their place on the device, in one kernel that a CUDA graph can capture.

        Raises BadInput: `spec` is not uint8 or uint16 (L, K), or a number is below 1.
        """
        if len(spec.shape) != 2 or spec.dtype not in ("uint8", "uint16"):
            raise BadInput("spec", f"{spec.dtype} {spec.shape} where uint8 or uint16 (layers, k) was expected")
        super().__init__(max_step_tokens, spec, device)
        self.debug = debug
        self._copy = copy
        self._bits, digits = (8, 4) if spec.dtype == "uint8" else (16, 2)
        layers, slots = spec.shape
        cell = torch.arange(layers * slots, dtype=torch.int64).view(layers, slots)
        # made now: a host tensor must not be copied to the device while a graph is captured
        self._shifts = (cell % digits * self._bits).to(device)

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
        self._copy(ids, place)

    def _put_digits(self, count: int, row: int, k: int, positions: torch.Tensor | None) -> None:
        if positions is None or positions.dim() != 1 or len(positions) != count:
            raise RunnerError(f"routing_debug needs the absolute positions of the pass's {count} tokens")
        self.claim(row, count, k)
        digits = (positions[:, None] + 1) >> self._shifts[row][None, :]
        self.buffer[:count, row] = (digits + row & (1 << self._bits) - 1).to(self.buffer.dtype)
