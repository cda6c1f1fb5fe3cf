"""docs/testing.md is a test file as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.outer import outer_environment

PAGE = Path(__file__).parent.parent / "docs" / "testing.md"


@pytest.mark.ci
def test_its_snippets_are_tests_that_pass(tmp_path: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "test_page.py").write_text("\n\n".join(snippets))
    command = "-m pytest -q -W error -p no:cacheprovider -p no:asyncio test_page.py"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False, env=outer_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
