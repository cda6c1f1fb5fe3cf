"""A linear layer rounds once, whatever the layout of what it is given."""

from __future__ import annotations

import pytest
import torch
from fdasync_trainer import fixed_numerics
from fdasync_transformers.fixed.mode import FixedNumerics
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from rollout_bits import served_in
from torch.nn.functional import linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layouts(x):
    """The same numbers [4, 6, K], some otherwise in memory."""
    wide = torch.zeros(4, 9, 2 * x.shape[2], dtype=x.dtype)
    wide[:, 3:, : x.shape[2]] = x
    return {
        "whole": x.clone(),
        "columns": x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "turned": x.transpose(0, 1).contiguous().transpose(0, 1),
        "part": wide[:, 3:, : x.shape[2]],
    }


@pytest.mark.parametrize("how", ["inference", "no_grad", "grad"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_dims_change_nothing(dtype, how):
    torch.manual_seed(0)
    x, bias = torch.randn(4, 6, 72).to(dtype), torch.randn(40).to(dtype)
    weight = torch.randn(40, 72).to(dtype).requires_grad_(how == "grad")
    exact = (x.double() @ weight.detach().double().t() + bias.double()).to(dtype)
    with torch.inference_mode(how == "inference"), torch.set_grad_enabled(how == "grad"), FixedNumerics():
        wanted = linear(x.view(24, 72), weight, bias).view(4, 6, 40)
        plain = linear(x.view(24, 72), weight).view(4, 6, 40)
        for one in layouts(x).values():
            for given in (one, one.unflatten(1, (2, 3)), one[:, None]):
                assert torch.equal(linear(given, weight, bias).reshape(4, 6, 40), wanted)
                assert torch.equal(linear(given, weight).reshape(4, 6, 40), plain)
                assert torch.equal(linear(given, weight, bias=bias).reshape(4, 6, 40), wanted)
            assert torch.equal(linear(one[:, -1:], weight, bias), wanted[:, -1:])
            assert torch.equal(torch.stack([linear(row, weight, bias) for row in one[1]]), wanted[1])
        assert linear(x[:0], weight, bias).shape == (0, 6, 40)
    assert wanted.requires_grad is (how == "grad")
    if dtype is torch.bfloat16:
        # one rounding, but where the order of sums in float32 decides a tie
        assert (wanted != exact).float().mean() < 0.01
        assert ((wanted.detach() != plain.detach() + bias).float().mean()) > 0.05


@pytest.mark.parametrize("dtype", DTYPES)
def test_contractions_are_products_of_rows_in_each_layout(dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(4, 6, 72).to(dtype), torch.randn(40, 72).to(dtype)
    parts = weight.unflatten(1, (8, 9))
    ways = (
        lambda rows: torch.inner(rows, weight),
        lambda rows: torch.inner(weight, rows).movedim(0, -1),
        lambda rows: torch.tensordot(rows, weight, ([-1], [1])),
        lambda rows: torch.tensordot(weight, rows, ([1], [-1])).movedim(0, -1),
        lambda rows: torch.tensordot(rows.unflatten(-1, (8, 9)), parts, ([-2, -1], [1, 2])),
    )
    with FixedNumerics():
        wanted = linear(x, weight)
        for one in layouts(x).values():
            for way in ways:
                assert torch.equal(way(one), wanted)
                assert torch.equal(way(one[2:, -1:]), wanted[2:, -1:])


def test_gradients_flow_through_each_layout():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 6, 72), torch.randn(40, 72), torch.randn(40)
    for name, one in layouts(x).items():
        theirs = [each.clone().double().requires_grad_() for each in (x, weight, bias)]
        linear(*theirs).square().sum().backward()
        given = [each.detach().requires_grad_() for each in (one, weight.clone(), bias.clone())]
        with FixedNumerics():
            out = linear(*given)
        out.square().sum().backward()
        for mine, other in zip(given, theirs, strict=True):
            assert torch.allclose(mine.grad.double(), other.grad, rtol=1e-4, atol=1e-2), name


@pytest.mark.parametrize("grad", [False, True])
def test_some_logits_of_a_biased_head(grad):
    torch.manual_seed(0)
    model = served_in(make_tiny_model("phimoe", lm_head_bias=True), torch.bfloat16)
    torch.nn.init.normal_(model.lm_head.bias)
    ids = torch.randint(3, 250, (3, 21))
    with torch.set_grad_enabled(grad), fixed_numerics(model):
        whole = model(input_ids=ids).logits
        last = model(input_ids=ids, logits_to_keep=2).logits
        embeds = model.get_input_embeddings()(ids)
        turned = model(inputs_embeds=embeds.transpose(0, 1).contiguous().transpose(0, 1)).logits
    assert torch.equal(last, whole[:, -2:])
    assert torch.equal(turned, whole)


class Turning(torch.nn.Linear):
    """Not plain: calls the function by itself, on its input turned in memory."""

    def forward(self, x):
        return linear(x.transpose(0, 1).contiguous().transpose(0, 1), self.weight, self.bias)


@pytest.mark.parametrize("plain", [True, False])
def test_a_trainer_enters_the_function_mode_where_other_code_calls_linear(plain):
    """And the bits are the same whichever layout it has."""
    found, modes = [], set()
    ids = torch.randint(3, 250, (3, 21), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    biases = torch.randn(64, 512)
    for kind in (torch.nn.Linear,) if plain else (torch.nn.Linear, Turning):
        model = served_in(make_tiny_model("qwen2_moe"), torch.bfloat16)
        for layer in model.model.layers:
            bias = layer.self_attn.q_proj.bias
            bias.data.copy_(biases[layer.self_attn.layer_idx, : len(bias)])
            layer.self_attn.q_proj.__class__ = kind
            layer.self_attn.register_forward_pre_hook(lambda *_: modes.add(torch._C._len_torch_function_stack()))
        with fixed_numerics(model):
            modes.clear()
            found.append(model(input_ids=ids).logits)
            assert modes == {int(kind is Turning)}
        assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(found[0], found[-1])


def test_the_modes_end_together():
    """Also after an error, and where one is entered within itself."""
    x, weight = torch.randn(2, 3, 8), torch.randn(4, 8)
    mode = FixedNumerics()
    with pytest.raises(KeyError), mode, mode:
        raise KeyError
    assert torch._C._len_torch_function_stack() == 0
    with mode:
        with mode:
            linear(x, weight)
        assert torch._C._len_torch_function_stack() == 1
    assert torch._C._len_torch_function_stack() == 0
