"""Routers of all kinds against float64: scores, biases, groups and sums of `router/rule.py`."""

from __future__ import annotations

import pytest
import torch
from fdasync_kernels.router.route import route
from fdasync_kernels.router.rule import RouterRule
from hypothesis import given, settings
from hypothesis import strategies as st

from fdasync.errors import BadInput

GROUPED = RouterRule("sigmoid", by_logits=False, groups=4, open_groups=2, least_sum=1e-20, scale=2.5)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scores_of(logits: torch.Tensor, rule: RouterRule) -> torch.Tensor:
    if rule.score == "softmax":
        return torch.softmax(logits, -1)
    if rule.score == "sigmoid":
        return torch.sigmoid(logits)
    return torch.nn.functional.softplus(logits).sqrt()


def compared(logits: torch.Tensor, rule: RouterRule, bias: torch.Tensor | None) -> torch.Tensor:
    """What the selection compares, in float64; experts of closed groups -inf or 0."""
    logits = logits.double()
    choice = logits if rule.by_logits else scores_of(logits, rule)
    if bias is not None:
        choice = choice + bias.double()
    if rule.grouped:
        each = choice.unflatten(-1, (rule.groups, -1))
        best = each.amax(-1) if rule.group_score == "largest" else each.topk(2, -1).values.sum(-1)
        order = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, : rule.open_groups]
        opened = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order, torch.ones_like(order, dtype=torch.bool))
        fill = 0.0 if rule.closed == "zero" else float("-inf")
        choice = each.masked_fill(~opened[..., None], fill).flatten(1)
    return choice


def weights_of(logits: torch.Tensor, ids: torch.Tensor, rule: RouterRule) -> torch.Tensor:
    logits = logits.double()
    if rule.score == "softmax_of_chosen":
        share = torch.softmax(logits.gather(1, ids), -1)
    else:
        share = scores_of(logits, rule).gather(1, ids)
    if rule.renormalise:
        total = share.sum(-1, keepdim=True)
        share = share / (total.clamp(min=rule.least_sum) if rule.clamp_sum else total + rule.least_sum)
    return share * rule.scale


RULES = [
    RouterRule(),
    RouterRule(by_logits=False),
    RouterRule("sigmoid", renormalise=False, scale=1.5),
    RouterRule("sqrtsoftplus", by_logits=False, least_sum=1e-20),
    RouterRule("softmax_of_chosen", renormalise=False),
    RouterRule("softmax", by_logits=False, clamp_sum=True, least_sum=1e-2),
    GROUPED,
    RouterRule(by_logits=False, groups=4, open_groups=1, group_score="largest", renormalise=False, scale=16.0),
    RouterRule(by_logits=False, groups=4, open_groups=2, closed="zero"),
]


@pytest.mark.ci(after=18)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 32, 4), (19, 160, 6), (3, 384, 8), (2, 12, 3)])
def test_it_chooses_and_weighs_as_float64_does(device, rule, biased, tokens, experts, k):
    logits = (noise(tokens, experts) * 2).to(device)
    bias = noise(experts, seed=1).to(device) if biased else None
    weights, ids = route(logits, k, rule, weights_dtype=torch.float32, bias=bias)
    exact = compared(logits, rule, bias)
    assert torch.equal(ids, torch.sort(exact, dim=-1, descending=True, stable=True).indices[:, :k])
    torch.testing.assert_close(weights.double(), weights_of(logits, ids, rule), rtol=3e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_each_operation_rounds_where_the_rule_says_so(device, dtype, bias_dtype):
    logits = noise(40, 24).to(device, dtype)
    bias = noise(24, seed=1).to(device, bias_dtype)
    rule = RouterRule("sigmoid", by_logits=False, least_sum=1e-6, scale=1.7, rounded=True)
    weights, ids = route(logits, 5, rule, weights_dtype=dtype, bias=bias)
    scores = logits.sigmoid()
    theirs = (scores + bias).gather(1, (scores + bias).topk(5, -1).indices)
    assert torch.equal((scores + bias).gather(1, ids), theirs)
    share = scores.gather(1, ids)
    share = share / (share.sum(-1, keepdim=True) + 1e-6) * 1.7
    torch.testing.assert_close(weights, share, rtol=2 * torch.finfo(dtype).eps, atol=0.0)
    assert (weights == share).float().mean() > 0.95


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_ties_go_to_the_lowest_group_and_id(data):
    groups = data.draw(st.integers(2, 5), label="groups")
    size = data.draw(st.integers(2, 6), label="size")
    opened = data.draw(st.integers(1, groups - 1), label="open")
    k = data.draw(st.integers(1, opened * size), label="k")
    closed = data.draw(st.sampled_from(["never", "zero"]), label="closed")
    by = data.draw(st.sampled_from(["two_largest", "largest"]), label="by")
    rule = RouterRule("sigmoid", by_logits=False, groups=groups, open_groups=opened, group_score=by, closed=closed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # a score of one half and biases that float32 adds exactly
    logits = torch.zeros((1, groups * size), device=device)
    values = st.lists(st.sampled_from([-2.5, -0.5, 0.0, 0.5, 1.5]), min_size=groups * size, max_size=groups * size)
    bias = torch.tensor(data.draw(values, label="bias"), device=device)
    _, ids = route(logits, k, rule, weights_dtype=torch.float32, bias=bias)
    exact = compared(logits, rule, bias)
    assert torch.equal(ids, torch.sort(exact, dim=-1, descending=True, stable=True).indices[:, :k])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
@pytest.mark.parametrize("rule", [*RULES, RouterRule(by_logits=False, groups=4, open_groups=2, closed="zero")], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_ids_exist_and_do_not_repeat_whatever_comes(device, rule, biased):
    nan, inf = float("nan"), float("inf")
    logits = noise(6, 24)
    logits[0, 4] = nan
    logits[1] = nan
    logits[2] = -inf
    logits[3, :3] = inf
    logits[4, ::2] = torch.tensor([-1], dtype=torch.int32).view(torch.float32)[0]
    bias = noise(24, seed=1)
    bias[[3, 9]] = nan
    k = 6 if rule.open_groups == 1 and rule.grouped else 9
    capture = torch.zeros((6, k), dtype=torch.uint8, device=device)
    _, ids = route(
        logits.to(device), k, rule, weights_dtype=torch.float32, bias=bias.to(device) if biased else None,
        capture=capture,
    )  # fmt: skip
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 24
    falling = ids.sort(-1).values
    assert bool((falling[:, 1:] > falling[:, :-1]).all()), "twice"
    assert torch.equal(capture.long(), ids)


def test_experts_have_factors_of_their_own(device):
    logits, factors = noise(9, 16).to(device), noise(16, seed=1).to(device, torch.bfloat16)
    plain, ids = route(logits, 3, weights_dtype=torch.float32)
    scaled, same = route(logits, 3, weights_dtype=torch.float32, expert_scale=factors)
    assert torch.equal(ids, same)
    assert torch.equal(scaled, plain * factors.float()[ids])


def test_a_row_has_the_same_bits_alone_and_among_others(device):
    logits, bias = noise(70, 32).to(device), noise(32, seed=1).to(device)
    weights, ids = route(logits, 4, GROUPED, weights_dtype=torch.float32, bias=bias)
    for row in (0, 13, 69):
        alone = route(logits[row : row + 1], 4, GROUPED, weights_dtype=torch.float32, bias=bias)
        assert torch.equal(alone[0][0], weights[row])
        assert torch.equal(alone[1][0], ids[row])


def test_rules_that_no_router_has_are_refused(device):
    logits = torch.zeros((2, 12), device=device)
    for rule in (
        RouterRule(by_logits=False, groups=5, open_groups=2),
        RouterRule(by_logits=False, groups=4, open_groups=5),
        RouterRule(by_logits=False, groups=4, open_groups=1),
        RouterRule(by_logits=False, groups=12, open_groups=6),
        RouterRule(groups=4, open_groups=2),
        RouterRule("softmax_of_chosen", by_logits=False),
    ):
        with pytest.raises(BadInput) as caught:
            route(logits, 4, rule, weights_dtype=torch.float32)
        assert caught.value.field == "rule"
    for name in ("bias", "expert_scale"):
        for wrong in (torch.zeros(11, device=device), torch.zeros(24, device=device)[::2]):
            with pytest.raises(BadInput) as caught:
                route(logits, 4, weights_dtype=torch.float32, **{name: wrong})
            assert caught.value.field == name


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "groups"), [(128, 1), (256, 8), (384, 1)])
def test_graphs_replay_and_many_rows_are_as_one(device, experts, groups):
    rule = RouterRule("sigmoid", by_logits=False, groups=groups, open_groups=max(1, groups // 2), least_sum=1e-20)
    logits, bias = noise(4096, experts).to(device), noise(experts, seed=1).to(device)
    weights, ids = route(logits, 8, rule, weights_dtype=torch.float32, bias=bias)
    for tokens in (1, 3, 64, 300):
        some = route(logits[:tokens], 8, rule, weights_dtype=torch.float32, bias=bias)
        assert torch.equal(some[0], weights[:tokens])
        assert torch.equal(some[1], ids[:tokens])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = route(logits, 8, rule, weights_dtype=torch.float32, bias=bias)
    logits.copy_(noise(4096, experts, seed=5))
    graph.replay()
    fresh = route(logits, 8, rule, weights_dtype=torch.float32, bias=bias)
    assert torch.equal(replayed[0], fresh[0])
    assert torch.equal(replayed[1], fresh[1])
