"""Plays a workload on a fleet of instances behind a router, in virtual time, and holds what comes of it to the oracle.

Each request ends exactly once, by its deadline and the router's grace, with the oracle's tokens, log-probs and rows, or
with an error that says that it may be tried again; rows are of the passes whose KV is in use, whichever instance made
it. The books of every instance balance after every turn; when all is quiet nobody holds anything; traces replay.
Instances are killed, stopped and parted in the middle of all that. A broken rule raises `SimulationFailed`.

Called by tests: `simulate_pd(seed)`.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import msgspec

from fdasync.runner.synthetic import WEIGHTS_FILE
from fdasync.testing.harness.leaks import no_leaks
from fdasync.testing.sim.engine import SimulationFailed
from fdasync.testing.sim.fleet.callers import Callers
from fdasync.testing.sim.fleet.fleet import Fleet
from fdasync.testing.sim.fleet.incidents import Trouble
from fdasync.testing.sim.fleet.workload import PdWorkload
from fdasync.testing.sim.loop import run_sim


class PdReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation was made of, to see that it exercised something.

    Attributes:
        outcomes: finish reasons of samples, and errors by name.
        counts: of leases, blocks, incidents, retries.
    """

    outcomes: dict[str, int]
    counts: dict[str, int]
    virtual_s: float


def simulate_pd(seed: int) -> PdReport:
    """Draw the workload of this seed, play it, check it. Raises SimulationFailed."""
    try:
        work = PdWorkload.draw(seed)
        with no_leaks(), tempfile.TemporaryDirectory() as folder:
            for incident in work.incidents:
                path = Path(folder, str(incident.weights_id))
                path.mkdir(exist_ok=True)
                (path / WEIGHTS_FILE).write_text(json.dumps({"weights_id": incident.weights_id}))
            return run_sim(_played(work, folder))
    except Exception as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        again = f"pytest tests/test_pd_simulation.py --pd-seed {seed}"
        raise SimulationFailed(seed, f"{type(first).__name__}: {first}", again) from first


async def _played(work: PdWorkload, folder: str) -> PdReport:
    fleet = Fleet(work, folder)
    try:
        return await _play(fleet)
    except BaseException:
        # who stands still cannot be cancelled
        for process in (fleet.process, *[machine.process for machine in fleet.machines]):
            process.go_on()
        raise


async def _play(fleet: Fleet) -> PdReport:
    work = fleet.work
    for plan in work.instances:
        await fleet.machine(plan).start()
    await fleet.process.start(fleet.router.start(), "start")
    trouble, callers = Trouble(fleet), Callers(fleet)
    async with asyncio.TaskGroup() as group:
        for incident in work.incidents:
            group.create_task(trouble.play(incident), name=incident.kind)
        for number, asked in enumerate(work.requests):
            # its caller lives in the router's process
            group.create_task(fleet.wait(fleet.process.start(callers.call(number, asked), f"caller-{number}")))
    await fleet.quiet()
    await fleet.aclose()
    fleet.count()
    return PdReport(
        outcomes=dict(fleet.outcomes),
        counts={name: int(count) for name, count in fleet.counts.items()},
        virtual_s=asyncio.get_running_loop().time(),
    )
