"""Two models of `gpu_quantised` compared on the same tokens: rows and logits.

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


@dataclass(frozen=True)
class Agreement:
    """Of two models, over the same positions.

    Attributes:
        rows: of the routing, of all layers.
        differing_rows: whose set of experts is another.
        positions: whose logits were compared.
        equal_logits: positions whose logits have the same bits.
    """

    rows: int
    differing_rows: int
    positions: int
    equal_logits: int


def dequantise_into(plain: Rig, stored: Rig) -> None:
    """Give a plain model the values that a model of the same shape keeps, in place."""
    state = plain.step_model.model.state_dict()
    with torch.inference_mode():
        for name, kept in logical_state(stored.step_model.model).items():
            if isinstance(kept, Kept) and kept.dim() == 3:
                for expert in range(len(kept)):
                    state[name][expert].copy_(kept[expert])
            else:
                state[name].copy_(kept[:] if isinstance(kept, Kept) else kept)
    if plain.device.type == "cuda":
        # steps run on another stream
        torch.cuda.synchronize()


def agreement(one: Rig, other: Rig, sequences: int, prompt: int, decoded: int) -> Agreement:
    """Play random tokens through both."""
    random = np.random.default_rng(5)
    vocab = int(one.scale.config["vocab_size"])
    tokens = tuple(random.integers(10, vocab, prompt + decoded).astype(np.int32) for _ in range(sequences))
    chunks = ((prompt, *(1,) * decoded),) * sequences
    played = [_play(rig, Reference(chunks, tokens, (), ())) for rig in (one, other)]
    (logits, rows), (other_logits, other_rows) = played
    same = np.concatenate([_same(a, b) for a, b in zip(rows, other_rows, strict=True)])
    equal = sum(int((mine == theirs).all(-1).sum()) for mine, theirs in zip(logits, other_logits, strict=True))
    return Agreement(same.size, int((~same).sum()), sum(map(len, logits)), equal)


def _play(rig: Rig, reference: Reference) -> tuple[list[torch.Tensor], list[Any]]:
    rig.arms["on"].select()
    return paged_passes(rig.step_model, rig.capture, reference, rig.scale.block_tokens)


def _same(rows: Any, others: Any) -> Any:
    return (np.sort(rows, axis=-1) == np.sort(others, axis=-1)).all(axis=-1).ravel()
