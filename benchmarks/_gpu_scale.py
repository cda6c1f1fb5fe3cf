"""How large `gpu_serving` is, on a GPU and in a rehearsal: the model's shape, contexts, lengths of everything.

Knows no torch. Read by every part of the benchmark, and by the library's process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._published_shapes import SHAPES

if TYPE_CHECKING:
    from pathlib import Path

_LARGE: dict[str, Any] = SHAPES["Qwen3-30B-A3B"].config
_SMALL = {
    **_LARGE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        config: of the model.
        context: prompt tokens of every sequence.
        sizes: numbers of running sequences, rising.
        most_steps: of one stretch of decode: contexts grow by no more.
        prefill_prompts: prompts in a step of prefill.
        pairs, seconds: how many stretches of each arm, and how long they are.
        lead: steps at the head of a stretch that are not timed.
        trial: steps that a stretch's length is found by.
        engine_tokens: decoded per request in a round of the engine.
        engine_pairs: rounds with and without replies.
        library: (requests, new tokens) of the comparison with the library.
        copy_nbytes: of the copy that the floor is measured by.
        traced_steps, traced_s: a trace is at least as long as both; so many of its last steps are looked at.
    """

    config: dict[str, Any] = field(default_factory=lambda: _LARGE)
    device: str = "cuda"
    dtype: str = "bfloat16"
    block_tokens: int = 16
    context: int = 1024
    sizes: tuple[int, ...] = (1, 64, 256)
    most_steps: int = 240
    prefill_prompts: int = 8
    pairs: int = 10
    seconds: float = 0.5
    lead: int = 4
    trial: int = 8
    engine_tokens: int = 72
    engine_pairs: int = 3
    library: tuple[int, int] = (64, 128)
    copy_nbytes: int = 8 << 30
    traced_steps: int = 30
    traced_s: float = 0.4

    @property
    def max_step_tokens(self) -> int:
        return max(self.prefill_prompts * self.context, self.sizes[-1] * self.block_tokens)

    @property
    def blocks_each(self) -> int:
        """KV blocks that a sequence may come to have."""
        return -(-(self.context + self.most_steps + 1) // self.block_tokens)

    def runner_config(self, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Of the transformers runner: weights drawn on the device, graphs of these sizes."""
        return {
            "dtype": self.dtype,
            "weights": "random",
            "device": self.device,
            "self_check": False,
            "kernels": "triton",
            "graph_sizes": list(sizes),
            "num_threads": 1 if self.device == "cpu" else None,
        }

    def prompts(self, count: int, seed: int = 0) -> list[list[int]]:
        """Random tokens, the same for the same seed; none is special."""
        tokens = np.random.default_rng(seed).integers(
            10, min(self.config["vocab_size"], 150_000), (count, self.context)
        )
        return [list(map(int, row)) for row in tokens]


def tiny() -> Scale:
    """What a CPU can do in seconds, in Triton's interpreter."""
    return Scale(
        config=_SMALL, device="cpu", dtype="float32", block_tokens=8, context=16, sizes=(1, 2), most_steps=12,
        prefill_prompts=1, pairs=1, seconds=0.0, lead=1, trial=2, engine_tokens=6, engine_pairs=1, library=(2, 4),
        copy_nbytes=1 << 20,
    )  # fmt: skip


def write_folder(folder: Path, scale: Scale) -> str:
    """A checkpoint folder with a config and nothing else."""
    (folder / "config.json").write_text(json.dumps(scale.config))
    return str(folder)
