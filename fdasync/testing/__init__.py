"""For tests of the engine, of plugins, and of systems that embed the engine.

Virtual time (`run_sim`); faults from a seed, of an engine's steps (`FaultRunner`, `StepFault`) and of a store
(`FaultyStore`, `StoreFaults`); leak checks (`no_leaks`, `check_idle`); the conformance suites for runners, stores,
policies, drafters and completion ports (`RunnerTests`, `RunTests`, `DraftTests`, `StoreTests`, `PolicyTests`,
`DrafterTests`, `PortTests`). The pytest plugin `fdasync.testing.pytest_plugin` hands
these out as fixtures; `docs/testing.md` is the way in. Names are imported when first used. Nothing in the package
imports this room.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdasync.testing.drafters import DrafterTests
    from fdasync.testing.harness.engines import (
        LetterTokenizer,
        check_deltas,
        check_prompt_logprobs,
        check_sample,
        expected,
        held_engine,
        oracle_of,
        synthetic_config,
        synthetic_engine,
        until,
    )
    from fdasync.testing.harness.fault_runner import FaultRunner, StepFault
    from fdasync.testing.harness.leaks import LeakFound, Resources, check_idle, no_leaks
    from fdasync.testing.harness.pass_model import PassModel
    from fdasync.testing.policies import PolicyTests
    from fdasync.testing.ports import PortTests
    from fdasync.testing.runners.bench import Bench, on_bench
    from fdasync.testing.runners.drafts import DraftTests
    from fdasync.testing.runners.runs import RunTests
    from fdasync.testing.runners.suite import RunnerTests
    from fdasync.testing.sim.late import LateLoop
    from fdasync.testing.sim.loop import Deadlock, Livelock, SimLoop, run_sim
    from fdasync.testing.sim.outside import NotSimulated
    from fdasync.testing.stores.faults import FaultyStore, StoreFaults
    from fdasync.testing.stores.harness import StoreBench
    from fdasync.testing.stores.suite import StoreTests

_HOMES = {
    "fdasync.testing.drafters": ("DrafterTests",),
    "fdasync.testing.runners.bench": ("Bench", "on_bench"),
    "fdasync.testing.harness.fault_runner": ("FaultRunner", "StepFault"),
    "fdasync.testing.harness.engines": (
        "LetterTokenizer",
        "check_deltas",
        "check_prompt_logprobs",
        "check_sample",
        "expected",
        "held_engine",
        "oracle_of",
        "synthetic_config",
        "synthetic_engine",
        "until",
    ),
    "fdasync.testing.harness.leaks": ("LeakFound", "Resources", "check_idle", "no_leaks"),
    "fdasync.testing.sim.late": ("LateLoop",),
    "fdasync.testing.sim.loop": ("Deadlock", "Livelock", "SimLoop", "run_sim"),
    "fdasync.testing.sim.outside": ("NotSimulated",),
    "fdasync.testing.harness.pass_model": ("PassModel",),
    "fdasync.testing.policies": ("PolicyTests",),
    "fdasync.testing.ports": ("PortTests",),
    "fdasync.testing.runners.drafts": ("DraftTests",),
    "fdasync.testing.runners.runs": ("RunTests",),
    "fdasync.testing.runners.suite": ("RunnerTests",),
    "fdasync.testing.stores.faults": ("FaultyStore", "StoreFaults"),
    "fdasync.testing.stores.harness": ("StoreBench",),
    "fdasync.testing.stores.suite": ("StoreTests",),
}

__all__ = [
    "Bench",
    "Deadlock",
    "DraftTests",
    "DrafterTests",
    "FaultRunner",
    "FaultyStore",
    "LateLoop",
    "LeakFound",
    "LetterTokenizer",
    "Livelock",
    "NotSimulated",
    "PassModel",
    "PolicyTests",
    "PortTests",
    "Resources",
    "RunTests",
    "RunnerTests",
    "SimLoop",
    "StepFault",
    "StoreBench",
    "StoreFaults",
    "StoreTests",
    "check_deltas",
    "check_idle",
    "check_prompt_logprobs",
    "check_sample",
    "expected",
    "held_engine",
    "no_leaks",
    "on_bench",
    "oracle_of",
    "run_sim",
    "synthetic_config",
    "synthetic_engine",
    "until",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
