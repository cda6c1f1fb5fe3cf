"""By which transports an instance reads the blocks of another."""

from __future__ import annotations

import pytest
from fdasync_fleet.messages import Source
from fdasync_fleet.transfer.transports import Transports


class Named:
    """A transport, but for the copies."""

    def __init__(self, name, machine):
        self.name = name
        self._machine = machine

    def source(self):
        return source(self._machine)


def source(machine):
    return Source(machine, 1, (), bytes(16), "")


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ([("shm", "here"), ("tcp", "here")], "by shm, tcp"),
        ([("tcp", "here"), ("shm", "here")], "by shm, tcp"),
        # memory of another machine cannot be mapped
        ([("shm", "there"), ("tcp", "there")], "by tcp"),
        ([("tcp", "there")], "by tcp; not by rdma: it offers none (--trusted-network on both sides)"),
        ([("shm", "there")], "by no way in common"),
        ([("other", "here")], "by no way in common"),
    ],
)
def test_the_ways_are_those_of_both_that_the_route_can_have(theirs, told):
    optional = ["rdma"] if "rdma" in told else []
    ours = Transports([Named(name, "here") for name in ("shm", *optional, "tcp")], optional=optional)
    assert ours.told(tuple((name, source(machine)) for name, machine in theirs)) == told
