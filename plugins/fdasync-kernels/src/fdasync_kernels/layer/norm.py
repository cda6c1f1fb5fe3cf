"""RMSNorm of rows in one launch, alone or with the residual sum before it.

A library norms by eight small kernels. Here one program norms a fixed number of rows with a fixed number of warps,
both given by the row's size alone, so the bits of a row depend on nothing but the row. Values are rounded to their
dtype where the library rounds; only the order of the mean's sum is ours. Knows no models. Called by the plugins' fused
norms and by benchmarks. Runs on CUDA, or on the CPU under Triton's interpreter (tests).

For other kernels: `norm_row` norms rows that are in registers, and `warps_of` gives the warps that a row's bits belong
to. `finish.py` and, where heads are normed, `qkv.py` have the same bits at sizes that are multiples of 16.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.limits import FLOATS
from fdasync_kernels.registry import operation
from fdasync_kernels.rounding import rounded

Rounding = Literal["normed", "product", "one_plus", "none", "scale"]

# as constants of kernels; see `rms_norm`
NORMED, PRODUCT, ONE_PLUS, NONE, SCALE = (tl.constexpr(kind) for kind in range(5))
KINDS: dict[Rounding, int] = {"normed": 0, "product": 1, "one_plus": 2, "none": 3, "scale": 4}
MOST_COLUMNS = 32768
# of a program's tile, where rows are short
_ELEMENTS = 2048
# that a warp takes at a time, 16 bytes a thread
_WARP_NBYTES = 512
_INTERPRETED_ELEMENTS = 1 << 15


class Tile(NamedTuple):
    """How a program norms: `rows` rows of `padded` columns (a power of 2) by `warps` warps."""

    rows: int
    padded: int
    warps: int


@triton.jit
def norm_row(x, weight, eps, COLUMNS: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Norm rows in registers.

    x: [rows, padded] float32, zeros from COLUMNS on. weight: [1, padded] float32; not read for NONE and SCALE. KIND: of
    `KINDS`. DTYPE: of the rows. Returns [rows, padded] float32 that the caller rounds to DTYPE when it stores them.
    """
    mean = tl.div_rn(tl.sum(x * x, axis=1, keep_dims=True), COLUMNS + 0.0)
    scale = tl.rsqrt(mean + eps)
    if KIND == SCALE:
        return x * rounded(scale, DTYPE)
    normed = x * scale
    if KIND == NORMED:
        # the product of two values of a narrow dtype is exact in float32, so it is rounded once
        return weight * rounded(normed, DTYPE)
    if KIND == PRODUCT:
        return weight * normed
    if KIND == ONE_PLUS:
        return normed * (1.0 + weight)
    return normed


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x, residual, weight, out, total, num_rows, x_stride, residual_stride, eps,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    here = (row < num_rows) & (column < COLUMNS)
    values = tl.load(x + row * x_stride + column, mask=here, other=0.0).to(tl.float32)
    if ADDED:
        values += tl.load(residual + row * residual_stride + column, mask=here, other=0.0).to(tl.float32)
        values = rounded(values, DTYPE)
        tl.store(total + row * COLUMNS + column, values.to(DTYPE), mask=here)
    if KIND == NONE or KIND == SCALE:  # noqa: SIM109 - kernels know no tuples of constants
        factor = values
    else:
        factor = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    normed = norm_row(values, factor, eps, COLUMNS, KIND, DTYPE)
    tl.store(out + row * COLUMNS + column, rounded(normed, DTYPE).to(DTYPE), mask=here)


def tile_of(columns: int, itemsize: int) -> Tile:
    """The tile of rows of a size; by the size alone, so that a row's bits never depend on the number of rows."""
    padded = triton.next_power_of_2(columns)
    return Tile(max(1, _ELEMENTS // padded), padded, warps_of(max(_ELEMENTS, padded), itemsize))


def warps_of(elements: int, itemsize: int, most: int = 16) -> int:
    """Warps of a program that holds so many elements of rows.

    They decide which elements of a row a thread adds up, and so the order of a sum. Kernels with as many warps for a
    row, 256 elements at least, have each other's bits.
    """
    return max(1, min(most, elements * itemsize // _WARP_NBYTES))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, rounding: Rounding = "normed"
) -> torch.Tensor:
    """Divide rows by their root mean square, and multiply by a weight. One launch; no gradient.

    On the current stream, without synchronising; may be captured in a CUDA graph. The number of rows compiles nothing
    anew. The mean and what follows are float32; results are rounded as the library's are:
    "normed": `weight * normed.to(dtype)`; "product": `(weight.float() * normed).to(dtype)`; "one_plus":
    `(normed * (1 + weight.float())).to(dtype)`; "none": `normed.to(dtype)`; "scale": the factor of each row, then the
    product, without a weight.

    Args:
        x: [..., H] bfloat16, float16 or float32, H at most 32,768. Read; rows whose leading dimensions are no view of
            one are copied first.
        weight: [H], contiguous, of x's dtype, or of any of the three for "product" and "one_plus". None for "none" and
            "scale".
        eps: added to the mean of the squares.
        rounding: where values are rounded.

    Returns:
        A new contiguous tensor of x's shape and dtype.

    Raises:
        BadInput: shapes, strides or dtypes that the kernel does not take.
    """
    check(x, weight, rounding)
    return norm_unchecked(x, weight, eps, KINDS[rounding])


@operation
def add_rms_norm(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    rounding: Rounding = "normed",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`total = residual + x`, rounded as torch rounds it, and `rms_norm(total, ...)`, bit for bit, in one launch.

    Args:
        residual: [..., H], as x, of its shape and dtype. Read.
        x, weight, eps, rounding: as in `rms_norm`.

    Returns:
        (total, normed), new contiguous tensors.

    Raises:
        BadInput: shapes, strides or dtypes that the kernel does not take.
    """
    check(x, weight, rounding)
    if residual.shape != x.shape or residual.dtype is not x.dtype:
        raise BadInput("residual", f"{residual.dtype} {tuple(residual.shape)}, beside {x.dtype} {tuple(x.shape)}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, out, total, eps, KINDS[rounding])
    return total, out


@operation
def norm_unchecked(x: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: int) -> torch.Tensor:
    """`rms_norm` for callers that know their tensors: `kind` is of `KINDS`, and nothing is checked."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, eps, kind)
    return out


def check(x: torch.Tensor, weight: torch.Tensor | None, rounding: Rounding) -> None:
    """Raise BadInput unless the kernels take these tensors."""
    if rounding not in KINDS:
        raise BadInput("rounding", f"{rounding!r} is none of {', '.join(KINDS)}")
    if x.dtype not in FLOATS:
        raise BadInput("x", f"{x.dtype} is no dtype of rows")
    if not x.dim() or not 1 <= x.shape[-1] <= MOST_COLUMNS:
        raise BadInput("x", f"shape {tuple(x.shape)} where [..., columns] was expected", limit=MOST_COLUMNS)
    if rounding in ("none", "scale"):
        if weight is not None:
            raise BadInput("weight", f"rounding {rounding!r} has none")
        return
    if weight is None or weight.shape != x.shape[-1:] or not weight.is_contiguous():
        shape = None if weight is None else tuple(weight.shape)
        raise BadInput("weight", f"shape {shape} where contiguous {tuple(x.shape[-1:])} was expected")
    if weight.dtype is not x.dtype and (rounding == "normed" or weight.dtype not in FLOATS):
        raise BadInput("weight", f"{weight.dtype}, beside rows of {x.dtype}")


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
    kind: int,
) -> None:
    columns = x.shape[-1]
    num_rows = x.numel() // columns
    if not num_rows:
        return
    if columns % 16:
        # where rows begin decides how much of them a thread takes at a time, and so the order of a sum
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
    x, x_stride = as_rows(x, num_rows, columns)
    residual_stride = 0
    if residual is not None:
        residual, residual_stride = as_rows(residual, num_rows, columns)
    rows, padded, warps = tile_of(columns, x.element_size())
    if not isinstance(_norm_kernel, triton.runtime.JITFunction):
        # in the interpreter the number of programs is the cost
        rows = max(rows, _INTERPRETED_ELEMENTS // padded)
    grid: Any = (-(-num_rows // rows),)
    _norm_kernel[grid](
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        out,
        out if total is None else total,
        num_rows,
        x_stride,
        residual_stride,
        eps,
        COLUMNS=columns,
        PADDED=padded,
        ROWS=rows,
        KIND=kind,
        ADDED=residual is not None,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def as_rows(x: torch.Tensor, num_rows: int, columns: int) -> tuple[torch.Tensor, int]:
    """[..., columns] as rows for a kernel: the tensor and the elements from one row to the next; copied where no view
    has them all."""
    if x.is_contiguous():
        return x, columns
    if x.stride(-1) != 1:
        return x.contiguous(), columns
    try:
        flat = x.view(num_rows, columns)
    except RuntimeError:
        return x.contiguous(), columns
    return flat, flat.stride(0) if num_rows > 1 else columns
