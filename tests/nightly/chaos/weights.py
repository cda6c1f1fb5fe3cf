"""New weights from folders under load, and instances that the router has dropped since.

Used by `faults.py`, and by what mends a fleet: `trainers.py`, `sleeps.py`.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fdasync.errors import BadInput, FdasyncError, PeerRefused, PeerUnreachable, RemoteError, TransientError
from tests.nightly.chaos.notes import Stage
from tests.nightly.chaos.versions import FIRST_NUMBER

if TYPE_CHECKING:
    from tests.nightly.chaos.node import Node

_MEND_S = 40.0
# the ends that an update or a sleep makes take a while to come
GRACE_S = 3.0
_BACK_S = 180.0


@dataclass(eq=False)
class WeightFaults(Stage):
    """See the module.

    Attributes:
        turn: held by what changes the whole fleet: one update, trainer or sleep at a time.
        calm: no new faults, please: a group meets.
        number: of the weights that the fleet has, or had last; others may be at some instances.
    """

    def __post_init__(self) -> None:
        self.turn = asyncio.Lock()
        self.calm = False
        self.number = self._last = FIRST_NUMBER
        self._label = 0
        self._seen = 0
        self._keeper: asyncio.Task[None] | None = None

    # -- from folders -----------------------------------------------------------------------------------

    def new_label(self) -> str:
        self._label += 1
        return str(self._label)

    def new_number(self) -> int:
        """Of weights that nobody has."""
        self._last += 1
        return self._last

    async def from_folder(self, number: int, mode: Literal["abort", "keep"] = "keep") -> None:
        """One update. Raises what the router raises."""
        label, folder = self.new_label(), self.fleet.weights(number)
        self.versions.begins(label, number)
        with self.versions.aborts.open(GRACE_S) if mode == "abort" else nullcontext():
            await self.router.update_weights(label, folder, mode)
        self.number = number
        self.versions.agreed(label)

    async def update(self) -> None:
        """The fault: to other weights, or the same. An instance that fails is dropped, and comes back."""
        number = self.number if self.rng.random() < 0.3 else self.new_number()
        try:
            await self.from_folder(number, self.rng.choice(("keep", "keep", "abort")))
        except (BadInput, TransientError, RemoteError) as error:
            # another update is under way, or all instances failed
            self.notes.played[f"update weights: {type(error).__name__}"] += 1

    async def mend(self, kind: str) -> bool:
        """Update from a folder until it succeeds; False, and a complaint, if it does not in time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _MEND_S
        problem = ""
        while loop.time() < until:
            try:
                await self.from_folder(self.new_number())
            except FdasyncError as error:
                problem = f"{type(error).__name__}: {error}"
                await asyncio.sleep(0.3)
            else:
                return True
        self.notes.wrong.append(f"{kind}: no update mended the fleet within {_MEND_S:g} s: {problem}")
        return False

    # -- instances that were dropped ----------------------------------------------------------------------

    def start(self) -> None:
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def aclose(self) -> None:
        assert self._keeper is not None
        self._keeper.cancel()
        await asyncio.wait([self._keeper])

    async def _keep(self) -> None:
        """Add instances again that the router has dropped, as a person would."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                dropped = self.router.commands.dropped
                for one in dropped[self._seen :]:
                    self.notes.played["dropped by the router"] += 1
                    for node in self.fleet.nodes.values():
                        if node.address == one.address:
                            tasks.create_task(self._bring_back(node))
                self._seen = len(dropped)
                await asyncio.sleep(0.1)

    async def added(self, node: Node) -> bool:
        """Add an instance to the router; False, a moment later: it is not reached, or cannot have the fleet's weights
        as long as their folder is away."""
        try:
            await self.router.add(node.address)
        except (PeerUnreachable, PeerRefused):
            await asyncio.sleep(0.3)
            return False
        return True

    async def _bring_back(self, node: Node) -> None:
        fleet = self.fleet
        try:
            async with asyncio.timeout(_BACK_S):
                while fleet.nodes.get(node.name) is node and not node.leaves:
                    await node.ready.wait()
                    # one that fell asleep with the others is woken, too
                    if await self.added(node):
                        return
        except TimeoutError:
            self.notes.wrong.append(f"{node.name} was dropped, and did not come back in {_BACK_S:g} s")
