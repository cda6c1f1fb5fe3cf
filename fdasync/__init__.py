"""fdasync: an asyncio engine framework for mixture-of-experts rollouts with exact expert routing."""

from fdasync.config import EngineConfig
from fdasync.engine import Engine, EngineStats
from fdasync.errors import (
    BadInput,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    DecodeFailed,
    DuplicateRequestId,
    EngineClosed,
    EngineFailed,
    FdasyncError,
    InvariantBroken,
    PermanentError,
    PluginError,
    ProtocolError,
    RunnerError,
    TransientError,
    UnsupportedModel,
    WorkerDied,
    WorkerStuck,
)
from fdasync.request import SamplingParams
from fdasync.result import Delta, Result, Routing, Sample, WeightSpan
from fdasync.stream import Generation, TokenStream

__all__ = [
    "BadInput",
    "CheckpointError",
    "ConfigError",
    "DeadlineExceeded",
    "DecodeFailed",
    "Delta",
    "DuplicateRequestId",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineFailed",
    "EngineStats",
    "FdasyncError",
    "Generation",
    "InvariantBroken",
    "PermanentError",
    "PluginError",
    "ProtocolError",
    "Result",
    "Routing",
    "RunnerError",
    "Sample",
    "SamplingParams",
    "TokenStream",
    "TransientError",
    "UnsupportedModel",
    "WeightSpan",
    "WorkerDied",
    "WorkerStuck",
]
