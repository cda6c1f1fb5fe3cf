"""The judge of `shapes`: `HalfJudge` over a model that is as large as a device has room for once.

The reference is made as the engine's model was, after the engine is gone, and eager in attention and experts. What it
would say in float32 arithmetic is found without a second copy: every product widens the weights that it takes, one
matrix at a time. Knows no engine. Used by `child.py`, and by tests of judges.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.gpu.half import HalfJudge, look_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from benchmarks.gpu.half import Look
    from benchmarks.gpu.judge import Answer

_PRODUCTS = frozenset(
    {torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__}
    | {torch.bmm, torch.Tensor.bmm, torch.einsum}
)
_HALVES = (torch.bfloat16, torch.float16)


class Float32Arithmetic(TorchFunctionMode):
    """While it is entered, a model of half weights computes in float32: the same numbers as with `model.float()`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            args = tuple(_wide(value) for value in args)
            kwargs = {name: _wide(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        # MiniMax-M2 rounds what goes into its router to the dtype of the weights
        narrowed = func is torch.Tensor.to and args[0].dtype == torch.float32 and result.dtype in _HALVES
        if func is torch.nn.functional.embedding or narrowed:
            return _wide(args[0] if narrowed else result)
        return result


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def with_rows(answer: Answer, rows: NDArray[Any]) -> Answer:
    """An answer with other rows."""
    routing = answer.routing
    fields = {"start": routing.start, "layer_ids": routing.layer_ids, "num_experts": routing.num_experts}
    return replace(answer, routing=SimpleNamespace(array=rows, **fields))


class ShapeJudge(HalfJudge):
    """See the module. `calibrate` must come before `judge`.

    Args:
        make: makes the engine's model again.
    """

    def __init__(self, make: Callable[[], Any], device: torch.device) -> None:
        super().__init__({}, {0: "first"}, device, torch.bfloat16)
        self._make = make

    def _load(self, _weights: str) -> Any:
        model = self._make()
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
        return model

    def _exact_look(self) -> Look:
        model = self.model("first")

        def look(ids: torch.Tensor, rows: dict[int, torch.Tensor]) -> Any:
            with Float32Arithmetic():
                return look_at(model, ids, rows, 0)

        return look

    def misplaced(self, answer: Answer) -> float:
        """Share of an answer's rows that are called wrong when each is that of the position before, of those that
        name other experts then. A judge that takes these for ties would find nothing; 0 where no two rows differ."""
        rows = np.sort(answer.routing.array, axis=-1)
        moved = np.roll(rows, 1, axis=0)
        found = self._one(replace(with_rows(answer, moved), greedy=False))
        differ = int((rows != moved).any(-1).sum())
        return found.counts["wrong_rows"] / differ if differ else 0.0
