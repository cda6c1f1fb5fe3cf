"""Proves that a router of ours chooses and weighs as a module of the library does, on logits made to tell kinds apart.

The module's own forward runs with its linear replaced: both sides get the same logits, so nothing hides behind
the rounding of a product. What the library compares in its selection is recorded, and our ids must be as good a choice
in its own numbers; so a kind can only pass by choosing the same experts, ties aside. Biases of the selection are set to
several values and restored. Beside that the product is held against float64. Knows no layers and no capture. Called by
`routers.py`, at start-up.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fdasync_transformers.fused.replacement import Differs
from fdasync_transformers.fused.router_kinds import part_of
from fdasync_transformers.fused.router_watch import run_watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fdasync_transformers.fused.router_kinds import RouterKind
    from fdasync_transformers.fused.router_watch import Watch

    Choose = Callable[..., tuple[torch.Tensor, torch.Tensor]]
    Product = Callable[..., torch.Tensor]

_PRODUCT_ROWS = 32
_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class RouterForm:
    """What a fused router returns, and how its product rounds.

    Attributes:
        order: those of "logits", "weights" and "ids" that the forward's answer has, in its order.
        logits_dtype, weights_dtype: of the answer.
        rounded: the linear is one of the hidden states' dtype; else of float32.
    """

    order: tuple[str, ...]
    logits_dtype: torch.dtype
    weights_dtype: torch.dtype
    rounded: bool


def check_choice(module: Any, kind: RouterKind, k: int, dtype: torch.dtype, choose: Choose, form: RouterForm) -> None:
    """Hold the choice and the weights of a kind against a module's; raises Differs.

    Args:
        module: the library's router; its bias of the selection is changed meanwhile, and restored.
        kind: of it.
        k: experts per token.
        dtype: of the hidden states.
        choose: (kind, logits, k, weights_dtype, selection bias, expert scale) gives our weights and ids.
        form: what `learn_form` has found.
    """
    weight = part_of(module, kind.weight)
    logits = _telling_logits(len(weight)).to(weight.device)
    logits = logits.to(dtype if form.rounded else torch.float32)
    strict = 0
    biases = _biases(module, kind, len(weight))
    for bias in biases:
        with _selection_bias(module, kind, bias) as used:
            watch, answer = run_watched(module, kind, _hidden(len(logits), weight, dtype), used, logits)
            parts = _named(answer, form.order)
            same = logits.softmax(-1, torch.float32) if kind.probabilities else logits.to(form.logits_dtype)
            if "logits" in parts and not torch.equal(parts["logits"], same):
                raise Differs("changes its logits")
            scale = part_of(module, kind.expert_scale) if kind.expert_scale else None
            ours = choose(kind, logits.to(form.logits_dtype), k, form.weights_dtype, used, scale)
            strict += _compare(kind, watch, logits, parts, ours, used)
    if strict < len(logits) * len(biases) // 2:
        raise Differs("shows too few rows without ties")


def _refuse_other_tensors(module: Any, kind: RouterKind) -> None:
    """A tensor that the kind does not name may change nothing now, and something after an update."""
    known = {kind.weight, kind.bias, kind.selection_bias, kind.expert_scale, *kind.other_tensors}
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if names - known:
        raise Differs(f"has tensors of no known use: {', '.join(sorted(names - known))}")


def learn_form(module: Any, kind: RouterKind, k: int, dtype: torch.dtype, product: Product) -> RouterForm:
    """What a router returns, learnt from it; compares the logits of random rows. Raises Differs.

    `product`: (x, weight, bias, rounded=, dtype=) gives our logits; for the rest see `check_choice`.
    """
    _refuse_other_tensors(module, kind)
    weight = part_of(module, kind.weight)
    linear_bias = part_of(module, kind.bias) if kind.bias else None
    hidden = _hidden(_PRODUCT_ROWS, weight, dtype)
    used = torch.zeros(len(weight), device=weight.device) if kind.bias_argument else None
    watch, answer = run_watched(module, kind, hidden, used, None)
    if len(watch.linears) != 1:
        raise Differs(f"has {len(watch.linears)} linears")
    x, factor, added = watch.linears[0]
    x = x.reshape(_PRODUCT_ROWS, -1)
    inputs = hidden if kind.prepare is None else kind.prepare(module, hidden)
    if not torch.equal(x.double(), inputs.double()) or not torch.equal(factor.double(), weight.double()):
        raise Differs("multiplies something else")
    if (added is None) != (linear_bias is None) or (
        added is not None and not torch.equal(added.double(), part_of(module, kind.bias).double())
    ):
        raise Differs("adds another bias to its logits")
    form = _form_of(answer, k, len(weight), x.dtype == dtype and dtype != torch.float32, dtype, kind)
    mine = product(inputs, weight, linear_bias, rounded=form.rounded, dtype=form.logits_dtype)
    exact = inputs.double() @ weight.double().T
    reach = 16 * _EPS * (inputs.double().abs() @ weight.double().abs().T)
    if linear_bias is not None:
        exact += linear_bias.double()
        reach += _EPS * linear_bias.double().abs()
    if form.rounded:
        reach += torch.finfo(dtype).eps * exact.abs()
    theirs = _named(answer, form.order).get("logits")
    sides = [("makes other logits than its weight does", mine)]
    if theirs is not None and not kind.probabilities:
        sides.append(("makes logits by another product", theirs))
    for words, side in sides:
        if side.shape != exact.shape or not bool(((side.double() - exact).abs() <= reach).all()):
            raise Differs(words)
    return form


def _form_of(answer: Any, k: int, experts: int, rounded: bool, dtype: torch.dtype, kind: RouterKind) -> RouterForm:
    """Which part of the answer is which; the logits are the first of two floats of the width of all experts."""
    if not isinstance(answer, tuple) or not all(isinstance(part, torch.Tensor) for part in answer):
        raise Differs("returns something else than tensors")
    order: list[str] = []
    for part in answer:
        width = part.shape[-1]
        if not part.is_floating_point() and width == k:
            order.append("ids")
        elif part.is_floating_point() and width == experts and (k != experts or "logits" not in order):
            order.append("logits")
        elif part.is_floating_point() and width == k:
            order.append("weights")
        else:
            raise Differs(f"returns {part.dtype} {tuple(part.shape)} too")
    if len(set(order)) != len(order) or not {"ids", "weights"} <= set(order):
        raise Differs("returns something else than logits, weights and ids")
    parts = _named(answer, tuple(order))
    if parts["ids"].dtype != torch.int64 or any(part.dim() != 2 for part in answer):
        raise Differs(f"returns ids {parts['ids'].dtype} {tuple(parts['ids'].shape)}")
    own = parts["logits"].dtype if "logits" in parts and not kind.probabilities else None
    return RouterForm(tuple(order), own or (dtype if rounded else torch.float32), parts["weights"].dtype, rounded)


def _compare(
    kind: RouterKind,
    watch: Watch,
    logits: torch.Tensor,
    theirs: dict[str, torch.Tensor],
    ours: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
) -> int:
    """Raise Differs unless ids and weights are the library's; the number of rows whose ids had to be the same."""
    weights, ids = ours
    if weights.shape != theirs["weights"].shape or weights.dtype != theirs["weights"].dtype:
        raise Differs(f"returns weights {theirs['weights'].dtype} {tuple(theirs['weights'].shape)}")
    scores = next((each for each in reversed(watch.compared) if each.shape == logits.shape), logits).float()
    eps = torch.finfo(logits.dtype).eps if kind.rule.rounded else 4 * _EPS
    near = 2 * eps * (scores.abs() + (0.0 if bias is None else bias.float().abs().max()))
    plain = _groups_are_plain(kind, watch, logits, 2 * eps)
    mine, library = scores.gather(1, ids).sort(-1).values, scores.gather(1, theirs["ids"]).sort(-1).values
    reach = near.gather(1, theirs["ids"]).max(-1, keepdim=True).values
    close = ((mine == library) | ((mine - library).abs() <= reach)).all(-1)
    if not bool((close | ~plain).all()):
        raise Differs("chooses other experts")
    mine_at, library_at = ids.sort(-1), theirs["ids"].sort(-1)
    same = (mine_at.values == library_at.values).all(-1)
    if bool((library_at.values[:, 1:] == library_at.values[:, :-1]).any()):
        raise Differs("chooses an expert twice")
    # in float64, so that the comparison adds no rounding
    mine_weights = weights.gather(1, mine_at.indices)[same].double()
    library_weights = theirs["weights"].gather(1, library_at.indices)[same].double()
    dtype = torch.finfo(weights.dtype)
    rtol = 2 * max(dtype.eps, torch.finfo(logits.dtype).eps if kind.rule.rounded else 0.0) + 1e-5
    atol = max(1e-30, 4 * dtype.tiny * dtype.eps)
    if not torch.allclose(mine_weights, library_weights, rtol=rtol, atol=atol, equal_nan=True):
        raise Differs("gives its experts other weights")
    return int((same & plain).sum())


def _groups_are_plain(kind: RouterKind, watch: Watch, logits: torch.Tensor, eps: float) -> torch.Tensor:
    """[rows] bool: whether rounding cannot change which groups are open."""
    rule = kind.rule
    scores = next((each for each in watch.compared if each.shape == (len(logits), rule.groups)), None)
    if not rule.grouped or scores is None:
        return torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    falling = scores.float().sort(-1, descending=True).values
    last, next_one = falling[:, rule.open_groups - 1], falling[:, rule.open_groups]
    return last - next_one > 2 * eps * scores.float().abs().max(-1).values


def _telling_logits(experts: int) -> torch.Tensor:
    """Rows that tell kinds apart: small, middling and wide spreads, scores near 0 and near 1, ties."""
    generator = torch.Generator().manual_seed(1)

    def noise(rows: int) -> torch.Tensor:
        return torch.randn((rows, experts), generator=generator)

    wide = torch.rand((40, experts), generator=generator) * 80 - 40
    tied = torch.randint(-2, 3, (40, experts), generator=generator) / 2
    return torch.cat(
        (
            noise(40) / 4,
            noise(64),
            noise(40) * 4,
            wide,
            noise(24) - 40,
            # sums of scores so small that every number added to them shows
            noise(16) - 75,
            noise(8) + 30,
            tied,
            torch.zeros(1, experts),
        )
    )


def _hidden(rows: int, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # a generator of its own leaves the global random state alone
    noise = torch.randn((rows, weight.shape[1]), generator=torch.Generator().manual_seed(0))
    return noise.to(weight.device, dtype)


def _biases(module: Any, kind: RouterKind, experts: int) -> list[torch.Tensor | None]:
    """Biases of the selection to try: the module's own, and such as change most choices."""
    if not kind.selection_bias and not kind.bias_argument:
        return [None]
    noise = torch.randn((2, experts), generator=torch.Generator().manual_seed(2))
    own = part_of(module, kind.selection_bias).detach().clone() if kind.selection_bias else torch.zeros(experts)
    return [own, noise[0], noise[1] / 2 - 2]


@contextmanager
def _selection_bias(module: Any, kind: RouterKind, bias: torch.Tensor | None) -> Iterator[torch.Tensor | None]:
    """Within the context a module's bias of the selection has these values; gives the tensor that holds them."""
    if not kind.selection_bias:
        device = part_of(module, kind.weight).device
        yield None if bias is None else bias.to(device)
        return
    tensor = part_of(module, kind.selection_bias)
    before = tensor.detach().clone()
    try:
        tensor.copy_(bias.reshape(tensor.shape))  # type: ignore[union-attr]  # a module that has a bias
        yield tensor
    finally:
        tensor.copy_(before)


def _named(answer: Any, order: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return dict(zip(order, answer, strict=True))
