"""fdasync: an asyncio engine framework for mixture-of-experts rollouts with exact expert routing.

Names are imported when first used: a process that needs a part loads that part.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync_fleet.instance.instance import Instance
    from fdasync_fleet.router.config import RouterConfig
    from fdasync_fleet.router.router import Router, connect
    from fdasync_fleet.router.stats import InstanceStats, RouterStats

    from fdasync.engine.config import EngineConfig
    from fdasync.engine.engine import Engine, EngineStats
    from fdasync.engine.stream import TokenStream
    from fdasync.errors import (
        Asleep,
        BadInput,
        ChatUnsupported,
        CheckpointError,
        ConfigError,
        DeadlineExceeded,
        DecodeFailed,
        DuplicateRequestId,
        EngineBusy,
        EngineClosed,
        EngineFailed,
        FdasyncError,
        GrammarFailed,
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
        SourceUnsupported,
        StoreRejected,
        StoreUnavailable,
        TokenizerFailed,
        TooLong,
        TransientError,
        UnsupportedModel,
        UpdateUnderWay,
        WakeFailed,
        WeightsBroken,
        WeightsDiffer,
        WeightsRejected,
        WorkerDied,
        WorkerStuck,
        WrongLoop,
    )
    from fdasync.generator import DeltaStream, Generation, Generator, InstanceLoad, Load, ModelFacts
    from fdasync.request import (
        Doing,
        GenerateOptions,
        Grammar,
        GroupTensors,
        MemoryPart,
        PauseMode,
        SamplingParams,
        SleepMode,
        TensorMeta,
        WakeTag,
        WeightsFingerprint,
        WeightsGroup,
    )
    from fdasync.result import (
        CachedTokens,
        ChosenPositions,
        Delta,
        DraftCounts,
        Result,
        Routing,
        Sample,
        Usage,
        WeightSpan,
    )

# the modules of the names that are no errors
_HOMES = {
    "CachedTokens": "result",
    "ChosenPositions": "result",
    "Delta": "result",
    "DeltaStream": "generator",
    "Doing": "request",
    "DraftCounts": "result",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "EngineStats": "engine.engine",
    "GenerateOptions": "request",
    "Generation": "generator",
    "Generator": "generator",
    "Grammar": "request",
    "GroupTensors": "request",
    "Instance": "fdasync_fleet.instance.instance",
    "InstanceLoad": "generator",
    "InstanceStats": "fdasync_fleet.router.stats",
    "Load": "generator",
    "ModelFacts": "generator",
    "MemoryPart": "request",
    "PauseMode": "request",
    "Result": "result",
    "Router": "fdasync_fleet.router.router",
    "RouterConfig": "fdasync_fleet.router.config",
    "RouterStats": "fdasync_fleet.router.stats",
    "Routing": "result",
    "Sample": "result",
    "SamplingParams": "request",
    "SleepMode": "request",
    "TensorMeta": "request",
    "TokenStream": "engine.stream",
    "Usage": "result",
    "WakeTag": "request",
    "WeightSpan": "result",
    "WeightsFingerprint": "request",
    "WeightsGroup": "request",
    "connect": "fdasync_fleet.router.router",
}

__all__ = [
    "Asleep",
    "BadInput",
    "CachedTokens",
    "ChatUnsupported",
    "CheckpointError",
    "ChosenPositions",
    "ConfigError",
    "DeadlineExceeded",
    "DecodeFailed",
    "Delta",
    "DeltaStream",
    "Doing",
    "DraftCounts",
    "DuplicateRequestId",
    "Engine",
    "EngineBusy",
    "EngineClosed",
    "EngineConfig",
    "EngineFailed",
    "EngineStats",
    "FdasyncError",
    "GenerateOptions",
    "Generation",
    "Generator",
    "Grammar",
    "GrammarFailed",
    "GroupTensors",
    "Instance",
    "InstanceLoad",
    "InstanceLost",
    "InstanceStats",
    "InvariantBroken",
    "Load",
    "MemoryPart",
    "ModelFacts",
    "PauseMode",
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
    "SleepMode",
    "SourceUnsupported",
    "StoreRejected",
    "StoreUnavailable",
    "TensorMeta",
    "TokenStream",
    "TokenizerFailed",
    "TooLong",
    "TransientError",
    "UnsupportedModel",
    "UpdateUnderWay",
    "Usage",
    "WakeFailed",
    "WakeTag",
    "WeightSpan",
    "WeightsBroken",
    "WeightsDiffer",
    "WeightsFingerprint",
    "WeightsGroup",
    "WeightsRejected",
    "WorkerDied",
    "WorkerStuck",
    "WrongLoop",
    "connect",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "errors")
    if not home.startswith("fdasync_fleet."):
        return getattr(importlib.import_module(f"fdasync.{home}"), name)
    try:
        return getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name != "fdasync_fleet":
            raise
        raise ImportError(f"fdasync.{name} is of fdasync-fleet: pip install fdasync-fleet", name=home) from error


def __dir__() -> list[str]:
    return [*globals(), *__all__]
