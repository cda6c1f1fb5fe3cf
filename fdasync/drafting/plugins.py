"""Makes drafters from their entry points, and decodes their configuration.

Knows no drafter by name. The engine's configuration calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync.drafting.base import Drafter
from fdasync.errors import ConfigError, PluginError
from fdasync.registry.mapping import struct_of
from fdasync.registry.registry import DRAFTERS, Registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fdasync.drafting.base import DrafterLimits


def drafter_class(name: str) -> type[Drafter]:
    """The class of the drafter of this name. Raises PluginError."""
    return Registry().load(DRAFTERS, name, Drafter)


def make_drafter(
    name: str, config: Mapping[str, Any], limits: DrafterLimits, *, root: str = "drafter_config"
) -> Drafter:
    """A drafter of the plugin of this name. Raises PluginError; ConfigError naming the key, which stands below
    `root`."""
    kind = drafter_class(name)
    own = struct_of(kind.config_type, config, error=ConfigError, root=root)
    try:
        return kind(own, limits)
    except ConfigError:
        raise
    except Exception as error:
        raise PluginError(DRAFTERS, name, "", f"it cannot be made: {type(error).__name__}: {error}") from error
