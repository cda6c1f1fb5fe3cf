"""Stores by entry point, with their own configuration decoded.

It stands here and not in `engine`, because the store's process (`process/main.py`) makes the store too, and knows no
engine. `engine/store_stack.py` and the command line call it as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync.cache.store.base import Store
from fdasync.errors import ConfigError
from fdasync.registry.mapping import struct_of
from fdasync.registry.registry import STORES, Registry

if TYPE_CHECKING:
    from collections.abc import Mapping


def load_store(name: str) -> type[Store]:
    """The class of the plugin of this name. Raises PluginError."""
    # mypy takes the abstract base for the class to be instantiated
    return Registry().load(STORES, name, Store)


def make_store(name: str, config: Mapping[str, Any]) -> Store:
    """A store of the plugin of this name. Raises PluginError; ConfigError naming the key."""
    store = load_store(name)
    return store(struct_of(store.config_type, config, error=ConfigError, root="store_config"))
