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
    from fdasync.cache.wrappers.faults import FaultyStore, StoreFaults
    from fdasync.testing.bench import Bench, on_bench
    from fdasync.testing.edges import EdgeRunner, StepFault
    from fdasync.testing.engines import (
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
    from fdasync.testing.leaks import LeakFound, Resources, check_idle, no_leaks
    from fdasync.testing.loop import Deadlock, Livelock, SimLoop, run_sim
    from fdasync.testing.passes import PassModel
    from fdasync.testing.pd_simulation import PdReport, simulate_pd
    from fdasync.testing.pd_workload import PdWorkload
    from fdasync.testing.ports import PortTests
    from fdasync.testing.runners import RunnerTests
    from fdasync.testing.simulation import SimulationFailed, SimulationReport, simulate
    from fdasync.testing.store_bench import StoreBench
    from fdasync.testing.stores import StoreTests
    from fdasync.testing.transports import TransportTests
    from fdasync.testing.workload import Workload

_HOMES = {
    "fdasync.cache.wrappers.faults": ("FaultyStore", "StoreFaults"),
    "fdasync.testing.bench": ("Bench", "on_bench"),
    "fdasync.testing.edges": ("EdgeRunner", "StepFault"),
    "fdasync.testing.engines": (
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
    "fdasync.testing.leaks": ("LeakFound", "Resources", "check_idle", "no_leaks"),
    "fdasync.testing.loop": ("Deadlock", "Livelock", "SimLoop", "run_sim"),
    "fdasync.testing.passes": ("PassModel",),
    "fdasync.testing.pd_simulation": ("PdReport", "simulate_pd"),
    "fdasync.testing.pd_workload": ("PdWorkload",),
    "fdasync.testing.ports": ("PortTests",),
    "fdasync.testing.runners": ("RunnerTests",),
    "fdasync.testing.simulation": ("SimulationFailed", "SimulationReport", "simulate"),
    "fdasync.testing.store_bench": ("StoreBench",),
    "fdasync.testing.stores": ("StoreTests",),
    "fdasync.testing.transports": ("TransportTests",),
    "fdasync.testing.workload": ("Workload",),
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
