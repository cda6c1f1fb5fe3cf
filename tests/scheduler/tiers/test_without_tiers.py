"""What host memory and stores cost an engine that has neither: nothing in its turns, while the device has room."""

from __future__ import annotations

import pytest

from tests.scheduler.table import Table
from tests.support.entered import functions_entered

ROOM = "scheduler/tiers"


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_of_the_device_alone_enters_nothing_of_them(depth):
    table = Table(num_blocks=64, pipeline_depth=depth)
    functions = functions_entered(table, ROOM)
    for number in range(4):
        table.turn(table.request(number, range(20), 10, emits=True, deadline=50.0))
    table.turn(table.abort(3), table.pause())
    table.turn(table.resume())
    table.run(table.request(7, range(100, 120), 3))
    assert table.stats.hit_tokens
    assert table.stats.finished == 5
    assert functions == set()


def test_a_host_tier_alone_asks_nothing_of_the_store():
    table = Table(num_blocks=12, num_host_blocks=8)
    functions = functions_entered(table, f"{ROOM}/store_planner.py")
    for number in range(4):
        table.turn(table.request(number, range(number, number + 20), 10))
    table.run()
    assert table.stats.swapped_out_blocks
    # it is told of what came to the host, and asked what it wants: nothing
    assert functions == {"on_host", "plan", "let_go"}
