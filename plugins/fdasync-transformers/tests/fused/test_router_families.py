"""Families of the catalogue whose routers are fused, or a note says why; `test_each_family.py` plays the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checks.routers import FORMS, PLAYED, fused_or_says_why
from fdasync_transformers.fused import router_kinds
from fdasync_transformers.fused.known import ROUTERS
from made import Made

if TYPE_CHECKING:
    from pathlib import Path

# of which the catalogue has no family
UNPLAYED = {router_kinds.MISTRAL_LARGE}


def test_every_form_has_a_family() -> None:
    forms = {form for form in ROUTERS.values() if not isinstance(form, str)}
    assert {ROUTERS[name] for name in FORMS.values()} == forms - UNPLAYED


@pytest.mark.ci(after=5)
@pytest.mark.parametrize("family", PLAYED.by_day)
def test_a_family_is_fused_or_says_why(tmp_path: Path, family: str) -> None:
    fused_or_says_why(Made(family, tmp_path))
