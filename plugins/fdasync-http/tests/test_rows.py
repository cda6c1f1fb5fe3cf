"""Rows as they are sent, in pieces: the very bytes of `fdasync_trainer.rows`, whatever the sizes."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from fdasync_http import parts, rows
from fdasync_http.replies import Part
from fdasync_trainer.rows import to_prime_rl, to_sglang, to_skyrl, to_vllm
from hypothesis import given, settings
from hypothesis import strategies as st

from fdasync import Routing


async def text_of(body):
    out = b""
    for piece in body:
        if isinstance(piece, Part):
            made = [some async for some in piece.pieces()]
            assert sum(map(len, made)) == piece.nbytes
            out += b"".join(made)
        else:
            out += piece
    return out


@st.composite
def routings(draw):
    hidden = draw(st.integers(1, 6))
    layers = tuple(sorted(draw(st.sets(st.integers(0, hidden - 1), min_size=1))))
    experts = draw(st.sampled_from([2, 8, 256, 257, 600]))
    top_k = draw(st.integers(1, min(experts, 4)))
    count = draw(st.integers(0, 40))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    array = np.argsort(rng.random((count, len(layers), experts)), axis=2)[:, :, :top_k]
    by_layer = None
    if draw(st.booleans()):
        by_layer = tuple(draw(st.integers(1, top_k)) for _ in layers)
    routing = Routing(
        array=array.astype(np.uint8 if experts <= 256 else np.uint16),
        start=draw(st.integers(0, 9)),
        layer_ids=layers,
        num_experts=experts,
        top_k_by_layer=by_layer,
    )
    return routing, hidden


@pytest.mark.ci
@pytest.mark.parametrize("piece_nbytes", [1, 100, 1 << 20])
@settings(max_examples=60)
@given(drawn=routings())
def test_every_form_is_that_of_the_converters(piece_nbytes, drawn):
    routing, hidden = drawn
    before, rows._PIECE_NBYTES = rows._PIECE_NBYTES, piece_nbytes
    try:
        for made, want in (
            (rows.sglang(routing, hidden), to_sglang(routing, hidden)),
            (rows.npy(routing, hidden), to_vllm(routing, hidden)),
        ):
            sent = asyncio.run(text_of(parts.assembled({"rows": parts.MARK}, [made])))
            assert msgspec.json.decode(sent) == {"rows": want}
        for dtypes, want in (
            (("uint8", "uint16"), to_prime_rl(routing, hidden)),
            (("uint8", "int16", "int32"), to_skyrl(routing, hidden)),
        ):
            payload, part = rows.packed(routing, hidden, dtypes)
            if "start" in want:
                payload["start"] = routing.start
            sent = asyncio.run(text_of(parts.assembled(payload, [part])))
            assert msgspec.json.decode(sent) == want
            # a client of prime-rl looks for these very bytes
            assert sent.startswith(b'{"data":"')
    finally:
        rows._PIECE_NBYTES = before


def test_a_long_sample_is_made_in_pieces():
    array = np.zeros((4000, 48, 8), np.uint8)
    array[:] = np.arange(8, dtype=np.uint8)
    part = rows.sglang(Routing(array=array, start=0, layer_ids=tuple(range(48)), num_experts=8), 48)

    async def largest():
        return max([len(piece) async for piece in part.pieces()])

    assert asyncio.run(largest()) < 2 << 20
    assert part.nbytes == -(-4000 * 48 * 8 * 4 // 3) * 4
