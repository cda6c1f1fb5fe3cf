"""Stores matrices as compressed-tensors, AWQ, GPTQ and modelopt do, with loops and numpy alone.

Slow and obvious: the loader's dequantising is compared with what they stand for. Knows matrices, and
neither names of models nor files. Called by `quantised.py` and by tests.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

#: stored tensors by the end of their names, and the float32 matrix that they stand for
Written = tuple[dict[str, torch.Tensor], torch.Tensor]

# columns that share a scale: divides every row of the tiny models' matrices
GROUP = 8
# AWQ's order of columns in a word, from the lowest bits on
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FP8_MAX = 448.0


class Codes(NamedTuple):
    """A matrix as unsigned integers: (values - zeros) x scales.

    Attributes:
        values: uint32 [rows, columns].
        zeros: uint32 [rows, groups].
        scales: [rows, groups].
        groups: of each column.
    """

    values: np.ndarray[Any, Any]
    zeros: np.ndarray[Any, Any]
    scales: torch.Tensor
    groups: np.ndarray[Any, Any]

    def plain(self) -> torch.Tensor:
        """What they stand for: products in the dtype of the scales, in float32."""
        scales = self.scales.float().numpy()
        made = np.empty(self.values.shape, np.float32)
        for column, group in enumerate(self.groups):
            # float32 holds the product exactly
            whole = self.values[:, column].astype(np.float32) - self.zeros[:, group].astype(np.float32)
            made[:, column] = whole * scales[:, group]
        return torch.from_numpy(made).to(self.scales.dtype).float()


def codes_of(
    tensor: torch.Tensor, bits: int, group: int, dtype: torch.dtype, *, symmetric: bool, groups: Any = None
) -> Codes:
    """Quantise the rows of a matrix in groups of columns.

    Args:
        tensor: [rows, columns].
        bits: 4 or 8.
        group: columns that share a scale.
        dtype: of the scales.
        symmetric: about zero; else zero points differ.
        groups: of each column; None: in order.
    """
    numbers = tensor.float().numpy()
    order = np.arange(numbers.shape[1]) // group if groups is None else groups
    count, top = int(order.max()) + 1, 2**bits - 1
    values = np.zeros(numbers.shape, np.uint32)
    zeros = np.full((len(numbers), count), 2 ** (bits - 1), np.uint32)
    scales = torch.empty(len(numbers), count, dtype=dtype)
    for number in range(count):
        columns = np.flatnonzero(order == number)
        piece = numbers[:, columns]
        low, high = np.minimum(piece.min(1), 0), np.maximum(piece.max(1), 0)
        span = np.maximum(-low, high) * 2 if symmetric else high - low
        scales[:, number] = torch.from_numpy(span / top)
        steps = scales[:, number].float().numpy()
        if not symmetric:
            zeros[:, number] = np.clip(np.round(-low / steps), 0, top)
        whole = np.round(piece / steps[:, None]) + zeros[:, number, None]
        values[:, columns] = np.clip(whole, 0, top).astype(np.uint32)
    return Codes(values, zeros, scales, order)


def words_of(values: np.ndarray[Any, Any], bits: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack the values of each row into int32, from the lowest bits on; the last word is filled up with zeros."""
    a_word = 32 // bits
    count = -(-values.shape[1] // a_word)
    padded = np.zeros((len(values), count * a_word), np.uint32)
    padded[:, : values.shape[1]] = values
    words = np.zeros((len(values), count), np.uint32)
    for place in range(a_word):
        words |= padded[:, order[place] :: a_word] << np.uint32(place * bits)
    return torch.from_numpy(words.view(np.int32).copy())


def packed_of(tensor: torch.Tensor, bits: int = 4, group: int | None = GROUP, *, symmetric: bool = True) -> Written:
    """compressed-tensors' pack-quantized; `group` None: a scale for each row."""
    codes = codes_of(tensor, bits, group or tensor.shape[1], torch.bfloat16, symmetric=symmetric)
    parts = {
        "weight_packed": words_of(codes.values, bits),
        "weight_scale": codes.scales,
        "weight_shape": torch.tensor(tensor.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = words_of(codes.zeros.T, bits).T.contiguous()
    return parts, codes.plain()


def int8_of(tensor: torch.Tensor, group: int | None = None, *, symmetric: bool = True) -> Written:
    """compressed-tensors' int-quantized and naive-quantized; `group` None: a scale for each row."""
    codes = codes_of(tensor, 8, group or tensor.shape[1], torch.bfloat16, symmetric=symmetric)
    signed = [torch.from_numpy((part.astype(np.int32) - 128).astype(np.int8)) for part in (codes.values, codes.zeros)]
    parts = {"weight": signed[0], "weight_scale": codes.scales}
    if not symmetric:
        parts["weight_zero_point"] = signed[1]
    return parts, codes.plain()


def float8_of(
    tensor: torch.Tensor, block: tuple[int, int] | None = None, dtype: torch.dtype = torch.bfloat16
) -> Written:
    """compressed-tensors' float-quantized, scales in `dtype`; `block` None: one scale, of shape [1]."""
    rows, columns = tensor.shape
    height, width = block or (rows, columns)
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // height), -(-columns // width), dtype=dtype)
    plain = torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            piece = tensor[where].float()
            scales[i, j] = piece.abs().max() / _FP8_MAX
            values[where] = (piece / scales[i, j].float()).clamp(-_FP8_MAX, _FP8_MAX).to(values.dtype)
            plain[where] = (values[where].float() * scales[i, j].float()).to(scales.dtype).float()
    return {"weight": values, "weight_scale": scales if block else scales.reshape(1)}, plain


def modelopt_of(tensor: torch.Tensor) -> Written:
    """modelopt's FP8: a float32 scalar for a matrix, and one of the activations."""
    parts, plain = float8_of(tensor, dtype=torch.float32)
    return {**parts, "weight_scale": parts["weight_scale"].reshape(()), "input_scale": torch.tensor(0.5)}, plain


def awq_of(tensor: torch.Tensor, group: int = GROUP) -> Written:
    """AWQ's gemm layout, 4 bits."""
    codes = codes_of(tensor, 4, group, torch.float16, symmetric=False)
    parts = {
        "qweight": words_of(codes.values.T, 4, _AWQ_ORDER),
        "qzeros": words_of(codes.zeros.T, 4, _AWQ_ORDER),
        "scales": codes.scales.T.contiguous(),
    }
    return parts, codes.plain()


def gptq_of(
    tensor: torch.Tensor,
    bits: int = 4,
    group: int = GROUP,
    *,
    symmetric: bool = True,
    ordered: bool = True,
    v2: bool = False,
) -> Written:
    """GPTQ's layout; not `ordered`: columns belong to groups by an order of their own (desc_act)."""
    groups = np.arange(tensor.shape[1]) // group
    if not ordered:
        groups = np.random.default_rng(tensor.shape[1]).permutation(groups)
    codes = codes_of(tensor, bits, group, torch.float16, symmetric=symmetric, groups=groups)
    zeros = words_of(codes.zeros.T, bits).numpy().view(np.uint32)
    if not v2:
        # one less in each place, which borrows
        zeros = zeros - np.uint32(sum(1 << place for place in range(0, 32, bits)))
    parts = {
        "qweight": words_of(codes.values, bits).T.contiguous(),
        "qzeros": torch.from_numpy(zeros.view(np.int32).copy()),
        "scales": codes.scales.T.contiguous(),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return parts, codes.plain()


class Form(NamedTuple):
    """A way to store the matrices of a checkpoint.

    Attributes:
        write: stores one matrix.
        settings: what config.json says of it.
        only: a part of the names of the matrices that are stored so; "": all but routers' matrices.
    """

    write: Callable[[torch.Tensor], Written]
    settings: dict[str, Any]
    only: str = ""


def _group_config(how: str, strategy: str, kind: str = "int", bits: int = 8, **weights: Any) -> dict[str, Any]:
    """As compressed-tensors writes it, for one group of matrices."""
    args = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": args, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": how,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _awq_config() -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}


def _gptq_config(bits: int = 4, *, sym: bool = True, desc_act: bool = False, layout: str = "gptq") -> dict[str, Any]:
    sizes = {"bits": bits, "group_size": GROUP, "sym": sym, "desc_act": desc_act}
    return {"quant_method": "gptq", "checkpoint_format": layout, **sizes}


_BLOCK = (4, 8)
FORMS: dict[str, Form] = {
    "float-quantized": Form(
        partial(float8_of, block=(1, 1 << 20)), _group_config("float-quantized", "channel", "float")
    ),
    "float-quantized tensor": Form(float8_of, _group_config("float-quantized", "tensor", "float")),
    "float-quantized block": Form(
        partial(float8_of, block=_BLOCK), _group_config("float-quantized", "block", "float", block_structure=[*_BLOCK])
    ),
    "int-quantized": Form(int8_of, _group_config("int-quantized", "channel")),
    "naive-quantized": Form(
        partial(int8_of, group=GROUP, symmetric=False),
        _group_config("naive-quantized", "group", group_size=GROUP, symmetric=False),
    ),
    # as Kimi-K2-Thinking is published: experts alone
    "pack-quantized": Form(
        packed_of, _group_config("pack-quantized", "group", bits=4, group_size=GROUP), ".mlp.experts."
    ),
    "pack-quantized asymmetric": Form(
        partial(packed_of, symmetric=False),
        _group_config("pack-quantized", "group", bits=4, group_size=GROUP, symmetric=False),
    ),
    "pack-quantized 8 bits": Form(partial(packed_of, bits=8, group=None), _group_config("pack-quantized", "channel")),
    "pack-quantized 8 bits asymmetric": Form(
        partial(packed_of, bits=8, group=None, symmetric=False),
        _group_config("pack-quantized", "channel", symmetric=False),
    ),
    "modelopt": Form(modelopt_of, {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": None}),
    "awq": Form(awq_of, _awq_config()),
    "gptq": Form(gptq_of, _gptq_config()),
    "gptq asymmetric": Form(partial(gptq_of, symmetric=False), _gptq_config(sym=False)),
    "gptq desc_act": Form(partial(gptq_of, ordered=False), _gptq_config(desc_act=True)),
    "gptq 8 bits": Form(partial(gptq_of, bits=8), _gptq_config(8)),
    "gptq_v2": Form(partial(gptq_of, symmetric=False, v2=True), _gptq_config(sym=False, layout="gptq_v2")),
}
