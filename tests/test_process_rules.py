"""The rules of the house: what rooms hold, no module state, no threads, several engines in one process.

`test_import_rules.py` has the floors.
"""

from __future__ import annotations

import ast
import asyncio
import collections
import io
import re
import subprocess
import sys
import textwrap
import tokenize

import pytest

from fdasync import Engine, SamplingParams
from fdasync.testing import check_sample, oracle_of, synthetic_config
from tests.support.imports import ALL_MODULES, HOME, MODULES, imports_of, within

PLUGIN_HOME = HOME.parent / "plugins/fdasync-transformers/src/fdasync_transformers"

PURE = (
    "fdasync.scheduler", "fdasync.cache.aux", "fdasync.cache.blocks", "fdasync.cache.identity",
    "fdasync.cache.prefix",
)  # fmt: skip


@pytest.mark.parametrize(("home", "files", "rooms"), [(HOME, 6, 15), (PLUGIN_HOME, 4, 13)], ids=["fdasync", "plugin"])
def test_rooms_are_small_and_say_what_they_are(home, files, rooms):
    # bytecode of rooms that went stays behind
    folders = [home, *{path.parent for path in home.rglob("*.py")}]
    for folder in folders:
        held = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
        assert len(held) <= 16, f"{folder} holds {len(held)} files"
        told = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        # a word or two of a room are its name again
        assert len(told.partition(". ")[0].split()) >= 10, f"{folder} does not say what it is: {told!r}"
    # these say where they went
    assert len({path.name for path in home.glob("*.py")} - {"pd.py", "routing.py"}) <= files
    assert len([path for path in home.iterdir() if (path / "__init__.py").exists()]) <= rooms


def test_tests_mirror_the_package_in_small_files():
    tests = HOME.parent / "tests"
    # beside the rooms: what several folders share, whole systems, nightly plays, benchmarks, the proof of the suite
    beside = {tests / name for name in ("support", "system", "nightly", "benchmarks", "mutants")}
    folders = {path.parent for path in tests.rglob("*.py")} - {tests}
    folders = {folder for folder in folders if not beside.intersection([folder, *folder.parents])}
    assert len(folders) >= 20
    assert [str(one) for one in sorted(folders) if not (HOME / one.relative_to(tests)).is_dir()] == []
    files = [*tests.rglob("*.py"), *(HOME.parent / "plugins").glob("*/tests/**/*.py")]
    assert [f"{path}: {count}" for path in files if (count := len(path.read_text().splitlines())) > 500] == []


def test_a_worker_loads_what_it_needs():
    script = """
        import sys
        import fdasync.runner.worker.main
        from fdasync.runner import synthetic
        ours = [name for name in sys.modules if name.partition(".")[0] == "fdasync"]
        assert len(ours) <= 60, len(ours)
        assert "zmq" not in sys.modules
        assert "fdasync_fleet" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=600)


@pytest.mark.ci
def test_the_pure_core_reaches_for_nothing_outside():
    allowed = {
        "__future__", "abc", "array", "bisect", "collections", "dataclasses", "enum", "hashlib", "heapq", "itertools",
        "math", "msgspec", "struct", "typing",
    }  # fmt: skip
    for module, path in MODULES.items():
        if within(module, PURE):
            outside = {name.split(".")[0] for name in imports_of(path.read_text()) if not within(name, ("fdasync",))}
            assert outside <= allowed, f"{module} imports {sorted(outside - allowed)}"
            tree = ast.parse(path.read_text())
            assert not [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef | ast.Await)], module


@pytest.mark.ci
def test_torch_is_imported_in_gpu_rooms_and_runners_only():
    for module, path in MODULES.items():
        # the demo loads a real model through the plugin, and says when it is not there
        if not within(module, ("fdasync.gpu", "fdasync.runner", "fdasync_fleet.cli.demo.run")):
            heavy = {"torch", "transformers", "tokenizers", "safetensors"}
            assert not {name.split(".")[0] for name in imports_of(path.read_text())} & heavy, module


@pytest.mark.heavy("it parses every module")
def test_structs_of_many_fields_are_made_by_name():
    """A swapped pair of numbers would be a silent lie."""
    trees = {module: ast.parse(path.read_text()) for module, path in ALL_MODULES.items()}
    bases: dict[str, list[set[str]]] = collections.defaultdict(list)
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name].append({getattr(base, "id", getattr(base, "attr", "")) for base in node.bases})

    def is_struct(name: str) -> bool:
        # of classes that share a name all must be structs: a name does not say which is meant; `Table` is rich's, too
        found = bases.get(name, []) if name != "Table" else []
        return name == "Struct" or (
            found != [] and all(any(is_struct(base) for base in each if base != name) for each in found)
        )

    found = [
        f"{module}:{node.lineno} makes {name} of {len(node.args)} values without names"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and len(node.args) > 4
        and is_struct(name := getattr(node.func, "id", getattr(node.func, "attr", "")))
    ]
    assert found == []


_UNTYPED = re.compile(r"# type: ignore\[[\w-]+\](?P<reason>  # \w.*)?")


def untyped_without_a_reason(source: str) -> list[int]:
    """Lines that a type checker passes over, and neither they nor a comment above say why."""
    lines = ["", *source.splitlines()]
    found = {number: mark for number, line in enumerate(lines) if (mark := _UNTYPED.search(line))}
    told = {number for number in found if lines[number - 1].lstrip().startswith("# ")}
    return [number for number, mark in found.items() if not mark["reason"] and number not in told]


def test_what_the_type_checker_passes_over_says_why():
    marked = "one()  # type: ignore[misc]\n# why\ntwo()  # type: ignore[misc]\nthree()  # type: ignore[misc]  # why"
    assert untyped_without_a_reason(marked) == [1]
    root = HOME.parent
    homes = (HOME, root / "benchmarks", root / "examples", *(root / "plugins").glob("*/src"))
    files = {str(path): untyped_without_a_reason(path.read_text()) for home in homes for path in home.rglob("*.py")}
    assert {path: lines for path, lines in files.items() if lines} == {}
    assert len(files) > 700


def test_nothing_is_global():
    for module, path in MODULES.items():
        source = path.read_text()
        if not re.search(r"\bglobal\b", source):
            continue
        stated = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Global)]
        assert not stated, f"{module}:{stated and stated[0].lineno} writes a global"


BOUNDED = ("asyncio.timeout", "asyncio.timeout_at", "asyncio.wait_for")
TIMERS = ("call_later", "call_at")
WAITS = {*TIMERS, "timeout", "timeout_at", "wait_for", "wait"}
_BARE = "# bare deadline: "
_BARE_TIMER = "# bare timer: "


def bare_deadlines(source: str) -> list[int]:
    """Lines that end a wait by asyncio's own clock, or have it call somebody, and do not say why."""
    lines = source.splitlines()
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in WAITS:
            continue
        name = ast.unparse(node.func)
        limited = name == "asyncio.wait" and any(word.arg == "timeout" for word in node.keywords)
        timer = node.func.attr in TIMERS
        excuse = _BARE_TIMER if timer else _BARE
        said = any(excuse in line for line in lines[max(node.lineno - 2, 0) : node.lineno])
        if (timer or limited or name in BOUNDED) and not said:
            found.append(node.lineno)
    return found


@pytest.mark.heavy("reads every module")
def test_waits_for_others_look_once_more_behind_their_deadline():
    """A loop that its user blocked must not call those late whose answer lies unread (`deadlines.py`)."""
    for module, path in MODULES.items():
        if not within(module, ("fdasync.testing", "fdasync_fleet.testing")):
            assert bare_deadlines(path.read_text()) == [], f"{module}: wait through fdasync.ipc.deadlines"
    for source in (HOME.parent / "plugins").glob("*/src/**/*.py"):
        if source.name != "testing.py" and "fdasync_fleet" not in source.parts:
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
        timeout=600,
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


@pytest.mark.ci
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


@pytest.mark.ci
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


# a lease is room that a decode instance grants, and nothing else
LEASE_ROOMS = (
    "fdasync_fleet", "fdasync.scheduler", "fdasync.events", "fdasync.engine.config", "fdasync.engine.frontend",
    "fdasync.engine.prepare", "fdasync.engine.driver", "fdasync.telemetry", "fdasync.cli", "fdasync.testing",
    "fdasync.result", "fdasync.stats",
)  # fmt: skip


def lease_names(source: str) -> set[str]:
    """Names in a module's code that speak of leases."""
    names = {token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == 1}
    return {name for name in names if re.search(r"(?<!re)lease", name.lower())}


@pytest.mark.ci
def test_a_lease_is_room_at_a_decode_instance_and_nothing_else():
    assert lease_names("class BufferLease: pass") == {"BufferLease"}
    assert lease_names("released = release(_lease_kill_s)") == {"_lease_kill_s"}
    found = {
        name: names
        for name, path in MODULES.items()
        if not within(name, LEASE_ROOMS) and (names := lease_names(path.read_text()))
    }
    assert found == {}
