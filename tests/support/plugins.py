"""Installs plugins that a test has as source, as a distribution that this process and its children find."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def install_runners(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, runners: dict[str, str]) -> None:
    """Make the module `fdasync_bad` of `source`, and entry points from `runners`: name to "module:class"."""
    install_plugin(folder, monkeypatch, source, "fdasync.runners", runners)


def install_plugin(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, group: str, plugins: dict[str, str]
) -> None:
    """The same for the entry points of any group."""
    write_distribution(folder, "fdasync_bad", textwrap.dedent(source), group, plugins)
    # the module of another test in this process has the same name
    monkeypatch.delitem(sys.modules, "fdasync_bad", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def write_distribution(folder: Path, module: str, source: str, group: str, plugins: dict[str, str]) -> None:
    """A module and its entry points, for processes that have the folder in their path."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n")
    points = "".join(f"{name} = {where}\n" for name, where in plugins.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{points}")
