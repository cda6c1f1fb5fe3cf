"""What the sampler's tests share: requests, a plain per-row rewrite of the sampler's rules, drawn batches."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fdasync_transformers.sampling.sampler import SampleOutput, SamplePlan, compute_samples, read_samples
from hypothesis import strategies as st
from sampled import sample

from fdasync.request import SamplerSpec

if TYPE_CHECKING:
    from collections.abc import Mapping


def spec(*, bias: Mapping[int, float] | None = None, **changes: Any) -> SamplerSpec:
    if bias:
        changes["bias_ids"] = array("i", bias).tobytes()
        changes["bias_values"] = array("f", bias.values()).tobytes()
    return SamplerSpec(**({"prompt_len": 3, "seed": 1} | changes))


def one(logits: Any, own: SamplerSpec, position: int = 5, history: Any = (0, 1, 2, 0, 1)) -> SampleOutput:
    return sample(torch.as_tensor(logits).float()[None], [own], [position], [np.asarray(history, dtype=np.int32)])


# -- the rules, one row at a time, in plain Python ----------------------------------------------


def by_hand(logits: np.ndarray, own: SamplerSpec, position: int, history: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(logits after penalties, bias and mask, probabilities sampled from), float64."""
    x = logits.astype(np.float64).copy()
    for token in set(history):
        x[token] = x[token] / own.repetition_penalty if x[token] > 0 else x[token] * own.repetition_penalty
    for token in set(history[own.prompt_len :]):
        x[token] -= own.presence_penalty + own.frequency_penalty * history[own.prompt_len :].count(token)
    for token, bias in own.logit_bias().items():
        x[token] += bias
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
        # 1 filters nothing, although the sum reaches it before the last of very unlikely tokens
        if own.top_p < 1.0 and mass >= own.top_p:
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
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 0.5, 3.0, 100.0]), max_size=4),
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


# -- three stages, and a device without waits ---------------------------------------------------


def staged(logits: torch.Tensor, plan: SamplePlan, tokens: torch.Tensor | None) -> SampleOutput:
    sent = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
    results = compute_samples(logits, plan, sent, tokens)
    return read_samples(plan, {name: values.numpy() for name, values in results.items()})
