"""Finds plugins by name, and decodes plain values into the structs that configure them. It knows no kind of plugin."""

from fdasync.registry.registry import DRAFTERS, GROUPS, RUNNERS, STORES, TOKENIZERS, TRANSPORTS, PluginInfo, Registry

__all__ = ["DRAFTERS", "GROUPS", "RUNNERS", "STORES", "TOKENIZERS", "TRANSPORTS", "PluginInfo", "Registry"]
