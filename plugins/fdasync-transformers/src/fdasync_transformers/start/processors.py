"""Makes a runner's logits processors from their entry points. Knows none by name. Called by `opened_runner.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import ConfigError, PluginError
from fdasync.registry.registry import PROCESSORS, Registry
from fdasync_transformers.sampling.processors import LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Sequence


def make_processors(names: Sequence[str], vocab_size: int) -> dict[str, LogitsProcessor]:
    """A processor of each name. Raises ConfigError for a name that is not installed, or is no processor."""
    made = {}
    for name in names:
        try:
            made[name] = Registry().load(PROCESSORS, name, LogitsProcessor)(vocab_size)
        except PluginError as error:
            raise ConfigError("runner_config.processors", f"{name!r}: {error.problem}") from error
        except Exception as error:  # a plugin may raise anything
            problem = f"{name!r} cannot be made: {type(error).__name__}: {error}"
            raise ConfigError("runner_config.processors", problem) from error
    return made
