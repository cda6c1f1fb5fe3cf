"""Plays a workload on a fleet of instances behind a router, in virtual time, and compares answers with the oracle's.

Each request must end exactly once, by its deadline and the router's grace, with the oracle's tokens, log-probs and
rows, or with an error that allows another try. Rows must be of the passes whose KV is in use, whichever instance made
it. The checks of every instance must pass after every turn; a quiet fleet holds nothing; traces replay. Instances are
killed, stopped and parted in the middle of all that. A broken rule raises `SimulationFailed`.

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
from fdasync.testing.sim.late import LateLoop
from fdasync.testing.sim.loop import run_sim
from tests.support.sim_engine.simulation import SimulationFailed
from tests.support.sim_fleet.callers import Callers
from tests.support.sim_fleet.fleet import Fleet
from tests.support.sim_fleet.incidents import Incidents
from tests.support.sim_fleet.workload import PdWorkload


class PdReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of what a simulation exercised.

    Attributes:
        outcomes: number of samples by finish reason, and of errors by name.
        counts: of leases, blocks, incidents, retries.
        virtual_s: seconds of virtual time.
    """

    outcomes: dict[str, int]
    counts: dict[str, int]
    virtual_s: float


def simulate_pd(seed: int, *, late: bool = False) -> PdReport:
    """Draw the workload of this seed, play it, check it. Raises SimulationFailed.

    Args:
        late: on a loop that comes late (`LateLoop`).
    """
    try:
        work = PdWorkload.draw(seed)
        with no_leaks(), tempfile.TemporaryDirectory() as folder:
            for incident in work.incidents:
                path = Path(folder, str(incident.weights_id))
                path.mkdir(exist_ok=True)
                (path / WEIGHTS_FILE).write_text(json.dumps({"weights_id": incident.weights_id}))
            return run_sim(_played(work, folder), LateLoop(seed) if late else None)
    except Exception as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        again = f"pytest tests/system/test_pd_simulation.py{' -k late' if late else ''} --pd-seed {seed}"
        raise SimulationFailed(seed, f"{type(first).__name__}: {first}", again) from first


async def _played(work: PdWorkload, folder: str) -> PdReport:
    fleet = Fleet(work, folder)
    try:
        return await _play(fleet)
    except BaseException:
        # tasks of a process that stands still cannot be cancelled
        for process in (fleet.process, *[machine.process for machine in fleet.machines]):
            process.go_on()
        raise


async def _play(fleet: Fleet) -> PdReport:
    work = fleet.work
    for plan in work.instances:
        await fleet.machine(plan).start()
    for router in fleet.routers:
        await fleet.process.start(router.start(), "start")
    incidents, callers = Incidents(fleet), Callers(fleet)
    async with asyncio.TaskGroup() as group:
        for incident in work.incidents:
            group.create_task(incidents.play(incident), name=incident.kind)
        for number, request in enumerate(work.requests):
            # its caller lives in the router's process
            group.create_task(fleet.wait(fleet.process.start(callers.call(number, request), f"caller-{number}")))
    await fleet.quiet()
    await fleet.aclose()
    fleet.count()
    return PdReport(
        outcomes=dict(fleet.outcomes),
        counts={name: int(count) for name, count in fleet.counts.items()},
        virtual_s=asyncio.get_running_loop().time(),
    )
