"""Convolution and linear recurrence over spans: `recurrence/` against plain loops over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from fdasync_kernels.recurrence.conv import convolve
from fdasync_kernels.recurrence.norm import norm_gated
from fdasync_kernels.recurrence.recur import Gates, Norm, recur
from fdasync_kernels.recurrence.spans import ABSENT, FRESH, PlanSize, Spans, plan_spans
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from fdasync.errors import BadInput, InvariantBroken

MEMORY_ROWS = 9
SIZE = PlanSize(6, 14)


@dataclass(frozen=True)
class Step:
    """Sequences with a source, rows and further stops; their states go on in the memory's rows 0, 1, 2, ...

    `width`: how many sequences a step is launched for, where it is not of decodes alone.
    """

    sources: tuple[int, ...]
    counts: tuple[int, ...]
    takes: tuple[tuple[int, int, int], ...] = ()
    padding: int = 0
    width: int = SIZE.sequences

    @property
    def rows(self) -> int:
        return sum(self.counts) + self.padding

    def spans(self, device: torch.device) -> Spans:
        targets = np.arange(len(self.counts))
        plan = plan_spans(SIZE, np.array(self.sources), np.array(self.counts), targets, self.takes)
        owners = None
        if set(self.counts) != {1}:
            owners = torch.tensor(
                [*np.repeat(targets, self.counts).tolist(), *[-1] * self.padding], dtype=torch.int32, device=device
            )
        return Spans.of(torch.from_numpy(plan).to(device), SIZE, owners, self.width if owners is not None else 3)


# begun and fresh, a sequence of one token among others, snapshots within and at the end; decodes alone
CHUNKS = Step((0, FRESH, 4, 3), (5, 7, 1, 2), ((1, 4, 6), (1, 7, 8), (0, 2, 5)), padding=2)
DECODES = Step((0, 7, 2), (1, 1, 1), ((1, 1, 5),))
# so few sequences that each one's values are computed in narrower tiles
ALONE = Step((4,), (5,), ((0, 2, 6),), padding=2, width=1)


# as of published models, where a GPU computes them
LARGE = pytest.param((16, 32, 128, 128), marks=[pytest.mark.gpu, pytest.mark.ci])


def plain(step: Step, memory: torch.Tensor, forward: object) -> torch.Tensor:
    """Each token in turn: `forward(row, state)` gives output and new state. Writes to `memory` at the stops."""
    before, first, outputs = memory.clone(), 0, []
    for number, (source, count) in enumerate(zip(step.sources, step.counts, strict=True)):
        state = torch.zeros_like(before[0]) if source < 0 else before[source].clone()
        stops = {at: row for owner, at, row in step.takes if owner == number}
        for token in range(count):
            out, state = forward(first + token, state)  # type: ignore[operator]
            outputs.append(out)
            if token + 1 in stops:
                memory[stops[token + 1]] = state
        memory[number] = state
        first += count
    whole = torch.stack(outputs)
    return torch.cat([whole, whole.new_zeros((step.padding, *whole.shape[1:]))])


@pytest.mark.parametrize("step", [CHUNKS, DECODES])
@pytest.mark.parametrize(("silu", "bias", "kept"), [(True, False, 4), (False, True, 3)])
@pytest.mark.parametrize("channels", [300, pytest.param(8192, marks=pytest.mark.gpu)])
def test_a_convolution_is_that_of_each_sequence_alone(
    step: Step, channels: int, silu: bool, bias: bool, kept: int, device: torch.device
) -> None:
    drawn = torch.Generator().manual_seed(1)
    taps = 4
    x = torch.randn(step.rows, channels + 5, generator=drawn)[:, :channels].to(device)
    weight = torch.randn(channels, taps, generator=drawn).to(device)
    added = torch.randn(channels, generator=drawn).to(device) if bias else None
    columns = torch.randperm(channels, generator=drawn).to(torch.int32).to(device) if bias else None
    ordered = x if columns is None else x[:, columns.long()]
    # a layer's part of a larger memory
    memory = torch.randn(MEMORY_ROWS, 2, channels, kept, generator=drawn).to(device)[:, 1]
    expected = memory.clone()

    def forward(row: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.cat([state, ordered[row, :, None]], 1)
        out = (inputs[:, -taps:] * weight).sum(1) + (0 if added is None else added)
        return F.silu(out) if silu else out, inputs[:, 1:]

    wanted = plain(step, expected, forward)
    got = convolve(x, weight, added, memory, step.spans(device), silu=silu, columns=columns)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    # inputs are copied
    assert torch.equal(memory, expected)


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("step", [CHUNKS, DECODES, ALONE])
@pytest.mark.parametrize(
    ("delta", "by_key", "norm", "turned"),
    [(True, False, "rsqrt", False), (False, False, "none", True), (True, True, "divide", False)],
)
@pytest.mark.parametrize("sizes", [(2, 4, 24, 40), LARGE])
def test_a_recurrence_is_that_of_each_sequence_alone(
    step: Step, delta: bool, by_key: bool, norm: Norm, turned: bool, sizes: tuple[int, ...], device: torch.device
) -> None:
    groups, heads, keys, values = sizes
    drawn = torch.Generator().manual_seed(2)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn).to(device)

    query, key, value = some(step.rows, groups, keys), some(step.rows, groups, keys), some(step.rows, heads, values)
    decay = -some(*((step.rows, heads, keys) if by_key else (step.rows, heads))).abs()
    beta = some(step.rows, heads).sigmoid() if delta else None
    memory = some(MEMORY_ROWS, heads, values, keys)
    if turned:
        memory = memory.transpose(2, 3).contiguous().transpose(2, 3)
    expected = memory.clone()

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x if norm == "none" else x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt()

    def forward(row: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = unit(query[row]).repeat_interleave(heads // groups, 0) * 0.5
        k = unit(key[row]).repeat_interleave(heads // groups, 0)
        fade = decay[row].exp()
        state = state * (fade[:, None] if by_key else fade[:, None, None])
        update = value[row]
        if beta is not None:
            update = (update - (state * k[:, None]).sum(2)) * beta[row][:, None]
        state = state + update[:, :, None] * k[:, None]
        return (state * q[:, None]).sum(2), state

    wanted = plain(step, expected, forward)
    got = recur(query, key, value, decay, beta, memory, step.spans(device), scale=0.5, norm=norm)
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(memory, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("step", [CHUNKS, DECODES])
def test_gates_are_computed_of_what_a_layer_projects(step: Step, device: torch.device) -> None:
    groups, heads, keys, values = 2, 6, 8, 8
    drawn = torch.Generator().manual_seed(4)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn).to(device)

    query, key, value = some(step.rows, groups, keys), some(step.rows, groups, keys), some(step.rows, heads, values)
    # beside each other in a wider row, small and large ones
    wide = some(step.rows, groups, 8) * torch.tensor([0.1, 1.0, 30.0, 10.0, 1.0, 1.0, 0.0, 0.0], device=device)
    fades, rates = wide[..., 1:4], wide[..., 4:7]
    gates = Gates(some(heads), some(heads) - 3)
    memory = some(MEMORY_ROWS, heads, values, keys)
    ours = memory.clone()
    growth = -gates.growth.exp() * F.softplus(fades.flatten(1) + gates.bias)
    wanted = recur(query, key, value, growth, rates.flatten(1).sigmoid(), memory, step.spans(device))
    got = recur(query, key, value, fades, rates, ours, step.spans(device), gates=gates)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, memory, rtol=1e-5, atol=1e-5)
    with pytest.raises(BadInput, match="gates"):
        recur(query, key, value, fades, rates, ours, step.spans(device), gates=Gates(some(heads), some(groups)))
    with pytest.raises(BadInput, match="decay"):
        recur(query, key, value, growth, rates, ours, step.spans(device), gates=gates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_norm_rounds_as_the_library(dtype: torch.dtype, device: torch.device) -> None:
    rows, groups, heads, values = 5, 2, 6, 40
    drawn = torch.Generator().manual_seed(5)
    x = torch.randn(rows, heads, values, generator=drawn).to(device, dtype)
    gate = torch.randn(rows, groups, 3 * values + 8, generator=drawn).to(device, dtype)[..., : 3 * values]
    norm = Qwen3NextRMSNormGated(values).to(device, dtype)
    norm.weight.data = torch.randn(values, generator=drawn).to(device, dtype)
    with torch.inference_mode():
        wanted = norm(x.view(-1, values), gate.reshape(-1, values)).view(rows, -1)
    got = norm_gated(x, gate, norm.weight, norm.variance_epsilon)
    # the mean's sum has another order
    assert (got != wanted).float().mean() < (0.002 if dtype is torch.bfloat16 else 1)
    torch.testing.assert_close(got, wanted, rtol=1e-5 if dtype is torch.float32 else 2e-2, atol=1e-6)
    with pytest.raises(BadInput, match="gate"):
        norm_gated(x, gate[:, :1], norm.weight, 1e-6)


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(
    ("heads", "keys", "values"),
    # values of 24 fill tiles of 4 and of 8, which few sequences and single tokens have, and not those of 16
    [(2, 16, 8), (2, 32, 24), *[pytest.param(32, keys, 128, marks=pytest.mark.gpu) for keys in (8, 16, 64, 128, 256)]],
)
def test_bits_do_not_depend_on_how_tokens_come(heads: int, keys: int, values: int, device: torch.device) -> None:
    # seven tokens at once, in two chunks with another sequence beside them, or behind a snapshot
    drawn = torch.Generator().manual_seed(3)

    def played(steps: list[tuple[Step, list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.zeros(MEMORY_ROWS, heads, values, keys, device=device)
        outputs = {}
        for step, tokens in steps:
            index = torch.tensor(tokens, device=device)
            out = recur(
                q[index], k[index], v[index], decay[index], beta[index], memory, step.spans(device), norm="rsqrt"
            )
            outputs.update({token: out[row] for row, token in enumerate(tokens)})
        return torch.stack([outputs[token] for token in range(7)]), memory[0]

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(20, *shape, generator=drawn).to(device)

    q, k, v, decay, beta = some(heads, keys), some(heads, keys), some(heads, values), -some(heads).abs(), some(heads)
    whole = played([(Step((FRESH,), (7,)), [*range(7)])])
    for others in (
        [
            (Step((FRESH, FRESH), (3, 2)), [0, 1, 2, 10, 11]),
            (Step((0, 1), (4, 1)), [3, 4, 5, 6, 12]),
        ],
        [
            (Step((FRESH, FRESH), (5, 2), ((0, 4, 7),)), [0, 1, 2, 3, 15, 8, 9]),
            (Step((7, 1), (3, 2)), [4, 5, 6, 10, 11]),
        ],
        # with no other beside it: in narrower tiles, at once and in chunks, of which one has a single token
        [(Step((FRESH,), (7,), width=1), [*range(7)])],
        [
            (Step((FRESH,), (4,), ((0, 3, 7),), width=1), [0, 1, 2, 3]),
            (Step((7, FRESH), (2, 2), width=4), [3, 4, 18, 19]),
            (Step((0,), (2,), width=1), [5, 6]),
        ],
        # one by one, by the kernel for single tokens
        [
            (Step((FRESH, FRESH, FRESH), (1, 1, 1)), [0, 8, 9]),
            *[(Step((0, 1, 2), (1, 1, 1)), [token, 8, 9]) for token in range(1, 7)],
        ],
    ):
        got = played(others)
        assert torch.equal(got[0], whole[0])
        assert torch.equal(got[1], whole[1])


def test_a_plan_without_sequences_changes_nothing(device: torch.device) -> None:
    plan = plan_spans(SIZE, np.zeros(0, int), np.zeros(0, int), np.zeros(0, int))
    assert (plan[: SIZE.sequences] == ABSENT).all()
    spans = Spans.of(torch.from_numpy(plan).to(device), SIZE, None, 3)
    memory = torch.ones(MEMORY_ROWS, 8, 3, device=device)
    rows = torch.ones(3, 8, device=device)
    assert not convolve(rows, torch.ones(8, 4, device=device), None, memory, spans).any()
    states = torch.ones(MEMORY_ROWS, 2, 4, 4, device=device)
    heads, decay = rows.view(3, 2, 4), torch.zeros(3, 2, device=device)
    assert not recur(heads, heads, heads, decay, None, states, spans).any()
    assert memory.all()
    assert states.all()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
@settings(max_examples=50)
def test_stops_of_a_plan_rise_and_end_where_sequences_end(counts: list[int], data: st.DataObject) -> None:
    rows = iter(range(6, 14))
    takes = []
    for number, count in enumerate(counts):
        takes += [(number, at, next(rows)) for at in sorted(data.draw(st.sets(st.integers(1, count), max_size=1)))]
    data.draw(st.randoms()).shuffle(takes)
    size = PlanSize(6, 14)
    plan = plan_spans(size, np.full(len(counts), FRESH), np.array(counts), np.arange(len(counts)), takes)
    spans = Spans.of(torch.from_numpy(plan), size, None, len(counts))
    ends = np.cumsum(counts)
    for number in range(len(counts)):
        own = spans.stops[spans.first_stops[number] : spans.first_stops[number + 1]].tolist()
        assert own[-1] == [ends[number], number]
        assert [end for end, _ in own] == sorted(end for end, _ in own)
        first = int(spans.first_rows[number])
        assert {(number, end - first, row) for end, row in own[:-1]} == {one for one in takes if one[0] == number}


@pytest.mark.parametrize(
    ("counts", "takes"), [((2,), ((0, 3, 5),)), ((2,), ((1, 1, 5),)), ((2, 1), ((0, 1, 1),)), ((1,) * 7, ())]
)
def test_a_plan_that_cannot_be_is_a_broken_invariant(
    counts: tuple[int, ...], takes: tuple[tuple[int, int, int]]
) -> None:
    with pytest.raises(InvariantBroken):
        plan_spans(SIZE, np.full(len(counts), FRESH), np.array(counts), np.arange(len(counts)), takes)


def test_a_state_that_another_sequence_begins_from_is_not_written() -> None:
    both = np.array([0, 5])
    plan_spans(SIZE, both, np.array([1, 1]), np.array([0, 1]), ((0, 1, 6),))
    with pytest.raises(InvariantBroken, match="another sequence"):
        plan_spans(SIZE, both, np.array([1, 1]), np.array([0, 1]), ((0, 1, 5),))


def test_other_shapes_are_bad_input(device: torch.device) -> None:
    spans = DECODES.spans(device)
    heads = torch.zeros(3, 2, 4, device=device)
    memory = torch.zeros(MEMORY_ROWS, 2, 4, 4, device=device)
    decay = torch.zeros(3, 2, device=device)
    with pytest.raises(BadInput, match="the spans are of 3"):
        recur(heads[:2], heads[:2], heads[:2], decay[:2], None, memory, spans)
    with pytest.raises(BadInput, match="states"):
        recur(heads, heads, heads, decay, None, memory[:, :1], spans)
    wide = torch.zeros(3, 2, 257, device=device)
    with pytest.raises(BadInput, match="256"):
        recur(wide, wide, heads, decay, None, memory, spans)
    with pytest.raises(BadInput, match="taps"):
        convolve(heads[:, 0], torch.zeros(4, 4, device=device), None, memory[:, 0, :, :2], spans)
