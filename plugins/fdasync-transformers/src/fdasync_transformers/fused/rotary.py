"""Replaces the rotary embedding of attention layers, which is ten small kernels, by one kernel.

The library's attention calls a function of its file, `apply_rotary_pos_emb` or one like it. An instance gets the same
forward, compiled code and all, with another function under that name, so nothing outside of the instance changes. One
plain pass of the model shows what each layer hands to the function; the library's function is run on random tensors of
that kind, and the kernel must give the same bits in one of its styles. Calls of another kind go the library's way.
Called by `operations.py`.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from fdasync_kernels.layer.rotary import rotate_unchecked

from fdasync.errors import UnsupportedModel
from fdasync_transformers.fused.modules import OWN_FORWARD, refuse_gradient, text_modules
from fdasync_transformers.fused.replacement import Operation, Place, first_proven, not_compared
from fdasync_transformers.fused.rotary_styles import Call, Turn, call_of, cases_of, form_of, tensors_of, turns_of
from fdasync_transformers.model import probe
from fdasync_transformers.model.moe_layers import without_experts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Function = Callable[..., Any]
    #: by module: what it calls, and how; None where one call is of an unknown kind
    Calls = dict[str, list[tuple[Function, Call]] | None]

_NAMES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb")
_PASS_TOKENS = 3


class Rotary(Operation[FunctionType]):
    """The rotary embedding in attention layers, by a forward that calls the kernel. Runs a plain pass of three tokens.
    Replaced modules raise RunnerError where a gradient is asked for."""

    what, which = "rotary embeddings", "rotary embeddings of"

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._turns: dict[tuple[Function, Call], Turn] = {}

    def finds(self, model: Any) -> Iterator[Place]:
        """Modules whose forward calls a function known by name, with these functions and the kinds of calls. Nothing
        may have replaced forwards of the model's attention yet."""
        places = []
        for name, module in text_modules(model):
            functions = _functions_of(module)
            if functions:
                wrapped = inspect.unwrap(type(module).forward) is not type(module).forward
                refusal = OWN_FORWARD if "forward" in vars(module) else "its forward is wrapped" if wrapped else ""
                places.append(Place(name, module, type(module).__name__, refusal=refusal, given=(functions, ())))
        found = [place for place in places if not place.refusal]
        try:
            seen = _watch(model, found) if found else {}
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # models raise errors of many types
            places = [place._replace(refusal=place.refusal or not_compared(error)) for place in places]
        for place in places:
            calls = None if place.refusal else seen[place.name]
            if calls is None:
                yield place._replace(refusal=place.refusal or "it calls its function in a way unknown here")
            elif calls:
                # layers without a rotary embedding have the same code; layers with the same calls share it
                key = (type(place.module).forward, frozenset(calls))
                yield place._replace(key=key, given=(place.given[0], calls))

    def cases(self, place: Place) -> tuple[()]:  # noqa: ARG002
        """See the base: a call that several places share is proven once."""
        return ()

    def candidates(self, place: Place) -> Iterator[FunctionType]:
        """One, of which each kind of call is proven."""
        functions, calls = place.given
        for function, call in calls:
            if (function, call) not in self._turns:
                turn = first_proven(turns_of(call), cases_of(function, call, self.device))
                self._turns[function, call] = turn
        wrapped = {
            under: _fused(function, {call: self._turns[f, call] for f, call in calls if f is function})
            for under, function in functions.items()
        }
        yield _copy_with(type(place.module).forward, wrapped)

    def put(self, place: Place, candidate: FunctionType) -> None:
        place.module.forward = MethodType(candidate, place.module)


def _functions_of(module: torch.nn.Module) -> dict[str, Function]:
    """The functions of the rotary embedding that a module's forward calls, by the names that it has for them."""
    inner = inspect.unwrap(type(module).forward)
    if not isinstance(inner, FunctionType):
        return {}
    known = inner.__globals__
    return {under: known[under] for under in _NAMES if under in inner.__code__.co_names and form_of(known.get(under))}


def _copy_with(forward: FunctionType, functions: Mapping[str, Function]) -> FunctionType:
    """The same function, but that it finds others under some names."""
    known = {**forward.__globals__, **functions}
    made = FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _watch(model: Any, places: Sequence[Place]) -> Calls:
    """The kinds of calls of each module in a plain pass; None where one is of an unknown kind."""
    seen: dict[str, dict[tuple[Function, Call], None]] = {place.name: {} for place in places}
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

    with ExitStack() as watching:
        for place in places:
            functions, _ = place.given
            under = {under: watched(place.name, function) for under, function in functions.items()}
            forward = MethodType(_copy_with(type(place.module).forward, under), place.module)
            watching.enter_context(patch.object(place.module, "forward", forward))
        _run(model)
    return {name: None if name in strange else list(calls) for name, calls in seen.items()}


@torch.inference_mode()
def _run(model: Any) -> None:
    ids = torch.zeros((1, _PASS_TOKENS), dtype=torch.long, device=model.device)
    # the library's attention reads values back, which a model without memory has not
    meta = model.device.type == "meta"
    run = partial(probe.run, model) if meta else partial(model, input_ids=ids, use_cache=False)
    try:
        with without_experts(model):
            run()
    except UnsupportedModel:
        run()


def _fused(function: Function, turns: Mapping[Call, Turn]) -> Function:
    """The function for the kinds of calls that were proven; the library's for others."""
    known: dict[tuple[Any, ...], Turn] = {tuple(call): turn for call, turn in turns.items()}

    def turned(q: Any, k: Any, cos: Any, sin: Any, axis: int) -> Any:
        """The rotated queries and keys; None: such a call was not proven."""
        if not len(q) == len(cos) == 1 or (k is not None and len(k) != 1):
            return None
        call = (q.dtype, cos.dtype, q.shape[-1], 0 if k is None else k.shape[-1], cos.shape[-1], axis)
        turn = known.get(call)
        if turn is None or (axis and (q.dim() != 4 or q.shape[3 - axis] != cos.shape[1])):
            return None
        if torch.is_grad_enabled():
            refuse_gradient(q, k)
        if not axis:
            cos, sin = torch.view_as_real(cos).unbind(-1)
        return rotate_unchecked(q, k, cos, sin, *turn)

    def pair(q: Any, k: Any = None, cos: Any = None, sin: Any = None, *rest: Any, **named: Any) -> Any:
        plain = k is not None and not rest and named.keys() <= {"unsqueeze_dim"}
        found = turned(q, k, cos, sin, named.get("unsqueeze_dim", 1)) if plain else None
        return function(q, k, cos, sin, *rest, **named) if found is None else found

    def single(x: Any, cos: Any, sin: Any, *rest: Any, **named: Any) -> Any:
        plain = not rest and named.keys() <= {"unsqueeze_dim"}
        found = turned(x, None, cos, sin, named.get("unsqueeze_dim", 1)) if plain else None
        return function(x, cos, sin, *rest, **named) if found is None else found[0]

    def numbers(xq: Any, xk: Any, freqs_cis: Any) -> Any:
        found = turned(xq, xk, freqs_cis, None, 0)
        return function(xq, xk, freqs_cis) if found is None else found

    forms: dict[str, Function] = {"pair": pair, "single": single, "complex": numbers}
    return forms[form_of(function)]
