"""One instance of a simulated fleet: a process of its own with wire, transport, runner, and a model of its passes.

The model follows the runner's steps and the transport's copies, and knows nothing of schedulers, so that rows of
results can be compared with it. Knows no requests. Called by `simulation.py`.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec
from fdasync_fleet.instance.instance import Instance
from fdasync_fleet.testing.sim.process import ProcessTransport, ProcessWire

from fdasync.cache.host_arena import host_nbytes
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import FdasyncError, InvariantBroken, WorkerDied
from fdasync.events.actions import ReceiveBlocks
from fdasync.ipc.shared_memory import HOST_REGION, PAGE_NBYTES
from fdasync.runner.group.group import GroupRunner
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.scheduler.disagg.decode import DecodeSide
from fdasync.scheduler.disagg.prefill import PrefillSide
from fdasync.testing.harness.engines import LetterTokenizer
from fdasync.testing.harness.fault_runner import FaultRunner
from fdasync.testing.harness.leaks import check_idle
from fdasync.testing.harness.pass_model import PassModel
from fdasync.testing.harness.recording_store import RecordingStore
from fdasync.testing.sim.process import SimProcess
from tests.support.attached import attached, held_by_exports, held_for_others
from tests.support.sim_fleet.workload import STAMPS

if TYPE_CHECKING:
    from fdasync_fleet.link.session import LinkConfig
    from fdasync_fleet.testing.sim.network import SimNetwork
    from fdasync_fleet.testing.sim.transport import SimFabric
    from fdasync_fleet.transfer.base import CopySpec

    from fdasync.engine.request_state import RequestState
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.events.actions import Action, RunStep, SeqStart
    from fdasync.testing.harness.pass_model import Owner
    from tests.support.sim_fleet.workload import InstancePlan


class _Passes(PassModel):
    """Names sequences by the engine's own numbers: a request that is tried again has the same seed again.

    A prefill instance hands over what the latest pass over a position wrote: it may start a hand-off anew.

    Attributes:
        hand_offs: the keys of sequences that another instance decodes.
    """

    def __init__(self, block_tokens: int, weights_id: int, stamp_base: int) -> None:
        super().__init__(block_tokens, weights_id, stamp_base, runs=True)
        self.hand_offs: set[int] = set()

    def owner_of(self, start: SeqStart) -> Owner:
        return (start.key, start.sampler.index)

    def launched(self, step: RunStep) -> None:
        for start in step.starts:
            if start.key in self.hand_offs:
                self.seen.pop(self.owner_of(start), None)
                self.stamps.pop(self.owner_of(start), None)
        super().launched(step)


class _Instance(Instance):
    """Records how many tokens count of each block that is on its way."""

    machine: Machine

    def perform(self, action: Action) -> None:
        if isinstance(action, ReceiveBlocks) and action.host:
            self.machine.expected.update(zip(action.host, action.rows, strict=True))
        super().perform(action)


class _Transport(ProcessTransport):
    """A transport that knows its machine."""

    machine: Machine


class Machine:
    """See the module.

    Args:
        weights_id, version: of the weights that it starts with.

    Attributes:
        expected: tokens that count of the copy to each host block.
        ranks: of its runner, in order; one of them alone is no group.
        keys: numbers of the samples of each request that it decodes, by its name among instances; hand_offs: of those
            that it prefills for others.
        problem: the error of its own check after some turn.
        dead: it was killed.
        failing: its runner died, or one rank of it died or went silent.
        leaving: it drains.
        gone: it left.
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
        self.hand_offs: dict[str, list[int]] = {}
        self.problem: Exception | None = None
        self.process = SimProcess(plan.name)
        self.expected: dict[int, int] = {}
        config = msgspec.structs.replace(plan.config, weight_version=version)
        runner = msgspec.structs.replace(plan.runner, weights_id=weights_id)
        self.passes = _Passes(runner.block_tokens, weights_id, runner.stamp_base)
        limits = config.runner_limits()
        # each rank answers at times of its own, which are not the other ranks'
        self.ranks = [
            FaultRunner(
                SyntheticRunner(
                    msgspec.structs.replace(runner, seed=runner.seed + rank * STAMPS),
                    msgspec.structs.replace(limits, rank=rank),
                ),
                Random(runner.stamp_base + rank),
                max_delay_s=plan.rank_delay_s,
            )
            for rank in range(limits.tensor_parallel)
        ]
        inner = self.ranks[0].inner
        assert isinstance(inner, SyntheticRunner)
        self.oracle = inner.oracle
        self.runner = FaultRunner(
            GroupRunner(self.ranks) if len(self.ranks) > 1 else inner,
            Random(runner.stamp_base),
            max_delay_s=plan.max_delay_s,
            on_launch=self.passes.launched,
            on_done=lambda output: self.passes.done(output.step_id, output.counts),
            on_copied=self.passes.copied,
            on_weights=lambda: self.passes.new_weights(inner.weights_id),
        )
        words = 12 if runner.pass_stamp else 8
        block_nbytes = words * runner.block_tokens
        self._stride_nbytes = host_nbytes(1, block_nbytes) - host_nbytes(0, block_nbytes)
        store = RecordingStore(MemoryStore(MemoryConfig(max_nbytes=1 << 18)), self.passes)
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
            runner=self.runner,
            tokenizer=LetterTokenizer(),
            store=store if config.store else None,
        )
        self.instance.machine = self
        self.engine = self.instance.engine
        self._network, self._fabric = network, fabric

    def __repr__(self) -> str:
        return f"<Machine {self.name}>"

    def _copied(self, sender: ProcessTransport, copy_spec: CopySpec) -> None:
        assert isinstance(sender, _Transport)
        if copy_spec.parts[0].region != HOST_REGION:
            # a state, whose every bit shows in what is computed from it
            return
        theirs, ours = (
            (parts[0].offset - PAGE_NBYTES) // self._stride_nbytes for parts in (copy_spec.ref_parts, copy_spec.parts)
        )
        self.passes.received(sender.machine.passes, theirs, ours, self.expected[ours])

    # -- incidents ------------------------------------------------------------------------------------

    @property
    def is_well(self) -> bool:
        """The machine is present, and its engine runs."""
        return not self.dead and not self.gone and self.engine.state == "running"

    async def start(self) -> None:
        await self.process.start(self.instance.start(), "start")
        processor = self.engine._runtime.processor
        add = processor.add

        def add_and_note(request: RequestState, keys: list[int], tokenizer: Tokenizer | None) -> None:
            hand_off = request.asked is not None and request.asked[0].hand_off is not None
            (self.hand_offs if hand_off else self.keys)[request.request_id] = keys
            if hand_off:
                self.passes.hand_offs.update(keys)
            add(request, keys, tokenizer)

        processor.add = add_and_note  # type: ignore[method-assign]
        self.process.start(self._audit(), "audit")

    def kill(self) -> None:
        """End it as SIGKILL does: it runs no further line, its memory cannot be read, its address is free."""
        self.dead = True
        self.process.stop()
        self._network.kill(self.wire)
        self._fabric.kill(self.transport)

    def freeze(self) -> None:
        """Stop it as SIGSTOP does; its memory can still be read."""
        self.process.stop()

    def thaw(self) -> None:
        if not self.dead:
            self.process.go_on()

    def break_down(self) -> None:
        """Kill its runner, and with it its engine; the instance around the engine goes on."""
        if self.engine.state == "running":
            self.failing = True
            self.process.call(self.runner.die)

    def break_rank(self, rank: int, *, silent: bool) -> None:
        """Kill one rank of its group, or let that rank answer no step any more; the others go on until the group's
        failure, or the step's deadline, ends the engine."""
        if self.engine.state == "running":
            self.failing = True
            one = self.ranks[rank % len(self.ranks)]
            self.process.call(one.hold if silent else one.die)

    async def aclose(self) -> None:
        """Close it; free what a dead one still has."""
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
        """Run the engine's own check after every turn."""
        async with self.engine.bus.subscribe(limit=1 << 20) as events:
            async for _ in events:
                if not events.pending and self.engine.state in ("running", "draining") and self.problem is None:
                    try:
                        self.engine.check()
                    except InvariantBroken as error:
                        self.problem = error

    def held(self) -> list[str]:
        """The things that it holds and an idle instance must not hold, in words."""
        engine, instance = self.engine, self.instance
        driver = engine._runtime.driver
        context = instance._context
        assert driver is not None
        assert context is not None
        scheduler = driver.scheduler
        prefill_side, decode_side, states = (
            attached(scheduler, PrefillSide),
            attached(scheduler, DecodeSide),
            scheduler.index.pool.snapshots,
        )
        prefill_service, decode_service = instance._prefill_service, instance._decode_service
        counts = {
            "tasks": len(context.tasks()),
            "responses": instance._responses.num_live,
            "lease requests": len(prefill_service._by_group) + len(prefill_service._by_name),
            "requests that moved": len(prefill_service._moved),
            "leases granted": len(decode_service._leases) + len(decode_side.leases),
            "hand-offs": len(prefill_side.hand_offs) + len(prefill_side._asks),
            "leased tokens, blocks in the ring, offers and hand-overs": held_for_others(prefill_side),
            "blocks on their way here": decode_side._receiver.num_receiving,
            "device blocks that others read, or fill": scheduler.index.lent,
            "blocks that exports hold": held_by_exports(scheduler) + len(scheduler.swap_planner._exports),
            "uses of states": sum(one.holds + one.pins for one in states.live()) if states else 0,
            "holds of host blocks": sum(len(block.host_holds) for block in scheduler.index.pool.live()),
            "blocks on their way to the store": int(scheduler.tiers.is_writing),
            "parts on offer": len(self.transport.offers),
            "receives": len(self.transport.transfers),
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
