"""The fleet of the chaos harness: which instances there are, and what each must hold when nothing is under way.

A round of chaos ends in quiet. Then every live instance is asked what it holds, and its answer is compared with that of
the first quiet: no block, slot, lease, task, file or process may be left. Knows no requests. Used by `chaos.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import msgspec
from fdasync_fleet.link.keys import new_keys, save_keys
from fdasync_fleet.link.session import LinkConfig

from fdasync.engine.config import EngineConfig
from fdasync.runner.synthetic import WEIGHTS_FILE
from fdasync.scheduler import LeaseRules
from tests.nightly.chaos.node import PLUGIN, START_S, Node
from tests.nightly.chaos.runner import NAME as RUNNER
from tests.nightly.chaos.runner import ChaosConfig, write_plugin
from tests.nightly.chaos.versions import Versions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from random import Random

    from tests.nightly.chaos.child import Probe
    from tests.nightly.chaos.hosts import Hosts

VOCAB = 100
RANKS = 2
TTL_S, LOST_S, STEP_LIMIT_S = 1.5, 3.0, 4.0
# a worker waits 0.9 of it for a trainer's tensors, and longer than the trainer's group does for the next ones
UPDATE_LIMIT_S = 6.0
RULES = LeaseRules(silent_s=1.0, queue_s=2.0, find_s=10.0, total_s=30.0, ttl_s=TTL_S, receive_s=3.0, age_s=1.0)
LINKS = LinkConfig(beat_s=0.25, lost_s=LOST_S)
QUIET_S = 25.0
END_S = 40.0
# processes of an instance that compute; the others compute in their own
_WORKERS = {"p0": RANKS, "d0": 1, "d2": RANKS}
# connections come and go with the processes at their other ends
_LOOSE = {"socket": 2, "anon_inode": 1, "pipe": 0}


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of every instance of a fleet: from roomy to so tight that requests preempt each other all the time.

    Attributes:
        blocks, host_blocks: on the device, and in host memory.
        staging: `LeaseRules.staging_blocks`.
        depth: steps in flight.
        running: sequences at most.
    """

    blocks: int = 160
    host_blocks: int = 160
    staging: int = 0
    depth: int = 2
    running: int = 12

    @classmethod
    def drawn(cls, rng: Random) -> Sizes:
        return cls(
            rng.choice((72, 100, 160)), rng.choice((24, 64, 160)), rng.choice((0, 4)), rng.choice((1, 2, 2)),
            rng.choice((6, 12)),
        )  # fmt: skip


def config_of(role: str, orders: Path, folder: Path | None, sizes: Sizes, *, workers: int) -> EngineConfig:
    """`folder`: of its store, if any. `workers`: processes that compute a step; 0: the instance's own does."""
    own = {
        "vocab_size": VOCAB, "block_tokens": 4, "num_blocks": sizes.blocks, "max_context_tokens": 256,
        "values_spec": True, "pass_stamp": True, "step_s": 0.008, "token_s": 5e-5, "copy_s": 0.002, "jitter": 0.5,
        "kv_shares": RANKS, "orders": str(orders),
    }  # fmt: skip
    store: dict[str, Any] = {}
    if folder is not None:
        where = {"path": str(folder), "max_nbytes": 4 << 20, "segment_nbytes": 1 << 20}
        store = {"store": "file", "store_config": where, "store_deadline_s": 1.0, "store_kill_s": 4.0}
    return EngineConfig(
        runner=RUNNER, runner_config=own, process="worker" if workers else "inline", role=role,  # type: ignore[arg-type]
        tokenizer="none", host_blocks=sizes.host_blocks, max_running=sizes.running, max_step_tokens=64,
        pipeline_depth=sizes.depth, leases=msgspec.structs.replace(RULES, staging_blocks=sizes.staging),
        step_deadline_s=STEP_LIMIT_S, close_deadline_s=5.0, start_deadline_s=START_S, update_deadline_s=UPDATE_LIMIT_S,
        tensor_parallel=max(workers, 1), **store,
    )  # fmt: skip


def versions_of(node: Node) -> Versions:
    """Of a fleet of instances like this one."""
    return Versions(msgspec.convert(node.config.runner_config, ChaosConfig))


class Fleet:
    """See the module.

    Args:
        prefill, decode: number of instances. The first decode instance has a worker process, the second of each role a
            file store; the first prefill and the third decode instance are groups of ranks.
        hosts: for instances; None: all are on this one.

    Attributes:
        nodes: present instances by name.
        keys: file of the fleet's keys, with hosts.
        folder, orders: of everything; of what the harness asks runners for (`runner.py`).
        wrong: broken rules, in words.
    """

    def __init__(
        self,
        folder: Path,
        transport: str,
        prefill: int,
        decode: int,
        sizes: Sizes | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.wrong: list[str] = []
        self.folder = folder
        self.orders = folder / "orders"
        self.orders.mkdir(exist_ok=True)
        write_plugin(folder / PLUGIN)
        self._sizes = sizes or Sizes()
        self._transport = transport
        self.hosts = hosts
        self.keys: Path | None = None
        if hosts is not None:
            self.keys = folder / "keys.json"
            save_keys(self.keys, new_keys(), replace=False)
        self._baseline: dict[str, Probe] = {}
        self._counts = {"prefill": prefill, "decode": decode}

    def make(self, name: str, role: str, *, workers: int, store: bool) -> Node:
        config = config_of(
            role, self.orders, self.folder / f"store-{name}" if store else None, self._sizes, workers=workers
        )  # fmt: skip
        self._baseline.pop(name, None)
        place = None if self.hosts is None else self.hosts.free.pop()
        node = self.nodes[name] = Node(
            name, config, LINKS, self._transport, self.folder, drain_s=20.0, place=place, keys=self.keys
        )
        return node

    def weights(self, number: int) -> str:
        """A folder with these weights."""
        folder = self.folder / "weights" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / WEIGHTS_FILE).write_text(f'{{"weights_id": {number}}}')
        return str(folder)

    @contextlib.contextmanager
    def without_weights(self) -> Iterator[None]:
        """All such folders are elsewhere meanwhile."""
        folder = self.folder / "weights"
        elsewhere = folder.rename(folder.with_suffix(".elsewhere"))
        try:
            yield
        finally:
            elsewhere.rename(folder)

    async def open(self) -> None:
        for role, count in self._counts.items():
            for number in range(count):
                name = f"{role[0]}{number}"
                node = self.make(name, role, workers=_WORKERS.get(name, 0), store=number == 1)
                await node.open()
        await self.until_up(START_S)

    @property
    def addresses(self) -> list[str]:
        return [node.address for node in self.nodes.values()]

    def role(self, role: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.role == role]

    def healthy(self, role: str) -> list[Node]:
        return [node for node in self.role(role) if node.is_up]

    async def until_up(self, limit_s: float) -> None:
        """Raises TimeoutError."""
        try:
            async with asyncio.timeout(limit_s):
                for node in self.nodes.values():
                    await node.ready.wait()
        except TimeoutError:
            down = [f"{node.name}: {node.tail()}" for node in self.nodes.values() if not node.ready.is_set()]
            raise TimeoutError(f"not up within {limit_s:g} s: {down}") from None

    async def heal(self) -> None:
        """End every fault."""
        for node in self.nodes.values():
            node.kill_now(signal.SIGCONT)
            for pid in node.pids():
                os.kill(pid, signal.SIGCONT)
            for proxy in node.proxies:
                proxy.refuses = False
                proxy.stall(False, False)
            if node.place is not None:
                node.place.wire.cut()
        if self.hosts is not None:
            self.hosts.own.wire.cut()

    # -- when nothing is under way --------------------------------------------------------------------

    async def check_quiet(self) -> None:
        """Note a broken rule for each thing that an instance has not given back within some seconds."""
        until = asyncio.get_running_loop().time() + QUIET_S
        problems = ["no instance was asked"]
        while problems and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.3)
            problems = []
            for node in self.nodes.values():
                problems += await self._held_by(node)
        self.wrong += problems
        for node in self.nodes.values():
            self.wrong += node.surprises
            node.surprises = []

    async def _held_by(self, node: Node) -> list[str]:
        probe = await node.probe()
        if probe is None:
            return [f"{node.name} does not answer: {node.tail()}"]
        problems = [f"{node.name}: {count} {name}" for name, count in probe.held.items() if count]
        if probe.problem:
            problems.append(f"{node.name}: {probe.problem}")
        orphans = {pid for pid in node.orphans if _is_alive(pid)} - set(probe.children)
        problems += [f"{node.name}: process {pid} outlived it" for pid in orphans]
        problems += self._files_of(node, probe)
        return problems

    def _files_of(self, node: Node, probe: Probe) -> list[str]:
        """Files, processes and tasks that were added since the first quiet."""
        first = self._baseline.get(node.name)
        if first is None:
            return []
        grown = [
            f"{node.name}: {count} open of {kind}, {first.fds.get(kind, 0)} at first"
            for kind, count in probe.fds.items()
            if count > first.fds.get(kind, 0) + _LOOSE.get(kind, 0)
        ]
        if grown:
            grown.append(f"{node.name}: sockets {probe.sockets}, at first {first.sockets}")
        if len(probe.children) > len(first.children):
            grown.append(f"{node.name}: {len(probe.children)} child processes, {len(first.children)} at first")
        if len(probe.tasks) > len(first.tasks):
            grown.append(f"{node.name}: tasks {probe.tasks}, at first {first.tasks}")
        return grown

    async def remember(self) -> None:
        """Remember what idle instances hold that have met all others, with all of their processes."""
        until = asyncio.get_running_loop().time() + QUIET_S
        for name, node in self.nodes.items():
            probe = await node.probe()
            # a slow machine's store may be starting anew
            while probe is not None and len(probe.children) < node.num_children:
                if asyncio.get_running_loop().time() > until:
                    self.wrong.append(f"{name}: {len(probe.children)} child processes, not {node.num_children}")
                    break
                await asyncio.sleep(0.3)
                probe = await node.probe()
            if probe is not None:
                self._baseline.setdefault(name, probe)

    # -- the end --------------------------------------------------------------------------------------

    async def drop(self, node: Node) -> None:
        """Let a drained instance leave."""
        del self.nodes[node.name]
        self._baseline.pop(node.name, None)
        await node.aclose(END_S)
        if self.hosts is not None and node.place is not None:
            self.hosts.free.append(node.place)
        self.wrong += node.surprises

    async def aclose(self) -> None:
        """End prefill instances first, as a person would; all must drain."""
        await self.heal()
        for role in ("prefill", "decode"):
            nodes = self.role(role)
            orphans = [pid for node in nodes for pid in (*node.orphans, *node.pids())]
            await asyncio.gather(*[node.aclose(END_S) for node in nodes])
            for node in nodes:
                self.wrong += node.surprises
            self.wrong += [f"process {pid} outlived its {role} instance" for pid in orphans if _is_alive(pid)]

    def destroy(self) -> None:
        """Kill all processes."""
        for node in self.nodes.values():
            node.destroy()


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
