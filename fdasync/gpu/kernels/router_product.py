"""The product of a router: logits of tokens, with sums of one order whatever else runs beside a token.

The hidden dimension is cut into a few parts at places that its size alone fixes. Each part is summed in rising order
and the parts are joined in order. A small batch sums its parts side by side, which hides the latency of the products; a
large one sums them in turn; the bits are the same. There is no split over programs and no atomic. Knows no models and
no choice of experts. Called by the plugins' fused routers. Runs on CUDA, or on the CPU under Triton's interpreter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput

_NARROW = (torch.bfloat16, torch.float16)
# a part is a multiple of this many values: of every tile's depth
_GRAIN = 256
_PARTS = 4


class Tile(NamedTuple):
    """How a product is cut.

    Attributes:
        tokens, experts, depth: of a program's tile; `depth` divides 256.
        warps: of a program.
        stages: of a program's pipeline of loads.
        together: parts are summed side by side; else in turn.
        swapped: the experts are the rows of the product, so that few tokens waste little.
    """

    tokens: int
    experts: int
    depth: int
    warps: int
    stages: int
    together: bool
    swapped: bool


@triton.jit  # type: ignore[untyped-decorator]
def _add_tile(  # type: ignore[no-untyped-def]
    total,
    x,
    weight,
    x_offset,
    weight_offset,
    here,
    real,
    begin,
    HIDDEN: tl.constexpr,
    DEPTH: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """`total` plus the products of DEPTH values from `begin` on."""
    if MASKED:
        inside = begin + tl.arange(0, DEPTH) < HIDDEN
        here = here & (inside[:, None] if SWAPPED else inside[None, :])
        real = real & (inside[None, :] if SWAPPED else inside[:, None])
    x_tile = tl.load(x + begin + x_offset, mask=here, other=0.0)
    weight_tile = tl.load(weight + begin + weight_offset, mask=real, other=0.0)
    if WIDE:
        x_tile = x_tile.to(tl.float32)
        weight_tile = weight_tile.to(tl.float32)
    if SWAPPED:
        return tl.dot(weight_tile, x_tile, total, input_precision="ieee")
    else:
        return tl.dot(x_tile, weight_tile, total, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _product_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    logits,
    num_tokens,
    x_stride,
    weight_stride,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    SWAPPED: tl.constexpr,
    WIDE: tl.constexpr,
    BIASED: tl.constexpr,
    ROUNDED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program makes the logits of TOKENS tokens for EXPERTS experts."""
    tiles: tl.constexpr = (NUM_EXPERTS + EXPERTS - 1) // EXPERTS
    masked: tl.constexpr = PART * PARTS != HIDDEN
    first = tl.program_id(0) // tiles * TOKENS
    token = tl.arange(0, TOKENS)
    expert = tl.program_id(0) % tiles * EXPERTS + tl.arange(0, EXPERTS)
    depth = tl.arange(0, DEPTH)
    # scalar places are wide, places within a tile are narrow and live in fewer registers
    x += first.to(tl.int64) * x_stride
    logits += first.to(tl.int64) * NUM_EXPERTS
    if SWAPPED:
        x_offset = token[None, :] * x_stride + depth[:, None]
        weight_offset = expert[:, None] * weight_stride + depth[None, :]
        here = (first + token < num_tokens)[None, :]
        real = (expert < NUM_EXPERTS)[:, None]
        zero = tl.zeros((EXPERTS, TOKENS), dtype=tl.float32)
    else:
        x_offset = token[:, None] * x_stride + depth[None, :]
        weight_offset = expert[None, :] * weight_stride + depth[:, None]
        here = (first + token < num_tokens)[:, None]
        real = (expert < NUM_EXPERTS)[None, :]
        zero = tl.zeros((TOKENS, EXPERTS), dtype=tl.float32)
    if TOGETHER and PARTS == 4:
        one = zero
        two = zero
        three = zero
        four = zero
        for at in tl.range(0, PART, DEPTH, num_stages=STAGES):
            one = _add_tile(
                one, x, weight, x_offset, weight_offset, here, real, at, HIDDEN, DEPTH, masked, WIDE, SWAPPED
            )
            two = _add_tile(
                two, x, weight, x_offset, weight_offset, here, real, PART + at, HIDDEN, DEPTH, masked, WIDE, SWAPPED
            )
            three = _add_tile(
                three, x, weight, x_offset, weight_offset, here, real, 2 * PART + at, HIDDEN, DEPTH, masked, WIDE,
                SWAPPED,
            )  # fmt: skip
            four = _add_tile(
                four, x, weight, x_offset, weight_offset, here, real, 3 * PART + at, HIDDEN, DEPTH, masked, WIDE,
                SWAPPED,
            )  # fmt: skip
        total = ((one + two) + three) + four
    else:
        total = zero
        for part in tl.static_range(PARTS):
            some = zero
            for at in tl.range(part * PART, (part + 1) * PART, DEPTH, num_stages=STAGES):
                some = _add_tile(
                    some, x, weight, x_offset, weight_offset, here, real, at, HIDDEN, DEPTH, masked, WIDE, SWAPPED
                )
            total = some if part == 0 else total + some
    if BIASED:
        each = tl.load(bias + expert, mask=expert < NUM_EXPERTS, other=0.0).to(tl.float32)
        total += each[:, None] if SWAPPED else each[None, :]
    if ROUNDED:
        total = total.to(x.dtype.element_ty)
    offset = token[None, :] * NUM_EXPERTS + expert[:, None] if SWAPPED else token[:, None] * NUM_EXPERTS + expert[None, :]
    tl.store(logits + offset, total.to(logits.dtype.element_ty), mask=here & real)


def router_logits(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    rounded: bool,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Logits [T, E] = x [T, H] @ weight [E, H]^T (+ bias), summed in float32.

    A token's bits depend on its row of `x`, on the weight and on the device, and not on T. Two tensors of one narrow
    dtype are multiplied as they are, which is exact; else both are widened to float32. One launch on the current
    stream, without synchronising; may be captured in a CUDA graph. T compiles a kernel per regime and no more.

    Args:
        x: [T, H] float32, bfloat16 or float16; rows may be strided, a row may not. Read.
        weight: [E, H] of the same dtypes and the same kind of strides. Read.
        bias: [E], contiguous, added in float32 before the rounding; None: none. Read.
        rounded: round the sums to the dtype of `x`, as a linear in that dtype does.
        dtype: of the logits; None: of `x`. A wider one than `rounded` gives holds rounded values.

    Returns:
        The logits, a new contiguous tensor on the device of `x`.

    Raises:
        BadInput: shapes, strides or dtypes that the kernel does not take.
    """
    _check(x, weight, bias)
    tokens, hidden = x.shape
    experts = weight.shape[0]
    logits = torch.empty((tokens, experts), dtype=dtype or x.dtype, device=x.device)
    if tokens:
        wide = x.dtype not in _NARROW or weight.dtype != x.dtype
        _launch(x, weight, bias, logits, rounded, wide, choose_tile(tokens, experts, hidden, wide))
    return logits


def choose_tile(tokens: int, experts: int, hidden: int, wide: bool) -> Tile:
    """The tile for a shape, of those that were measured; `wide`: factors are float32."""
    if wide:
        return Tile(16, 16, 64, 2, 3, True, False) if tokens <= 256 else Tile(32, 64, 32, 4, 2, False, False)
    if tokens <= 64:
        return Tile(16, 16, 128, 4, 3, True, True)
    if tokens <= 512:
        return Tile(16, 32, 128, 4, 3, True, True)
    return Tile(64, 64, 64, 4, 4, False, False)


def parts_of(hidden: int) -> tuple[int, int]:
    """Number and size of the parts of a hidden dimension: of its size alone, so that all tiles sum in one order."""
    if hidden < _PARTS * _GRAIN:
        return 1, triton.cdiv(hidden, _GRAIN) * _GRAIN
    return _PARTS, triton.cdiv(hidden, _PARTS * _GRAIN) * _GRAIN


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    logits: torch.Tensor,
    rounded: bool,
    wide: bool,
    tile: Tile,
    parts: tuple[int, int] | None = None,
) -> None:
    tokens, hidden = x.shape
    experts = weight.shape[0]
    number, size = parts or parts_of(hidden)
    grid: Any = (triton.cdiv(tokens, tile.tokens) * triton.cdiv(experts, tile.experts),)
    _product_kernel[grid](
        x,
        weight,
        # without a bias any pointer does: that kernel has no instruction for it
        weight if bias is None else bias,
        logits,
        tokens,
        # the stride of a single row may be anything in torch
        x.stride(0) if tokens > 1 else hidden,
        weight.stride(0) if experts > 1 else hidden,
        NUM_EXPERTS=experts,
        HIDDEN=hidden,
        PART=size,
        PARTS=number,
        TOKENS=tile.tokens,
        EXPERTS=tile.experts,
        DEPTH=tile.depth,
        TOGETHER=tile.together,
        SWAPPED=tile.swapped,
        # the interpreter multiplies the bits of bfloat16 as integers
        WIDE=wide or not isinstance(_product_kernel, triton.runtime.JITFunction),
        BIASED=bias is not None,
        ROUNDED=rounded and x.dtype in _NARROW,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dim() != 2 or not tensor.shape[1]:
            raise BadInput(name, f"shape {tuple(tensor.shape)} where two dimensions were expected")
        if tensor.dtype is not torch.float32 and tensor.dtype not in _NARROW:
            raise BadInput(name, f"{tensor.dtype} is no dtype of a router")
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise BadInput(name, "the values of a row do not lie beside each other")
    if x.shape[1] != weight.shape[1] or not weight.shape[0]:
        raise BadInput("weight", f"{tuple(weight.shape)} does not fit {tuple(x.shape)}")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        raise BadInput("bias", f"shape {tuple(bias.shape)} where [{weight.shape[0]}] was expected")
