"""Rows of a conversation's requests, joined by position."""

from __future__ import annotations

import numpy as np
import pytest
from fdasync_trainer.rows import RoutingLog, append
from hypothesis import given
from hypothesis import strategies as st
from routing_rows import assert_same, rows, sets_of

from fdasync import Routing
from fdasync.errors import BadInput
from tests.support.helpers import case_settings

GOOD = np.array([[[0, 1], [7, 2]]], np.uint8)


def cut(routing: Routing, first: int, stop: int) -> Routing:
    """Rows of positions first to stop."""
    array = routing.array[first - routing.start : stop - routing.start].copy()
    return Routing(
        array=array,
        start=first,
        layer_ids=routing.layer_ids,
        num_experts=routing.num_experts,
        top_k_by_layer=routing.top_k_by_layer,
    )


class TestConversation:
    @case_settings(60)
    @given(st.integers(0, 3), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 15)), max_size=6))
    def test_requests_join_to_the_whole(self, begin, requests):
        """Requests that go `back` rows and bring `count`, in any order within a row; the last brings the rest."""
        end = begin + 30
        whole = rows(30, 2, 3, 9, start=begin)
        log = RoutingLog()
        added = log.add(cut(whole, begin, begin + 2))
        for number, (back, count) in enumerate([*requests, (0, 30)]):
            first = max(begin, log.stop - back)
            part = cut(whole, first, min(first + count, end))
            part.array[:] = np.random.default_rng(number).permuted(part.array, axis=2)
            before = log.stop
            added += log.add(part)
            assert log.stop == max(before, first + len(part.array))
        joined = log.routing()
        assert added == 30
        assert joined.start == begin
        assert sets_of(joined) == sets_of(whole)

    def test_a_request_without_rows_adds_nothing(self):
        whole = rows(9, 2, 2, 8, start=3)
        log = RoutingLog()
        assert log.stop == 0
        assert log.add(cut(whole, 3, 3)) == 0
        assert log.stop == 3
        assert log.routing().array.shape == (0, 2, 2)
        log.add(whole)
        assert_same(log.routing(), whole)

    def test_a_short_request_drops_nothing(self):
        whole = rows(9, 2, 2, 8)
        assert_same(append(whole, cut(whole, 2, 5)), whole)
        assert_same(append(cut(whole, 0, 5), cut(whole, 5, 9)), whole)
        assert_same(append(cut(whole, 0, 5), cut(whole, 0, 9)), whole)

    def test_a_gap_is_named(self):
        whole = rows(9, 2, 2, 8)
        with pytest.raises(BadInput, match="positions 4 to 5 have no rows") as caught:
            append(cut(whole, 0, 4), cut(whole, 6, 9))
        assert (caught.value.field, caught.value.limit) == ("second.start", 4)
        with pytest.raises(BadInput, match="positions 4 to 4 have no rows"):
            append(cut(whole, 0, 4), cut(whole, 5, 9))
        with pytest.raises(BadInput, match="1 is before 2"):
            append(cut(whole, 2, 4), cut(whole, 1, 9))

    def test_the_first_pass_wins_where_that_is_said(self):
        one, two = rows(6, 2, 2, 8, seed=1), rows(9, 2, 2, 8, seed=2)
        two = Routing(array=two.array, start=0, layer_ids=one.layer_ids, num_experts=8)
        two.array[:4] = one.array[:4, :, ::-1]
        two.array[4] = (one.array[4] + 1) % 8
        with pytest.raises(BadInput, match="position 4, layer 0: other experts"):
            append(one, two)
        joined = append(one, two, first_wins=True)
        np.testing.assert_array_equal(joined.array[:6], one.array)
        np.testing.assert_array_equal(joined.array[6:], two.array[6:])

    def test_columns_that_do_not_count_may_differ(self):
        one = rows(4, 2, 3, 8, top_k_by_layer=(3, 1))
        two = cut(one, 0, 4)
        two.array[:, 1, 1:] = 7
        assert sets_of(append(one, two)) == sets_of(one)
        two.array[2, 1, 0] = (two.array[2, 1, 0] + 1) % 8
        with pytest.raises(BadInput, match="position 2, layer 1"):
            append(one, two)

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"layer_ids": (0, 2)}, "layer_ids"),
            ({"num_experts": 9}, "num_experts"),
            ({"array": np.array([[[0], [1]]], np.uint8)}, "top_k"),
            ({"top_k_by_layer": (1, 2)}, "top_k_by_layer"),
        ],
    )
    def test_another_model_is_refused_by_name(self, change, name):
        good = {"array": GOOD, "start": 0, "layer_ids": (0, 1), "num_experts": 8}
        with pytest.raises(BadInput) as caught:
            append(Routing(**good), Routing(**{**good, "start": 1, **change}))
        assert caught.value.field == f"second.{name}"

    def test_refused_rows_change_nothing(self):
        whole = rows(9, 2, 2, 8)
        log = RoutingLog()
        with pytest.raises(BadInput, match="no rows were added"):
            log.routing()
        log.add(cut(whole, 0, 4))
        for broken in (cut(whole, 6, 9), Routing(array=GOOD * 0, start=4, layer_ids=(0, 1), num_experts=8)):
            with pytest.raises(BadInput):
                log.add(broken)
        assert log.stop == 4
        log.routing().array[:] = 0
        log.add(cut(whole, 4, 9))
        assert_same(log.routing(), whole)
