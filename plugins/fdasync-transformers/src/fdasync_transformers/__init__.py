"""Hugging Face mixture-of-experts checkpoints for fdasync: the `transformers` runner and its tools.

Names are imported when they are first used: an engine process takes its tokenizer from this package and
must not import torch for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync_transformers.checkpoints import make_random_checkpoint
    from fdasync_transformers.named import named_tensors
    from fdasync_transformers.replay import forced_routing
    from fdasync_transformers.runner import TransformersConfig, TransformersRunner
    from fdasync_transformers.tokenizer import load_tokenizer
    from fdasync_transformers.verification import Difference, Report, Served, verify

_HOME = {
    "Difference": "verification",
    "Report": "verification",
    "Served": "verification",
    "TransformersConfig": "runner",
    "TransformersRunner": "runner",
    "forced_routing": "replay",
    "load_tokenizer": "tokenizer",
    "make_random_checkpoint": "checkpoints",
    "named_tensors": "named",
    "verify": "verification",
}

__all__ = [
    "Difference",
    "Report",
    "Served",
    "TransformersConfig",
    "TransformersRunner",
    "forced_routing",
    "load_tokenizer",
    "make_random_checkpoint",
    "named_tensors",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOME[name]}")
    value = globals()[name] = getattr(module, name)
    return value
