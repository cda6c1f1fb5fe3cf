"""The floors of the house: what each room imports, of the package and of its plugins; and no import circle.

Imports for type checkers count as all others do, and imports inside of functions too.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.imports import ALL_MODULES, imports_of

_PURE_CACHE = (
    "fdasync.cache.aux", "fdasync.cache.blocks", "fdasync.cache.identity", "fdasync.cache.prefix",
    "fdasync.cache.snapshots",
)  # fmt: skip
_ARENAS = (
    "fdasync.cache.aux", "fdasync.cache.aux_arena", "fdasync.cache.host_arena", "fdasync.cache.picks",
    "fdasync.cache.snapshots",
)  # fmt: skip
# what runners are written against
_RUNNER = (
    "fdasync.runner.base", "fdasync.runner.chosen", "fdasync.runner.input_batch", "fdasync.runner.prompt_scores",
    "fdasync.events.actions",
)  # fmt: skip
# what stores are written against: the room's public names, and the checks of arguments
_STORE = ("fdasync.cache.store", "fdasync.cache.store.validation")

# From the ground up: each room, and what it imports besides itself, all of it from floors below. `a.b` means this
# module; of a package, its public names alone. `a.b.*` means all modules inside. Every room imports `fdasync.errors`.
FLOORS: tuple[dict[str, tuple[str, ...]], ...] = (
    # those that say where something went
    {"fdasync.errors": (), "fdasync.pd": (), "fdasync.routing": ()},
    {"fdasync.ipc": (), "fdasync.registry": (), "fdasync.result": ()},
    {"fdasync.ipc.peers": ("fdasync.ipc.*",), "fdasync.request": ("fdasync.registry.mapping",)},
    {"fdasync.stats": ("fdasync.request",)},
    {"fdasync.telemetry.sight": ("fdasync.stats",)},
    {
        "fdasync.cache": ("fdasync.ipc.shared_memory",),
        "fdasync.cache.store": ("fdasync.ipc.*", "fdasync.registry.*"),
        "fdasync.events": ("fdasync.request", "fdasync.result", "fdasync.stats"),
    },
    {
        "fdasync.cache.store.file": (
            "fdasync.cache.store.base", "fdasync.cache.store.block_format", "fdasync.cache.store.validation",
            "fdasync.ipc.*",
        ),
        "fdasync.cache.store.process": (
            "fdasync.cache.store.base", "fdasync.cache.store.block_format", "fdasync.cache.store.checked",
            "fdasync.cache.store.plugins", "fdasync.ipc.*",
        ),
        # the names of a store's verbs are words of the events
        "fdasync.cache.store.guard": ("fdasync.cache.store.base", "fdasync.events.catalog", "fdasync.ipc.*"),
        "fdasync.drafting": ("fdasync.events.actions", "fdasync.registry.*"),
        "fdasync_kernels": (),
        "fdasync.runner": (
            *_ARENAS, "fdasync.events.actions", "fdasync.ipc.deadlines", "fdasync.ipc.exchange",
            "fdasync.ipc.peers.blocks", "fdasync.ipc.remote", "fdasync.ipc.shared_memory", "fdasync.registry.*",
            "fdasync.request", "fdasync.result", "fdasync.stats",
        ),
        "fdasync.scheduler.state": (*_PURE_CACHE, "fdasync.events.*"),
    },
    {
        "fdasync.generator": (
            "fdasync.request", "fdasync.result", "fdasync.runner.facts", "fdasync.stats",
            "fdasync.telemetry.sight.sight",
        ),
        "fdasync.runner.synthetic": (
            *_ARENAS, "fdasync.cache.debug_rows", "fdasync.events.actions", "fdasync.ipc.*", "fdasync.request",
            "fdasync.result", "fdasync.runner.*",
        ),
    },
    # kernels that go on from a sum over devices make it themselves
    {"fdasync_kernels.collectives": ("fdasync_kernels.*",)},
    {
        "fdasync_kernels.attention": ("fdasync_kernels.*",),
        "fdasync_kernels.experts": ("fdasync_kernels.*",),
        "fdasync_kernels.layer": ("fdasync_kernels.*",),
        "fdasync_kernels.router": ("fdasync_kernels.*",),
        "fdasync_kernels.sampling": ("fdasync_kernels.*",),
    },
    {
        "fdasync.gpu": ("fdasync.cache.aux", "fdasync.cache.host_arena", "fdasync.ipc.*"),
        "fdasync.runner.worker": (
            *_ARENAS, "fdasync.events.actions", "fdasync.ipc.*", "fdasync.request", "fdasync.runner.base",
            "fdasync.runner.chosen", "fdasync.runner.plugins",
        ),
        "fdasync.scheduler.tiers": (*_PURE_CACHE, "fdasync.events.*", "fdasync.scheduler.state.*"),
    },
    {
        "fdasync.gpu.ports": ("fdasync.gpu.completion",),
        "fdasync.runner.group": (
            *_ARENAS, "fdasync.events.actions", "fdasync.ipc.*", "fdasync.request", "fdasync.runner.base",
            "fdasync.runner.worker.*",
        ),
        "fdasync.scheduler.disagg": (
            *_PURE_CACHE, "fdasync.events.*", "fdasync.scheduler.state.*", "fdasync.scheduler.tiers.*",
        ),
    },
    {
        "fdasync.scheduler": (
            *_PURE_CACHE, "fdasync.drafting", "fdasync.events.*", "fdasync.scheduler.disagg.*",
            "fdasync.scheduler.state.*", "fdasync.scheduler.tiers.*", "fdasync.stats",
        ),
    },
    {
        "fdasync.telemetry.sight.recording": (
            "fdasync.cache.picks", "fdasync.events.catalog", "fdasync.stats", "fdasync.telemetry.sight.*",
        ),
    },
    {
        "fdasync.engine": (
            *_ARENAS, "fdasync.cache.debug_rows", "fdasync.cache.identity", "fdasync.cache.store.base",
            "fdasync.cache.store.block_format", "fdasync.cache.store.checked", "fdasync.cache.store.plugins",
            "fdasync.cache.store.guard", "fdasync.cache.store.process.proxy", "fdasync.drafting",
            "fdasync.events.*", "fdasync.generator", "fdasync.ipc.*", "fdasync.registry.*", "fdasync.request",
            "fdasync.result", "fdasync.runner.base", "fdasync.runner.chosen", "fdasync.runner.facts",
            "fdasync.runner.grammar_checks", "fdasync.stats",
            "fdasync.runner.group.*",
            "fdasync.runner.plugins", "fdasync.runner.prompt_scores", "fdasync.runner.shares",
            "fdasync.runner.worker.proxy", "fdasync.scheduler", "fdasync.scheduler.state.policy",
            "fdasync.telemetry.sight.*",
        ),
    },
    {
        "fdasync_fleet": (
            "fdasync.cache.aux", "fdasync.ipc.errors", "fdasync.ipc.remote", "fdasync.ipc.shared_memory",
            "fdasync.request", "fdasync.result", "fdasync.runner.base", "fdasync.runner.facts",
            "fdasync.runner.prompt_scores", "fdasync.stats", "fdasync.telemetry.sight.sight",
        ),
    },
    {
        "fdasync_fleet.link": (
            "fdasync.ipc.*", "fdasync.registry.mapping", "fdasync_fleet.fields", "fdasync_fleet.messages",
        ),
        "fdasync_fleet.transfer": (
            "fdasync.cache.store.base", "fdasync.ipc.*", "fdasync.registry.*", "fdasync_fleet.messages",
        ),
    },
    {
        # an engine by its public names; of its inside, the state of requests
        "fdasync_fleet.instance": (
            *_ARENAS, "fdasync.cache.identity", "fdasync.cache.store.base", "fdasync.drafting", "fdasync.engine",
            "fdasync.engine.request_state", "fdasync.engine.tokenizer", "fdasync.events.*", "fdasync.ipc.*",
            "fdasync.request", "fdasync.result", "fdasync.runner.base", "fdasync.stats", "fdasync_fleet.*",
        ),
        "fdasync_fleet.router": (
            "fdasync.cache.aux", "fdasync.cache.identity", "fdasync.generator", "fdasync.ipc.*", "fdasync.request",
            "fdasync.result", "fdasync.runner.facts", "fdasync.stats", "fdasync.telemetry.sight.*",
            "fdasync.registry.mapping", "fdasync_fleet.fields", "fdasync_fleet.link.*",
            "fdasync_fleet.messages", "fdasync_fleet.results", "fdasync_fleet.verbs",
        ),
        "fdasync.telemetry": (
            "fdasync.engine", "fdasync.events.*", "fdasync.ipc.*", "fdasync.registry.*", "fdasync.stats",
            "fdasync.telemetry.sight.*",
        ),
    },
    {
        # the names of fleets are lazy
        "fdasync": (
            "fdasync.engine.*", "fdasync.generator", "fdasync.request", "fdasync.result", "fdasync.runner.facts",
            "fdasync.stats", "fdasync_fleet.instance.*", "fdasync_fleet.router.*",
        ),
    },
    # embedders: they start engines, instances, stores and their parts
    {"fdasync.testing": ("fdasync.*",)},
    {"fdasync_fleet.testing": ("fdasync.*", "fdasync_fleet.*")},
    # plugins: what runners, stores and transports are written against
    {
        "fdasync_example": (
            *_ARENAS, *_RUNNER, *_STORE, "fdasync.ipc.*", "fdasync_fleet.messages", "fdasync_fleet.transfer.*",
            "fdasync.request",
        ),
        "fdasync_mooncake": (*_STORE, "fdasync.ipc.*"),
        "fdasync_mooncake.transfer": (
            "fdasync.cache.store.base", "fdasync.ipc.*", "fdasync_fleet.messages", "fdasync_fleet.transfer.*",
        ),
        "fdasync_transformers.model.kept": (
            "fdasync_kernels.experts.stored", "fdasync_kernels.linear.stored",
        ),
        "fdasync_transformers.model": (
            *_RUNNER, "fdasync.cache.aux", "fdasync.cache.host_arena", "fdasync.cache.snapshots",
            "fdasync.runner.shares",
        ),
        "fdasync_transformers.sampling": (
            "fdasync_kernels.*", "fdasync.ipc.*", "fdasync.request", "fdasync.result", "fdasync.runner.base",
            "fdasync.runner.prompt_scores",
        ),
    },
    {
        "fdasync_transformers.mtp": ("fdasync.runner.input_batch", "fdasync_transformers.model.*"),
    },
    {
        "fdasync_transformers.parallel": (
            "fdasync.gpu.peers", "fdasync.gpu.nccl", "fdasync.ipc.exchange", "fdasync.runner.shares",
            "fdasync_kernels.collectives.*", "fdasync_kernels.digest", "fdasync_kernels.linear.*",
            "fdasync_kernels.step_kernels", "fdasync_transformers.model.*",
        ),
    },
    {
        "fdasync_mooncake.testing": ("fdasync.ipc.*", "fdasync.testing.*", "fdasync_mooncake.*"),
        "fdasync_transformers.fused": (
            "fdasync.gpu.capture", "fdasync_kernels.*", "fdasync_transformers.model.*",
            "fdasync_transformers.parallel.sums",
        ),
    },
    {
        "fdasync_transformers.capture": (
            "fdasync.cache.aux", "fdasync.cache.debug_rows", "fdasync.gpu.*", "fdasync_kernels.router.route",
            "fdasync_transformers.fused.*", "fdasync_transformers.model.*",
        ),
        "fdasync_transformers.weights": (
            "fdasync_kernels.experts.stored", "fdasync.request", "fdasync.runner.base",
            "fdasync_transformers.model.kept.*", "fdasync_transformers.mtp.*", "fdasync_transformers.parallel.*",
        ),
    },
    {
        "fdasync_transformers.fixed": (
            "fdasync_kernels.*", "fdasync_transformers.model.*", "fdasync_transformers.weights.*",
        ),
        "fdasync_transformers.tiny": ("fdasync_transformers.mtp.*", "fdasync_transformers.weights.*"),
    },
    {
        "fdasync_transformers.execution": (
            *_ARENAS, *_RUNNER, "fdasync.gpu.*", "fdasync.ipc.peers.memory", "fdasync.ipc.peers.blocks",
            "fdasync.ipc.peers.pool", "fdasync.ipc.peers.rows", "fdasync.ipc.shared_memory", "fdasync.request",
            "fdasync.runner.drafts", "fdasync_kernels.*", "fdasync_transformers.capture.*",
            "fdasync_transformers.fixed.*", "fdasync_transformers.fused.*", "fdasync_transformers.model.*",
            "fdasync_transformers.mtp.*", "fdasync_transformers.parallel.*", "fdasync_transformers.sampling.*",
        ),
    },
    {
        "fdasync_transformers.start": (
            *_ARENAS, *_RUNNER, "fdasync_kernels.experts.stored", "fdasync.ipc.exchange", "fdasync.registry.*",
            "fdasync.request", "fdasync.runner.report", "fdasync_transformers.capture.*",
            "fdasync_transformers.execution.*", "fdasync_transformers.fixed.*", "fdasync_transformers.fused.*",
            "fdasync_transformers.model.*", "fdasync_transformers.mtp.*", "fdasync_transformers.parallel.*",
            "fdasync_transformers.sampling.*", "fdasync_transformers.weights.*",
        ),
    },
    {
        "fdasync_transformers": (
            *_ARENAS, *_RUNNER, "fdasync.engine.tokenizer", "fdasync.ipc.exchange", "fdasync.ipc.peers.blocks",
            "fdasync.ipc.remote", "fdasync.request",
            "fdasync.runner.report", "fdasync_transformers.*",
        ),
    },
    {
        "fdasync.cli": (
            "fdasync.cache.store.*", "fdasync.drafting", "fdasync.engine.*", "fdasync.events.*", "fdasync.ipc.*",
            "fdasync.registry.*", "fdasync.runner.*", "fdasync.scheduler.*",
        ),
    },
    # trainers
    {
        "fdasync_trainer.rows": ("fdasync.result",),
        "fdasync_trainer.replay": ("fdasync.result", "fdasync_transformers.model.*"),
    },
    {
        "fdasync_trainer.numerics": (
            "fdasync_kernels.*", "fdasync_trainer.replay.*", "fdasync_transformers.fixed.*",
            "fdasync_transformers.fused.*", "fdasync_transformers.model.*", "fdasync_transformers.parallel.*",
            "fdasync_transformers.sampling.*", "fdasync_transformers.weights.*",
        ),
    },
    {
        "fdasync_trainer.verification": (
            "fdasync.request", "fdasync.result", "fdasync_trainer.numerics.*", "fdasync_trainer.replay.*",
            "fdasync_transformers.weights.*",
        ),
    },
    {
        "fdasync_trainer": (
            "fdasync_trainer.numerics.*", "fdasync_trainer.replay.*", "fdasync_trainer.verification.*",
        ),
    },
    {
        "fdasync_fleet.cli": (
            "fdasync.cache.store.*", "fdasync.cli.*", "fdasync.engine.*", "fdasync.events.*", "fdasync.generator",
            "fdasync.ipc.*", "fdasync.request", "fdasync.result", "fdasync.runner.facts", "fdasync.stats",
            "fdasync.telemetry.*", "fdasync_fleet.*", "fdasync_trainer", "fdasync_transformers",
        ),
    },
    {
        "fdasync_trainer.cli": (
            "fdasync.cli.common.*", "fdasync.engine.*", "fdasync.generator", "fdasync.request", "fdasync.result",
            "fdasync.runner.*", "fdasync.stats", "fdasync_fleet.cli.demo.*", "fdasync_fleet.cli.local.*",
            "fdasync_fleet.router.*", "fdasync_trainer",
        ),
    },
    # an app over the public names; its command starts instances as the command line does
    {
        "fdasync_http": (
            "fdasync", "fdasync.cli.common.*", "fdasync_fleet.cli.local.*", "fdasync.engine.config",
            "fdasync.engine.tokenizer", "fdasync.ipc.child", "fdasync.ipc.deadlines", "fdasync.ipc.errors",
            "fdasync.ipc.remote", "fdasync.ipc.rpc", "fdasync.ipc.service", "fdasync_fleet.router.*",
            "fdasync.registry.*", "fdasync.request", "fdasync.telemetry.sight.*", "fdasync.telemetry.logs",
            "fdasync.telemetry.otel", "fdasync.telemetry.stats_metrics", "fdasync.telemetry.vllm_names",
        ),
        # fleets: instances as the command line starts them, under actors, and routers that follow them
        "fdasync_ray": (
            "fdasync.cli.common.*", "fdasync.engine.config", "fdasync.engine.weights.source", "fdasync.ipc.deadlines",
            "fdasync.registry.mapping", "fdasync.request", "fdasync.runner.synthetic", "fdasync_fleet.cli.local.*",
            "fdasync_fleet.link.address", "fdasync_fleet.link.keys", "fdasync_fleet.router.*",
        ),
    },
)  # fmt: skip
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
KNOWN = {room: (*known, "fdasync.errors") for rooms in FLOORS for room, known in rooms.items()}
# (module, imported): why; two at most, over all rules
EXCEPTIONS: dict[tuple[str, str], str] = {}


def room_of(module: str) -> str:
    """The innermost room that holds a module; "" for a module that is not of the house."""
    while module and module not in FLOOR_OF:
        module = module.rpartition(".")[0]
    return module


def broken_rule(module: str, imported: str) -> str:
    """The rule that forbids this import; "" if none does."""
    room, other = room_of(module), room_of(imported)
    if not other or other == room or (module, imported) in EXCEPTIONS:
        return ""
    if FLOOR_OF[other] >= FLOOR_OF[room]:
        return f"{other} stands beside or above {room}"
    if not any(fnmatchcase(imported, known) for known in KNOWN[room]):
        return f"{room} knows {', '.join(KNOWN[room])} only"
    return ""


def broken_rules(module: str, source: str) -> list[str]:
    """The rules that a module breaks, by its source."""
    return [
        f"{module}:{line} imports {imported}: {rule}"
        for imported, line in imports_of(source, types=True).items()
        if (rule := broken_rule(module, imported))
    ]


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """The modules among `sources` that each of them imports."""
    return {
        module: {imported for imported in imports_of(source, types=True) if imported in sources} - {module}
        for module, source in sources.items()
    }


def sources() -> dict[str, str]:
    return {module: path.read_text() for module, path in ALL_MODULES.items()}


@pytest.mark.heavy("reads every module")
def test_rooms_import_what_the_floors_say():
    broken = [line for module, source in sources().items() for line in broken_rules(module, source)]
    assert not broken, "\n".join(broken)


def test_every_module_has_a_room():
    # a new folder, and a new plugin, gets a line in FLOORS
    homeless = {module for module in ALL_MODULES if not room_of(module)}
    root = {module for module in ALL_MODULES if room_of(module) == "fdasync"} - {"fdasync", "fdasync.__main__"}
    assert homeless | root == set()


@pytest.mark.ci
def test_floors_allow_nothing_that_no_room_needs():
    used: dict[str, set[str]] = {room: set() for room in FLOOR_OF}
    arrows = set()
    for module, source in sources().items():
        imported = imports_of(source, types=True)
        used[room_of(module)].update(imported)
        arrows.update((module, name) for name in imported)
    shared = {*_PURE_CACHE, *_ARENAS, *_RUNNER, *_STORE}
    idle = [
        f"{room}: {known}"
        for rooms in FLOORS
        for room, all_known in rooms.items()
        for known in all_known
        if known not in shared and not any(fnmatchcase(name, known) for name in used[room])
    ]
    assert idle == []
    assert EXCEPTIONS.keys() <= arrows, "an exception that no module needs any more"
    assert len(EXCEPTIONS) <= 2


@pytest.mark.ci(after=34)
@pytest.mark.parametrize(
    ("module", "line"),
    [
        # a floor above
        ("fdasync.events.catalog", "from fdasync.engine.config import EngineConfig"),
        ("fdasync.scheduler.state.queues", "from fdasync.scheduler.tiers.swap_planner import SwapPlanner"),
        ("fdasync.scheduler.tiers.tiers", "from fdasync.scheduler.disagg.decode import DecodeSide"),
        ("fdasync.scheduler.disagg.prefill", "from fdasync.scheduler.core import Scheduler"),
        ("fdasync.cache.prefix", "from fdasync.engine.driver import Driver"),
        ("fdasync.cache.store.base", "from fdasync.cache.store.file.store import FileStore"),
        ("fdasync.runner.synthetic.runner", "from fdasync.scheduler import Scheduler"),
        ("fdasync.engine.engine", "import fdasync_fleet.messages"),
        ("fdasync.engine.engine", "from fdasync import Instance"),
        # a neighbour
        ("fdasync_fleet.link.links", "from fdasync_fleet.transfer.base import Transport"),
        ("fdasync_fleet.transfer.base", "from fdasync_fleet.link.links import Links"),
        ("fdasync_fleet.router.router", "from fdasync_fleet.instance.instance import Instance"),
        ("fdasync_fleet.instance.instance", "from fdasync_fleet.router.router import Router"),
        ("fdasync.cache.store.file.store", "from fdasync.cache.store.process.proxy import StoreProcess"),
        ("fdasync.cache.store.base", "from fdasync.cache.aux import AuxSpec"),
        ("fdasync.gpu.completion", "from fdasync.runner.worker import proxy"),
        # below, but not among what the room knows
        ("fdasync.registry.registry", "from fdasync.result import Result"),
        ("fdasync.drafting.planning", "from fdasync.scheduler.state.sequence import Sequence"),
        ("fdasync.ipc.child", "from fdasync.registry import registry"),
        ("fdasync_trainer.rows.checks", "from fdasync.ipc.deadlines import wait_within"),
        ("fdasync.generator", "from fdasync.ipc.deadlines import wait_within"),
        ("fdasync.events.bus", "from fdasync.ipc import deadlines"),
        ("fdasync.cache.store.guard.guard", "from fdasync.cache.store.memory import MemoryStore"),
        ("fdasync.cache.store.file.store", "from fdasync.cache.aux_arena import AuxArena"),
        ("fdasync.scheduler.core", "from fdasync.runner.base import Runner"),
        ("fdasync.scheduler.core", "from fdasync.cache.aux_arena import AuxArena"),
        ("fdasync.gpu.ports.adaptive", "from fdasync.scheduler import Scheduler"),
        ("fdasync.gpu.pools", "from fdasync.scheduler.state.config import SchedulerConfig"),
        ("fdasync.engine.output", "from fdasync.scheduler.core import Scheduler"),
        ("fdasync.engine.output", "from fdasync.cache.prefix import PrefixIndex"),
        ("fdasync_fleet.link.links", "from fdasync.request import GenerateRequest"),
        ("fdasync_fleet.router.router", "from fdasync.engine import Engine"),
        ("fdasync_fleet.router.router", "from fdasync.engine.request_state import RequestState"),
        ("fdasync_fleet.router.router", "from fdasync_fleet.transfer.base import Transport"),
        ("fdasync_fleet.instance.context", "from fdasync.engine.output import OutputProcessor"),
        ("fdasync_fleet.instance.context", "from fdasync.engine import frontend"),
        ("fdasync_fleet.instance.instance", "from fdasync.engine.engine import Engine"),
        ("fdasync_fleet.instance.instance", "from fdasync.engine.runtime import Runtime"),
        ("fdasync_fleet.instance.instance", "from fdasync.engine.driver import Driver"),
        ("fdasync_fleet.instance.instance", "from fdasync.scheduler import SchedulerStats"),
        ("fdasync.telemetry.prometheus", "from fdasync.engine.engine import Engine"),
        ("fdasync.telemetry.prometheus", "from fdasync_fleet.instance.kv_events import KvEvents"),
        ("fdasync.telemetry.prometheus", "from fdasync.scheduler import SchedulerStats"),
        # tests and plugins
        ("fdasync.engine.engine", "from fdasync.testing import synthetic_config"),
        ("fdasync.cli.main", "from fdasync.testing import synthetic_config"),
        ("fdasync.engine.tokenizer", "from fdasync_transformers.tokenizer import load_tokenizer"),
        ("fdasync_fleet.cli.demo.run", "from fdasync_transformers.runner import TransformersRunner"),
        ("fdasync_mooncake.store", "from fdasync.cache.store.file.store import FileStore"),
        ("fdasync_mooncake.store", "from fdasync.engine import Engine"),
        ("fdasync_mooncake.store", "from fdasync_mooncake.testing import MasterProcess"),
        ("fdasync_example.runner", "from fdasync.runner.synthetic import SyntheticRunner"),
        ("fdasync_example.transport", "from fdasync_fleet.instance.instance import Instance"),
        ("fdasync_example.store", "from fdasync_mooncake import MooncakeStore"),
        ("fdasync_transformers.runner", "from fdasync.scheduler import Scheduler"),
        ("fdasync_transformers.weights.update", "from fdasync_transformers.model.kv import KVLayout"),
    ],
)
def test_floors_forbid(module, line):
    assert len(broken_rules(module, line)) == 1
    typed = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {line}\n"
    assert len(broken_rules(module, typed)) == 1
    assert len(broken_rules(module, f"def later():\n    {line}\n")) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("fdasync.telemetry.prometheus", "from fdasync.engine import Engine"),
        ("fdasync.cache.store.file.store", "from fdasync.cache.store.base import Store"),
        ("fdasync_fleet.instance.context", "from fdasync.engine.request_state import RequestState"),
        ("fdasync_mooncake.store", "from fdasync.cache.store import Store"),
        ("fdasync.scheduler.core", "import hashlib"),
    ],
)
def test_floors_allow(module, line):
    assert broken_rules(module, line) == []


@pytest.mark.heavy("reads every module")
def test_no_module_imports_itself_by_way_of_others():
    graph = import_graph(sources())
    # raises with the circle
    assert len(list(TopologicalSorter(graph).static_order())) == len(ALL_MODULES)


def test_a_circle_is_found():
    typed = "if TYPE_CHECKING:\n    import fdasync.cache.blocks"
    made_up = {"fdasync.cache.blocks": "from fdasync.cache.aux import Slot", "fdasync.cache.aux": typed}
    with pytest.raises(CycleError):
        TopologicalSorter(import_graph(made_up)).prepare()
