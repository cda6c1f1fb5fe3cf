"""The sampler against a plain per-row rewrite of its rules, and the properties that engines rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_transformers.sampling.sampler import SampleOutput, uniform
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import sample
from sampler_cases import by_hand, log_softmax, make, one, rows, spec

from fdasync.errors import InvariantBroken, RunnerError

if TYPE_CHECKING:
    from fdasync.request import SamplerSpec


@pytest.mark.ci
@settings(max_examples=250, deadline=None)
@given(rows)
def test_every_row_follows_the_rules(drawn: list[tuple[SamplerSpec, int, int]]) -> None:
    logits, own, positions, histories = make(drawn)
    before = logits.clone(), [h.copy() for h in histories]
    out = sample(logits, own, positions, histories)
    assert torch.equal(logits, before[0])
    assert all(np.array_equal(a, b) for a, b in zip(histories, before[1], strict=True))
    assert (out.raw is None) == (not any(s.raw for s in own))
    assert (out.processed is None) == (not any(s.processed for s in own))
    for i, s in enumerate(own):
        given_logits = logits[i].numpy()
        adjusted, probs = by_hand(given_logits, s, positions[i], histories[i].tolist())
        token = out.tokens[i]
        if s.temperature == 0.0:
            assert token == adjusted.argmax()
        else:
            assert probs[token] > 0
            noise = uniform(s.seed, s.index, positions[i])
            assert probs[:token].sum() <= noise + 1e-6
            assert noise <= probs[: token + 1].sum() + 1e-6
        raw = log_softmax(given_logits.astype(np.float64))
        with np.errstate(divide="ignore"):
            processed = log_softmax(adjusted) if s.temperature == 0.0 else np.log(probs)
        if s.raw:
            assert out.raw is not None
            assert out.raw[i] == pytest.approx(raw[token], rel=1e-6, abs=1e-5)
        if s.processed:
            assert out.processed is not None
            assert out.processed[i] == pytest.approx(processed[token], rel=1e-6, abs=1e-5)
        top = out.top[i] if out.top is not None else None
        if s.top and (s.raw or s.processed):
            table = raw if s.raw else processed
            assert top is not None
            assert len(top.token_ids) == len(set(top.token_ids)) == min(s.top, int((table > -np.inf).sum()))
            assert top.logprobs == pytest.approx(np.sort(table)[::-1][: len(top.token_ids)], rel=1e-6, abs=1e-5)
            assert top.logprobs == pytest.approx(table[list(top.token_ids)], rel=1e-6, abs=1e-5)
            assert list(top.logprobs) == sorted(top.logprobs, reverse=True)
        else:
            assert top is None


@pytest.mark.ci
@settings(max_examples=100, deadline=None)
@given(rows, st.randoms(use_true_random=False))
def test_the_batch_around_a_row_changes_nothing(drawn: list[tuple[SamplerSpec, int, int]], random: Any) -> None:
    logits, own, positions, histories = make(drawn)
    whole = sample(logits, own, positions, histories)
    order = list(range(len(own)))
    random.shuffle(order)
    mixed = sample(logits[order], *([[values[i] for i in order] for values in (own, positions, histories)]))
    for place, i in enumerate(order):
        alone = sample(logits[i : i + 1], own[i : i + 1], positions[i : i + 1], histories[i : i + 1])
        for at, out in ((place, mixed), (0, alone)):
            assert out.tokens[at] == whole.tokens[i]
            if own[i].raw:
                assert out.raw[at] == pytest.approx(whole.raw[i], abs=1e-6)
            if own[i].processed:
                assert out.processed[at] == pytest.approx(whole.processed[i], abs=1e-6)
            if own[i].top and (own[i].raw or own[i].processed):
                assert out.top[at].token_ids == whole.top[i].token_ids
                assert out.top[at].logprobs == pytest.approx(whole.top[i].logprobs, abs=1e-6)


def test_a_wide_vocabulary_in_a_batch_of_128() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(128, 5003, generator=generator) * 3
    kinds = [
        {},
        {"temperature": 0.8, "raw": True},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "processed": True, "top": 3},
        {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.2, "raw": True, "processed": True},
    ]
    own = [spec(seed=i, **kinds[i % 4]) for i in range(128)]
    positions = [5 + i for i in range(128)]
    histories = [np.arange(i, i + 5, dtype=np.int32) for i in range(128)]
    whole = sample(logits, own, positions, histories)
    assert len(set(whole.tokens)) > 60
    for i in range(0, 128, 7):
        alone = sample(logits[i : i + 1], own[i : i + 1], positions[i : i + 1], histories[i : i + 1])
        assert alone.tokens == [whole.tokens[i]]
        if own[i].processed:
            assert alone.processed[0] == pytest.approx(whole.processed[i], abs=1e-6)


# -- noise --------------------------------------------------------------------------------------


def test_noise_is_pinned() -> None:
    # a change here changes every seeded output of every user
    assert uniform(0, 0, 0) == 0.4368875400848604
    assert uniform(2**63 - 1, 3, 100_000) == 0.6939037884636767


def test_noise_depends_on_each_of_its_three_numbers_and_is_even() -> None:
    values = [uniform(seed, index, position) for seed in range(12) for index in range(12) for position in range(70)]
    assert len(set(values)) == len(values)
    assert 0.0 <= min(values) < max(values) < 1.0
    counts, _ = np.histogram(values, bins=50, range=(0.0, 1.0))
    expected = len(values) / 50
    # chi-squared with 49 degrees of freedom: 85.4 is the 99.9 % point
    assert ((counts - expected) ** 2 / expected).sum() < 85.4
    # neighbours are unrelated
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_recomputing_a_position_gives_the_same_token_and_the_next_one_another() -> None:
    logits = torch.zeros(1, 4096)
    own = [spec(temperature=1.0, seed=9)]
    draws = [sample(logits, own, [position], [np.zeros(0, np.int32)]).tokens[0] for position in [5, 6, 7, 5, 6, 7]]
    assert draws[:3] == draws[3:]
    assert len(set(draws)) == 3
    other = [spec(temperature=1.0, seed=9, index=1)]
    assert sample(logits, other, [5], [np.zeros(0, np.int32)]).tokens[0] != draws[0]


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 2.0}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}, {"presence_penalty": 1.0}],
    ids=lambda changes: "".join(changes) or "plain",
)
def test_what_is_drawn_has_the_distribution_asked_for(changes: dict[str, Any]) -> None:
    count = 6000
    row = np.array([0.1, 2.0, -1.0, 1.5, 0.0, 2.0, -3.0, 1.0], dtype=np.float32)
    own = [spec(**({"temperature": 1.0, "seed": i // 100} | changes)) for i in range(count)]
    positions = [3 + i % 100 for i in range(count)]  # runs of neighbouring positions, as real outputs are
    history = np.array([1, 2, 3, 3, 5], dtype=np.int32)
    logits = torch.from_numpy(np.tile(row, (count, 1)))
    tokens = sample(logits, own, positions, [history] * count).tokens
    _, probs = by_hand(row, own[0], 5, history.tolist())
    seen = np.bincount(tokens, minlength=8)
    assert (seen[probs == 0] == 0).all()
    live = probs > 0
    expected = probs[live] * count
    # 7 degrees of freedom at most: 24.3 is the 99.9 % point
    assert ((seen[live] - expected) ** 2 / expected).sum() < 24.3


# -- ends and corners ---------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.25, 1.0 - 2.0**-53])
def test_the_ends_never_give_a_token_of_probability_zero(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fdasync_transformers.sampling.plan.uniform", lambda *_: noise)
    logits = torch.full((3, 1001), float("-inf"))
    logits[0, 400:600] = torch.randn(200, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = 3.0
    logits[2] = torch.linspace(-50, 50, 1001)
    tokens = sample(logits, [spec(temperature=1.0)] * 3, [5] * 3, [np.zeros(0, np.int32)] * 3).tokens
    assert 400 <= tokens[0] < 600
    assert tokens[1] == 7
    if noise == 0.0:
        # the first id whose probability is not below 2^-53 of the likeliest
        assert (tokens[0], tokens[2]) == (400, 633)
    elif noise > 0.9:
        assert (tokens[0], tokens[2]) == (599, 1000)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1e-4])
def test_tiny_temperatures_are_greedy_and_finite(temperature: float) -> None:
    out = one([1.0, 3.0, 2.9, -1e4], spec(temperature=temperature, processed=True, raw=True))
    assert out.tokens == [1]
    assert out.processed == [pytest.approx(0.0)]


def test_equal_logits_go_to_the_lowest_id() -> None:
    assert one([1.0, 2.0, 2.0, 2.0], spec()).tokens == [1]
    assert one([1.0, 2.0, 2.0, 2.0], spec(raw=True, top=2)).top[0].token_ids == (1, 2)
    for seed in range(40):
        assert one([1.0, 2.0, 2.0, 2.0], spec(temperature=1.0, top_k=2, seed=seed)).tokens[0] in (1, 2)
        assert one([1.0, 2.0, 2.0, 2.0], spec(temperature=1.0, top_p=0.5, seed=seed)).tokens[0] in (1, 2)


def test_greedy_passes_filters_over_and_reports_at_temperature_one() -> None:
    row = np.array([0.5, 2.0, 1.0], dtype=np.float32)
    out = one(row, spec(top_k=1, top_p=0.1, min_p=1.0, raw=True, processed=True))
    assert out.tokens == [1]
    assert out.raw == pytest.approx([log_softmax(row)[1]], abs=1e-6)
    assert out.processed == pytest.approx(out.raw, abs=1e-6)


def test_stop_ids_wait_for_min_tokens() -> None:
    own = spec(min_tokens=2, stop_ids=(1,), prompt_len=3)
    assert one([0.0, 5.0, 1.0], own, position=4).tokens == [2]  # one was sampled
    assert one([0.0, 5.0, 1.0], own, position=5).tokens == [1]  # two were
    # a mask that leaves nothing would stop the engine; min_tokens yields instead
    assert one([0.0, 5.0, 1.0], spec(min_tokens=9, stop_ids=(0, 1, 2))).tokens == [1]
    assert one([0.0, 5.0, float("-inf")], spec(min_tokens=9, stop_ids=(0, 1))).tokens == [1]


def test_penalties_count_prompt_and_output_as_they_should() -> None:
    row = [2.0, 1.9, -1.0]
    # token 0 is in the prompt only: repetition sees it, presence and frequency do not
    assert one(row, spec(repetition_penalty=1.5, prompt_len=3), history=[0, 0, 0]).tokens == [1]
    assert one(row, spec(presence_penalty=2.0, frequency_penalty=2.0, prompt_len=3), history=[0, 0, 0]).tokens == [0]
    assert one(row, spec(presence_penalty=0.5, prompt_len=3), history=[2, 2, 2, 0]).tokens == [1]
    once, twice = ([2, 2, 2, *[0] * n] for n in (1, 2))
    assert one(row, spec(frequency_penalty=0.07), history=once).tokens == [0]
    assert one(row, spec(frequency_penalty=0.07), history=twice).tokens == [1]
    # ids beyond the vocabulary have no logit to lower
    assert one(row, spec(repetition_penalty=1.5), history=[7, 0, -1, 9]).tokens == [1]


def test_a_bias_is_added_behind_the_penalties() -> None:
    row = [2.0, 1.9, -1.0]
    assert one(row, spec(bias={2: 3.2})).tokens == [2]
    assert one(row, spec(bias={0: -0.2})).tokens == [1]
    # no repetition penalty scales it
    mild = spec(bias={1: 3.0, 0: -3.0}, repetition_penalty=0.5)
    assert one([-2.0, -1.0, -9.0], mild, history=[0, 1, 0, 0, 2]).tokens == [1]
    harsh = spec(bias={1: 100.0}, repetition_penalty=1e3)
    assert one(row, harsh, history=[1, 1, 1]).tokens == [1]
    # a stop mask stands above it
    assert one(row, spec(bias={1: 100.0}, min_tokens=9, stop_ids=(1,))).tokens == [0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_raw_log_probs_are_without_the_bias_and_processed_ones_with_it(temperature: float) -> None:
    row = np.array([2.0, 1.9, -1.0])
    out = one(row, spec(bias={2: 100.0, 5: 9.0}, raw=True, processed=True, temperature=temperature))
    assert out.tokens == [2]
    assert out.raw == pytest.approx([log_softmax(row)[2]], abs=1e-6)
    assert out.processed == pytest.approx([0.0], abs=1e-6)


def test_float16_logits_and_an_empty_batch() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.bfloat16)
    assert sample(logits, [spec(raw=True, top=1)], [5], [np.zeros(0, np.int32)]).top[0].token_ids == (1,)
    assert sample(torch.zeros(0, 4), [], [], []) == SampleOutput([])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_fail_by_row(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    with pytest.raises(RunnerError, match="row 1"):
        sample(logits, [spec(temperature=temperature)] * 3, [5] * 3, [np.zeros(0, np.int32)] * 3)


def test_lengths_that_disagree_are_a_defect() -> None:
    with pytest.raises(InvariantBroken, match="2 specs"):
        sample(torch.zeros(3, 5), [spec()] * 2, [5] * 3, [np.zeros(0, np.int32)] * 3)
