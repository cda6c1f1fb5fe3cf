"""The public surface is what `tests/public.txt` says: a change of it is a line in CHANGELOG.md."""

from __future__ import annotations

import importlib
from pathlib import Path

import fdasync
from tests.support.public import surface

LISTED = (Path(__file__).parent / "public.txt").read_text().split()


def test_what_is_public_is_listed() -> None:
    found = surface()
    told = {"no longer there": set(LISTED) - set(found), "not listed": set(found) - set(LISTED)}
    assert told == {"no longer there": set(), "not listed": set()}, (
        "say it in CHANGELOG.md, and run: python -m tests.support.public > tests/public.txt"
    )
    assert sorted(LISTED) == LISTED


def test_everything_that_is_listed_can_be_imported() -> None:
    for one in LISTED:
        module, _, name = one.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if str(error.name).startswith("fdasync"):
                raise
            # of an extra that is not installed
            continue
        assert found is not None, one


def test_the_front_door_is_small() -> None:
    assert len(fdasync.__all__) <= 60
    assert set(fdasync.__all__) == set(fdasync._HOMES)
