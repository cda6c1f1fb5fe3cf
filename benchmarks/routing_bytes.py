"""The size of a long sample's rows in each trainer's format: `python -m benchmarks.routing_bytes`.

Random rows of two published shapes; bytes on the wire (of JSON text or of an array, as the format has it), and seconds
of conversion each way on one core. `--tokens N`, `--runs N`, `--json PATH`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from fdasync_trainer import rows as formats
from fdasync_trainer.rows import RoutingLayout
from rich.console import Console
from rich.table import Table

from benchmarks._report import Report, calibrate_us
from fdasync import Routing

if TYPE_CHECKING:
    from collections.abc import Callable

# hidden layers, first MoE layer, experts, top-k; of the models' published configurations
MODELS = {"qwen3_30b_a3b": (48, 0, 128, 8), "deepseek_v3": (61, 3, 256, 8)}


def sample(tokens: int, hidden: int, first: int, experts: int, top_k: int) -> Routing:
    """Rows of a sample of this many tokens, prompt and response."""
    random = np.random.default_rng(0)
    picks = random.permuted(np.tile(np.arange(experts, dtype=np.uint8), (4096, 1)), axis=1)[:, :top_k]
    array = picks[random.integers(0, len(picks), (tokens - 1, hidden - first))]
    return Routing(array=array, start=0, layer_ids=tuple(range(first, hidden)), num_experts=experts)


def ways(routing: Routing, hidden: int, tokens: int) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Routing]]]:
    """Conversions to each format and back."""
    layout = RoutingLayout.of(routing)
    most = 1 << 33
    return {
        "sglang": (
            lambda: formats.to_sglang(routing, hidden),
            lambda text: formats.from_sglang(text, layout, hidden, max_nbytes=most),
        ),
        "vllm": (lambda: formats.to_vllm(routing), lambda text: formats.from_vllm(text, layout, max_nbytes=most)),
        "verl": (
            lambda: formats.to_verl(routing, tokens),
            lambda array: formats.from_verl(array, layout, tokens - 1),
        ),
        "skyrl": (lambda: formats.to_skyrl(routing), lambda said: formats.from_skyrl(said, layout, max_nbytes=most)),
        "prime_rl": (
            lambda: formats.to_prime_rl(routing),
            lambda said: formats.from_prime_rl(said, layout, max_nbytes=most),
        ),
        "nemo_rl": (
            lambda: formats.to_nemo_rl(routing, tokens),
            lambda text: formats.from_nemo_rl(text, layout, max_nbytes=most),
        ),
    }


def nbytes(payload: Any) -> int:
    """Bytes on the wire; of an array without its envelope."""
    return payload.nbytes if isinstance(payload, np.ndarray) else len(msgspec.json.encode(payload))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json")
    chosen = parser.parse_args()
    report = Report("routing bytes")
    table = Table(title=f"rows of a sample of {chosen.tokens:,} tokens")
    for column in ("model", "format", "MB", "ms to", "ms from"):
        table.add_column(column, justify="left" if column in ("model", "format") else "right")
    report.conditions["tokens"] = chosen.tokens
    for model, (hidden, first, experts, top_k) in MODELS.items():
        routing = sample(chosen.tokens, hidden, first, experts, top_k)
        report.add(f"{model}_rows_bytes", [routing.array.nbytes])
        table.add_row(model, "rows of a result", f"{routing.array.nbytes / 1e6:.1f}", "", "")
        for name, (there, back) in ways(routing, hidden, chosen.tokens).items():
            spent: tuple[list[float], list[float]] = ([], [])
            for _ in range(chosen.runs):
                started = time.perf_counter()
                payload = there()
                between = time.perf_counter()
                read = back(payload)
                spent[0].append(between - started)
                spent[1].append(time.perf_counter() - between)
            if not np.array_equal(read.array, routing.array):
                raise SystemExit(f"{name} did not come back as it went")
            size = report.add(f"{model}_{name}_bytes", [nbytes(payload)])
            there_s = report.add(f"{model}_{name}_encode_s", spent[0])
            back_s = report.add(f"{model}_{name}_decode_s", spent[1])
            table.add_row(model, name, f"{size / 1e6:.1f}", f"{there_s * 1e3:.0f}", f"{back_s * 1e3:.0f}")
    report.add("calibration_us", [calibrate_us()])
    Console().print(table)
    if chosen.json:
        text = json.dumps({"figures": report.figures, "conditions": report.conditions}, indent=2)
        Path(chosen.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
