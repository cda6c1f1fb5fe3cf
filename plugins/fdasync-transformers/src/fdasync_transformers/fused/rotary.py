"""Replaces the rotary embedding of attention layers, which is ten small kernels, by one kernel.

The library's attention calls a function of its file, `apply_rotary_pos_emb` or one like it. An instance gets the same
forward, compiled code and all, with another function under that name, so nothing outside of the instance changes. One
plain pass of the model shows what each layer hands to the function; the library's function is run on random tensors of
that kind, and the kernel must give the same bits in one of its styles. Calls of another kind go the library's way.
Called by `operations.py`.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from fdasync_kernels.layer.rotary import rotate_unchecked

from fdasync.errors import UnsupportedModel
from fdasync_transformers.fused.proofs import guarded
from fdasync_transformers.fused.replaced import Replaced, refuse_gradient, text_modules
from fdasync_transformers.fused.rotary_styles import Call, Proof, call_of, form_of, prove, tensors_of
from fdasync_transformers.model.moe_layers import without_experts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Function = Callable[..., Any]
    #: by module: what it calls, and how; None where one call is of an unknown kind
    Calls = dict[str, list[tuple[Function, Call]] | None]

_NAMES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb")
_PASS_TOKENS = 3


def fuse_rotary(model: Any, device: torch.device) -> Replaced:
    """Replace the rotary embedding in the attention layers of a model, in place; runs a plain pass of three tokens.

    Args:
        model: in inference, with the library's own attention: nothing may have replaced its forwards yet.
        device: of the weights.

    Returns:
        The replaced modules. They raise RunnerError where a gradient is asked for.
    """
    replaced = Replaced()
    found = dict(_candidates(model, replaced))
    if not found:
        return replaced
    watch: Callable[[], Calls | str] = partial(_watch, model, found)
    seen = guarded(watch, str)
    if isinstance(seen, str):
        for module, _ in found.values():
            replaced.leave(type(module).__name__, seen)
        return replaced
    proofs: dict[tuple[Function, Call], Proof] = {}
    copies: dict[tuple[FunctionType, frozenset[tuple[Function, Call]]], FunctionType] = {}
    for name, (module, functions) in found.items():
        calls = seen[name]
        # layers without a rotary embedding have the same code
        if calls is not None and not calls:
            continue
        reason = "it calls its function in a way unknown here" if calls is None else ""
        for function, call in calls or ():
            if (function, call) not in proofs:
                proofs[function, call] = guarded(partial(prove, function, call, device), _refused)
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


def _refused(reason: str) -> Proof:
    return Proof(None, False, reason)


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
            if under in inner.__code__.co_names and form_of(inner.__globals__.get(under))
        }
        if not functions:
            continue
        if "forward" in vars(module):
            replaced.leave(type(module).__name__, "it has a forward of its own already")
        elif inner is not forward:
            replaced.leave(type(module).__name__, "its forward is wrapped")
        else:
            yield name, (module, functions)


def _copy_with(forward: FunctionType, functions: Mapping[str, Function]) -> FunctionType:
    """The same function, but that it finds others under some names."""
    known = {**forward.__globals__, **functions}
    made = FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _watch(model: Any, found: Mapping[str, tuple[torch.nn.Module, dict[str, Function]]]) -> Calls:
    """The kinds of calls of each module in a plain pass; None where one is of an unknown kind."""
    seen: dict[str, dict[tuple[Function, Call], None]] = {name: {} for name in found}
    strange: set[str] = set()

    def watched(name: str, function: Function) -> Function:
        def look(*args: Any, **named: Any) -> Any:
            tensors = tensors_of(function, args, named)
            call = None if tensors is None else call_of(*tensors)
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


def _fused(function: Function, proofs: Mapping[Call, Proof]) -> Function:
    """The function for the kinds of calls that were proven; the library's for others."""
    form = form_of(function)
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

    forms: dict[str, Function] = {"pair": pair, "single": single, "complex": numbers}
    return forms[form]
