"""Installs the plugin of a page of the docs in a folder, as a distribution that a process of its own finds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

from tests.support.outer import outer_environment
from tests.support.plugins import write_distribution

if TYPE_CHECKING:
    from pathlib import Path


def install(page: Path, folder: Path, module: str) -> None:
    """The page's first two snippets of Python are the plugin and its tests, its last one of TOML names entry points."""
    text = page.read_text()
    plugin, tests = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    *_, project = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    ((group, points),) = tomllib.loads(project)["project"]["entry-points"].items()
    write_distribution(folder, module, plugin, group, points)
    (folder / f"test_{module}.py").write_text(tests)


def output_of(folder: Path, *arguments: str) -> str:
    """What Python prints with these arguments where the folder's distribution is installed; it has to succeed."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=600, check=False,
        env=outer_environment(PYTHONPATH=path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_tests(folder: Path, module: str) -> str:
    """The output of the page's own tests."""
    own = ["-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-p", "no:asyncio"]
    return output_of(folder, *own, f"test_{module}.py")
