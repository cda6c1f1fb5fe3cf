"""Replay in a family of each structure; `test_each_family.py` of the transformers plugin plays the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import replay_checks as checks
from made import Made

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.ci(after=6)
@pytest.mark.parametrize("family", checks.PLAYED.by_day)
def test_replaying_the_live_choice_changes_nothing(tmp_path: Path, family: str) -> None:
    checks.the_live_choice_changes_nothing(Made(family, tmp_path))


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("family", checks.PLAYED.by_day)
def test_random_rows_get_live_weights_and_true_gradients(tmp_path: Path, family: str) -> None:
    checks.random_rows_get_live_weights_and_true_gradients(Made(family, tmp_path))


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("family", checks.PLAYED.by_day)
def test_checkpointing_is_bit_equal_even_after_the_context(tmp_path: Path, family: str) -> None:
    checks.checkpointing_is_bit_equal(Made(family, tmp_path))


@pytest.mark.parametrize("family", checks.PLAYED.by_day)
def test_rows_and_live_choices_mix_in_one_router_call(tmp_path: Path, family: str) -> None:
    checks.rows_and_live_choices_mix(Made(family, tmp_path))


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("family", checks.PLAYED.by_day)
def test_bfloat16(tmp_path: Path, family: str) -> None:
    checks.bfloat16_is_bit_equal(Made(family, tmp_path))
