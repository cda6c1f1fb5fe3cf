"""Makes runners from their entry points, and decodes their configuration.

Knows no runner by name. Called in the process that a runner lives in: a worker's (`worker/main.py`) or the engine's
(`engine/runtime.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync.errors import ConfigError
from fdasync.registry.mapping import struct_of
from fdasync.registry.registry import RUNNERS, Registry
from fdasync.runner.base import Runner

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.runner.base import RunnerLimits


def make_runner(name: str, config: Mapping[str, Any], limits: RunnerLimits) -> Runner:
    """A runner of the plugin of this name. Raises PluginError; ConfigError naming the key."""
    runner = Registry().load(RUNNERS, name, Runner)
    return runner(struct_of(runner.config_type, config, error=ConfigError, root="runner_config"), limits)
