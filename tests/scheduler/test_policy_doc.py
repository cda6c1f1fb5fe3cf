"""docs/write-a-policy.md as a distribution: its class, its entry point and its tests, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.outer import outer_environment

PAGE = Path(__file__).parents[2] / "docs" / "write-a-policy.md"


@pytest.mark.ci
def test_the_policy_of_the_page_installs_and_passes_its_tests(tmp_path: Path) -> None:
    text = PAGE.read_text()
    policy, tests = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (project,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "head_start.py").write_text(policy)
    (tmp_path / "test_head_start.py").write_text(tests)
    info = tmp_path / "head_start-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: head-start\nVersion: 1.0\n")
    ((group, points),) = tomllib.loads(project)["project"]["entry-points"].items()
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = "-m pytest -q -W error -p no:cacheprovider -p no:asyncio test_head_start.py"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
        env=outer_environment(PYTHONPATH=path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
