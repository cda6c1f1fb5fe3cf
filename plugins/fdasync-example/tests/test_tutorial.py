"""What the tutorial shows is what is there: every snippet is found, line by line, in the source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HOME = Path(__file__).parent.parent
TUTORIAL = (HOME.parent.parent / "docs" / "write-a-store.md").read_text()
SNIPPETS = re.findall(r"```(?:python|toml)\n(.*?)```", TUTORIAL, re.DOTALL)
SOURCES = [
    HOME / "src" / "fdasync_example" / "store.py",
    HOME / "tests" / "test_sqlite_store.py",
    HOME / "pyproject.toml",
    HOME / "README.md",
]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_is_the_source(snippet: str) -> None:
    assert any(snippet in path.read_text() for path in SOURCES), snippet


def test_the_test_it_promises_is_short() -> None:
    suite = SOURCES[1].read_text()
    assert len(suite.splitlines()) <= 45
    assert any("class TestSqlite" in snippet for snippet in SNIPPETS)
    assert len(SNIPPETS) > 10
