"""What a fleet is started with, and what its processes tell each other. Pure data; imports no Ray."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fdasync_fleet.cli.local.child import Role
from fdasync_fleet.cli.local.options import Seconds, missing_half
from fdasync_fleet.cli.local.restarts import RestartRules
from fdasync_fleet.link.address import check_address, is_ipc
from msgspec import Meta

from fdasync.cli.common.fields import Address, File
from fdasync.cli.common.options import store_of_instance
from fdasync.engine.config import EngineConfig
from fdasync.errors import ConfigError
from fdasync.registry.mapping import check

#: Ray's namespace of the named actors
NAMESPACE = "fdasync"
Count = Annotated[int, Meta(ge=0, le=512)]
Amount = Annotated[float, Meta(ge=0, le=1e9)]
ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a fleet is made of.

    Attributes:
        engine: of every instance; its role is set for each. Its folders must be there on every node.
        name: of the fleet, by which routers find it; two fleets that live have two names.
        prefill: prefill instances.
        decode: decode instances.
        mixed: mixed instances.
        cpus: Ray CPUs of an instance, all on one node, and its threads where it computes on CPUs.
        gpus: Ray GPUs of an instance, all on one node, so a group of tensor-parallel ranks is; 0: none.
        resources: further ones of an instance, by name.
        listen: address of every instance, such as tcp://eth1:0 where nodes have several networks; the system chooses
            the port; by default the address by which Ray knows the node.
        keys: file of the fleet's keys (`fdasync keys new`), for routers outside of the cluster; it is read by the
            process that starts the fleet, and goes to instances and routers through Ray; by default keys of this fleet
            alone.
        transport: how blocks come from other instances, as of `fdasync serve`.
        serve_options: further options of every `fdasync serve`, each word by itself, as `("--metrics-port", "0")`.
        place_s: how long a cluster may take to give an instance its place before another place is asked for.
        room_s: how long a start or a growth waits for room before it fails. The places stay wanted.
        drain_s: how long an instance that leaves may take to end its requests.
        restart: how soon and how often an instance that ended is started again, there or on another node.
    """

    engine: EngineConfig
    name: Annotated[str, Meta(min_length=1)] = "fleet"
    prefill: Count = 0
    decode: Count = 0
    mixed: Count = 0
    cpus: Amount = 1.0
    gpus: Amount = 0.0
    resources: dict[str, Amount] = {}
    listen: Address = ""
    keys: File = ""
    transport: str = "auto"
    serve_options: tuple[str, ...] = ()
    place_s: Seconds = 10.0
    room_s: Seconds = 60.0
    drain_s: Seconds = 600.0
    restart: RestartRules = RestartRules()

    def counts(self) -> dict[Role, int]:
        """How many instances of each role."""
        return {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}

    def bundle(self) -> dict[str, float]:
        """The resources of one instance, as a placement group takes them."""
        own = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in own.items() if amount}

    def config_of(self, name: str, role: Role) -> EngineConfig:
        """The engine of one instance: with a store of its own, and with threads and memory for its share of a node."""
        engine, runner_config = self.engine, dict(self.engine.runner_config)
        if engine.runner == "transformers":
            # what Ray shows a process are its own GPUs; of a part of one the runner takes that part's memory
            shared = round(1 / self.gpus) if 0 < self.gpus < 1 else 1
            runner_config = {"instance": 0, "instances": shared, **runner_config}
            if not self.gpus:
                runner_config.setdefault("num_threads", max(int(self.cpus) // engine.tensor_parallel, 1))
        store_config = store_of_instance(engine, name)
        return msgspec.structs.replace(engine, role=role, runner_config=runner_config, store_config=store_config)

    def check(self) -> None:
        """Raises ConfigError for what no cluster could start."""
        check(self, error=ConfigError)
        if not sum(self.counts().values()):
            raise ConfigError("counts", "no instances", hint="prefill=1, decode=1, or mixed=1")
        if missing := missing_half(self.prefill, self.decode, self.mixed):
            raise ConfigError("counts", f"{missing.removeprefix('--')} instances are missing")
        if not self.bundle():
            raise ConfigError("cpus", "an instance needs a resource, or Ray puts all on one node", limit="above 0")
        if self.engine.gpus != "auto":
            hint = "leave it out: gpus (--ray-gpus) says how many an instance has"
            raise ConfigError("engine.gpus", "names GPUs, and Ray gives each instance its own", hint=hint)
        ranks = self.engine.tensor_parallel
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ConfigError("gpus", f"{self.gpus:g} is no whole number", limit="a part of one GPU, or whole ones")
        if 0 < self.gpus < ranks and (ranks > 1 or not self.engine.share_gpus):
            hint = "give one for each rank" if ranks > 1 else "say share_gpus (--share-gpus), or give a whole one"
            raise ConfigError("gpus", f"{self.gpus:g} for {ranks} ranks", limit=f"{ranks}", hint=hint)
        if self.listen:
            check_address(self.listen, listens=True, keyed=True)
            if is_ipc(self.listen) or not self.listen.endswith((":0", ":*")):
                problem = f"{self.listen!r} can be that of one instance alone"
                raise ConfigError("listen", problem, hint="say tcp://INTERFACE:0")


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
        state: "ready", "ended", or "loading" if it did not get ready in time.
        address, pid: of its process; "" and 0 before it was started.
        status: its exit status; None while it runs.
        problem: in words, with its last line; "".
    """

    state: Literal["loading", "ready", "ended"]
    address: str = ""
    pid: int = 0
    status: int | None = None
    problem: str = ""
