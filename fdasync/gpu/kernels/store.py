"""Writes a step's new keys and values into the paged pool: one kernel for both.

Knows strided views and flat slots; knows no sequences. Called by the attention of a runner, once per layer,
before `attention/decode.py` or `attention/prefill.py` read what it wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from fdasync.errors import BadInput

if TYPE_CHECKING:
    import torch


@triton.jit(do_not_specialize=["slots"])  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    key, value, keys, values, slots,
    key_row, key_head, value_row, value_head,
    keys_block, keys_token, keys_head, values_block, values_token, values_head,
    BLOCK_TOKENS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    # a program does WIDTH elements of one token, of its key and of its value
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    block = slot // BLOCK_TOKENS
    offset = slot % BLOCK_TOKENS
    element = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    head = element // KEY_DIM
    dim = element % KEY_DIM
    inside = element < HEADS * KEY_DIM
    read = tl.load(key + row * key_row + head.to(tl.int64) * key_head + dim, mask=inside)
    tl.store(keys + block * keys_block + offset * keys_token + head * keys_head + dim, read, mask=inside)
    if VALUE_DIM > 0:
        head = element // VALUE_DIM
        dim = element % VALUE_DIM
        inside = element < HEADS * VALUE_DIM
        read = tl.load(value + row * value_row + head.to(tl.int64) * value_head + dim, mask=inside)
        tl.store(values + block * values_block + offset * values_token + head * values_head + dim, read, mask=inside)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    slots: torch.Tensor,
) -> None:
    """Write each row's key and value to its slot; the rest of the pool stays as it is.

    `key` [T, KH, Dk] and `value` [T, KH, Dv] may have any strides but the last, which is 1; of a latent layer `value`
    and `values` are None. `keys` [num_blocks, block_tokens, KH, Dk] and `values` likewise are views of the pool and
    are written in place, rounded to the pool's dtype. `slots` int64 [T] is block * block_tokens + offset, -1 for rows
    that are not stored; no slot may occur twice. One launch on the current stream, no synchronisation; the tensors
    must live until it ran. Raises BadInput where the last dimension has a stride.
    """
    if key.stride(2) != 1 or keys.stride(3) != 1:
        raise BadInput("key", "the last dimension must be contiguous")
    value_dim = 0
    if value is None or values is None:
        value, values = key, keys
    else:
        if value.stride(2) != 1 or values.stride(3) != 1:
            raise BadInput("value", "the last dimension must be contiguous")
        value_dim = value.shape[2]
    rows, heads, key_dim = key.shape
    if not rows:
        return
    # wide enough that a token's row is one or two programs, narrow enough that a thread moves 16 bytes
    elements = heads * max(key_dim, value_dim)
    width = min(1024, triton.next_power_of_2(elements))
    _store[(rows, triton.cdiv(elements, width))](
        key, value, keys, values, slots,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
        BLOCK_TOKENS=keys.shape[1], HEADS=heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, WIDTH=width,
        num_warps=max(1, min(4, width // 256)),
    )  # fmt: skip
