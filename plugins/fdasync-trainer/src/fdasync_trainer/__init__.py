"""What a trainer needs of a rollout: its expert rows replayed, its log-probs to the last bit, its formats of rows.

`fdasync_trainer.rows` needs NumPy alone; the rest is for models of transformers in torch (`fdasync-trainer[torch]`).
Names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync_trainer.numerics.trainer import TrainerNumerics, fixed_numerics
    from fdasync_trainer.replay.batch import Replay, checkpoint_contexts, replay_routing
    from fdasync_trainer.replay.force import forced_routing
    from fdasync_trainer.replay.layout import Packed, Padded
    from fdasync_trainer.verification.logprob_compare import LogprobComparison, Parting, compare_logprobs
    from fdasync_trainer.verification.logprob_file import read_logprobs, write_logprobs
    from fdasync_trainer.verification.logprob_table import (
        LogprobTable,
        ScoredSequence,
        WeightsName,
        rollout_logprobs,
    )
    from fdasync_trainer.verification.modules import ModuleDifference, ModuleTrace, first_difference, traced
    from fdasync_trainer.verification.trainer import TrainerSide
    from fdasync_trainer.verification.verify import Difference, Report, Served, verify

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
    "TrainerNumerics": "numerics.trainer",
    "TrainerSide": "verification.trainer",
    "WeightsName": "verification.logprob_table",
    "checkpoint_contexts": "replay.batch",
    "compare_logprobs": "verification.logprob_compare",
    "first_difference": "verification.modules",
    "fixed_numerics": "numerics.trainer",
    "forced_routing": "replay.force",
    "read_logprobs": "verification.logprob_file",
    "replay_routing": "replay.batch",
    "rollout_logprobs": "verification.logprob_table",
    "traced": "verification.modules",
    "verify": "verification.verify",
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
    "WeightsName",
    "checkpoint_contexts",
    "compare_logprobs",
    "first_difference",
    "fixed_numerics",
    "forced_routing",
    "read_logprobs",
    "replay_routing",
    "rollout_logprobs",
    "traced",
    "verify",
    "write_logprobs",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOME[name]}")
    value = globals()[name] = getattr(module, name)
    return value
