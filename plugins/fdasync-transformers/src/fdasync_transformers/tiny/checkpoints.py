"""Makes tiny random models and checkpoints of the families of `families.py`.

A checkpoint takes milliseconds to write and to load. All weights are noise, biases, routers, sinks and norms too, so
that nothing passes by symmetry, of a width at which greedy output wanders. Knows nothing of engines. Called by tests
and by `python -m tests.nightly families`.
"""

from __future__ import annotations

import json
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fdasync.errors import BadInput
from fdasync_transformers.tiny.families import FAMILIES
from fdasync_transformers.tiny.quantised import quantise
from fdasync_transformers.tiny.shapes import BASE
from fdasync_transformers.weights.quiet import no_progress_bars
from fdasync_transformers.weights.random_checkpoints import EOS_ID, PAD_ID, write_tokenizer

if TYPE_CHECKING:
    import os

# of recurrences: parameters whose range matters, and minimax's decays, which are functions of each other
_KEPT = ("A_log", "dt_bias", ".D", "slope_rate", "query_decay", "key_decay", "diagonal_decay")
_SMALL_SHARD = "40KB"


def tiny_config(family: str, **overrides: Any) -> Any:
    """The library's config of an entry of the catalogue; `overrides` are values of its text half. Raises BadInput."""
    if family not in FAMILIES:
        raise BadInput("family", f"{family!r} is not known", limit=", ".join(FAMILIES))
    entry = FAMILIES[family]
    hf: Any = import_module("transformers")
    base = {name: value for name, value in BASE.items() if name not in entry.omit}
    values = {**base, **entry.config, **overrides}
    if entry.vision is not None:
        values = {"text_config": values, "vision_config": entry.vision, **entry.wrapper}
    return hf.AutoConfig.for_model(entry.model_type or family, **values)


def make_tiny_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 model of the library, in eval mode; torch's own random state is left as it was.

    Args:
        family: a name of `FAMILIES`.
        seed: of the weights.
        overrides: values of the config.

    Raises:
        BadInput: an unknown family.
    """
    config = tiny_config(family, **overrides)
    hf: Any = import_module("transformers")
    text = FAMILIES[family].vision is None and type(config) in hf.AutoModelForCausalLM._model_mapping
    auto = hf.AutoModelForCausalLM if text else hf.AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            if tensor.is_floating_point() and not name.endswith(_KEPT):
                randomise(name, tensor, torch.randn(tensor.shape, generator=generator))
    model.generation_config = hf.GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=False)
    return model


def make_tiny_checkpoint(
    folder: str | os.PathLike[str], family: str, seed: int = 0, *, shards: bool = False, **overrides: Any
) -> Any:
    """Write a checkpoint with a byte-level tokenizer, and return the float32 model that it stands for.

    The same arguments give the same tensor bytes with the same torch. For a quantised entry the returned model has the
    values that the stored values stand for.

    Args:
        folder: is made if it does not exist; files in it are replaced.
        family: a name of `FAMILIES`.
        seed: of the weights.
        shards: as several files (quantised ones are one).
        overrides: values of the config.

    Raises:
        BadInput: an unknown family.
    """
    target = Path(folder)
    model = make_tiny_model(family, seed, **overrides)
    entry = FAMILIES[family]
    with no_progress_bars():
        if entry.quantised:
            model = _save_quantised(model, target, entry.quantised)
        else:
            model.save_pretrained(target, max_shard_size=_SMALL_SHARD if shards else "50GB")
    if entry.renamed:
        path = target / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **entry.renamed}, indent=2) + "\n")
    write_tokenizer(target)
    return model


def _save_quantised(model: Any, target: Path, how: str) -> Any:
    """Write the quantised checkpoint; returns the float32 model of what it stands for."""
    with tempfile.TemporaryDirectory(prefix="fdasync-plain-") as name:
        plain = Path(name)
        model.to(torch.bfloat16).save_pretrained(plain)
        quantise(plain, target, how, dtype=torch.float32)
        return type(model).from_pretrained(plain, dtype=torch.float32, local_files_only=True).eval()


def randomise(name: str, tensor: torch.Tensor, noise: torch.Tensor) -> None:
    """Give a tensor its value from noise of its shape, by its name; norms have to be what they begin as."""
    last = name.rpartition(".")[2]
    if last.endswith("bias") or "sink" in last:
        tensor.copy_(noise * 0.3)
    elif "embed" in name and tensor.dim() > 1:
        tensor.copy_(noise)
    elif tensor.dim() > 1:
        tensor.copy_(noise * (1.2 / tensor.shape[-1] ** 0.5))
    else:
        tensor.add_(noise * 0.1)  # norms, which begin at 1 or at 0
