"""The table of granted leases: names, owners, tombstones."""

from __future__ import annotations

from fdasync_fleet.instance.lease_table import MAX_TOMBSTONES, TOMBSTONE_S, LeaseTable


class Entry:
    def __init__(self, owner, name, group):
        self.owner, self.name, self.group = owner, name, group


def test_a_lease_is_found_by_its_owners_name_and_by_our_own():
    table = LeaseTable()
    one, other = object(), object()
    lease, namesake = Entry(one, ("r", 0), 1), Entry(other, ("r", 0), 2)
    table.add(lease)
    table.add(namesake)
    assert table.find(one, ("r", 0)) is lease
    assert table.find(other, ("r", 0)) is namesake
    assert table.find(one, ("r", 1)) is None
    assert table.find(object(), ("r", 0)) is None
    assert (table.group(1), table.group(2), table.group(3)) == (lease, namesake, None)
    assert table.of(one) == [lease]
    assert len(table) == 2


def test_what_is_removed_is_gone_and_may_be_removed_again():
    table = LeaseTable()
    owner = object()
    lease, later = Entry(owner, ("r", 0), 1), Entry(owner, ("r", 0), 2)
    table.add(lease)
    table.remove(lease)
    table.remove(lease)
    assert (len(table), table.find(owner, ("r", 0)), table.of(owner)) == (0, None, [])
    # a stale removal does not take the next one of the same name with it
    table.add(later)
    table.remove(lease)
    assert table.find(owner, ("r", 0)) is later


def test_a_cancel_that_came_first_is_remembered_for_a_while():
    table = LeaseTable()
    table.bury(("r", 0), 10.0)
    assert table.is_buried(("r", 0), 10.0)
    assert table.is_buried(("r", 0), 10.0 + TOMBSTONE_S - 0.1)
    assert not table.is_buried(("r", 0), 10.0 + TOMBSTONE_S)
    assert not table.is_buried(("r", 1), 10.0)
    # a second cancel lasts as long again
    table.bury(("r", 0), 100.0)
    assert table.is_buried(("r", 0), 99.0 + TOMBSTONE_S)


def test_tombstones_are_bounded_in_number_and_time():
    table = LeaseTable()
    for number in range(MAX_TOMBSTONES + 10):
        table.bury(("r", number), 1.0)
    assert len(table._dead) == MAX_TOMBSTONES
    assert not table.is_buried(("r", 9), 1.0)
    assert table.is_buried(("r", 10), 1.0)
    table.bury(("s", 0), 2.0 + TOMBSTONE_S)
    assert list(table._dead) == [("s", 0)]
