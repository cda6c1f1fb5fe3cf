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
    from fdasync_transformers.verification.logprob_compare import LogprobComparison, Parting, compare_logprobs
    from fdasync_transformers.verification.logprob_file import read_logprobs, write_logprobs
    from fdasync_transformers.verification.logprob_table import (
        LogprobTable,
        ScoredSequence,
        WeightsName,
        rollout_logprobs,
    )
    from fdasync_transformers.verification.modules import ModuleDifference, ModuleTrace, first_difference, traced
    from fdasync_transformers.verification.trainer import TrainerSide
    from fdasync_transformers.verification.verify import Difference, Report, Served, verify
    from fdasync_transformers.weights.deltas.delta import write_delta
    from fdasync_transformers.weights.groups.sending import WeightsSender
    from fdasync_transformers.weights.named import named_tensors, weights_fingerprint
    from fdasync_transformers.weights.random_checkpoints import make_random_checkpoint

_HOME = {
    "Difference": "verification.verify",
    "LogprobComparison": "verification.logprob_compare",
    "LogprobTable": "verification.logprob_table",
    "ModuleDifference": "verification.modules",
    "ModuleTrace": "verification.modules",
    "Packed": "replay.layout",
    "Padded": "replay.layout",
    "Parting": "verification.logprob_compare",
    "Replay": "replay.batch",
    "Report": "verification.verify",
    "ScoredSequence": "verification.logprob_table",
    "Served": "verification.verify",
    "TrainerNumerics": "fixed.trainer",
    "TrainerSide": "verification.trainer",
    "TransformersConfig": "start.runner_config",
    "TransformersRunner": "runner",
    "WeightsName": "verification.logprob_table",
    "WeightsSender": "weights.groups.sending",
    "checkpoint_contexts": "replay.batch",
    "compare_logprobs": "verification.logprob_compare",
    "first_difference": "verification.modules",
    "fixed_numerics": "fixed.trainer",
    "forced_routing": "replay.force",
    "load_tokenizer": "tokenizer",
    "make_random_checkpoint": "weights.random_checkpoints",
    "named_tensors": "weights.named",
    "read_logprobs": "verification.logprob_file",
    "replay_routing": "replay.batch",
    "rollout_logprobs": "verification.logprob_table",
    "traced": "verification.modules",
    "verify": "verification.verify",
    "weights_fingerprint": "weights.named",
    "write_delta": "weights.deltas.delta",
    "write_logprobs": "verification.logprob_file",
}

__all__ = [
    "Difference",
    "LogprobComparison",
    "LogprobTable",
    "ModuleDifference",
    "ModuleTrace",
    "Packed",
    "Padded",
    "Parting",
    "Replay",
    "Report",
    "ScoredSequence",
    "Served",
    "TrainerNumerics",
    "TrainerSide",
    "TransformersConfig",
    "TransformersRunner",
    "WeightsName",
    "WeightsSender",
    "checkpoint_contexts",
    "compare_logprobs",
    "first_difference",
    "fixed_numerics",
    "forced_routing",
    "load_tokenizer",
    "make_random_checkpoint",
    "named_tensors",
    "read_logprobs",
    "replay_routing",
    "rollout_logprobs",
    "traced",
    "verify",
    "weights_fingerprint",
    "write_delta",
    "write_logprobs",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOME[name]}")
    value = globals()[name] = getattr(module, name)
    return value
