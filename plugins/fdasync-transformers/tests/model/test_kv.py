"""Blocks as shares: what each rank holds, writes and reads, and that whole blocks do not depend on their number."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_transformers.model.attention import TorchPaging
from fdasync_transformers.model.kv import KVLayout, KVPool, LayerSpec, gather
from fdasync_transformers.model.ragged import RaggedPlan
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fdasync.cache.host_arena import HostArena
from fdasync.errors import ConfigError
from fdasync.gpu.block_rows import BlockRows

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")
TOKENS, BLOCKS = 4, 5
LAYERS = {
    "uniform": tuple(LayerSpec(index, 4, 8, 8) for index in range(3)),
    "uneven heads": (LayerSpec(0, 8, 4, 6), LayerSpec(2, 4, 8, 8), LayerSpec(3, 4, 8, 4)),
    "two shares": (LayerSpec(0, 8, 4, 4), LayerSpec(1, 2, 16, 16)),
    "one head": (LayerSpec(0, 1, 6, 6), LayerSpec(1, 1, 6, 6)),
    "latents": (LayerSpec(0, 1, 6, 0, latent_rank=4), LayerSpec(1, 1, 6, 0, latent_rank=4)),
    "latents and heads": (LayerSpec(0, 4, 4, 4), LayerSpec(1, 1, 6, 0, latent_rank=4)),
}
RANKS = (1, 2, 4, 8)
all_layers = pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS.keys())


def layout_of(layers: tuple[LayerSpec, ...], ranks: int, rank: int = 0) -> KVLayout:
    return KVLayout(layers, torch.float32, rank, ranks)


def pools_of(layers: tuple[LayerSpec, ...], ranks: int) -> list[KVPool]:
    return [KVPool(layout_of(layers, ranks, rank), BLOCKS, TOKENS, CPU) for rank in range(ranks)]


@contextmanager
def arena(layers: tuple[LayerSpec, ...]) -> Iterator[HostArena]:
    host = HostArena.create(BLOCKS, TOKENS * layout_of(layers, 1).token_nbytes)
    yield host
    host.close()


def whole(layers: tuple[LayerSpec, ...], seed: int = 3) -> dict[tuple[str, int], torch.Tensor]:
    """Keys and values of all heads of each layer, [BLOCKS, TOKENS, heads, dim]."""
    draw = torch.Generator().manual_seed(seed)
    return {
        (kind, layer.index): torch.randn(BLOCKS, TOKENS, layer.kv_heads, dim, generator=draw)
        for layer in layers
        for kind, dim in (("keys", layer.key_dim), ("values", layer.value_dim))
        if dim
    }


def fill(pool: KVPool, layout: KVLayout, kv: dict[tuple[str, int], torch.Tensor]) -> None:
    for layer in layout.layers:
        for kind, views in (("keys", pool.keys), ("values", pool.values)):
            if layer.index in views:
                mine = kv[kind, layer.index][:, :, layout.stored_heads(layer)]
                views[layer.index].copy_(mine.view_as(views[layer.index]))


# -- shares -------------------------------------------------------------------------------------

specs = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(shapes=specs, ranks=st.sampled_from(RANKS))
def test_parts_of_all_ranks_are_the_block_once(shapes: list[tuple[int, int, int]], ranks: int) -> None:
    layers = tuple(LayerSpec(index, *shape) for index, shape in enumerate(shapes))
    try:
        layouts = [layout_of(layers, ranks, rank) for rank in range(ranks)]
    except ConfigError:
        assume(False)
    shares = math.gcd(*(heads for heads, _, _ in shapes))
    written = np.zeros(layouts[0].token_nbytes, int)
    for layout in layouts:
        pool = KVPool(layout, 1, 1, CPU)
        part, size = pool.part, pool.blocks.nbytes
        assert (part.block_nbytes, size) == (len(written), layout.held_token_nbytes)
        assert layout.token_nbytes == len(written)
        assert size == len(written) // shares * max(1, shares // ranks)
        assert 0 <= part.offset_nbytes <= len(written) - size
        written[part.offset_nbytes : part.offset_nbytes + size] += part.writes
        # every element belongs to one view
        for views in (pool.keys, pool.values):
            for view in views.values():
                view += 1
        assert (pool.blocks == 1).all()
        for layer in layers:
            stored, attended = layout.stored_heads(layer), layout.attended_heads(layer)
            assert stored.start <= attended.start < attended.stop <= stored.stop <= layer.kv_heads
    assert (written == 1).all(), "two ranks write one byte, or none does"
    # of those that hold the same shares, the lowest
    firsts = [layout.first_share for layout in layouts]
    assert [layout.writes for layout in layouts] == [firsts.index(first) == at for at, first in enumerate(firsts)]
    for layer in layers:
        # queries of all ranks together, in order, attend to all heads in order, each as often as the others
        seen = [head for layout in layouts for head in range(layer.kv_heads)[layout.attended_heads(layer)]]
        times = len(seen) // layer.kv_heads
        assert seen == [head for head in range(layer.kv_heads) for _ in range(times)]


@pytest.mark.parametrize(
    ("heads", "ranks", "words"),
    [
        ((4,), 3, "3 ranks cannot part the 4 KV heads of the model's layers"),
        ((6, 6), 4, "4 ranks cannot part the 6 KV heads.*a divisor or a multiple of 6"),
        ((6, 2), 4, "2 ranks of one share cannot part the 3 heads of layer 0"),
        ((1, 3), 2, "2 ranks of one share cannot part the 3 heads of layer 1"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(heads: tuple[int, ...], ranks: int, words: str) -> None:
    layers = tuple(LayerSpec(index, count, 4, 4) for index, count in enumerate(heads))
    with pytest.raises(ConfigError, match=words):
        layout_of(layers, ranks)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        layout_of(layers[:1], 2, 2)


@all_layers
def test_name_and_size_of_blocks_do_not_depend_on_ranks(layers: tuple[LayerSpec, ...]) -> None:
    alone = layout_of(layers, 1)
    assert alone.name.startswith("shares-first:")
    for ranks in (2, 4):
        other = layout_of(layers, ranks, ranks - 1)
        assert (other.name, other.token_nbytes) == (alone.name, alone.token_nbytes)
        assert other.choose_block_tokens() == alone.choose_block_tokens()


def test_shares_stand_one_after_the_other() -> None:
    """The order of bytes that stores hold, written down once more."""
    layers = LAYERS["uneven heads"]
    pool, kv = pools_of(layers, 1)[0], whole(layers)
    fill(pool, layout_of(layers, 1), kv)
    wanted = [
        kv[kind, layer.index][2, :, share * layer.kv_heads // 4 : (share + 1) * layer.kv_heads // 4].ravel()
        for share in range(4)
        for layer in layers
        for kind in ("keys", "values")
    ]
    assert torch.equal(pool.blocks[2], torch.cat(wanted))


# -- copies -------------------------------------------------------------------------------------


@all_layers
@pytest.mark.parametrize("readers", [1, 2, 4])
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_blocks_copied_out_by_some_ranks_are_read_by_others(
    layers: tuple[LayerSpec, ...], writers: int, readers: int
) -> None:
    kv, ids, places = whole(layers), [4, 0, 2], [1, 3, 0]
    with arena(layers) as host:
        moved = 0
        for rank, pool in reversed(list(enumerate(pools_of(layers, writers)))):
            layout = layout_of(layers, writers, rank)
            fill(pool, layout, kv)
            if not layout.writes:
                # what a rank does not write must not matter
                pool.blocks.fill_(torch.nan)
            count = BlockRows(pool.blocks, host, pool.part).out(ids, places)
            assert count == (len(ids) * pool.blocks[0].nbytes if layout.writes else 0)
            moved += count
        assert moved == len(ids) * host.block_nbytes
        for rank, pool in enumerate(pools_of(layers, readers)):
            layout = layout_of(layers, readers, rank)
            wanted = KVPool(layout, BLOCKS, TOKENS, CPU)
            fill(wanted, layout, kv)
            assert BlockRows(pool.blocks, host, pool.part).back(places, ids) == len(ids) * pool.blocks[0].nbytes
            assert torch.equal(pool.blocks[ids], wanted.blocks[ids])
            assert not pool.blocks[[1, 3]].any()


# -- attention on a CPU -------------------------------------------------------------------------


@all_layers
@pytest.mark.parametrize("ranks", RANKS)
def test_gathered_heads_are_those_of_the_model(layers: tuple[LayerSpec, ...], ranks: int) -> None:
    kv, ids = whole(layers), np.array([[3, 1], [0, 4]])
    for rank in range(ranks):
        layout = layout_of(layers, ranks, rank)
        pool = KVPool(layout, BLOCKS, TOKENS, CPU)
        fill(pool, layout, kv)
        # two sequences of one token each, at the end of two blocks
        last = np.full(2, 2 * TOKENS - 1)
        plan = RaggedPlan(np.ones(2, np.int64), last, ids, TOKENS, CPU, torch.float32, shares=pool.shares)
        for layer in layers:
            (group,) = plan.groups(layer.reach)
            heads = layout.attended_heads(layer)
            for kind, views in (("keys", pool.attended_keys), ("values", pool.attended_values)):
                if layer.index in views:
                    found = gather(views[layer.index], group.table, group.pieces)
                    wanted = kv[kind, layer.index][ids].flatten(1, 2)[:, :, heads].transpose(1, 2)
                    assert torch.equal(found, wanted)
    assert torch.equal(
        gather(kv["keys", 0], torch.tensor([2, 1]), 1)[0], kv["keys", 0][[2, 1]].flatten(0, 1).transpose(0, 1)
    )


@all_layers
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_attend_as_one_process_does(layers: tuple[LayerSpec, ...], ranks: int) -> None:
    """Stores a prompt and attends to it: the rows of all ranks, side by side, are those of one process."""
    draw, tokens = torch.Generator().manual_seed(1), 2 * TOKENS + 1
    ids, positions = np.array([[3, 1, 4]]), torch.arange(tokens)
    pools = {count: pools_of(layers, count) for count in (1, ranks)}
    for layer in layers:
        heads = 4 * layer.kv_heads * ranks
        query, key, value = (
            torch.randn(tokens, count, dim, generator=draw, dtype=torch.float32)
            for count, dim in (
                (heads, layer.key_dim),
                (layer.kv_heads, layer.key_dim),
                (layer.kv_heads, layer.value_dim),
            )
        )
        found: dict[int, list[torch.Tensor]] = {}
        for count, some in pools.items():
            for rank, pool in enumerate(some):
                layout = layout_of(layers, count, rank)
                counts, starts = np.array([tokens]), np.array([0])
                plan = RaggedPlan(counts, starts, ids, TOKENS, CPU, torch.float32, shares=pool.shares)
                blocks = torch.from_numpy(ids[0])[positions // TOKENS]
                paging = TorchPaging(pool, plan, blocks, positions % TOKENS)
                mine = layout.stored_heads(layer)
                paging.store(layer, key[:, mine], None if layer.latent_rank else value[:, mine])
                part = query[:, rank * heads // count : (rank + 1) * heads // count]
                found.setdefault(count, []).append(paging.attend(layer, part, 0.3, None))
        torch.testing.assert_close(torch.cat(found[ranks], 1), torch.cat(found[1], 1))


class Largest(TorchDispatchMode):
    """Bytes of the largest storage that an operation made, other than `pool`'s."""

    def __init__(self, pool: torch.Tensor) -> None:
        super().__init__()
        self.nbytes = 0
        self._own = pool.untyped_storage().data_ptr()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != self._own:
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


@all_layers
def test_attention_copies_its_blocks_and_no_layer(layers: tuple[LayerSpec, ...]) -> None:
    pool = KVPool(layout_of(layers, 1), 400, TOKENS, CPU)
    plan = RaggedPlan(
        np.array([1]), np.array([7]), np.array([[300, 7]]), TOKENS, CPU, torch.float32, shares=pool.shares
    )
    paging = TorchPaging(pool, plan, torch.tensor([7]), torch.tensor([3]))
    for layer in layers:
        key, value = (torch.zeros(1, layer.kv_heads, dim) for dim in (layer.key_dim, layer.value_dim))
        with Largest(pool.blocks) as largest:
            paging.store(layer, key, None if layer.latent_rank else value)
            paging.attend(layer, torch.zeros(1, 8, layer.key_dim), 1.0, None)
        blocks = 2 * TOKENS * layer.kv_heads * max(layer.key_dim, layer.value_dim) * 4
        assert 0 < largest.nbytes <= max(2 * blocks, 2048) < 400 * TOKENS * layer.kv_heads * layer.key_dim * 4


def test_what_is_behind_a_token_is_zeroed_in_all_shares() -> None:
    layers = LAYERS["uneven heads"]
    pool, layout = pools_of(layers, 2)[1], layout_of(layers, 2, 1)
    fill(pool, layout, whole(layers))
    before = pool.blocks.clone()
    pool.clear_past(3, 1)
    for views in (pool.keys, pool.values):
        for view in views.values():
            assert not view[3, 1:].any()
            assert view[3, 0].all()
            assert view[[0, 1, 2, 4]].all()
    pool.clear([1])
    assert not pool.blocks[1].any()
    assert torch.equal(pool.blocks[[0, 2, 4]], before[[0, 2, 4]])
    assert replace(layout, rank=0).name == layout.name
