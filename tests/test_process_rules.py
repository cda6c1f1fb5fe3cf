"""The rules of the house: who imports whom, no module state, no threads, several engines in one process."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
import textwrap
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fdasync
from fdasync import Engine, SamplingParams
from fdasync.testing import check_sample, oracle_of, synthetic_config

HOME = Path(fdasync.__file__).parent
MODULES = {
    ".".join(("fdasync", *path.relative_to(HOME).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(HOME.rglob("*.py"))
}


def imports_of(path: Path, *, types: bool = False) -> dict[str, int]:
    """Modules that a file imports, at any depth, and the line; `types`: those for type checkers, too."""
    found: dict[str, int] = {}

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types:
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found[inner if inner in MODULES else base] = node.lineno
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


# from the ground up: a room imports those of its floor and below
FLOORS = (
    ("fdasync.errors", "fdasync.result"),
    ("fdasync.ipc", "fdasync.registry", "fdasync.request", "fdasync.routing"),
    ("fdasync.events", "fdasync.cache"),
    ("fdasync.cache.store",),
    ("fdasync.cache.store.file", "fdasync.cache.store.process", "fdasync.cache.store.wrappers"),
    ("fdasync.runner", "fdasync.gpu", "fdasync.gpu.kernels"),
    ("fdasync.runner.worker", "fdasync.gpu.ports", "fdasync.scheduler"),
    ("fdasync.engine",),
    ("fdasync.pd",),
    ("fdasync.pd.link", "fdasync.pd.transfer"),
    ("fdasync.pd.instance", "fdasync.pd.router"),
    ("fdasync.telemetry",),
    ("fdasync.cli", "fdasync.testing", "fdasync"),
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
PURE = ("fdasync.scheduler", "fdasync.cache.aux", "fdasync.cache.blocks", "fdasync.cache.lru", "fdasync.cache.prefix")
# rooms that know nothing but these
ONLY = {
    "fdasync.scheduler": (
        "fdasync.scheduler", "fdasync.cache.aux", "fdasync.cache.blocks", "fdasync.cache.lru", "fdasync.cache.prefix",
        "fdasync.events", "fdasync.errors", "fdasync.request",
    ),
    "fdasync.ipc": ("fdasync.ipc", "fdasync.errors"),
    "fdasync.events": ("fdasync.events", "fdasync.errors", "fdasync.request"),
}  # fmt: skip
# what rooms may know of each other when they run
CONTRACTS = (
    "fdasync.errors", "fdasync.result", "fdasync.request", "fdasync.events", "fdasync.ipc", "fdasync.registry",
    "fdasync.cache.aux", "fdasync.cache.aux_arena", "fdasync.cache.host_arena", "fdasync.cache.debug_rows",
    "fdasync.cache.store.base", "fdasync.cache.store.block_format", "fdasync.gpu.completion", "fdasync.runner.base",
    "fdasync.engine.inputs", "fdasync.engine.tokenizer", "fdasync.pd.messages", "fdasync.pd.transfer.base",
)  # fmt: skip
ROOMS = ("fdasync.cache", "fdasync.gpu", "fdasync.runner", "fdasync.pd")
# what joins a room to others, and what knows more than a contract
JOINERS = {
    "fdasync.pd.instance.instance": ("fdasync.engine", "fdasync.cache.prefix"),
    "fdasync.pd.instance.decode_service": ("fdasync.cache.prefix",),  # checks that blocks are called what they are
    "fdasync.pd.router.dispatch": ("fdasync.cache.prefix",),  # looks for prefixes under the names that instances give
}
# the middle of an engine and of an instance, which only they, and embedders (the command line, tests), know
MIDDLE = ("fdasync.engine.engine", "fdasync.engine.runtime", "fdasync.engine.driver", "fdasync.pd.instance.instance")
EMBEDDERS = ("fdasync.cli", "fdasync.testing")
# neighbours that do not know each other
APART = (("fdasync.pd.link", "fdasync.pd.transfer"), ("fdasync.pd.transfer", "fdasync.pd.link"))
# what knows a floor above, and why
EXCEPTIONS = {
    ("fdasync.registry.registry", "fdasync.cache.store.base"): "checks that a plugin is a store",
    ("fdasync.registry.registry", "fdasync.pd.transfer.base"): "checks that a plugin is a transport",
    ("fdasync.registry.registry", "fdasync.runner.base"): "checks that a plugin is a runner",
}


def within(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def room_of(module: str) -> str:
    """The innermost room of the plan that holds a module."""
    while module not in FLOOR_OF:
        module = module.rpartition(".")[0]
    return module


def broken_rules(module: str, imported: str) -> str:
    """Which rule forbids this import; "" if none does."""
    if (module, imported) in EXCEPTIONS or not within(imported, ("fdasync",)):
        return ""
    room, other = room_of(module), room_of(imported)
    if FLOOR_OF[other] > FLOOR_OF[room]:
        return f"{other} stands above {room}"
    for pure, known in ONLY.items():
        if within(module, (pure,)) and not within(imported, known):
            return f"{pure} knows {', '.join(known)} only"
    if (room, other) in APART:
        return f"{room} and {other} do not know each other"
    if other == "fdasync.testing" and room != "fdasync.testing":
        return "the package does not need its tests"
    return ""


def test_rooms_know_each_others_contracts_only():
    for module, path in MODULES.items():
        for room in ROOMS:
            if within(module, (room,)):
                known = (*CONTRACTS, room, *JOINERS.get(module, ()))
                ours = [name for name in imports_of(path) if within(name, ("fdasync",))]
                assert [name for name in ours if not within(name, known)] == [], module


def test_nobody_knows_the_middle():
    for module, path in MODULES.items():
        if not within(module, (*MIDDLE, *EMBEDDERS)):
            assert [name for name in imports_of(path) if within(name, MIDDLE)] == [], module


def test_the_import_rule():
    broken = [
        f"{module}:{line} imports {imported}: {rule}"
        for module, path in MODULES.items()
        for imported, line in imports_of(path, types=True).items()
        if (rule := broken_rules(module, imported))
    ]
    assert not broken, "\n".join(broken)
    used = {(module, imported) for module, path in MODULES.items() for imported in imports_of(path, types=True)}
    assert EXCEPTIONS.keys() <= used, "an exception that nobody needs any more"


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("fdasync.events.catalog", "fdasync.engine.config"),
        ("fdasync.scheduler.core", "fdasync.runner.base"),
        ("fdasync.scheduler.core", "fdasync.cache.aux_arena"),
        ("fdasync.cache.prefix", "fdasync.engine.driver"),
        ("fdasync.cache.store.base", "fdasync.cache.store.file.store"),
        ("fdasync.runner.synthetic", "fdasync.scheduler"),
        ("fdasync.engine.engine", "fdasync.pd.messages"),
        ("fdasync.pd.link.links", "fdasync.pd.transfer.base"),
        ("fdasync.engine.engine", "fdasync.testing"),
        ("fdasync.cli.main", "fdasync.testing"),
    ],
)
def test_the_import_rule_forbids(module, imported):
    assert broken_rules(module, imported)


def test_no_module_imports_itself_by_way_of_others():
    graph = {
        module: {imported for imported in imports_of(path, types=True) if imported in MODULES} - {module}
        for module, path in MODULES.items()
    }
    # raises with the circle
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_rooms_are_small_and_say_what_they_are():
    folders = [HOME, *[path for path in HOME.rglob("*") if path.is_dir() and path.name != "__pycache__"]]
    for folder in folders:
        files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
        assert len(files) <= 16, f"{folder} holds {len(files)} files"
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), f"{folder} does not say what it is"
    assert len(list(HOME.glob("*.py"))) <= 6
    assert len([path for path in HOME.iterdir() if path.is_dir() and path.name != "__pycache__"]) <= 13


def test_a_worker_loads_what_it_needs():
    script = """
        import sys
        import fdasync.runner.worker.main
        from fdasync.runner import synthetic
        ours = [name for name in sys.modules if name.partition(".")[0] == "fdasync"]
        assert len(ours) <= 60, len(ours)
        assert "zmq" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


def test_the_pure_core_reaches_for_nothing_outside():
    allowed = {
        "__future__", "array", "bisect", "collections", "enum", "hashlib", "heapq", "itertools", "math", "msgspec",
        "typing",
    }  # fmt: skip
    for module, path in MODULES.items():
        if within(module, PURE):
            outside = {name.split(".")[0] for name in imports_of(path) if not within(name, ("fdasync",))}
            assert outside <= allowed, f"{module} imports {sorted(outside - allowed)}"
            tree = ast.parse(path.read_text())
            assert not [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef | ast.Await)], module


def test_torch_is_imported_in_gpu_rooms_and_runners_only():
    for module, path in MODULES.items():
        # the demo loads a real model through the plugin, and says when it is not there
        if not within(module, ("fdasync.gpu", "fdasync.runner", "fdasync.cli.demo.run")):
            heavy = {"torch", "transformers", "tokenizers", "safetensors"}
            assert not {name.split(".")[0] for name in imports_of(path)} & heavy, module


def test_nothing_is_global():
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        stated = [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
        assert not stated, f"{module}:{stated and stated[0].lineno} writes a global"


BOUNDED = ("asyncio.timeout", "asyncio.timeout_at", "asyncio.wait_for")
TIMERS = ("call_later", "call_at")
_BARE = "# bare deadline: "
_BARE_TIMER = "# bare timer: "


def bare_deadlines(source: str) -> list[int]:
    """Lines that end a wait by asyncio's own clock, or have it call somebody, and do not say why."""
    lines = source.splitlines()
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        limited = name == "asyncio.wait" and any(word.arg == "timeout" for word in node.keywords)
        timer = isinstance(node.func, ast.Attribute) and node.func.attr in TIMERS
        excuse = _BARE_TIMER if timer else _BARE
        said = any(excuse in line for line in lines[max(node.lineno - 2, 0) : node.lineno])
        if (timer or limited or name in BOUNDED) and not said:
            found.append(node.lineno)
    return found


def test_waits_for_others_look_once_more_behind_their_deadline():
    """A loop that its user blocked must not call those late whose answer lies unread (`deadlines.py`)."""
    for module, path in MODULES.items():
        if not within(module, ("fdasync.testing",)):
            assert bare_deadlines(path.read_text()) == [], f"{module}: wait through fdasync.ipc.deadlines"
    for source in (HOME.parent / "plugins").glob("*/src/**/*.py"):
        if source.name != "testing.py":
            assert bare_deadlines(source.read_text()) == [], f"{source}: wait through fdasync.ipc.deadlines"


def test_a_bare_deadline_is_found():
    for line, excuse, other in (
        ("async with asyncio.timeout(3): pass", _BARE, _BARE_TIMER),
        ("await asyncio.wait_for(answer, 3)", _BARE, _BARE_TIMER),
        ("await asyncio.wait([answer], timeout=3)", _BARE, _BARE_TIMER),
        ("async with asyncio.timeout_at(3): pass", _BARE, _BARE_TIMER),
        ("self._loop.call_later(3, late)", _BARE_TIMER, _BARE),
        ("timer = answer.get_loop().call_at(3, late)", _BARE_TIMER, _BARE),
    ):
        body = f"async def wait():\n    {line}\n"
        assert bare_deadlines(body) == [2], line
        assert bare_deadlines(body.replace("    ", f"    {excuse}its user's own\n    ", 1)) == []
        assert bare_deadlines(body.replace("    ", f"    {other}its user's own\n    ", 1)) == [3], line
    assert bare_deadlines("async def wait():\n    await asyncio.wait([answer])\n") == []


def run_python(script: str, *arguments: str, **environment: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_TWO_ENGINES = """
    import asyncio, sys, uvloop
    from fdasync import Engine, SamplingParams
    from fdasync.testing import synthetic_config

    async def play(process):
        params = SamplingParams(max_tokens=20)
        async with Engine(synthetic_config(process=process)) as one, Engine(synthetic_config(process=process)) as two:
            await asyncio.gather(*[engine.complete([1, 2, 3, number], params) for number in range(9)
                                   for engine in (one, two)])
"""


def test_no_module_keeps_state():
    script = (
        _TWO_ENGINES
        + """
    def held():
        kinds = (list, dict, set, bytearray)
        return {
            f"{name}.{key}": repr(value)
            for name, module in sorted(sys.modules.items()) if name.split(".")[0] == "fdasync"
            for key, value in vars(module).items() if isinstance(value, kinds) and not key.startswith("__")
        }

    uvloop.run(play("inline"))
    before = held()
    uvloop.run(play("inline"))
    changed = {name for name in before.keys() | held().keys() if before.get(name) != held().get(name)}
    assert not changed, changed
    print(len(before))
    """
    )
    assert int(run_python(script)) > 0


@pytest.mark.parametrize("process", ["inline", "worker"])
def test_an_engine_process_has_no_threads(process):
    script = (
        _TWO_ENGINES
        + """
    import threading
    from fdasync.testing.harness.leaks import native_threads

    most = 0

    async def watched():
        global most
        task = asyncio.ensure_future(play(sys.argv[1]))
        while not task.done():
            most = max(most, threading.active_count())
            await asyncio.sleep(0.001)
        await task

    before = native_threads()
    uvloop.run(watched())
    assert most == 1, [thread.name for thread in threading.enumerate()]
    assert "torch" not in sys.modules and "transformers" not in sys.modules
    print(before, native_threads(), sep="\\n")
    """
    )
    # numpy's linear algebra starts native threads of its own when it is imported, if it may
    before, after = run_python(script, process, OPENBLAS_NUM_THREADS="1").splitlines()
    assert len(ast.literal_eval(before)) == 1, f"native threads: {before}"
    assert after == before
    before, after = run_python(script, process, OPENBLAS_NUM_THREADS="2").splitlines()
    assert after == before, "an engine started native threads that numpy did not"


def test_importing_the_plugin_is_light():
    out = run_python("""
        import sys
        import fdasync
        before = set(sys.modules)
        import fdasync.testing.pytest_plugin
        print(sorted(name for name in set(sys.modules) - before if "fdasync" in name))
    """)
    assert ast.literal_eval(out) == ["fdasync.testing", "fdasync.testing.pytest_plugin"]


@pytest.mark.both_loops
async def test_two_engines_in_one_process_do_not_meet():
    configs = [synthetic_config({"weights_id": number, "num_experts": 8 + number}) for number in (1, 2)]
    params = SamplingParams(max_tokens=30, seed=4)
    async with Engine(configs[0]) as one, Engine(configs[1]) as two:

        async def ask(engine: Engine, number: int):
            prompt = [1, 2, 3, 4, 5, 6, 7, 8, number]
            result = await engine.complete(prompt, params, request_id=f"same-{number}")
            check_sample(result.samples[0], prompt, params, oracle_of(engine.config))

        await asyncio.gather(*[ask(engine, number) for number in range(10) for engine in (one, two)])
        await one.aclose()
        # the other one goes on
        await ask(two, 3)
        assert two.stats().state == "running"
        assert one.state == "closed"
