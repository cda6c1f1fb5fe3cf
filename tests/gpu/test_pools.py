"""Pools of events and of page-locked buffers: what is used again, what is refused, what is reported."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdasync.errors import BadInput, BuffersOut, InvariantBroken
from fdasync.gpu.pools import EventPool, PinnedPool

MIB = 1 << 20


def pool_of(max_nbytes: int) -> PinnedPool:
    return PinnedPool(max_nbytes, pinned=torch.cuda.is_available(), name="rows")


def test_events_are_made_once_and_used_again():
    made: list[int] = []
    pool = EventPool(lambda: made.append(len(made)) or len(made))
    first, second = pool.take("step"), pool.take()
    assert first.event != second.event
    assert pool.outstanding == {"step": 1, "event": 1}
    first.release()
    assert pool.take("copy").event == first.event
    assert len(made) == 2
    assert pool.outstanding == {"copy": 1, "event": 1}


def test_a_second_release_is_a_defect():
    events, buffers = EventPool(object), pool_of(MIB)
    for hold in (events.take("step"), buffers.take(10, "step")):
        hold.release()
        with pytest.raises(InvariantBroken, match=r"\(step\) was released twice"):
            hold.release()
    # and did not put it back twice
    assert events.take().event is not events.take().event
    one, other = buffers.take(10), buffers.take(10)
    assert one.tensor.data_ptr() != other.tensor.data_ptr()


@pytest.mark.parametrize(
    ("nbytes", "size"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (100_000, 131072), (MIB, MIB)]
)
def test_buffers_are_powers_of_two_and_views_have_the_size_asked_for(nbytes, size):
    pool = pool_of(MIB)
    hold = pool.take(nbytes)
    assert (hold.tensor.dtype, tuple(hold.tensor.shape)) == (torch.uint8, (nbytes,))
    assert hold.tensor.is_pinned() == (torch.cuda.is_available() and nbytes > 0) or nbytes == 0
    assert hold.array.shape == (nbytes,)
    assert pool.nbytes == size
    assert pool.outstanding == {"buffer": size}
    if nbytes:
        hold.array[:] = 7
        hold.tensor[-1] = 9
        assert hold.array[-1] == 9
        assert int(hold.tensor[:-1].sum()) == 7 * (nbytes - 1)
    hold.release()
    assert pool.outstanding == {}


def test_a_buffer_is_used_again_by_its_size():
    pool = pool_of(MIB)
    hold = pool.take(5000)
    where = hold.tensor.data_ptr()
    hold.release()
    assert pool.take(4000).tensor.data_ptr() != where
    assert pool.take(8000).tensor.data_ptr() == where
    assert pool.nbytes == 4096 + 8192


def test_the_limit_names_what_is_out():
    pool = pool_of(16384)
    with pytest.raises(BadInput, match="limit: 16384"):
        pool.take(16385)
    with pytest.raises(BadInput, match="is -1"):
        pool.take(-1)
    rows, tokens = pool.take(8192, "rows"), pool.take(4096, "tokens")
    with pytest.raises(BuffersOut) as caught:
        pool.take(8192)
    assert caught.value.out == {"rows": 8192, "tokens": 4096}
    assert (caught.value.wanted_nbytes, caught.value.limit_nbytes) == (8192, 16384)
    rows.release()
    # a refusal changed nothing, and what is free may be another size's
    assert pool.nbytes == 12288
    pool.take(4096)
    tokens.release()
    pool.take(4096)
    pool.take(8192)
    assert pool.nbytes == 16384


def test_free_buffers_of_other_sizes_make_room():
    pool = pool_of(16384)
    small = [pool.take(1) for _ in range(4)]
    for hold in small[:3]:
        hold.release()
    pool.take(8192)
    assert pool.nbytes == 16384
    with pytest.raises(BuffersOut):
        pool.take(8192)


@given(st.lists(st.tuples(st.integers(0, 20_000), st.booleans()), max_size=40))
def test_no_two_holds_share_bytes_and_the_limit_holds(plan):
    pool = pool_of(65536)
    held, refused = [], []
    for nbytes, gives_back in plan:
        if gives_back and held:
            held.pop(nbytes % len(held)).release()
        try:
            held.append(pool.take(nbytes))
        except BuffersOut as error:
            refused.append(sum(error.out.values()) + error.wanted_nbytes)
        assert sum(pool.outstanding.values()) <= pool.nbytes <= 65536
    assert all(nbytes > 65536 for nbytes in refused)
    spans = sorted((hold.tensor.data_ptr(), hold.tensor.numel()) for hold in held if hold.tensor.numel())
    ends = 0
    for start, nbytes in spans:
        assert start >= ends
        ends = start + nbytes
    for hold in held:
        hold.release()
    assert pool.outstanding == {}
