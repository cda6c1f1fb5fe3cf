"""New weights for a model in use: bit-equal to a fresh load, addresses kept; what does not fit changes nothing."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checks.weights import PLAYED, a_folder_gives_what_a_fresh_load_gives, all_tensors_give_what_a_fresh_load_gives
from fdasync_transformers import named_tensors
from fdasync_transformers.parallel.cuts import Target
from fdasync_transformers.weights import identity, update
from fdasync_transformers.weights.mapping import locate
from fdasync_transformers.weights.names import Names
from fdasync_transformers.weights.random_checkpoints import VOCAB_SIZE
from fdasync_transformers.weights.shards import SINGLE_FILE
from hypothesis import given, settings
from hypothesis import strategies as st
from live_weights import Live, assert_equal, stored
from made import Made
from safetensors.torch import save_file
from written import write_tiny_checkpoint

from fdasync.errors import CheckpointError, InvariantBroken, WeightsBroken, WeightsRejected
from fdasync.runner.base import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# per-expert tensors, tied embeddings, float32 parts, renamed, fused and transposed, latent
SOME = ("qwen3_moe", "gpt_oss", "granitemoe", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "mixtral")


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Two checkpoints of one family with different weights."""

    def make(family: str, **overrides: Any) -> tuple[Path, Path]:
        for seed, name in enumerate(("old", "new")):
            write_tiny_checkpoint(tmp_path / name, family, seed, **overrides)
        return tmp_path / "old", tmp_path / "new"

    return make


# -- from a folder ----------------------------------------------------------------------------------


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("family", PLAYED.by_day)
def test_a_folder_gives_what_a_fresh_load_gives(tmp_path: Path, family: str) -> None:
    a_folder_gives_what_a_fresh_load_gives(Made(family, tmp_path))


def test_a_folder_is_converted_to_the_dtypes_in_use(pair: Any) -> None:
    old, new = pair("glm4_moe")
    live, fresh = Live(old, "bfloat16"), Live(new, "bfloat16")
    assert live.weights.load_folder(str(new)) == identity.weights_id(fresh.model)
    assert_equal(live.state(), fresh.state())
    assert live.state()["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_tied_weights_stay_tied(pair: Any) -> None:
    old, new = pair("ernie4_5_moe")
    live = Live(old)
    live.weights.load_folder(str(new))
    assert live.model.lm_head.weight.data_ptr() == live.model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(live.model.lm_head.weight, stored(new)["model.embed_tokens.weight"])


def test_keys_that_do_not_matter_may_differ(pair: Any) -> None:
    old, new = pair("qwen3_moe")
    edit_config(new, eos_token_id=7, transformers_version="0", _name_or_path="elsewhere", router_aux_loss_coef=0.5)
    live = Live(old)
    live.weights.load_folder(str(new))
    assert_equal(live.state(), Live(new).state())


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = stored(folder)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE, {"format": "pt"})


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


_Q = "model.layers.0.self_attn.q_proj.weight"
_EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


@pytest.mark.ci(after=10)
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: edit_config(f, rms_norm_eps=0.5), "rms_norm_eps is 0.5, the loaded model has 1e-06"),
        (lambda f: edit_config(f, num_experts_per_tok=2), "num_experts_per_tok is 2, the loaded model has 3"),
        (lambda f: edit_config(f, model_type="mixtral"), "config.json: .* the loaded model has"),
        (lambda f: edit_config(f, model_type="nobody"), "does not know this model type"),
        (lambda f: (f / "config.json").unlink(), "config.json: the file is missing"),
        (lambda f: (f / SINGLE_FILE).unlink(), "neither model.safetensors"),
        (lambda f: shorten(f / SINGLE_FILE), "is truncated"),
        (lambda f: edit_tensors(f, lambda t: t.pop(_Q)), f"1 tensors are missing: {_Q}"),
        (lambda f: edit_tensors(f, lambda t: t.pop(_EXPERT)), "some experts are missing"),
        (lambda f: edit_tensors(f, lambda t: t.update({_Q: t[_Q][:-1].clone()})), f"{_Q} has shape"),
        (lambda f: edit_tensors(f, lambda t: t.update({_Q: t[_Q].to(torch.int32)})), f"{_Q} is of another kind"),
        (lambda f: edit_tensors(f, lambda t: t.update({"extra": t[_Q].clone()})), "has no place for: extra"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_by_name_and_nothing_changes(pair: Any, damage: Any, says: str) -> None:
    old, new = pair("qwen3_moe")
    live = Live(old)
    before = live.state()
    damage(new)
    with pytest.raises(WeightsRejected, match=says):
        live.weights.load_folder(str(new))
    assert_equal(live.state(), before)
    assert not live.weights.broken


def test_a_folder_that_is_not_there_is_refused(pair: Any) -> None:
    old, _ = pair("qwen3_moe")
    with pytest.raises(WeightsRejected, match="does not exist"):
        Live(old).weights.load_folder(str(old / "nowhere"))


def damage_inside(path: Path) -> None:
    """Let a shape be of numbers that are no integers: sizes are right, and only the reader of the data looks closer."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    entry = next(entry for name, entry in header.items() if name != "__metadata__")
    entry["shape"] = [float(n) for n in entry["shape"]]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize("mend", ["folder", "tensors"])
def test_a_folder_that_fails_while_it_is_read_leaves_the_model_unusable_until_one_is_whole(
    tmp_path: Path, pair: Any, mend: str
) -> None:
    old, new = pair("qwen3_moe")
    write_tiny_checkpoint(tmp_path / "bad", "qwen3_moe", 1, shards=True)
    # not the first one: some tensors are in place by then
    damage_inside(sorted((tmp_path / "bad").glob("*.safetensors"))[2])
    live = Live(old)
    before = live.state()
    with pytest.raises(WeightsBroken, match=r"-of-.*\.safetensors: cannot be read"):
        live.weights.load_folder(str(tmp_path / "bad"))
    changed = [name for name, tensor in live.state().items() if not torch.equal(tensor, before[name])]
    assert 0 < len(changed) < len(before), "it did not fail half-way"
    assert live.weights.broken
    # a part is not enough now
    with pytest.raises(WeightsRejected, match="failed half-way"):
        live.send(named_tensors({_Q: stored(new)[_Q]}))
    assert live.weights.broken
    if mend == "folder":
        live.weights.load_folder(str(new))
    else:
        live.send(named_tensors(stored(new)))
    assert not live.weights.broken
    assert_equal(live.state(), Live(new).state())


# -- tensor by tensor -----------------------------------------------------------------------------------


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("family", PLAYED.by_day)
@pytest.mark.parametrize("names", ["checkpoint", "state"])
def test_all_tensors_give_what_a_fresh_load_gives(tmp_path: Path, family: str, names: str) -> None:
    all_tensors_give_what_a_fresh_load_gives(Made(family, tmp_path), names)


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_tensors_are_converted_as_loading_converts_them(pair: Any, family: str, dtype: str) -> None:
    old, new = pair(family)
    live, fresh = Live(old, dtype), Live(new, dtype)
    live.send(named_tensors(stored(new)))
    assert_equal(live.state(), fresh.state())


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("family", SOME)
def test_names_left_out_keep_their_values(pair: Any, family: str) -> None:
    old, new = pair(family)
    live, fresh = Live(old), Live(new).state()
    before = live.state()
    tensors = stored(new)
    some = dict(sorted(tensors.items())[::3])
    live.send(named_tensors(some))
    touched = {placement.target for placement in locate(Names(live.model), some).placements.values()}
    tied = live.model.all_tied_weights_keys
    touched |= {one for pair in tied.items() for one in pair if touched & set(pair)}
    after = live.state()
    for name in after:
        if name not in touched:
            assert torch.equal(after[name], before[name]), name
    # and the rest, so that nothing of the first ones was spoilt
    live.send(named_tensors({name: tensors[name] for name in tensors if name not in some}))
    assert_equal(live.state(), fresh)


def test_one_part_of_one_expert_goes_where_it_belongs(pair: Any) -> None:
    old, new = pair("qwen3_moe")
    live, tensor = Live(old), stored(new)[_EXPERT]
    want = live.state()
    half = want["model.layers.0.mlp.experts.gate_up_proj"].shape[1] // 2
    want["model.layers.0.mlp.experts.gate_up_proj"][3, half:] = tensor
    live.send(named_tensors({_EXPERT: tensor}), piece=12)
    assert_equal(live.state(), want)


def test_tied_tensors_are_given_once_and_stay_tied(pair: Any) -> None:
    old, new = pair("ernie4_5_moe")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        live, tensor = Live(old), stored(new)["model.embed_tokens.weight"]
        live.send(named_tensors({name: tensor}))
        assert torch.equal(live.model.lm_head.weight, tensor)
        assert torch.equal(live.model.model.embed_tokens.weight, tensor)
        assert live.now() == live.addresses


def test_what_the_library_leaves_out_is_left_out(pair: Any) -> None:
    old, new = pair("glm4_moe")
    live = Live(old)
    # a layer for speculation, and frequencies: in published checkpoints, not in the model
    extra = {
        "model.layers.46.eh_proj.weight": torch.ones(5),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    live.send(named_tensors({**stored(new), **extra}))
    assert_equal(live.state(), Live(new).state())


@pytest.mark.ci(after=5)
@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ([("nobody.has.this", "float32", (3,))], "has no place for 1 of the tensors: nobody.has.this"),
        ([(_Q, "float32", (64, 31))], rf"{_Q} has shape \(64, 31\)"),
        pytest.param([(_Q, "float32", (32, 64))], rf"{_Q} has shape \(32, 64\)", marks=pytest.mark.ci),
        ([(_EXPERT, "float32", (32, 32))], f"{_EXPERT} has shape"),
        ([(_EXPERT.replace(".3.", ".8."), "float32", (16, 32))], "is expert 8, the config has 8"),
        ([(_Q, "int32", (64, 32))], f"{_Q} is of another kind"),
        ([(_Q, "complex64", (64, 32))], f"{_Q} has dtype 'complex64'"),
        ([(_Q, "float32", (64, 32))] * 2, f"{_Q} is given twice"),
        (
            [(_EXPERT, "float32", (16, 32)), ("model.layers.0.mlp.experts.gate_up_proj", "float32", (8, 32, 32))],
            "are the same memory",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name_and_nothing_changes(pair: Any, tensors: Any, says: str) -> None:
    old, new = pair("qwen3_moe")
    live = Live(old)
    before = live.state()
    good = ("model.norm.weight", "float32", (32,))
    with pytest.raises(WeightsRejected, match=says):
        live.weights.begin_tensors([TensorMeta(*tensor) for tensor in (good, *tensors)])
    assert_equal(live.state(), before)
    assert not live.weights.broken
    # it goes on as if there had been no update
    with pytest.raises(InvariantBroken):
        live.weights.write_tensor(0, 0, memoryview(bytes(4)))
    live.send(named_tensors(stored(new)))
    assert_equal(live.state(), Live(new).state())


@pytest.mark.parametrize("order", [1, -1])
def test_a_whole_and_a_part_of_it_are_refused_whichever_comes_first(pair: Any, order: int) -> None:
    old, _ = pair("qwen3_moe")
    live = Live(old)
    placements = locate(Names(live.model), [_EXPERT, "model.layers.0.mlp.experts.gate_up_proj"]).placements
    with pytest.raises(WeightsRejected, match="are the same memory"):
        live.weights._check_overlap(dict(list(placements.items())[::order]))


def test_two_names_of_tied_weights_are_refused(pair: Any) -> None:
    old, _ = pair("ernie4_5_moe")
    names = ("model.embed_tokens.weight", "lm_head.weight")
    with pytest.raises(WeightsRejected, match="are the same memory of the model: give one of them"):
        Live(old).weights.begin_tensors([TensorMeta(name, "float32", (VOCAB_SIZE, 32)) for name in names])


def q_of(live: Live) -> TensorMeta:
    return TensorMeta(_Q, "float32", tuple(live.model.state_dict()[_Q].shape))


@pytest.mark.parametrize(
    ("writes", "says"),
    [
        ([(0, 0, 40), (0, 80, 40)], "out of order"),
        ([(0, 0, 41)], "torn"),
        ([(0, 0, 1 << 20)], "more than its"),
        ([(0, 0, 40)], "40 of its"),
        ([(1, 0, 40)], "tensor 1 of 1"),
        ([], "0 of its"),
    ],
)
def test_what_does_not_come_as_announced_is_an_end_half_way(pair: Any, writes: Any, says: str) -> None:
    old, new = pair("qwen3_moe")
    live = Live(old)
    live.weights.begin_tensors([q_of(live)])
    with pytest.raises(WeightsBroken, match=says):  # noqa: PT012
        for number, offset, size in writes:
            live.weights.write_tensor(number, offset, memoryview(bytes(size)))
        live.weights.end_tensors()
    if writes and writes[0][0] == 0:
        assert live.weights.broken
        # what was not touched is not enough
        with pytest.raises(WeightsRejected, match=f"leaves out 1 tensors of it: {_Q}"):
            live.send(named_tensors({"model.norm.weight": torch.ones(32)}))
    live.send(named_tensors({_Q: stored(new)[_Q]}))
    assert not live.weights.broken


def test_experts_broken_one_by_one_are_mended_by_the_whole_and_the_other_way_round(pair: Any) -> None:
    old, new = pair("qwen3_moe")
    live, fresh, tensors = Live(old), Live(new).state(), stored(new)
    whole = "model.layers.0.mlp.experts.gate_up_proj"
    parts = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.mlp.experts")}
    parts = {name: tensor for name, tensor in parts.items() if "down" not in name}

    def break_it(some: dict[str, torch.Tensor]) -> None:
        named = named_tensors(some)
        live.weights.begin_tensors([TensorMeta(name, dtype, shape) for name, dtype, shape, _ in named])
        live.weights.write_tensor(0, 0, memoryview(named[0][3])[:4])
        with pytest.raises(WeightsBroken):
            live.weights.end_tensors()
        assert live.weights.broken

    break_it({_EXPERT: tensors[_EXPERT]})
    live.send(named_tensors({whole: fresh[whole]}))
    assert not live.weights.broken
    break_it({whole: fresh[whole]})
    with pytest.raises(WeightsRejected, match="failed half-way"):
        live.send(named_tensors({name: tensor for name, tensor in parts.items() if name != _EXPERT}))
    live.send(named_tensors(parts))
    assert not live.weights.broken
    assert torch.equal(live.state()[whole], fresh[whole])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.lists(st.integers(0, 64), max_size=5),
)
def test_any_strides_are_filled_in_the_order_of_the_shape(shape: list[int], random: Any, cuts: list[int]) -> None:
    order = random.sample(range(len(shape)), len(shape))
    target = torch.zeros([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(shape))])
    assert list(target.shape) == shape
    want = torch.arange(target.numel(), dtype=torch.float64)
    ends = sorted({min(cut, len(want)) for cut in cuts} | {0, len(want)})
    for first, last in pairwise(ends):
        Target.whole(target).put_flat(first, want[first:last])
    assert torch.equal(target.reshape(-1), want.to(torch.float32))


# -- the caller's side --------------------------------------------------------------------------------


def test_named_tensors_are_views_where_they_can_be() -> None:
    model = torch.nn.Linear(3, 2, bias=True)
    named = {name: (dtype, shape, buffer) for name, dtype, shape, buffer in named_tensors(model)}
    assert {name: value[:2] for name, value in named.items()} == {
        "weight": ("float32", (2, 3)),
        "bias": ("float32", (2,)),
    }
    with torch.no_grad():
        model.bias.fill_(7.0)
    assert named["bias"][2].tobytes() == torch.full((2,), 7.0).numpy().tobytes()


def test_named_tensors_keep_every_bit_of_every_dtype() -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    given = {
        "b": bits.view(torch.bfloat16),
        "t": torch.arange(6.0).reshape(2, 3).t(),
        "scalar": torch.tensor(5, dtype=torch.int64),
        "none": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
    }
    named = {name: (dtype, shape, bytes(memoryview(buffer))) for name, dtype, shape, buffer in named_tensors(given)}
    assert named == {
        "b": ("bfloat16", (65536,), bits.numpy().tobytes()),
        "t": ("float32", (3, 2), torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]).numpy().tobytes()),
        "scalar": ("int64", (), b"\5" + bytes(7)),
        "none": ("float32", (0, 3), b""),
        "flags": ("bool", (2,), b"\1\0"),
    }


def test_named_tensors_name_tied_ones_once(pair: Any) -> None:
    old, _ = pair("ernie4_5_moe")
    names = [name for name, *_ in named_tensors(Live(old).model)]
    assert ("lm_head.weight" in names) + ("model.embed_tokens.weight" in names) == 1
    assert len(names) == len(set(names))


@pytest.mark.parametrize("tensor", [torch.zeros(2, device="meta"), torch.zeros(2, 2).to_sparse(), torch.zeros(1) * 1j])
def test_named_tensors_refuse_what_cannot_be_sent(tensor: torch.Tensor) -> None:
    with pytest.raises(WeightsRejected, match=r"odd\.one"):
        named_tensors({"odd.one": tensor})


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (None, ""),
        (WeightsRejected("they are of another model"), "they are of another model"),
        (CheckpointError("/weights/a", "is short"), "/weights/a: is short"),
        (ValueError("odd"), "/weights: ValueError('odd')"),
    ],
)
def test_a_problem_is_in_our_words_and_of_a_library_beside_the_folder(error: Exception | None, problem: str) -> None:
    assert update._problem("/weights", error) == problem
