"""The play of families: eight of the catalogue, each in two ways; all of it in every way where time allows; the
judge finds what is wrong."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from fdasync_trainer.replay import force
from fdasync_transformers.model import moe_layers
from fdasync_transformers.start import open_model
from fdasync_transformers.tiny.families import FAMILIES, TinyFamily

from tests.nightly.families import families
from tests.nightly.families import play as family_play
from tests.nightly.families.judge import FamilyJudge
from tests.nightly.families.play import Outcome, play_family
from tests.nightly.families.run import play_all
from tests.nightly.families.table import named, write_table
from tests.nightly.shapes.judge import with_rows
from tests.support.imports import HOME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.gpu.judge import Answer
    from benchmarks.gpu.plays import Play, Played

pytestmark = pytest.mark.ci

# the most different of those that are served
EIGHT = (
    "qwen3_moe", "glm4_moe", "deepseek_v3_fp8", "gpt_oss", "minimax_m2", "longcat_flash", "llama4_text",
    "mimo_v2_flash",
)  # fmt: skip
README = HOME.parent / "plugins/fdasync-transformers/README.md"


@pytest.fixture
def no_blocking() -> None:
    """In place of the one that looks: runners of this process and references compute on the test's own loop."""


# each way but the plain one with two of them: all of them in every way take a minute
WAYS = ("tight", "store", "pd", "replay")
QUICK = [(name, ("plain", WAYS[number % len(WAYS)])) for number, name in enumerate(EIGHT)]
# keys of indexers are a part of every block
# states go to stores and to decode instances
QUICK += [("lfm2_moe", ("store", "pd"))]
QUICK += [("deepseek_v32", ("tight", "store")), ("glm_moe_dsa", ("pd", "replay"))]
WHOLE = [pytest.param(name, ("plain", *WAYS), marks=pytest.mark.nightly) for name in families.PLAYED]


@pytest.mark.parametrize(("name", "cells"), [*QUICK, *WHOLE])
def test_a_family_is_served_exactly_or_refused_for_a_true_reason(
    tmp_path: Path, name: str, cells: tuple[str, ...]
) -> None:
    assert set(family_play.CELLS) == {"plain", *WAYS}
    outcome, entry = play_family(name, tmp_path, cells), FAMILIES[name]
    assert outcome.false_reason(entry) == ""
    assert outcome.failed == {}
    assert (outcome.rows_wrong, outcome.tokens_wrong, outcome.worst) == (0, 0, [])
    assert outcome.served == (not entry.refused)
    if outcome.served:
        judged = len(set(cells) - {"replay"})
        assert outcome.counts["exact_rows"] > 250 * judged
        assert outcome.counts["exact_tokens"] > 25 * judged
        for cell, book in (
            ("tight", "preemptions"),
            ("tight", "swapped_in_blocks"),
            ("store", "fetched_blocks"),
            ("pd", "received_blocks"),
        ):
            assert cell not in cells or outcome.books[cell][book] > 0
        if "replay" in cells:
            assert outcome.kl_off is not None
            assert entry.replay_refused or outcome.kl_on is not None
            assert outcome.kl_on is None or outcome.kl_on < outcome.kl_off


def test_a_family_that_is_not_served_is_refused_for_its_reason(tmp_path: Path) -> None:
    outcome = play_family("jamba", tmp_path)
    assert not outcome.served
    assert outcome.false_reason(FAMILIES["jamba"]) == ""


# -- the judge finds what is wrong ----------------------------------------------------------------------


def played_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Answer], Answer], name: str = "glm4_moe"
) -> Outcome:
    """The plain cell, with one answer changed before it is judged."""
    honest = family_play.plain

    async def dishonest(play: Play) -> Played:
        played = await honest(play)
        number = next(number for number, answer in enumerate(played.answers) if answer.greedy)
        played.answers[number] = change(played.answers[number])
        return played

    monkeypatch.setitem(family_play.CELLS, "plain", dishonest)
    return play_family(name, tmp_path, ("plain",))


def test_a_wrong_row_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(answer: Answer) -> Answer:
        rows = answer.routing.array.copy()
        # of the last layer, so that no other row hangs on it
        rows[2, -1, 0] = next(expert for expert in range(8) if expert not in rows[2, -1])
        return with_rows(answer, rows)

    outcome = played_with(tmp_path, monkeypatch, change)
    assert outcome.rows_wrong == 1
    assert "position=2" in outcome.worst[0]
    assert families.figures_of([outcome])["rows_wrong"] == 1
    assert not families.is_right(families.figures_of([outcome]))


def test_missing_rows_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = played_with(tmp_path, monkeypatch, lambda answer: with_rows(answer, answer.routing.array[:-2]))
    assert outcome.rows_wrong == 2 * 3


def test_a_layer_that_runner_and_verify_overlook_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = moe_layers.find_experts
    for module in (moe_layers, open_model, force):
        monkeypatch.setattr(module, "find_experts", lambda model: dict(list(honest(model).items())[:-1]))
    outcome = play_family("mixtral", tmp_path, ("plain",))
    assert outcome.rows_wrong >= outcome.counts["exact_rows"] / 3 > 0
    assert any("layers [3] have experts and no rows" in line for line in outcome.worst)
    assert not families.is_right(families.figures_of([outcome]))


def test_a_wrong_token_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(answer: Answer) -> Answer:
        return replace(answer, tokens=(*answer.tokens[:-1], (answer.tokens[-1] + 1) % 200))

    outcome = played_with(tmp_path, monkeypatch, change)
    assert (outcome.tokens_wrong, outcome.rows_wrong) == (1, 0)
    assert families.figures_of([outcome])["tokens_wrong"] == 1
    assert not families.is_right(families.figures_of([outcome]))


def test_a_token_that_generate_does_not_give_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = FamilyJudge._generate

    def other(self: FamilyJudge, prompt: tuple[int, ...], count: int) -> list[int]:
        tokens = honest(self, prompt, count)
        tokens[1] = (tokens[1] + 1) % 200
        return tokens

    monkeypatch.setattr(FamilyJudge, "_generate", other)
    outcome = play_family("qwen3_moe", tmp_path, ("plain",))
    assert outcome.tokens_wrong > 2
    assert "generate" in outcome.worst[0]


def test_a_cell_that_raises_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def void(_play: Play) -> Played:
        raise RuntimeError("nothing was preempted")

    monkeypatch.setitem(family_play.CELLS, "tight", void)
    outcome = play_family("qwen3_moe", tmp_path, ("tight",))
    assert outcome.failed == {"tight": "RuntimeError: nothing was preempted"}
    assert families.figures_of([outcome])["cells_failed"] == 1
    assert not families.is_right(families.figures_of([outcome]))


SERVED = TinyFamily("", {})
INDEXED = TinyFamily("", {}, ("indexer",))
REFUSED = {"reason": "layer 2 picks positions by an Indexer", "error": "UnsupportedModel"}


@pytest.mark.parametrize(
    ("entry", "told", "false"),
    [
        (SERVED, {"served": True}, ""),
        (SERVED, REFUSED, "should be served"),
        (INDEXED, REFUSED, ""),
        (INDEXED, {**REFUSED, "reason": "'MaskNote' object is not subscriptable"}, "does not say indexer"),
        (INDEXED, {**REFUSED, "error": "CheckpointError"}, "CheckpointError"),
        (INDEXED, {"served": True}, "it is served"),
        (SERVED, {"served": True, "replay_reason": "its selection was seen 0 times"}, "replay"),
        (
            msgspec.structs.replace(SERVED, replay_refused=("no ids",)),
            {"served": True, "kl_on": 0.1},
            "its replay runs",
        ),
        (
            msgspec.structs.replace(SERVED, replay_refused=("no ids",)),
            {"served": True, "replay_reason": "its experts take no ids"},
            "",
        ),
    ],
)
def test_a_false_reason_is_found(entry: TinyFamily, told: dict[str, Any], false: str) -> None:
    found = Outcome(name="x", **told).false_reason(entry)
    assert false in found
    assert bool(found) == bool(false)


def test_false_reasons_are_counted_and_variants_count_with_their_family() -> None:
    outcomes = [
        Outcome(name="deepseek_v3", served=True),
        Outcome(name="moonlight", served=True),
        Outcome(name="minimax_m3_sparse", reason="sparse attention with an indexer", error="UnsupportedModel"),
        Outcome(name="minimax_m3_vl_text", served=True),
        Outcome(name="jamba", reason="cannot go on from a recurrent state", error="UnsupportedModel"),
        Outcome(name="mixtral", reason="something", error="UnsupportedModel"),
    ]
    figures = families.figures_of(outcomes)
    assert (figures["families_served"], figures["families_refused"], figures["false_reasons"]) == (2, 2, 1)
    assert not families.is_right(figures)
    assert families.is_right(families.figures_of(outcomes[:-1]))


# -- processes and the table ----------------------------------------------------------------------------


def never_ending(name: str, folder: Path) -> Outcome:
    (folder / "seen").touch()
    if name == "mixtral":
        os._exit(7)
    if name == "olmoe":
        threading.Event().wait()
    if name == "phimoe":
        raise RuntimeError("of the play")
    return Outcome(name=name, served=True)


def test_a_crash_or_a_hang_does_not_end_the_run() -> None:
    names = ["mixtral", "olmoe", "phimoe", "qwen3_moe"]
    outcomes = {one.name: one for one, _ in play_all(names, limit_s=5.0, play=never_ending)}
    assert outcomes["mixtral"].failed == {"process": "the process ended with 7"}
    assert outcomes["olmoe"].failed == {"process": "not done after 5.0 s"}
    assert outcomes["phimoe"].failed == {"process": "the process ended with 1"}
    assert outcomes["qwen3_moe"].served


def test_the_table_of_the_readme_names_every_family() -> None:
    assert named(README.read_text()) == list(families.PLAYED)


def test_a_table_stands_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    outcomes = [
        Outcome(name="mixtral", reason="a | b\nc", error="UnsupportedModel"),
        Outcome(name="afmoe", served=True, counts={"exact_tokens": 1234, "exact_rows": 5, "wrong_rows": 2}, kl_off=0.5),
    ]
    write_table(page, outcomes)
    page.write_text("# Before\n" + page.read_text() + "after\n")
    write_table(page, outcomes)
    text = page.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("after\n")
    assert named(text) == ["afmoe", "mixtral"]
    assert "| served | 1,234 | 5 | 0 | 2 | 5.0e-01 |  |" in text
    assert "| refused: a / b c |" in text
    write_table(page, [Outcome(name="beam", served=True), outcomes[0]])
    assert named(page.read_text()) == ["afmoe", "beam", "mixtral"]
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="lacks"):
        write_table(page, outcomes)
