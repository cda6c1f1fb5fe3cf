"""The product of a router: logits of tokens, with sums of one order whatever else runs beside a token.

The hidden dimension is cut into blocks of 128 values. A block is summed by itself, and blocks are added in rising order
in float32. So there is one order of sums for all tiles and every T, without a split over programs and without atomics;
blocks do not wait for each other, which hides the latency of the products in a small batch; and a tensor core, which
cuts off what is small beside a large sum, sums little at a time: logits are as exact as by a float32 product. Knows no
models and no choice of experts. Called by the plugins' fused routers. Runs on CUDA, or on the CPU under Triton's
interpreter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fdasync.errors import BadInput
from fdasync_kernels.chip import chip_of
from fdasync_kernels.limits import FLOATS, NARROW
from fdasync_kernels.overlap import overlap, wait_for_inputs
from fdasync_kernels.registry import operation
from fdasync_kernels.router.select import nearest, rounded

_BLOCK = 128
# how the factors of a product are taken
_AS_THEY_ARE = 0
_WIDENED = 1
_SPLIT = 2


class Tile(NamedTuple):
    """How a product is cut.

    Attributes:
        tokens, experts: of a program's tile.
        beside: blocks of 128 values that are multiplied side by side: 1, 2 or 4.
        warps: of a program.
        stages: of a program's pipeline of loads.
        swapped: the experts are the rows of the product, so that few tokens waste little.
    """

    tokens: int
    experts: int
    beside: int
    warps: int
    stages: int
    swapped: bool


# By the most tokens. Of shapes [experts, hidden] that were measured on an H200 between the norm before them and the
# choice behind them: Qwen3-30B-A3B's.
_MEASURED: dict[tuple[int, int], tuple[tuple[float, Tile], ...]] = {
    (128, 2048): (
        (1, Tile(1, 8, 4, 1, 3, False)),
        (128, Tile(8, 16, 4, 1, 4, True)),
        (256, Tile(32, 8, 4, 2, 4, False)),
        (1024, Tile(16, 64, 1, 4, 8, True)),
        (2048, Tile(32, 64, 2, 4, 3, True)),
        (4096, Tile(64, 32, 1, 4, 4, False)),
        (float("inf"), Tile(64, 64, 1, 4, 3, False)),
    )
}
# of all others, by products one behind the other
_FEW_EXPERTS: tuple[tuple[float, Tile], ...] = (
    (1, Tile(1, 8, 4, 1, 3, False)),
    (64, Tile(16, 8, 4, 2, 3, False)),
    (512, Tile(16, 16, 4, 2, 3, True)),
    (4096, Tile(64, 32, 1, 4, 4, False)),
    (float("inf"), Tile(64, 64, 1, 4, 3, False)),
)
_MANY_EXPERTS: tuple[tuple[float, Tile], ...] = (
    *_FEW_EXPERTS[:3],
    (4096, Tile(64, 64, 1, 4, 4, False)),
    (float("inf"), Tile(128, 128, 1, 8, 3, False)),
)
# in the place of tiles that need more than 99 KB of shared memory
_ELSEWHERE = {
    Tile(32, 8, 4, 2, 4, False): Tile(16, 16, 4, 2, 3, True),
    Tile(16, 64, 1, 4, 8, True): Tile(64, 32, 1, 4, 4, False),
    Tile(32, 64, 2, 4, 3, True): Tile(64, 32, 1, 4, 4, False),
    Tile(64, 64, 1, 4, 4, False): Tile(64, 64, 1, 4, 3, False),
    Tile(128, 128, 1, 8, 3, False): Tile(64, 64, 1, 4, 3, False),
}


@triton.jit
def _dot(x, weight, total, SWAPPED: tl.constexpr):
    if SWAPPED:
        return tl.dot(weight, x, total, input_precision="ieee")
    else:
        return tl.dot(x, weight, total, input_precision="ieee")


@triton.jit
def _block(
    zero,
    x,
    weight,
    x_offset,
    weight_offset,
    here,
    real,
    begin,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    EVEN: tl.constexpr,
    FACTORS: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """The products of BLOCK values from `begin` on; EVEN: all experts are real."""
    if MASKED:
        inside = begin + tl.arange(0, BLOCK) < HIDDEN
        here = here & (inside[:, None] if SWAPPED else inside[None, :])
        real = real & (inside[None, :] if SWAPPED else inside[:, None])
    x_tile = tl.load(x + begin + x_offset, mask=here, other=0.0)
    if EVEN and not MASKED:
        weight_tile = tl.load(weight + begin + weight_offset)
    else:
        weight_tile = tl.load(weight + begin + weight_offset, mask=real, other=0.0)
    if FACTORS == 0:
        return _dot(x_tile, weight_tile, zero, SWAPPED)
    elif FACTORS == 1:
        return _dot(x_tile.to(tl.float32), weight_tile.to(tl.float32), zero, SWAPPED)
    else:
        # a float32 is the sum of three bfloat16, and products of two bfloat16 are exact
        high = weight_tile.to(tl.bfloat16)
        rest = weight_tile - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return _dot(x_tile, high, _dot(x_tile, middle, _dot(x_tile, low, zero, SWAPPED), SWAPPED), SWAPPED)


@triton.jit(do_not_specialize=["num_tokens"])
def _product_kernel(
    x,
    weight,
    bias,
    logits,
    num_tokens,
    x_stride,
    weight_stride,
    nothing,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BESIDE: tl.constexpr,
    SWAPPED: tl.constexpr,
    FACTORS: tl.constexpr,
    BIASED: tl.constexpr,
    ROUNDED: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program makes the logits of TOKENS tokens for EXPERTS experts."""
    wait_for_inputs(OVERLAP)
    TILES: tl.constexpr = (NUM_EXPERTS + EXPERTS - 1) // EXPERTS
    MASKED: tl.constexpr = HIDDEN % (BLOCK * BESIDE) != 0
    EVEN: tl.constexpr = NUM_EXPERTS % EXPERTS == 0
    first = tl.program_id(0) // TILES * TOKENS
    token = tl.arange(0, TOKENS)
    first_expert = tl.program_id(0) % TILES * EXPERTS
    place = tl.arange(0, EXPERTS)
    expert = first_expert + place
    depth = tl.arange(0, BLOCK)
    # scalar places are wide, places within a tile are narrow and live in fewer registers
    x += first.to(tl.int64) * x_stride
    weight += first_expert.to(tl.int64) * weight_stride
    logits += first.to(tl.int64) * NUM_EXPERTS
    if SWAPPED:
        x_offset = token[None, :] * x_stride + depth[:, None]
        weight_offset = place[:, None] * weight_stride + depth[None, :]
        here = (first + token < num_tokens)[None, :]
        real = (expert < NUM_EXPERTS)[:, None]
        offset = token[None, :] * NUM_EXPERTS + expert[:, None]
    else:
        x_offset = token[:, None] * x_stride + depth[None, :]
        weight_offset = place[None, :] * weight_stride + depth[:, None]
        here = (first + token < num_tokens)[:, None]
        real = (expert < NUM_EXPERTS)[None, :]
        offset = token[:, None] * NUM_EXPERTS + expert[None, :]
    shape: tl.constexpr = (EXPERTS, TOKENS) if SWAPPED else (TOKENS, EXPERTS)
    total = tl.zeros(shape, dtype=tl.float32)
    # 0.0 that the compiler does not know: it would sum a block that begins with a known zero into the total at once
    zero = tl.zeros(shape, dtype=tl.float32) + nothing
    for at in tl.range(0, HIDDEN, BLOCK * BESIDE, num_stages=STAGES):
        one = _block(
            zero, x, weight, x_offset, weight_offset, here, real, at, HIDDEN, BLOCK, MASKED, EVEN, FACTORS, SWAPPED
        )
        if BESIDE > 1:
            two = _block(
                zero, x, weight, x_offset, weight_offset, here, real, at + BLOCK, HIDDEN, BLOCK, MASKED, EVEN,
                FACTORS, SWAPPED,
            )  # fmt: skip
        if BESIDE > 2:
            three = _block(
                zero, x, weight, x_offset, weight_offset, here, real, at + 2 * BLOCK, HIDDEN, BLOCK, MASKED, EVEN,
                FACTORS, SWAPPED,
            )  # fmt: skip
            four = _block(
                zero, x, weight, x_offset, weight_offset, here, real, at + 3 * BLOCK, HIDDEN, BLOCK, MASKED, EVEN,
                FACTORS, SWAPPED,
            )  # fmt: skip
        # past the end a block is 0, which changes no sum
        total += one
        if BESIDE > 1:
            total += two
        if BESIDE > 2:
            total += three
            total += four
    if BIASED:
        each = tl.load(bias + expert, mask=expert < NUM_EXPERTS, other=0.0).to(tl.float32)
        total += each[:, None] if SWAPPED else each[None, :]
    tl.store(logits + offset, nearest(rounded(total, x, ROUNDED), logits), mask=here & real)


@operation
def router_logits(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    rounded: bool,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Logits [T, E] = x [T, H] @ weight [E, H]^T (+ bias), summed in float32.

    A token's bits depend on its row of `x`, on the weight and on the device, and not on T. Products are exact for two
    tensors of one narrow dtype, and for a float32 weight with bfloat16 `x`; else both are widened to float32. One
    launch on the current stream, without synchronising; may be captured in a CUDA graph. T compiles a kernel per regime
    and no more.

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
    tokens, experts = len(x), len(weight)
    logits = torch.empty((tokens, experts), dtype=dtype or x.dtype, device=x.device)
    if tokens:
        factors = _factors(x.dtype, weight.dtype)
        tile = choose_tile(tokens, experts, x.shape[1], factors, large=chip_of(x.device).large)
        launch_product(x, weight, bias, logits, rounded, tile)
    return logits


def choose_tile(tokens: int, experts: int, hidden: int, factors: int, *, large: bool) -> Tile:
    """The tile for a shape: measured on one chip, and a rule for all; every tile gives the same bits.

    `large`: a program may take 227 KB of shared memory, else 99 KB.
    """
    if factors == _WIDENED:
        return Tile(16, 16, 1, 4, 2, False) if tokens <= 256 else Tile(32, 32, 1, 4, 2, False)
    if factors == _SPLIT:
        return Tile(16, 8, 2, 2, 3, False) if tokens <= 256 else Tile(64, 32, 1, 4, 2, False)
    table = _MEASURED.get((experts, hidden)) or (_FEW_EXPERTS if experts <= 128 else _MANY_EXPERTS)
    tile = next(tile for most, tile in table if tokens <= most)
    return tile if large else _ELSEWHERE.get(tile, tile)


def _factors(x: torch.dtype, weight: torch.dtype) -> int:
    if not isinstance(_product_kernel, triton.runtime.JITFunction):
        return _WIDENED  # the interpreter multiplies the bits of bfloat16 as integers
    if x == weight and x in NARROW:
        return _AS_THEY_ARE
    return _SPLIT if (x, weight) == (torch.bfloat16, torch.float32) else _WIDENED


def launch_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, logits: torch.Tensor, rounded: bool, tile: Tile
) -> None:
    """`router_logits` by a tile of the caller's, without its checks: for measurements, and for tests of the bits."""
    tokens, hidden = x.shape
    experts = weight.shape[0]
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
        0.0,
        NUM_EXPERTS=experts,
        HIDDEN=hidden,
        TOKENS=tile.tokens,
        EXPERTS=tile.experts,
        BLOCK=_BLOCK,
        BESIDE=tile.beside,
        SWAPPED=tile.swapped,
        FACTORS=_factors(x.dtype, weight.dtype),
        BIASED=bias is not None,
        ROUNDED=rounded and x.dtype in NARROW,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **overlap(x.device),
    )


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dim() != 2 or not tensor.shape[1]:
            raise BadInput(name, f"shape {tuple(tensor.shape)} where two dimensions were expected")
        if tensor.dtype not in FLOATS:
            raise BadInput(name, f"{tensor.dtype} is no dtype of a router")
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise BadInput(name, "the values of a row do not lie beside each other")
    if x.shape[1] != weight.shape[1] or not weight.shape[0]:
        raise BadInput("weight", f"{tuple(weight.shape)} does not fit {tuple(x.shape)}")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        raise BadInput("bias", f"shape {tuple(bias.shape)} where [{weight.shape[0]}] was expected")
