"""What the sampler's kernels share: how a tile of logits is read, ordered and made probabilities.

A row of logits is read in tiles of `TILE` ids at fixed places. Each read applies what changes the logits (see
`edits.py`) on the way. A probability is a whole number, its *mass*: exp of the scaled distance to the largest
logit, in float64, times 2^b, rounded. Sums of masses are exact in any order and over any number of programs, so that
each row has the same bits whatever runs beside it. Knows no requests. Used by the other files of this room.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: ids of a tile, and of each of its chunks, whose largest logits are kept
TILE = 4096
CHUNK = 128
#: columns of a job's integers, and of its floats
INTS, FLOATS = 8, 4

# the row of logits; slots of edits, stop mask and grammar, -1 for none; whether the sum of masses is wanted; whether a
# token is drawn; the top-k, 0 for none; the job whose sum scores raw logits, -1 for none
ROW, EDIT, STOP, MASK, MASS, DRAWN, TOP_K, RAW = (tl.constexpr(number) for number in range(INTS))
# what the distance to the largest logit is multiplied by; the noise; top-p, 1 for none; the log of min-p
SCALE, NOISE, TOP_P, FLOOR = (tl.constexpr(number) for number in range(FLOATS))
_INTS, _FLOATS = tl.constexpr(INTS), tl.constexpr(FLOATS)
#: below the order of every id
NOTHING = tl.constexpr(-0x8000000000000000)


@triton.jit
def job_int(ints, job, column: tl.constexpr):
    return tl.load(ints + job * _INTS + column)


@triton.jit
def job_float(floats, job, column: tl.constexpr):
    return tl.load(floats + job * _FLOATS + column)


@triton.jit
def top_k_of(ints, job, width):
    """0 where top-k keeps all."""
    k = job_int(ints, job, TOP_K)
    return tl.where(k >= width, 0, k)


@triton.jit
def read_raw(logits, stride, row, ids, width):
    """float32 logits of `ids`; -inf outside the vocabulary."""
    return tl.load(logits + row * stride + ids, mask=ids < width, other=float("-inf")).to(tl.float32)


@triton.jit
def bits_of(words, slot, columns, ids, width):
    """Whether the bit of each id is set in row `slot` of a table of int32 words, `columns` a row."""
    word = ids >> 5
    held = tl.load(words + slot * columns + word, mask=(ids < width) & (word < columns), other=0)
    return ((held >> (ids & 31)) & 1) != 0


@triton.jit
def edited(x, edit, ids, width, edit_bits, edit_values, bit_columns):
    """`x` with the values of row `edit` of the edits where they are set."""
    if edit >= 0:
        known = bits_of(edit_bits, edit, bit_columns, ids, width)
        x = tl.where(known, tl.load(edit_values + edit * width + ids, mask=known, other=0.0), x)
    return x


@triton.jit
def read_tile(
    logits, stride, width, ints, job, ids,
    edit_bits, edit_values, stop_bits, stop_left, bit_columns, masks, mask_columns, plain: tl.constexpr,
):  # fmt: skip
    """Logits of a job as given, and after edits, stop mask and grammar; in the latter NaN is -inf, so they have an
    order. plain: no job has any of these."""
    raw = read_raw(logits, stride, job_int(ints, job, ROW), ids, width)
    x = raw
    if not plain:
        x = edited(x, job_int(ints, job, EDIT), ids, width, edit_bits, edit_values, bit_columns)
        stop = job_int(ints, job, STOP)
        mask = job_int(ints, job, MASK)
        if stop >= 0:  # noqa: SIM102 - no row -1 may be read
            # a mask that leaves nothing is passed over
            if tl.load(stop_left + stop) > 0:
                x = tl.where(bits_of(stop_bits, stop, bit_columns, ids, width), float("-inf"), x)
        if mask >= 0:
            x = tl.where(bits_of(masks, mask, mask_columns, ids, width), x, float("-inf"))
    # the larger of NaN and a number is the number
    return raw, tl.maximum(x, float("-inf"))


@triton.jit
def order_of(x, ids, width):
    """int64: larger for the larger logit, then for the lower id; all differ within a row."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 ties with 0.0
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(ids < width, key * 4294967296 + (0x7FFFFFFF - ids).to(tl.int64), NOTHING)


@triton.jit
def id_of(order):
    return 0x7FFFFFFF - (order & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def value_of(order):
    key = (order >> 32).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def best_of(tile_best, job, tiles, padded: tl.constexpr):
    """float32: a job's largest logit."""
    number = tl.arange(0, padded)
    return tl.max(tl.load(tile_best + job * tiles + number, mask=number < tiles, other=float("-inf")), axis=0)


@triton.jit
def scaled(x, best, scale):
    """float64 log of each finite probability over the largest one."""
    return (x.to(tl.float64) - best.to(tl.float64)) * scale


@triton.jit
def reach_of(best, scale):
    """float32: no logit below has a mass (e^-37 of the largest is 2^-53). NaN where the largest is not finite: then
    none has one."""
    low = tl.maximum(best.to(tl.float64) - 45.0 / scale, -3.4028234663852886e38).to(tl.float32)
    return tl.where(tl.abs(best) < float("inf"), low, float("nan"))


@triton.jit
def _float64(number: tl.constexpr):
    return tl.full((), number, tl.float64)


@triton.jit
def mass_of(x, logs, reach, shift):
    """int64 masses of logits with these logs: exp(logs) * 2^shift, rounded to the nearest.

    Each step is an fma that no compiler may fuse otherwise, so that all kernels make the same masses.
    """
    # exp(logs) = 2^n * exp(part), |part| <= log(2) / 2; a sum with 1.5 * 2^52 holds n + shift in its low bits
    start = _float64(6755399441055744.0) + shift.to(tl.float64)
    number = tl.fma(logs, _float64(1.4426950408889634), start)
    part = tl.fma(start - number, _float64(0.6931471805599453), logs)
    # of a fit with a relative error of 2^-55
    power = tl.fma(part, _float64(2.510038549551032e-08), _float64(2.7620088445409746e-07))
    power = tl.fma(power, part, _float64(2.7557268459997064e-06))
    power = tl.fma(power, part, _float64(2.4801521295954376e-05))
    power = tl.fma(power, part, _float64(0.00019841269863053618))
    power = tl.fma(power, part, _float64(0.0013888888917213717))
    power = tl.fma(power, part, _float64(0.008333333333330062))
    power = tl.fma(power, part, _float64(0.04166666666662413))
    power = tl.fma(power, part, _float64(0.16666666666666669))
    power = tl.fma(power, part, _float64(0.5000000000000001))
    power = tl.fma(power, part, _float64(1.0))
    power = tl.fma(power, part, _float64(1.0))
    bits = power.to(tl.int64, bitcast=True) + (number.to(tl.int64, bitcast=True) << 52)
    # a sum with 2^52 is a whole number, in its low bits
    whole = bits.to(tl.float64, bitcast=True) + _float64(4503599627370496.0)
    return tl.where(x >= reach, whole.to(tl.int64, bitcast=True) - 0x4330000000000000, 0)


@triton.jit
def log_of_mass(mass, shift):
    """float64 log of a sum of masses over the mass of the largest logit.

    Kernels that subtract it from a log are launched without `enable_fp_fusion`: a product that was fused with the
    difference would be rounded once less, in one kernel and not in the next.
    """
    return tl.log(mass.to(tl.float64) / (tl.full((), 1, tl.int64) << shift).to(tl.float64))
