"""docs/write-a-policy.md as a distribution: its class, its entry point and its tests, as they stand there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.page_plugin import install, run_tests

PAGE = Path(__file__).parents[2] / "docs" / "write-a-policy.md"


@pytest.mark.ci
def test_the_policy_of_the_page_installs_and_passes_its_tests(tmp_path: Path) -> None:
    install(PAGE, tmp_path, "head_start")
    assert "5 passed" in run_tests(tmp_path, "head_start")
