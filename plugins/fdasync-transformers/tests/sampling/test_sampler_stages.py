"""The sampler's three stages, and a device that nothing waits for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from device_waits import waits_raise
from fdasync_transformers.sampling.sampler import compute_samples, plan_samples, read_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import sample
from sampler_cases import VOCAB, make, one, rows, spec, staged

from fdasync.errors import InvariantBroken, RunnerError
from fdasync.result import TopLogprobs

if TYPE_CHECKING:
    from fdasync.request import SamplerSpec


@pytest.mark.ci
@settings(max_examples=150, deadline=None)
@given(rows, st.randoms(use_true_random=False))
def test_stages_read_histories_by_lane_and_never_past_their_ends(drawn: Any, random: Any) -> None:
    logits, own, positions, histories = make(drawn)
    lanes = list(range(9))
    random.shuffle(lanes)
    # what other lanes hold, and what is past a row's end, are tokens like any other
    table = torch.from_numpy(np.random.default_rng(0).integers(-3, VOCAB + 3, (9, 16)).astype(np.int32))
    for lane, history in zip(lanes, histories, strict=False):
        table[lane, : len(history)] = torch.from_numpy(history)
    before = table.clone()
    plan = plan_samples(own, np.array(positions), np.array(lanes[: len(own)]))
    assert staged(logits, plan, table if plan.needs_history else None) == sample(logits, own, positions, histories)
    assert torch.equal(table, before)


@pytest.mark.ci
@settings(max_examples=150, deadline=None)
@given(rows, st.integers(0, 6))
def test_a_batch_cut_in_two_gives_the_same_tokens(drawn: list[tuple[SamplerSpec, int, int]], cut: int) -> None:
    logits, own, positions, histories = make(drawn)
    halves = [
        sample(logits[part], own[part], positions[part], histories[part]) for part in (slice(cut), slice(cut, None))
    ]
    assert [token for half in halves for token in half.tokens] == sample(logits, own, positions, histories).tokens


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy_logprobs": {"raw": True, "processed": True, "top": 3},
    "greedy_processed": {"processed": True, "top": 2},
    "drawn": {"temperature": 1.0},
    "drawn_raw": {"temperature": 0.7, "raw": True, "top": 2},
    "drawn_processed": {"temperature": 0.7, "processed": True, "top": 20},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_k_of_all": {"temperature": 1.0, "top_k": 20},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.5, "temperature": 1.0},
    "frequency": {"frequency_penalty": 0.5, "processed": True},
    "bias": {"bias": {2: 4.0, 9: -100.0, 99: 1.0}, "raw": True},
    "bias_drawn": {"bias": {7: 2.0}, "temperature": 1.0, "processed": True},
    "stops": {"min_tokens": 9, "stop_ids": (1, 4, 99)},
    "all_stops": {"min_tokens": 9, "stop_ids": tuple(range(VOCAB))},
}


def batches() -> list[Any]:
    """Each feature for every row, for one of several, and all of them together."""
    every = [spec(**changes) for changes in FEATURES.values()]
    some = [
        pytest.param([spec(), own, spec(temperature=2.0)], id=f"{name}_mixed")
        for name, own in zip(FEATURES, every, strict=True)
    ]
    alone = [pytest.param([own] * 2, id=name) for name, own in zip(FEATURES, every, strict=True)]
    return [*alone, *some, pytest.param(every, id="together")]


@pytest.mark.parametrize("own", batches())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_stages_are_one_call_and_change_nothing(own: list[SamplerSpec], dtype: torch.dtype) -> None:
    count = len(own)
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens = torch.randint(-2, VOCAB + 2, (count, 8), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    plan = plan_samples(own, [5] * count, range(count))
    sent = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
    assert all(array.size and array.dtype.name in ("int64", "float32", "float64") for array in plan.arrays.values())
    assert plan.needs_history == any(_penalised(s) for s in own)
    before = logits.clone(), tokens.clone(), {name: values.clone() for name, values in sent.items()}
    real = compute_samples(logits, plan, sent, tokens if plan.needs_history else None)
    assert torch.equal(logits, before[0])
    assert torch.equal(tokens, before[1])
    assert all(torch.equal(sent[name], values) for name, values in before[2].items())
    out = read_samples(plan, {name: values.numpy() for name, values in real.items()})
    histories = [row[:5] for row in tokens.numpy()]
    assert out == sample(logits, own, [5] * count, histories)


def _penalised(own: SamplerSpec) -> bool:
    return own.repetition_penalty != 1.0 or own.presence_penalty != 0.0 or own.frequency_penalty != 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", FEATURES)
def test_rows_without_a_distribution_give_ids_in_range_until_they_are_read(bad: float, name: str) -> None:
    # on a device an index out of range would end everything, and the failure is known only later
    own = [spec(**FEATURES[name])] * 3
    logits = torch.zeros(3, VOCAB)
    logits[1] = bad
    plan = plan_samples(own, [5] * 3, range(3))
    sent = {n: torch.from_numpy(array) for n, array in plan.arrays.items()}
    results = compute_samples(logits, plan, sent, torch.zeros(3, 8, dtype=torch.int32))
    assert ((results["tokens"] >= 0) & (results["tokens"] < VOCAB)).all()
    assert results["finite"].tolist() == [True, False, True]
    with pytest.raises(RunnerError, match="row 1 "):
        read_samples(plan, {n: values.numpy() for n, values in results.items()})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_stop_mask_hides_no_broken_logit(bad: float) -> None:
    with pytest.raises(RunnerError, match="row 0 "):
        one([1.0, bad, 0.0], spec(min_tokens=9, stop_ids=(1,)))


def test_rows_that_did_not_ask_have_zeros_and_alternatives_are_made_once() -> None:
    own = [spec(temperature=1.0, processed=True, raw=True, top=2), spec(temperature=1.0, top=2), spec()]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    plan = plan_samples(own, [5] * 3, range(3))
    sent = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
    results = compute_samples(logits, plan, sent, None)
    assert results["top_ids"].shape == (1, 2)
    out = read_samples(plan, {name: values.numpy() for name, values in results.items()})
    for values in (out.raw, out.processed):
        assert values is not None
        assert values[0] < 0.0
        assert values[1:] == [0.0, 0.0]
    assert out.top is not None
    assert out.top[1:] == [None, None]


def test_alternatives_arrive_in_any_order() -> None:
    plan = plan_samples([spec(raw=True, top=4)], [5], [0])
    arrays = {
        "tokens": np.array([3]),
        "finite": np.array([True]),
        "raw": np.array([-1.0], np.float32),
        "top_values": np.array([[-2.0, float("-inf"), -1.0, -1.0]]),
        "top_ids": np.array([[5, 0, 9, 3]]),
    }
    top = read_samples(plan, arrays).top
    assert top is not None
    assert top[0] == TopLogprobs((3, 9, 5), (-1.0, -1.0, -2.0))


def test_logits_may_be_a_view_of_any_strides() -> None:
    own = [spec(temperature=1.0, raw=True, processed=True, top=2, repetition_penalty=1.5, seed=i) for i in range(4)]
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(5))
    rest = ([5] * 4, [np.arange(5, dtype=np.int32)] * 4)
    expected = sample(logits, own, *rest)
    assert sample(torch.cat([logits, logits], dim=1)[:, :40], own, *rest) == expected
    assert sample(logits.t().contiguous().t(), own, *rest) == expected


def test_plans_that_do_not_fit_are_defects() -> None:
    with pytest.raises(InvariantBroken, match="1 specs"):
        plan_samples([spec()], [5, 6], [0, 1])
    plan = plan_samples([spec(presence_penalty=1.0)], [5], [0])
    sent = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
    with pytest.raises(InvariantBroken, match="1 planned"):
        compute_samples(torch.zeros(2, 5), plan, sent, None)
    with pytest.raises(InvariantBroken, match="no known tokens"):
        compute_samples(torch.zeros(1, 5), plan, sent, None)
    with pytest.raises(InvariantBroken, match="4 known tokens"):
        compute_samples(torch.zeros(1, 5), plan, sent, torch.zeros(1, 4, dtype=torch.int32))


def test_a_step_output_has_the_same_in_tuples() -> None:
    out = one([1.0, 2.0, 0.5], spec(raw=True, processed=True, top=1))
    step = out.step_output(7)
    assert (step.step_id, step.tokens, step.raw, step.processed) == (7, (1,), tuple(out.raw), tuple(out.processed))
    assert step.top == tuple(out.top)
    bare = one([1.0, 2.0, 0.5], spec()).step_output(8)
    assert (bare.raw, bare.processed, bare.top) == (None, None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [VOCAB, 151_936])
@pytest.mark.parametrize("own", batches())
def test_a_gpu_is_never_waited_for_and_agrees_with_the_cpu(own: list[SamplerSpec], width: int) -> None:
    count = len(own)
    logits = torch.randn(count, width, generator=torch.Generator().manual_seed(1)) * 3
    tokens = torch.randint(-2, width + 2, (count, 8), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    plan = plan_samples(own, [5] * count, range(count))
    expected = staged(logits, plan, tokens)
    sent = {name: torch.from_numpy(array).cuda() for name, array in plan.arrays.items()}
    there = logits.cuda(), tokens.cuda()
    with waits_raise():
        results = compute_samples(there[0], plan, sent, there[1])
    out = read_samples(plan, {name: values.cpu().numpy() for name, values in results.items()})
    assert out.tokens == expected.tokens
    assert out.raw == (None if expected.raw is None else pytest.approx(expected.raw, abs=1e-5))
    assert out.processed == (None if expected.processed is None else pytest.approx(expected.processed, abs=1e-5))
    assert (out.top is None) == (expected.top is None)
    for mine, other in zip(out.top or (), expected.top or (), strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert mine.token_ids == other.token_ids
            assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_rows_that_do_not_count_are_left_out():
    """Bad logits among them too; alternatives stay with their rows."""
    logits = torch.randn((4, 9), generator=torch.Generator().manual_seed(2))
    logits[1, 3] = math.nan
    own = [spec(raw=True, top=2), spec(raw=True, top=2), spec(), spec(processed=True, top=1)]
    plan = plan_samples(own, [5] * 4, range(4))
    sent = {name: torch.from_numpy(values) for name, values in plan.arrays.items()}
    arrays = {name: values.numpy() for name, values in compute_samples(logits, plan, sent, None).items()}
    with pytest.raises(RunnerError, match="row 1"):
        read_samples(plan, arrays)
    out = read_samples(plan, arrays, np.array([0, 3]))
    kept = [0, 3]
    plan = plan_samples([own[row] for row in kept], [5] * 2, range(2))
    sent = {name: torch.from_numpy(values) for name, values in plan.arrays.items()}
    results = compute_samples(logits[kept], plan, sent, None)
    assert out == read_samples(plan, {name: values.numpy() for name, values in results.items()})
    assert out.top is not None
