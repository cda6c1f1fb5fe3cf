"""Hugging Face mixture-of-experts checkpoints for fdasync: the `transformers` runner and its tools.

Names are imported when they are first used: an engine process takes its tokenizer from this package and must not import
torch for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync_transformers.runner import TransformersRunner
    from fdasync_transformers.start.runner_config import TransformersConfig
    from fdasync_transformers.tiny.speaking import make_speaking_checkpoint, speaking_source
    from fdasync_transformers.tokenizer import load_tokenizer
    from fdasync_transformers.weights.deltas.delta import write_delta
    from fdasync_transformers.weights.groups.sending import WeightsSender
    from fdasync_transformers.weights.named import named_tensors, weights_fingerprint
    from fdasync_transformers.weights.random_checkpoints import make_random_checkpoint

_HOME = {
    "TransformersConfig": "start.runner_config",
    "TransformersRunner": "runner",
    "WeightsSender": "weights.groups.sending",
    "load_tokenizer": "tokenizer",
    "make_random_checkpoint": "weights.random_checkpoints",
    "make_speaking_checkpoint": "tiny.speaking",
    "named_tensors": "weights.named",
    "speaking_source": "tiny.speaking",
    "weights_fingerprint": "weights.named",
    "write_delta": "weights.deltas.delta",
}

__all__ = [
    "TransformersConfig",
    "TransformersRunner",
    "WeightsSender",
    "load_tokenizer",
    "make_random_checkpoint",
    "make_speaking_checkpoint",
    "named_tensors",
    "speaking_source",
    "weights_fingerprint",
    "write_delta",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOME[name]}")
    value = globals()[name] = getattr(module, name)
    return value
