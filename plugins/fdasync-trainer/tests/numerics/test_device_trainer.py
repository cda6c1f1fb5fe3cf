"""A trainer's model by the rollout's kernels: values are theirs to the bit, gradients the library's."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from device_rollout import device_rollout_logits
from fdasync_kernels.experts.activation import Activation
from fdasync_trainer import fixed_numerics
from fdasync_trainer.numerics.device_experts import trainer_experts
from fdasync_trainer.numerics.device_forms import NormForward, RouterForward
from fdasync_trainer.numerics.device_segments import DeviceSegments
from fdasync_trainer.numerics.gradients.norms import norm_gradient
from fdasync_trainer.numerics.segments import HostSegments
from fdasync_trainer.replay.force import find_routers, forced_routing
from fdasync_trainer.replay.layout import Spans
from fdasync_transformers.fused import experts
from fdasync_transformers.fused.experts_interface import Description, run_experts
from fdasync_transformers.fused.live_rows import LiveRows
from fdasync_transformers.fused.norms import Norms
from fdasync_transformers.fused.replacement import Differs, replace
from fdasync_transformers.fused.routers import Record, fused_router
from fdasync_transformers.model.kv import Reach
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from ordered_dot import walk_in_order
from replay_helpers import checkpointed
from rollout_bits import batch_of, drawn, served_in
from torch.nn.functional import cosine_similarity

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterator

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# what the interpreter is given is small
ROWS = 5


def rows_of(model: Any, count: int = ROWS) -> torch.Tensor:
    noise = torch.randn(count, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    return noise.to(PLACE).requires_grad_()


def grads(output: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    given = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
    return torch.autograd.grad(output, inputs, given)


def assert_near(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert float((one.double() - other.double()).norm()) <= 1e-5 * float(other.double().norm())


@pytest.fixture(scope="module")
def qwen() -> Any:
    return make_tiny_model("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[]).to(PLACE)


@pytest.mark.parametrize("by_form", [False, True])
def test_norms(qwen: Any, by_form: bool) -> None:
    norm, rows = qwen.model.layers[0].input_layernorm, rows_of(qwen)
    wanted = grads(norm(rows), rows, norm.weight)
    assert replace(Norms(torch.float32, PLACE), norm).names
    kernel = vars(norm).pop("forward")
    form = norm_gradient(norm, torch.float32, PLACE)
    assert form is not None
    forward = NormForward(norm, kernel, torch.float32, form if by_form else None)
    out = forward(rows)
    with torch.no_grad():
        assert torch.equal(out, kernel(rows))
        assert not forward(rows).requires_grad
    assert_near(grads(out, rows, norm.weight), wanted)
    # some models change a result in place
    out = forward(rows)
    out.mul_(2)
    assert_near(grads(out, rows, norm.weight), tuple(2 * one for one in wanted))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_routers(family: str) -> None:
    only = {"layer_types": ["full_attention"]} if family == "gpt_oss" else {"mlp_only_layers": []}
    model = make_tiny_model(family, num_hidden_layers=1, **only).to(PLACE)
    (site,) = find_routers(model).values()
    router, rows = site.router, rows_of(model)
    inputs = (rows, *router.parameters())
    own = router(rows)
    kernels = fused_router(router, own[-1].shape[1], torch.float32, Record())
    assert not isinstance(kernels, Differs)
    with torch.no_grad():
        values = kernels(rows)
    router.forward = RouterForward(site, kernels)
    found = router(rows)
    assert all(torch.equal(one, other) for one, other in zip(found, values, strict=True))
    weights = next(at for at, part in enumerate(own) if part.shape == own[-1].shape and part.is_floating_point())
    assert torch.equal(own[-1], found[-1])
    assert_near(grads(found[weights], *inputs), grads(own[weights], *inputs))
    # a record wins; the rows that it leaves to the router are the kernels' own
    forced = values[-1].flip(0).clone()
    forced[0] = -1
    with forced_routing(model, {site.layer: forced}):
        replayed = router(rows)
    assert torch.equal(replayed[-1][1:], forced[1:])
    assert torch.equal(replayed[-1][0], values[-1][0])
    assert torch.equal(replayed[weights][0], values[weights][0])
    with forced_routing(model, {site.layer: values[-1]}), torch.no_grad():
        assert torch.equal(router(rows)[weights], values[weights])
    with forced_routing(model, {site.layer: forced[:2]}), pytest.raises(BadInput):
        router(rows)


def test_experts(qwen: Any) -> None:
    module, rows = qwen.model.layers[0].mlp.experts, rows_of(qwen)
    module.fd_experts = Description(Activation("silu"), True, False, False, False, LiveRows())
    make = torch.Generator().manual_seed(4)
    ids = torch.rand(ROWS, module.num_experts, generator=make).topk(2).indices.to(PLACE)
    weights = torch.rand(ROWS, 2, generator=make).to(PLACE).requires_grad_()
    inputs = (rows, weights, *module.parameters())
    out = trainer_experts(module, rows, ids, weights)
    with torch.no_grad():
        assert torch.equal(out, run_experts(module, rows, ids, weights))
    plain = deepcopy(module).double()
    plain.config._experts_implementation = "eager"
    doubles = [each.detach().double().requires_grad_() for each in (rows, weights)]
    wanted = grads(plain(doubles[0], ids, doubles[1]), *doubles, *plain.parameters())
    assert_near(grads(out, *inputs), wanted)
    # what needs no gradient gets none
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    out = trainer_experts(module, rows.detach(), ids, weights)
    assert_near(grads(out, weights), wanted[1:2])


@pytest.mark.parametrize("latent", [False, True])
def test_attention_of_padded_and_packed_rows(latent: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    query, key = (torch.randn(20, heads, 32, generator=generator).to(PLACE) for heads in (4, 1 if latent else 2))
    value = key[..., :16] if latent else torch.randn(20, 2, 32, generator=generator).to(PLACE)
    padded = Spans(np.array([2, 9]), np.array([6, 4]), 20)
    packed = Spans(np.array([0, 14]), np.array([14, 6]), 20)
    for spans in (padded, packed):
        for reach in (Reach("full", 0), Reach("window", 3)):
            found, wanted = (
                kind(spans, PLACE).attend(query, key, value, reach, 0.2, None, latent=latent)
                for kind in (DeviceSegments, HostSegments)
            )
            assert (found.float() - wanted.float()).abs().max() < 2e-6
    real = [*range(2, 8), *range(9, 13)]
    found = DeviceSegments(padded, PLACE).attend(query, key, value, Reach("full", 0), 0.2, None, latent=latent)
    assert not found[[0, 1, 8, *range(13, 20)]].any()
    alone = Spans(np.array([0, 6]), np.array([6, 4]), 10)
    dense = DeviceSegments(alone, PLACE).attend(
        query[real], key[real], value[real], Reach("full", 0), 0.2, None, latent=latent
    )
    assert torch.equal(found[real], dense)


@pytest.fixture
def few_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter takes ten seconds for the tiles of all regimes, of which `fused/test_experts.py` has tests."""
    if PLACE.type == "cpu":
        monkeypatch.setattr(experts, "_tiles_of", lambda _: ())
    return


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss", "glm4_moe"])
@pytest.mark.usefixtures("few_tiles")
def test_gradients_of_whole_models_are_those_of_a_cpu(family: str) -> None:
    few = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gpt_oss" else {}
    sequences = drawn((9, 3))
    arguments, real = batch_of(sequences, "left")

    def play(kernels: Any, model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        numerics = fixed_numerics(model, kernels=kernels)
        device = model.device
        with numerics:
            moved = {name: value.to(device) for name, value in arguments.items()}
            logits = model(**moved, use_cache=False).logits.flatten(0, 1)[real.to(device)]
            logits.log_softmax(-1)[:, 3].sum().backward()
        assert not any("forward" in vars(part) or "fd_experts" in vars(part) for part in model.modules())
        return logits.detach().cpu(), {name: one.grad.cpu() for name, one in model.named_parameters()}

    model = make_tiny_model(family, num_hidden_layers=2, **few).train()
    wanted, wanted_grads = play("auto", deepcopy(model))
    found, found_grads = play("triton", deepcopy(model).to(PLACE))
    again, again_grads = play("triton", checkpointed(deepcopy(model).to(PLACE)))
    assert torch.equal(found, again)
    assert float((found - wanted).abs().max()) < 1e-4
    for name, grad in wanted_grads.items():
        if float(grad.norm()) > 1e-6:
            assert float((found_grads[name] - grad).norm() / grad.norm()) < 1e-3, name
            assert cosine_similarity(again_grads[name].flatten(), grad.flatten(), dim=0) > 0.999, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss", "glm4_moe", "qwen2_moe", "olmoe"])
def test_logits_are_a_rollouts_to_the_bit(family: str, dtype: torch.dtype) -> None:
    sequences = drawn((300, 75, 20, 3))

    def made() -> Any:
        return served_in(make_tiny_model(family, max_position_embeddings=512), dtype).to(PLACE)

    wanted, fused = device_rollout_logits(made(), sequences)
    assert "routers" in fused
    assert wanted.isfinite().all()
    model = made()
    for trained in (model.train(), checkpointed(model)):
        with fixed_numerics(trained):
            for layout in ("left", "right", "packed"):
                arguments, real = batch_of(sequences, layout)
                moved = {name: value.to(PLACE) for name, value in arguments.items()}
                logits = trained(**moved, use_cache=False).logits.flatten(0, 1)[real.to(PLACE)]
                assert torch.equal(logits.cpu(), wanted), (layout, fused)
                logits.float().logsumexp(-1).sum().backward()
    assert all(one.grad is None or one.grad.isfinite().all() for one in model.parameters())


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe"])
@pytest.mark.usefixtures("few_tiles")
def test_logits_in_bfloat16_are_a_rollouts_in_the_interpreter_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in float32: there a few bits differ in the interpreter, and it is not known of which operation."""
    walk_in_order(monkeypatch)
    sequences = drawn((9, 3))
    wanted, fused = device_rollout_logits(
        served_in(make_tiny_model(family, num_hidden_layers=2), torch.bfloat16).to(PLACE), sequences, 5
    )
    assert "1 of 1 routers" in fused
    model = served_in(make_tiny_model(family, num_hidden_layers=2), torch.bfloat16).to(PLACE)
    arguments, real = batch_of(sequences, "left")
    with fixed_numerics(model, kernels="triton"):
        found = model(**{name: value.to(PLACE) for name, value in arguments.items()}, use_cache=False).logits
    assert torch.equal(found.flatten(0, 1)[real.to(PLACE)].cpu(), wanted)
