"""Every family of models that the library knows, served from tiny random checkpoints, and checked token by token.

The families are those of `fdasync_transformers.tiny.families`: text models, text halves of multimodal ones, and
quantised forms. Each is played in a process of its own (`play.py` has the cells: a plain mix, preemption, a
store, prefill and decode instances, replay in a trainer). Tokens are compared with the library's `generate`, rows with
the routers of a separate plain forward pass, in float32: exact, tied (within 1e-5 of the boundary) or wrong.

    families_served, families_refused   variants, wrappers and quantised forms count with their family, which is served
                                        if one of them is
    rows_wrong, tokens_wrong            over all cells; missing rows are wrong
    false_reasons                       refusals that the catalogue does not expect, or that lack its words; families
                                        that are served and should not be
    cells_failed                        cells that raised, or whose process crashed or hung

`--table FILE` writes rows of the Markdown table between the markers of a page: that of the plugin's README. Rows of
entries that were not played stay. The exit status is 0 where nothing is wrong, false or failed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from fdasync_transformers.tiny.families import FAMILIES, family_of

from benchmarks.lib.arguments import above_zero, at_least_one, names_of, parser_of, writable
from benchmarks.lib.report import Report
from tests.nightly.families.run import play_all
from tests.nightly.families.table import write_table

_AIMS = {"families_served": 54, "rows_wrong": 0, "tokens_wrong": 0, "false_reasons": 0, "cells_failed": 0}
if TYPE_CHECKING:
    from tests.nightly.families.play import Outcome

PLAYED = tuple(name for name, entry in FAMILIES.items() if not entry.dense)


def figures_of(outcomes: list[Outcome]) -> dict[str, float]:
    """The figures of a run."""
    served = {family_of(one.name) for one in outcomes if one.served}
    return {
        "families_served": len(served),
        "families_refused": len({family_of(one.name) for one in outcomes} - served),
        "rows_wrong": sum(one.rows_wrong for one in outcomes),
        "tokens_wrong": sum(one.tokens_wrong for one in outcomes),
        "false_reasons": sum(bool(one.false_reason(FAMILIES[one.name])) for one in outcomes),
        "cells_failed": sum(len(one.failed) for one in outcomes),
        "entries": len(outcomes),
        "tokens": sum(count for one in outcomes for name, count in one.counts.items() if name.endswith("_tokens")),
        "rows": sum(count for one in outcomes for name, count in one.counts.items() if name.endswith("_rows")),
        "rows_tied": sum(one.counts.get("tied_rows", 0) for one in outcomes),
        "tokens_tied": sum(one.counts.get("tied_tokens", 0) for one in outcomes),
    }


def is_right(figures: dict[str, float]) -> bool:
    """Whether nothing is wrong, false or failed."""
    return not any(figures[name] for name in ("rows_wrong", "tokens_wrong", "false_reasons", "cells_failed"))


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--families", type=names_of(PLAYED), default=set(PLAYED), help='entries of the catalogue, "a,b" (default: all)'
    )
    parser.add_argument("--jobs", type=at_least_one, default=2, help="processes at a time")
    parser.add_argument("--limit", type=above_zero, default=180.0, help="seconds for one entry")
    parser.add_argument("--table", type=writable, help="write the rows of these entries into the table of this page")
    options = parser.parse_args(arguments)
    names = tuple(name for name in PLAYED if name in options.families)
    report = Report("families of tiny checkpoints")
    began = time.perf_counter()
    outcomes: list[Outcome] = []
    for outcome, seconds in play_all(names, jobs=options.jobs, limit_s=options.limit):
        outcomes.append(outcome)
        print(f"[{time.perf_counter() - began:5.0f} s] {_line(outcome)} ({seconds:.1f} s)", flush=True)
        for line in outcome.worst[:3]:
            print(f"    {line}", flush=True)
    for name, figure in figures_of(outcomes).items():
        report.add(name, [figure], aim=_AIMS.get(name))
    report.conditions |= {
        "load": round(os.getloadavg()[0], 1),
        "seconds": round(time.perf_counter() - began, 1),
        "families": {
            one.name: {**msgspec.to_builtins(one), "false_reason": one.false_reason(FAMILIES[one.name])}
            for one in outcomes
        },
    }
    report.finish(options.json_path)
    if options.table:
        write_table(Path(options.table), outcomes)
    return 0 if is_right(report.figures) else 1


def _line(one: Outcome) -> str:
    problems = [f"{cell} FAILED: {problem}" for cell, problem in one.failed.items()]
    if false := one.false_reason(FAMILIES[one.name]):
        problems.append(f"FALSE: {false}")
    counts = " ".join(f"{name}={count}" for name, count in one.counts.items() if count)
    told = f"served {counts}" if one.served else f"refused: {one.reason}"
    return "; ".join([f"{one.name}: {told}", *problems])
