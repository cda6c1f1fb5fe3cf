"""Router weights and layer norms as aux data: exactly what the library computed, on both paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from aux_reference import chosen, plain, routers_of, watched
from checks.steps import BOTH, RECORDED, top_k_of, weights_and_norms_are_the_librarys
from device_path import DEVICE, ON_GPU, make_small_checkpoint
from fdasync_transformers.capture.aux_producer import AuxSource
from fdasync_transformers.fused.routers import fuse_routers
from fdasync_transformers.model.moe_layers import find_moe_layers
from fdasync_transformers.start.aux_producers import make_aux
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint, make_tiny_model
from fdasync_transformers.weights.random_checkpoints import VOCAB_SIZE as VOCAB
from made import Made
from step_driver import Driver
from written import write_tiny_checkpoint

from fdasync.errors import ConfigError, RunnerError

if TYPE_CHECKING:
    from pathlib import Path

DEVICE_NOW = torch.device("cuda" if ON_GPU else "cpu")


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("family", RECORDED.by_day)
async def test_weights_and_norms_are_the_librarys(tmp_path: Path, family: str) -> None:
    await weights_and_norms_are_the_librarys(Made(family, tmp_path))


async def test_a_dense_model_has_norms_and_no_routing(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path, "qwen3_dense")
    driver = await Driver.open(tmp_path, config={"aux": ["layer_norms"]})
    assert [(spec.name, spec.shape, spec.dtype) for spec in driver.capacity.aux_specs] == [
        ("layer_norms", (4,), "float32")
    ]
    sequences = [driver.sequence([5, 99, 3, 7, 8], 4), driver.sequence(list(range(40, 59)), 4, 1)]
    await driver.run(sequences, chunks=3)
    for one in sequences:
        np.testing.assert_allclose(driver.rows(one), plain(model, (one.prompt + one.tokens)[:-1], [])[2], rtol=1e-4)
    await driver.close()


@pytest.mark.ci
@pytest.mark.parametrize("family", ["qwen3_moe", "ernie4_5_moe"])
async def test_the_device_path_records_the_same(tmp_path: Path, family: str) -> None:
    """By a fused router and by the library's; prefill in chunks beside decodes. On a GPU decodes are graphs."""
    model = make_small_checkpoint(tmp_path, family)
    driver = await Driver.open(tmp_path, config={"self_check": False, **DEVICE, "aux": BOTH})
    sequences = [driver.sequence([5, 99, 3, 7, 8, 21, 40], 4), driver.sequence([9, 8, 7, 6, 5], 3, 1)]
    await driver.run(sequences, chunks=2)
    for one in sequences:
        plain_ids, plain_weights, plain_norms = plain(model, (one.prompt + one.tokens)[:-1], top_k_of(driver))
        ids, weights, norms = (driver.rows(one, name) for name in ("routing", *BOTH))
        for layer, (experts, wanted) in enumerate(zip(plain_ids, plain_weights, strict=True)):
            assert np.array_equal(np.sort(ids[:, layer]), np.sort(experts))
            by_id = np.take_along_axis(weights[:, layer], np.argsort(ids[:, layer], axis=1), 1)
            right = np.take_along_axis(wanted, np.argsort(experts, axis=1), 1)
            np.testing.assert_allclose(by_id, right, rtol=2e-3, atol=1e-4)
        np.testing.assert_allclose(norms, plain_norms, rtol=1e-3)
    await driver.close()


def build(family: str, dtype: torch.dtype, *, fuse: bool) -> tuple[Any, Any, Any]:
    model = make_tiny_model(family).to(DEVICE_NOW, dtype)
    # what a graph can hold, and the same numbers outside
    model.set_experts_implementation("batched_mm")
    layers = find_moe_layers(model)
    assert layers is not None
    aux = make_aux(BOTH[:1], AuxSource(model, layers, fuse_routers(model, layers) if fuse else None))
    aux.attach(32)
    return model, layers, aux


@torch.inference_mode()
def through(model: Any, layers: Any, hidden: torch.Tensor) -> None:
    """The MoE block of each layer, on a hidden state [1, T, H]."""
    for name in layers.names:
        model.get_submodule(name.rpartition(".")[0])(hidden)


def assert_staged(aux: Any, seen: list[list[Any]], top_k: tuple[int, ...], count: int) -> None:
    staged = aux.stage(count)
    for layer, k in enumerate(top_k):
        ids, weights = chosen(seen[layer][-1], k)
        assert torch.equal(staged["routing"][:, layer, :k].long(), ids[:count].long())
        assert torch.equal(staged["routing_weights"][:, layer, :k], weights[:count].to(torch.float16))


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "fuse"), [("qwen3_moe", True), ("qwen3_moe", False), ("ernie4_5_moe", True)])
def test_weights_are_bit_by_bit_what_the_experts_get(family: str, dtype: torch.dtype, fuse: bool) -> None:
    model, layers, aux = build(family, dtype, fuse=fuse)
    hidden = torch.randn((1, 11, 32), generator=torch.Generator().manual_seed(1)).to(DEVICE_NOW, dtype)
    with watched(routers_of(model)) as seen:
        aux.begin(None)
        through(model, layers, hidden)
        aux.end()
    assert_staged(aux, seen, layers.top_k, 11)
    replaced = [router for router in routers_of(model) if "forward" in vars(router)]
    assert len(replaced) == (len(layers.ids) if fuse else 0)
    aux.close()
    # the library's own, where a kernel routed
    for router in replaced:
        del router.forward
    with watched(routers_of(model)) as library:
        through(model, layers, hidden)
    close = 2 * torch.finfo(dtype).eps + 1e-5
    for mine, theirs in zip(seen, library, strict=True):
        torch.testing.assert_close(mine[-1][1].float(), theirs[-1][1].float(), rtol=close, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "fuse"), [("qwen3_moe", True), ("qwen3_moe", False), ("ernie4_5_moe", True)])
def test_a_graph_replays_the_weights(family: str, dtype: torch.dtype, fuse: bool) -> None:
    """The tensors that routers returned while the graph was captured stay alive in it, and each replay fills them."""
    model, layers, aux = build(family, dtype, fuse=fuse)
    hidden = torch.zeros((1, 24, 32), device=DEVICE_NOW, dtype=dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        aux.begin(None)
        through(model, layers, hidden)
        aux.end()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with watched(routers_of(model)) as seen, torch.cuda.graph(graph, stream=side):
            aux.begin(None)
            through(model, layers, hidden)
            aux.end()
        for seed in range(3):
            hidden.copy_(torch.randn((1, 24, 32), generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            assert_staged(aux, seen, layers.top_k, 24 - seed)
    torch.cuda.synchronize()
    aux.close()


@pytest.mark.gpu
async def test_graphs_and_operations_record_the_same(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    found = []
    for graphs in (True, False):
        config = {"self_check": False, **DEVICE, "aux": BOTH, "cuda_graphs": graphs}
        driver = await Driver.open(tmp_path, config=config, pipeline_depth=2)
        one = driver.sequence([5, 99, 3, 7, 8, 21, 40], 9)
        await driver.run([one])
        found.append([driver.rows(one, name) for name in ("routing", *BOTH)])
        await driver.close()
    (ids, weights, norms), (plain_ids, plain_weights, plain_norms) = found
    assert np.array_equal(ids, plain_ids)
    np.testing.assert_allclose(weights, plain_weights, rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(norms, plain_norms, rtol=1e-3)


def test_experts_that_are_given_no_weights_fail_the_pass() -> None:
    model, layers, aux = build("qwen3_moe", torch.float32, fuse=False)
    experts = model.get_submodule(layers.names[0])
    hidden = torch.zeros((4, 32), device=DEVICE_NOW)
    ids = torch.zeros((4, 3), dtype=torch.int64, device=DEVICE_NOW)
    for weights in ((), (torch.zeros((4, 2), device=DEVICE_NOW),)):
        aux.begin(None)
        with pytest.raises(RunnerError, match="without the weights of 3 experts"):
            experts(hidden, ids, *weights)
    aux.begin(None)
    aux.producers[1]._hooks[0].remove()
    through(model, layers, torch.zeros((1, 4, 32), device=DEVICE_NOW))
    with pytest.raises(RunnerError, match=r"routing_weights of 2 layers was captured, 3 were to be; rows without: 0$"):
        aux.end()


@pytest.mark.parametrize(
    ("family", "aux", "limits", "named"),
    [
        ("qwen3_dense", ["routing_weights"], {}, "without captured routing"),
        ("qwen3_moe", ["routing_weights"], {"capture": False}, "without captured routing"),
        ("qwen3_moe", ["layer_norms", "layer_norms"], {}, "names a datum twice"),
        ("qwen3_moe", ["routing"], {}, "or the captured routing"),
        (
            "qwen3_moe",
            ["nosuch"],
            {},
            "'nosuch': not installed; there are: final_hidden, layer_norms, routing",
        ),
    ],
)
async def test_what_cannot_be_recorded_is_refused(
    tmp_path: Path, family: str, aux: list[str], limits: dict[str, Any], named: str
) -> None:
    write_tiny_checkpoint(tmp_path, family)
    with pytest.raises(ConfigError, match=named) as caught:
        await Driver.open(tmp_path, config={"self_check": False, "aux": aux}, **limits)
    assert caught.value.field == "runner_config.aux"


async def test_nothing_is_recorded_unless_it_is_asked_for(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    assert [spec.name for spec in make_aux((), AuxSource(model, find_moe_layers(model))).specs] == ["routing"]
    assert make_aux((), AuxSource(model, None)).producers == ()
    driver = await Driver.open(tmp_path, config={"self_check": False, "aux": ["layer_norms"]}, capture=False)
    assert [spec.name for spec in driver.capacity.aux_specs] == ["layer_norms"]
    one = driver.sequence(list(range(3, VOCAB, 9)), 3)
    await driver.run([one])
    np.testing.assert_allclose(driver.rows(one), plain(model, (one.prompt + one.tokens)[:-1], [3, 3, 3])[2], rtol=1e-4)
    await driver.close()
