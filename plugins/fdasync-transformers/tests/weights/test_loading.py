"""From a folder to a model: bit-equal to the library's own loading, and every broken folder refused by name."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checks.weights import PLAYED, tensors_and_buffers_are_those_of_from_pretrained
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from fdasync_transformers.weights import identity as naming
from fdasync_transformers.weights import loading
from fdasync_transformers.weights.mapping import place
from fdasync_transformers.weights.random_checkpoints import EOS_ID
from fdasync_transformers.weights.shards import INDEX_FILE, SINGLE_FILE
from made import Made
from safetensors.torch import load_file, save_file
from written import write_tiny_checkpoint

from fdasync.errors import CheckpointError, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CPU = torch.device("cpu")


def load(folder: Path, dtype: str = "auto") -> Any:
    return loading.load(loading.read_checkpoint(str(folder)), dtype, CPU)


@pytest.mark.ci(after=6)
@pytest.mark.parametrize("family", PLAYED.by_day)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_and_buffers_equal_from_pretrained(tmp_path: Path, family: str, dtype: str) -> None:
    tensors_and_buffers_are_those_of_from_pretrained(Made(family, tmp_path), dtype)


def test_float32_parts_stay_float32(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "glm4_moe")
    state = load(tmp_path, "bfloat16").state_dict()
    assert state["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert state["lm_head.weight"].dtype == torch.bfloat16


def test_tied_weights_share_memory(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "ernie4_5_moe")
    model = load(tmp_path)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_auto_dtype_is_the_checkpoints_own(tmp_path: Path) -> None:
    make_tiny_model("qwen3_moe").to(torch.bfloat16).save_pretrained(tmp_path)
    assert load(tmp_path).dtype == torch.bfloat16


def test_weights_id_follows_bytes_not_files(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "one", "qwen3_moe")
    write_tiny_checkpoint(tmp_path / "many", "qwen3_moe", shards=True)
    assert (tmp_path / "many" / INDEX_FILE).exists()
    first = naming.weights_id(load(tmp_path / "one"))
    assert naming.weights_id(load(tmp_path / "many")) == first
    path = tmp_path / "one" / SINGLE_FILE
    tensors = load_file(path)
    tensors["model.layers.2.mlp.experts.7.down_proj.weight"][0, 0] += 1e-3
    save_file(tensors, path, {"format": "pt"})
    assert naming.weights_id(load(tmp_path / "one")) != first


def test_weights_id_follows_names_dtypes_and_shapes() -> None:
    def identity(**tensors: torch.Tensor) -> str:
        model: Any = torch.nn.Module()
        for name, tensor in tensors.items():
            model.register_buffer(name, tensor)
        return naming.weights_id(model)

    zeros = torch.zeros(2, 3)
    assert identity(a=zeros) == identity(a=zeros.clone())
    # the same bytes each time
    others = [identity(b=zeros), identity(a=zeros.reshape(3, 2)), identity(a=zeros.to(torch.int32))]
    assert len({identity(a=zeros), *others}) == 4
    one, two = torch.ones(3), torch.full((3,), 2.0)
    assert identity(a=one, b=two) != identity(a=two, b=one)
    # a tied tensor is not the same as two of equal bytes under another name
    assert identity(a=one, b=one) != identity(a=one, c=one)


def test_fingerprint_follows_what_kv_depends_on(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    first = naming.fingerprint(load(tmp_path))
    edit_config(tmp_path, eos_token_id=7, transformers_version="0", _name_or_path="elsewhere")
    assert naming.fingerprint(load(tmp_path)) == first
    assert naming.fingerprint(load(tmp_path, "bfloat16")) != first
    edit_config(tmp_path, rms_norm_eps=1e-3)
    assert naming.fingerprint(load(tmp_path)) != first


def test_streaming_again_keeps_every_address(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "old", "mixtral", seed=0)
    write_tiny_checkpoint(tmp_path / "new", "mixtral", seed=1)
    model = load(tmp_path / "old")
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    new = loading.read_checkpoint(str(tmp_path / "new"))
    names = loading.names_of(new, model)
    placed = place(names, new.tensors, new.folder)
    loading.stream(names, placed.tensors, placed.placements)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert naming.weights_id(model) == naming.weights_id(load(tmp_path / "new"))


def test_eos_ids_of_generation_config_come_first(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    assert loading.eos_ids(loading.read_checkpoint(str(tmp_path))) == (5, 9)
    (tmp_path / "generation_config.json").unlink()
    assert loading.eos_ids(loading.read_checkpoint(str(tmp_path))) == (EOS_ID,)


# -- broken folders -----------------------------------------------------------------------------


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / SINGLE_FILE
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def edit_header(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / SINGLE_FILE
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text = change(raw[8 : 8 + length].decode()).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def share_bytes(header: str) -> str:
    """Let a tensor have the bytes of another of its shape; sizes are right, and the file ends with its last tensor."""
    entries = json.loads(header)
    entries[GATE.replace(".0.", ".2.")]["data_offsets"] = entries[GATE]["data_offsets"]
    return json.dumps(entries)


def name_twice(header: str) -> str:
    entry = json.dumps(json.loads(header)[GATE])
    return header.rstrip().removesuffix("}") + f', "{GATE}": {entry}}}'


def truncate(path: Path, size: int) -> None:
    data = path.read_bytes()[:size]
    path.write_bytes(data)


def pickled(folder: Path) -> None:
    (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin")


EXPERT = "model.layers.2.mlp.experts.7.up_proj.weight"
EXPERTS = "model.layers.2.mlp.experts"
GATE = "model.layers.0.mlp.gate.weight"

BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no folder": (shutil.rmtree, "checkpoint", "does not exist"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json", "missing"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json", "not JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json", "not a JSON object"),
    "no model_type": (lambda f: edit_config(f, model_type=None), "config.json", "no model_type"),
    "field of a wrong type": (lambda f: edit_config(f, hidden_size="wide"), "config.json", "no valid qwen3_moe"),
    "config too deep": (lambda f: (f / "config.json").write_text("[" * 90_000), "config.json", "not JSON"),
    "architectures are no list": (
        lambda f: edit_config(f, architectures=7),
        "config.json",
        "architectures 7 is no list",
    ),
    "sizes that cannot be": (lambda f: edit_config(f, vocab_size=-4), "config.json", "can be built"),
    "no weights": (lambda f: (f / SINGLE_FILE).unlink(), "checkpoint", "neither"),
    "pickles only": (pickled, "checkpoint", "pickle"),
    "empty file": (lambda f: truncate(f / SINGLE_FILE, 0), SINGLE_FILE, "truncated"),
    "half a header": (lambda f: truncate(f / SINGLE_FILE, 100), SINGLE_FILE, "truncated"),
    "half the data": (lambda f: truncate(f / SINGLE_FILE, 40_000), SINGLE_FILE, "truncated"),
    "header too deep": (
        lambda f: (f / SINGLE_FILE).write_bytes((90_000).to_bytes(8, "little") + b"[" * 90_000),
        SINGLE_FILE,
        "header cannot be read",
    ),
    "a folder in place of weights": (
        lambda f: ((f / SINGLE_FILE).unlink(), (f / SINGLE_FILE).mkdir()),
        SINGLE_FILE,
        "cannot be read: Is a directory",
    ),
    "header is no JSON": (
        lambda f: (f / SINGLE_FILE).write_bytes((4).to_bytes(8, "little") + b"{,,}"),
        SINGLE_FILE,
        "header cannot be read",
    ),
    "an expert is missing": (lambda f: edit_tensors(f, lambda t: t.pop(EXPERT)), "checkpoint", "15 of 16 pieces"),
    "a router is missing": (lambda f: edit_tensors(f, lambda t: t.pop(GATE)), "checkpoint", GATE),
    "a tensor too many": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.extra": torch.zeros(1)})),
        SINGLE_FILE,
        "model.extra",
    ),
    "an expert too many": (
        lambda f: edit_tensors(f, lambda t: t.update({EXPERT.replace(".7.", ".8."): t[EXPERT].clone()})),
        SINGLE_FILE,
        "expert 8",
    ),
    "a tensor under two names": (
        lambda f: edit_tensors(f, lambda t: t.update({GATE.removeprefix("model."): t[GATE] + 1.0})),
        SINGLE_FILE,
        f"holds {GATE}, and {SINGLE_FILE} {GATE.removeprefix('model.')}",
    ),
    "an expert under two names, and another missing": (
        lambda f: edit_tensors(
            f, lambda t: t.update({EXPERT.removeprefix("model."): t.pop(EXPERT.replace(".7.", ".6.")) + 1.0})
        ),
        SINGLE_FILE,
        EXPERT,
    ),
    "experts in parts and whole": (
        lambda f: edit_tensors(f, lambda t: t.update({f"{EXPERTS}.gate_up_proj": torch.zeros(8, 32, 32)})),
        SINGLE_FILE,
        f"{EXPERTS}.gate_up_proj",
    ),
    "a name twice in a header": (lambda f: edit_header(f, name_twice), SINGLE_FILE, f"{GATE} is there twice"),
    "two tensors of the same bytes": (lambda f: edit_header(f, share_bytes), SINGLE_FILE, "bytes of another tensor"),
    "bytes of no tensor": (
        lambda f: edit_header(f, lambda h: json.dumps({k: v for k, v in json.loads(h).items() if k != GATE})),
        SINGLE_FILE,
        "bytes of no tensor before it",
    ),
    "a wrong shape": (lambda f: edit_tensors(f, lambda t: t.update({GATE: t[GATE][:, :-1]})), SINGLE_FILE, GATE),
    "an expert of a wrong shape": (
        lambda f: edit_tensors(f, lambda t: t.update({EXPERT: t[EXPERT][:-1]})),
        SINGLE_FILE,
        EXPERT,
    ),
    "config of another size": (lambda f: edit_config(f, num_hidden_layers=5), "checkpoint", "model.layers.4"),
}


# one of each part that may be missing or wrong
_KINDS = (
    "no config", "config is no JSON", "field of a wrong type", "sizes that cannot be", "no weights", "half a header",
    "half the data", "an expert is missing", "a tensor too many", "a tensor under two names", "bytes of no tensor",
    "a wrong shape",
)  # fmt: skip


@pytest.mark.ci(after=len(_KINDS))
@pytest.mark.parametrize("name", sorted(BROKEN, key=lambda name: name not in _KINDS))
def test_a_broken_folder_is_refused_by_name_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    damage, file, words = BROKEN[name]
    folder = tmp_path / "checkpoint"
    write_tiny_checkpoint(folder, "qwen3_moe")
    load(folder)  # whole until now
    monkeypatch.setattr(torch.nn.Module, "to_empty", lambda *_, **__: pytest.fail("memory was taken"))
    damage(folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(folder)
    assert caught.value.path.endswith(file)
    assert str(folder) in str(caught.value)


def break_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / INDEX_FILE
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def copy_between_shards(folder: Path) -> None:
    first, last = (folder / f"model-0000{number}-of-00003.safetensors" for number in (1, 3))
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(last), name: tensor}, last, {"format": "pt"})


BROKEN_SHARDS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a shard is missing": (
        lambda f: (f / "model-00002-of-00003.safetensors").unlink(),
        "model-00002-of-00003.safetensors",
        "missing",
    ),
    "a shard is cut": (
        lambda f: truncate(f / "model-00002-of-00003.safetensors", 9000),
        "model-00002-of-00003.safetensors",
        "truncated",
    ),
    "index is no JSON": (lambda f: (f / INDEX_FILE).write_text("?"), INDEX_FILE, "not JSON"),
    "index without a map": (lambda f: (f / INDEX_FILE).write_text("{}"), INDEX_FILE, "weight_map"),
    "index leads out of the folder": (
        lambda f: break_index(f, lambda m: m.update({GATE: "../other.safetensors"})),
        INDEX_FILE,
        "no safetensors file of this folder",
    ),
    "index names a tensor that is elsewhere": (
        lambda f: break_index(f, lambda m: m.update({GATE: "model-00003-of-00003.safetensors"})),
        "model-00003-of-00003.safetensors",
        GATE,
    ),
    "a single file beside them": (
        lambda f: shutil.copy(f / "model-00001-of-00003.safetensors", f / SINGLE_FILE),
        "",
        "take away those that are not meant",
    ),
    "a tensor is there twice": (copy_between_shards, "model-00003-of-00003.safetensors", "and so does model-00001"),
}


@pytest.mark.parametrize("name", BROKEN_SHARDS)
def test_broken_shards_are_refused_by_name(tmp_path: Path, name: str) -> None:
    damage, file, words = BROKEN_SHARDS[name]
    model = make_tiny_model("qwen3_moe")
    size = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size=size // 3 + 8000)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(tmp_path)
    assert caught.value.path.endswith(file)


def test_an_unknown_type_is_unsupported_and_its_code_is_not_run(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    edit_config(tmp_path, model_type="novel", auto_map={"AutoModelForCausalLM": "modeling_novel.Novel"})
    (tmp_path / "modeling_novel.py").write_text("raise SystemExit('remote code was run')")
    with pytest.raises(UnsupportedModel, match="not run"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "vit"}, "no causal language model"),
        ({"architectures": ["Qwen3MoeForSequenceClassification"]}, "SequenceClassification"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantised with aqlm"),
    ],
)
def test_other_models_are_unsupported(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    edit_config(tmp_path, **values)
    with pytest.raises(UnsupportedModel, match=words):
        load(tmp_path)
