"""For tests of the engine, of plugins, and of systems that embed the engine.

Virtual time (`run_sim`), disorder and faults from a seed (`EdgeRunner`), leak checks (`no_leaks`,
`check_idle`), the conformance suites for runners, stores and completion ports (`RunnerTests`, `StoreTests`,
`PortTests`), whole simulations (`simulate`). The pytest plugin `fdasync.testing.pytest_plugin` hands these out as
fixtures. Names are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync.testing.bench import Bench, on_bench
    from fdasync.testing.edges import EdgeRunner, Fault
    from fdasync.testing.engines import (
        LetterTokenizer,
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
    "bench": ("Bench", "on_bench"),
    "edges": ("EdgeRunner", "Fault"),
    "engines": (
        "LetterTokenizer",
        "check_sample",
        "expected",
        "held_engine",
        "oracle_of",
        "synthetic_config",
        "synthetic_engine",
        "until",
    ),
    "leaks": ("LeakFound", "Resources", "check_idle", "no_leaks"),
    "loop": ("Deadlock", "Livelock", "SimLoop", "run_sim"),
    "passes": ("PassModel",),
    "pd_simulation": ("PdReport", "simulate_pd"),
    "pd_workload": ("PdWorkload",),
    "ports": ("PortTests",),
    "runners": ("RunnerTests",),
    "simulation": ("SimulationFailed", "SimulationReport", "simulate"),
    "store_bench": ("StoreBench",),
    "stores": ("StoreTests",),
    "transports": ("TransportTests",),
    "workload": ("Workload",),
}

__all__ = [
    "Bench",
    "Deadlock",
    "EdgeRunner",
    "Fault",
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
    "StoreBench",
    "StoreTests",
    "TransportTests",
    "Workload",
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
            return getattr(importlib.import_module(f"fdasync.testing.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
