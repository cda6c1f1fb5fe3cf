"""What holds for every test of the repository, plugins included: where the GPU's tests run, kernels without one, how
often garbage is looked for, and no time limit for the examples of a property."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Generator

    from blockbuster import BlockBuster

#: an NVIDIA driver is loaded: torch may see a GPU
HAS_DRIVER = Path("/dev/nvidiactl").exists()

# a machine that is busy with something else is no fault of an example
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

if not HAS_DRIVER:
    # kernels run in Triton's interpreter, which must be known before triton is first imported; children inherit it
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="write the CPU seconds of each test to FILE, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_support("costs").Costs(config), "costs")


def _support(name: str) -> Any:
    """A module of `tests/support` by its path: where pytest runs in a plugin's folder, `tests` are the plugin's."""
    path = Path(__file__).parent / f"tests/support/{name}.py"
    spec = importlib.util.spec_from_file_location(f"fdasync_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The modules of all tests and their libraries stay until the end: the collector does not go over them, neither
    while they are imported nor at each of its rounds afterwards, and begins a round less often than by default."""
    gc.disable()
    try:
        return (yield)
    finally:
        _quicken_interpreter()
        _find_constants()
        gc.freeze()
        # libraries look for leaks when the interpreter ends
        atexit.register(gc.unfreeze)
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch, blocking_calls: BlockBuster) -> None:
    """Processes that engines and instances of the test start are forks of it; see `tests/support/forks.py`. Where Ray
    has run, its threads are left, and forks crash: there they are processes of their own, as they are for a user."""
    if "ray._raylet" in sys.modules:
        return
    from tests.support.forks import fork_children

    fork_children(monkeypatch, blocking_calls.deactivate)


@settings(max_examples=200, database=None)
@given(st.integers())
def _find_constants(_drawn: int) -> None:
    """Hypothesis parses all our modules for constants as it first draws one of them. Inside of a test that is a dear
    moment, and Python 3.11 cannot parse while a collected object's warning is parsed, too (CPython issue 106905)."""


def _quicken_interpreter() -> None:
    if "triton.runtime.interpreter" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        from tests.support.quick_interpreter import quicken

        quicken()


@pytest.hookimpl(tryfirst=True)  # before pytest's own choice by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, with the reason, where torch sees no GPU. Of a test marked `ci(after=N)` N cases
    are in the first ring. A test marked `heavy` says why."""
    lists: defaultdict[str, list[tuple[pytest.Function, pytest.Mark]]] = defaultdict(list)
    for item in items:
        for mark in item.iter_markers("heavy"):
            if len(mark.args) != 1 or not isinstance(mark.args[0], str):
                raise pytest.UsageError(f"{item.nodeid}: heavy() takes the reason, one string")
        marks = list(item.iter_markers("ci"))
        for mark in marks:
            if not mark.args and not mark.kwargs:
                continue
            if (
                mark.args
                or mark.kwargs.keys() != {"after"}
                or mark not in item.own_markers
                or not hasattr(item, "callspec")
            ):
                raise pytest.UsageError(f"{item.nodeid}: ci() takes after=N, on a test of several cases, or nothing")
            if len(marks) == 1 and item.get_closest_marker("nightly") is None:
                assert isinstance(item, pytest.Function), item
                lists[item.nodeid.partition("[")[0]].append((item, mark))
    kept = _support("rings").kept
    for cases in lists.values():
        for place in kept([item.callspec.params for item, _ in cases], cases[0][1].kwargs["after"]):
            item, mark = cases[place]
            item.own_markers.remove(mark)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def _has_gpu() -> bool:
    if not HAS_DRIVER:
        return False
    import torch

    return torch.cuda.is_available()
