"""Loads a checkpoint as the library's users do: the model that an engine's numbers are compared with.

Knows no engine and no comparison. Called by `verify.py` and `trainer.py`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from fdasync_transformers.weights import loading
from fdasync_transformers.weights.architecture import read_architecture
from fdasync_transformers.weights.quantized import read_scheme
from fdasync_transformers.weights.quiet import no_progress_bars
from fdasync_transformers.weights.shards import read_json

from fdasync.errors import CheckpointError

if TYPE_CHECKING:
    import os


def library_model(folder: str | os.PathLike[str], dtype: torch.dtype, *, alone: bool = False) -> Any:
    """A causal language model in eval mode on the CPU, by the library's own loader where it can load the folder.

    Args:
        alone: of a multimodal checkpoint, the language model alone, by this package's loader.

    Raises CheckpointError for a folder that does not load; UnsupportedModel for a quantisation that is not known.
    """
    transformers: Any = import_module("transformers")
    auto = transformers.AutoModelForCausalLM
    config_file = Path(folder) / "config.json"
    config: dict[str, Any] = {}
    if config_file.exists():
        raw = read_json(config_file)
        architecture = read_architecture(raw, config_file)
        config["config"] = architecture.config
        inside = architecture.whole is not None
        if architecture.whole is not None and not alone:
            config["config"], auto = architecture.whole
        elif inside or read_scheme(raw, config_file) is not None or architecture.renamed:
            # the library asks for another package first, leaves tensors that are stored plain in their own dtype, and
            # does not know the name
            name = str(dtype).removeprefix("torch.")
            return loading.load(loading.read_checkpoint(str(folder)), name, torch.device("cpu"))
    try:
        with no_progress_bars():
            return auto.from_pretrained(str(folder), dtype=dtype, local_files_only=True, **config).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(str(folder), f"does not load in transformers: {error}") from error
