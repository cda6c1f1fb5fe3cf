"""One instance of a simulated fleet: a process of its own with wire, transport, runner, and a model of its passes.

The model is told what the runner does and what the transport copies, and knows nothing of schedulers, so that rows of
results can be held against it. Knows no requests. Called by `simulation.py`.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec

from fdasync.cache.host_arena import host_nbytes
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import FdasyncError, InvariantBroken, WorkerDied
from fdasync.events.actions import ReceiveBlocks
from fdasync.ipc.shared_memory import HOST_REGION, PAGE_NBYTES
from fdasync.pd.instance.instance import Instance
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.testing.harness.engines import LetterTokenizer
from fdasync.testing.harness.fault_runner import EdgeRunner
from fdasync.testing.harness.leaks import check_idle
from fdasync.testing.harness.pass_model import PassModel
from fdasync.testing.harness.recording_store import WatchedStore
from fdasync.testing.sim.process import ProcessTransport, ProcessWire, SimProcess

if TYPE_CHECKING:
    from fdasync.engine.output import RequestOutput
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.events.actions import Action, SeqStart
    from fdasync.pd.link.session import LinkConfig
    from fdasync.pd.transfer.base import Receipt
    from fdasync.testing.harness.pass_model import Owner
    from fdasync.testing.sim.fleet.workload import InstancePlan
    from fdasync.testing.sim.network import SimNetwork
    from fdasync.testing.sim.transport import SimFabric


class _Passes(PassModel):
    """By the engine's own numbers of sequences: a request that is tried again has the same seed again."""

    def owner_of(self, start: SeqStart) -> Owner:
        return (start.key, start.sampler.index)


class _Instance(Instance):
    """Writes down how many tokens count of each block that is on its way."""

    machine: Machine

    def perform(self, action: Action) -> None:
        if isinstance(action, ReceiveBlocks):
            self.machine.expected.update(zip(action.host, action.rows, strict=True))
        super().perform(action)


class _Transport(ProcessTransport):
    """Knows whose it is."""

    machine: Machine


class Machine:
    """See the module.

    Args:
        weights_id, version: what it starts with.

    Attributes:
        expected: tokens that count of what comes to a host block.
        keys: numbers of the samples of each request that it decodes, by its name among instances; errands: of those
            that it prefills for others.
        problem: what was wrong with its books after some turn.
        dead: it was killed. failing: its runner was told to die. leaving: it is told to drain; gone: it left.
    """

    def __init__(
        self,
        plan: InstancePlan,
        network: SimNetwork,
        fabric: SimFabric,
        links: LinkConfig,
        *,
        weights_id: int,
        version: int,
    ) -> None:
        self.plan = plan
        self.name = plan.name
        self.address = plan.address
        self.dead = self.failing = self.gone = self.leaving = False
        self.keys: dict[str, list[int]] = {}
        self.errands: dict[str, list[int]] = {}
        self.problem: Exception | None = None
        self.process = SimProcess(plan.name)
        self.expected: dict[int, int] = {}
        config = msgspec.structs.replace(plan.config, weight_version=version)
        runner = msgspec.structs.replace(plan.runner, weights_id=weights_id)
        self.passes = _Passes(runner.block_tokens, weights_id, runner.stamp_base)
        inner = SyntheticRunner(runner, config.runner_limits())
        self.oracle = inner.oracle
        self.edge = EdgeRunner(
            inner,
            Random(runner.stamp_base),
            max_delay_s=plan.max_delay_s,
            on_launch=self.passes.launched,
            on_copied=self.passes.copied,
            on_weights=lambda: self.passes.new_weights(inner.weights_id),
        )
        words = 12 if runner.pass_stamp else 8
        block_nbytes = words * runner.block_tokens
        self._stride_nbytes = host_nbytes(1, block_nbytes) - host_nbytes(0, block_nbytes)
        store = WatchedStore(MemoryStore(MemoryConfig(max_nbytes=1 << 18)), self.passes)
        store.stride_nbytes = self._stride_nbytes
        self.wire = ProcessWire(network, self.process)
        self.transport = _Transport(fabric, self.process, self._copied)
        self.transport.machine = self
        self.instance = _Instance(
            config,
            listen=plan.address,
            name=plan.name,
            links=links,
            wire=self.wire,
            transports=[self.transport],
            runner=self.edge,
            tokenizer=LetterTokenizer(),
            store=store if config.store else None,
        )
        self.instance.machine = self
        self.engine = self.instance.engine
        self._network, self._fabric = network, fabric

    def __repr__(self) -> str:
        return f"<Machine {self.name}>"

    def _copied(self, sender: ProcessTransport, receipt: Receipt) -> None:
        assert isinstance(sender, _Transport)
        theirs, ours = (
            (parts[0].offset - PAGE_NBYTES) // self._stride_nbytes for parts in (receipt.ref_parts, receipt.parts)
        )
        assert receipt.parts[0].region == HOST_REGION
        self.passes.received(sender.machine.passes, theirs, ours, self.expected[ours])

    # -- what befalls it ------------------------------------------------------------------------------

    @property
    def is_well(self) -> bool:
        """It is there, and its engine runs."""
        return not self.dead and not self.gone and self.engine.state == "running"

    async def start(self) -> None:
        await self.process.start(self.instance.start(), "start")
        hub = self.engine._runtime.hub
        add = hub.add

        def add_and_note(request: RequestOutput, keys: list[int], tokenizer: Tokenizer | None) -> None:
            errand = request.asked is not None and request.asked[0].errand is not None
            (self.errands if errand else self.keys)[request.request_id] = keys
            add(request, keys, tokenizer)

        hub.add = add_and_note  # type: ignore[method-assign]
        self.process.start(self._audit(), "audit")

    def kill(self) -> None:
        """As SIGKILL: it runs no line more; its memory cannot be read, its address is free."""
        self.dead = True
        self.process.stop()
        self._network.kill(self.wire)
        self._fabric.kill(self.transport)

    def freeze(self) -> None:
        """As SIGSTOP. Its memory can still be read, as over shared memory."""
        self.process.stop()

    def thaw(self) -> None:
        if not self.dead:
            self.process.go_on()

    def break_down(self) -> None:
        """Its runner dies, and with it its engine; what is around the engine goes on."""
        if self.engine.state == "running":
            self.failing = True
            self.process.call(self.edge.die)

    async def aclose(self) -> None:
        """Close it; of one that is dead, free what it has."""
        self.process.go_on()
        try:
            await self.process.start(self._close(), "close")
        except (FdasyncError, WorkerDied):
            if not (self.dead or self.failing):
                raise

    async def _close(self) -> None:
        await self.instance.aclose()

    # -- checks ---------------------------------------------------------------------------------------

    async def _audit(self) -> None:
        """The books must balance after every turn."""
        async with self.engine.bus.subscribe(limit=1 << 20) as events:
            async for _ in events:
                if not events.pending and self.engine.state in ("running", "draining") and self.problem is None:
                    try:
                        self.engine.check()
                    except InvariantBroken as error:
                        self.problem = error

    def held(self) -> list[str]:
        """What it holds, in words, that an instance without requests must not hold."""
        engine, instance = self.engine, self.instance
        driver = engine._runtime.driver
        site = instance._site
        assert driver is not None
        assert site is not None
        scheduler = driver.scheduler
        borrower, lender = scheduler.borrower, scheduler.lender
        asking, lending = instance._asking, instance._lending
        counts = {
            "tasks": len(site.tasks()),
            "answers": instance._answers.num_live,
            "leases asked for": len(asking._by_group) + len(asking._by_name),
            "requests that moved": len(asking._moved),
            "leases given": len(lending._book) + lender.num_leases,
            "errands": borrower.num_errands + borrower.num_asked,
            "leased tokens, blocks in the ring, offers and hand-overs": borrower.num_held,
            "blocks on their way here": lender.num_receiving,
            "blocks that exports hold": scheduler.copier.num_held + len(scheduler.copier._exports),
            "moves of host blocks": sum(block.host_moves for block in scheduler.index.pool.live()),
            "blocks on their way to the store": int(scheduler.tiers.is_writing),
            "parts on offer": len(self.transport.offers),
            "receives": len(self.transport.calls),
            "live samples": engine.stats().live,
            "steps": driver.steps_in_flight,
        }
        return [f"{count} {name}" for name, count in counts.items() if count]

    def check_idle(self) -> None:
        """Raise unless it holds nothing."""
        if self.engine.state != "running":
            return
        if held := self.held():
            raise InvariantBroken(f"{self.name} is idle and holds {', '.join(held)}")
        check_idle(self.engine)
