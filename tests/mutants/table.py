"""The table of what rings of tests killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.mutants.areas import AREAS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.mutants.mutant import Mutant
    from tests.mutants.run import Result, Ring


def table(rings: list[Ring]) -> str:
    """In Markdown: area by ring, and what no ring killed. Each ring counts with those before it, so that one that ran
    only what is left after another's need not repeat it."""
    mutants = {result.mutant.number: result.mutant for ring in rings for result in ring.results}
    killed: list[set[int]] = []
    for ring in rings:
        before = killed[-1] if killed else set()
        killed.append(before | {result.mutant.number for result in ring.results if result.state == "killed"})
    heads = [f"`{ring.marks}`" + (" too" if place else "") for place, ring in enumerate(rings)]
    lines = [_row(["area", "drawn", *heads]), _row(["---"] * (2 + len(rings)))]
    for area in AREAS:
        drawn = {number for number, mutant in mutants.items() if mutant.area == area}
        if drawn:
            lines.append(_row([area, len(drawn), *[len(drawn & one) for one in killed]]))
    lines += [_row(["all", len(mutants), *map(len, killed)]), ""]
    alive = [mutants[number] for number in sorted(mutants.keys() - killed[-1])]
    for mutant in alive:
        results = [result for ring in rings for result in ring.results if result.mutant.number == mutant.number]
        lines += _alive(mutant, ", ".join(map(_told, results)))
    return "\n".join(lines)


def _told(result: Result) -> str:
    left = f", {result.num_left} not tried" if result.num_left else ""
    return f"{result.state} ({result.num_run} tests{left})"


def _alive(mutant: Mutant, states: str) -> list[str]:
    return [
        f"{mutant.number}. `{mutant.path}:{mutant.line}` ({mutant.scope or 'module'}), {mutant.operator}: {states}",
        "   ```diff",
        *[f"   -{line}" for line in mutant.before.split("\n")],
        *[f"   +{line}" for line in mutant.after.split("\n")],
        "   ```",
    ]


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
