"""What the tutorials show is what is there: every snippet is found, line by line, in the source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HOME = Path(__file__).parent.parent
# of each tutorial: where its snippets are from, the test that it promises to be short first
SOURCES = {
    "write-a-store.md": ["tests/test_sqlite_store.py", "src/fdasync_example/store.py", "pyproject.toml", "README.md"],
    "write-a-transport.md": ["tests/test_unix_transport.py", "src/fdasync_example/transport.py", "pyproject.toml"],
    "write-a-runner.md": ["tests/test_tiny_moe.py", "src/fdasync_example/runner.py", "pyproject.toml", "README.md"],
}


def snippets(name: str) -> list[str]:
    text = (HOME.parent.parent / "docs" / name).read_text()
    return re.findall(r"```(?:python|toml)\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize(
    ("name", "number"), [(name, place) for name in SOURCES for place in range(len(snippets(name)))]
)
def test_a_snippet_is_the_source(name: str, number: int) -> None:
    snippet = snippets(name)[number]
    assert any(snippet in (HOME / path).read_text() for path in SOURCES[name]), snippet


@pytest.mark.parametrize(
    ("name", "test"),
    [("write-a-store.md", "TestSqlite"), ("write-a-transport.md", "TestUnix"), ("write-a-runner.md", "TestTinyMoe")],
)
def test_the_test_it_promises_is_short(name: str, test: str) -> None:
    suite = (HOME / SOURCES[name][0]).read_text()
    assert len(suite.splitlines()) <= 45
    assert any(f"class {test}" in snippet for snippet in snippets(name))
    assert len(snippets(name)) > 10
