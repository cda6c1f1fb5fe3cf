"""A checkpoint follows what is published, and is never in its place before its bytes were checked."""

from __future__ import annotations

import json
from shutil import copyfile

import numpy as np
import publisher
import pytest
from fdasync_http.pulls import local as local_module
from fdasync_http.pulls import patching
from fdasync_http.pulls.child import pull
from fdasync_http.pulls.local import Pull, bring, state_of
from safetensors.numpy import load_file, save_file

from fdasync.errors import DeadlineExceeded, WeightsRejected


def weights(seed):
    """Of two files; most bytes are those of every other seed."""
    drawn = np.random.default_rng(seed)
    tensors = {f"layer.{number}": np.full((64, 3), number, np.float32) for number in range(4)}
    for number in range(3):
        tensors[f"layer.{number}"][drawn.integers(64), 1] = seed
    return tensors


def save(folder, tensors):
    folder.mkdir()
    names = list(tensors)
    save_file({name: tensors[name] for name in names[:2]}, folder / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[2:]}, folder / "model-2.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def held(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


class Stage:
    """The engine's checkpoint, what is published, and the local one."""

    def __init__(self, home):
        self.base, self.source, self.local = save(home / "base", weights(0)), home / "published", home / "local"
        self.source.mkdir()

    def pull(self, version, form="slime", **more):
        bring(Pull(form, str(self.local), str(self.base), str(self.source), version, **more))

    def holds(self, version, seed):
        found, wanted = held(self.local), weights(seed)
        assert found.keys() == wanted.keys()
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
        assert state_of(str(self.local)).version == version
        return sorted(path.name for path in self.local.iterdir() if path.is_file()) == sorted(
            path.name for path in self.base.iterdir()
        )


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32"])
def test_it_follows_slimes_deltas_one_by_one_and_several_at_once(stage, encoding, checksum):
    stage.pull(0)
    assert stage.holds(0, 0)
    for version in range(1, 5):
        publisher.slime(stage.source, version, weights(version - 1), weights(version), encoding, checksum)
        if version != 2:
            for _ in range(2):
                stage.pull(version)
            assert stage.holds(version, version)
    assert held(stage.base).keys() == weights(0).keys()
    assert np.array_equal(held(stage.base)["layer.0"], weights(0)["layer.0"])


def test_a_version_that_changes_nothing_is_a_version(stage):
    publisher.slime(stage.source, 1, weights(0), weights(0))
    stage.pull(1)
    assert stage.holds(1, 0)


def test_a_whole_checkpoint_begins_the_chain_anew(stage):
    stage.pull(0)
    save(stage.source / "weight_v000002", weights(2))
    publisher.slime(stage.source, 3, weights(2), weights(3))
    # version 1 was never published, or is pruned
    stage.pull(3)
    assert stage.holds(3, 3)


def test_it_follows_skyrls_deltas(stage):
    for version in (1, 2):
        told = publisher.skyrl(stage.source, version, weights(version - 1), weights(version))
    stage.pull(2, "skyrl", last=told["uri"])
    assert stage.holds(2, 2)


@pytest.mark.parametrize("before", [1, 2])
def test_another_run_with_the_same_folders_begins_anew(stage, before):
    """A trainer that starts again counts from 0; what an earlier run left fits nothing of it."""
    for version in (1, 2):
        publisher.slime(stage.source, version, weights(version - 1), weights(version))
    stage.pull(before)
    for version in (1, 2):
        folder = stage.source / f"weight_v{version:06d}"
        folder.rename(stage.base.parent / f"old-{version}")
    publisher.slime(stage.source, 1, weights(0), weights(11))
    publisher.slime(stage.source, 2, weights(11), weights(12))
    if before == 2:
        # as slime does first of all: nothing says else that the version is another one
        stage.pull(0)
    stage.pull(2)
    assert stage.holds(2, 12)


def test_a_process_that_dies_in_the_middle_leaves_what_the_next_one_mends(stage, monkeypatch):
    publisher.slime(stage.source, 1, weights(0), weights(1))
    stage.pull(0)
    renamed = []
    own = local_module.Path.rename

    def rename(self, target):
        if renamed and self.name.endswith(patching.PART):
            raise KeyboardInterrupt
        renamed.append(target)
        return own(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(local_module.Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            stage.pull(1)
    # the first file is in its place, the second one is not
    assert len(renamed) == 1
    assert state_of(str(stage.local)).version == 0
    monkeypatch.setattr(local_module, "_begin", None)
    stage.pull(1)
    assert stage.holds(1, 1)


def damage(name):
    """Of a published version, by name."""

    def bytes_of(folder):
        file = folder / "model-00000-of-00002.safetensors"
        data = bytearray(file.read_bytes())
        data[-3] ^= 255
        file.write_bytes(data)

    def cut(folder):
        file = folder / "model-00000-of-00002.safetensors"
        file.write_bytes(file.read_bytes()[:-3])

    def index(folder, **changes):
        file = folder / "model.safetensors.index.json"
        told = json.loads(file.read_text())
        told["metadata"].update(changes)
        file.write_text(json.dumps(told))

    def checksums(folder, **changes):
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            save_file(tensors, file, dict.fromkeys(tensors, "00") if changes else {})

    def renamed(folder):
        file = folder / "model-00000-of-00002.safetensors"
        save_file({"layer.9": np.zeros(3, np.uint8)}, file, {"layer.9": "00"})

    return {
        "bytes": bytes_of, "cut": cut, "checksum": lambda folder: checksums(folder, to="00"), "none": checksums,
        "encoding": lambda folder: index(folder, delta_encoding="pickle"),
        "compression": lambda folder: index(folder, compression_format="lz4"),
        "algorithm": lambda folder: index(folder, checksum_format="crc32"),
        "order": lambda folder: index(folder, base_version="000005"),
        "number": lambda folder: index(folder, version="one"), "name": renamed,
        "header": lambda folder: (folder / "model-00000-of-00002.safetensors").write_bytes(b"\xff" * 64),
    }[name]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("bytes", "layer.2"), ("cut", "ends before"), ("checksum", "has the checksum"), ("none", "no checksum"),
        ("encoding", "encoding"), ("compression", "compression"), ("algorithm", "checksum"), ("order", "is due"),
        ("number", "index.json"), ("name", "layer.9"), ("header", "no safetensors file"),
    ],
)  # fmt: skip
def test_what_is_damaged_or_of_another_base_is_not_taken(stage, monkeypatch, name, told):
    stage.pull(0)
    damage(name)(publisher.slime(stage.source, 1, weights(0), weights(1)))
    copies = []
    monkeypatch.setattr(local_module.shutil, "copyfile", lambda *names: copies.append(names) or copyfile(*names))
    with pytest.raises(WeightsRejected, match=told):
        stage.pull(1)
    assert stage.holds(0, 0)
    # trainers ask again sixty times: the engine's checkpoint is not copied once more for each
    assert not [name for name, _ in copies if name.parent == stage.base]


@pytest.mark.parametrize("version", [0, 1])
def test_a_file_that_is_still_written_while_it_is_copied_is_not_taken(stage, monkeypatch, version):
    """Of the engine's own checkpoint, and of a whole one that is published."""
    source = stage.base
    if version:
        stage.pull(0)
        source = save(stage.source / "weight_v000001", weights(1))
    file = source / "model-2.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])

    def slowly(one, other):
        copyfile(one, other)
        if one == file:
            # the rest comes when the beginning has been read
            file.write_bytes(whole)

    with monkeypatch.context() as patch:
        patch.setattr(local_module.shutil, "copyfile", slowly)
        with pytest.raises(WeightsRejected, match=r"model-2\.safetensors was cut short while it was copied"):
            stage.pull(version)
    # nobody takes what is there for whole, and the half is in no place
    assert state_of(str(stage.local)) is None
    in_place = stage.local / "model-2.safetensors"
    assert not in_place.exists() or len(in_place.read_bytes()) == len(whole)
    stage.pull(version)
    assert stage.holds(version, version)


def test_a_change_that_grows_beyond_its_tensor_is_refused_before_it_fills_memory(stage, monkeypatch):
    bomb = np.zeros(1 << 20, np.float32)
    for encoding in ("xor", "overwrite"):
        with monkeypatch.context() as patch:
            patch.setattr(publisher, "encoded", lambda _old, _new, _encoding: bomb)
            publisher.slime(stage.source, 1, weights(0), weights(1), encoding)
        with pytest.raises(WeightsRejected, match=r"longer than|does not have the bytes"):
            stage.pull(1)
        (stage.source / "weight_v000001").rename(stage.source / encoding)


def test_positions_beyond_the_tensor_are_refused(stage, monkeypatch):
    far = np.concatenate([np.array([1, 5000], "<u4").view(np.uint8), np.array([1], np.uint8)])
    monkeypatch.setattr(publisher, "encoded", lambda _old, _new, _encoding: far)
    publisher.slime(stage.source, 1, weights(0), weights(1), "overwrite")
    with pytest.raises(WeightsRejected, match="beyond the tensor"):
        stage.pull(1)


def test_skyrls_files_lie_in_their_folder(stage):
    told = publisher.skyrl(stage.source, 1, weights(0), weights(1))
    manifest = stage.source / "delta-00000001" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("delta-rank", "../delta-rank"))
    with pytest.raises(WeightsRejected, match="no file of it"):
        stage.pull(1, "skyrl", last=told["uri"])


def test_a_folder_of_others_is_left_alone(stage):
    stage.local.mkdir()
    (stage.local / "thesis.txt").write_text("mine")
    with pytest.raises(WeightsRejected, match="not pulled"):
        stage.pull(0)
    assert [path.name for path in stage.local.iterdir()] == ["thesis.txt"]
    (stage.local / "thesis.txt").unlink()
    stage.pull(0)
    # what comes into it later is no part of a checkpoint
    (stage.local / "model-9.safetensors").write_text("old")
    stage.pull(0)
    publisher.slime(stage.source, 1, weights(0), weights(1))
    save(stage.source / "weight_v000002", weights(2))
    stage.pull(2)
    assert stage.holds(2, 2)


def test_versions_that_are_not_there_are_named(stage):
    with pytest.raises(WeightsRejected, match="version 3 is not published"):
        stage.pull(3)


async def test_a_pull_that_takes_too_long_is_ended(stage):
    asked = Pull("slime", str(stage.local), str(stage.base), str(stage.source), 0)
    with pytest.raises(DeadlineExceeded, match="pulling weights"):
        await pull(asked, 1e-6)
    await pull(asked, 60.0)
    assert stage.holds(0, 0)
