"""In which broadcasts tensors come: every byte once, in order, aligned, and no bucket larger than asked for."""

from __future__ import annotations

from itertools import pairwise

from fdasync_transformers.weights.groups.framing import ALIGN_NBYTES, buckets
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(0, 300), max_size=40), st.integers(0, 500))
def test_every_tensor_has_a_place_of_its_own(sizes: list[int], limit: int) -> None:
    made = buckets(sizes, limit)
    numbers = [number for bucket in made for number, _ in bucket.parts]
    assert numbers == list(range(len(sizes)))
    for bucket in made:
        ends = [at + sizes[number] for number, at in bucket.parts]
        assert all(at % ALIGN_NBYTES == 0 for _, at in bucket.parts)
        assert all(at >= end for (_, at), end in zip(bucket.parts[1:], ends, strict=False))
        assert bucket.nbytes == ends[-1]
        assert bucket.nbytes <= limit or len(bucket.parts) == 1


@given(st.lists(st.integers(1, 300), min_size=2, max_size=40), st.integers(0, 500))
def test_a_bucket_takes_its_next_neighbour_if_that_fits(sizes: list[int], limit: int) -> None:
    made = buckets(sizes, limit)
    for one, other in pairwise(made):
        at = -(-one.nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
        assert at + sizes[other.parts[0][0]] > limit


def test_without_buckets_each_comes_alone() -> None:
    assert [bucket.parts for bucket in buckets([4, 0, 4], 0)] == [((0, 0),), ((1, 0),), ((2, 0),)]
