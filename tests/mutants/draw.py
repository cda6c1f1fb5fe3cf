"""Draws mutants of a tree by operator and seed, spread evenly over the areas."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from typing import TYPE_CHECKING

from tests.mutants.areas import AREAS, sources
from tests.mutants.mutant import Mutant, NotFound, around, compiles, scope_at
from tests.mutants.sites import OPERATORS, Site, defaults_of, find_sites

if TYPE_CHECKING:
    from pathlib import Path

Places = dict[tuple[str, str], list[tuple[str, Site]]]


def draw(root: Path, seed: int, count: int) -> list[Mutant]:
    """`count` mutants, fewer where the tree has no more. First the operator is drawn, so that the rare ones appear as
    often as the others, then the area, then the place. The same seed and tree give the same mutants."""
    chance = random.Random(seed)
    places = _places(root)
    most = -(-count // len(AREAS))
    drawn: list[Mutant] = []
    by_area = dict.fromkeys(AREAS, 0)
    while len(drawn) < count:
        open_areas = [area for area in AREAS if by_area[area] < most]
        if not any(places.get((operator, area)) for operator in OPERATORS for area in open_areas):
            break
        operator = chance.choice(OPERATORS)
        open_areas = [area for area in open_areas if places.get((operator, area))]
        if not open_areas:
            continue
        fewest = min(by_area[area] for area in open_areas)
        area = chance.choice([area for area in open_areas if by_area[area] == fewest])
        left = places[operator, area]
        path, site = left.pop(chance.randrange(len(left)))
        mutant = _mutant(root, len(drawn) + 1, area, path, site)
        if mutant is not None:
            drawn.append(mutant)
            by_area[area] += 1
    return drawn


def _places(root: Path) -> Places:
    by_area = {area: {path: (root / path).read_bytes() for path in sources(root, area)} for area in AREAS}
    defaults = defaults_of(ast.parse(source) for files in by_area.values() for source in files.values())
    places: Places = defaultdict(list)
    for area, files in by_area.items():
        for path, source in files.items():
            for site in find_sites(source, defaults):
                places[site.operator, area].append((path, site))
    return places


def _mutant(root: Path, number: int, area: str, path: str, site: Site) -> Mutant | None:
    """The mutant of one place; None: it does not compile, or its text would not be found again."""
    whole = (root / path).read_bytes()
    source = whole.decode()
    line = whole.count(b"\n", 0, site.start) + 1
    first = whole.rfind(b"\n", 0, site.start) + 1
    end = whole.find(b"\n", site.end)
    end = len(whole) if end < 0 else end
    before = whole[first:end].decode()
    after = (whole[first : site.start] + site.text.encode() + whole[site.end : end]).decode()
    above, below = around(source, line, before.count("\n") + 1)
    mutant = Mutant(
        number=number, area=area, operator=site.operator, path=path, line=line, scope=scope_at(source, line),
        above=above, below=below, before=before, after=after,
    )  # fmt: skip
    try:
        return mutant if mutant.find(source) == line and compiles(mutant.changed(source)) else None
    except NotFound:
        return None
