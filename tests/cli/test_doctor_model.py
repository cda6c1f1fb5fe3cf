"""`fdasync doctor --model`: what a runner's report says is shown, and the exit code is its verdict."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest
from click.testing import CliRunner

from fdasync.cli.main import cli
from fdasync.errors import BadInput
from fdasync.runner.report import ModelReport
from fdasync.runner.synthetic import SyntheticRunner

if TYPE_CHECKING:
    from pathlib import Path

SERVED = ModelReport(
    model="DIR",
    family="deepseek_v3",
    served=True,
    model_class="DeepseekV3ForCausalLM",
    dtype="bfloat16",
    stored_nbytes=688_000_000_000,
    weights_nbytes=1_342_000_000_000,
    kv_token_nbytes=70_272,
    aux_token_nbytes=464,
    max_context_tokens=163_840,
    num_hidden_layers=61,
    moe_layers=58,
    num_experts=256,
    top_k=8,
    device="cuda:0",
    device_nbytes=1_400_000_000_000,
    notes=("FP8 dequantised to bfloat16: 45,000 tensors",),
    replaced={"norms": 245, "routers": 58},
    kept=("decoder layers are the library's own: DeepseekV3DecoderLayer is of no known kind",),
)


def doctor(monkeypatch: pytest.MonkeyPatch, folder: Path, report: ModelReport, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(SyntheticRunner, "examine", lambda _: report)
    command = ["doctor", "--model", str(folder), "--runner", "synthetic", *words]
    found = CliRunner(env={"COLUMNS": "200"}).invoke(cli, command)
    return found.exit_code, found.output


def test_a_served_model_ends_with_0_and_shows_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, said = doctor(monkeypatch, tmp_path, SERVED, "--max-running", "64")
    assert code == 0
    for words in (
        "deepseek_v3 (DeepseekV3ForCausalLM)",
        "61, 58 with 256 experts, 8 a token",
        "688.0 GB",
        "1,342.0 GB (bfloat16)",
        "70,272 bytes a token",
        "163,840 tokens",
        "cuda:0, 1,400.0 GB",
        "FP8 dequantised to bfloat16: 45,000 tensors",
        "norms: kernels are tried on a GPU for 245",
        "routers: kernels are tried on a GPU for 58",
        "decoder layers are the library's own: DeepseekV3DecoderLayer is of no known kind",
        "would be served",
    ):
        assert words in said
    # weights, and KV of 64 sequences of 4,096 tokens
    assert f"{(SERVED.weights_nbytes + 64 * 4096 * SERVED.kv_token_nbytes) / 1e9:,.1f} GB" in said
    assert " 256 " not in said.split("device memory")[1].split("\n")[2]


def test_recurrent_state_counts_for_each_sequence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = msgspec.structs.replace(SERVED, state_nbytes=78_000_000)
    code, said = doctor(monkeypatch, tmp_path, report, "--max-running", "64")
    assert code == 0
    assert "78,000,000 bytes a sequence" in said
    each = 4096 * SERVED.kv_token_nbytes + report.state_nbytes
    assert f"{(SERVED.weights_nbytes + 64 * each) / 1e9:,.1f} GB" in said


def test_a_refused_model_ends_with_1_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused = ModelReport(model="DIR", family="zaya", served=False, reason="keeps recurrent state")
    code, said = doctor(monkeypatch, tmp_path, refused)
    assert code == 1
    assert "would not be served: keeps recurrent state" in said
    assert "device memory" not in said


@pytest.mark.parametrize("report", [SERVED, ModelReport(model="DIR", served=False, reason="no")])
def test_json_is_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report: ModelReport) -> None:
    code, said = doctor(monkeypatch, tmp_path, report, "--json")
    assert code == (0 if report.served else 1)
    assert msgspec.convert(json.loads(said), ModelReport) == report


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_are_served_by_runners_that_compute_in_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int
) -> None:
    report = msgspec.structs.replace(SERVED, tensor_parallel=ranks)
    code, said = doctor(monkeypatch, tmp_path, report, "--tp", "2")
    if ranks == 2:
        assert code == 0
        assert "2; memory is that of one of them" in said
    else:
        assert code == 1
        assert "would not be served: 2 ranks were asked for, runner 'synthetic' answers 1" in said


@pytest.mark.parametrize("report", [SERVED, msgspec.structs.replace(SERVED, numerics="fixed")])
def test_fixed_numerics_are_served_by_runners_that_promise_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report: ModelReport
) -> None:
    assert doctor(monkeypatch, tmp_path, report)[0] == 0
    code, said = doctor(monkeypatch, tmp_path, report, "--numerics", "fixed")
    if report.numerics == "fixed":
        assert code == 0
        assert said.split("numerics")[1].split()[1] == "fixed"
    else:
        assert code == 1
        assert "would not be served: fixed numerics were asked for, and runner 'synthetic'" in said


def test_a_runner_without_a_report_says_so(tmp_path: Path) -> None:
    found = CliRunner().invoke(cli, ["doctor", "--model", str(tmp_path), "--runner", "synthetic"])
    assert isinstance(found.exception, BadInput)
    assert "SyntheticRunner says nothing of a model before it is opened" in str(found.exception)


def test_the_model_may_come_from_a_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        SyntheticRunner, "examine", lambda runner: msgspec.structs.replace(SERVED, model=runner.limits.model)
    )
    (tmp_path / "engine.toml").write_text(f'model = "{tmp_path}"\nrunner = "synthetic"\n')
    found = CliRunner().invoke(cli, ["doctor", "--config", str(tmp_path / "engine.toml"), "--json"])
    assert found.exit_code == 0
    assert json.loads(found.output)["model"] == str(tmp_path)
