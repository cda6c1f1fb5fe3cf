"""Tied weights whose checkpoint holds both names: one tensor or two, as the library has it, at the start and later."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from fdasync_transformers import named_tensors
from fdasync_transformers.weights import identity, open_shards, ties
from fdasync_transformers.weights.placement import Placement
from fdasync_transformers.weights.shards import INDEX_FILE, SINGLE_FILE, StoredTensor
from live_weights import Live, assert_equal, stored
from safetensors.torch import load_file, save_file
from step_driver import Driver
from structures import by_structure
from written import write_tiny_checkpoint

from fdasync.errors import CheckpointError, WeightsBroken, WeightsRejected
from fdasync.runner.base import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FAMILIES = ("qwen3_moe", "ernie4_5_moe", "mixtral", "granitemoe", "gpt_oss", "deepseek_v3", "qwen3_dense")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROMPT = [5, 9, 33, 7, 8, 12]


def heads(embed: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    """What folders hold of the two, by what sets them apart."""
    first = torch.tensor([0])
    other = torch.randn(embed.shape, generator=torch.Generator().manual_seed(9))
    return {
        "embeddings alone": {EMBED: embed},
        "head alone": {HEAD: embed},
        "equal": {EMBED: embed, HEAD: embed.clone()},
        "equal but for the sign of zeros": {
            EMBED: embed.index_fill(0, first, 0.0),
            HEAD: embed.index_fill(0, first, -0.0),
        },
        "equal in bfloat16": {EMBED: embed.bfloat16().float(), HEAD: embed.bfloat16().float() * (1 + 1e-6)},
        "another head": {EMBED: embed, HEAD: other},
        "a third head": {EMBED: embed, HEAD: -other},
        "one value of the head": {EMBED: embed, HEAD: embed.index_fill(0, first + len(embed) - 1, 0.5)},
        "a head that is no number": {EMBED: embed, HEAD: embed.index_fill(1, first, float("nan"))},
    }


KINDS = tuple(heads(torch.zeros(4, 4)))
APART = {"another head", "a third head", "one value of the head", "a head that is no number"}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint whose config ties the head, and what it holds of the two; one layer is enough where no family is
    asked for."""

    def make(name: str, kind: str, family: str = "", seed: int = 0) -> Path:
        path = tmp_path / name
        if family:
            write_tiny_checkpoint(path, family, seed, tie_word_embeddings=True)
        else:
            write_tiny_checkpoint(path, "qwen3_moe", seed, tie_word_embeddings=True, num_hidden_layers=1)
        tensors = stored(path)
        assert HEAD not in tensors
        tensors |= (both := heads(tensors.pop(EMBED))[kind])
        assert both.keys() <= tensors.keys()
        save_file(tensors, path / SINGLE_FILE, {"format": "pt"})
        return path

    return make


def library(path: Path, dtype: str = "float32") -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))


def tied(model: Any) -> bool:
    return bool(model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr())


def bits(model: Any) -> dict[str, torch.Tensor]:
    """So that NaN equals NaN, and -0.0 is not 0.0."""
    return {
        name: tensor.contiguous().view(torch.uint8) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }


# -- at the start -----------------------------------------------------------------------------------


@pytest.mark.ci(after=9)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_load_ties_what_the_library_ties(folder: Any, kind: str, dtype: str) -> None:
    path = folder("checkpoint", kind)
    ours, theirs = Live(path, dtype).model, library(path, dtype)
    assert_equal(bits(ours), bits(theirs))
    assert tied(ours) == tied(theirs) == (kind not in APART and (kind != "equal in bfloat16" or dtype == "bfloat16"))


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("family", by_structure(FAMILIES))
async def test_greedy_tokens_of_a_head_of_its_own_are_the_librarys(folder: Any, family: str) -> None:
    path = folder("checkpoint", "another head", family)
    model = library(path)
    answer = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    driver = await Driver.open(path)
    asked = driver.sequence(PROMPT, 8)
    await driver.run([asked])
    await driver.close()
    assert asked.tokens == answer[0, len(PROMPT) :].tolist()


def test_the_id_of_weights_covers_a_head_of_its_own(folder: Any) -> None:
    ids = {kind: identity.weights_id(Live(folder(kind, kind)).model) for kind in KINDS if kind != "equal in bfloat16"}
    assert len({ids[kind] for kind in ("embeddings alone", "head alone", "equal")}) == 1
    assert len({ids[kind] for kind in ("equal", *APART)}) == 5
    # in memory of its own too
    apart = Live(folder("apart", "another head"))
    with torch.no_grad():
        apart.model.lm_head.weight.copy_(apart.model.model.embed_tokens.weight)
    assert identity.weights_id(apart.model) == ids["equal"]


# -- from a folder ------------------------------------------------------------------------------------


@pytest.mark.ci(after=6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", ["equal", "another head"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_gives_what_the_library_loads_or_changes_nothing(
    folder: Any, before: str, kind: str, dtype: str
) -> None:
    live, path = Live(folder("old", before), dtype), folder("new", kind, seed=1)
    old, apart, theirs = bits(live.model), not tied(live.model), library(path, dtype)
    assert apart == (before == "another head")
    if tied(theirs) or apart:
        wanted = identity.weights_id(Live(path, dtype).model)
        # it is compared without being loaded
        assert live.weights.read_weights_id(str(path)) == wanted
        assert_equal(bits(live.model), old)
        assert live.weights.load_folder(str(path)) == wanted
        assert_equal(bits(live.model), bits(theirs))
    else:
        with pytest.raises(WeightsRejected, match="cannot come apart"):
            live.weights.read_weights_id(str(path))
        with pytest.raises(WeightsRejected, match=rf"{SINGLE_FILE}: {HEAD} differs from {EMBED}.*cannot come apart"):
            live.weights.load_folder(str(path))
        assert_equal(bits(live.model), old)
    assert not live.weights.broken
    assert live.now() == live.addresses
    assert tied(live.model) != apart


@pytest.mark.ci
def test_a_head_may_come_and_go(folder: Any) -> None:
    live = Live(folder("old", "another head"))
    for seed, kind in enumerate(("embeddings alone", "a third head", "head alone", "another head", "equal"), 1):
        path = folder(f"{seed}", kind, seed=seed)
        live.weights.load_folder(str(path))
        assert_equal(bits(live.model), bits(library(path)))
    assert live.now() == live.addresses


def test_a_trainers_own_folders_are_taken(folder: Any, tmp_path: Path) -> None:
    """The library loads, trains and saves: what it had apart, it saves apart."""
    for kind in ("another head", "equal"):
        live = Live(folder(f"old {kind}", kind))
        trainer = library(tmp_path / f"old {kind}")
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        trainer.save_pretrained(tmp_path / f"new {kind}", max_shard_size="40KB")
        assert (tmp_path / f"new {kind}" / INDEX_FILE).exists()
        live.weights.load_folder(str(tmp_path / f"new {kind}"))
        assert_equal(live.state(), trainer.state_dict())


def test_tied_tensors_in_other_files_and_dtypes_are_compared_piece_by_piece(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ties, "_COMPARED_NBYTES", 3 * 32 * 4)
    live, path = Live(folder("old", "embeddings alone")), folder("new", "equal in bfloat16", seed=1)
    tensors = stored(path)
    head = {HEAD: tensors.pop(HEAD)}
    head[HEAD] = head[HEAD].bfloat16()
    (path / SINGLE_FILE).unlink()
    save_file(tensors, path / "a.safetensors", {"format": "pt"})
    names = ", ".join(f'"{name}": "a.safetensors"' for name in tensors)
    (path / INDEX_FILE).write_text(f'{{"metadata": {{}}, "weight_map": {{{names}, "{HEAD}": "b.safetensors"}}}}')
    save_file(head, path / "b.safetensors", {"format": "pt"})
    assert tied(library(path))
    live.weights.load_folder(str(path))
    assert torch.equal(live.model.lm_head.weight, tensors[EMBED])
    # in the last piece of all
    head[HEAD][-1, -1] += 1.0
    save_file(head, path / "b.safetensors", {"format": "pt"})
    with pytest.raises(WeightsRejected, match=r"b\.safetensors: lm_head\.weight differs"):
        live.weights.load_folder(str(path))


def test_a_folder_that_cannot_be_compared_changes_nothing(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    live, path = Live(folder("old", "embeddings alone")), folder("new", "equal", seed=1)
    before = live.state()

    def gone(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(open_shards, "safe_open", gone)
    with pytest.raises(WeightsRejected, match="cannot be read: the disk is gone"):
        live.weights.load_folder(str(path))
    assert_equal(live.state(), before)
    assert not live.weights.broken


class ThreeNames:
    """Of one tensor, as no family has them so far: `a` and `b` in one memory, `c` in its own."""

    def __init__(self) -> None:
        one, other = torch.zeros(2, 2), torch.zeros(2, 2)
        self.tensors = {"a": one, "b": one, "c": other, "else": torch.zeros(1)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def get_expanded_tied_weights_keys(self, *, all_submodels: bool) -> dict[str, str]:
        assert all_submodels
        return {"b": "a", "c": "a"}


@pytest.mark.parametrize(
    ("held", "read", "copies"),
    [
        ({"a": 1}, {"a"}, {"c": "a"}),
        ({"b": 1}, {"b"}, {"c": "b"}),
        ({"c": 1}, {"c"}, {"a": "c", "b": "c"}),
        ({"a": 1, "b": 1, "c": 2}, {"a", "c"}, {}),
        ({"b": 1, "c": 1}, {"b"}, {"c": "b"}),
        ({"b": 1, "c": 2}, {"b", "c"}, {}),
        ({"a": 1, "b": 2}, None, {}),
        ({"a": 1, "b": 2, "c": 1}, None, {}),
    ],
)
def test_any_number_of_names(tmp_path: Path, held: dict[str, int], read: set[str] | None, copies: Any) -> None:
    save_file({name: torch.full((2, 2), float(value)) for name, value in held.items()}, tmp_path / "held")
    tensors = {name: StoredTensor(name, tmp_path / "held", "F32", (2, 2)) for name in held}
    placements = {name: Placement(name) for name in ("else", *held)}
    model: Any = ThreeNames()
    if read is None:
        with pytest.raises(CheckpointError, match="b differs from a"):
            ties.settle(model, tensors, placements)
        return
    settled = ties.settle(model, tensors, placements)
    assert settled.placements == {name: Placement(name) for name in ("else", *sorted(read))}
    assert settled.copies == copies


# -- tensor by tensor -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["another head", "a third head", "equal"])
def test_tensors_for_both_are_taken_where_they_are_apart(folder: Any, kind: str) -> None:
    live, path = Live(folder("old", "another head")), folder("new", kind, seed=1)
    theirs = library(path)
    live.send(named_tensors(stored(path)))
    assert_equal(live.state(), theirs.state_dict())
    if kind != "equal":
        live.weights.load_folder(str(folder("old again", "another head")))
        live.send(named_tensors(theirs))
        assert_equal(live.state(), theirs.state_dict())
    assert live.now() == live.addresses


def test_one_of_two_that_are_apart_is_refused_alone(folder: Any) -> None:
    """A trainer that ties again sends one name, and so does one that changed one: the engine cannot tell."""
    live = Live(folder("old", "another head"))
    before = live.state()
    shape = tuple(before[HEAD].shape)
    for name, left in ((EMBED, HEAD), (HEAD, EMBED)):
        with pytest.raises(WeightsRejected, match=f"{left} is left out: the config makes .* one"):
            live.weights.begin_tensors([TensorMeta(name, "float32", shape)])
    with pytest.raises(WeightsRejected, match="is left out"):
        live.send(named_tensors(library(folder("new", "embeddings alone", seed=1))))
    assert_equal(live.state(), before)
    # neither is as good as both
    live.send(named_tensors({"model.norm.weight": torch.ones(32)}))
    assert_equal(live.state(), {**before, "model.norm.weight": torch.ones(32)})


def test_tensors_for_both_are_refused_where_they_are_one(folder: Any) -> None:
    live = Live(folder("old", "equal"))
    before = live.state()
    for kind in ("another head", "equal"):
        with pytest.raises(WeightsRejected, match=r"give one of them .* cannot come apart in an update"):
            live.send(named_tensors(stored(folder(kind, kind, seed=1))))
    assert_equal(live.state(), before)
    assert not live.weights.broken


def test_a_head_left_half_way_is_named_until_it_is_whole(folder: Any, tmp_path: Path) -> None:
    live, path = Live(folder("old", "another head")), folder("new", "a third head", seed=1)
    tensors = {name: tensor for name, tensor in stored(path).items() if name in (EMBED, HEAD)}
    named = named_tensors(tensors)
    live.weights.begin_tensors([TensorMeta(name, dtype, shape) for name, dtype, shape, _ in named])
    live.weights.write_tensor(0, 0, memoryview(named[0][3]))
    with pytest.raises(WeightsBroken):
        live.weights.end_tensors()
    with pytest.raises(WeightsRejected, match="leaves out 2 tensors of it"):
        live.send(named_tensors({"model.norm.weight": torch.ones(32)}))
    shutil.copytree(path, tmp_path / "tied")
    save_file(
        {name: tensor for name, tensor in load_file(path / SINGLE_FILE).items() if name != HEAD},
        tmp_path / "tied" / SINGLE_FILE,
        {"format": "pt"},
    )
    live.weights.load_folder(str(tmp_path / "tied"))
    assert not live.weights.broken
    assert_equal(live.state(), library(tmp_path / "tied").state_dict())


def test_a_folder_without_either_is_refused(folder: Any) -> None:
    path = folder("new", "embeddings alone")
    save_file({name: value for name, value in stored(path).items() if name != EMBED}, path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=f"2 tensors are missing: {HEAD}, {EMBED}"):
        Live(path)
