"""What all commands of this room share: options, and how a run begins.

Knows no model and no figure. A command imports what imports Triton when its run has begun, for a rehearsal is in
Triton's interpreter. Used by all commands of `benchmarks/gpu`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from benchmarks.lib import arguments
from benchmarks.lib.parts import Parts
from benchmarks.lib.report import REHEARSED, Report

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


def parser_of(doc: str | None) -> arguments.Parser:
    """A parser with the options that every command of this room has."""
    parser = arguments.parser_of(doc)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU in Triton's interpreter")
    return parser


def sizes_of(text: str) -> tuple[int, ...]:
    """Numbers of running sequences, "64,1", as they rise."""
    return tuple(sorted({arguments.at_least_one(size) for size in text.split(",")}))


def begin(
    title: str, args: argparse.Namespace, aims: Mapping[str, float] | None = None, *, gpus: int = 1, **facts: Any
) -> Parts:
    """A run that has done nothing yet. `aims`: by figure, of a run that is no rehearsal; `facts`: for the conditions.

    Refuses to where there are fewer GPUs than that. A rehearsal needs none, and its figures are void.
    """
    if args.tiny:
        # before triton is first imported
        os.environ["TRITON_INTERPRET"] = "1"
        facts["void"] = REHEARSED
    report = Report(title, None if args.tiny else aims, gpus=0 if args.tiny else gpus, without="--tiny")
    report.conditions |= facts
    return Parts(report, args.json_path)
