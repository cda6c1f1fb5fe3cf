"""Wheels of all distributions of this repository, and a try of them in an environment that has nothing else.

    python -m tests.support.wheels dist --constraints constraints.txt

A wheel is built of a copy of what git keeps of its distribution, and of what is new and not ignored: what an earlier
build left in a folder is in none. Knows pyproject files, git and pip. Run by `make dist`, which needs an index for the
packages of others; `tests/system/test_distributions.py` builds and tries wheels without one.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.support.floors import ROOT, pyprojects

# of the repository's own distribution: what else there is in its folder belongs to others
_ROOT_FILES = ("pyproject.toml", "README.md", "fdasync_command.py", "fdasync")
TEN_LINES = """
import asyncio
from fdasync import Engine, EngineConfig, SamplingParams


async def main() -> None:
    async with Engine(EngineConfig(runner="synthetic", max_context_tokens=64)) as engine:
        result = await engine.complete([72, 105, 33], SamplingParams(max_tokens=16, logprobs="raw", n=2))
        for sample in result.samples:
            print(len(sample.token_ids), len(sample.logprobs), sample.routing.array.shape)


asyncio.run(main())
"""


def sources(pyproject: Path) -> list[Path]:
    """The files that a distribution is built of, its tests left out, as paths within its folder."""
    folder = pyproject.parent
    wanted = _ROOT_FILES if folder == ROOT else ("pyproject.toml", "README.md", "src")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *wanted],
        cwd=folder, check=True, capture_output=True, text=True,
    )  # fmt: skip
    found = [Path(name) for name in listed.stdout.split("\0") if name]
    return [path for path in found if (folder / path).is_file()]


def copied(pyproject: Path, to: Path) -> Path:
    """A new folder with the sources of a distribution and the license, which setuptools takes along."""
    for path in sources(pyproject):
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(pyproject.parent / path, to / path)
    shutil.copy2(ROOT / "LICENSE", to / "LICENSE")
    return to


def build(out: Path) -> list[Path]:
    """Wheels of all distributions, in a folder. They are built with this environment's setuptools; no index is asked.

    Raises subprocess.CalledProcessError where one cannot be built."""
    with tempfile.TemporaryDirectory() as there:
        copies = [copied(pyproject, Path(there, pyproject.parent.name)) for pyproject in pyprojects()]
        pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
        subprocess.run([*pip, "-w", str(out), *map(str, copies)], check=True)
    return sorted(out.glob("*.whl"))


def install(wheels: list[Path], folder: Path, constraints: Path) -> Path:
    """The Python of a new environment that has the wheels, and of others what they require."""
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--no-compile", "-c", str(constraints)]
    # first and alone: anything else could pull another build of it
    subprocess.run([*pip, "torch"], check=True)
    # all in one command: a wheel that is named is taken, and none of its name is looked for in an index
    subprocess.run([*pip, *map(str, wheels)], check=True)
    return python


def try_out(python: Path, folder: Path) -> None:
    """List plugins, examine the machine, serve a few tokens. Raises subprocess.CalledProcessError where one fails."""
    command = str(python.with_name("fdasync"))
    for words in ([command, "plugins"], [command, "doctor"], [str(python), "-I", "-c", TEN_LINES]):
        subprocess.run(words, cwd=folder, check=True, timeout=600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the wheels; wheels that it has already are removed")
    parser.add_argument("--constraints", type=Path, default=Path("/dev/null"), help="versions of others' packages")
    options = parser.parse_args()
    for old in options.out.glob("*.whl"):
        old.unlink()
    wheels = build(options.out)
    with tempfile.TemporaryDirectory() as there:
        try_out(install(wheels, Path(there), options.constraints), Path(there))
    for wheel in wheels:
        print(wheel)


if __name__ == "__main__":
    main()
