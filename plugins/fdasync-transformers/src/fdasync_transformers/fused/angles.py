"""Replaces modules that compute a rotary embedding's cosines and sines by tables, which one kernel reads.

Where frequencies never change, what such a module answers depends on the position alone. So it is asked once for every
position that the model has, and tables hold its very bits. Modules whose frequencies follow the length of a sequence
keep the library's code. Called by `operations.py`.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from fdasync_kernels.layer.angles import angles_at

from fdasync_transformers.fused.proofs import guarded
from fdasync_transformers.fused.replaced import Replaced, text_modules

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "RotaryEmbedding"
# kinds of the library whose frequencies are made once
_FIXED = ("default", "linear", "yarn", "llama3")
# of one model's tables; at a million positions the memory is worth more than the kernels
_MOST_NBYTES = 64 << 20
_AT_ONCE = 4096


def fuse_angles(model: Any, dtype: torch.dtype, device: torch.device) -> Replaced:
    """Replace these modules of a model, in place. Waits for the device.

    Args:
        model: in inference, with its weights on `device`; the config of its text half says how many positions it has.
        dtype: of the hidden states, and of the tables; others go the library's way.

    Returns:
        The replaced modules. Positions past the config's most get NaN.
    """
    replaced = Replaced()
    left = _MOST_NBYTES
    positions: Any = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in text_modules(model):
        kind = type(module).__name__
        if _NAME not in kind:
            continue
        reason = _unknown(module)
        if not reason and (not isinstance(positions, int) or positions < 1):
            reason = "the config does not say how many positions there are"
        if not reason:
            made = guarded(partial(_table, module, positions, dtype, device, left), lambda reason: reason)
            if isinstance(made, torch.Tensor):
                left -= made.nbytes
                replaced.put(name, module, _forward(module, made, dtype))
                continue
            reason = made
        replaced.leave(kind, reason)
    return replaced


def _unknown(module: torch.nn.Module) -> str:
    """Why a module is not even tried; "" if it is."""
    if "forward" in vars(module):
        return "it has a forward of its own already"
    if [*inspect.signature(type(module).forward).parameters] != ["self", "x", "position_ids"]:
        return "it takes more than rows and positions"
    if [*module.parameters(), *module.children()]:
        return "it has parts"
    rope_type = getattr(module, "rope_type", None)
    if rope_type not in _FIXED:
        return f"its kind {rope_type} is none of {', '.join(_FIXED)}"
    return ""


@torch.inference_mode()
def _table(module: Any, positions: int, dtype: torch.dtype, device: torch.device, most: int) -> torch.Tensor | str:
    """[positions, 2 columns] in the dtype: cosines, then sines; or why there is none."""
    library = type(module).forward
    like = torch.empty(1, 1, dtype=dtype, device=device)

    def ask(numbers: torch.Tensor) -> Any:
        answer = library(module, like, numbers[None])
        if not isinstance(answer, tuple) or len(answer) != 2:
            return "it does not return cosines and sines"
        if any(each.dtype is not dtype or each.dim() != 3 or each.shape != answer[0].shape for each in answer):
            return "it returns other shapes or dtypes than the layers' own"
        return torch.cat(answer, dim=-1)[0]

    first = ask(torch.arange(1, device=device))
    if isinstance(first, str):
        return first
    nbytes = positions * first.numel() * first.element_size()
    if nbytes > most:
        return f"a table of {positions} positions takes {nbytes >> 20} MiB, and {most >> 20} are left for it"
    table = torch.empty((positions, first.shape[1]), dtype=dtype, device=device)
    for begin in range(0, positions, _AT_ONCE):
        numbers = torch.arange(begin, min(begin + _AT_ONCE, positions), device=device)
        table[begin : begin + len(numbers)] = ask(numbers)
    # the answer may depend on the position alone: as few, in another order, and after the largest
    for some in (
        torch.tensor([positions - 1]),
        torch.randperm(positions, generator=torch.Generator().manual_seed(0))[:7],
    ):
        numbers = some.to(device)
        if not torch.equal(angles_at(table, numbers), ask(numbers)):
            return "its answers depend on more than the position"
    return table


def _forward(module: Any, table: torch.Tensor, dtype: torch.dtype) -> Callable[..., Any]:
    library = type(module).forward
    columns = table.shape[1] // 2

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        if x.dtype is not dtype or position_ids.dim() != 2 or position_ids.shape[0] != 1:
            return library(module, x, position_ids)
        both = angles_at(table, position_ids[0].to(torch.int64).contiguous())[None]
        return both[..., :columns], both[..., columns:]

    return forward
