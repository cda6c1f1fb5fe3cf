"""Runs instances as child processes: `fdasync serve` with sockets in a private folder, watched and ended.

    async with LocalFleet(plans) as fleet:
        async with fdasync.connect(fleet.addresses) as router: ...

All start at the same time; a child that ended can be started again. At the end all are ended and reaped, and their
sockets are removed. Knows no requests; `child.py` has one process, `folder.py` the sockets' folder. Called by `up.py`,
the demo, tests and benchmarks.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from fdasync.cli.common.gpus import gpus_of_instances, most_on_one
from fdasync.cli.common.options import store_of_instance
from fdasync.errors import ConfigError, DeadlineExceeded
from fdasync.ipc.deadlines import Within
from fdasync_fleet.cli.local.child import Child, ChildEnded, Plan, Role
from fdasync_fleet.cli.local.folder import Folder
from fdasync_fleet.cli.local.options import LinkOptions
from fdasync_fleet.link.address import check_address, is_ipc

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from fdasync.engine.config import EngineConfig

T = TypeVar("T")

# seconds beyond the start deadline of a child's engine
_START_S = 10.0
_ALONE = LinkOptions()


def plans_for(
    config: EngineConfig, counts: dict[Role, int], links: LinkOptions = _ALONE, *, shares_stderr: bool = False
) -> list[Plan]:
    """So many instances of each role with this configuration; they share cores and memory, each has its own store, and
    its own GPUs where these are placed (`EngineConfig.gpus`).

    Args:
        links: of all; its `listen` is a tcp address for the first one, the others at the ports behind it; with port 0
            each takes a free one. "": at sockets in the fleet's folder.
        shares_stderr: what they log goes to this process's stderr; else to a pipe, of which `Child.lines` are the last.

    Raises ConfigError where that cannot be.
    """
    names = [(f"{role[0]}{number}", role) for role, count in counts.items() for number in range(count)]
    places = gpus_of_instances(config, [name for name, _ in names])
    sharing = most_on_one(places) if places and places[0] != "auto" else 0
    keys = links.keys and str(Path(links.keys).absolute())
    return [
        Plan(
            name=name,
            role=role,
            config=msgspec.structs.replace(
                config,
                role=role,
                gpus=places[number],
                runner_config={**config.runner_config, **_place(config, number, len(names), sharing)},
                store_config=store_of_instance(config, name),
            ),
            links=msgspec.structs.replace(links, keys=keys, listen=_listen(links, number)),
            shares_stderr=shares_stderr,
        )
        for number, (name, role) in enumerate(names)
    ]


def _listen(links: LinkOptions, number: int) -> str:
    """The address of an instance: the number counts ports from the first one's on. Raises ConfigError."""
    first, host, keyed = links.listen, links.host, bool(links.keys)
    if not first:
        if host:
            raise ConfigError("host", "stands for the host of --listen", hint="say --listen tcp://HOST:PORT, too")
        return ""
    if is_ipc(first):
        raise ConfigError("listen", f"{first!r} is one socket", hint="say --folder, in which each instance has its own")
    check_address(first, listens=True, keyed=keyed, anywhere=bool(host))
    own, _, port = first.rpartition(":")
    address = first if port in ("0", "*") else f"{own}:{int(port) + number}"
    check_address(address, listens=True, keyed=keyed, anywhere=bool(host))
    return address


def _place(config: EngineConfig, instance: int, instances: int, sharing: int) -> dict[str, int]:
    """Configuration that a runner needs to share hardware with the other instances.

    Args:
        sharing: how many instances have a GPU in common, at most; 0: GPUs are not placed, and the runner of each
            instance chooses one by its number.
    """
    if config.runner != "transformers":
        return {}
    place = {"instance": instance, "instances": instances}
    if sharing:
        # the first GPU that a runner sees is its own; with "auto", instances take all visible GPUs in turn
        spread = config.runner_config.get("device", "auto") == "auto"
        place = {"instance": 0, "instances": sharing * config.tensor_parallel if spread else sharing}
    if config.runner_config.get("num_threads") is None:
        # torch's threads wait for the slowest: more threads than cores are many times slower than one thread
        place["num_threads"] = max(max(len(os.sched_getaffinity(0)) - 1, 1) // instances, 1)
    return place


class LocalFleet:
    """See the module.

    Args:
        folder: for the sockets, and nothing else; made if missing; None: a private temporary one.
        on_end: called with a child that ended by itself, or not as it was asked to.

    Attributes:
        children: the instances, in the order of the plans.
    """

    def __init__(
        self, plans: Sequence[Plan], folder: Path | None = None, on_end: Callable[[Child], None] | None = None
    ) -> None:
        self.children: list[Child] = []
        self._plans = plans
        self._wanted = folder
        self._folder: Folder | None = None
        self._on_end = on_end or (lambda _child: None)

    @property
    def addresses(self) -> list[str]:
        return [child.address for child in self.children]

    @property
    def notes(self) -> list[str]:
        """What the runners of all instances say for people, each note once."""
        return list(dict.fromkeys(note for child in self.children for note in child.notes))

    async def __aenter__(self) -> LocalFleet:
        self.open()
        try:
            await self.ready()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def open(self) -> None:
        """Start all children at once. Raises ConfigError; call `aclose` afterwards, whether it raised or not."""
        self._folder = folder = Folder(self._wanted)
        addresses = [plan.links.listen or f"ipc://{folder.path / plan.name}" for plan in self._plans]
        # a tcp address is an instance's to check: an interface's name stands for one
        folder.check([address for address in addresses if is_ipc(address)])
        for plan, address in zip(self._plans, addresses, strict=True):
            try:
                self.children.append(Child(plan, address, self._on_end))
            except OSError as error:
                raise ConfigError("instances", f"{plan.name} cannot be started: {error}") from None

    def start_again(self, child: Child) -> None:
        """Start another process in the place of a child that has ended. Raises ConfigError where that fails; then the
        ended child keeps its place."""
        place = self.children.index(child)
        try:
            self.children[place] = Child(self._plans[place], child.listens, self._on_end)
        except OSError as error:
            raise ConfigError("instances", f"{child.name} cannot be started: {error}") from None

    async def ready(self) -> None:
        """Wait until all take requests. Raises ChildEnded for the first child that ends before that, whether it took
        requests or not; DeadlineExceeded."""
        if not self.children:
            return
        limit_s = max(plan.config.start_deadline_s for plan in self._plans) + _START_S
        try:
            async with Within(limit_s):
                while waiting := [child.ready for child in self.children if not child.ready.done()]:
                    waited: list[asyncio.Future[Any]] = [*waiting, *[child.exited for child in self.children]]
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                    self._check_alive()
        except TimeoutError:
            names = ", ".join(child.name for child in self.children if child.state == "loading")
            raise DeadlineExceeded(f"starting {names}", limit_s) from None
        self._check_alive()

    def _check_alive(self) -> None:
        """Raises ChildEnded for the first child that has ended."""
        for child in self.children:
            if child.exited.done():
                raise ChildEnded(child.name, child.exited.result(), tuple(child.lines))  # a future that is done

    async def while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which keeps its own deadlines, and return its result. Raises ChildEnded when an instance ends
        first; the work is cancelled then, and when this call is."""
        task = asyncio.ensure_future(work)
        waited: list[asyncio.Future[Any]] = [task, *[child.exited for child in self.children]]
        try:
            # bounded by the work's own deadlines
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            self._check_alive()
            return task.result()  # of a task that is done
        finally:
            task.cancel()
            await asyncio.wait([task])

    def alive(self, *roles: Role) -> list[Child]:
        """Children of these roles, or of all, that have not ended."""
        return [child for child in self.children if child.state != "ended" and (not roles or child.role in roles)]

    async def aclose(self) -> None:
        """End all children, remove their sockets; idempotent. Cancelling kills them at once."""
        try:
            await asyncio.gather(*[child.aclose() for child in self.children])
        finally:
            for child in self.children:
                child.kill()
            folder, self._folder = self._folder, None
            if folder is not None:
                for child in self.children:
                    child.remove_socket()
                folder.close()
