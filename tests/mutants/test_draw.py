"""What mutants are drawn, and that each differs from its source by what its operator says."""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.areas import AREAS, sources
from tests.mutants.draw import draw
from tests.mutants.mutant import compiles
from tests.mutants.sites import OPERATORS, defaults_of, find_sites
from tests.support.imports import HOME

SOURCE = textwrap.dedent(
    '''
    """Three is 3."""

    from typing import TYPE_CHECKING

    if TYPE_CHECKING:
        SIZE = 1

    class Shelf:
        """Holds 2."""

        room: int = 7

        def __init__(self, most: int = 4) -> None:
            self.most = most

        def put(self, item: "list[4]", *, loud: bool = False) -> bool:
            if item not in self.held and (self.most > 9 or not loud):
                self.held.append(item)
                self.count = min(self.count + 5, self.most)
                self.put(item, loud=True)
                self.put(item,  # another
                         loud=True)
            while self.count < 6:
                self.count *= 8
            assert self.count > 40
            logger.debug("%d", 41)
            if item is None:
                raise ValueError(f"{42 + 43}", 44)
            return self.count == self.most

        def number(self) -> int:
            return "é" + self.name if self.name else len([one for one in self.held if one])
    '''
)


def test_each_operator_changes_what_it_says_and_nothing_else():
    source = SOURCE.encode()
    changes = Counter()
    for site in find_sites(source, defaults_of([ast.parse(SOURCE)])):
        changed = source[: site.start] + site.text.encode() + source[site.end :]
        if compiles(changed.decode()):
            assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
            changes[site.operator, source[site.start : site.end].decode(), site.text] += 1
    assert {operator for operator, _, _ in changes} == set(OPERATORS)
    for change in [
        ("comparison", "not in", "in"),
        ("comparison", "<", "<="),
        ("comparison", "is", "is not"),
        ("boolean", "and", "or"),
        ("boolean", "not ", ""),
        ("arithmetic", "+", "-"),
        ("arithmetic", "*", "//"),
        ("constant", "7", "8"),
        ("condition", "self.count < 6", "not (self.count < 6)"),
        ("condition", "one", "not (one)"),
        ("call", "self.held.append(item)", "pass"),
        ("return", "self.count == self.most", "not (self.count == self.most)"),
        ("assignment", "self.count *= 8", "pass"),
        ("min-max", "min", "max"),
        ("keyword", ", loud=True", ""),
    ]:
        assert changes[change] == 1, change


def test_what_no_test_should_see_is_left_alone():
    kept = find_sites(SOURCE.encode(), {})
    texts = [SOURCE.encode()[site.start : site.end].decode() for site in kept]
    # of the size for types, annotations, assertions, logs and errors; in `__init__` an assignment would be missed
    assert not {"1", "40", "41", "42", "43", "44", "self.most = most", "TYPE_CHECKING"}.intersection(texts)
    assert "return" in {site.operator for site in kept}
    # of strings there is no difference
    assert sum(site.operator == "arithmetic" for site in kept) == 2


@pytest.fixture
def tree(tmp_path):
    router = "plugins/fdasync-fleet/src/fdasync_fleet/router/router.py"
    for path in ("fdasync/scheduler/core.py", router, "fdasync/cache/store/base.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(SOURCE.replace("Shelf", Path(path).parent.name.title()))
    return tmp_path


def test_a_draw_is_the_same_each_time_and_even(tree):
    first = draw(tree, 5, 11)
    assert first == draw(tree, 5, 11)
    assert first != draw(tree, 6, 11)
    # one each for the areas, of which three have files
    assert sorted(one.area for one in first) == ["router", "scheduler", "stores"]
    many = draw(tree, 5, 110)
    assert Counter(one.area for one in many) == {"router": 10, "scheduler": 10, "stores": 10}
    assert [one.number for one in many] == list(range(1, 31))
    assert len({(one.path, one.before, one.after) for one in many}) == 30
    for one in many:
        source = (tree / one.path).read_text()
        assert one.find(source) == one.line
        assert compiles(one.changed(source))
        assert one.changed(source) != source


@pytest.mark.parametrize("area", AREAS)
def test_each_area_has_sources_of_its_own(area):
    root = HOME.parent
    found = set(sources(root, area))
    assert len(found) > 5
    assert not [other for other in AREAS if other != area and found.intersection(sources(root, other))]
    assert not [path for path in found if "testing" in path or "/tests/" in path]
