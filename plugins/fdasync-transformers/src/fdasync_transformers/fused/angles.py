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

from fdasync_transformers.fused.modules import OWN_FORWARD, text_modules
from fdasync_transformers.fused.replacement import Differs, Operation, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fdasync_transformers.fused.replacement import Case

_NAME = "RotaryEmbedding"
# kinds of the library whose frequencies are made once
_FIXED = ("default", "linear", "yarn", "llama3")
# of one model's tables; at a million positions the memory is worth more than the kernels
_MOST_NBYTES = 64 << 20
_AT_ONCE = 4096


class Angles(Operation[torch.Tensor]):
    """Modules that compute cosines and sines, by a table [positions, 2 columns] of the dtype: cosines, then sines.
    Positions past the config's most get NaN."""

    what, which = "tables of angles", "tables of angles of"

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._left = _MOST_NBYTES

    def finds(self, model: Any) -> Iterator[Place]:
        positions: Any = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        for name, module in text_modules(model):
            kind = type(module).__name__
            if _NAME in kind:
                yield Place(name, module, kind, refusal=_refusal(module, positions), given=positions)

    def candidates(self, place: Place) -> Iterator[torch.Tensor]:
        positions = place.given
        first = self._ask(place.module, torch.arange(1, device=self.device))
        nbytes = positions * first.numel() * first.element_size()
        if nbytes > self._left:
            raise Differs(
                f"a table of {positions} positions takes {nbytes >> 20} MiB, and {self._left >> 20} are left for it"
            )
        table = torch.empty((positions, first.shape[1]), dtype=self.dtype, device=self.device)
        for begin in range(0, positions, _AT_ONCE):
            numbers = torch.arange(begin, min(begin + _AT_ONCE, positions), device=self.device)
            table[begin : begin + len(numbers)] = self._ask(place.module, numbers)
        yield table

    def cases(self, place: Place) -> list[Case[torch.Tensor]]:
        """The answer may depend on the position alone: as few, in another order, and after the largest."""
        last = torch.tensor([place.given - 1])
        some = torch.randperm(place.given, generator=torch.Generator().manual_seed(0))[:7]
        return [partial(self._compare, place.module, numbers.to(self.device)) for numbers in (last, some)]

    def put(self, place: Place, candidate: torch.Tensor) -> None:
        self._left -= candidate.nbytes
        place.module.forward = _forward(place.module, candidate, self.dtype)

    def _compare(self, module: Any, numbers: torch.Tensor, table: torch.Tensor) -> None:
        if not torch.equal(angles_at(table, numbers), self._ask(module, numbers)):
            raise Differs("its answers depend on more than the position")

    def _ask(self, module: Any, numbers: torch.Tensor) -> torch.Tensor:
        """The library's cosines and sines of positions: [n, 2 columns]."""
        like = torch.empty(1, 1, dtype=self.dtype, device=self.device)
        answer = type(module).forward(module, like, numbers[None])
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise Differs("it does not return cosines and sines")
        if any(each.dtype is not self.dtype or each.dim() != 3 or each.shape != answer[0].shape for each in answer):
            raise Differs("it returns other shapes or dtypes than the layers' own")
        return torch.cat(answer, dim=-1)[0]


def _refusal(module: torch.nn.Module, positions: Any) -> str:
    if "forward" in vars(module):
        return OWN_FORWARD
    if [*inspect.signature(type(module).forward).parameters] != ["self", "x", "position_ids"]:
        return "it takes more than rows and positions"
    if [*module.parameters(), *module.children()]:
        return "it has parts"
    rope_type = getattr(module, "rope_type", None)
    if rope_type not in _FIXED:
        return f"its kind {rope_type} is none of {', '.join(_FIXED)}"
    if not isinstance(positions, int) or positions < 1:
        return "the config does not say how many positions there are"
    return ""


def _forward(module: Any, table: torch.Tensor, dtype: torch.dtype) -> Callable[..., Any]:
    library = type(module).forward
    columns = table.shape[1] // 2

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        if x.dtype is not dtype or position_ids.dim() != 2 or position_ids.shape[0] != 1:
            return library(module, x, position_ids)
        both = angles_at(table, position_ids[0].to(torch.int64).contiguous())[None]
        return both[..., :columns], both[..., columns:]

    return forward
