"""The router kernel against float64 and against torch's own softmax and top-k: `router/route.py`."""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.router.route import route, write_ids
from fdasync_kernels.router.rule import RouterRule
from hypothesis import given, settings
from hypothesis import strategies as st

from fdasync.errors import BadInput

# what Triton's interpreter computes with says so where a row has no finite softmax
NO_SOFTMAX = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")


def chosen(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Ids by falling logit, lowest id first among equals: a stable sort says so without our arithmetic."""
    return torch.sort(logits.double(), dim=-1, descending=True, stable=True).indices[:, :k]


def check(logits: torch.Tensor, k: int, renormalise: bool = True) -> None:
    weights, ids = route(logits, k, RouterRule(renormalise=renormalise), weights_dtype=torch.float32)
    assert torch.equal(ids, chosen(logits, k))
    exact = torch.softmax(logits.double(), -1)
    share = exact.gather(1, ids)
    if renormalise:
        share = share / share.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), share, rtol=2e-6, atol=1e-30)
    # and the library's way, where only ties may be broken otherwise
    scores = torch.softmax(logits, -1, dtype=torch.float32)
    assert torch.equal(scores.gather(1, ids), scores.topk(k, dim=-1).values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(1, 128, 8), (17, 128, 8), (3, 100, 6), (2, 1024, 9), (5, 1, 1), (4, 8, 8), (33, 60, 4)],
)
def test_it_chooses_as_the_library_does(device, dtype, tokens, experts, k):
    logits = torch.randn((tokens, experts), generator=torch.Generator().manual_seed(experts)).mul(3).to(device, dtype)
    check(logits, k, renormalise=tokens % 2 == 1)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_ties_go_to_the_lowest_id(data):
    experts = data.draw(st.integers(2, 40), label="experts")
    k = data.draw(st.integers(1, experts), label="k")
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), label="dtype")
    # few values, both zeros among them, so that most rows tie somewhere and often at the boundary
    values = st.sampled_from([-3.0, -0.5, -0.0, 0.0, 0.5, 2.0, 2.015625])
    row = st.lists(values, min_size=experts, max_size=experts)
    logits = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=3), label="logits"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check(logits.to(device, dtype), k)


def test_logits_that_the_softmax_rounds_together_keep_their_order(device):
    # one unit in the last place apart at 64: the float32 softmax of the library sees it; at 1e-6 it does not
    for low in (64.0, 1e-6):
        logits = torch.full((1, 32), low)
        logits[0, 20] = torch.nextafter(torch.tensor(low), torch.tensor(1e9))
        weights, ids = route(logits.to(device), 2, RouterRule(renormalise=False), weights_dtype=torch.float32)
        assert ids.tolist() == [[20, 0]]
        assert weights[0, 0] >= weights[0, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_logits_and_masked_experts(device, dtype):
    logits = torch.randn((6, 24), generator=torch.Generator().manual_seed(1))
    logits[0] *= 1e4
    logits[1] -= 1e6
    logits[2, 5:] = float("-inf")
    logits[3] = float("-inf")
    logits[3, 7] = 1.0
    logits[4, 3] = 3e38
    logits[5] = 0.25
    logits = logits.to(device, dtype)
    check(logits, 4)
    _, ids = route(logits, 4, RouterRule(), weights_dtype=dtype)
    assert ids[3].tolist() == [7, 0, 1, 2]
    assert ids[5].tolist() == [0, 1, 2, 3]


@NO_SOFTMAX
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("experts", [16, 13])
def test_a_row_without_a_softmax_still_names_experts(device, dtype, experts):
    nan, inf = float("nan"), float("inf")
    logits = torch.randn((6, experts), generator=torch.Generator().manual_seed(2))
    logits[0, 4] = nan
    logits[1] = nan
    logits[2] = -inf
    logits[3, :3] = inf
    # a NaN with its sign bit set, which compares as a large or a small number where bits are looked at
    logits[4, experts - 1] = torch.tensor([-1], dtype=torch.int32).view(torch.float32)[0]
    weights, ids = route(logits.to(device, dtype), experts, RouterRule(), weights_dtype=torch.float32)
    weights, ids = weights.cpu(), ids.cpu()
    assert torch.equal(ids.sort(-1).values, torch.arange(experts).expand(6, -1)), "out of range, or twice"
    assert weights[:5].isnan().all()
    assert weights[5].isfinite().all(), "one row's NaN spoils another's"
    assert ids[0, -1] == 4
    assert ids[1].tolist() == ids[2].tolist() == list(range(experts))
    assert ids[3, :3].tolist() == [0, 1, 2]
    assert ids[4, -1] == experts - 1


@pytest.mark.parametrize(("narrow", "experts"), [(torch.uint8, 256), (torch.int16, 600)])
def test_the_capture_gets_the_very_ids_and_nothing_else(device, narrow, experts):
    fill = 7
    buffer = torch.full((20, 3, 5), fill, dtype=narrow, device=device)
    logits = torch.randn((18, experts), generator=torch.Generator().manual_seed(3)).to(device)
    plain = route(logits, 4, RouterRule(), weights_dtype=torch.bfloat16)
    with_capture = route(logits, 4, RouterRule(), weights_dtype=torch.bfloat16, capture=buffer[:18, 1, :])
    for one, other in zip(plain, with_capture, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(buffer[:18, 1, :4], plain[1].to(narrow))
    buffer[:18, 1, :4] = fill
    assert (buffer == fill).all(), "written outside its place"
    assert plain[0].dtype == torch.bfloat16
    assert int(plain[1].max()) > experts // 2, "ids so small show no width"


def test_strided_rows_narrow_ids_and_no_tokens(device):
    wide = torch.randn((4, 50), generator=torch.Generator().manual_seed(4)).to(device)
    weights, ids = route(
        wide[:, 9:29], 3, RouterRule(renormalise=False), weights_dtype=torch.float32, ids_dtype=torch.int32
    )
    assert ids.dtype == torch.int32
    assert torch.equal(ids.long(), chosen(wide[:, 9:29], 3))
    # torch gives the single row of such a view the stride of its parent
    _, one = route(wide[2:3, 9:29], 3, RouterRule(renormalise=False), weights_dtype=torch.float32)
    assert torch.equal(one, ids[2:3].long())
    weights, ids = route(wide[:0], 3, RouterRule(), weights_dtype=torch.float32)
    assert weights.shape == ids.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_of_other_routers_are_copied(device, dtype):
    buffer = torch.full((70, 2, 6), 9, dtype=torch.int16, device=device)
    ids = torch.arange(70 * 5).view(5, 70).T.to(device, dtype)
    write_ids(ids, buffer[:, 1, :])
    assert torch.equal(buffer[:, 1, :5], ids.short())
    assert (buffer[:, 0] == 9).all()
    assert (buffer[:, 1, 5] == 9).all()
    write_ids(ids[:0], buffer[:0, 1, :])


def test_bad_input_is_refused(device):
    logits = torch.zeros((2, 8), device=device)
    place = torch.zeros((2, 8), dtype=torch.uint8, device=device)

    def ask(logits=logits, k=2, **others):
        route(logits, k, **{"weights_dtype": torch.float32, **others})

    ask(capture=place)
    for field, call in {
        "logits": [
            lambda: ask(logits[0]),
            lambda: ask(torch.zeros((2, 1025), device=device)),
            lambda: ask(logits.double()),
            lambda: ask(logits.T),
        ],
        "k": [lambda: ask(k=0), lambda: ask(k=9)],
        "ids_dtype": [lambda: ask(ids_dtype=torch.int16)],
        "capture": [
            lambda: ask(capture=place[:1]),
            lambda: ask(capture=place[:, :1]),
            lambda: ask(capture=place.int()),
            lambda: ask(capture=place.view(8, 2).T),
        ],
        "ids": [lambda: write_ids(logits, place), lambda: write_ids(logits.long()[0], place)],
    }.items():
        for refused in call:
            with pytest.raises(BadInput) as caught:
                refused()
            assert caught.value.field == field


@pytest.mark.gpu
def test_a_graph_replays_the_capture_for_new_logits(device):
    logits = torch.randn((256, 128), device=device, dtype=torch.bfloat16)
    buffer = torch.zeros((256, 3, 8), dtype=torch.uint8, device=device)

    def once():
        return route(logits, 8, RouterRule(), weights_dtype=torch.bfloat16, capture=buffer[:, 1, :])

    once()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, ids = once()
    for _ in range(3):
        logits.copy_(torch.randn_like(logits))
        graph.replay()
        assert torch.equal(ids, chosen(logits, 8))
        assert torch.equal(buffer[:, 1].long(), ids)


@pytest.mark.gpu
def test_many_tokens_and_one_kernel_for_all(device):
    from fdasync_kernels.router.kernel import route_kernel

    logits = torch.randn((8192, 128), device=device, dtype=torch.bfloat16)
    check(logits, 8)
    kernels = [len(cache[0]) for cache in route_kernel.device_caches.values()]
    for tokens in (1, 2, 16, 255, 4096):
        check(logits[:tokens], 8)
    assert [len(cache[0]) for cache in route_kernel.device_caches.values()] == kernels
