"""The pages and the reference build without a network and without a warning: no link of theirs leads nowhere."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.public import surface

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(find_spec("sphinx") is None, reason="Sphinx is not installed: make docs installs it"),
]


def build(source: Path, to: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` runs, with the pages of a folder."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", str(ROOT / "docs")]
    return subprocess.run(
        [*command, "-d", str(to / ".doctrees"), str(source), str(to)],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def test_the_reference_builds_and_has_every_public_name(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    shown = (tmp_path / "docs" / "reference" / "api.html").read_text()
    assert [name for name in surface() if name.startswith("fdasync.errors.") and f'id="{name}"' not in shown] == []
    for name in ("fdasync.Engine", "fdasync.Engine.generate", "fdasync.SamplingParams", "fdasync_http.HttpConfig"):
        assert f'id="{name}"' in shown, name


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A page\n\n[no such page](gone.md), [nor heading](#none)\n")
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode != 0
    assert "'gone.md'" in done.stderr
    assert "'none'" in done.stderr
