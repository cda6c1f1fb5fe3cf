"""The table of families, as Markdown, and its place in a page. Computes nothing. Used by `families.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync_transformers.tiny.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.nightly.families.play import Outcome

BEGIN = "<!-- families: written by `python -m tests.nightly families --table` -->"
END = "<!-- families: end -->"
_HEAD = (
    "| family | what its config hits | result | tokens | rows exact | tied | wrong | KL without replay | with |",
    "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
)


def write_table(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Put rows into the table between the markers of a page, in the catalogue's order; rows of other entries stay. A
    file that does not exist is made of the table alone.

    Raises SystemExit for a page without both markers.
    """
    text = path.read_text() if path.exists() else f"{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path} lacks {BEGIN} or {END}")
    rows = {line.split("|")[1].strip(): line for line in rest.partition(END)[0].splitlines() if line.startswith("|")}
    rows |= {one.name: _row(one) for one in outcomes}
    table = "\n".join((*_HEAD, *[rows[name] for name in FAMILIES if name in rows]))
    path.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def named(page: str) -> list[str]:
    """Families that the table of a page names, in order."""
    body = page.partition(BEGIN)[2].partition(END)[0]
    cells = [line.split("|")[1].strip() for line in body.splitlines() if line.startswith("|")]
    return cells[2:]


def _row(one: Outcome) -> str:
    counts, nothing = one.counts, ("", "", "", "")
    if one.failed:
        result = "failed: " + "; ".join(f"{cell}: {problem}" for cell, problem in one.failed.items())
    elif one.served:
        result = "served"
    else:
        result = f"refused: {one.reason}"
    tokens = sum(counts.get(f"{kind}_tokens", 0) for kind in ("exact", "tied", "wrong"))
    tied, wrong = (counts.get(f"{kind}_rows", 0) + counts.get(f"{kind}_tokens", 0) for kind in ("tied", "wrong"))
    found = (f"{tokens:,}", f"{counts.get('exact_rows', 0):,}", str(tied), str(wrong + counts.get("missing_rows", 0)))
    kl = [f"{value:.1e}" if value is not None else "" for value in (one.kl_off, one.kl_on)]
    if one.replay_reason:
        kl[1] = "refused"
    cells = (one.name, FAMILIES[one.name].hits, _plain(result), *(found if counts else nothing), *kl)
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """On one line, and no cell's end."""
    return " ".join(text.replace("|", "/").split())
