"""The softmax's normaliser of rows of logits: the largest logit and the log of the sum of masses, as the draw has them.

Two passes over tiles of a row at fixed places, and one program a row; `tile.py` says what a mass is. Sums are of whole
numbers, and logs are made by the draw's own functions, so the log-prob of a token has the bits that the sampler gives
it, whatever the number of rows is. Knows no requests. Called by `sample.py`, by scorers of prompts and by trainers;
runs on CUDA, or on the CPU under Triton's interpreter (tests).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.registry import operation
from fdasync_kernels.sampling.mass import shift_of
from fdasync_kernels.sampling.tile import TILE, best_of, log_of_mass, mass_of, reach_of, read_raw, scaled

# ids that are read at a time, as the sampler's pass of masses has them
_BLOCK = 512
_BEST_WARPS, _MASSES_WARPS = 2, 1
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class LogMasses(NamedTuple):
    """The sums of n rows; new tensors on the device, the caller's.

    Attributes:
        best: float32 [n], the largest logit; +inf where a row has NaN.
        log_mass: float64 [n], the log of the sum of exp((logit - best) * scale); NaN where `best` is not finite.
        entropy: float64 [n], of the softmax in nats; None: not asked for. Its last bits are not the CPU's.
    """

    best: torch.Tensor
    log_mass: torch.Tensor
    entropy: torch.Tensor | None


@triton.jit
def place_of(program, tiles):
    """The row, int64, and the tile of a program. A grid has one axis here: the others end at 65,535."""
    return (program // tiles).to(tl.int64), program % tiles


@triton.jit
def _best_kernel(logits, stride, width, tile_best, tiles, tile: tl.constexpr):
    """The largest logit of a tile; NaN counts as +inf."""
    row, number = place_of(tl.program_id(0), tiles)
    x = read_raw(logits, stride, row, number * tile + tl.arange(0, tile), width)
    tl.store(tile_best + row * tiles + number, tl.max(tl.where(x != x, float("inf"), x), axis=0))


@triton.jit
def _masses_kernel(
    logits, stride, width, shift, scales, tile_best, total, moments,
    tiles, padded: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The sum of a tile's masses and, for entropies, of each mass times its log, by ids in order."""
    row, number = place_of(tl.program_id(0), tiles)
    best = best_of(tile_best, row, tiles, padded)
    scale = tl.load(scales)
    reach = reach_of(best, scale)
    whole = tl.full((), 0, tl.int64)
    moment = tl.full((), 0.0, tl.float64)
    for start in range(0, tile, block):
        x = read_raw(logits, stride, row, number * tile + start + tl.arange(0, block), width)
        logs = scaled(x, best, scale)
        mass = mass_of(x, logs, reach, shift)
        whole += tl.sum(mass, axis=0)
        if moments is not None:
            moment += tl.sum(tl.where(mass > 0, mass.to(tl.float64) * logs, 0.0), axis=0)
    tl.store(total + row * tiles + number, whole)
    if moments is not None:
        tl.store(moments + row * tiles + number, moment)


@triton.jit
def _logs_kernel(total, shift, tile_best, moments, log_mass, best, entropy, tiles, padded: tl.constexpr):
    """The log of the sum of a row's masses. With `tile_best` also the largest logit, and NaN where it is not finite."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, padded)
    whole = tl.sum(tl.load(total + row * tiles + number, mask=number < tiles, other=0), axis=0)
    log = log_of_mass(whole, shift)
    if tile_best is not None:
        largest = best_of(tile_best, row, tiles, padded)
        log = tl.where(tl.abs(largest) < float("inf"), log, float("nan"))
        tl.store(best + row, largest)
    tl.store(log_mass + row, log)
    if moments is not None:
        moment = tl.sum(tl.load(moments + row * tiles + number, mask=number < tiles, other=0.0), axis=0)
        tl.store(entropy + row, log - moment / whole.to(tl.float64))


def logs_of_masses(masses: torch.Tensor, shift: int) -> torch.Tensor:
    """float64 [n]: the logs of the sums of rows of masses, int64 [n, tiles], over 2^shift. One launch on the current
    stream; nothing is checked."""
    count, tiles = masses.shape
    logs = torch.empty((count,), dtype=torch.float64, device=masses.device)
    _launch_logs((masses.contiguous(), shift, None, None, logs, None, None), count, tiles)
    return logs


@operation
def log_masses(logits: torch.Tensor, scale: float, *, entropy: bool = False) -> LogMasses:
    """The normalisers of softmax((logits - largest) * scale), row by row; three launches on the current stream, without
    synchronising. The number of rows compiles nothing anew.

    Args:
        logits: [n, V] bfloat16, float16 or float32; rows may be strided, a row may not. Read.
        scale: one over the temperature; above 0.
        entropy: compute the entropies in the same passes.

    Raises:
        BadInput: another shape, dtype or stride.
    """
    strided = logits.dim() == 2 and logits.stride(1) != 1 and logits.shape[1] > 1
    if logits.dim() != 2 or not logits.shape[1] or logits.dtype not in _FLOATS or strided:
        raise BadInput("logits", f"{logits.dtype} {tuple(logits.shape)} is no table of rows")
    count, width = logits.shape
    if width >= 1 << 31:
        raise BadInput("logits", f"{width} ids", limit=(1 << 31) - 1)
    tiles = triton.cdiv(width, TILE)

    def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    best, log_mass = new(torch.float32, count), new(torch.float64, count)
    entropies = new(torch.float64, count) if entropy else None
    if count:
        # the stride of a single row may be anything in torch
        read = (logits, logits.stride(0) if count > 1 else width, width)
        tile_best, total = new(torch.float32, count, tiles), new(torch.int64, count, tiles)
        moments = new(torch.float64, count, tiles) if entropy else None
        # a number from the host would arrive as float32
        scales = torch.full((1,), scale, dtype=torch.float64, device=logits.device)
        shift = shift_of(width)
        _best_kernel[(tiles * count,)](*read, tile_best, tiles, tile=TILE, num_warps=_BEST_WARPS)
        _masses_kernel[(tiles * count,)](
            *read, shift, scales, tile_best, total, moments, tiles, padded=triton.next_power_of_2(tiles),
            tile=TILE, block=_BLOCK, num_warps=_MASSES_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        _launch_logs((total, shift, tile_best, moments, log_mass, best, entropies), count, tiles)
    return LogMasses(best, log_mass, entropies)


def _launch_logs(arguments: tuple[Any, ...], count: int, tiles: int) -> None:
    if count:
        _logs_kernel[(count,)](
            *arguments, tiles, padded=triton.next_power_of_2(tiles), num_warps=1, enable_fp_fusion=False
        )
