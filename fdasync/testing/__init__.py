"""For tests of the engine, of plugins, and of systems that embed the engine.

Virtual time (`run_sim`), disorder and faults from a seed, of an engine's steps (`EdgeRunner`, `StepFault`) and of a
store (`FaultyStore`, `StoreFaults`), leak checks (`no_leaks`, `check_idle`), the conformance suites for runners,
stores, transports and completion ports (`RunnerTests`, `StoreTests`, `TransportTests`, `PortTests`), whole simulations
(`simulate`). The pytest plugin `fdasync.testing.pytest_plugin` hands these out as fixtures; `docs/testing.md` is the
way in. Names are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync.cache.store.wrappers.faults import FaultyStore, StoreFaults
    from fdasync.testing.harness.engines import (
        LetterTokenizer,
        check_deltas,
        check_sample,
        expected,
        held_engine,
        oracle_of,
        synthetic_config,
        synthetic_engine,
        until,
    )
    from fdasync.testing.harness.fault_runner import EdgeRunner, StepFault
    from fdasync.testing.harness.leaks import LeakFound, Resources, check_idle, no_leaks
    from fdasync.testing.harness.pass_model import PassModel
    from fdasync.testing.ports import PortTests
    from fdasync.testing.runners.bench import Bench, on_bench
    from fdasync.testing.runners.suite import RunnerTests
    from fdasync.testing.sim.engine import SimulationFailed, SimulationReport, simulate
    from fdasync.testing.sim.fleet.simulation import PdReport, simulate_pd
    from fdasync.testing.sim.fleet.workload import PdWorkload
    from fdasync.testing.sim.loop import Deadlock, Livelock, SimLoop, run_sim
    from fdasync.testing.sim.workload import Workload
    from fdasync.testing.stores.harness import StoreBench
    from fdasync.testing.stores.suite import StoreTests
    from fdasync.testing.transports.suite import TransportTests

_HOMES = {
    "fdasync.cache.store.wrappers.faults": ("FaultyStore", "StoreFaults"),
    "fdasync.testing.runners.bench": ("Bench", "on_bench"),
    "fdasync.testing.harness.fault_runner": ("EdgeRunner", "StepFault"),
    "fdasync.testing.harness.engines": (
        "LetterTokenizer",
        "check_deltas",
        "check_sample",
        "expected",
        "held_engine",
        "oracle_of",
        "synthetic_config",
        "synthetic_engine",
        "until",
    ),
    "fdasync.testing.harness.leaks": ("LeakFound", "Resources", "check_idle", "no_leaks"),
    "fdasync.testing.sim.loop": ("Deadlock", "Livelock", "SimLoop", "run_sim"),
    "fdasync.testing.harness.pass_model": ("PassModel",),
    "fdasync.testing.sim.fleet.simulation": ("PdReport", "simulate_pd"),
    "fdasync.testing.sim.fleet.workload": ("PdWorkload",),
    "fdasync.testing.ports": ("PortTests",),
    "fdasync.testing.runners.suite": ("RunnerTests",),
    "fdasync.testing.sim.engine": ("SimulationFailed", "SimulationReport", "simulate"),
    "fdasync.testing.stores.harness": ("StoreBench",),
    "fdasync.testing.stores.suite": ("StoreTests",),
    "fdasync.testing.transports.suite": ("TransportTests",),
    "fdasync.testing.sim.workload": ("Workload",),
}

__all__ = [
    "Bench",
    "Deadlock",
    "EdgeRunner",
    "FaultyStore",
    "LeakFound",
    "LetterTokenizer",
    "Livelock",
    "PassModel",
    "PdReport",
    "PdWorkload",
    "PortTests",
    "Resources",
    "RunnerTests",
    "SimLoop",
    "SimulationFailed",
    "SimulationReport",
    "StepFault",
    "StoreBench",
    "StoreFaults",
    "StoreTests",
    "TransportTests",
    "Workload",
    "check_deltas",
    "check_idle",
    "check_sample",
    "expected",
    "held_engine",
    "no_leaks",
    "on_bench",
    "oracle_of",
    "run_sim",
    "simulate",
    "simulate_pd",
    "synthetic_config",
    "synthetic_engine",
    "until",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
