"""Two models of `gpu_quantised` compared on the same tokens: rows, logits and the divergence of their distributions.

Sequences run through paged steps of both, prompts in one chunk and then tokens one by one, side by side, so that small
and large numbers of pairs meet every tile. Knows the plugin's steps; knows no figures. Called by `quantised.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fdasync_transformers.model.kept.kept import Kept, logical_state
from fdasync_transformers.start.selfcheck import Reference, paged_passes

if TYPE_CHECKING:
    from benchmarks.gpu.model import Rig

# positions whose distributions are compared at a time
_POSITIONS = 256


@dataclass(frozen=True)
class Agreement:
    """Of two models, over the same positions.

    Attributes:
        rows: of the routing, of all layers.
        differing_rows: whose set of experts is another.
        positions: whose logits were compared.
        equal_logits: positions whose logits have the same bits.
        kl: of the first model's distributions from the second's, mean over positions, in nats.
        worst_logprob: largest difference of a log-prob among those that the first gives 1e-6 or more.
    """

    rows: int
    differing_rows: int
    positions: int
    equal_logits: int
    kl: float
    worst_logprob: float


def dequantise_into(plain: Any, stored: Any) -> None:
    """Give a plain model the values that a model of the same shape keeps, in place."""
    state = plain.state_dict()
    with torch.inference_mode():
        for name, kept in logical_state(stored).items():
            if isinstance(kept, Kept) and kept.dim() == 3:
                for expert in range(len(kept)):
                    state[name][expert].copy_(kept[expert])
            else:
                state[name].copy_(kept[:] if isinstance(kept, Kept) else kept)


def agreement(one: Rig, other: Rig, sequences: int, prompt: int, decoded: int, seed: int = 5) -> Agreement:
    """Play random tokens through both."""
    random = np.random.default_rng(seed)
    vocab = int(one.scale.config["vocab_size"])
    tokens = tuple(random.integers(10, vocab, prompt + decoded).astype(np.int32) for _ in range(sequences))
    chunks = ((prompt, *(1,) * decoded),) * sequences
    played = [_play(rig, Reference(chunks, tokens, (), ())) for rig in (one, other)]
    (logits, rows), (other_logits, other_rows) = played
    same = np.concatenate([_same(a, b) for a, b in zip(rows, other_rows, strict=True)])
    equal, divergence, worst, positions = 0, 0.0, 0.0, 0
    for mine, theirs in zip(logits, other_logits, strict=True):
        for first in range(0, len(mine), _POSITIONS):
            p, q = mine[first : first + _POSITIONS], theirs[first : first + _POSITIONS]
            equal += int((p == q).all(-1).sum())
            p, q = p.log_softmax(-1), q.log_softmax(-1)
            divergence += float((p.exp() * (p - q)).sum())
            worst = max(worst, float((p - q).abs().masked_fill(p < np.log(1e-6), 0.0).max()))
            positions += len(p)
    return Agreement(same.size, int((~same).sum()), positions, equal, divergence / positions, worst)


def product_us(one: Rig, other: Rig, name: str, rows: int, replays: int = 20) -> tuple[float, float]:
    """Microseconds of a product of so many rows by the linear layers of this name: of all decoder layers in turns, in a
    graph, so that no cache holds their weights. Needs a CUDA device."""
    took = []
    for rig in (one, other):
        model = rig.step_model.model
        modules: list[Any] = [each for path, each in model.named_modules() if path.endswith(f".{name}")]
        x = torch.randn((rows, modules[0].in_features), device=rig.device).to(torch.bfloat16)
        with torch.inference_mode():
            for each in modules:
                each(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for each in modules:
                    each(x)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph.replay()
        began.record()
        for _ in range(replays):
            graph.replay()
        ended.record()
        ended.synchronize()
        took.append(float(began.elapsed_time(ended)) * 1e3 / replays / len(modules))
    return took[0], took[1]


def _play(rig: Rig, reference: Reference) -> tuple[list[torch.Tensor], list[Any]]:
    rig.arms["on"].select()
    return paged_passes(rig.step_model, rig.capture, reference, rig.scale.block_tokens)


def _same(rows: Any, others: Any) -> Any:
    return (np.sort(rows, axis=-1) == np.sort(others, axis=-1)).all(axis=-1).ravel()
