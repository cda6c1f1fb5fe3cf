"""How large a GPU benchmark is, on a GPU and in a rehearsal: the model's shape, contexts, lengths of everything; aims.

Knows no torch. Read by all commands that draw a model's weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.models import DEFAULT_MODEL, HYBRID_MODEL, MODELS

if TYPE_CHECKING:
    from pathlib import Path

#: of `gpu_serving` and `gpu_hybrid` on one H200, by model and figure; shares of idle time are to be at most so large,
#: all others at least
AIMS = {
    DEFAULT_MODEL: {
        "decode_tokens_per_s_1_on": 345.0,
        "decode_tokens_per_s_64_on": 3530.0,
        "decode_tokens_per_s_256_on": 10790.0,
        "prefill_tokens_per_s": 75_000.0,
        "floor_share_1": 0.50,
        "floor_share_64": 0.85,
        "floor_share_256": 0.85,
        "capture_on_over_off_1": 0.999,
        "capture_on_over_off_64": 0.999,
        "capture_on_over_off_256": 0.999,
        "depth2_over_depth1_1": 1.0,
        "depth2_over_depth1_64": 1.0,
        "depth2_over_depth1_256": 1.0,
        "sampled_over_greedy_64": 0.98,
        "sampled_over_greedy_256": 0.98,
        "top_p_over_greedy_64": 0.97,
        "top_p_over_greedy_256": 0.97,
        "engine_over_runner_64": 0.99,
        "idle_share_depth2_1": 0.01,
        "idle_share_depth2_64": 0.01,
        "idle_share_depth2_256": 0.01,
        "fixed_over_default_1": 0.97,
        "fixed_over_default_64": 0.97,
        "fixed_over_default_256": 0.97,
        "prefill_fixed_over_default": 0.90,
    },
    HYBRID_MODEL: {"floor_share_1": 0.4, "floor_share_64": 0.7, "floor_share_256": 0.7, "hit_over_recomputed": 0.2},
}


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        model: name of it, as in `MODELS`.
        config: of the model.
        runner: further keys of the runner's configuration.
        context: prompt tokens of every sequence.
        sizes: numbers of running sequences, rising.
        most_steps: of one stretch of decode: contexts grow by no more.
        prefill_prompts: prompts in a step of prefill.
        pairs, seconds: how many stretches of each arm, and how long they are.
        side_pairs: stretches of the arms that sample.
        lead: steps at the head of a stretch that are not timed.
        trial: steps that a stretch's length is found by.
        engine_tokens: decoded per request in a round of the engine.
        engine_pairs: rounds with and without replies.
        copy_nbytes: of the copy that the floor is measured by.
        traced_steps, traced_s: a trace is at least as long as both; so many of its last steps are looked at.
    """

    model: str = DEFAULT_MODEL
    config: dict[str, Any] = field(default_factory=MODELS[DEFAULT_MODEL].config)
    device: str = "cuda"
    dtype: str = "bfloat16"
    runner: dict[str, Any] = field(default_factory=dict)
    block_tokens: int = 16
    context: int = 1024
    sizes: tuple[int, ...] = (1, 64, 256)
    most_steps: int = 240
    prefill_prompts: int = 8
    pairs: int = 10
    side_pairs: int = 5
    seconds: float = 0.5
    lead: int = 4
    trial: int = 8
    engine_tokens: int = 72
    engine_pairs: int = 3
    copy_nbytes: int = 8 << 30
    traced_steps: int = 30
    traced_s: float = 0.4

    @property
    def facts(self) -> dict[str, Any]:
        """For the conditions of a report."""
        facts = {name: getattr(self, name) for name in ("model", "sizes", "context", "dtype")}
        return facts | {"layers": self.config["num_hidden_layers"]}

    @property
    def max_step_tokens(self) -> int:
        return max(self.prefill_prompts * self.context, self.sizes[-1] * self.block_tokens)

    @property
    def blocks_each(self) -> int:
        """KV blocks that a sequence may come to have."""
        return -(-(self.context + self.most_steps + 1) // self.block_tokens)

    def runner_config(self, sizes: tuple[int, ...] | None) -> dict[str, Any]:
        """Of the transformers runner: weights drawn on the device, graphs of these sizes; None: of its own ladder."""
        return {
            "dtype": self.dtype,
            "weights": "random",
            "device": self.device,
            "self_check": False,
            "kernels": "triton",
            "graph_sizes": sizes,
            "num_threads": 1 if self.device == "cpu" else None,
            **self.runner,
        }

    def prompts(self, count: int, seed: int = 0) -> list[list[int]]:
        """Random tokens, the same for the same seed; none is special."""
        tokens = np.random.default_rng(seed).integers(
            10, min(self.config["vocab_size"], 150_000), (count, self.context)
        )
        return [list(map(int, row)) for row in tokens]


def large(model: str) -> Scale:
    """What one H200 is measured by."""
    return Scale(model=model, config=MODELS[model].config())


def tiny(model: str = DEFAULT_MODEL) -> Scale:
    """What a CPU can do in seconds, in Triton's interpreter."""
    return Scale(
        model=model, config={**MODELS[model].config(small=True), "torch_dtype": "float32"}, device="cpu",
        dtype="float32", block_tokens=8, context=16, sizes=(1, 2), most_steps=12, prefill_prompts=1, pairs=1,
        side_pairs=1, seconds=0.0, lead=1, trial=2, engine_tokens=6, engine_pairs=1, copy_nbytes=1 << 20,
    )  # fmt: skip


def write_folder(folder: Path, scale: Scale) -> str:
    """A checkpoint folder with a config and nothing else."""
    (folder / "config.json").write_text(json.dumps(scale.config))
    return str(folder)
