"""The bytes that a decode step must read, of any model with experts.

Dense weights, shared experts, routers and the output head once; of each layer's experts as many as are expected; keys
and values, or latents, of all contexts; recurrent state, which is written too. Of the embedding only the rows count,
and what else is written (a row of KV for each sequence) is left out. Knows modules of the library by their parameters;
runs nothing. Used by `model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class StepBytes:
    """Of one model.

    Attributes:
        dense: read once, whatever runs.
        embedding_row: read for each sequence.
        expert: of one expert, by MoE layer.
        num_experts: of a layer.
        top_k: of a token, by MoE layer.
        kv_token: keys and values, or latents, of one token, all layers.
        state: recurrent state of a sequence, which a step reads and writes.
    """

    dense: int
    embedding_row: int
    expert: tuple[int, ...]
    num_experts: int
    top_k: tuple[int, ...]
    kv_token: int
    state: int = 0

    def expected(self, count: int) -> list[float]:
        """Distinct experts of each layer for `count` tokens where routing is uniform."""
        return [self.num_experts * (1 - (1 - k / self.num_experts) ** count) for k in self.top_k]

    def step(self, count: int, context: int) -> float:
        """Bytes of a step of `count` sequences with so many tokens each."""
        routed = sum(number * nbytes for number, nbytes in zip(self.expected(count), self.expert, strict=True))
        each = self.embedding_row + context * self.kv_token + 2 * self.state
        return self.dense + routed + count * each


def bytes_of(model: Any, moe: Any, kv_token_nbytes: int, state_nbytes: int = 0) -> StepBytes:
    """Of a loaded model and its `MoELayers`."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    expert = [0] * len(moe.names)
    dense = 0
    for name, tensor in model.named_parameters():
        layer = next((row for row, experts in enumerate(moe.names) if name.startswith(f"{experts}.")), None)
        if layer is not None:
            expert[layer] += tensor.nbytes // moe.num_experts
        elif tensor is not embedding:
            dense += tensor.nbytes
    if head is not None and head.weight is embedding:
        dense += embedding.nbytes
    return StepBytes(
        dense=dense,
        embedding_row=embedding.shape[1] * embedding.element_size(),
        expert=tuple(expert),
        num_experts=moe.num_experts,
        top_k=tuple(moe.top_k),
        kv_token=kv_token_nbytes,
        state=state_nbytes,
    )


def distinct(rows: NDArray[Any], num_experts: int) -> float:
    """Distinct experts of a layer in a step, mean over steps and layers. `rows`: ids, [steps, sequences, layers, k]."""
    steps, _, layers, _ = rows.shape
    seen = np.zeros((steps, layers, num_experts), bool)
    step, layer = np.arange(steps)[:, None, None, None], np.arange(layers)[None, None, :, None]
    seen[step, layer, rows] = True
    return float(seen.sum(-1).mean())
