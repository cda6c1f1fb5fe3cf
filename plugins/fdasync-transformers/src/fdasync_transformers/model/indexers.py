"""Indexers: modules that pick, for each token, the positions that its attention reads.

An indexer scores a token against keys of its own, one for every token of the sequence, and picks the best. Those keys
are one more part of a block: a layer of the layout in group `KEYS`, so they are swapped, stored and handed over as KV
is. While a step is under way, the forward of every indexer is ours: it hands each group (`ragged.py`) to the library's
forward, with a cache that writes the new keys into the pool and gives back the keys of the whole context. Of equal
scores the earliest positions are picked, so that a choice depends on the sequence alone; the library leaves it to the
length of its rows. Outside of steps the library's forward is called as it is. Knows no attention. Called by
`execution/step.py`, `probe.py` and `refusals.py`.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from fdasync.errors import InvariantBroken
from fdasync_transformers.model.kv import LayerSpec, Reach, gather
from fdasync_transformers.model.recurrent.mixers import source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from fdasync_transformers.model.attention import TorchPaging
    from fdasync_transformers.model.kv import KVLayout
    from fdasync_transformers.model.ragged import Group

    #: computes an indexer from its arguments by name: positions int32 [1, T, k]
    Compute = Callable[[dict[str, Any]], torch.Tensor]
    #: gets the number of an indexer, from 0 in the order of their layers, and what it picked, int32 [T, k]
    Tell = Callable[[int, torch.Tensor], None]

#: the word of the keys in a layout's name
KEYS = "indexer"
_MASK, _CACHE = "attention_mask", "past_key_values"
_ARGUMENTS = {"hidden_states", "q_resid", "position_embeddings", _MASK, "position_ids", _CACHE}
# what a forward does that keeps one key a token in the library's cache, and returns positions
_DOES = (".update_indexer(", ".topk(", ".indices")


@dataclass(frozen=True)
class Indexer:
    """One indexer of a model.

    Attributes:
        name: of the module.
        module: the library's.
        layer: the `layer_idx` of its attention.
        heads: scores that it computes for a pair of tokens.
    """

    name: str
    module: torch.nn.Module
    layer: int
    heads: int


def picks_positions(module: torch.nn.Module) -> bool:
    """Whether a module is an indexer whose keys can be paged: it keeps one key a token, and returns positions."""
    kind = type(module)
    source = source_of(kind)
    if not all(call in source for call in _DOES):
        return False
    # of the class: the module's own may be replaced
    return set(list(inspect.signature(kind.forward).parameters)[1:]) == _ARGUMENTS


def find_indexers(model: torch.nn.Module) -> tuple[Indexer, ...]:
    """Every indexer that `picks_positions`, by its layer."""
    found = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "indexer" and picks_positions(module):
            own: Any = module
            found.append(Indexer(name, module, int(own.layer_idx), int(own.n_heads)))
    return tuple(sorted(found, key=lambda indexer: indexer.layer))


def key_specs(nbytes: Mapping[int, int], first: int, dtype: torch.dtype) -> tuple[LayerSpec, ...]:
    """The layers of a layout of this dtype that hold the keys, numbered from `first`. `nbytes`: by layer, of a key,
    which may have a wider dtype: its bytes are stored as they are."""
    return tuple(
        LayerSpec(first + number, 1, nbytes[layer] // dtype.itemsize, 0, group=KEYS)
        for number, layer in enumerate(sorted(nbytes))
    )


class IndexedForward:
    """The forward of an indexer, ours while `compute` is set.

    Attributes:
        indexer: whose forward it is.
        library: the forward that it had.
        compute: takes the call instead of the library.
    """

    def __init__(self, indexer: Indexer) -> None:
        own: Any = indexer.module.forward
        self._before = vars(indexer.module).get("forward")
        self._signature = inspect.signature(type(indexer.module).forward)
        self.indexer = indexer
        self.library: Callable[..., torch.Tensor] = own.library if isinstance(own, IndexedForward) else own
        self.compute: Compute | None = None
        module: Any = indexer.module
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.compute is None:
            return self.library(*args, **kwargs)
        named = self._signature.bind(None, *args, **kwargs).arguments
        return self.compute({name: value for name, value in named.items() if name in _ARGUMENTS})

    def detach(self) -> None:
        """The module has the forward again that it had."""
        module: Any = self.indexer.module
        del module.forward
        if self._before is not None:
            module.forward = self._before


@contextmanager
def noted_keys(model: torch.nn.Module, nbytes: dict[int, int]) -> Iterator[None]:
    """Within the context a pass of one token runs the library's indexers without a mask, and notes by layer the bytes
    of a key. `model` may be on the meta device."""
    forwards = [IndexedForward(indexer) for indexer in find_indexers(model)]
    try:
        for forward in forwards:
            forward.compute = partial(_noted, forward, nbytes)
        yield
    finally:
        for forward in forwards:
            forward.detach()


def _noted(forward: IndexedForward, nbytes: dict[int, int], named: dict[str, Any]) -> torch.Tensor:
    hidden: torch.Tensor = named["hidden_states"]
    note = _KeyNote()
    mask = torch.ones(1, hidden.shape[1], hidden.shape[1], dtype=torch.bool, device=hidden.device)
    picked = forward.library(**{**named, _MASK: mask, _CACHE: note})
    nbytes[forward.indexer.layer] = note.nbytes
    return picked


class _KeyNote:
    """Stands in for the library's cache, to see the size of a key."""

    nbytes = 0

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        del layer_idx
        self.nbytes = keys.shape[-1] * keys.element_size()
        return keys


class IndexerSteps:
    """The indexers of a model in paged steps.

    Attributes:
        heads: the most scores that one of them computes for a pair of tokens.

    `layout` is that of the pools of the steps. Raises InvariantBroken where it has not the keys of these indexers.
    """

    def __init__(self, model: torch.nn.Module, layout: KVLayout) -> None:
        self._forwards = [IndexedForward(indexer) for indexer in find_indexers(model)]
        self._specs = [layer for layer in layout.layers if layer.group == KEYS]
        if len(self._specs) != len(self._forwards):
            raise InvariantBroken(f"{len(self._forwards)} indexers, and keys of {len(self._specs)} in {layout.name}")
        self.heads = max((forward.indexer.heads for forward in self._forwards), default=0)

    @contextmanager
    def step(self, paging: TorchPaging, positions: torch.Tensor, tell: Tell | None = None) -> Iterator[None]:
        """Within the context the model computes the tokens of this step, at `positions` int64 [T]; `tell` gets what is
        picked for them."""
        groups = paging.plan.groups(Reach())
        seen = [(group, seen_of(group)) for group in groups]
        try:
            for number, (forward, spec) in enumerate(zip(self._forwards, self._specs, strict=True)):
                told = None if tell is None else partial(tell, number)
                forward.compute = partial(_pick, forward, spec, paging, positions, seen, told)
            yield
        finally:
            for forward in self._forwards:
                forward.compute = None


def seen_of(group: Group) -> torch.Tensor:
    """Whether a query may see a key: bool [P, C, Lk]."""
    if group.mask is None:
        raise InvariantBroken("a group of a step with indexers has no mask")
    return group.mask[:, 0] == 0


def _pick(
    forward: IndexedForward,
    spec: LayerSpec,
    paging: TorchPaging,
    positions: torch.Tensor,
    groups: Iterable[tuple[Group, torch.Tensor]],
    told: Callable[[torch.Tensor], None] | None,
    named: dict[str, Any],
) -> torch.Tensor:
    """Positions int32 [1, T, k] that the step's tokens read, the best first; -1 behind the last of fewer."""
    parts = []
    for group, seen in groups:
        own = {name: _rows(group, value) for name, value in named.items() if name not in (_MASK, _CACHE)}
        with EarliestOfEquals():
            picked = forward.library(**own, **{_MASK: seen, _CACHE: _PagedKeys(paging, spec, group)})
        parts.append((group, picked))
    most = max(picked.shape[-1] for _, picked in parts)
    out = torch.full((len(positions), most), -1, dtype=torch.int32, device=positions.device)
    for group, picked in parts:
        group.give(picked.unsqueeze(1), out[:, None, : picked.shape[-1]])
    # where a token sees fewer than are picked, the rest are positions behind it
    out.masked_fill_(out > positions[:, None], -1)
    if told is not None:
        told(out)
    return out[None]


def _rows(group: Group, value: Any) -> Any:
    """An argument [1, T, ...] of a step's tokens, as [P, C, ...] of a group's."""
    if isinstance(value, tuple):
        return tuple(_rows(group, part) for part in value)
    if value is None:
        return None
    flat = value[0].reshape(value.shape[1], 1, -1)
    return group.take(flat)[:, 0].reshape(group.pieces, group.queries, *value.shape[2:])


class _PagedKeys:
    """Stands in for the library's cache, for one group and layer of a step."""

    def __init__(self, paging: TorchPaging, spec: LayerSpec, group: Group) -> None:
        self._paging = paging
        self._spec = spec
        self._group = group

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Store the keys [P, C, D] of the group; returns the keys of all positions that it may see, [P, Lk, D]."""
        del layer_idx
        paging, group = self._paging, self._group
        view = paging.pool.keys[self._spec.index]
        rows = slice(group.first, group.first + group.pieces) if group.rows is None else group.rows
        stored = keys.contiguous().view(view.dtype)
        view[paging.blocks[rows], paging.offsets[rows]] = stored.reshape(-1, *view.shape[2:])
        return gather(view, group.table, group.pieces)[:, 0, : group.keys].view(keys.dtype)


class EarliestOfEquals(TorchFunctionMode):
    """Within the context `topk` of a float32 tensor takes the earliest of equal values, whatever the row's length."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.Tensor.topk:
            return _earliest(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _earliest(values: torch.Tensor, k: int, dim: int = -1) -> Any:
    if values.dtype != torch.float32 or dim not in (-1, values.dim() - 1):
        raise InvariantBroken(f"the best of {values.dtype} along {dim}: indexers take them of float32, along the last")
    # both zeros are one value
    bits = (values + 0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    backward = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    picked = ((order << 32) | backward).topk(k, dim=-1).indices
    return torch.return_types.topk((values.gather(-1, picked), picked))
