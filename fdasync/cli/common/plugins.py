"""Imports and checks every installed plugin against the class that its group extends.

Called by the commands `doctor` and `plugins`.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fdasync.cache.store.base import Store
from fdasync.drafting import Drafter
from fdasync.events.tap import Tap
from fdasync.registry.registry import AUX, DRAFTERS, POLICIES, PROCESSORS, RUNNERS, STORES, TAPS, TRANSPORTS, Registry
from fdasync.runner.base import Runner
from fdasync.scheduler.state.policy import Policy

if TYPE_CHECKING:
    from fdasync.registry.registry import PluginInfo

# contracts that belong to distributions which may not be installed, and then nothing uses them
_APART = {
    AUX: ("fdasync_transformers.capture.aux_producer", "AuxProducer"),
    PROCESSORS: ("fdasync_transformers.sampling.processors", "LogitsProcessor"),
    TRANSPORTS: ("fdasync_fleet.transfer.base", "Transport"),
}


def checked_plugins() -> list[PluginInfo]:
    """All plugins, with their problems; takes some seconds where plugins are heavy."""
    bases: dict[str, Any] = {DRAFTERS: Drafter, POLICIES: Policy, RUNNERS: Runner, STORES: Store, TAPS: Tap}
    for group, (module, name) in _APART.items():
        if find_spec(module.partition(".")[0]) is not None:
            bases[group] = getattr(importlib.import_module(module), name)
    return Registry().list(bases)
