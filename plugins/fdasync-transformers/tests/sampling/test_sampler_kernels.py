"""Both samplers, kernels and numpy, against float64 with a sort, on rows made to break them.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_kernels.sampling import sample
from fdasync_transformers.sampling.plan import MASKS, plan_samples, uniform
from fdasync_transformers.sampling.sampler import read_samples, sample_on_device, sample_on_host
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_cases import VOCAB, make, rows, spec

if TYPE_CHECKING:
    from fdasync_transformers.sampling.sampler import SampleOutput

    from fdasync.request import SamplerSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# numpy computes for the interpreter, and says so where a row has no largest logit
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
POSITION = 6
NEAR_ONE = 1.0 - 2.0**-53
TILE = 4096
SPAN, MASSES_BLOCK = sample._SPAN, sample._MASSES_BLOCK


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not written yet holds what no result may."""
    empty = torch.empty

    def poison(*sizes: Any, **others: Any) -> torch.Tensor:
        made = empty(*sizes, **others)
        return made.fill_(math.nan if made.is_floating_point() else 1 if made.dtype is torch.bool else -77)

    monkeypatch.setattr(torch, "empty", poison)
    return


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a small block as for a large one."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr("fdasync_kernels.sampling.sample._SPAN", TILE)
        monkeypatch.setattr("fdasync_kernels.sampling.sample._MASSES_BLOCK", TILE // 2)


def run(
    on: Any,
    logits: torch.Tensor,
    own: list[SamplerSpec],
    histories: list[Any] | None = None,
    masks: np.ndarray | None = None,
) -> dict[str, torch.Tensor]:
    """Results of one of the samplers; `own` is not plain."""
    count = len(own)
    lengths = [len(history) for history in histories] if histories else [POSITION] * count
    known = np.zeros((count, max(lengths, default=1)), np.int32)
    for row, history in enumerate(histories or []):
        known[row, : len(history)] = history
    plan = plan_samples(own, [POSITION] * count, range(count), lengths)
    device = DEVICE if on is sample_on_device else torch.device("cpu")
    sent = {name: torch.from_numpy(array).to(device) for name, array in plan.arrays.items()}
    if masks is not None:
        sent[MASKS] = torch.from_numpy(masks).to(device)
    results = on(logits.to(device), plan, sent, torch.from_numpy(known).to(device))
    return {name: values.cpu() for name, values in results.items()} | {"plan": plan}


def reference(x: np.ndarray, own: SamplerSpec) -> np.ndarray:
    """Probabilities of a row whose logits nothing changes, float64."""
    x = x.astype(np.float64)
    order = np.lexsort((np.arange(len(x)), -x))
    p = np.exp((x - x.max()) / own.temperature)
    if own.top_k:
        p[order[own.top_k :]] = 0.0
    if own.top_p < 1.0:
        before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
        p[order[before >= own.top_p * p.sum()]] = 0.0
    p[p < own.min_p * p.max()] = 0.0
    return p / p.sum()


def check(on: Any, logits: torch.Tensor, own: list[SamplerSpec], error: float = 1e-9) -> None:
    results = run(on, logits, own)
    assert results["finite"].all()
    for row, s in enumerate(own):
        x = logits[row].float().numpy()
        p = reference(x, s)
        token = int(results["tokens"][row])
        noise = uniform(s.seed, s.index, POSITION)
        assert p[token] > 0, f"row {row} drew {token}, which {s} does not keep"
        assert p[:token].sum() - error <= noise <= p[: token + 1].sum() + error
        assert float(results["processed"][row]) == pytest.approx(math.log(p[token]), abs=1e-7)
        raw = x[token] - x.max() - math.log(np.exp(x.astype(np.float64) - x.max()).sum())
        assert float(results["raw"][row]) == pytest.approx(raw, abs=1e-5)
        keeps = results["top_values"][row] > -math.inf
        best = np.lexsort((np.arange(len(x)), -x))[:3]
        assert sorted(results["top_ids"][row][keeps].tolist()) == sorted(best[: int(keeps.sum())].tolist())
        assert int(keeps.sum()) == min(3, len(x))


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 9000},
    {"top_p": 0.3123457},
    {"top_p": 0.9512347},
    {"top_p": 1e-9},
    {"top_p": NEAR_ONE},
    {"min_p": 0.2512349},
    {"top_k": 40, "top_p": 0.8123457, "min_p": 0.0512347},
    {"top_p": 0.7123451, "min_p": 0.3123459},
    {"top_p": 0.9512347, "temperature": 0.3},
    {"top_k": 300, "temperature": 7.0},
]


def asked(**others: Any) -> list[SamplerSpec]:
    wants = {"temperature": 1.0, "raw": True, "processed": True, "top": 3} | others
    return [spec(seed=number, **(wants | filters)) for number, filters in enumerate(FILTERS)]


def drawn(width: int, kind: str) -> torch.Tensor:
    random = np.random.default_rng(width)
    shape = (len(FILTERS), width)
    x = random.normal(size=shape) * (4.0 if kind == "sharp" else 0.8)
    if kind == "ties":
        # many at every cut, and an odd number of each
        x = random.integers(0, 5, shape) * 0.75
    elif kind == "one":
        x = np.full(shape, -60.0)
        x[:, width // 2] = 3.0
    elif kind == "holes":
        x[random.random(shape) < 0.7] = -np.inf
        x[:, 0] = 0.1
        x[:, -3:] = [0.2, 0.3, 0.4]
    elif kind == "zeros":
        x = random.choice([-0.0, 0.0, -1.0], size=shape)
    return torch.from_numpy(x).float()


# one tile, two, and for one kind a tile between two others
KINDS = ["flat", "sharp", "ties", "one", "zeros"]


@pytest.mark.ci
@pytest.mark.parametrize("on", [sample_on_device, sample_on_host])
@pytest.mark.parametrize(
    ("kind", "width"), [*[(kind, width) for kind in KINDS for width in (40, TILE + 5)], ("flat", 2 * TILE + 5)]
)
def test_they_follow_float64_with_a_sort(on: Any, kind: str, width: int) -> None:
    check(on, drawn(width, kind), asked())


@pytest.mark.ci
def test_they_do_in_the_blocks_that_a_gpu_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fdasync_kernels.sampling.sample._SPAN", SPAN)
    monkeypatch.setattr("fdasync_kernels.sampling.sample._MASSES_BLOCK", MASSES_BLOCK)
    check(sample_on_device, drawn(TILE + 600, "flat"), asked())


@pytest.mark.ci
@pytest.mark.parametrize("on", [sample_on_device, sample_on_host])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_with_holes_in_every_dtype(on: Any, dtype: torch.dtype) -> None:
    check(on, drawn(TILE + 100, "holes")[::2].to(dtype), asked()[::2])


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("on", [sample_on_device, sample_on_host])
@pytest.mark.parametrize("width", [11, TILE + 1])
def test_a_uniform_row_keeps_the_lower_ids(on: Any, width: int) -> None:
    kinds: list[tuple[dict[str, Any], int]] = [
        ({"top_k": 5}, 5),
        ({"top_p": 0.5}, math.ceil(width / 2)),
        ({"top_p": 0.25}, math.ceil(width / 4)),
        ({"top_p": NEAR_ONE}, width),
        ({"min_p": 1.0}, width),
        ({"top_k": 8, "top_p": 0.5}, 4),
    ]
    own = [spec(temperature=2.0, processed=True, seed=5, **changes) for changes, _ in kinds]
    results = run(on, torch.full((len(own), width), -1.5), own)
    for row, (_, kept) in enumerate(kinds):
        assert float(results["processed"][row]) == pytest.approx(-math.log(kept), abs=1e-12)
        assert int(results["tokens"][row]) == int(uniform(5, 0, POSITION) * kept)


# every list and every dtype; all of them with all where time allows
LISTS = ((VOCAB, 4), (500, 8), (500, 512))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(
    ("width", "listed", "dtype"),
    [
        pytest.param(*one, dtype, marks=() if number == other else pytest.mark.nightly)
        for number, one in enumerate(LISTS)
        for other, dtype in enumerate(DTYPES)
    ],
)
def test_a_list_of_several_blocks_and_one_that_overflows(
    width: int, listed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fdasync_kernels.sampling.sample._LISTED", listed)
    monkeypatch.setattr("fdasync_kernels.sampling.sample._BLOCK", 128)
    random = np.random.default_rng(width)
    logits = torch.from_numpy(random.integers(-3, 4, (len(FILTERS), width)) * 0.25).to(dtype)
    check(sample_on_device, logits, asked())


@pytest.mark.ci
@settings(max_examples=12, deadline=None)
@given(rows, st.booleans())
def test_kernels_and_numpy_agree_on_all_that_requests_ask(drawn: Any, narrow: bool) -> None:
    logits, own, _, histories = make(drawn)
    logits = logits.bfloat16() if narrow else logits
    if plan_samples(own, [POSITION] * len(own), range(len(own)), [len(h) for h in histories]).plain:
        own = [*own[:-1], spec(temperature=1.0)]
    outputs = [run(on, logits, own, histories) for on in (sample_on_device, sample_on_host)]
    mine, other = (read(results) for results in outputs)
    assert mine.tokens == other.tokens
    for row, s in enumerate(own):
        if s.raw:
            assert mine.raw[row] == pytest.approx(other.raw[row], abs=1e-6)
        if s.processed:
            assert mine.processed[row] == pytest.approx(other.processed[row], abs=1e-9)
        if s.top and (s.raw or s.processed):
            assert mine.top[row].token_ids == other.top[row].token_ids
            assert mine.top[row].logprobs == pytest.approx(other.top[row].logprobs, abs=1e-6)


def read(results: dict[str, Any]) -> SampleOutput:
    plan = results["plan"]
    arrays = {name: values.numpy() for name, values in results.items() if name != "plan"}
    return read_samples(plan, arrays)


def test_penalties_bias_stops_and_grammars_over_several_tiles() -> None:
    width = TILE + 77
    random = np.random.default_rng(3)
    logits = torch.from_numpy(random.normal(size=(6, width)) * 2).bfloat16()
    histories = [random.integers(-3, width + 3, length).astype(np.int32) for length in (1, 600, 256, 257, 9, 40)]
    wants = {"raw": True, "processed": True, "top": 4}
    own = [
        spec(temperature=1.0, repetition_penalty=1.3, **wants),
        spec(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.25, top_p=0.9, **wants),
        spec(repetition_penalty=0.5, bias={7: 5.0, width - 1: 30.0, width + 9: 1.0}, **wants),
        spec(min_tokens=99, stop_ids=tuple(logits[3].float().topk(40).indices.tolist()), **wants),
        spec(temperature=1.0, grammar=b"x", top_k=20, **wants),
        spec(min_tokens=99, stop_ids=tuple(range(width)), temperature=1.0, **wants),
    ]
    masks = random.integers(-(2**31), 2**31, (1, -(-width // 32))).astype(np.int32)
    mine, other = (run(on, logits, own, histories, masks) for on in (sample_on_device, sample_on_host))
    assert torch.equal(mine["tokens"], other["tokens"])
    assert int(mine["tokens"][2]) == width - 1
    allowed = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
    assert allowed[int(mine["tokens"][4])]
    assert int(mine["tokens"][3]) not in own[3].stop_ids
    one, two = read(mine), read(other)
    assert one.processed == pytest.approx(two.processed, abs=1e-9)
    assert one.raw == pytest.approx(two.raw, abs=1e-6)
    assert [top.token_ids for top in one.top or () if top] == [top.token_ids for top in two.top or () if top]


@pytest.mark.ci
@pytest.mark.parametrize("on", [sample_on_device, sample_on_host])
def test_bad_rows_are_found_and_change_no_other(on: Any) -> None:
    own = asked()[:10]
    logits = drawn(TILE + 9, "flat")[:10]
    sound = run(on, logits, own)
    bads = [math.nan, math.inf, -math.inf]
    # three rows, each bad in its own way, beside rows that are not
    for first in (0, 1):
        wrong = list(range(first, first + 9, 4))
        spoiled = logits.clone()
        for row, bad in zip(wrong, bads, strict=True):
            spoiled[row, :: 1 if bad < 0 else 977] = bad
        bads.append(bads.pop(0))
        results = run(on, spoiled, own)
        others = [number for number in range(len(own)) if number not in wrong]
        assert not results["finite"][wrong].any()
        assert ((results["tokens"][wrong] >= 0) & (results["tokens"][wrong] < logits.shape[1])).all()
        for name in ("tokens", "finite", "raw", "processed"):
            assert torch.equal(results[name][others], sound[name][others])


@pytest.mark.ci
@pytest.mark.parametrize("on", [sample_on_device, sample_on_host])
def test_a_row_has_the_same_bits_alone(on: Any) -> None:
    own = asked()
    wide = torch.nn.functional.pad(drawn(TILE + 300, "flat").bfloat16(), (3, 6), value=math.nan)
    logits = wide[:, 3:-6]
    whole = run(on, logits, own)
    for row in range(0, len(own), 6):
        alone = run(on, logits[row : row + 1], own[row : row + 1])
        for name in ("tokens", "finite", "raw", "processed"):
            assert torch.equal(alone[name][0], whole[name][row])


@pytest.mark.parametrize("name", ["ints", "floats"])
def test_tables_of_another_shape_are_refused(name: str) -> None:
    from fdasync.errors import BadInput

    plan = plan_samples([spec(temperature=1.0)], [3], [0])
    sent = {key: torch.from_numpy(array).to(DEVICE) for key, array in plan.arrays.items()}
    ask = partial(sample_on_device, torch.zeros((1, 9), device=DEVICE), plan)
    assert int(ask(sent, None)["finite"][0]) == 1
    with pytest.raises(BadInput, match=name):
        ask(sent | {name: sent[name][:, 1:]}, None)
    with pytest.raises(BadInput, match="logits"):
        sample_on_device(torch.zeros((2, 9), device=DEVICE), plan, sent, None)
