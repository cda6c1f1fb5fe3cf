"""Folders of changed tensors: applied to the weights that they name, and refused whole where anything is wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers import weights_fingerprint, write_delta
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from fdasync_transformers.weights import identity
from fdasync_transformers.weights.deltas.delta import MANIFEST
from group_play import engine_config, fresh_tokens, tokens
from live_weights import Live, assert_equal
from safetensors.torch import load_file, save_file

from fdasync import Engine
from fdasync.errors import WeightsBroken, WeightsRejected

if TYPE_CHECKING:
    from pathlib import Path


class Pair:
    """A model in use, and a delta that changes some of its tensors."""

    def __init__(self, tmp_path: Path, result: str = "") -> None:
        self.model = make_tiny_checkpoint(tmp_path / "old", "qwen3_moe", 0)
        self.live, self.folder = Live(tmp_path / "old"), tmp_path / "delta"
        self.base = identity.weights_id(self.live.model)
        assert weights_fingerprint(self.model, dtype="float32").weights_id == self.base
        with torch.no_grad():
            self.changed = {}
            for name in [*self.model.state_dict()][3:6]:
                self.model.state_dict()[name] += 1
                self.changed[name] = self.model.state_dict()[name]
        self.result = weights_fingerprint(self.model, dtype="float32").weights_id
        write_delta(self.folder, self.changed, base=self.base, result=result or self.result)

    def manifest(self) -> Any:
        return json.loads((self.folder / MANIFEST).read_text())

    def write(self, manifest: Any) -> None:
        (self.folder / MANIFEST).write_text(json.dumps(manifest))

    def refused(self, word: str) -> None:
        before = {name: tensor.clone() for name, tensor in self.live.state().items()}
        with pytest.raises(WeightsRejected, match=word):
            self.live.weights.load_folder(str(self.folder))
        assert_equal(self.live.state(), before)
        assert not self.live.weights.broken


def test_a_delta_changes_its_tensors_and_names_what_comes_of_it(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    assert pair.live.weights.read_weights_id(str(pair.folder)) == pair.result
    assert pair.live.weights.load_folder(str(pair.folder)) == pair.result
    assert_equal(pair.live.state(), dict(pair.model.state_dict()))
    assert pair.live.now() == pair.live.addresses
    # it was applied, and belongs to other weights now
    pair.refused("is a delta to weights")
    # a chain of them
    with torch.no_grad():
        for tensor in pair.changed.values():
            tensor *= 2
    last = weights_fingerprint(pair.model, dtype="float32").weights_id
    write_delta(tmp_path / "next", pair.changed, base=pair.result, result=last)
    assert pair.live.weights.load_folder(str(tmp_path / "next")) == last
    # from the start again, by a whole checkpoint
    assert pair.live.weights.load_folder(str(tmp_path / "old")) == pair.base
    assert pair.live.weights.load_folder(str(pair.folder)) == pair.result


def test_what_is_wrong_is_found_before_anything_changes(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    right = pair.manifest()
    name, entry = next(iter(right["tensors"].items()))
    pair.write({**right, "base": "0" * 32})
    pair.refused("is a delta to weights 0000")
    pair.write({**right, "tensors": {**right["tensors"], name: {**entry, "xxh3": "0" * 32}}})
    pair.refused("checksum")
    pair.write({**right, "tensors": {one: each for one, each in right["tensors"].items() if one != name}})
    pair.refused("does not name")
    pair.write({**right, "tensors": {**right["tensors"], "more": entry}})
    pair.refused("more")
    pair.write({**right, "tensors": {**right["tensors"], name: {**entry, "file": "../x.safetensors"}}})
    pair.refused("no file of the folder")
    pair.write({**right, "format": "other"})
    pair.refused("format")
    pair.write({**right, "tensors": {}})
    pair.refused("names no tensors")
    (pair.folder / MANIFEST).write_text("{")
    pair.refused("no manifest")
    pair.write(right)
    file = pair.folder / entry["file"]
    torn = bytearray(file.read_bytes())
    torn[-1] ^= 1
    file.write_bytes(torn)
    pair.refused("checksum")
    file.unlink()
    pair.refused("cannot be read")


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    name = next(iter(pair.changed))
    write_delta(pair.folder, {name: torch.zeros(3)}, base=pair.base, result=pair.result)
    pair.refused("shape")


def test_a_result_that_is_another_breaks_the_weights(tmp_path: Path) -> None:
    pair = Pair(tmp_path, result="1" * 32)
    with pytest.raises(WeightsBroken, match="gives the weights"):
        pair.live.weights.load_folder(str(pair.folder))
    with pytest.raises(WeightsRejected, match="broken"):
        pair.live.weights.load_folder(str(pair.folder))
    pair.live.weights.load_folder(str(tmp_path / "old"))
    assert identity.weights_id(pair.live.model) == pair.base


@pytest.mark.ci
async def test_an_engine_takes_a_delta_as_any_folder(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.model.save_pretrained(tmp_path / "new")
    async with Engine(engine_config(tmp_path / "old")) as engine:
        await engine.update_weights("1", str(pair.folder), "keep", expected=pair.result)
        assert await tokens(engine) == await fresh_tokens(tmp_path / "new")
        with pytest.raises(WeightsRejected, match="is a delta to weights"):
            await engine.update_weights("2", str(pair.folder))
        # the version in use, for the same weights
        await engine.update_weights("1", str(pair.folder))
        assert engine.facts().weight_version == "1"
        engine.check()


def test_files_hold_the_tensors_under_their_names(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    (file,) = pair.folder.glob("*.safetensors")
    stored = load_file(file)
    assert_equal(stored, pair.changed)
    save_file({**stored, "more": torch.zeros(1)}, file)
    pair.refused("does not name")
