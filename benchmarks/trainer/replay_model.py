"""A small mixture-of-experts language model for `replay_kl`, trained on the text of Python's own library.

A Qwen3-MoE of 8 layers with 4 of 32 experts, 7 million parameters, one token for each byte. Two minutes of one core
train it well enough for meaningful routers, and its text stays as uncertain as text is, unlike the short answers of
`examples/small_moe.py`. It is saved as an ordinary checkpoint. Knows no engine. `trainer_step` takes its shapes.
"""

from __future__ import annotations

import sysconfig
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

VOCAB_SIZE = 256
MAX_CONTEXT = 1024
STEPS = 300

_WIDTH = 256
# rows of a batch, and the learning rate
_HOW = {"small": (4, 3e-3), "large": (32, 4e-4)}
_BALANCE = 0.01
_HELD_OUT = 10  # every tenth file
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "router_aux_loss_coef": _BALANCE,
    "tie_word_embeddings": False,
    "max_position_embeddings": MAX_CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# as `replay_kl` is asked for on a GPU: 1.3 billion parameters
_LARGE: dict[str, Any] = {
    **_SMALL,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
#: shapes by name
SHAPES = {"small": _SMALL, "large": _LARGE}


def corpus() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Text to train on, and text held out: the sources at the top of Python's library. About 5 and 0.5 MB."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for at, path in enumerate(files):
        parts[at % _HELD_OUT == 0].append(path.read_bytes())
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return train, held_out


def trained(folder: Path, steps: int, device: torch.device, say: Callable[[str], None], size: str) -> dict[str, Any]:
    """Train the model into a folder.

    Returns what is known of it: `steps`, `loss` and `held_out_loss` in nats per token, `parameters`, `shape`.
    """
    train, held_out = corpus()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, loss = _train(size, train, steps, device, say)
    unseen = _loss(model, _batch(held_out, np.random.default_rng(1), 32, device))
    say(f"held-out loss {unseen:.3f} nats for each token")
    model.save_pretrained(folder)
    parameters = sum(one.numel() for one in model.parameters())
    return {
        "steps": steps,
        "loss": round(loss, 4),
        "held_out_loss": round(unseen, 4),
        "parameters": parameters,
        "shape": SHAPES[size],
    }


def _train(
    size: str, text: NDArray[np.uint8], steps: int, device: torch.device, say: Callable[[str], None]
) -> tuple[Any, float]:
    # imported here: transformers takes seconds to load, and `--help` should not
    hf: Any = import_module("transformers")
    ALL_EXPERTS_FUNCTIONS.register("split", _split_experts)
    ALL_EXPERTS_FUNCTIONS.register("grouped", _grouped_experts)
    config = hf.Qwen3MoeConfig(**SHAPES[size], experts_implementation="grouped" if device.type == "cuda" else "split")
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    rows, rate = _HOW[size]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, max((steps - step) / max(steps - warm, 1), 0.05))
    )
    rng = np.random.default_rng(0)
    began, loss = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        ids = _batch(text, rng, rows, device)
        output = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True)
        # with the loss that balances experts: else a few would do all the work
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(steps // 10, 1) == 0:
            loss = float(output.loss.detach() - _BALANCE * output.aux_loss.detach())
            say(f"training: step {step} of {steps}, loss {loss:.3f}, {time.perf_counter() - began:.0f} s")
    return model.eval(), loss


@torch.no_grad()
def _loss(model: Any, ids: torch.Tensor) -> float:
    return float(model(input_ids=ids, labels=ids, use_cache=False).loss)


def _batch(text: NDArray[np.uint8], rng: np.random.Generator, rows: int, device: torch.device) -> torch.Tensor:
    starts = rng.integers(0, text.size - _WIDTH, rows)
    return torch.from_numpy(np.stack([text[at : at + _WIDTH] for at in starts]).astype(np.int64)).to(device)


def _split_experts(experts: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The library's experts, for training on a CPU: its own ways take seconds a step there, as the gradient of every
    expert is a tensor as large as all of them. [T, H], [T, K], [T, K] -> [T, H]."""
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts.num_experts).tolist()
    parts = []
    inputs = hidden[order // ids.shape[1]].split(counts)
    for rows, gate_up, down in zip(inputs, experts.gate_up_proj.unbind(0), experts.down_proj.unbind(0), strict=True):
        gate, up = (rows @ gate_up.t()).chunk(2, dim=-1)
        parts.append((experts.act_fn(gate) * up) @ down.t())
    done = torch.cat(parts) * weights.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(hidden).index_add(0, order // ids.shape[1], done)


def _grouped_experts(experts: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The library's experts, for training on a GPU from parameters in float32: products of all experts in one, in
    bfloat16, and no wait for the device. Shapes as above."""
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = torch.bincount(flat, minlength=experts.num_experts).cumsum(0).to(torch.int32)
    rows = hidden[order // ids.shape[1]].bfloat16()
    both = torch._grouped_mm(rows, experts.gate_up_proj.bfloat16().transpose(1, 2), offs=ends)
    gate, up = both.chunk(2, dim=-1)
    down = torch._grouped_mm(experts.act_fn(gate) * up, experts.down_proj.bfloat16().transpose(1, 2), offs=ends)
    done = down.to(hidden.dtype) * weights.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(hidden).index_add(0, order // ids.shape[1], done)
