"""Which checkpoint the demo serves: the caller's, one that speaks, or a random one; the last two are made once.

A checkpoint that speaks computes long on a CPU, so its workload is smaller. Called by `run.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.errors import CheckpointError

if TYPE_CHECKING:
    from rich.console import Console

    from fdasync_fleet.cli.demo.workload import DemoOptions

# a token of it costs as much as a hundred of the random ones
_SPEAKING_REQUESTS = 12
_SPEAKING_TOKENS = 16


def choose(options: DemoOptions, transformers: Any, console: Console) -> tuple[DemoOptions, Path]:
    """The options, whose sizes may depend on the model, and the folder of the checkpoint, which is made if need be."""
    if options.model is not None:
        return options, options.model
    try:
        transformers.speaking_source()
    except CheckpointError as error:
        console.print(f"no model that speaks: {error}", style="yellow", markup=False, highlight=False)
        # with a small model computing is faster than reading the store, which would never be read
        size = "medium" if options.store else "small"
        model = cache_folder() / f"demo-qwen3-moe-{size}-v2"
        made = not model.exists()
        console.print(f"{'making' if made else 'using'} a {size} random Qwen3-MoE checkpoint in {_told(model)}")
        if made:
            transformers.make_random_checkpoint(model, "qwen3_moe", size=size)
        return options, model
    model = cache_folder() / "demo-smollm2-4-experts-v1"
    if model.exists():
        console.print(f"using SmolLM2-135M-Instruct with 4 experts a layer, in {_told(model)}")
    else:
        console.print(
            f"making SmolLM2-135M-Instruct with 4 experts a layer, once, in {_told(model)}: 750 MB, half a minute"
        )
        transformers.make_speaking_checkpoint(model)
    requests, max_tokens = options.requests or _SPEAKING_REQUESTS, options.max_tokens or _SPEAKING_TOKENS
    return msgspec.structs.replace(options, requests=requests, max_tokens=max_tokens), model


def cache_folder() -> Path:
    """Where the demo keeps its checkpoints: `$XDG_CACHE_HOME/fdasync`, or `~/.cache/fdasync`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fdasync"


def _told(path: Path) -> str:
    """A path as people write it."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)
