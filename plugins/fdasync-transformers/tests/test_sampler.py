"""The sampler against a plain per-row rewrite of its rules, and the properties that engines rely on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from device_waits import waits_raise
from fdasync_transformers.sampler import (
    SampleOutput,
    SamplePlan,
    compute_samples,
    plan_samples,
    read_samples,
    sample,
    uniform,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fdasync.errors import InvariantBroken, RunnerError
from fdasync.request import SamplerSpec
from fdasync.result import TopLogprobs

OFF: dict[str, Any] = {
    "prompt_len": 3,
    "seed": 1,
    "index": 0,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "stop_ids": (),
    "raw": False,
    "processed": False,
    "top": 0,
}


def spec(**changes: Any) -> SamplerSpec:
    return SamplerSpec(**(OFF | changes))


def one(logits: Any, own: SamplerSpec, position: int = 5, history: Any = (0, 1, 2, 0, 1)) -> SampleOutput:
    return sample(torch.as_tensor(logits).float()[None], [own], [position], [np.asarray(history, dtype=np.int32)])


# -- the rules, one row at a time, in plain Python ----------------------------------------------


def by_hand(logits: np.ndarray, own: SamplerSpec, position: int, history: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(logits after mask and penalties, probabilities sampled from), float64."""
    x = logits.astype(np.float64).copy()
    for token in set(history):
        x[token] = x[token] / own.repetition_penalty if x[token] > 0 else x[token] * own.repetition_penalty
    for token in set(history[own.prompt_len :]):
        x[token] -= own.presence_penalty + own.frequency_penalty * history[own.prompt_len :].count(token)
    if position - own.prompt_len < own.min_tokens and set(own.stop_ids) < set(range(len(x))):
        x[list(own.stop_ids)] = -np.inf
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if own.temperature == 0.0:
        one_hot = np.zeros(len(x))
        one_hot[order[0]] = 1.0
        return x, one_hot
    p = np.exp((x - x.max()) / own.temperature)
    if own.top_k:
        p[order[own.top_k :]] = 0.0
    p /= p.sum()
    mass, kept = 0.0, []
    for token in order:
        if mass >= own.top_p:
            break
        kept.append(token)
        mass += p[token]
    p[[token for token in order if token not in kept]] = 0.0
    p[p < own.min_p * p.max()] = 0.0
    return x, p / p.sum()


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - x.max() - math.log(np.exp(x - x.max()).sum())


VOCAB = 11
specs = st.builds(
    spec,
    prompt_len=st.integers(1, 4),
    seed=st.integers(0, 2**63 - 1),
    index=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB]),
    # values that no sum of probabilities meets, so that rounding cannot decide
    top_p=st.sampled_from([1.0, 0.123457, 0.543211, 0.912347]),
    min_p=st.sampled_from([0.0, 0.0512345, 0.5123451, 1.0]),
    # powers of two: exact in float32 as in float64, so that equal logits stay equal in both
    repetition_penalty=st.sampled_from([1.0, 0.5, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    min_tokens=st.integers(0, 6),
    stop_ids=st.lists(st.integers(0, VOCAB - 1), max_size=4).map(tuple),
    raw=st.booleans(),
    processed=st.booleans(),
    top=st.integers(0, 4),
)
rows = st.lists(
    st.tuples(specs, st.integers(0, 6), st.integers(0, 2**31)),
    min_size=1,
    max_size=6,
)


def make(drawn: list[tuple[SamplerSpec, int, int]]) -> tuple[torch.Tensor, list[SamplerSpec], list[int], list[Any]]:
    logits, histories, positions = [], [], []
    for own, outputs, seed in drawn:
        rng = np.random.default_rng(seed)
        # a coarse grid, so that equal logits are common
        logits.append(rng.integers(-8, 9, VOCAB) * 0.5)
        histories.append(rng.integers(0, VOCAB, own.prompt_len + outputs).astype(np.int32))
        positions.append(own.prompt_len + outputs)
    return torch.tensor(np.array(logits), dtype=torch.float32), [d[0] for d in drawn], positions, histories


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
            assert out.raw[i] == pytest.approx(raw[token], abs=1e-5)
        if s.processed:
            assert out.processed is not None
            assert out.processed[i] == pytest.approx(processed[token], abs=1e-5)
        top = out.top[i] if out.top is not None else None
        if s.top and (s.raw or s.processed):
            table = raw if s.raw else processed
            assert top is not None
            assert len(top.token_ids) == len(set(top.token_ids)) == min(s.top, int((table > -np.inf).sum()))
            assert top.logprobs == pytest.approx(np.sort(table)[::-1][: len(top.token_ids)], abs=1e-5)
            assert top.logprobs == pytest.approx(table[list(top.token_ids)], abs=1e-5)
            assert list(top.logprobs) == sorted(top.logprobs, reverse=True)
        else:
            assert top is None


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
    monkeypatch.setattr("fdasync_transformers.sample_plan.uniform", lambda *_: noise)
    logits = torch.full((3, 1001), float("-inf"))
    logits[0, 400:600] = torch.randn(200, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = 3.0
    logits[2] = torch.linspace(-50, 50, 1001)
    tokens = sample(logits, [spec(temperature=1.0)] * 3, [5] * 3, [np.zeros(0, np.int32)] * 3).tokens
    assert 400 <= tokens[0] < 600
    assert tokens[1] == 7
    if noise == 0.0:
        assert (tokens[0], tokens[2]) == (400, 0)
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


# -- three stages, and a device that nobody waits for -------------------------------------------


def staged(logits: torch.Tensor, plan: SamplePlan, tokens: torch.Tensor | None) -> SampleOutput:
    sent = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
    results = compute_samples(logits, plan, sent, tokens)
    return read_samples(plan, {name: values.numpy() for name, values in results.items()})


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


@settings(max_examples=150, deadline=None)
@given(rows, st.integers(0, 6))
def test_a_batch_cut_in_two_gives_the_same_tokens(drawn: list[tuple[SamplerSpec, int, int]], cut: int) -> None:
    logits, own, positions, histories = make(drawn)
    halves = [
        sample(logits[part], own[part], positions[part], histories[part]) for part in (slice(cut), slice(cut, None))
    ]
    assert [token for half in halves for token in half.tokens] == sample(logits, own, positions, histories).tokens


class NeverWaits(TorchDispatchMode):
    """Raises on what makes a host wait for its device: values read back, shapes that depend on values, data sent."""

    TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    # lift_fresh: of torch.tensor, which sends host data; the others lack a tag in some version
    NAMES = ("lift_fresh", "_local_scalar_dense", "equal", "nonzero", "masked_select", "masked_scatter", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__.rstrip("_")
        if name in ("index", "index_put", "_unsafe_index"):
            waits = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        elif name == "_to_copy":
            waits = kwargs.get("device") not in (None, args[0].device)
        elif name == "copy":
            waits = args[0].device != args[1].device
        else:
            waits = name in (n.rstrip("_") for n in self.NAMES) or any(tag in func.tags for tag in self.TAGS)
        if waits:
            raise AssertionError(f"{func} waits")
        return func(*args, **kwargs)


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
def test_nothing_waits_for_the_device(own: list[SamplerSpec], dtype: torch.dtype) -> None:
    count = len(own)
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens = torch.randint(-2, VOCAB + 2, (count, 8), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    plan = plan_samples(own, [5] * count, range(count))
    sent = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
    assert all(array.size and array.dtype.name in ("int64", "float32", "float64") for array in plan.arrays.values())
    assert plan.needs_history == any(_penalised(s) for s in own)
    before = logits.clone(), tokens.clone(), {name: values.clone() for name, values in sent.items()}
    with NeverWaits():
        real = compute_samples(logits, plan, sent, tokens if plan.needs_history else None)
    assert torch.equal(logits, before[0])
    assert torch.equal(tokens, before[1])
    assert all(torch.equal(sent[name], values) for name, values in before[2].items())
    # tensors that have no values at all: none can have been read
    shapes = {name: values.to("meta") for name, values in sent.items()}
    bare, known = logits.to("meta"), tokens.to("meta") if plan.needs_history else None
    with NeverWaits():
        meta = compute_samples(bare, plan, shapes, known)
    assert {name: (t.shape, t.dtype) for name, t in meta.items()} == {n: (t.shape, t.dtype) for n, t in real.items()}
    assert all(values.is_meta for values in meta.values())
    out = read_samples(plan, {name: values.numpy() for name, values in real.items()})
    histories = [row[:5] for row in tokens.numpy()]
    assert out == sample(logits, own, [5] * count, histories)


def _penalised(own: SamplerSpec) -> bool:
    return own.repetition_penalty != 1.0 or own.presence_penalty != 0.0 or own.frequency_penalty != 0.0


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 1),
        lambda x: x[x > 1],
        lambda x: x.clone().index_put_((x > 1,), torch.zeros(())),
        lambda x: x.masked_select(x > 1),
        lambda x: x.unique(),
        lambda x: x.long().bincount(),
        lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.long)),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda x: x.to("meta"),
        lambda x: torch.empty(4, device="meta").copy_(x),
    ],
)  # fmt: skip
def test_the_guard_sees_what_waits(waits: Any) -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0])
    with pytest.raises(AssertionError, match="waits"), NeverWaits():
        waits(x)


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


def test_a_search_that_ends_on_an_impossible_id_takes_the_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    # as a parallel prefix sum may make it end; a sequential one never does
    monkeypatch.setattr(torch, "searchsorted", lambda _, target, **__: torch.full(target.shape, 2))
    out = one([1.0, 3.0, float("-inf"), 2.0], spec(temperature=1.0, processed=True))
    assert out.tokens == [1]
    assert one([1.0, 3.0, 0.0, 2.0], spec(temperature=1.0)).tokens == [2]


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
