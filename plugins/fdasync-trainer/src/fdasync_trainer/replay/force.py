"""Forces a plain transformers model to route as recorded, and shows what its routers would have chosen.

A trainer replays the routing of a rollout so: the experts come from the record, the weights of the chosen experts from
the live logits, with their gradients. One code path serves all families: while a router runs, the one `topk` over its
experts returns the recorded ids (and the `topk` over expert groups the groups of these ids); the rest of the router is
the library's own. Knows nothing of engines, requests, or sequences in a batch. Called by `batch.py`,
`verification/verify.py` and training code.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from fdasync_transformers.model.moe_layers import find_experts
from fdasync_transformers.model.not_copied import NotCopied
from torch.overrides import TorchFunctionMode

from fdasync.errors import BadInput, InvariantBroken, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_BIAS = "e_score_correction_bias"


class RouterSite(msgspec.Struct, frozen=True):
    """Where a layer chooses its experts.

    Attributes:
        layer: hidden-layer number.
        router, experts: modules; `experts` takes (hidden, ids, weights), except in llama4.
        num_experts: width of the selection, identity experts included.
        num_groups: expert groups, 1 where there are none.
        top_k: experts per token; None where the router does not tell.
        by_max: the selection is `Tensor.max` once per slot instead of `topk` (phimoe).
        dense: `experts` takes no ids (llama4).
    """

    layer: int
    router: torch.nn.Module
    experts: torch.nn.Module
    num_experts: int
    num_groups: int
    top_k: int | None
    by_max: bool
    dense: bool


class Selection(msgspec.Struct, frozen=True):
    """The choice of a router, and its scores; detached, on the router's device.

    Attributes:
        ids: int64 [T, k], as the selection returned them.
        scores: [T, E]; the largest are chosen. The logits where the choice is by logits or by a softmax of them alone
            (same order, and finer than the softmax); else the sigmoid or softmax plus the correction bias, as a bias
            that is added after the activation has no meaning before it. Group mask not applied.
        group_scores: [T, G] as the choice of groups compares them, or None without groups.
        groups_kept: how many groups stay open; 0 without groups.
    """

    ids: torch.Tensor
    scores: torch.Tensor
    group_scores: torch.Tensor | None
    groups_kept: int


def find_routers(model: torch.nn.Module) -> dict[int, RouterSite]:
    """Router of every MoE layer of a transformers model, by layer, ascending; empty for a dense model.

    `moe_layers.find_experts` finds the experts; the router is a `gate` or `router` beside them.

    Raises:
        UnsupportedModel: as `find_experts`, and experts without such a router beside them.
    """
    kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    modules = dict(model.named_modules())
    sites: dict[int, RouterSite] = {}
    for layer, experts in find_experts(model).items():
        parent = experts.name.rpartition(".")[0]
        router = modules.get(f"{parent}.gate") or modules.get(f"{parent}.router")
        if router is None:
            raise UnsupportedModel(kind, f"{experts.name} has no router of its own beside it")
        groups = getattr(router, "num_group", None) or 1
        if groups > 1 and getattr(router, "topk_method", "") == "greedy":
            groups = 1
        sites[layer] = RouterSite(
            layer=layer,
            router=router,
            experts=experts.module,
            num_experts=experts.num_experts,
            num_groups=groups,
            top_k=_top_k(router),
            by_max=kind == "phimoe",
            dense=experts.dense,
        )
    return sites


def _top_k(router: torch.nn.Module) -> int | None:
    """As the router says, or the config that it keeps (Gemma 4)."""
    config = getattr(router, "config", None)
    told = getattr(router, "top_k", None) or getattr(config, "top_k_experts", None)
    return told if isinstance(told, int) else None


@contextmanager
def forced_routing(
    model: torch.nn.Module,
    rows_by_layer: Mapping[int, Any],
    *,
    live: dict[int, Selection] | None = None,
) -> Iterator[None]:
    """Within the context, every forward pass of `model` routes by `rows_by_layer`.

    Expert weights are computed from the live router logits at the forced ids, so gradients reach the
    routers as in an unforced pass. Keep the context open until backward has ended if checkpointing
    recomputes the forward pass. Slot order is kept as given (phimoe gives it a meaning).

    Args:
        model: a transformers causal LM, or its base model. Hooks are added, and removed at the end; while they are
            there, `copy.deepcopy` and pickling raise BadInput.
        rows_by_layer: integer ids [T, >= k] by layer (tensor or array); T counts the tokens of the pass,
            flattened. Columns past the layer's own k are not read. The router chooses for rows with a negative id and
            for layers left out. Must not change while the context is open.
        live: filled with the choice that each router would have made with the same inputs, one entry per layer of
            `rows_by_layer`; the router's forward then runs twice.

    Raises:
        UnsupportedModel: llama4 (no ids between router and experts); phimoe in training mode (it samples
            its experts); a router whose selection is not seen exactly once.
        BadInput: unknown layers, wrong shapes, ids that are not integers or not below the number of experts.
    """
    sites = find_routers(model)
    unknown = sorted(set(rows_by_layer) - set(sites))
    if unknown:
        raise BadInput("rows_by_layer", f"layers {unknown} have no experts", limit=f"{sorted(sites)}")
    with ExitStack() as stack:
        for layer, given in rows_by_layer.items():
            site = sites[layer]
            if site.dense:
                raise UnsupportedModel("llama4", "its experts take no ids, so its routing cannot be forced")
            rows = _checked(given, site)
            hook = RouterHook(site, partial(_same, rows), live)
            stack.callback(site.router.register_forward_pre_hook(hook.before).remove)
            stack.callback(site.router.register_forward_hook(hook.after, always_call=True).remove)
            stack.callback(hook.close)
        yield


@contextmanager
def observed_routing(model: torch.nn.Module, ids_by_layer: dict[int, torch.Tensor]) -> Iterator[None]:
    """Within the context, a forward pass writes the ids that reach each layer's experts to `ids_by_layer`.

    int64 [T, k], detached; a later pass replaces them. For llama4, whose experts take no ids, the finite
    entries of the router's scores.
    """
    with ExitStack() as stack:
        for site in find_routers(model).values():
            look = _Look(site.layer, ids_by_layer)
            if site.dense:
                stack.callback(site.router.register_forward_hook(look.after_router).remove)
            else:
                stack.callback(site.experts.register_forward_pre_hook(look.before_experts).remove)
        yield


class _Look(NotCopied):
    """Writes the ids of one layer to `ids_by_layer`."""

    def __init__(self, layer: int, ids_by_layer: dict[int, torch.Tensor]) -> None:
        self._layer = layer
        self._ids_by_layer = ids_by_layer

    def before_experts(self, _experts: Any, args: tuple[Any, ...]) -> None:
        self._ids_by_layer[self._layer] = args[1].detach().long()

    def after_router(self, router: Any, _args: Any, output: Any) -> None:
        self._ids_by_layer[self._layer] = torch.topk(output[1].detach(), router.top_k, dim=-1).indices


def _same(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    return rows.to(device)


def _checked(given: Any, site: RouterSite) -> torch.Tensor:
    field = f"rows_by_layer[{site.layer}]"
    rows = torch.as_tensor(given)
    if rows.ndim != 2 or rows.is_floating_point() or rows.dtype == torch.bool:
        raise BadInput(field, f"shape {tuple(rows.shape)}, dtype {rows.dtype}", limit="integers [T, k]")
    device = next(site.experts.parameters()).device
    rows = rows.to(device=device, dtype=torch.int64)
    if rows.numel() and int(rows.max()) >= site.num_experts:
        raise BadInput(field, f"expert {int(rows.max())} does not exist", limit=f"below {site.num_experts}")
    return rows


class RouterHook(NotCopied):
    """Enters a `_Selector` for each call of one router.

    `before` and `after` are a forward pre-hook and a forward hook (`always_call`) of the router. Call `close` after
    removing them: an interrupt (KeyboardInterrupt, SystemExit) skips all hooks.

    Args:
        site: the layer.
        rows: called in each call for int64 ids [T, >= k] on the device given; as `rows_by_layer` of `forced_routing`.
        live: filled with the router's own choice; None: that is not computed.
    """

    def __init__(
        self, site: RouterSite, rows: Callable[[torch.device], torch.Tensor], live: dict[int, Selection] | None
    ) -> None:
        self._site = site
        self._rows = rows
        self._live = live
        self._open: list[Any] = []  # one entry per call in progress

    def before(self, router: torch.nn.Module, args: tuple[Any, ...]) -> None:
        site = self._site
        if site.by_max and router.training:
            raise UnsupportedModel("phimoe", "in training mode its router samples experts; call router.eval()")
        if self._live is not None:
            self._live[site.layer] = _look(site, args)
        selector: Any = _Selector(site, self._rows(args[0].device))
        selector.__enter__()
        self._open.append(selector)

    def after(self, _router: torch.nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        # no entry if `before` raised: this hook is always called
        if not self._open:
            return
        selector = self._open.pop()
        _take_off(selector)
        if output is not None:  # None: the router itself raised (checkpointing stops a recomputation so)
            selector.check()

    def close(self) -> None:
        """Leave the selectors of interrupted calls."""
        while self._open:
            _take_off(self._open.pop())


@contextmanager
def choosing(site: RouterSite, ids: torch.Tensor) -> Iterator[None]:
    """Within the context, one call of a router of the library chooses `ids` int64 [T, k], none negative.

    Raises UnsupportedModel where its selection is not seen once.
    """
    selector: Any = _Selector(site, ids)
    selector.__enter__()
    try:
        yield
    finally:
        _take_off(selector)
    selector.check()


def forced_ids(router: torch.nn.Module) -> tuple[bool, torch.Tensor | None]:
    """Whether the running call of a router is watched or forced, and the rows that it is to choose, if any."""
    for mode in torch.overrides._get_current_function_mode_stack():
        if isinstance(mode, _Selector) and mode.site.router is router:
            return True, mode.rows
    return False, None


def _take_off(mode: TorchFunctionMode) -> None:
    """Leave a mode, at any place of the stack: an interrupted call may have left another mode above it."""
    modes: Any = torch.overrides
    above: list[TorchFunctionMode] = []
    while (top := modes._get_current_function_mode()) is not None and top is not mode:
        above.append(modes._pop_mode())
    if top is mode:
        modes._pop_mode()
    for other in reversed(above):
        modes._push_mode(other)


class _Selector(TorchFunctionMode):
    """While entered, replaces the selection of one router call by `rows`; None: only records the selection."""

    def __init__(self, site: RouterSite, rows: torch.Tensor | None) -> None:
        super().__init__()
        self.site = site
        self.rows = rows
        self.picked: list[torch.Tensor] = []
        self.scores: torch.Tensor | None = None
        self.unmasked: torch.Tensor | None = None
        self.group_scores: torch.Tensor | None = None
        self.groups_kept = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        site, table = self.site, args[0] if args else None
        result = func(*args, **(kwargs or {}))
        # with one group, [T, 1, E] of the search within groups has the width of a selection too
        if not isinstance(table, torch.Tensor) or table.ndim != 2:
            return result
        if site.by_max and func is torch.Tensor.max and table.shape[-1] == site.num_experts:
            return self._answer_max(table, result)
        if func in (torch.topk, torch.Tensor.topk):
            if table.shape[-1] == site.num_experts:
                return self._answer(table, result)
            if site.num_groups > 1 and table.shape[-1] == site.num_groups:
                return self._answer_groups(table, result)
        if func is torch.Tensor.masked_fill and table.shape[-1] == site.num_experts and not site.by_max:
            self.unmasked = table
        return result

    def check(self) -> None:
        """Raise unless the selection was seen once."""
        hits = len(self.picked)
        if hits != (2 if self.site.by_max else 1) or (self.site.num_groups > 1) != (self.group_scores is not None):
            raise UnsupportedModel(
                type(self.site.router).__name__, f"layer {self.site.layer}: its selection was seen {hits} times"
            )

    def _forced(self, live: torch.Tensor) -> torch.Tensor:
        """The rows in the shape of the live selection [T, k], live where a row is left to the router."""
        if self.rows is None:
            return live
        if self.rows.shape[0] != live.shape[0] or self.rows.shape[1] < live.shape[1]:
            raise BadInput(
                f"rows_by_layer[{self.site.layer}]",
                f"has shape {tuple(self.rows.shape)}",
                limit=f"{live.shape[0]} tokens of at least {live.shape[1]} experts",
            )
        rows = self.rows[:, : live.shape[1]]
        return torch.where((rows < 0).any(dim=-1, keepdim=True), live, rows)

    def _answer(self, table: torch.Tensor, result: Any) -> Any:
        self.scores = table
        self.picked.append(result[1])
        if self.rows is None:
            return result
        ids = self._forced(result[1])
        return torch.return_types.topk((table.gather(-1, ids), ids))

    def _answer_groups(self, table: torch.Tensor, result: Any) -> Any:
        self.group_scores, self.groups_kept = table, result[1].shape[-1]
        if self.rows is None or self.rows.shape[0] != table.shape[0]:
            return result  # a wrong length raises in the selection, which follows
        # as many columns as rows have: the ids only open groups, so repeats change nothing
        own = self.rows[:, : self.site.top_k or self.rows.shape[1]]
        columns = torch.arange(max(own.shape[1], self.groups_kept), device=table.device)
        live = result[1][:, columns.clamp(max=self.groups_kept - 1)]
        rows = own[:, columns.clamp(max=own.shape[1] - 1)]
        per_group = self.site.num_experts // self.site.num_groups
        groups = torch.where((rows < 0).any(dim=-1, keepdim=True), live, rows // per_group)
        return torch.return_types.topk((table.gather(-1, groups), groups))

    def _answer_max(self, table: torch.Tensor, result: Any) -> Any:
        if self.scores is None:
            self.scores = table
        slot = len(self.picked)
        self.picked.append(result[1])
        if self.rows is None or slot > 1:
            return result
        if self.rows.shape[0] != table.shape[0] or self.rows.shape[1] < 2:
            self._forced(table[:, :2])  # raises
        rows = self.rows[:, :2]
        ids = torch.where((rows < 0).any(dim=-1, keepdim=True), result[1], rows[:, slot : slot + 1])
        # the largest value stays live: the router compares other experts with it
        return torch.return_types.max((result[0], ids))


@torch.no_grad()
def _look(site: RouterSite, args: tuple[Any, ...]) -> Selection:
    """The router's own choice; calls its `forward`, so that no hook runs."""
    watch = _Selector(site, None)
    with watch:
        output = site.router.forward(*args)
    watch.check()
    scores = watch.scores
    if scores is None:
        raise InvariantBroken("a selection was seen and has no scores")
    biased = len(args) > 1 or any(name.rpartition(".")[2] == _BIAS for name in _tensor_names(site.router))
    if watch.unmasked is not None:
        scores = watch.unmasked
    if not biased:
        scores = output[0].reshape(scores.shape)
    return Selection(
        ids=torch.cat(watch.picked, dim=-1),
        scores=scores.detach(),
        group_scores=None if watch.group_scores is None else watch.group_scores.detach(),
        groups_kept=watch.groups_kept,
    )


def _tensor_names(module: torch.nn.Module) -> Iterator[str]:
    yield from (name for name, _ in module.named_parameters())
    yield from (name for name, _ in module.named_buffers())
