"""Plugins by entry point: listed cheaply, loaded only when named, checked when loaded.

A plugin that is named but missing or broken raises `PluginError` with its distribution; none is logged and skipped.
The module knows no kind of plugin: callers name the class that a plugin must extend. The modules that make runners
(`runner/plugins.py`), drafters (`drafting/plugins.py`), stores (`cache/store/plugins.py`), transports
(`fdasync_fleet/transfer/plugins.py`) and tokenizers call it, and the command line, which lists all plugins.
"""

from __future__ import annotations

import inspect
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from fdasync.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

AUX = "fdasync.aux"
CHECKPOINTS = "fdasync.checkpoints"
COMMANDS = "fdasync.commands"
DRAFTERS = "fdasync.drafters"
POLICIES = "fdasync.policies"
PROCESSORS = "fdasync.processors"
RUNNERS = "fdasync.runners"
STORES = "fdasync.stores"
TAPS = "fdasync.taps"
TOKENIZERS = "fdasync.tokenizers"
TRANSPORTS = "fdasync.transports"
GROUPS = (AUX, CHECKPOINTS, COMMANDS, DRAFTERS, POLICIES, PROCESSORS, RUNNERS, STORES, TAPS, TOKENIZERS, TRANSPORTS)


class PluginInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One entry point.

    Attributes:
        group, name: as declared, e.g. "fdasync.stores" and "file".
        distribution, version: of the package that declares it; "" if not known.
        target: the object that it names, e.g. "package.module:Class".
        problem: why it does not load; "": it loads; None: it was not loaded.
    """

    group: str
    name: str
    distribution: str
    version: str
    target: str
    problem: str | None = None


class Registry:
    """Looks plugins up by group and name."""

    def list(self, bases: Mapping[str, type[Any]] | None = None) -> list[PluginInfo]:
        """Every plugin there is.

        Args:
            bases: the class that the plugins of a group extend; plugins of other groups are functions. With it each
                plugin is imported and checked, which can take seconds; without it none is.
        """
        found = []
        for group in GROUPS:
            for point in sorted(entry_points(group=group), key=lambda point: point.name):
                problem = None
                if bases is not None:
                    try:
                        if (base := bases.get(group)) is not None:
                            _load_class(group, point, base)
                        else:
                            _load_function(group, point)
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

    def names(self, group: str) -> tuple[str, ...]:
        """Names of a group's plugins, sorted; none is imported."""
        return tuple(sorted({point.name for point in entry_points(group=group)}))

    def find(self, group: str, name: str) -> EntryPoint:
        """The entry point, without importing it. Raises PluginError if there is none, or more than one."""
        points = list(entry_points(group=group, name=name))
        targets = {point.value for point in points}
        if not points:
            raise PluginError(group, name, "", f"not installed; there are: {', '.join(self.names(group)) or 'none'}")
        if len(targets) > 1:
            owners = ", ".join(sorted({_origin(point)[0] for point in points}))
            raise PluginError(group, name, owners, "several distributions declare this name")
        return points[0]

    def load(self, group: str, name: str, base: type[T]) -> type[T]:
        """The class of this name, which extends `base` and has a `config_type` if `base` declares one.

        Raises PluginError.
        """
        return _load_class(group, self.find(group, name), base)

    def load_function(self, group: str, name: str) -> Callable[..., Any]:
        """The callable of this name, in a group whose plugins extend no class. Raises PluginError."""
        return _load_function(group, self.find(group, name))


def _load_class(group: str, point: EntryPoint, base: type[T]) -> type[T]:
    loaded = _import(group, point)
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise _unfit(group, point, f"{point.value} is not a {base.__name__} class")
    configured = "config_type" in inspect.get_annotations(base)
    own = getattr(loaded, "config_type", None if configured else msgspec.Struct)
    if not (isinstance(own, type) and issubclass(own, msgspec.Struct)):
        raise _unfit(group, point, f"{point.value} has no config_type")
    return loaded


def _load_function(group: str, point: EntryPoint) -> Callable[..., Any]:
    loaded: Callable[..., Any] = _import(group, point)
    if not callable(loaded):
        raise _unfit(group, point, f"{point.value} cannot be called")
    return loaded


def _import(group: str, point: EntryPoint) -> Any:
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        # a module that exits must not end the program that looks at it
        raise _unfit(group, point, f"importing {point.value} failed: {type(error).__name__}: {error}") from error


def _unfit(group: str, point: EntryPoint, problem: str) -> PluginError:
    return PluginError(group, point.name, _origin(point)[0], problem)


def _origin(point: EntryPoint) -> tuple[str, str]:
    return (point.dist.name, point.dist.version) if point.dist is not None else ("", "")
