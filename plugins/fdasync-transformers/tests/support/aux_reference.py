"""Aux data by the library's own model: what its routers weigh their experts with, and the norms of its layers' outputs.

One plain forward pass of one whole sequence, watched by hooks of its own: nothing of the plugin takes part.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def routers_of(model: Any) -> list[Any]:
    """The library's routers, by layer."""
    return [
        module
        for name, module in model.named_modules()
        if name.endswith((".gate", ".router")) and hasattr(model.get_submodule(name.rpartition(".")[0]), "experts")
    ]


def chosen(output: Any, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights) [T, k] of what a router returned."""
    if len(output) == 3:
        return output[2], output[1]
    # llama 4: its scores are of all experts, and 0 but for the chosen
    scores, logits = output
    ids = torch.topk(logits, k, dim=1).indices
    return ids, scores.gather(1, ids)


@contextmanager
def watched(modules: list[Any]) -> Iterator[list[list[Any]]]:
    """What each of these modules returned, pass by pass."""
    seen: list[list[Any]] = [[] for _ in modules]
    hooks = [
        module.register_forward_hook(lambda _m, _a, output, calls=calls: calls.append(output))
        for module, calls in zip(modules, seen, strict=True)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def plain(model: Any, tokens: list[int], top_k: list[int]) -> tuple[list[Any], list[Any], np.ndarray]:
    """(ids by layer, weights by layer, norms [T, layers]) of a sequence that is forwarded whole."""
    decoder = model.get_submodule("model")
    with watched(routers_of(model)) as routers, watched(list(decoder.layers)) as layers:
        model(input_ids=torch.tensor([tokens]).to(model.device), use_cache=False)
    pairs = [chosen(calls[0], k) for calls, k in zip(routers, top_k, strict=True)]
    hidden = [calls[0] if isinstance(calls[0], torch.Tensor) else calls[0][0] for calls in layers]
    norms = [np.sqrt((layer.double().cpu().numpy().reshape(len(tokens), -1) ** 2).sum(-1)) for layer in hidden]
    ids = [ids.cpu().numpy() for ids, _ in pairs]
    return ids, [weights.float().cpu().numpy() for _, weights in pairs], np.stack(norms, 1)


def assert_weights(rows: np.ndarray, ids: np.ndarray, wanted_ids: list[Any], wanted: list[Any]) -> None:
    """Rows [n, layers, k] of weights, and of ids, against those of `plain`: the same number for the same expert.

    Another batch adds up its products in another order, so a number may fall to the other side of a rounding to
    float16: one step of it, and no more.
    """
    assert rows.dtype == np.float16
    assert rows.shape == ids.shape
    for layer, (experts, weights) in enumerate(zip(wanted_ids, wanted, strict=True)):
        k = experts.shape[1]
        mine, theirs = np.argsort(ids[:, layer, :k], axis=1), np.argsort(experts, axis=1)
        assert np.array_equal(np.take_along_axis(ids[:, layer, :k], mine, 1), np.take_along_axis(experts, theirs, 1))
        got = np.take_along_axis(rows[:, layer, :k], mine, 1)
        right = np.take_along_axis(weights, theirs, 1).astype(np.float16)
        assert (np.abs(got.astype(np.float32) - right) <= np.spacing(np.abs(right)).astype(np.float32)).all()
        assert (got == right).mean() > 0.9
        assert not rows[:, layer, k:].any()
