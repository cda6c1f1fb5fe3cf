"""When a process that ended by itself is started again."""

from __future__ import annotations

from fdasync_fleet.cli.local.restarts import RestartRules, Restarts
from hypothesis import given
from hypothesis import strategies as st


def test_each_time_it_waits_twice_as_long_and_then_it_is_given_up() -> None:
    restarts = Restarts(RestartRules(first_s=0.5, most_s=3.0, limit=5))
    waits = []
    for now in range(100, 600, 100):
        waits.append(restarts.ended(now, None))
        assert not restarts.take(now)
        assert restarts.take(now + 3.0)
        assert not restarts.take(now + 3.0)
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert restarts.ended(1000.0, None) is None
    assert (restarts.given_up, restarts.due, restarts.count) == (True, None, 5)
    assert not restarts.take(1e9)


def test_one_that_served_for_long_begins_anew() -> None:
    restarts = Restarts(RestartRules(steady_s=300.0))
    assert [restarts.ended(10.0, 1.0), restarts.ended(20.0, None), restarts.ended(30.0, 25.0)] == [0.5, 1.0, 2.0]
    # loading is no life
    assert restarts.ended(1000.0, 900.0) == 4.0
    assert restarts.ended(1300.0, 1000.0) == 0.5
    assert restarts.count == 5


def test_no_limit_above_0_means_never() -> None:
    restarts = Restarts(RestartRules(limit=0))
    assert restarts.ended(1.0, None) is None
    assert restarts.given_up


@given(st.lists(st.tuples(st.floats(0.0, 1000.0), st.floats(0.0, 1000.0) | st.none()), max_size=40))
def test_there_is_a_bound_and_every_wait_ends(lives: list[tuple[float, float | None]]) -> None:
    """Each life: how long it took to load, and for how long it served."""
    rules = RestartRules()
    restarts, now, in_a_row = Restarts(rules), 0.0, 0
    for load_s, served_s in lives:
        ready_at = None if served_s is None else now + load_s
        now += load_s + (served_s or 0.0)
        in_a_row = 1 if ready_at is not None and now - ready_at >= rules.steady_s else in_a_row + 1
        wait_s = restarts.ended(now, ready_at)
        assert (wait_s is None) == (in_a_row > rules.limit)
        if wait_s is None:
            assert restarts.given_up
            return
        assert rules.first_s <= wait_s <= rules.most_s
        now += wait_s
        assert restarts.take(now)
