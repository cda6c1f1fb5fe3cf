"""Families of the catalogue whose routers are fused, or a note says why; `test_each_family.py` plays the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checks.routers import FORMS, PLAYED, fused_or_says_why
from fdasync_transformers.fused import router_kinds
from made import Made

if TYPE_CHECKING:
    from pathlib import Path

# of which the catalogue has no family
UNPLAYED = {router_kinds._mistral_large}


def test_every_form_has_a_family() -> None:
    assert {router_kinds._KINDS[name] for name in FORMS.values()} == router_kinds._FORMS.keys() - UNPLAYED


@pytest.mark.ci(after=5)
@pytest.mark.parametrize("family", PLAYED.by_day)
def test_a_family_is_fused_or_says_why(tmp_path: Path, family: str) -> None:
    fused_or_says_why(Made(family, tmp_path))
