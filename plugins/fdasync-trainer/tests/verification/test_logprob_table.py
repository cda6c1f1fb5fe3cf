"""Tables of log-probs: what an engine's results become, and what counts as told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fdasync_trainer import ScoredSequence, WeightsName, rollout_logprobs

from fdasync.errors import BadInput
from fdasync.result import CachedTokens, Result, Sample, WeightSpan


def sample(index: int, tokens: tuple[int, ...], spans: tuple[WeightSpan, ...], raw: Any) -> Sample:
    return Sample(
        index=index, token_ids=tokens, text="", raw_logprobs=raw, processed_logprobs=None, top_logprobs=None,
        finish_reason="length", cached=CachedTokens(), weight_version=spans, routing=None, aux={},
    )  # fmt: skip


def test_results_become_a_table_with_the_weights_of_every_token() -> None:
    spans = (WeightSpan(0, 2, "0"), WeightSpan(2, 3, "step-1"))
    values = np.array([-1.5, -0.25, -3.0], np.float32)
    samples = (sample(0, (7, 8, 9), spans, values), sample(1, (), (), np.zeros(0, np.float32)))
    results = [Result(request_id="r", prompt_token_ids=(4, 5), samples=samples)]
    table = rollout_logprobs(results, {"step-1": "cd" * 16})
    assert table.weights == (WeightsName("0"), WeightsName("step-1", "cd" * 16))
    one, empty = table.sequences
    assert one.token_ids.tolist() == [4, 5, 7, 8, 9]
    assert np.isnan(one.logprobs[:2]).all()
    assert one.logprobs[2:].tobytes() == values.tobytes()
    assert one.weights.tolist() == [-1, -1, 0, 0, 1]
    assert (empty.name, len(empty.token_ids), table.tokens) == (("r", 1), 2, 3)
    with pytest.raises(BadInput, match="no processed"):
        rollout_logprobs(results, {}, {"r": 0.5})
    with pytest.raises(BadInput, match="twice"):
        rollout_logprobs(results * 2, {})


def test_a_log_prob_that_is_not_a_number_is_told() -> None:
    """An engine's alone: without weights, or in the prompt, a NaN says nothing."""
    values = np.array([-1.5, np.nan, -3.0], np.float32)
    result = Result(
        request_id="r", prompt_token_ids=(4, 5), samples=(sample(0, (7, 8, 9), (WeightSpan(0, 3, "0"),), values),)
    )
    table = rollout_logprobs([result], {})
    (one,) = table.sequences
    assert one.told.tolist() == [False, False, True, True, True]
    assert table.tokens == 3
    nothing = np.full(3, np.nan, np.float32)
    for prompt_len, weights, told in (
        (1, [0, 0, 0], [False, True, True]),
        (0, [0, 0, 0], [False, True, True]),
        (3, [0, 0, 0], [False] * 3),
        (1, [-1, -1, 0], [False, False, True]),
    ):
        other = ScoredSequence(
            request_id="r", token_ids=np.zeros(3, np.int32), prompt_len=prompt_len, logprobs=nothing,
            weights=np.array(weights, np.int32),
        )  # fmt: skip
        assert other.told.tolist() == told
