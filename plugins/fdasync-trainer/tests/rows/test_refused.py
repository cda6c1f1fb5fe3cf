"""Rows and payloads that are broken: refused with one type of error that says what and where."""

from __future__ import annotations

import base64
import io
import math
import re
from typing import Any

import numpy as np
import pytest
from fdasync_trainer.rows import (
    RoutingLayout,
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
from hypothesis import given
from hypothesis import strategies as st
from routing_rows import assert_same, rows, sets_of

from fdasync import Routing
from fdasync.errors import BadInput
from tests.support.helpers import case_settings

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
                npy("{'descr': '|u1', 'fortran_order': False, 'shape': (9223372036854775807, 0, 8), }"),
                "too large for any array",
            ),
            (
                npy("{'descr': '|u1', 'fortran_order': False, 'shape': (9999999999999999999, 0, 8), }"),
                "too large for any array",
            ),
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
        layout = RoutingLayout.of(routing)
        for read in (
            lambda: from_vllm(to_vllm(routing), layout, num_tokens=8),
            lambda: from_skyrl(to_skyrl(routing), layout, num_tokens=8),
            lambda: from_prime_rl(to_prime_rl(routing), layout, num_tokens=8),
        ):
            with pytest.raises(BadInput, match="has 6 rows from position 0 on, 8 tokens have 7"):
                read()

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
            ({"data": "", "shape": [1 << 70, 0, 8]}, "longer than any array"),
            ({"data": "", "shape": [10**5000, 0, 8]}, "longer than any array"),
            ({"data": "", "shape": [1 << 40, 0, 1 << 40]}, "too large for any array"),
            ({"data": "", "shape": [1, 0, 2]}, r"\[1, 0, 2\]|0 layers"),
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

    def test_a_zero_in_the_shape_hides_no_other_axis(self):
        for text in ("9999999999999999999x0x2", "0x9999999999999999999x2", "4294967296x4294967296x0"):
            with pytest.raises(BadInput, match="too large for any array"):
                from_nemo_rl(f"nrlre1:int8:{text}:", LAYOUT)

    @pytest.mark.parametrize("start", [1 << 63, 10**30, 10**5000], ids=["int64", "30", "5000"])
    def test_a_start_beyond_any_position(self, start):
        payload = {"data": base64.b64encode(GOOD).decode(), "shape": [1, 2, 2], "dtype": "uint8"}
        for read in (
            lambda: from_prime_rl({**payload, "start": start}, LAYOUT),
            lambda: from_skyrl(payload, LAYOUT, start=start),
            lambda: from_vllm(b64(GOOD), LAYOUT, start=start),
        ):
            with pytest.raises(BadInput, match="beyond any position"):
                read()

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

    def test_what_is_no_rows_at_all(self):
        with pytest.raises(BadInput, match="a Routing is needed, not ndarray"):
            check_routing(GOOD)
        with pytest.raises(BadInput, match="three axes"):
            RoutingLayout.of(Routing(array=GOOD[0], start=0, layer_ids=(1, 3), num_experts=8))
        padded = np.zeros((4, 2, 2), np.int16)
        for count, left in ((-1, 0), (True, 0), (1, -1), (1, 0.5)):
            with pytest.raises(BadInput, match="is no number of them"):
                from_verl(padded, LAYOUT, count, left_pad=left)
        with pytest.raises(BadInput, match="is no number of them"):
            from_vllm(b64(GOOD), LAYOUT, num_tokens=-3)

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


@case_settings(30)
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
