"""Plugins by name, and plain values into the structs that configure them."""

from fdasync.registry.registry import GROUPS, RUNNERS, STORES, TOKENIZERS, TRANSPORTS, PluginInfo, Registry

__all__ = ["GROUPS", "RUNNERS", "STORES", "TOKENIZERS", "TRANSPORTS", "PluginInfo", "Registry"]
