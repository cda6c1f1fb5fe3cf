"""Hugging Face mixture-of-experts checkpoints for fdasync: the `transformers` runner and its tools.

Names are imported when they are first used: an engine process takes its tokenizer from this package and must not import
torch for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync_transformers.fixed.trainer import TrainerNumerics, fixed_numerics
    from fdasync_transformers.replay.batch import Replay, checkpoint_contexts, replay_routing
    from fdasync_transformers.replay.force import forced_routing
    from fdasync_transformers.replay.layout import Packed, Padded
    from fdasync_transformers.runner import TransformersRunner
    from fdasync_transformers.start.runner_config import TransformersConfig
    from fdasync_transformers.tokenizer import load_tokenizer
    from fdasync_transformers.verification.verify import Difference, Report, Served, verify
    from fdasync_transformers.weights.named import named_tensors
    from fdasync_transformers.weights.random_checkpoints import make_random_checkpoint

_HOME = {
    "Difference": "verification.verify",
    "Packed": "replay.layout",
    "Padded": "replay.layout",
    "Replay": "replay.batch",
    "Report": "verification.verify",
    "Served": "verification.verify",
    "TrainerNumerics": "fixed.trainer",
    "TransformersConfig": "start.runner_config",
    "TransformersRunner": "runner",
    "checkpoint_contexts": "replay.batch",
    "fixed_numerics": "fixed.trainer",
    "forced_routing": "replay.force",
    "load_tokenizer": "tokenizer",
    "make_random_checkpoint": "weights.random_checkpoints",
    "named_tensors": "weights.named",
    "replay_routing": "replay.batch",
    "verify": "verification.verify",
}

__all__ = [
    "Difference",
    "Packed",
    "Padded",
    "Replay",
    "Report",
    "Served",
    "TrainerNumerics",
    "TransformersConfig",
    "TransformersRunner",
    "checkpoint_contexts",
    "fixed_numerics",
    "forced_routing",
    "load_tokenizer",
    "make_random_checkpoint",
    "named_tensors",
    "replay_routing",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOME[name]}")
    value = globals()[name] = getattr(module, name)
    return value
