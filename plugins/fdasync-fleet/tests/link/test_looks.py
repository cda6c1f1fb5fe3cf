"""Which peers are looked after at a time, whatever the number of the others."""

from __future__ import annotations

import random

from fdasync_fleet.link.looks import Looks
from fdasync_fleet.link.session import NEVER


class Peer:
    def __init__(self):
        self.look_due = NEVER


def test_those_whose_time_has_come_are_taken_in_order_and_once():
    looks, (one, other, third) = Looks(), [Peer() for _ in range(3)]
    for when, peer in ((2.0, one), (1.0, other), (3.0, third)):
        looks.add(when, peer)
    assert looks.next() == 1.0
    assert looks.take(0.5) == []
    assert looks.take(2.0) == [other, one]
    assert looks.take(2.0) == []
    assert (one.look_due, third.look_due) == (NEVER, 3.0)
    assert looks.next() == 3.0


def test_an_earlier_time_takes_the_place_of_a_later_one_and_a_later_one_of_none():
    looks, peer = Looks(), Peer()
    for when in (3.0, 1.0, 2.0):
        looks.add(when, peer)
    assert peer.look_due == 1.0
    assert looks.take(1.0) == [peer]
    # what it replaced is no look
    assert looks.next() == NEVER
    assert looks.take(5.0) == []
    looks.add(NEVER, peer)
    assert len(looks) == 0


def test_a_peer_that_is_put_in_again_at_the_same_time_is_taken_once():
    looks, peer = Looks(), Peer()
    looks.add(1.0, peer)
    assert looks.take(1.0) == [peer]
    looks.add(2.0, peer)
    looks.add(1.5, peer)
    assert looks.take(1.5) == [peer]
    looks.add(2.0, peer)
    assert looks.take(2.0) == [peer]


def test_it_does_what_a_walk_over_all_peers_does():
    rng = random.Random(1)
    looks, peers, due = Looks(), [Peer() for _ in range(20)], {}
    for _ in range(2000):
        now, number = rng.randrange(1000) / 10, rng.randrange(20)
        if rng.random() < 0.8:
            looks.add(now, peers[number])
            due[number] = min(due.get(number, NEVER), now)
        else:
            taken = {peers.index(peer) for peer in looks.take(now)}
            assert taken == {each for each, when in due.items() if when <= now}
            due = {each: when for each, when in due.items() if when > now}
        assert looks.next() == min(due.values(), default=NEVER)
        assert [peer.look_due for peer in peers] == [due.get(each, NEVER) for each in range(20)]
