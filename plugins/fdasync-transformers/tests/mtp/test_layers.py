"""Multi-token prediction layers of checkpoint folders: finding, loading, updates, and what is refused."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers import TransformersRunner
from fdasync_transformers.model.kv import Reach
from fdasync_transformers.mtp.head import head_of
from fdasync_transformers.start.runner_config import TransformersConfig
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from fdasync_transformers.tiny.mtp import make_mtp_checkpoint
from fdasync_transformers.weights import identity, loading
from fdasync_transformers.weights.named import named_tensors
from fdasync_transformers.weights.update import LiveWeights
from mtp_play import Play, open_mtp
from mtp_reference import load_reference
from safetensors.torch import load_file, save_file

from fdasync.errors import CheckpointError, ConfigError, UnsupportedModel
from fdasync.runner.base import RunnerLimits, TensorMeta

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


def live(opened: Any, folder: Path) -> LiveWeights:
    return LiveWeights(opened.names, identity.config_facts(loading.read_checkpoint(str(folder)).config))


def send(weights: LiveWeights, tensors: Any) -> None:
    given = list(tensors)
    weights.begin_tensors([TensorMeta(name, dtype, shape) for name, dtype, shape, _ in given])
    for number, (_, _, _, data) in enumerate(given):
        weights.write_tensor(number, 0, memoryview(data))
    weights.end_tensors()


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(("family", "layers"), [("deepseek_v3", 1), ("glm4_moe", 2)])
def test_layers_are_loaded_as_the_library_loads_them(tmp_path: Path, family: str, layers: int) -> None:
    make_mtp_checkpoint(tmp_path, family, layers=layers)
    head = head_of(open_mtp(tmp_path).step_model.model)
    assert head is not None
    _, reference = load_reference(tmp_path, layers)
    mine, theirs = head.state_dict(), reference.layers.state_dict(prefix="layers.")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(
    ("family", "how"),
    [("glm4_moe_lite", {"told": False}), ("dots1", {"told": False, "layer_types": ["full_attention"] * 4}),
     ("qwen3_moe", {"told": False, "apart": True})],
)  # fmt: skip
async def test_families_that_the_library_gives_no_such_layers(tmp_path: Path, family: str, how: dict[str, Any]) -> None:
    """A layer like the model's last; its names say where it is."""
    written = make_mtp_checkpoint(tmp_path, family, **how)
    opened = open_mtp(tmp_path)
    mine, theirs = opened.step_model.model.state_dict(), written.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    play = Play(opened)
    lane, start = play.start(1, [5, 9, 200, 13, 77])
    await play.step([], (start,), ((lane, 5),), 2)
    assert len(lane.drafts) == 2


def test_without_asking_there_are_none(tmp_path: Path) -> None:
    make_mtp_checkpoint(tmp_path, "glm4_moe")
    opened = open_mtp(tmp_path, {"mtp": False})
    assert head_of(opened.step_model.model) is None
    assert not any(layer.group for layer in opened.step_model.layout.layers)
    assert not any("multi-token" in note for note in opened.notes)


def test_their_price_is_told_and_their_kv_named(tmp_path: Path) -> None:
    make_mtp_checkpoint(tmp_path, "glm4_moe")
    opened = open_mtp(tmp_path)
    layout = opened.step_model.layout
    # 64 floats of keys and values, and 32 of hidden states for each 4 tokens
    assert layout.name == "shares-first:4x(2,16,16)+mtp:1x(2,16,16)+mtp-carry:1x(2,4,0)"
    head = head_of(opened.step_model.model)
    assert head is not None
    nbytes = sum(tensor.nbytes for tensor in head.state_dict().values())
    assert f"1 layers, {nbytes:,} bytes of weights, {4 * (64 + 8)} bytes of KV a token" in "".join(opened.notes)
    # no rows of their routing
    assert opened.experts.ids == (1, 2, 3)


@pytest.mark.ci
def test_a_block_holds_what_it_carries_whatever_its_size(tmp_path: Path) -> None:
    make_mtp_checkpoint(tmp_path, "deepseek_v3", layers=2)
    for asked in (1, 4, None):
        opened = open_mtp(tmp_path, block_tokens=asked)
        carry = opened.step_model.layout.layers[-1]
        assert carry.kv_heads * carry.key_dim * opened.block_tokens >= 2 * 32


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_moe"])
def test_a_folder_without_them_is_refused_by_name(tmp_path: Path, family: str) -> None:
    make_tiny_checkpoint(tmp_path, family)
    with pytest.raises(ConfigError, match=r"runner_config\.mtp: .*no multi-token prediction layers"):
        open_mtp(tmp_path)


def test_layers_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    make_mtp_checkpoint(tmp_path, "glm4_moe")
    stored = load_file(tmp_path / "model.safetensors")
    moved = {name.replace("layers.4.eh_proj", "layers.4.other"): tensor for name, tensor in stored.items()}
    save_file(moved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.0\.eh_proj\.weight"):
        open_mtp(tmp_path)


def test_a_family_of_mixed_attention_is_refused(tmp_path: Path) -> None:
    """Nothing says which of the kinds such a layer has."""
    make_tiny_checkpoint(tmp_path, "dots1")
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.4.eh_proj.weight"] = torch.zeros(32, 64)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="of which kind the attention"):
        open_mtp(tmp_path)


async def test_slices_have_none_yet(tmp_path: Path) -> None:
    """Refused where a report is asked for, and where a rank starts, before anything is loaded."""
    make_mtp_checkpoint(tmp_path, "glm4_moe")
    asked = RunnerLimits(model=str(tmp_path), max_running=1, max_step_tokens=8, sum_slices=2)
    runner = TransformersRunner(TransformersConfig(mtp=True, device="cpu"), asked)
    words = "have no sums of 2 slices yet; leave it out, or use sum_slices=1"
    said = f"runner_config.mtp: multi-token prediction layers {words}"
    with pytest.raises(ConfigError) as examined:
        runner.examine()
    with pytest.raises(ConfigError) as opened:
        await runner.open()
    assert [str(examined.value), str(opened.value)] == [said, said]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_layers_with_windows_have_no_kernels(tmp_path: Path, kernels: str) -> None:
    make_mtp_checkpoint(tmp_path, "glm4_moe", layer_types=["full_attention"] * 2, num_hidden_layers=2,
                        mtp_layer_types=["sliding_attention"], sliding_window=5)  # fmt: skip
    open_it = partial(open_mtp, tmp_path, {"kernels": kernels})
    if kernels == "torch":
        layer = next(layer for layer in open_it().step_model.layout.layers if layer.group)
        assert layer.reach == Reach("window", 5, 1)
        return
    with pytest.raises(ConfigError, match=r"runner_config\.mtp: its multi-token prediction layers see a window"):
        open_it()


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_the_model_is_what_it_is_without_them(tmp_path: Path, family: str) -> None:
    """Every tensor of it, rotary frequencies and other buffers too, where it is narrower than they are."""
    make_mtp_checkpoint(tmp_path, family)
    bare, with_them = (
        open_mtp(tmp_path, {"dtype": "bfloat16", "mtp": mtp, "self_check": False}).step_model.model
        for mtp in (False, True)
    )
    tensors, others = (dict([*model.named_parameters(), *model.named_buffers()]) for model in (bare, with_them))
    assert any("inv_freq" in name for name in tensors)
    for name, tensor in tensors.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name
    assert {name.split(".")[0] for name in others.keys() - tensors.keys()} == {"mtp"}
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in others.items() if "eh_proj" in name)


@pytest.mark.ci
def test_updates_reach_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new, bare = tmp_path / "old", tmp_path / "new", tmp_path / "bare"
    for folder, seed in ((old, 0), (new, 5)):
        make_mtp_checkpoint(folder, "deepseek_v3", seed)
    opened, other = open_mtp(old), open_mtp(new)
    weights, model = live(opened, old), opened.step_model.model
    first, wanted = (identity.weights_id(one.step_model.model) for one in (opened, other))
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert weights.read_weights_id(str(new)) == wanted != first
    assert weights.load_folder(str(new)) == wanted
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == addresses
    # tensor by tensor, by the model's names and by the checkpoint's
    send(weights, named_tensors(open_mtp(old).step_model.model))
    assert identity.weights_id(model) == first
    send(weights, named_tensors(load_file(new / "model.safetensors")))
    assert identity.weights_id(model) == wanted
    # without them they stay, and the log says so
    with caplog.at_level(logging.INFO, "fdasync.transformers"):
        make_tiny_checkpoint(bare, "deepseek_v3", 7, num_nextn_predict_layers=1)
        left = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.startswith("mtp.")}
        assert weights.read_weights_id(str(bare)) == weights.load_folder(str(bare)) != wanted
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in left.items())
        send(weights, [one for one in named_tensors(model) if not one[0].startswith("mtp.")])
    assert [record.message.count("keep their weights") for record in caplog.records] == [1, 1]


def test_random_weights_are_drawn_as_the_config_tells(tmp_path: Path) -> None:
    make_mtp_checkpoint(tmp_path, "glm4_moe", layers=2)
    head = head_of(open_mtp(tmp_path, {"weights": "random"}).step_model.model)
    assert head is not None
    assert head.depth == 2
    assert all(tensor.isfinite().all() for tensor in head.state_dict().values())
