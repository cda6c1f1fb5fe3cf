"""How the library's functions of the rotary embedding are called, and in which style of the kernel they compute.

The library's function is run on random tensors of a kind of call; the kernel must give the same bits in one style.
Knows no models. Called by `rotary.py`.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from fdasync_kernels.layer.rotary import CONTRACTIONS, Style, rotate_unchecked

from fdasync_transformers.fused.modules import Noise
from fdasync_transformers.fused.replacement import Differs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fdasync_transformers.fused.replacement import Case

    Function = Callable[..., Any]

_TOKENS = (1, 3, 18)

# the common ones first: each that is tried is compiled
_STYLES = (
    Style(),
    Style("neighbours", "halves", "first"),
    Style("neighbours", "neighbours", "first"),
    Style("neighbours", "neighbours", "own"),
    Style("halves", "halves", "pair"),
    Style("halves", "halves", "first"),
    Style("neighbours", "neighbours", "pair"),
)
_COMPLEX = Style("neighbours", "neighbours", "pair", wide=True)


class Call(NamedTuple):
    """What decides how a call is computed; equal for calls that differ in tokens alone.

    Attributes:
        dtype, table_dtype: of queries, and of cosines and sines.
        dim, key_dim: of heads; key_dim is 0 without keys.
        columns: of the tables.
        axis: `unsqueeze_dim`: 1 for [1, H, T, D], 2 for [1, T, H, D]; 0 for complex tables, which have none.
    """

    dtype: torch.dtype
    table_dtype: torch.dtype
    dim: int
    key_dim: int
    columns: int
    axis: int


class Turn(NamedTuple):
    """How the kernel computes a kind of call; `heads_first`: of complex tables, which say no axis."""

    style: Style
    heads_first: bool


# a kind of call: queries, keys or None, cosines and sines (or complex numbers and None), axis
Tensors = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None, int]


def form_of(function: Any) -> str:
    """How a function takes its tensors, by the names of its parameters; "" for one unknown."""
    if not isinstance(function, FunctionType):
        return ""
    names = list(inspect.signature(function).parameters)
    if names[:4] == ["q", "k", "cos", "sin"]:
        return "pair"
    if names[:3] == ["x", "cos", "sin"]:
        return "single"
    if names == ["xq", "xk", "freqs_cis"]:
        return "complex"
    return ""


def tensors_of(function: Function, args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensors | None:
    """The tensors of a call, whatever it names; None for a call that the kernel does not know."""
    form = form_of(function)
    try:
        bound = inspect.signature(function).bind(*args, **named)
    except TypeError:
        return None
    bound.apply_defaults()
    values = bound.arguments
    if form == "complex":
        return values["xq"], values["xk"], values["freqs_cis"], None, 0
    if values.get("position_ids") is not None or values["cos"] is None or values["sin"] is None:
        return None
    axis = values.get("unsqueeze_dim", 1)
    if form == "single":
        return values["x"], None, values["cos"], values["sin"], axis
    if values["k"] is None:
        return None
    return values["q"], values["k"], values["cos"], values["sin"], axis


def call_of(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor | None, axis: int
) -> Call | None:
    """The kind of a call; None if no kernel computes it: several rows of a batch, or other shapes."""
    if q.dim() != 4 or len(q) != 1 or cos.dim() != 3 or len(cos) != 1 or axis not in (0, 1, 2):
        return None
    if k is not None and (k.dim() != 4 or len(k) != 1):
        return None
    # complex tables have T in the place of q's dimension 1 or 2, and a style says which
    if axis and q.shape[3 - axis] != cos.shape[1]:
        return None
    if not axis and cos.dtype is not torch.complex64:
        return None
    if sin is not None and sin.shape != cos.shape:
        return None
    return Call(q.dtype, cos.dtype, q.shape[3], 0 if k is None else k.shape[3], cos.shape[2], axis)


def turns_of(call: Call) -> Iterator[Turn]:
    """Styles and orders of dimensions that a call may have. Raises Differs for a call that has none."""
    if call.key_dim not in (0, call.dim):
        raise Differs("heads of queries and keys differ in size")
    if call.axis and call.table_dtype not in (call.dtype, torch.float32):
        raise Differs(f"its tables are {call.table_dtype}")
    if not call.axis:
        # on a device a compiler chose which product of a complex sum it rounds
        for contracted in CONTRACTIONS:
            for heads_first in (True, False):
                yield Turn(_COMPLEX._replace(contracted=contracted), heads_first)
        return
    for wide in (False, True) if call.dtype is not torch.float32 else (False,):
        for style in _STYLES:
            rotated = 2 * call.columns if style.table == "pair" else call.columns
            if rotated % 2 or rotated > call.dim:
                continue
            for trailing in (False, True) if rotated < call.dim else (False,):
                yield Turn(style._replace(wide=wide, trailing=trailing), call.axis == 1)


def cases_of(function: Function, call: Call, device: torch.device) -> list[Case[Turn]]:
    """What a style must pass for calls of a kind."""
    return [partial(_compare, function, call, tokens, device) for tokens in _TOKENS]


def _compare(function: Function, call: Call, tokens: int, device: torch.device, turn: Turn) -> None:
    """Raise Differs unless the kernel gives the library's bits on random tensors, whose tables have no two equal
    columns."""
    noise, (style, heads_first) = Noise(device), turn

    def heads(count: int, dim: int) -> torch.Tensor:
        made = noise.normal(1, tokens, count, dim, dtype=call.dtype)
        return made.transpose(1, 2) if heads_first else made

    unknown = Differs(f"{function.__name__} rotates in no style known here")
    q = heads(4, call.dim)
    k = heads(2, call.key_dim) if call.key_dim else None
    table = (1, tokens, call.columns)
    if call.axis:
        cos = noise.normal(*table, dtype=call.table_dtype)
        sin = noise.normal(*table, dtype=call.table_dtype)
        named = {"unsqueeze_dim": call.axis}
        library = function(q, cos, sin, **named) if k is None else function(q, k, cos, sin, **named)
    else:
        numbers = torch.complex(noise.normal(*table, dtype=torch.float32), noise.normal(*table, dtype=torch.float32))
        try:
            library = function(q, k, numbers)
        except RuntimeError:
            # the library takes tokens and heads in the other order
            raise unknown from None
        cos, sin = torch.view_as_real(numbers).unbind(-1)
    ours = rotate_unchecked(q, k, cos, sin, style, heads_first)
    pairs = [(ours[0], library)] if k is None else list(zip(ours, library, strict=True))
    if not all(
        mine is not None and mine.dtype is theirs.dtype and mine.shape == theirs.shape and torch.equal(mine, theirs)
        for mine, theirs in pairs
    ):
        raise unknown
