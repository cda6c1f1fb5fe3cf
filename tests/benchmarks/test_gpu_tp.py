"""The benchmark of ranks over GPUs: what it takes and compares, and a rehearsal in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import tp as gpu_tp
from benchmarks.lib.report import Report

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]


def test_models_are_whole() -> None:
    args = gpu_tp.parse([])
    scale = gpu_tp.scale_of(args)
    assert (args.tp, args.no_base, args.only) == (2, False, set("xsdw"))
    assert (scale.config["num_hidden_layers"], scale.sizes, scale.device) == (48, (1, 64, 256, 512), "auto")
    scale = gpu_tp.scale_of(gpu_tp.parse(["--model", "glm-4.5-air", "--tp", "4", "--sizes", "64,1"]))
    assert (scale.config["num_hidden_layers"], scale.sizes) == (46, (1, 64))
    assert gpu_tp.scale_of(gpu_tp.parse(["--tiny"])).device == "cpu"
    for wrong in (["--tp", "3"], ["--only", "y"], ["--model", "none"]):
        with pytest.raises(SystemExit):
            gpu_tp.parse(wrong)


def test_ratios_and_the_share_of_sums_follow_from_the_rates() -> None:
    scale = gpu_tp.scale_of(gpu_tp.parse(["--sizes", "64"]))
    report = Report("ranks")
    report.figures |= {
        "decode_tokens_per_s_64_tp2": 6400.0,
        "decode_tokens_per_s_64_tp1": 3200.0,
        "prefill_tokens_per_s_tp2": 150.0,
        "prefill_tokens_per_s_tp1": 100.0,
        "sum_us_64": 10.0,
    }
    gpu_tp.compare(report, scale, 2)
    # a step takes 10 ms; 96 sums take 0.96
    wanted = {"tp2_over_tp1_64": 2.0, "prefill_tp2_over_tp1": 1.5, "sum_share_64": 0.096}
    assert {name: report.figures[name] for name in wanted} == wanted


@pytest.mark.nightly
def test_a_rehearsal_finds_the_same_tokens_and_rows(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "gpu_tp", "--tiny", "--only", "x", "--json", str(out)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["figures"] == {"exact_tokens": 1.0, "exact_rows": 1.0}
    assert "void" in report["conditions"]
    assert report["conditions"]["failed"] == {}
