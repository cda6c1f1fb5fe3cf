"""What is fused in each family of the catalogue; `test_each_family.py` plays the families that are not here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checks.operations import BY_DAY, EXPECTED, answers_as_before
from fdasync_transformers.tiny.families import FAMILIES
from made import Made
from structures import in_turn

if TYPE_CHECKING:
    from pathlib import Path


def test_every_family_is_in_the_table() -> None:
    assert set(EXPECTED) == {name for name, entry in FAMILIES.items() if not entry.quantised}


@pytest.mark.parametrize("family", in_turn(BY_DAY, {"beam", "llama4_text"}, in_ci=BY_DAY))
def test_a_fused_family_answers_as_before(tmp_path: Path, family: str) -> None:
    answers_as_before(Made(family, tmp_path))
