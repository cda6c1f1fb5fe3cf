"""What a fleet is started with, and what its processes tell each other. Pure data; imports no Ray."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fdasync.cli.local.child import Role
from fdasync.cli.local.restarts import RestartRules
from fdasync.engine.config import EngineConfig
from fdasync.errors import ConfigError

#: Ray's namespace of the named actors
NAMESPACE = "fdasync"
ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    engine: of every instance; its role is set for each. Its folders must be there on every node.
    name: of the fleet in its cluster; two fleets that live have two names.
    prefill, decode, mixed: how many instances of each role.
    cpus, gpus: Ray's resources of one instance; all on one node, so a group of tensor-parallel ranks is.
    resources: further ones of an instance, by name.
    listen: address of an instance; the system chooses the port.
    transport: how blocks come from other instances, as `fdasync serve --transport`.
    serve_options: further options of every `fdasync serve`, each word by itself, as `("--metrics-port", "0")`.
    place_s: how long a cluster may take to give an instance its place before another place is asked for.
    drain_s: how long an instance that leaves may take to end its requests.
    restart: how soon and how often an instance that ended is started again, there or on another node.
    """

    engine: EngineConfig
    name: str = "fleet"
    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    cpus: float = 1.0
    gpus: float = 0.0
    resources: dict[str, float] = {}
    listen: str = "tcp://127.0.0.1:0"
    transport: str = "auto"
    serve_options: tuple[str, ...] = ()
    place_s: float = 10.0
    drain_s: float = 600.0
    restart: RestartRules = RestartRules()

    def counts(self) -> dict[Role, int]:
        """How many instances of each role."""
        return {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}

    def bundle(self) -> dict[str, float]:
        """The resources of one instance, as a placement group takes them."""
        own = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in own.items() if amount}

    def check(self) -> None:
        """Raises ConfigError for what no cluster could start."""
        if not self.name or any(count < 0 for count in self.counts().values()):
            raise ConfigError("name" if not self.name else "counts", "is empty or below zero")
        if not sum(self.counts().values()):
            raise ConfigError("counts", "no instances", hint="prefill=1, decode=1, or mixed=1")
        if bool(self.prefill) != bool(self.decode) and not self.mixed:
            raise ConfigError("counts", f"{'decode' if self.prefill else 'prefill'} instances are missing")
        if not self.bundle():
            raise ConfigError("cpus", "an instance needs a resource, or Ray puts all on one node", limit="above 0")


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One instance that takes requests, or drains.

    Attributes:
        name: of its place in the fleet, as "d0"; an instance that replaces another has the same.
        role, address, pid: of its `fdasync serve`.
        node: Ray's id of the node.
        draining: it takes no new requests, and leaves.
    """

    name: str
    role: Role
    address: str
    pid: int
    node: str
    draining: bool = False


class Published(msgspec.Struct, frozen=True):
    """Weights from memory, which every node of the fleet has as a folder.

    Attributes:
        path: of the folder, the same on each node.
        parts: object references of `weights.Packed`; nested, so that Ray gives the reference and not the object.
    """

    path: str
    parts: tuple[Any, ...]


class Current(msgspec.Struct, frozen=True):
    """The weights that the fleet serves with since its last update: their version and folder."""

    version: str
    path: str


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What the registry knows.

    Attributes:
        serial: counts changes.
        members: by name.
        published: weights from memory that nodes hold, the oldest first.
        current: None before the first update.
    """

    serial: int
    members: tuple[Member, ...]
    published: tuple[Published, ...]
    current: Current | None


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor tells of its instance.

    Attributes:
        state: "ready", "ended", or "loading" for one that did not get ready in time.
        address, pid: of its process; "" and 0 before it was started.
        status: its exit status; None while it runs.
        problem: in words, with its last line; "".
    """

    state: Literal["loading", "ready", "ended"]
    address: str = ""
    pid: int = 0
    status: int | None = None
    problem: str = ""
