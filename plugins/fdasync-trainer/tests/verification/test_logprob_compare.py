"""What a comparison of two tables counts, and the first place that it names."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from fdasync_trainer import LogprobTable, ScoredSequence, WeightsName, compare_logprobs
from fdasync_trainer.verification.logprob_compare import ulps_between
from hypothesis import given
from hypothesis import strategies as st

from fdasync.errors import BadInput

FLOATS = st.floats(width=32, allow_nan=False)
WEIGHTS = (WeightsName("0", "ab" * 16),)


def sequence(name: str, values: list[float], **changes: Any) -> ScoredSequence:
    logprobs = np.array([np.nan, *values], np.float32)
    made: dict[str, Any] = {
        "request_id": name, "token_ids": np.arange(len(logprobs), dtype=np.int32), "prompt_len": 1,
        "logprobs": logprobs, "weights": np.where(np.isnan(logprobs), -1, 0).astype(np.int32),
    }  # fmt: skip
    return ScoredSequence(**{**made, **changes})


def table(*sequences: ScoredSequence, weights: tuple[WeightsName, ...] = WEIGHTS) -> LogprobTable:
    return LogprobTable(sequences, weights)


def up(value: float, steps: int) -> float:
    """The float32 so many steps further from 0."""
    return float((np.array([value], np.float32).view(np.int32) + steps).view(np.float32)[0])


@given(st.lists(FLOATS, max_size=8))
def test_equal_bits_are_equal(values: list[float]) -> None:
    found = compare_logprobs(table(sequence("a", values)), table(sequence("a", values)))
    assert found.ok == bool(values)
    assert (found.tokens, found.differing, found.first) == (len(values), 0, None)


@given(FLOATS, FLOATS)
def test_ulps_are_the_float32_numbers_in_between(one: float, other: float) -> None:
    a, b = np.array([one], np.float32), np.array([other], np.float32)
    count = int(ulps_between(a, b)[0])
    assert count == int(ulps_between(b, a)[0])
    assert (count == 0) == (a[0] == b[0])
    if 0 < count <= 16:
        low, high = sorted((a[0], b[0]))
        for _ in range(count):
            low = np.nextafter(low, np.float32(np.inf))
        assert low == high


def test_the_first_request_and_position_are_named() -> None:
    ours = table(sequence("a", [-1.0, -2.0]), sequence("b", [-3.0, -4.0, -5.0]), sequence("c", [-6.0]))
    theirs = table(
        sequence("c", [up(-6.0, 40)]), sequence("b", [-3.0, up(-4.0, 3), up(-5.0, -2)]), sequence("a", [-1.0, -2.0])
    )
    found = compare_logprobs(ours, theirs)
    assert (found.ok, found.sequences, found.tokens, found.differing) == (False, 3, 6, 3)
    assert found.largest_ulps == 40
    assert found.largest_difference == abs(up(-6.0, 40) + 6.0)
    first = found.first
    assert first is not None
    assert (first.request_id, first.position, first.token_id, first.ulps, first.version) == ("b", 2, 2, 3, "0")
    assert (first.rollout, first.trainer) == (-4.0, up(-4.0, 3))
    assert (first.layer, first.layer_position) == (None, None)
    assert found.as_dict()["ok"] is False


def test_the_sign_of_zero_is_a_bit() -> None:
    found = compare_logprobs(table(sequence("a", [0.0])), table(sequence("a", [-0.0])))
    assert (found.differing, found.largest_ulps, found.ok) == (1, 0, False)


def test_what_the_trainer_lacks_is_missing_and_no_agreement() -> None:
    ours = table(sequence("a", [-1.0, -2.0]), sequence("b", [-3.0]))
    found = compare_logprobs(ours, table(sequence("a", [-1.0, float("nan")]), sequence("z", [-3.0])))
    assert (found.tokens, found.missing, found.differing, found.ok) == (3, 2, 0, False)
    assert found.first is not None
    assert (found.first.position, found.first.trainer, found.first.ulps) == (2, None, None)
    # what only the trainer tells does not count
    nothing = compare_logprobs(table(sequence("a", [float("nan")])), table(sequence("a", [-1.0])))
    assert (nothing.tokens, nothing.missing, nothing.ok) == (0, 0, False)


def test_a_log_prob_of_the_rollout_that_is_not_a_number_agrees_with_nothing() -> None:
    nan = float("nan")
    ours = table(sequence("a", [-1.0, nan, -2.0], weights=np.array([-1, 0, 0, 0], np.int32)))
    for values in ([-1.0, -1.5, -2.0], [-1.0, nan, -2.0]):
        found = compare_logprobs(ours, table(sequence("a", values)))
        assert (found.ok, found.tokens, found.differing, found.not_numbers) == (False, 3, 0, 1)
        assert found.missing == np.isnan(values).sum()
        first = found.first
        assert first is not None
        assert (first.position, first.ulps) == (2, None)
        assert np.isnan(first.rollout)
        assert first.trainer == (None if np.isnan(values[1]) else -1.5)
    assert compare_logprobs(ours, ours).not_numbers == 1
    assert not compare_logprobs(ours, ours).ok


def test_other_weights_are_no_agreement_though_the_bits_are() -> None:
    ours, theirs = sequence("a", [-1.0, -2.0]), sequence("a", [-1.0, -2.0])
    other = compare_logprobs(table(ours), table(theirs, weights=(WeightsName("7", "cd" * 16),)))
    assert (other.ok, other.differing, other.other_weights) == (False, 0, 2)
    # labels are names alone, and weights that a side does not name are not compared
    for weights in ((WeightsName("7", "ab" * 16),), (WeightsName("7"),)):
        assert compare_logprobs(table(ours), table(theirs, weights=weights)).ok
    untold = msgspec.structs.replace(theirs, weights=np.full(3, -1, np.int32))
    assert compare_logprobs(table(ours), table(untold, weights=())).ok


def test_digests_name_the_first_layer_before_the_token() -> None:
    digests = np.arange(12, dtype=np.uint64).reshape(4, 3)
    theirs = digests.copy()
    # position 1, layer 1, and what follows of it; layer 0 of the last position is behind the token
    theirs[1:, 2], theirs[1, 1], theirs[3, 0] = 99, 98, 97
    ours = sequence("a", [-1.0, -2.0, -3.0], digests=digests)
    other = sequence("a", [-1.0, -2.5, -3.5], digests=theirs)
    first = compare_logprobs(table(ours), table(other)).first
    assert first is not None
    assert (first.position, first.layer, first.layer_position) == (2, 1, 1)
    same = compare_logprobs(table(ours), table(msgspec.structs.replace(other, digests=digests))).first
    assert same is not None
    assert (same.layer, same.layer_position) == (-1, None)
    with pytest.raises(BadInput, match="2 layers"):
        compare_logprobs(table(ours), table(msgspec.structs.replace(other, digests=digests[:, :2])))


def test_other_tokens_or_temperatures_are_refused() -> None:
    ours = table(sequence("a", [-1.0, -2.0]))
    for bad, problem in (
        (sequence("a", [-1.0]), "has 2 tokens"),
        (sequence("a", [-1.0, -2.0], token_ids=np.array([0, 1, 9], np.int32)), "token 9 at 2, the rollout has 2"),
        (sequence("a", [-1.0, -2.0], temperature=0.5), "temperature 0.5"),
        (sequence("a", [-1.0, -2.0], temperature=1.0 + 2**-40), "temperature 1.0000000000009095"),
    ):
        with pytest.raises(BadInput, match=problem):
            compare_logprobs(ours, table(bad))
