"""What the benchmarks of serving and of experts count with: bytes of a step, models, skewed routing, drawn experts."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fdasync_transformers.model.moe_layers import find_experts, find_moe_layers
from fdasync_transformers.model.recurrent.probe import find_state
from fdasync_transformers.weights import loading

from benchmarks import experts_tiles, gpu_experts
from benchmarks._gpu_experts import EXPERTS, PRODUCTS_PER_S, draw_routing, small
from benchmarks._gpu_floor import StepBytes, bytes_of, distinct
from benchmarks._gpu_models import DEEPSEEK_V2_LITE, HYBRID_MODEL, MODELS, QWEN3_NEXT
from benchmarks._gpu_scale import large, tiny, write_folder
from benchmarks._gpu_skew import find_skew
from benchmarks._shape_folder import empty_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ci

CPU = torch.device("cpu")
GB = 1e9


@pytest.fixture
def no_blocking() -> None:
    """In place of the one that looks: the benchmark of experts computes on its own loop."""


def plain_model(folder: Path, name: str) -> Any:
    checkpoint = loading.read_checkpoint(write_folder(folder, tiny(name)), with_tensors=False)
    return loading.draw(checkpoint, "float32", CPU)


def whole_model(folder: Path, config: dict[str, Any]) -> Any:
    """On the meta device."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return empty_model(folder)


def test_experts_are_counted_once_and_the_rest_by_what_runs() -> None:
    counted = StepBytes(dense=1000, embedding_row=10, expert=(7, 5), num_experts=8, top_k=(2, 1), kv_token=3)
    # one token chooses its own, and many tokens all
    assert counted.expected(1) == pytest.approx([2, 1])
    assert counted.expected(2) == pytest.approx([8 * (1 - 0.75**2), 8 * (1 - 0.875**2)])
    assert counted.expected(500) == pytest.approx([8, 8])
    assert counted.step(1, 100) == pytest.approx(1000 + 10 + 2 * 7 + 1 * 5 + 300)
    assert counted.step(4, 100, [3.5, 2]) == pytest.approx(1000 + 40 + 3.5 * 7 + 2 * 5 + 1200)


def test_bytes_of_a_published_shape_are_those_that_were_computed_by_hand(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 9.437 MB an expert, 2.46 GB dense with the head, 98,304 bytes of KV a token."""
    model = whole_model(tmp_path, large("qwen3-30b-a3b").config)
    moe = find_moe_layers(model, lambda: model(input_ids=torch.zeros(1, 1, dtype=torch.long, device="meta")))
    counted = bytes_of(model, moe, 98_304)
    assert set(counted.expert) == {3 * 768 * 2048 * 2}
    assert counted.dense / GB == pytest.approx(1.837 + 0.622, abs=0.005)
    assert counted.embedding_row == 4096
    assert counted.step(1, 1024) / GB == pytest.approx(6.184, abs=0.005)
    assert counted.step(64, 1024) / GB == pytest.approx(65.953, abs=0.005)
    assert counted.step(256, 1024) / GB == pytest.approx(86.213, abs=0.005)


def test_shared_experts_are_dense_and_a_tied_head_is_read(tmp_path: Path) -> None:
    model = plain_model(tmp_path, "deepseek-v2-lite")
    moe = find_moe_layers(model)
    counted = bytes_of(model, moe, 1)
    everything = sum(tensor.nbytes for tensor in model.parameters())
    embedding = model.get_input_embeddings().weight
    assert len(counted.expert) == 2
    assert counted.dense + sum(counted.expert) * 16 + embedding.nbytes == everything
    model.lm_head.weight = embedding
    assert bytes_of(model, moe, 1).dense == counted.dense


def test_distinct_experts_are_counted_by_step_and_layer() -> None:
    # [steps, sequences, layers, k]
    rows = np.array([[[[0, 1], [2, 3]], [[0, 1], [4, 5]]], [[[0, 1], [2, 3]], [[2, 3], [2, 3]]]], np.uint8)
    assert distinct(rows, 8) == [3.0, 3.0]


# the hybrid one fits smaller GPUs, too
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {HYBRID_MODEL}))
def test_layers_are_as_many_as_fit(name: str, tmp_path: Path) -> None:
    """120 GB hold weights and the KV of 256 contexts, and would not hold another layer."""
    served, scale = MODELS[name], large(name)
    latent = scale.config.get("kv_lora_rank")
    width = (
        latent + scale.config["qk_rope_head_dim"]
        if latent
        else 2 * scale.config["num_key_value_heads"] * scale.config["head_dim"]
    )

    def nbytes(layers: int) -> float:
        weights = sum(tensor.nbytes for tensor in whole_model(tmp_path, served.shape.cut(layers)).parameters())
        return float(weights + layers * 2 * width * 256 * scale.blocks_each * scale.block_tokens)

    assert nbytes(served.layers) <= 120 * GB
    assert served.layers == served.shape.most_layers or nbytes(served.layers + 1) > 120 * GB


def test_deepseek_v2_lite_is_what_was_published(tmp_path: Path) -> None:
    model = whole_model(tmp_path, DEEPSEEK_V2_LITE.config)
    # 15.7 billion, of which a token uses 2.4
    assert sum(tensor.numel() for tensor in model.parameters()) / 1e9 == pytest.approx(15.7, abs=0.05)
    experts = find_experts(model)
    assert (len(experts), {one.num_experts for one in experts.values()}) == (26, {64})


def test_qwen3_next_is_what_was_published(tmp_path: Path) -> None:
    model = whole_model(tmp_path, QWEN3_NEXT.config)
    assert sum(tensor.numel() for tensor in model.parameters()) / 1e9 == pytest.approx(79.7, abs=0.1)
    state = find_state(model)
    assert state is not None
    # 36 layers, as much as the KV of 3,168 tokens
    assert (len(state.parts), state.nbytes) == (36, 77_856_768)


def ids_of(model: Any, prompts: int) -> list[torch.Tensor]:
    """Expert ids of the last token of random prompts, by layer."""
    seen: list[torch.Tensor] = []
    hooks = [
        model.get_submodule(one.name).register_forward_pre_hook(lambda _, args: seen.append(args[1]))
        for one in find_experts(model).values()
    ]
    ids = torch.randint(0, 100, (prompts, 30), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [one.view(prompts, 30, -1)[:, -1] for one in seen]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_skew_is_a_bias_and_goes_away_again(name: str, tmp_path: Path) -> None:
    model = plain_model(tmp_path, name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    routers = [one.name.removesuffix("experts") + "gate" for one in find_experts(model).values()]
    other = plain_model(tmp_path, name)
    skew = find_skew(other, routers, 3.0, prompts=8, tokens=32)
    assert max(skew.spread) < 0.3
    even = [len(one.unique()) for one in ids_of(model, 64)]
    skew.apply(model)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key
    chosen = ids_of(model, 64)
    # each token's are still its own, but fewer are chosen often
    counts = [torch.bincount(one.flatten(), minlength=8) for one in chosen]
    assert all(int(one.max()) > 1.5 * float(one.float().mean()) for one in counts)
    assert sum(len(one.unique()) for one in chosen) <= sum(even)
    skew.undo(model)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), key
    # twice does nothing
    skew.undo(model)


def test_a_model_whose_routers_are_not_called_is_refused(tmp_path: Path) -> None:
    model = plain_model(tmp_path, "qwen3-30b-a3b")
    routers = [one.name.removesuffix("experts") + "gate" for one in find_experts(model).values()]
    model.config.num_hidden_layers = 1
    with pytest.raises(RuntimeError, match=r"not called \['model.layers.1.mlp.gate'\]"):
        find_skew(model, routers, 1.0, prompts=4, tokens=16)


def test_the_floor_of_experts_is_bytes_or_products() -> None:
    qwen, mixtral = EXPERTS["qwen3-30b-a3b"], EXPERTS["mixtral-8x7b"]
    assert (qwen.num_experts, qwen.top_k, qwen.hidden, qwen.inner) == (128, 8, 2048, 768)
    assert (EXPERTS["glm-4.5-air"].hidden, EXPERTS["glm-4.5-air"].inner) == (4096, 1408)
    assert (EXPERTS["deepseek-v2-lite"].num_experts, EXPERTS["deepseek-v2-lite"].top_k) == (64, 6)
    assert (mixtral.num_experts, mixtral.inner) == (8, 14336)
    # what was measured once: 278 us at 64 tokens, of bytes; 8,192 tokens are bound by products
    assert qwen.floor_s(64, 126, 4277 * GB) * 1e6 == pytest.approx(278, abs=1)
    assert qwen.floor_s(8192, 128, 4277 * GB) == pytest.approx(8192 * 8 * 6 * 2048 * 768 / PRODUCTS_PER_S)


def test_a_round_reads_a_gigabyte_before_it_comes_back() -> None:
    for experts in EXPERTS.values():
        for chosen in (experts.top_k, experts.num_experts):
            calls = experts.calls(chosen, 4)
            assert calls % 4 == 0
            assert calls * chosen * experts.expert_nbytes >= 1e9
    assert EXPERTS["qwen3-30b-a3b"].calls(128, 4) == 4


def test_drawn_routing_is_distinct_per_token_and_skewed_by_a_bias() -> None:
    random = np.random.default_rng(0)
    ids, weights = draw_routing(random, 200, 32, 4)
    assert ids.shape == weights.shape == (200, 4)
    assert ids.flags.c_contiguous
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert weights.sum(1) == pytest.approx(np.ones(200), abs=1e-5)
    assert (np.diff(weights, axis=1) <= 0).all()
    bias = np.zeros(32, np.float32)
    bias[:4] = 20.0
    assert set(draw_routing(random, 50, 32, 4, bias)[0].flatten().tolist()) == {0, 1, 2, 3}


def test_the_experts_benchmark_is_rehearsed_on_the_librarys_modules(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    with pytest.raises(SystemExit) as ended:
        gpu_experts.main(["--tiny", "--chains", "library", "--tokens", "1,5", "--json", str(out)])
    assert ended.value.code == 0
    report = json.loads(out.read_text())
    rows = report["conditions"]["tables"]["deepseek-v2-lite uniform"]
    assert [row["tokens"] for row in rows] == [1, 5]
    assert rows[0]["experts"] == small(EXPERTS["deepseek-v2-lite"]).top_k == 4
    assert report["figures"]["experts_library_us_glm_4_5_air_skewed_5"] > 0
    assert "void" in report["conditions"]


def test_the_experts_benchmark_plays_our_kernels(tmp_path: Path) -> None:
    """In Triton's interpreter, against the library's modules, whose results they must give."""
    out = tmp_path / "figures.json"
    arguments = ["--tiny", "--shapes", "qwen3-30b-a3b", "--routing", "uniform", "--tokens", "3", "--json", str(out)]
    with pytest.raises(SystemExit) as ended:
        gpu_experts.main(arguments)
    assert ended.value.code == 0
    report = json.loads(out.read_text())
    [row] = report["conditions"]["tables"]["qwen3-30b-a3b uniform"]
    assert row["ours_us"] > 0
    assert row["off"] < 1e-5, "in float32"
    ratio = report["figures"]["experts_library_over_ours_qwen3_30b_a3b_uniform_3"]
    assert ratio == pytest.approx(row["library_us"] / row["ours_us"], rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_of_tiles_says_what_it_needs() -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU, and torch sees none"):
        experts_tiles.main(["--tokens", "1"])


def test_processes_that_compile_for_too_long_are_ended() -> None:
    """In a process of its own: multiprocessing leaves a helper behind in one that it was used in."""
    program = (
        "from benchmarks import experts_tiles as tiles; tiles._COMPILE_S = 0.0; tiles.os.cpu_count = lambda: 3; "
        "tiles.compile_all('qwen3-30b-a3b', [])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "1 processes did not compile their candidates within 0 s"


@pytest.mark.parametrize("arguments", [["--shapes", "gpt-5"], ["--routing", "even"], ["--tokens", "0"]])
def test_the_experts_benchmark_refuses_what_is_not_there(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu_experts.parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_result_that_is_not_the_librarys_fails_its_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = gpu_experts.chain_of("library")

    def chain_of(name: str) -> gpu_experts.Chain:
        return library if name == "library" else lambda *call: library(*call) * 1.1

    monkeypatch.setattr(gpu_experts, "chain_of", chain_of)
    out = tmp_path / "figures.json"
    with pytest.raises(SystemExit) as ended:
        gpu_experts.main(["--tiny", "--shapes", "qwen3-30b-a3b", "--json", str(out)])
    assert ended.value.code == 1
    assert "off the library's" in capsys.readouterr().err
