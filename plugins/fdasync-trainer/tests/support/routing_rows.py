"""Rows for tests of `fdasync_trainer.rows`."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from fdasync import Routing


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
