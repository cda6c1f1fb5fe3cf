"""A mutant is found again by its text, where lines have moved, and nowhere where it could be another."""

from __future__ import annotations

import pytest

from tests.mutants.mutant import Mutant, NotFound, scope_at, statement_lines

SOURCE = """\
def first():
    one()
    return True


class Shelf:
    def put(self):
        if self.full:
            return True
        two(
            1,
            2,
        )
        return True
"""


def mutant(scope, before, after, above="", below=""):
    return Mutant(
        number=1, area="cache", operator="call", path="shelf.py", line=3, scope=scope, above=above, below=below,
        before=before, after=after,
    )  # fmt: skip


def test_it_is_found_where_its_lines_moved_to(tmp_path):
    one = mutant("first", "    return True", "    return False")
    (tmp_path / "shelf.py").write_text(f"import nothing\n\n\n{SOURCE}")
    one.apply(tmp_path)
    assert (tmp_path / "shelf.py").read_text() == "import nothing\n\n\n" + SOURCE.replace("True", "False", 1)


def test_lines_around_it_tell_places_apart():
    one = mutant(
        "Shelf.put", "            return True", "            return False", "        if self.full:", "        two("
    )
    assert one.find(SOURCE) == 9
    twice = SOURCE.replace("        two(", "        if self.full:\n            return True\n        two(")
    assert one.find(twice) == 11


def test_several_lines_are_replaced_by_fewer():
    one = mutant("Shelf.put", "        two(\n            1,\n            2,\n        )", "        pass")
    assert one.changed(SOURCE) == SOURCE.replace("two(\n            1,\n            2,\n        )", "pass")


@pytest.mark.parametrize(
    ("source", "places"),
    [
        (SOURCE.replace("one()\n    return True", "one()"), 0),
        # the same text in another function is another place
        (SOURCE.replace("first", "second"), 0),
        (SOURCE.replace("    one()", "    if 1:\n        one()\n    return True\n    return True"), 0),
        (SOURCE.replace("    one()", "    one()\n    return True\n\n\ndef first():\n    one()"), 2),
    ],
)
def test_what_is_gone_or_not_to_be_told_apart_is_refused(source, places):
    with pytest.raises(NotFound) as refused:
        mutant("first", "    return True", "    return False", "    one()", "").changed(source)
    assert refused.value.places == places


def test_the_statement_around_a_line():
    assert scope_at(SOURCE, 12) == "Shelf.put"
    assert list(statement_lines(SOURCE, 12)) == [10, 11, 12, 13]
    # of one with a body the head
    assert list(statement_lines(SOURCE, 8)) == [8]
