"""What prefill/decode disaggregation costs an engine that has no peers: nothing in any of its turns."""

from __future__ import annotations

from fdasync.events.catalog import TimerFired
from tests.support.entered import functions_entered
from tests.support.pd_table import PdTable

ROOM = "scheduler/disagg"


def test_an_engine_without_peers_enters_nothing_of_it():
    table = PdTable(
        num_blocks=12, num_host_blocks=8, store=True, write_through="all", write_back=True, pipeline_depth=2
    )
    functions = functions_entered(table, ROOM)
    for number in range(4):
        table.turn(table.request(number, range(20), 20, emits=True, deadline=50.0), table.timer(table.now))
    table.turn(table.abort(3), table.pause())
    table.turn(table.resume())
    table.run(table.request(7, range(100, 120), 3))
    assert table.stats.preemptions
    assert table.stats.swapped_out_blocks
    assert table.stats.finished == 5
    assert functions == set()


def test_with_peers_it_is_entered_until_the_last_request_is_through():
    table = PdTable()
    functions = functions_entered(table, ROOM)
    table.turn(*table.hand_off(1, range(10)))
    assert {"ring", "plan", "_ask"} <= functions
    table.turn(table.abort(1))
    assert [give.group for give in table.given_up] == [1]
    # the question is still answered, and then there is nothing more
    table.turn(table.granted(1))
    functions.clear()
    table.run(table.request(2, range(20), 3))
    assert functions == set()


def test_with_leases_it_is_entered_until_the_last_one_is_over():
    table = PdTable()
    functions = functions_entered(table, ROOM)
    turned = table.turn(table.lease(1, range(10)))
    assert {"begin", "_grant"} <= functions
    (wake,) = turned.wakes
    table.arrive(1, range(10))
    assert table.stats.leased == 0
    functions.clear()
    # the time at which it would have looked for leases that are over
    table.now = wake.time
    table.turn(TimerFired(at=table.now))
    table.run()
    assert table.is_empty()
    assert functions == set()
