"""What every module of a model took and gave for one sequence, token by token, as digests; and the first that differs.

Two models of the same names are compared: the model that an engine serves and a trainer's. Values are compared as
numbers, so a module may give them in another dtype. Sees modules that run as modules: a module that a kernel replaced,
or a captured graph runs, is left out. Knows no engine. Called by `trainer.py` and `fdasync verify-trainer`.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Digests = NDArray[np.uint64]

_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]+)(?:\.|$)")


class ModuleTrace:
    """Digests of one sequence's pass, or of several passes that each had the next tokens.

    Attributes:
        order: names of modules as they first ended, inner before outer; "(model)" is the model itself.
        tokens: that were forwarded.
    """

    def __init__(self) -> None:
        self.order: list[str] = []
        self.tokens = 0
        # by module, then by number of the tensor
        self._given: dict[str, dict[int, list[Digests]]] = {}
        self._taken: dict[str, dict[int, list[Digests]]] = {}
        self._rows = 0
        self._calls: dict[str, int] = {}

    def given(self, name: str) -> dict[int, Digests]:
        """The tensors that a module gave with an entry for each token: uint64 [tokens] by their number."""
        return {number: np.concatenate(parts) for number, parts in self._given.get(name, {}).items()}

    def taken(self, name: str) -> dict[int, Digests]:
        """As `given`, of what it took."""
        return {number: np.concatenate(parts) for number, parts in self._taken.get(name, {}).items()}

    def begin(self, rows: int) -> None:
        """A pass of so many tokens begins."""
        self._rows = rows
        self.tokens += rows
        self._calls.clear()

    def ended(self, module: str, args: Any, output: Any) -> None:
        """A module ended."""
        call = self._calls[module] = self._calls.get(module, 0) + 1
        name = module if call == 1 else f"{module} (call {call})"
        if name not in self._given:
            self.order.append(name)
        for held, values in ((self._given, output), (self._taken, args)):
            parts = held.setdefault(name, {})
            for number, tensor in enumerate(_tensors(values)):
                digests = row_digests(tensor, self._rows)
                if digests is not None:
                    parts.setdefault(number, []).append(digests)


class ModuleDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first module, as they ended, whose output differs.

    Attributes:
        module: its name in the model; "(model)": the model's own code, behind all modules.
        layer: number of its decoder layer; -1: it belongs to none.
        position: first position at which it differs.
        positions: how many positions differ.
        inputs_differ: what it took differs already, though no module gave it: the code around it computed it.
        compared: modules that ran on both sides up to here.
    """

    module: str
    layer: int
    position: int
    positions: int
    inputs_differ: bool
    compared: int


@contextmanager
def traced(model: torch.nn.Module) -> Iterator[ModuleTrace]:
    """Watch a model's passes; each is of one sequence, or of its next tokens, in `input_ids`. Hooks go at the end."""
    trace = ModuleTrace()

    def begin(_module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        trace.begin(0 if ids is None else ids.numel())

    def watch(name: str) -> Any:
        def ended(_module: Any, args: Any, kwargs: Any, output: Any) -> None:
            trace.ended(name, (*args, *kwargs.values()), output)

        return ended

    hooks = [model.register_forward_pre_hook(begin, with_kwargs=True)]
    hooks += [
        module.register_forward_hook(watch(name or "(model)"), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()


def first_difference(rollout: ModuleTrace, trainer: ModuleTrace, prompt_len: int) -> ModuleDifference | None:
    """The first module in the trainer's order whose output differs; None: no module that both sides ran differs.

    Args:
        rollout, trainer: of the same sequence; the trainer may have forwarded its last token too.
        prompt_len: the rollout may compute the last parts (the head) for the sampled tokens alone.
    """
    compared = 0
    for name in trainer.order:
        theirs, ours = trainer.given(name), rollout.given(name)
        found = [
            wrong
            for number in theirs.keys() & ours.keys()
            if (wrong := _apart(ours[number], theirs[number], rollout.tokens, prompt_len)) is not None
        ]
        if not found:
            continue
        compared += 1
        first = min((wrong for wrong in found if wrong.size), key=lambda wrong: int(wrong[0]), default=None)
        if first is None:
            continue
        took, takes = rollout.taken(name), trainer.taken(name)
        inputs = [
            _apart(took[number], takes[number], rollout.tokens, prompt_len) for number in took.keys() & takes.keys()
        ]
        layer = _LAYER.search(name)
        return ModuleDifference(
            module=name,
            layer=-1 if layer is None else int(layer[1]),
            position=int(first[0]),
            positions=len(first),
            inputs_differ=any(wrong is not None and wrong.size > 0 for wrong in inputs),
            compared=compared,
        )
    return None


def _apart(ours: Digests, theirs: Digests, tokens: int, prompt_len: int) -> NDArray[np.int64] | None:
    """Positions that differ; None where the sides have other positions."""
    theirs = theirs[:tokens]
    if len(ours) == len(theirs) == tokens:
        return np.flatnonzero(ours != theirs)
    if len(ours) == tokens - prompt_len + 1 and len(theirs) == tokens:
        return np.flatnonzero(ours != theirs[prompt_len - 1 :]) + prompt_len - 1
    return None


def row_digests(tensor: torch.Tensor, rows: int) -> Digests | None:
    """XXH3-64 of each token's values, as float32 (float64 stays, integers as int64); None for a tensor that has no
    entry for each of `rows` tokens."""
    shape = tensor.shape[1:] if tensor.dim() > 2 and tensor.shape[0] == 1 else tensor.shape
    if tensor.dim() < 2 or not tensor.numel() or not rows or shape[0] > rows:
        return None
    values = tensor.detach()
    if not values.is_floating_point():
        values = values.to(torch.int64)
    elif values.dtype != torch.float64:
        values = values.to(torch.float32)
    table: NDArray[Any] = values.reshape(shape[0], -1).cpu().contiguous().numpy()
    return np.array([xxhash.xxh3_64_intdigest(row.tobytes()) for row in table], np.uint64)


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors of a module's arguments or output, in their order."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return []
