"""The core alone, with nothing installed but what it depends on: an engine, a file store and the test kit."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.imports import HOME

pytestmark = pytest.mark.ci

SERVES = """
    import asyncio, sys, tempfile
    import fdasync
    from fdasync import Engine, EngineConfig, SamplingParams

    async def main():
        with tempfile.TemporaryDirectory() as folder:
            store = {"path": folder, "max_nbytes": 1 << 24}
            config = EngineConfig(
                runner="synthetic", runner_config={"vocab_size": 100}, process="inline", num_blocks=32, block_tokens=4,
                max_context_tokens=64, max_running=4, host_blocks=32, store="file", store_config=store,
            )
            async with Engine(config) as engine:
                result = await engine.complete(list(range(12)), SamplingParams(max_tokens=5))
                print(len(result.samples[0].token_ids), result.samples[0].routing.array.shape)

    asyncio.run(main())
    try:
        fdasync.connect
    except ImportError as error:
        print(error)
    print([name for name in ("torch", "triton", "zmq", "click", "pytest", "transformers") if name in sys.modules])
"""
THEIRS = """
    import asyncio
    from fdasync.cache.store.memory import MemoryConfig, MemoryStore
    from fdasync.testing import StoreTests, run_sim

    class TestMemory(StoreTests):
        def make(self):
            return MemoryStore(MemoryConfig())

    def test_time():
        run_sim(asyncio.sleep(1e6))
"""
RUNS = """
    import sys
    import pytest

    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1]]))
"""


def closure(name: str, extra: str = "") -> set[str]:
    """Names of the distributions that one of them needs, itself included, with one of its extras."""
    found: set[str] = set()
    left = [(name, extra)]
    while left:
        one, asked = left.pop()
        for line in distribution(one).requires or ():
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": asked}):
                continue
            if wanted.name not in found | {name}:
                left += [(wanted.name, extra) for extra in ("", *wanted.extras)]
        found.add(one)
    return found


def installed(folder: Path, names: set[str]) -> None:
    """A folder of these distributions alone: links to what is installed here."""
    for name in names:
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files if not file.parts[0].startswith(("..", "__"))}:
            there = Path(str(distribution(name).locate_file(top)))
            if there.exists() and not (folder / top).exists():
                (folder / top).symlink_to(there)


def bare(folder: Path, script: str, *arguments: str) -> str:
    """What a process prints that sees the standard library and the folder."""
    first = "import sys; sys.path.append(sys.argv.pop(1))\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", first + textwrap.dedent(script), str(folder), *arguments],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_engine_and_a_store_need_nothing_else(tmp_path: Path) -> None:
    names = closure("fdasync")
    assert not names & {"torch", "triton", "pyzmq", "transformers", "pytest"}
    installed(tmp_path, names)
    (tmp_path / "fdasync").symlink_to(HOME)
    served, connect, loaded = bare(tmp_path, SERVES).splitlines()
    assert served == "5 (16, 4, 2)"
    assert connect == "fdasync.connect is of fdasync-fleet: in a checkout, pip install ./plugins/fdasync-fleet"
    assert loaded == "[]"


def test_the_test_kit_needs_its_extra_alone(tmp_path: Path) -> None:
    names = closure("fdasync", "test")
    assert not names & {"torch", "triton", "pyzmq", "transformers"}
    installed(tmp_path, names)
    (tmp_path / "fdasync").symlink_to(HOME)
    (tmp_path / "test_theirs.py").write_text(textwrap.dedent(THEIRS))
    said = bare(tmp_path, RUNS, str(tmp_path / "test_theirs.py"))
    assert int(re.findall(r"(\d+) passed", said)[0]) > 30
