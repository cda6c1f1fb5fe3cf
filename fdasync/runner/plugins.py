"""Makes runners from their entry points, decodes their configuration, and finds the folders of their checkpoints.

Knows no runner by name. `make_runner` is called in the process that a runner lives in: a worker's (`worker/main.py`) or
the engine's (`engine/runtime.py`); `checkpoint_folder` in the engine's, before there is any other, and by commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync.errors import ConfigError
from fdasync.registry.mapping import struct_of
from fdasync.registry.registry import CHECKPOINTS, RUNNERS, Registry
from fdasync.runner.base import Runner

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.runner.base import RunnerLimits


def make_runner(name: str, config: Mapping[str, Any], limits: RunnerLimits) -> Runner:
    """A runner of the plugin of this name. Raises PluginError; ConfigError naming the key."""
    runner = Registry().load(RUNNERS, name, Runner)
    return runner(struct_of(runner.config_type, config, error=ConfigError, root="runner_config"), limits)


def checkpoint_folder(runner: str, model: str, *, download: bool = False) -> str:
    """The folder that a runner loads for what a user calls its model, such as a name of a hub.

    A plugin of `fdasync.checkpoints` with the runner's name finds it: a function with these two arguments, `model` and
    `download`, whose import is cheap. Where there is none, the folder is `model`.

    Args:
        download: fetch it where it is not on this machine, and show how far that is.

    Raises CheckpointError saying what to do; PluginError.
    """
    registry = Registry()
    if not model or runner not in registry.names(CHECKPOINTS):
        return model
    return str(registry.load_function(CHECKPOINTS, runner)(model, download=download))
