"""Rows converted for trainers: each format read as its reader does, there and back."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from fdasync_trainer.rows import (
    RoutingLayout,
    expand_layers,
    from_nemo_rl,
    from_prime_rl,
    from_sglang,
    from_skyrl,
    from_verl,
    from_vllm,
    to_nemo_rl,
    to_prime_rl,
    to_sglang,
    to_skyrl,
    to_verl,
    to_vllm,
)
from hypothesis import given
from hypothesis import strategies as st
from routing_rows import assert_same, is_right, routings, rows, tokens_of

from fdasync import Routing
from fdasync.errors import BadInput
from tests.support.helpers import case_settings


class TestEachFormat:
    @case_settings(60)
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

    @case_settings(60)
    @given(routings(), st.booleans())
    def test_vllm(self, case, dense):
        routing, hidden = case[0], case[1] if dense else None
        text = to_vllm(routing, hidden)
        loaded = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
        assert loaded.dtype == (np.uint8 if routing.num_experts <= 256 else np.uint16)
        assert is_right(loaded, routing, hidden)
        layout = RoutingLayout.of(routing)
        assert_same(from_vllm(text, layout, num_hidden_layers=hidden, start=routing.start), routing)

    @case_settings(60)
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

    @case_settings(60)
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

    @case_settings(60)
    @given(routings(), st.booleans())
    def test_prime_rl(self, case, dense):
        routing, hidden = case[0], case[1] if dense else None
        payload = json.loads(json.dumps(to_prime_rl(routing, hidden)))
        assert set(payload) == {"data", "shape", "dtype", "start"}
        read = np.frombuffer(base64.b64decode(payload["data"], validate=True), payload["dtype"])
        assert is_right(read.reshape(payload["shape"]), routing, hidden)
        layout = RoutingLayout.of(routing)
        assert_same(from_prime_rl(payload, layout, num_hidden_layers=hidden, num_tokens=tokens_of(routing)), routing)

    @case_settings(60)
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
