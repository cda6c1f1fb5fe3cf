"""Weights of a family as the library loads them, from a folder and tensor by tensor, also those that it converts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from common_families import AHEAD, COMMON, STORED
from fdasync_transformers import named_tensors
from fdasync_transformers.tiny.families import FAMILIES
from fdasync_transformers.weights import identity, loading
from live_weights import CPU, Live, assert_equal, stored
from structures import parted

if TYPE_CHECKING:
    from pathlib import Path

    from made import Made

# what the library makes of several tensors, or of one in another order
CONVERTED = ("kimi_linear", "bailing_hybrid", "inkling2_text", "minimax_m3_vl", "qwen3_vl_moe")
PLAIN = parted(
    [name for name, entry in FAMILIES.items() if not entry.vision and not entry.quantised and not entry.renamed],
    also=CONVERTED,
    ahead=("bailing_hybrid", "gpt_oss", "deepseek_v3"),
)
# also: the text half's names begin otherwise, or its tensors are converted too
WRAPPED = parted([name for name, entry in FAMILIES.items() if entry.vision], also=("llama4", "minimax_m3_vl"))
PLAYED = parted(COMMON, also=STORED, ahead=AHEAD)


def by_library(folder: Path, *, whole: bool = False) -> Any:
    known: Any = transformers.AutoModelForImageTextToText if whole else transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.from_pretrained(folder)
    if type(config) not in known._model_mapping:
        # mistral4
        known = loading.read_checkpoint(str(folder)).architecture.model_class
    return known.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def tensors_are_the_librarys(made: Made) -> None:
    folder = made.folder()
    checkpoint = loading.read_checkpoint(str(folder))
    ours, theirs = loading.load(checkpoint, "auto", CPU).state_dict(), by_library(folder).state_dict()
    for name in [name for name in theirs if made.family == "zaya" and name.endswith("balancing_biases")]:
        # the library sets the last one anew after it has loaded it
        theirs[name][-1] = stored(folder)[name][-1]
    assert_equal(ours, theirs)


def a_text_half_is_that_of_the_whole(made: Made) -> None:
    folder = made.folder()
    checkpoint = loading.read_checkpoint(str(folder))
    model = loading.build(checkpoint, "auto")
    names = loading.names_of(checkpoint, model)
    notes = loading.fill(model, checkpoint, names, CPU)
    ours, whole = model.state_dict(), by_library(folder, whole=True).state_dict()
    found = {own: whole[name] for name in whole if (own := names.own(name)) is not None}
    assert_equal(ours, found)
    beside = [name for name in stored(folder) if "visi" in name or "visual" in name or "projector" in name]
    assert beside
    assert any(note.endswith("of vision or audio parts skipped") for note in notes)


def names_may_be_of_the_whole_or_of_the_text(made: Made, *, of_whole: bool) -> None:
    live, fresh = Live(made.folder()), Live(made.folder(1))
    # the whole has images' weights too, which are left out
    live.send(named_tensors(made.model(1) if of_whole else fresh.model))
    assert_equal(live.state(), fresh.state())


def everything(model: Any) -> dict[str, torch.Tensor]:
    return {**model.state_dict(), **dict(model.named_buffers())}


def tensors_and_buffers_are_those_of_from_pretrained(made: Made, dtype: str) -> None:
    folder = made.folder(shards=dtype == "bfloat16")
    ours = everything(loading.load(loading.read_checkpoint(str(folder)), dtype, CPU))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    assert_equal(ours, everything(theirs))


def a_folder_gives_what_a_fresh_load_gives(made: Made) -> None:
    old, new = made.folder(), made.folder(1)
    live, first, fresh = Live(old), Live(old).state(), Live(new)
    assert live.weights.read_weights_id(str(new)) == identity.weights_id(fresh.model)
    assert_equal(live.state(), first)
    for _ in range(2):
        assert live.weights.load_folder(str(new)) == identity.weights_id(fresh.model)
        assert_equal(live.state(), fresh.state())
    assert live.now() == live.addresses
    live.weights.load_folder(str(old))
    assert_equal(live.state(), first)
    assert live.now() == live.addresses


def all_tensors_give_what_a_fresh_load_gives(made: Made, names: str) -> None:
    new = made.folder(1)
    live, fresh = Live(made.folder()), Live(new)
    live.send(named_tensors(stored(new) if names == "checkpoint" else fresh.model))
    assert_equal(live.state(), fresh.state())
    assert live.now() == live.addresses
