"""docs/drafting.md as a distribution: its drafter, its entry point and its tests, as they stand there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fdasync.drafting import Speculation
from fdasync.engine.config import EngineConfig
from tests.support.page_plugin import install, run_tests

PAGE = Path(__file__).parents[2] / "docs" / "drafting.md"


@pytest.mark.ci
def test_the_drafter_of_the_page_installs_and_passes_its_tests(tmp_path: Path) -> None:
    settings, mtp, _ = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert EngineConfig.from_mapping(tomllib.loads(settings)).speculation == Speculation(drafter="ngram", max_tokens=3)
    own = EngineConfig.from_mapping(tomllib.loads(mtp))
    assert own.runner_config == {"mtp": True}
    assert own.speculation == Speculation(drafter="none", max_tokens=3)
    install(PAGE, tmp_path, "counting")
    assert "10 passed" in run_tests(tmp_path, "counting")
