"""The book of leases given: names, owners, tombstones."""

from __future__ import annotations

from fdasync.pd.instance.lease_table import MAX_TOMBSTONES, TOMBSTONE_S, LeaseBook


class Entry:
    def __init__(self, owner, name, group):
        self.owner, self.name, self.group = owner, name, group


def test_a_lease_is_found_by_its_owners_name_and_by_our_own():
    book = LeaseBook()
    one, other = object(), object()
    lease, namesake = Entry(one, ("r", 0), 1), Entry(other, ("r", 0), 2)
    book.add(lease)
    book.add(namesake)
    assert book.find(one, ("r", 0)) is lease
    assert book.find(other, ("r", 0)) is namesake
    assert book.find(one, ("r", 1)) is None
    assert book.find(object(), ("r", 0)) is None
    assert (book.group(1), book.group(2), book.group(3)) == (lease, namesake, None)
    assert book.of(one) == [lease]
    assert len(book) == 2


def test_what_is_removed_is_gone_and_may_be_removed_again():
    book = LeaseBook()
    owner = object()
    lease, later = Entry(owner, ("r", 0), 1), Entry(owner, ("r", 0), 2)
    book.add(lease)
    book.remove(lease)
    book.remove(lease)
    assert (len(book), book.find(owner, ("r", 0)), book.of(owner)) == (0, None, [])
    # a stale removal does not take the next one of the same name with it
    book.add(later)
    book.remove(lease)
    assert book.find(owner, ("r", 0)) is later


def test_a_cancel_that_came_first_is_remembered_for_a_while():
    book = LeaseBook()
    book.bury(("r", 0), 10.0)
    assert book.is_buried(("r", 0), 10.0)
    assert book.is_buried(("r", 0), 10.0 + TOMBSTONE_S - 0.1)
    assert not book.is_buried(("r", 0), 10.0 + TOMBSTONE_S)
    assert not book.is_buried(("r", 1), 10.0)
    # a second cancel lasts as long again
    book.bury(("r", 0), 100.0)
    assert book.is_buried(("r", 0), 99.0 + TOMBSTONE_S)


def test_tombstones_are_bounded_in_number_and_time():
    book = LeaseBook()
    for number in range(MAX_TOMBSTONES + 10):
        book.bury(("r", number), 1.0)
    assert len(book._dead) == MAX_TOMBSTONES
    assert not book.is_buried(("r", 9), 1.0)
    assert book.is_buried(("r", 10), 1.0)
    book.bury(("s", 0), 2.0 + TOMBSTONE_S)
    assert list(book._dead) == [("s", 0)]
