"""Random schedules over pauses, updates of all kinds, sleeps and wakes: after each call what a model says must hold.

The model and who plays it are in `tests/support/weights_play`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fdasync.testing import no_leaks, run_sim
from tests.support.weights_play.model import MOST_DELTAS
from tests.support.weights_play.play import Play, write_folders

if TYPE_CHECKING:
    from pathlib import Path

_MOVES = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    write_folders(root)
    return root


@pytest.fixture(autouse=True)
def few_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fdasync.engine.weights.state.MOST_DELTAS", MOST_DELTAS)


def play(seed: int, folders: Path) -> None:
    with no_leaks():
        one = Play(seed, folders)
        try:
            run_sim(one.play(_MOVES))
        except BaseException as error:
            error.add_note(f"seed {seed}: {'; '.join(one.said)}")
            raise


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("seed", range(25))
def test_what_the_model_says_holds_after_every_call(seed: int, folders: Path) -> None:
    play(seed, folders)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(4))
def test_and_for_hundreds_of_seeds(part: int, folders: Path) -> None:
    for seed in range(100 + part, 900, 4):
        play(seed, folders)
