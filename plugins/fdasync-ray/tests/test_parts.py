"""What needs no Ray: the registry's rules, folders of weights, and what is refused before anything starts."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from fdasync_fleet.link.keys import new_keys
from fdasync_ray import FleetConfig, Member
from fdasync_ray import command as command_module
from fdasync_ray.config import Current, Published
from fdasync_ray.registry import Registry
from fdasync_ray.weights import NodeFolder, packed

from fdasync.engine.config import EngineConfig
from fdasync.errors import BadInput, ConfigError

MEMBER = Member(name="d0", role="decode", address="tcp://127.0.0.1:1", pid=1, node="n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for a node's memory."""
    monkeypatch.setattr("fdasync_ray.weights.ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "no instances"),
        ({"prefill": 1}, "decode instances are missing"),
        ({"mixed": 1, "cpus": 0.0}, "needs a resource"),
        ({"mixed": -1}, "out of range"),
        ({"mixed": 1, "name": ""}, "name"),
        ({"mixed": 1, "gpus": 1.5}, "whole"),
        ({"mixed": 1, "gpus": 0.5}, "share_gpus"),
        ({"mixed": 1, "gpus": 1, "engine": EngineConfig(runner="transformers", tensor_parallel=2)}, "each rank"),
        ({"mixed": 1, "engine": EngineConfig(runner="transformers", gpus=(0,))}, "gives each instance its own"),
        ({"mixed": 1, "listen": "tcp://eth0:4000"}, "one instance alone"),
        ({"mixed": 1, "listen": "tcp://0.0.0.0:0"}, "no machine"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        FleetConfig(**{"engine": EngineConfig(runner="synthetic"), **values}).check()


def test_an_instance_takes_its_resources_on_one_node():
    config = FleetConfig(engine=EngineConfig(runner="synthetic"), mixed=1, cpus=2, gpus=4, resources={"big": 1})
    assert config.bundle() == {"CPU": 2, "GPU": 4, "big": 1}
    assert msgspec.structs.replace(config, gpus=0, resources={}).bundle() == {"CPU": 2}


def test_an_instance_has_a_store_threads_and_memory_of_its_own(tmp_path):
    engine = EngineConfig(runner="transformers", tensor_parallel=2, store="file", store_config={"path": str(tmp_path)})
    config = FleetConfig(engine=engine, mixed=1, cpus=6)
    one = config.config_of("m3", "mixed")
    assert one.store_config == {"path": str(tmp_path / "m3")}
    assert one.runner_config == {"instance": 0, "instances": 1, "num_threads": 3}
    engine = EngineConfig(runner="transformers", share_gpus=True, runner_config={"dtype": "bfloat16"})
    config = FleetConfig(engine=engine, mixed=2, gpus=0.25)
    config.check()
    assert config.config_of("m0", "mixed").runner_config == {"instance": 0, "instances": 4, "dtype": "bfloat16"}


def test_the_command_says_what_is_missing_where_ray_is(monkeypatch):
    monkeypatch.setattr(command_module, "find_spec", lambda _name: None)
    done = CliRunner().invoke(command_module.ray, ["up", "--mixed", "1", "--runner", "synthetic"])
    assert isinstance(done.exception, ConfigError)
    assert "pip install 'ray>=2.50'" in str(done.exception)


async def test_who_lacks_published_weights_or_the_current_ones_does_not_join():
    registry = Registry("u", new_keys())
    supervisors = await registry.publish(Published("/w/1", ()))
    assert supervisors == []
    assert (await registry.join(MEMBER, (), None)).members == ()
    assert (await registry.join(MEMBER, ("/w/1",), None)).members == (MEMBER,)
    await registry.leave("d0")
    await registry.serve(Current("5", "/w/1"))
    assert (await registry.join(MEMBER, ("/w/1",), None)).members == ()
    assert (await registry.join(MEMBER, ("/w/1",), Current("5", "/w/1"))).members == (MEMBER,)


async def test_weights_in_use_are_kept_whatever_is_published():
    registry = Registry("u", new_keys())
    for number in range(4):
        await registry.publish(Published(f"/w/{number}", ()))
    assert [one.path for one in (await registry.view()).published] == ["/w/2", "/w/3"]
    await registry.serve(Current("1", "/w/2"))
    for number in range(4, 7):
        await registry.publish(Published(f"/w/{number}", ()))
    assert [one.path for one in (await registry.view()).published] == ["/w/2", "/w/5", "/w/6"]
    # who joins needs none from before those that are served, and none that cannot be had any more
    await registry.serve(Current("2", "/w/5"))
    assert [one.path for one in (await registry.view()).published] == ["/w/5", "/w/6"]
    await registry.forget("/w/5")
    await registry.forget("/w/6")
    assert [one.path for one in (await registry.view()).published] == ["/w/5"]


async def test_a_view_waits_for_a_change():
    registry = Registry("u", new_keys())
    before = await registry.view()
    assert (await registry.view(before.serial, 0.01)).serial == before.serial
    await registry.join(MEMBER, (), None)
    assert (await registry.view(before.serial, 60)).members == (MEMBER,)


def test_a_folder_is_a_checkpoint_and_goes_with_the_last_that_uses_it(root, tmp_path_factory):
    safetensors = pytest.importorskip("safetensors.numpy")
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text('{"a": 1}')
    (model / "model.safetensors.index.json").write_text("{}")
    one, other = NodeFolder("u", str(model), "transformers"), NodeFolder("u", str(model), "transformers")
    path = root / "fdasync-ray-u" / "1"
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    half = np.array([7], np.uint16)
    one.write(str(path), packed([("a", "float32", (2, 3), values), ("b", "bfloat16", (1,), half.tobytes())]))
    assert other.has(str(path))
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
    data = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["b"] == {"dtype": "BF16", "shape": [1], "data_offsets": [24, 26]}
    assert data[8 + length + 24 :] == half.tobytes()
    del header
    # the other supervisor of the node comes second, and writes nothing
    other.write_once(str(path), packed([("c", "float32", (2, 3), values)]))
    assert (path / "model.safetensors").read_bytes() == data
    one.write_once(str(root / "fdasync-ray-u" / "2"), packed([("a", "float32", (2, 3), values)]))
    read = safetensors.load_file(root / "fdasync-ray-u" / "2" / "model.safetensors")
    assert np.array_equal(read["a"], values)
    one.keep_only([str(path)])
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["1", "lock"]
    one.close()
    assert path.is_dir()
    other.close()
    assert not path.parent.exists()


def test_a_node_gives_its_folder_to_another(root, tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text('{"a": 1}')
    values = np.arange(6, dtype=np.float32)
    folder = NodeFolder("u", str(model), "transformers")
    first, second = root / "fdasync-ray-u" / "1", root / "fdasync-ray-u" / "2"
    folder.write(str(first), packed([("a", "float32", (6,), values)]))
    copied = folder.read(str(first))
    assert not any(data.flags.owndata for data in copied.files.values()), "gigabytes are not read twice"
    folder.write_once(str(second), copied)
    assert sorted(file.name for file in second.iterdir()) == ["config.json", "model.safetensors"]
    for file in first.iterdir():
        assert (second / file.name).read_bytes() == file.read_bytes()
    folder.close()


def _hold(root: Path) -> None:
    NodeFolder("dead", "", "synthetic").write(
        str(root / "fdasync-ray-dead" / "1"), packed([("weights", "uint64", (1,), np.array([3], np.uint64))])
    )


def test_the_folder_of_a_fleet_that_was_killed_goes_when_the_next_one_comes(root):
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(root,))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert json.loads((root / "fdasync-ray-dead" / "1" / "weights.json").read_text()) == {"weights_id": 3}
    folder = NodeFolder("alive", "", "synthetic")
    assert [entry.name for entry in root.iterdir()] == ["fdasync-ray-alive"]
    folder.close()


def test_a_tensor_that_is_none_is_named():
    with pytest.raises(BadInput, match="b'"):
        packed([("b", "float32", (2,), b"123")])


def test_the_example_says_what_to_install_where_ray_is_missing() -> None:
    example = Path(__file__).parents[3] / "examples" / "rl_on_ray.py"
    # None in the place of a module: it is missing, also where Ray is installed
    script = f"import runpy, sys; sys.modules['ray'] = None; runpy.run_path({str(example)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr == "rl_on_ray.py: ray is missing: pip install -e 'plugins/fdasync-ray[ray]'\n"
