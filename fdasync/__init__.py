"""fdasync: an asyncio engine framework for mixture-of-experts rollouts with exact expert routing.

Names are imported when first used: a process that needs a part loads that part.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync.engine.config import EngineConfig
    from fdasync.engine.engine import Engine, EngineStats
    from fdasync.engine.stream import Generation, TokenStream
    from fdasync.errors import (
        BadInput,
        CheckpointError,
        ConfigError,
        DeadlineExceeded,
        DecodeFailed,
        DuplicateRequestId,
        EngineBusy,
        EngineClosed,
        EngineFailed,
        FdasyncError,
        InstanceLost,
        InvariantBroken,
        PeerBusy,
        PeerRefused,
        PeerUnreachable,
        PermanentError,
        PluginError,
        ProtocolError,
        RemoteError,
        RunnerError,
        StoreRejected,
        StoreUnavailable,
        TokenizerFailed,
        TooLong,
        TransientError,
        UnsupportedModel,
        UpdateUnderWay,
        WeightsBroken,
        WeightsRejected,
        WorkerDied,
        WorkerStuck,
    )
    from fdasync.pd.instance.instance import Instance
    from fdasync.pd.router.config import RouterConfig
    from fdasync.pd.router.router import Router, connect
    from fdasync.pd.router.stats import InstanceStats, RouterStats
    from fdasync.request import SamplingParams
    from fdasync.result import CachedTokens, Delta, Result, Routing, Sample, Usage, WeightSpan

_HOMES = {
    "fdasync.engine.config": ("EngineConfig",),
    "fdasync.engine.engine": (
        "Engine",
        "EngineStats",
    ),
    "fdasync.errors": (
        "BadInput",
        "CheckpointError",
        "ConfigError",
        "DeadlineExceeded",
        "DecodeFailed",
        "DuplicateRequestId",
        "EngineBusy",
        "EngineClosed",
        "EngineFailed",
        "FdasyncError",
        "InstanceLost",
        "InvariantBroken",
        "PeerBusy",
        "PeerRefused",
        "PeerUnreachable",
        "PermanentError",
        "PluginError",
        "ProtocolError",
        "RemoteError",
        "RunnerError",
        "StoreRejected",
        "StoreUnavailable",
        "TokenizerFailed",
        "TooLong",
        "TransientError",
        "UnsupportedModel",
        "UpdateUnderWay",
        "WeightsBroken",
        "WeightsRejected",
        "WorkerDied",
        "WorkerStuck",
    ),
    "fdasync.pd.instance.instance": ("Instance",),
    "fdasync.pd.router.stats": (
        "InstanceStats",
        "RouterStats",
    ),
    "fdasync.pd.router.router": (
        "Router",
        "connect",
    ),
    "fdasync.pd.router.config": ("RouterConfig",),
    "fdasync.request": ("SamplingParams",),
    "fdasync.result": (
        "CachedTokens",
        "Delta",
        "Result",
        "Routing",
        "Sample",
        "Usage",
        "WeightSpan",
    ),
    "fdasync.engine.stream": (
        "Generation",
        "TokenStream",
    ),
}

__all__ = [
    "BadInput",
    "CachedTokens",
    "CheckpointError",
    "ConfigError",
    "DeadlineExceeded",
    "DecodeFailed",
    "Delta",
    "DuplicateRequestId",
    "Engine",
    "EngineBusy",
    "EngineClosed",
    "EngineConfig",
    "EngineFailed",
    "EngineStats",
    "FdasyncError",
    "Generation",
    "Instance",
    "InstanceLost",
    "InstanceStats",
    "InvariantBroken",
    "PeerBusy",
    "PeerRefused",
    "PeerUnreachable",
    "PermanentError",
    "PluginError",
    "ProtocolError",
    "RemoteError",
    "Result",
    "Router",
    "RouterConfig",
    "RouterStats",
    "Routing",
    "RunnerError",
    "Sample",
    "SamplingParams",
    "StoreRejected",
    "StoreUnavailable",
    "TokenStream",
    "TokenizerFailed",
    "TooLong",
    "TransientError",
    "UnsupportedModel",
    "UpdateUnderWay",
    "Usage",
    "WeightSpan",
    "WeightsBroken",
    "WeightsRejected",
    "WorkerDied",
    "WorkerStuck",
    "connect",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
