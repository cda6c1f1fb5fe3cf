"""The play `same_bits`, for some tokens of each family: a trainer has all bits of a rollout. Where it has not, the play
fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.nightly import same_bits

if TYPE_CHECKING:
    import argparse

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
# enough for preemption, prefix hits, an update and a hand-over
TOKENS = 600


@pytest.mark.nightly
@pytest.mark.parametrize("family", same_bits.FAMILIES)
def test_a_trainer_has_the_bits_of_a_rollout(family: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.nightly", "same_bits", "--families", family, "--tokens", str(TOKENS)]
    done = subprocess.run(
        [*command, "--json", str(out)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=1100
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    found = report["conditions"][family]
    assert report["figures"]["differing"] == 0
    assert report["figures"]["tokens"] + found["crossed_tokens"] >= TOKENS
    assert found["not_covered"] == []


@pytest.mark.parametrize("differing", [1, 0])
def test_a_log_prob_that_differs_or_is_missing_fails_the_play(
    differing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verified(family: str, _folder: Path, _options: argparse.Namespace) -> dict[str, Any]:
        right = {"ok": True, "tokens": 9, "differing": 0, **dict.fromkeys(same_bits.KEPT, 9)}
        return right if family == "mixtral" else {**right, "ok": False, "differing": differing}

    out = tmp_path / "figures.json"
    monkeypatch.setattr(same_bits, "verified", verified)
    monkeypatch.setattr(sys, "argv", ["same_bits", "--families", "mixtral,olmoe", "--json", str(out)])
    with pytest.raises(SystemExit, match=f"olmoe: {differing} of 18"):
        same_bits.main()
    assert json.loads(out.read_text())["figures"]["differing"] == differing
    monkeypatch.setattr(sys, "argv", ["same_bits", "--families", "mixtral"])
    same_bits.main()
