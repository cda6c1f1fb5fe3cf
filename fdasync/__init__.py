"""fdasync: an asyncio engine framework for mixture-of-experts rollouts with exact expert routing.

Names are imported when first used: a process that needs a part loads that part. Errors are in `fdasync.errors`, and
what plugins are written against is in the rooms that their pages name (docs/write-a-store.md and the like).
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync_fleet.instance.instance import Instance
    from fdasync_fleet.router.config import RouterConfig
    from fdasync_fleet.router.router import Router, connect
    from fdasync_fleet.router.stats import InstanceStats, RouterStats

    from fdasync.engine.config import EngineConfig
    from fdasync.engine.engine import Engine
    from fdasync.engine.stream import TokenStream
    from fdasync.generator import DeltaStream, Generation, Generator, InstanceLoad, Load
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
        TopLogprobs,
        Usage,
        WeightSpan,
    )
    from fdasync.runner.facts import ModelFacts
    from fdasync.stats import EngineStats

# a program that configures no logging hears nothing of these loggers, and not Python's last resort either
logging.getLogger("fdasync").addHandler(logging.NullHandler())

# the module of each name, in the order of docs/embed.md
_HOMES = {
    # an engine
    "EngineConfig": "fdasync.engine.config",
    "Engine": "fdasync.engine.engine",
    "EngineStats": "fdasync.stats",
    "TokenStream": "fdasync.engine.stream",
    # requests
    "GenerateOptions": "fdasync.request",
    "Grammar": "fdasync.request",
    "SamplingParams": "fdasync.request",
    # results
    "CachedTokens": "fdasync.result",
    "ChosenPositions": "fdasync.result",
    "Delta": "fdasync.result",
    "DraftCounts": "fdasync.result",
    "Result": "fdasync.result",
    "Routing": "fdasync.result",
    "Sample": "fdasync.result",
    "TopLogprobs": "fdasync.result",
    "Usage": "fdasync.result",
    "WeightSpan": "fdasync.result",
    # new weights
    "GroupTensors": "fdasync.request",
    "TensorMeta": "fdasync.request",
    "WeightsFingerprint": "fdasync.request",
    "WeightsGroup": "fdasync.request",
    # pauses, sleep and wake
    "Doing": "fdasync.request",
    "MemoryPart": "fdasync.request",
    "PauseMode": "fdasync.request",
    "SleepMode": "fdasync.request",
    "WakeTag": "fdasync.request",
    # what engines and routers have in common, and watching them
    "DeltaStream": "fdasync.generator",
    "Generation": "fdasync.generator",
    "Generator": "fdasync.generator",
    "InstanceLoad": "fdasync.generator",
    "Load": "fdasync.generator",
    "ModelFacts": "fdasync.runner.facts",
    # several instances: of fdasync-fleet
    "Instance": "fdasync_fleet.instance.instance",
    "RouterConfig": "fdasync_fleet.router.config",
    "Router": "fdasync_fleet.router.router",
    "connect": "fdasync_fleet.router.router",
    "InstanceStats": "fdasync_fleet.router.stats",
    "RouterStats": "fdasync_fleet.router.stats",
}

__all__ = [
    "CachedTokens",
    "ChosenPositions",
    "Delta",
    "DeltaStream",
    "Doing",
    "DraftCounts",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "GenerateOptions",
    "Generation",
    "Generator",
    "Grammar",
    "GroupTensors",
    "Instance",
    "InstanceLoad",
    "InstanceStats",
    "Load",
    "MemoryPart",
    "ModelFacts",
    "PauseMode",
    "Result",
    "Router",
    "RouterConfig",
    "RouterStats",
    "Routing",
    "Sample",
    "SamplingParams",
    "SleepMode",
    "TensorMeta",
    "TokenStream",
    "TopLogprobs",
    "Usage",
    "WakeTag",
    "WeightSpan",
    "WeightsFingerprint",
    "WeightsGroup",
    "connect",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name != "fdasync_fleet":
            raise
        hint = "in a checkout, pip install ./plugins/fdasync-fleet"
        raise ImportError(f"fdasync.{name} is of fdasync-fleet: {hint}", name=home) from error


def __dir__() -> list[str]:
    return [*globals(), *__all__]
