"""A plugin of pytest: tells coverage which test runs, in each process of the tests.

Loaded by `map.py`. Children that a test starts know it without: `coverage.ini` names them by what pytest keeps in the
environment.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _within(item, "setup"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _within(item, "call"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _within(item, "teardown"))


def _within(item: pytest.Item, when: str) -> Generator[None, object, object]:
    measuring: Any = sys.modules.get("coverage")
    current = measuring and measuring.Coverage.current()
    if not current:
        return (yield)
    # as pytest writes it in the environment
    current.switch_context(f"{item.nodeid} ({when})")
    try:
        return (yield)
    finally:
        current.switch_context("")
