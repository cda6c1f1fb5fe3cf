"""The sampler's benchmark, rehearsed without a GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import gpu_sampler

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ci


@pytest.fixture
def no_blocking() -> None:
    """In place of the one that looks: the benchmark samples on its own loop."""


def test_it_is_rehearsed_on_every_kind(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    with pytest.raises(SystemExit) as ended:
        gpu_sampler.main(["--tiny", "--rows", "2", "--json", str(out)])
    assert ended.value.code == 0
    report = json.loads(out.read_text())
    timed = {name for name in report["figures"] if name.startswith("sampler_us_")}
    assert timed == {
        f"sampler_us_{kind}_{logits}_2"
        for kind in ("temperature", "top_p", "top_k", "min_p")
        for logits in ("flat", "peaked")
    }
    assert report["figures"]["sampler_floor_us_2"] > 0
    assert "void" in report["conditions"]


@pytest.mark.parametrize("arguments", [["--kinds", "beam"], ["--logits", "round"], ["--rows", "0"]])
def test_it_refuses_what_is_not_there(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_sampler.parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_token_that_is_not_the_hosts_fails_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = gpu_sampler.Step.sample

    def sample(self: gpu_sampler.Step, table: Any) -> Any:
        results = honest(self, table)
        return results | {"tokens": results["tokens"] + 1}

    monkeypatch.setattr(gpu_sampler.Step, "sample", sample)
    out = tmp_path / "figures.json"
    with pytest.raises(SystemExit) as ended:
        gpu_sampler.main(["--tiny", "--rows", "1", "--kinds", "top_k", "--json", str(out)])
    assert ended.value.code == 1
    assert "where the host draws" in capsys.readouterr().err
    assert json.loads(out.read_text())["conditions"]["failed"].keys() == {"top_k"}
