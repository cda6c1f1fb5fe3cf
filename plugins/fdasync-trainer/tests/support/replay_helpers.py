"""What the tests of replay in a trainer share: random and live rows, losses and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fdasync_trainer.replay.force import find_routers, observed_routing
from fdasync_transformers.weights.random_checkpoints import VOCAB_SIZE as VOCAB

from fdasync import Routing

LENGTHS = (9, 4, 13)


def ids_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(100 * seed + length))


def top_ks(model: Any) -> list[int]:
    return [site.router.top_k for site in find_routers(model).values()]


def routing_of(model: Any, rows: dict[int, Any], start: int = 0) -> Routing:
    """Rows [n, k] by layer, as an engine gives them: zeros past a layer's own k."""
    ks, sites = top_ks(model), find_routers(model)
    array = np.zeros((len(rows[min(rows)]), len(sites), max(ks)), dtype=np.uint8)
    for place, (layer, k) in enumerate(zip(sites, ks, strict=True)):
        array[:, place, :k] = np.asarray(rows[layer])
    return Routing(
        array=array,
        start=start,
        layer_ids=tuple(sites),
        num_experts=next(iter(sites.values())).num_experts,
        top_k_by_layer=tuple(ks) if len(set(ks)) > 1 else None,
    )


def random_routing(model: Any, count: int, seed: int = 0, start: int = 0) -> Routing:
    rng = np.random.default_rng(seed)
    rows = {
        layer: np.stack([rng.permutation(site.num_experts)[: site.router.top_k] for _ in range(count)])
        for layer, site in find_routers(model).items()
    }
    return routing_of(model, rows, start)


def observe(model: Any, **inputs: Any) -> dict[int, torch.Tensor]:
    seen: dict[int, torch.Tensor] = {}
    with torch.no_grad(), observed_routing(model, seen):
        model(use_cache=False, **inputs)
    return {layer: rows.clone() for layer, rows in seen.items()}


def router_weights(model: Any) -> dict[int, Any]:
    return {
        layer: next(p for p in site.router.parameters() if p.requires_grad and p.ndim == 2)
        for layer, site in find_routers(model).items()
    }


def loss_of(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    return loss


def grads_of(model: Any, *, of: str = "routers") -> dict[Any, torch.Tensor]:
    if of == "routers":
        return {layer: p.grad.clone() for layer, p in router_weights(model).items()}
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def backward(model: Any, loss: torch.Tensor, *, of: str = "all") -> dict[Any, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return grads_of(model, of=of)


def checkpointed(model: Any, **options: Any) -> Any:
    name = "activation_checkpointing_enable"
    if not hasattr(model, name):  # older releases
        name = "gradient_checkpointing_enable"
    getattr(model, name)(options or None)
    return model


def same(left: dict[Any, torch.Tensor], right: dict[Any, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def nothing_left(model: Any) -> bool:
    sites = find_routers(model).values()
    modules = [model, *(site.router for site in sites)]
    return (
        not any(len(m._forward_pre_hooks) or len(m._forward_hooks) for m in modules)
        and torch.overrides._get_current_function_mode() is None
        and not any(
            type(vars(m).get("_gradient_checkpointing_func")).__name__ == "Checkpointing" for m in model.modules()
        )
    )
