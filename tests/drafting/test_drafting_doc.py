"""docs/drafting.md as a distribution: its drafter, its entry point and its tests, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fdasync.drafting import Speculation
from fdasync.engine.config import EngineConfig
from tests.support.outer import outer_environment

PAGE = Path(__file__).parents[2] / "docs" / "drafting.md"


@pytest.mark.ci
def test_the_drafter_of_the_page_installs_and_passes_its_tests(tmp_path: Path) -> None:
    text = PAGE.read_text()
    drafter, tests = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    settings, mtp, project = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert EngineConfig.from_mapping(tomllib.loads(settings)).speculation == Speculation(drafter="ngram", max_tokens=3)
    own = EngineConfig.from_mapping(tomllib.loads(mtp))
    assert own.runner_config == {"mtp": True}
    assert own.speculation == Speculation(drafter="none", max_tokens=3)
    (tmp_path / "counting.py").write_text(drafter)
    (tmp_path / "test_counting.py").write_text(tests)
    info = tmp_path / "counting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
    ((group, points),) = tomllib.loads(project)["project"]["entry-points"].items()
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = "-m pytest -q -W error -p no:cacheprovider -p no:asyncio test_counting.py"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
        env=outer_environment(PYTHONPATH=path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 passed" in done.stdout
