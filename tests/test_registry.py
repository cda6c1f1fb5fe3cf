"""Plugins by entry point: missing and broken ones are told by distribution (`registry.py`)."""

from __future__ import annotations

import sys

import pytest

from fdasync.errors import PluginError
from fdasync.registry.registry import RUNNERS, TOKENIZERS, Registry
from fdasync.runner.base import Runner
from fdasync.runner.synthetic import SyntheticRunner

MODULE = """
import msgspec
from fdasync_fleet.transfer.shm import ShmTransport
from fdasync.runner.synthetic import SyntheticRunner


class Good(SyntheticRunner):
    pass


class NoConfig(SyntheticRunner):
    config_type = None


class OddConfig(SyntheticRunner):
    config_type = "SyntheticConfig"


class NoRunner:
    config_type = msgspec.Struct


class Greedy(ShmTransport):
    def __init__(self, name):
        raise AssertionError("it was made")


class Configured(ShmTransport):
    config_type = None


def tokenizer(model):
    return model


thing = 3
"""


@pytest.fixture
def context(tmp_path, monkeypatch):
    """A folder on the path; `site(distribution, group, name=target, ...)` installs entry points there."""
    (tmp_path / "plugmod.py").write_text(MODULE)
    (tmp_path / "plugbroken.py").write_text("import no_such_module_anywhere")
    (tmp_path / "plugraises.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)

    def install(distribution, group, **points):
        info = tmp_path / f"{distribution.replace('-', '_')}-1.2.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        with (info / "entry_points.txt").open("a") as file:
            file.write(f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items()))

    yield install
    for name in ("plugmod", "plugbroken", "plugraises"):
        sys.modules.pop(name, None)


def test_what_comes_with_the_package_loads():
    assert Registry().load(RUNNERS, "synthetic", Runner) is SyntheticRunner


def test_a_plugin_is_loaded_by_name(context):
    context("fdasync-plug", RUNNERS, plug="plugmod:Good")
    context("fdasync-plug", TOKENIZERS, plugtok="plugmod:tokenizer")
    assert Registry().load(RUNNERS, "plug", Runner).__name__ == "Good"
    assert Registry().load_function(TOKENIZERS, "plugtok")("folder") == "folder"


def test_finding_imports_nothing(context):
    context("fdasync-plug", RUNNERS, plug="plugmod:Good")
    assert Registry().find(RUNNERS, "plug").value == "plugmod:Good"
    assert "plugmod" not in sys.modules


def test_a_missing_one_is_told_with_what_there_is():
    with pytest.raises(PluginError, match="not installed") as caught:
        Registry().load(RUNNERS, "nobody", Runner)
    assert (caught.value.name, caught.value.distribution) == ("nobody", "")
    assert "synthetic" in caught.value.problem
    with pytest.raises(PluginError, match="not installed"):
        Registry().load_function(TOKENIZERS, "nobody")


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("plugbroken:Runner", "importing plugbroken:Runner failed: ModuleNotFoundError: No module named 'no_such"),
        ("plugraises:Runner", "importing plugraises:Runner failed: RuntimeError: no licence"),
        ("plugmod:Missing", "importing plugmod:Missing failed: AttributeError"),
        ("plugmod:NoRunner", "plugmod:NoRunner is not a Runner class"),
        ("plugmod:thing", "plugmod:thing is not a Runner class"),
        ("plugmod:tokenizer", "plugmod:tokenizer is not a Runner class"),
        ("plugmod:NoConfig", "plugmod:NoConfig has no config_type"),
        ("plugmod:OddConfig", "plugmod:OddConfig has no config_type"),
    ],
)
def test_a_broken_runner_is_told_with_its_distribution(context, target, problem):
    context("fdasync-plug", RUNNERS, plug=target)
    with pytest.raises(PluginError) as caught:
        Registry().load(RUNNERS, "plug", Runner)
    error = caught.value
    assert (error.group, error.name, error.distribution) == (RUNNERS, "plug", "fdasync-plug")
    assert error.problem.startswith(problem)
    assert "fdasync-plug" in str(error)


def test_a_tokenizer_must_be_callable(context):
    context("fdasync-plug", TOKENIZERS, plugtok="plugmod:thing")
    with pytest.raises(PluginError, match="cannot be called") as caught:
        Registry().load_function(TOKENIZERS, "plugtok")
    assert caught.value.distribution == "fdasync-plug"


def test_one_name_in_two_distributions_is_refused_and_both_are_named(context):
    context("fdasync-one", RUNNERS, plug="plugmod:Good")
    context("fdasync-two", RUNNERS, plug="plugmod:NoConfig")
    with pytest.raises(PluginError, match="several distributions") as caught:
        Registry().find(RUNNERS, "plug")
    assert caught.value.distribution == "fdasync-one, fdasync-two"


def test_the_list_names_every_plugin_and_imports_none(context):
    context("fdasync-plug", RUNNERS, plug="plugmod:Good", aaa="plugbroken:Runner")
    found = [info for info in Registry().list() if info.distribution == "fdasync-plug"]
    assert [(info.name, info.version, info.target, info.problem) for info in found] == [
        ("aaa", "1.2", "plugbroken:Runner", None),
        ("plug", "1.2", "plugmod:Good", None),
    ]
    assert "plugmod" not in sys.modules


def test_the_list_tells_what_is_wrong_with_each_when_asked(context, tmp_path, monkeypatch):
    # nothing else is installed there: what other plugins import is not for this process
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    context("fdasync-plug", RUNNERS, plug="plugmod:Good", aaa="plugbroken:Runner")
    context("fdasync-plug", TOKENIZERS, tok="plugmod:thing")
    listed = Registry().list({RUNNERS: Runner})
    problems = {info.name: info.problem for info in listed}
    assert problems["plug"] == ""
    assert problems["aaa"].startswith("importing plugbroken:Runner failed")
    assert problems["tok"].endswith("cannot be called")
    assert [info.group for info in listed] == [RUNNERS, RUNNERS, TOKENIZERS]
