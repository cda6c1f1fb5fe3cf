"""Plugins by entry point: listed cheaply, loaded only when named, checked when loaded.

A plugin that is named but missing or broken raises `PluginError` with its distribution; nothing is
logged and skipped. One registry per engine; no module state.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import msgspec

from fdasync.cache.store.base import Store
from fdasync.errors import ConfigError, PluginError
from fdasync.pd.transfer.base import Transport
from fdasync.registry.mapping import struct_of
from fdasync.runner.base import Runner, RunnerLimits

if TYPE_CHECKING:
    from collections.abc import Mapping

RUNNERS = "fdasync.runners"
STORES = "fdasync.stores"
TOKENIZERS = "fdasync.tokenizers"
TRANSPORTS = "fdasync.transports"
GROUPS = (RUNNERS, STORES, TOKENIZERS, TRANSPORTS)
_BASES: dict[str, type[Runner] | type[Store] | type[Transport]] = {
    RUNNERS: Runner, STORES: Store, TRANSPORTS: Transport
}  # fmt: skip
# their classes take a configuration of their own
_CONFIGURED = (RUNNERS, STORES)


class PluginInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One entry point. `problem` is "" if it loads, None if nobody tried."""

    group: str
    name: str
    distribution: str
    version: str
    target: str
    problem: str | None = None


class Registry:
    """Looks plugins up by group and name."""

    def list(self, *, load: bool = False) -> list[PluginInfo]:
        """Every plugin there is; with `load`, each is imported and checked, which can take seconds."""
        found = []
        for group in GROUPS:
            for point in sorted(entry_points(group=group), key=lambda point: point.name):
                problem = None
                if load:
                    try:
                        self._check(group, point)
                        problem = ""
                    except PluginError as error:
                        problem = error.problem
                name, version = _origin(point)
                found.append(
                    PluginInfo(
                        group=group,
                        name=point.name,
                        distribution=name,
                        version=version,
                        target=point.value,
                        problem=problem,
                    )
                )
        return found

    def find(self, group: str, name: str) -> EntryPoint:
        """The entry point, without importing it. Raises PluginError if there is none, or more than one."""
        points = list(entry_points(group=group, name=name))
        targets = {point.value for point in points}
        if not points:
            known = sorted({point.name for point in entry_points(group=group)})
            raise PluginError(group, name, "", f"not installed; there are: {', '.join(known) or 'none'}")
        if len(targets) > 1:
            owners = ", ".join(sorted({_origin(point)[0] for point in points}))
            raise PluginError(group, name, owners, "several distributions declare this name")
        return points[0]

    def load_runner(self, name: str) -> type[Runner]:
        """The runner class. Raises PluginError."""
        runner = self._check(RUNNERS, self.find(RUNNERS, name))
        assert isinstance(runner, type)
        return runner

    def make_runner(self, name: str, config: Mapping[str, Any], limits: RunnerLimits) -> Runner:
        """A runner with its own configuration decoded. Raises PluginError; ConfigError naming the key."""
        runner = self.load_runner(name)
        own = struct_of(runner.config_type, config, error=ConfigError, root="runner_config")
        return runner(own, limits)

    def load_store(self, name: str) -> type[Store]:
        """The store class. Raises PluginError."""
        store = self._check(STORES, self.find(STORES, name))
        assert isinstance(store, type)
        return store

    def make_store(self, name: str, config: Mapping[str, Any]) -> Store:
        """A store with its own configuration decoded. Raises PluginError; ConfigError naming the key."""
        store = self.load_store(name)
        own = struct_of(store.config_type, config, error=ConfigError, root="store_config")
        return store(own)

    def make_transport(self, name: str) -> Transport:
        """A transport by name. Raises PluginError."""
        transport = self._check(TRANSPORTS, self.find(TRANSPORTS, name))
        try:
            made = transport()
        except TypeError as error:
            raise PluginError(TRANSPORTS, name, "", f"it cannot be made without arguments: {error}") from error
        assert isinstance(made, Transport)
        return made

    def load_tokenizer(self, name: str) -> Any:
        """The tokenizer factory: a callable that takes a model folder. Raises PluginError."""
        return self._check(TOKENIZERS, self.find(TOKENIZERS, name))

    def _check(self, group: str, point: EntryPoint) -> Any:
        distribution = _origin(point)[0]
        try:
            loaded = point.load()
        except (Exception, SystemExit) as error:
            # a module that exits must not end the program that looks at it
            problem = f"importing {point.value} failed: {type(error).__name__}: {error}"
            raise PluginError(group, point.name, distribution, problem) from error
        base = _BASES.get(group)
        if base is not None:
            if not (isinstance(loaded, type) and issubclass(loaded, base)):
                raise PluginError(group, point.name, distribution, f"{point.value} is not a {base.__name__} class")
            own = getattr(loaded, "config_type", msgspec.Struct if group not in _CONFIGURED else None)
            if not (isinstance(own, type) and issubclass(own, msgspec.Struct)):
                raise PluginError(group, point.name, distribution, f"{point.value} has no config_type")
        elif not callable(loaded):
            raise PluginError(group, point.name, distribution, f"{point.value} cannot be called")
        return loaded


def _origin(point: EntryPoint) -> tuple[str, str]:
    return (point.dist.name, point.dist.version) if point.dist is not None else ("", "")
