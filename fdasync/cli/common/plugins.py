"""Imports and checks every installed plugin against the class that its group extends.

Called by the commands `doctor` and `plugins`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.cache.store.base import Store
from fdasync.drafting import Drafter
from fdasync.events.tap import Tap
from fdasync.pd.transfer.base import Transport
from fdasync.registry.registry import DRAFTERS, POLICIES, RUNNERS, STORES, TAPS, TRANSPORTS, Registry
from fdasync.runner.base import Runner
from fdasync.scheduler.state.policy import Policy

if TYPE_CHECKING:
    from fdasync.registry.registry import PluginInfo


def checked_plugins() -> list[PluginInfo]:
    """All plugins, with their problems; takes some seconds where plugins are heavy."""
    bases = {DRAFTERS: Drafter, POLICIES: Policy, RUNNERS: Runner, STORES: Store, TAPS: Tap, TRANSPORTS: Transport}
    return Registry().list(bases)
