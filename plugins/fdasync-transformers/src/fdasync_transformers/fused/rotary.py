"""Replaces the rotary embedding of attention layers, which is ten small kernels, by one kernel.

The library's attention calls a function of its file, `apply_rotary_pos_emb` or one like it. An instance gets the same
forward, compiled code and all, with another function under that name, so nothing outside of the instance changes. One
plain pass of the model shows what each layer hands to the function; the library's function is run on random tensors of
that kind, and the kernel must give the same bits in one of its styles. Calls of another kind go the library's way.
Called by `operations.py`.
"""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fdasync.errors import UnsupportedModel
from fdasync.gpu.kernels.rotary import CONTRACTIONS, Style, rotate_unchecked
from fdasync_transformers.fused.replaced import Noise, Replaced, refuse_gradient, text_modules
from fdasync_transformers.model.moe_layers import without_experts

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    Function = Callable[..., Any]

_NAMES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb")
_TOKENS = (1, 3, 18)
_PASS_TOKENS = 3

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


class _Call(NamedTuple):
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


class _Proof(NamedTuple):
    style: Style | None
    heads_first: bool
    reason: str


# a kind of call: queries, keys or None, cosines and sines (or complex numbers and None), axis
_Tensors = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None, int]


def fuse_rotary(model: Any, device: torch.device) -> Replaced:
    """Replace the rotary embedding in the attention layers of a model, in place; runs a plain pass of three tokens.

    Args:
        model: in inference, with the library's own attention: nothing may have replaced its forwards yet.
        device: of the weights.

    Returns:
        The replaced modules; `undo` restores them. They raise RunnerError where a gradient is asked for.
    """
    replaced = Replaced()
    found = dict(_candidates(model, replaced))
    if not found:
        return replaced
    seen = _watch(model, found)
    proofs: dict[tuple[Function, _Call], _Proof] = {}
    copies: dict[tuple[FunctionType, frozenset[tuple[Function, _Call]]], FunctionType] = {}
    for name, (module, functions) in found.items():
        calls = seen[name]
        # layers without a rotary embedding have the same code
        if calls is not None and not calls:
            continue
        reason = "it calls its function in a way unknown here" if calls is None else ""
        for function, call in calls or ():
            if (function, call) not in proofs:
                proofs[function, call] = _prove(function, call, device)
            reason = reason or proofs[function, call].reason
        if reason or calls is None:
            replaced.leave(type(module).__name__, reason)
            continue
        # layers with the same calls share the code
        forward: Any = type(module).forward
        key = (forward, frozenset(calls))
        if key not in copies:
            wrapped = {
                under: _fused(function, {call: proofs[f, call] for f, call in calls if f is function})
                for under, function in functions.items()
            }
            copies[key] = _copy_with(forward, wrapped)
        replaced.put(name, module, MethodType(copies[key], module))
    return replaced


def _candidates(
    model: torch.nn.Module, replaced: Replaced
) -> Iterator[tuple[str, tuple[torch.nn.Module, dict[str, Function]]]]:
    """Modules whose forward calls a function known by name, and these functions."""
    for name, module in text_modules(model):
        forward: Any = type(module).forward
        inner = inspect.unwrap(forward)
        if not isinstance(inner, FunctionType):
            continue
        functions = {
            under: inner.__globals__[under]
            for under in _NAMES
            if under in inner.__code__.co_names and _form(inner.__globals__.get(under))
        }
        if not functions:
            continue
        if "forward" in vars(module):
            replaced.leave(type(module).__name__, "it has a forward of its own already")
        elif inner is not forward:
            replaced.leave(type(module).__name__, "its forward is wrapped")
        else:
            yield name, (module, functions)


def _form(function: Any) -> str:
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


def _copy_with(forward: FunctionType, functions: Mapping[str, Function]) -> FunctionType:
    """The same function, but that it finds others under some names."""
    known = {**forward.__globals__, **functions}
    made = FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _watch(
    model: Any, found: Mapping[str, tuple[torch.nn.Module, dict[str, Function]]]
) -> dict[str, list[tuple[Function, _Call]] | None]:
    """The kinds of calls of each module in a plain pass; None where one is of an unknown kind."""
    seen: dict[str, dict[tuple[Function, _Call], None]] = {name: {} for name in found}
    strange: set[str] = set()

    def watched(name: str, function: Function) -> Function:
        def look(*args: Any, **named: Any) -> Any:
            tensors = _tensors_of(function, args, named)
            call = None if tensors is None else _call_of(*tensors)
            if call is None:
                strange.add(name)
            else:
                seen[name][function, call] = None
            return function(*args, **named)

        return look

    watching: list[Any] = []
    try:
        for name, (module, functions) in found.items():
            forward: Any = type(module).forward
            under = {under: watched(name, function) for under, function in functions.items()}
            own: Any = module
            own.forward = MethodType(_copy_with(forward, under), module)
            watching.append(own)
        _run(model)
    finally:
        for own in watching:
            del own.forward
    return {name: None if name in strange else list(calls) for name, calls in seen.items()}


@torch.inference_mode()
def _run(model: Any) -> None:
    ids = torch.zeros((1, _PASS_TOKENS), dtype=torch.long, device=model.device)
    try:
        with without_experts(model):
            model(input_ids=ids, use_cache=False)
    except UnsupportedModel:
        model(input_ids=ids, use_cache=False)


def _tensors_of(function: Function, args: tuple[Any, ...], named: Mapping[str, Any]) -> _Tensors | None:
    """The tensors of a call, whatever it names; None for a call that the kernel does not know."""
    form = _form(function)
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


def _call_of(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor | None, axis: int
) -> _Call | None:
    """The kind of a call; None for one that no kernel computes: several rows of a batch, or other shapes."""
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
    return _Call(q.dtype, cos.dtype, q.shape[3], 0 if k is None else k.shape[3], cos.shape[2], axis)


@torch.inference_mode()
def _prove(function: Function, call: _Call, device: torch.device) -> _Proof:
    if call.key_dim not in (0, call.dim):
        return _Proof(None, False, "heads of queries and keys differ in size")
    if call.axis and call.table_dtype not in (call.dtype, torch.float32):
        return _Proof(None, False, f"its tables are {call.table_dtype}")
    for style, heads_first in _tries(call):
        if all(_equal(function, call, style, heads_first, tokens, device) for tokens in _TOKENS):
            return _Proof(style, heads_first, "")
    return _Proof(None, False, f"{function.__name__} rotates in no style known here")


def _tries(call: _Call) -> Iterator[tuple[Style, bool]]:
    """Styles and orders of dimensions that a call may have."""
    if not call.axis:
        # on a device a compiler chose which product of a complex sum it rounds
        for contracted in CONTRACTIONS:
            for heads_first in (True, False):
                yield _COMPLEX._replace(contracted=contracted), heads_first
        return
    for wide in (False, True) if call.dtype is not torch.float32 else (False,):
        for style in _STYLES:
            rotated = 2 * call.columns if style.table == "pair" else call.columns
            if rotated % 2 or rotated > call.dim:
                continue
            for trailing in (False, True) if rotated < call.dim else (False,):
                yield style._replace(wide=wide, trailing=trailing), call.axis == 1


def _equal(function: Function, call: _Call, style: Style, heads_first: bool, tokens: int, device: torch.device) -> bool:
    """Whether the kernel gives the library's bits on random tensors, whose tables have no two equal columns."""
    noise = Noise(device)

    def heads(count: int, dim: int) -> torch.Tensor:
        made = noise.normal(1, tokens, count, dim, dtype=call.dtype)
        return made.transpose(1, 2) if heads_first else made

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
            return False
        cos, sin = torch.view_as_real(numbers).unbind(-1)
    ours = rotate_unchecked(q, k, cos, sin, style, heads_first)
    pairs = [(ours[0], library)] if k is None else list(zip(ours, library, strict=True))
    return all(
        mine is not None and mine.dtype is theirs.dtype and mine.shape == theirs.shape and torch.equal(mine, theirs)
        for mine, theirs in pairs
    )


def _fused(function: Function, proofs: Mapping[_Call, _Proof]) -> Function:
    """The function for the kinds of calls that were proven; the library's for others."""
    form = _form(function)
    known = {tuple(call): (proof.style, proof.heads_first) for call, proof in proofs.items()}

    def pair(q: Any, k: Any = None, cos: Any = None, sin: Any = None, *rest: Any, **named: Any) -> Any:
        style = None
        if k is not None and not rest and len(q) == len(k) == len(cos) == 1 and named.keys() <= {"unsqueeze_dim"}:
            axis = named.get("unsqueeze_dim", 1)
            call = (q.dtype, cos.dtype, q.shape[-1], k.shape[-1], cos.shape[-1], axis)
            style, heads_first = known.get(call, (None, False))
        if style is None or q.dim() != 4 or q.shape[3 - axis] != cos.shape[1]:
            # which names a call may leave out is the library's affair
            given = {"q": q, "k": k, "cos": cos, "sin": sin}
            return function(*given.values(), *rest, **named)
        if torch.is_grad_enabled():
            refuse_gradient(q, k)
        return rotate_unchecked(q, k, cos, sin, style, heads_first)

    def single(x: Any, cos: Any, sin: Any, *rest: Any, **named: Any) -> Any:
        style = None
        if not rest and len(x) == len(cos) == 1 and named.keys() <= {"unsqueeze_dim"}:
            axis = named.get("unsqueeze_dim", 1)
            style, heads_first = known.get((x.dtype, cos.dtype, x.shape[-1], 0, cos.shape[-1], axis), (None, False))
        if style is None or x.dim() != 4 or x.shape[3 - axis] != cos.shape[1]:
            return function(x, cos, sin, *rest, **named)
        if torch.is_grad_enabled():
            refuse_gradient(x)
        return rotate_unchecked(x, None, cos, sin, style, heads_first)[0]

    def numbers(xq: Any, xk: Any, freqs_cis: Any) -> Any:
        style = None
        if len(xq) == len(xk) == len(freqs_cis) == 1:
            call = (xq.dtype, freqs_cis.dtype, xq.shape[-1], xk.shape[-1], freqs_cis.shape[-1], 0)
            style, heads_first = known.get(call, (None, False))
        if style is None:
            return function(xq, xk, freqs_cis)
        if torch.is_grad_enabled():
            refuse_gradient(xq, xk)
        parts = torch.view_as_real(freqs_cis)
        return rotate_unchecked(xq, xk, parts[..., 0], parts[..., 1], style, heads_first)

    return {"pair": pair, "single": single, "complex": numbers}[form]
