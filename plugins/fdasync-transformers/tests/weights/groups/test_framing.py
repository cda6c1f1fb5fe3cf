"""In which broadcasts tensors come: every byte once, in order, aligned, and no bucket larger than asked for."""

from __future__ import annotations

from itertools import pairwise

import torch
from fdasync_transformers.weights.deltas.tensors import own_tensors
from fdasync_transformers.weights.groups.framing import ALIGN_NBYTES, buckets
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(0, 300), max_size=40), st.integers(0, 500))
def test_every_byte_comes_once_and_in_order(sizes: list[int], limit: int) -> None:
    came = dict.fromkeys(range(len(sizes)), 0)
    last = 0
    for bucket in buckets(sizes, limit):
        for (number, at), (_, end) in zip(bucket.parts, [*bucket.parts[1:], (0, bucket.nbytes)], strict=True):
            assert at % ALIGN_NBYTES == 0
            assert number >= last
            last = number
            nbytes = sizes[number] if bucket.whole else bucket.nbytes
            assert at + nbytes <= end
            # what `first` says is where the bytes before it ended
            assert came[number] == bucket.first
            came[number] += nbytes
        assert bucket.nbytes <= limit or (len(bucket.parts) == 1 and limit < ALIGN_NBYTES)
        assert bucket.whole or (len(bucket.parts) == 1 and bucket.first % ALIGN_NBYTES == 0)
    assert list(came.values()) == sizes


@given(st.lists(st.integers(1, 300), min_size=2, max_size=40), st.integers(0, 500))
def test_a_bucket_takes_its_next_neighbour_if_that_fits(sizes: list[int], limit: int) -> None:
    for one, other in pairwise(buckets(sizes, limit)):
        at = -(-one.nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
        assert not one.whole or at + sizes[other.parts[0][0]] > limit // ALIGN_NBYTES * ALIGN_NBYTES


def test_without_buckets_each_comes_alone() -> None:
    assert [bucket.parts for bucket in buckets([4, 0, 4], 0)] == [((0, 0),), ((1, 0),), ((2, 0),)]


def test_a_bucket_is_given_before_the_tensors_behind_it_are_looked_at() -> None:
    read: list[int] = []
    made = buckets((read.append(nbytes) or nbytes for nbytes in [16] * 100), 64)
    assert next(made).nbytes == 64
    assert len(read) == 5


def test_of_tensors_that_share_memory_only_equal_ones_are_tied() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    state = {"whole": whole, "half": whole[:1], "tied": whole.view(2, 3), "half again": whole[:1], "turned": whole.T}
    assert [name for name, _ in own_tensors({**state, "none": whole[:0], "nothing": whole[:0]})] == [
        "whole", "half", "turned", "none", "nothing",
    ]  # fmt: skip
