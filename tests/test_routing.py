"""Rows converted for trainers: each format read as its reader does, there and back, and refused when it is broken."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdasync import BadInput, Routing
from fdasync.routing import (
    RoutingLayout,
    RoutingLog,
    append,
    check_routing,
    expand_layers,
    from_nemo_rl,
    from_prime_rl,
    from_sglang,
    from_skyrl,
    from_verl,
    from_vllm,
    moe_layers_only,
    to_nemo_rl,
    to_prime_rl,
    to_sglang,
    to_skyrl,
    to_verl,
    to_vllm,
)


def rows(
    count: int, layers: int, top_k: int, experts: int, *, seed: int = 0, start: int = 0, hidden: int = 0, **more: Any
) -> Routing:
    """Random rows; MoE layers are spread over `hidden` ones at random."""
    random = np.random.default_rng(seed)
    array = random.permuted(np.tile(np.arange(experts), (count, layers, 1)), axis=2)[:, :, :top_k]
    return Routing(
        array=array.astype(np.uint8 if experts <= 256 else np.uint16),
        start=start,
        layer_ids=tuple(sorted(int(n) for n in random.permutation(max(hidden, layers))[:layers])),
        num_experts=experts,
        **more,
    )


@st.composite
def routings(draw: st.DrawFn, *, even: bool = False) -> tuple[Routing, int]:
    """Rows and a number of hidden layers that holds them."""
    layers, top_k = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    hidden = layers + draw(st.integers(0, 3))
    experts = max(top_k, draw(st.sampled_from([1, 2, 8, 127, 128, 129, 256, 257, 512])))
    by_layer = draw(st.none() | st.tuples(*[st.integers(1, top_k)] * layers)) if not even else None
    routing = rows(
        draw(st.integers(0, 5)), layers, top_k, experts,
        seed=draw(st.integers(0, 99)), start=draw(st.integers(0, 9)), hidden=hidden, top_k_by_layer=by_layer,
    )  # fmt: skip
    return routing, hidden


def sets_of(routing: Routing) -> list[list[frozenset[int]]]:
    counts = routing.top_k_by_layer or (routing.array.shape[2],) * routing.array.shape[1]
    return [[frozenset(row[:k].tolist()) for row, k in zip(token, counts, strict=True)] for token in routing.array]


def assert_same(back: Routing, routing: Routing) -> None:
    assert sets_of(back) == sets_of(routing)
    if routing.top_k_by_layer is None:
        np.testing.assert_array_equal(back.array, routing.array)
    assert back.array.dtype == (np.uint8 if routing.num_experts <= 256 else np.uint16)
    assert back.array.flags.writeable
    assert back.array.flags.c_contiguous
    for name in ("start", "layer_ids", "num_experts", "top_k_by_layer"):
        assert getattr(back, name) == getattr(routing, name)


def tokens_of(routing: Routing) -> int:
    return routing.start + len(routing.array) + 1


def is_right(array: np.ndarray, routing: Routing, hidden: int | None) -> bool:
    """Do these rows say the same, dense layers being zero?"""
    wanted = sets_of(routing)
    layers = range(len(routing.layer_ids)) if hidden is None else routing.layer_ids
    dense = [] if hidden is None else sorted(set(range(hidden)) - set(routing.layer_ids))
    assert array.shape == (len(wanted), hidden or len(routing.layer_ids), routing.array.shape[2])
    # columns past a layer's own k repeat the first pick, so the whole row is the set
    found = [[frozenset(token[layer].tolist()) for layer in layers] for token in array]
    return found == wanted and not array[:, dense].any()


class TestEachFormat:
    @given(routings())
    def test_sglang(self, case):
        routing, hidden = case
        text = to_sglang(routing, hidden)
        # as slime reads it
        flat = np.frombuffer(base64.b64decode(text), np.int32)
        expected = max(0, tokens_of(routing) - 1 - routing.start)
        assert flat.size == expected * hidden * routing.array.shape[2]
        assert is_right(flat.reshape(expected, hidden, -1 if flat.size else routing.array.shape[2]), routing, hidden)
        layout = RoutingLayout.of(routing)
        back = from_sglang(text, layout, hidden, start=routing.start, num_tokens=tokens_of(routing))
        assert_same(back, routing)

    @given(routings(), st.booleans())
    def test_vllm(self, case, dense):
        routing, hidden = case[0], case[1] if dense else None
        text = to_vllm(routing, hidden)
        loaded = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
        assert loaded.dtype == (np.uint8 if routing.num_experts <= 256 else np.uint16)
        assert is_right(loaded, routing, hidden)
        layout = RoutingLayout.of(routing)
        assert_same(from_vllm(text, layout, num_hidden_layers=hidden, start=routing.start), routing)

    @given(routings(), st.booleans(), st.integers(0, 3), st.integers(0, 3))
    def test_verl(self, case, dense, left, right):
        routing, hidden = case[0], case[1] if dense else None
        count = len(routing.array)
        length = left + tokens_of(routing) + right
        padded = to_verl(routing, length, num_hidden_layers=hidden, left_pad=left, zero_prefix=True)
        assert padded.dtype == np.int16
        first = left + routing.start
        assert is_right(padded[first : first + count], routing, hidden)
        assert not padded[:first].any()
        assert not padded[first + count :].any()
        layout = RoutingLayout.of(routing)
        back = from_verl(padded, layout, count, num_hidden_layers=hidden, left_pad=left, start=routing.start)
        assert_same(back, routing)

    @given(routings(), st.booleans())
    def test_skyrl(self, case, dense):
        routing, hidden = case[0], case[1] if dense else None
        payload = json.loads(json.dumps(to_skyrl(routing, hidden)))
        assert set(payload) == {"data", "shape", "dtype"}
        read = np.frombuffer(base64.b64decode(payload["data"], validate=True), payload["dtype"])
        read = read.reshape(payload["shape"])
        assert payload["dtype"] == ("uint8" if read.max(initial=0) < 256 else "int16")
        assert is_right(read, routing, hidden)
        layout = RoutingLayout.of(routing)
        assert_same(from_skyrl(payload, layout, num_hidden_layers=hidden, start=routing.start), routing)

    @given(routings(), st.booleans())
    def test_prime_rl(self, case, dense):
        routing, hidden = case[0], case[1] if dense else None
        payload = json.loads(json.dumps(to_prime_rl(routing, hidden)))
        assert set(payload) == {"data", "shape", "dtype", "start"}
        read = np.frombuffer(base64.b64decode(payload["data"], validate=True), payload["dtype"])
        assert is_right(read.reshape(payload["shape"]), routing, hidden)
        layout = RoutingLayout.of(routing)
        assert_same(from_prime_rl(payload, layout, num_hidden_layers=hidden, num_tokens=tokens_of(routing)), routing)

    @given(routings(even=True), st.integers(0, 3))
    def test_nemo_rl(self, case, missing):
        routing, _ = case
        tokens = tokens_of(routing) + missing
        text = to_nemo_rl(routing, tokens)
        magic, dtype, shape, data = text.split(":", 3)
        assert magic == "nrlre1"
        assert dtype == ("int8" if routing.num_experts <= 128 else "int16")
        full = np.frombuffer(base64.b64decode(data, validate=True), dtype).reshape([int(n) for n in shape.split("x")])
        assert full.shape == (tokens, *routing.array.shape[1:])
        stop = routing.start + len(routing.array)
        np.testing.assert_array_equal(full[routing.start : stop], routing.array)
        assert (full[: routing.start] == -1).all()
        assert (full[stop:-1] == -1).all()
        assert (full[-1] == np.arange(full.shape[2])).all()
        back = from_nemo_rl(text, RoutingLayout.of(routing))
        if len(routing.array):
            assert_same(back, routing)
        else:
            assert back.array.shape == routing.array.shape

    def test_dtypes_of_many_experts(self):
        routing = rows(1, 1, 2, 2)
        many = Routing(
            array=np.array([[[40_000, 7]]], np.uint16), start=0, layer_ids=routing.layer_ids, num_experts=65_536
        )
        layout = RoutingLayout.of(many)
        assert to_skyrl(many)["dtype"] == "int32"
        assert_same(from_skyrl(to_skyrl(many), layout), many)
        assert to_prime_rl(many)["dtype"] == "uint16"
        assert to_nemo_rl(many, 2).startswith("nrlre1:int32:2x1x2:")
        assert_same(from_nemo_rl(to_nemo_rl(many, 2), layout), many)
        with pytest.raises(BadInput, match="do not fit int16"):
            to_verl(many, 2)

    def test_no_moe_layer_is_all_zero(self):
        # expert 0 first, and only one that counts in the second layer
        array = np.array([[[0, 1], [5, 5]]] * 4, np.uint8)
        routing = Routing(array=array, start=0, layer_ids=(1, 2), num_experts=8, top_k_by_layer=(2, 1))
        expanded = expand_layers(routing, 4)
        assert expanded[:, [1, 2]].any(axis=(0, 2)).all()
        assert expanded[0].tolist() == [[0, 0], [0, 1], [5, 5], [0, 0]]


LAYOUT = RoutingLayout(layer_ids=(1, 3), num_experts=8, top_k=2)


def b64(array: np.ndarray, **how: Any) -> str:
    file = io.BytesIO()
    np.save(file, array, **how)
    return base64.b64encode(file.getvalue()).decode()


def npy(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> str:
    raw = header.encode() + b"\n"
    return base64.b64encode(b"\x93NUMPY" + version + len(raw).to_bytes(2, "little") + raw + data).decode()


GOOD = np.array([[[0, 1], [7, 2]]], np.uint8)


class TestRefused:
    @pytest.mark.parametrize(
        ("text", "why"),
        [
            (b64(GOOD)[:-1], "not base64"),
            (b64(GOOD)[:8] + "\n" + b64(GOOD)[8:], "not base64"),
            ("é" + b64(GOOD), "not base64"),
            (b"AAAA", "text is needed"),
            (b64(GOOD)[:-4], "bytes for uint8"),
            (base64.b64encode(b"PK\x03\x04 and more than ten").decode(), "no .npy"),
            ("", "no .npy"),
            (b64(GOOD.astype(">i4")), "dtype '>i4'"),
            (b64(GOOD.astype(np.float32)), "dtype '<f4'"),
            (b64(GOOD.astype(bool)), "dtype '|b1'"),
            (b64(GOOD.astype(object), allow_pickle=True), r"dtype '\|O'"),
            (b64(np.asfortranarray(np.repeat(GOOD, 2, axis=0))), "Fortran"),
            (b64(np.zeros(3, [("a", "u1")])), "does not write"),
            (b64(GOOD[0]), r"shape \[2, 2\]"),
            (b64(np.uint8(3)), r"shape \[\]"),
            (npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1099511627776, 2, 2), }"), "4398046511104"),
            (npy("{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 2, 2), }", bytes(4)), "does not write"),
            (npy("{'descr': '|u1', 'fortran_order': False, 'shape': (__import__('os'),), }"), "does not write"),
            (npy("(" * 900), "does not write"),
            (
                npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1, 2, 2), }", bytes(4), b"\x02\x00"),
                "format 1.0",
            ),
            (b64(np.zeros((1, 3, 2), np.uint8)), r"shape \[1, 3, 2\]"),
            (b64(GOOD.astype(np.int16) - 1), "position 5, layer 1: expert -1 does not exist"),
            (b64(GOOD + 1), "position 5, layer 3: expert 8 does not exist"),
            (b64(GOOD * 0), "position 5, layer 1: expert 0 twice"),
        ],
    )
    def test_vllm(self, text, why):
        with pytest.raises(BadInput, match=why):
            from_vllm(text, LAYOUT, start=5)

    @pytest.mark.parametrize(
        ("array", "why"),
        [
            (np.zeros(7, np.int32), "no rows of 4 x 2 int32"),
            (np.array([[[0, 0], [0, 1], [0, 0], [7, 9]]]), "position 0, layer 3: expert 9 does not exist"),
            (np.array([[[0, 0], [0, 1], [0, 0], [7, -2]]]), "expert -2"),
            (np.array([[[0, 0], [0, 1], [0, 2], [7, 2]]]), "layer 2 is dense"),
            (np.array([[[0, 0], [0, 1], [0, 0], [3, 3]]]), "layer 3: expert 3 twice"),
            (np.zeros((3, 4, 2)), "expert 0 twice"),
        ],
    )
    def test_sglang(self, array, why):
        with pytest.raises(BadInput, match=why):
            from_sglang(base64.b64encode(array.astype("<i4")).decode(), LAYOUT, 4)

    def test_a_server_that_ignores_the_start_is_seen(self):
        routing = rows(6, 2, 2, 8)
        with pytest.raises(BadInput, match="has 6 rows from position 4 on, 7 tokens have 2"):
            from_sglang(to_sglang(routing, 2), RoutingLayout.of(routing), 2, start=4, num_tokens=7)

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"dtype": "int16"}, "uint8 is enough|bytes for"),
            ({"dtype": "float32"}, "'float32' is none"),
            ({"dtype": None}, "none of this format"),
            ({"dtype": ["uint8"]}, "none of this format"),
            ({"shape": [1, 2]}, "no shape"),
            ({"shape": [1, 2, -2]}, "no shape"),
            ({"shape": [1, 2, True]}, "no shape"),
            ({"shape": [1 << 40, 2, 2]}, "4398046511104 bytes"),
            ({"shape": [2, 2, 2]}, "4 bytes for uint8"),
            ({"shape": 4}, "no shape"),
            ({"data": None}, "text is needed"),
            ({"data": "AAA"}, "not base64"),
        ],
    )
    def test_skyrl(self, change, why):
        payload = {"data": base64.b64encode(GOOD).decode(), "shape": [1, 2, 2], "dtype": "uint8"}
        assert sets_of(from_skyrl(payload, LAYOUT)) == [[{0, 1}, {7, 2}]]
        with pytest.raises(BadInput, match=why):
            from_skyrl({**payload, **change}, LAYOUT)

    def test_skyrl_refuses_a_wide_dtype_as_its_reader_does(self):
        payload = {"data": base64.b64encode(GOOD.astype("<i2")).decode(), "shape": [1, 2, 2], "dtype": "int16"}
        with pytest.raises(BadInput, match="uint8 is enough"):
            from_skyrl(payload, LAYOUT)

    @pytest.mark.parametrize("payload", [None, [], "x", {}, {"data": ""}])
    def test_no_payload(self, payload):
        with pytest.raises(BadInput, match="is no mapping"):
            from_prime_rl(payload, LAYOUT)

    def test_prime_rl(self):
        payload = {"data": base64.b64encode(GOOD).decode(), "shape": [1, 2, 2]}
        # before the dtype field
        assert from_prime_rl(payload, LAYOUT).start == 0
        for start in (-1, 1.5, None):
            with pytest.raises(BadInput, match="no position"):
                from_prime_rl({**payload, "start": start}, LAYOUT)

    def test_nemo_rl(self):
        routing = rows(5, 2, 2, 8)
        text = to_nemo_rl(routing, 6)
        layout = RoutingLayout.of(routing)
        head, data = text.rsplit(":", 1)
        full = np.frombuffer(base64.b64decode(data), np.int8).reshape(6, 2, 2).copy()
        full[2] = -1
        hole = f"{head}:{base64.b64encode(full).decode()}"
        full[2, 0] = 1, 0
        half = f"{head}:{base64.b64encode(full).decode()}"
        for broken, why in [
            (hole, "position 2 has no row"),
            (half, "position 2, layer 1: expert -1"),
            (text.replace("nrlre1", "nrlre2"), "is no"),
            (text.replace("6x2x2", "7x2x2"), "24 bytes for int8"),
            (text.replace("6x2x2", "1099511627776x2x2"), "24 bytes for int8"),
            (text.replace("6x2x2", "6x-2x2"), "is no"),
            (text.replace("6x2x2", "6x2"), "is no"),
            (text[:-1], "not base64"),
            ([[[1, 2]]], "is no"),
        ]:
            with pytest.raises(BadInput, match=re.escape(why)):
                from_nemo_rl(broken, layout)
        with pytest.raises(BadInput, match="5 tokens have rows for 4"):
            to_nemo_rl(routing, 5)
        uneven = rows(5, 2, 2, 8, top_k_by_layer=(1, 2))
        with pytest.raises(BadInput, match="differs by layer"):
            to_nemo_rl(uneven, 6)

    def test_verl(self):
        routing = rows(4, 2, 2, 8, start=2)
        layout = RoutingLayout.of(routing)
        with pytest.raises(BadInput, match="positions 0 to 1 have no rows"):
            to_verl(routing, 9)
        with pytest.raises(BadInput, match="5 is too short"):
            to_verl(routing, 5, zero_prefix=True)
        padded = to_verl(routing, 9, zero_prefix=True)
        for count, start in ((3, 2), (5, 2), (3, 3), (8, 2)):
            with pytest.raises(BadInput):
                from_verl(padded, layout, count, start=start)
        with pytest.raises(BadInput, match="no array of integers"):
            from_verl(padded.astype(float), layout, 4, start=2)

    def test_sizes_before_memory(self):
        routing = rows(9, 2, 2, 8)
        layout = RoutingLayout.of(routing)
        for read in (
            lambda most: from_sglang(to_sglang(routing, 2), layout, 2, max_nbytes=most),
            lambda most: from_skyrl(to_skyrl(routing), layout, max_nbytes=most),
            lambda most: from_prime_rl(to_prime_rl(routing), layout, max_nbytes=most),
            lambda most: from_nemo_rl(to_nemo_rl(routing, 10), layout, max_nbytes=most),
            lambda most: from_vllm(to_vllm(routing), layout, max_nbytes=most),
        ):
            with pytest.raises(BadInput) as caught:
                read(35)
            assert caught.value.limit == 35
            assert "max_nbytes" in caught.value.hint
            assert_same(read(9 * 2 * 2 * 4 + 128), routing)

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"array": GOOD.astype(np.int64)}, "routing.array"),
            ({"array": GOOD[0]}, "routing.array"),
            ({"array": [[[0, 1], [7, 2]]]}, "routing.array"),
            ({"layer_ids": (1,)}, "routing.array"),
            ({"layer_ids": ()}, "routing.layer_ids"),
            ({"layer_ids": (3, 1)}, "routing.layer_ids"),
            ({"layer_ids": (-1, 1)}, "routing.layer_ids"),
            ({"start": -1}, "routing.start"),
            ({"start": True}, "routing.start"),
            ({"num_experts": 0}, "routing.num_experts"),
            ({"num_experts": 1}, "routing.top_k"),
            ({"num_experts": 7}, "routing"),
            ({"top_k_by_layer": (2,)}, "routing.top_k_by_layer"),
            ({"top_k_by_layer": (2, 3)}, "routing.top_k_by_layer"),
            ({"top_k_by_layer": (0, 2)}, "routing.top_k_by_layer"),
        ],
    )
    def test_rows(self, change, field):
        good = {"array": GOOD, "start": 0, "layer_ids": (1, 3), "num_experts": 8}
        check_routing(Routing(**good))
        with pytest.raises(BadInput) as caught:
            check_routing(Routing(**{**good, **change}))
        assert caught.value.field == field
        with pytest.raises(BadInput):
            to_sglang(Routing(**{**good, **change}), 4)

    def test_where_a_bad_row_is(self):
        routing = rows(40_000, 8, 8, 16, start=3)
        routing.array[39_998, 6, 7] = routing.array[39_998, 6, 2]
        with pytest.raises(BadInput, match=f"position 40001, layer 6: expert {routing.array[39_998, 6, 2]} twice"):
            check_routing(routing)
        routing.array[30_001, 2, 1] = 16
        with pytest.raises(BadInput, match="position 30004, layer 2: expert 16 does not exist"):
            check_routing(routing)

    def test_layers(self):
        routing = rows(2, 2, 2, 8, hidden=5)
        with pytest.raises(BadInput, match="do not hold MoE layer"):
            expand_layers(routing, routing.layer_ids[-1])
        layout = RoutingLayout.of(routing)
        expanded = expand_layers(routing, 5, np.int32)
        np.testing.assert_array_equal(moe_layers_only(expanded, layout, 5), routing.array)
        for wrong in (expanded[:, :4], expanded[:, :, :1], expanded[0]):
            with pytest.raises(BadInput, match="is of shape"):
                moe_layers_only(wrong, layout, 5)


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


class TestTurns:
    @given(st.integers(0, 3), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 15)), max_size=6))
    def test_turns_join_to_the_whole(self, begin, turns):
        """Turns that go `back` rows and bring `count`, in any order within a row; the last brings what is left."""
        end = begin + 30
        whole = rows(30, 2, 3, 9, start=begin)
        log = RoutingLog()
        added = log.add(cut(whole, begin, begin + 2))
        for number, (back, count) in enumerate([*turns, (0, 30)]):
            first = max(begin, log.stop - back)
            turn = cut(whole, first, min(first + count, end))
            turn.array[:] = np.random.default_rng(number).permuted(turn.array, axis=2)
            before = log.stop
            added += log.add(turn)
            assert log.stop == max(before, first + len(turn.array))
        joined = log.routing()
        assert added == 30
        assert joined.start == begin
        assert sets_of(joined) == sets_of(whole)

    def test_nothing_yet_is_a_turn_too(self):
        whole = rows(9, 2, 2, 8, start=3)
        log = RoutingLog()
        assert log.stop == 0
        assert log.add(cut(whole, 3, 3)) == 0
        assert log.stop == 3
        assert log.routing().array.shape == (0, 2, 2)
        log.add(whole)
        assert_same(log.routing(), whole)

    def test_a_short_turn_drops_nothing(self):
        whole = rows(9, 2, 2, 8)
        assert_same(append(whole, cut(whole, 2, 5)), whole)
        assert_same(append(cut(whole, 0, 5), cut(whole, 5, 9)), whole)
        assert_same(append(cut(whole, 0, 5), cut(whole, 0, 9)), whole)

    def test_a_gap_is_named(self):
        whole = rows(9, 2, 2, 8)
        with pytest.raises(BadInput, match="positions 4 to 5 have no rows") as caught:
            append(cut(whole, 0, 4), cut(whole, 6, 9))
        assert (caught.value.field, caught.value.limit) == ("second.start", 4)
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

    def test_a_refused_turn_changes_nothing(self):
        whole = rows(9, 2, 2, 8)
        log = RoutingLog()
        with pytest.raises(BadInput, match="no turn"):
            log.routing()
        log.add(cut(whole, 0, 4))
        for broken in (cut(whole, 6, 9), Routing(array=GOOD * 0, start=4, layer_ids=(0, 1), num_experts=8)):
            with pytest.raises(BadInput):
                log.add(broken)
        assert log.stop == 4
        log.routing().array[:] = 0
        log.add(cut(whole, 4, 9))
        assert_same(log.routing(), whole)


@settings(max_examples=30)
@given(st.binary(max_size=200) | st.text(max_size=200), st.integers(0, 9))
def test_garbage_is_refused_with_one_type(garbage, at):
    """Whatever comes: BadInput, or rows."""
    good = rows(3, 2, 2, 8)
    layout = RoutingLayout.of(good)
    raw = base64.b64decode(to_vllm(good))
    spoiled = raw[: at * 14] + (garbage if isinstance(garbage, bytes) else garbage.encode("utf-8", "ignore"))
    texts = [garbage, base64.b64encode(spoiled).decode(), f"nrlre1:int8:4x2x2:{garbage!r}"]
    for text in texts:
        for read in (
            lambda text=text: from_vllm(text, layout),
            lambda text=text: from_sglang(text, layout, 2),
            lambda text=text: from_nemo_rl(text, layout),
            lambda text=text: from_skyrl({"data": text, "shape": [3, 2, 2], "dtype": "uint8"}, layout),
        ):
            try:
                rows_read = read()
            except BadInput:
                continue
            assert math.prod(rows_read.array.shape) <= 64


def test_the_benchmark_writes_what_payloads_weigh(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.routing_bytes", "--tokens", "31", "--runs", "1", "--json", str(out)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    figures = report["figures"]
    # 30 rows; base64 in a JSON string
    assert figures["deepseek_v3_rows_bytes"] == 30 * 58 * 8
    assert figures["deepseek_v3_sglang_bytes"] == 4 * math.ceil(30 * 61 * 8 * 4 / 3) + 2
    assert figures["deepseek_v3_verl_bytes"] == 31 * 58 * 8 * 2
    assert figures["qwen3_30b_a3b_vllm_bytes"] == 4 * math.ceil((128 + 30 * 48 * 8) / 3) + 2
    assert report["conditions"]["tokens"] == 31
    assert len([name for name in figures if name.endswith("_encode_s")]) == 12
    assert "skyrl" in done.stdout
