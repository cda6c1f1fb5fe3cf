"""Producers that fail: the start is refused, by the name of the datum."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from fdasync_transformers.capture.aux_producer import NotRecorded
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from step_driver import Driver

from fdasync.errors import ConfigError, RunnerError
from tests.support.plugins import install_plugin

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
import torch

from fdasync_transformers.capture.aux_producer import AuxProducer, Watched


class Good(AuxProducer):
    shape, dtype, names = (4,), "float32", ["model.layers.%d" % layer for layer in range(4)]

    def row(self):
        return self.shape, self.dtype

    def watched(self):
        return [Watched(name) for name in self.names]

    def record(self, part, seen):
        return seen[0, :, 0]


class NoRow(Good):
    def row(self):
        raise KeyError("no such size")


class OtherDtype(Good):
    dtype = "float64"


class Deep(Good):
    shape = (4, 2, 2)


class NoModule(Good):
    names = ["model.layers.0", "model.layers.1", "model.layers.2", "model.layers.9"]


class FewModules(Good):
    names = Good.names[:3]


class Uncalled(Good):
    # the experts of this family are called, the list of layers is not
    names = [*Good.names[:3], "model.layers"]


class Raising(Good):
    def record(self, part, seen):
        return seen.no_such_attribute


class Narrow(Good):
    def record(self, part, seen):
        return seen[0, :1, 0]


class Wide(Good):
    def record(self, part, seen):
        return seen[0]


class Twice(Good):
    names = ["model.layers.0", "model.layers.0", "model.layers.1", "model.layers.2"]


class Later(Good):
    # fails once the start has tried it
    def record(self, part, seen):
        if len(seen[0]) == 5:
            raise OSError("no more")
        return seen[0, :, 0]


class NoProducer:
    pass
"""
NAMES = re.findall(r"^class (\w+)", SOURCE, re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    points = {name.lower(): f"fdasync_bad:{name}" for name in NAMES}
    install_plugin(tmp_path, monkeypatch, SOURCE, "fdasync.aux", points)
    make_tiny_checkpoint(tmp_path / "model", "qwen3_dense")
    return tmp_path / "model"


async def opened(folder: Path, name: str, **limits: Any) -> Driver:
    return await Driver.open(folder, config={"self_check": False, "aux": [name]}, **limits)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("norow", "KeyError: 'no such size'"),
        ("otherdtype", "'float64'.*float32"),
        ("deep", r"\(4, 2, 2\)"),
        ("nomodule", "9"),
        ("fewmodules", r"3 modules are watched where rows are \[4\]"),
        ("uncalled", "of 3 layers was captured, 4 were to be; rows without: 3"),
        ("raising", "AttributeError: .*no_such_attribute"),
        ("narrow", "1 rows of a pass of 3 tokens"),
        ("wide", r"shape \(3, 32\) where rows are \[4\]"),
    ],
)
async def test_what_cannot_be_recorded_fails_the_start(folder: Path, name: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' cannot be recorded: .*{named}") as caught:
        await opened(folder, name)
    assert caught.value.field == "runner_config.aux"


async def test_what_is_no_producer_or_promises_too_little_fails_the_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'noproducer': fdasync_bad:NoProducer is not a AuxProducer class"):
        await opened(folder, "noproducer")
    with pytest.raises(ConfigError, match="'good' does not promise fixed numerics"):
        await Driver.open(folder, config={"aux": ["good"]}, numerics="fixed")


async def test_a_module_may_be_watched_twice_and_a_later_failure_names_the_datum(folder: Path) -> None:
    driver = await opened(folder, "twice")
    one = driver.sequence([5, 99, 3, 7], 3)
    await driver.run([one])
    rows = driver.rows(one, "twice")
    assert rows.any()
    assert (rows[:, 0] == rows[:, 1]).all()
    await driver.close()
    driver = await opened(folder, "later")
    await driver.run([driver.sequence([5, 99, 3, 7], 3)])
    with pytest.raises(RunnerError, match="'later' cannot be recorded: OSError: no more") as caught:
        await driver.run([driver.sequence([5, 99, 3, 7, 2], 1)])
    assert isinstance(caught.value, NotRecorded) or isinstance(caught.value.__cause__, NotRecorded)
    await driver.close()
