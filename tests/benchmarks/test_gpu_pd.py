"""The benchmark of prefill and decode on GPUs: its load, its figures, and a rehearsal."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.gpu import pd as gpu_pd
from benchmarks.lib.report import Report

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ci


def test_requests_come_at_random_at_the_rate_asked_for_and_the_same_for_every_arm():
    one = gpu_pd.Load.make(10.0, 15.0)
    assert one == gpu_pd.Load.make(10.0, 15.0)
    assert one.at != gpu_pd.Load.make(10.0, 15.0, seed=4).at
    assert one.at == sorted(one.at)
    assert one.at[0] > 0
    # 10 seconds before them are played, too
    assert one.at[-1] < 25.0
    # 250 are expected; a Poisson count is within six of its deviations
    assert 155 < len(one.at) < 345
    assert all(1024 <= count <= 3072 for count in one.prompts)
    assert len(one.prompts) == len(one.at)


def test_figures_are_those_of_the_answers(capsys: pytest.CaptureFixture[str]):
    report = Report("r")
    answers = [
        gpu_pd.Answer(asked=10.0, first=10.5, last=12.5, stall=0.75, tokens=5),
        gpu_pd.Answer(asked=11.0, first=11.25, last=15.0, stall=1.5, tokens=11),
    ]
    gpu_pd.tell("pd", answers, 4_000_000_000, gpu_pd.Load([], [], 8, warm_s=3.0), report)
    # 0.5 and 0.25 s; 2.0 / 4 and 3.75 / 10
    assert report.figures["ttft_p50_ms_pd"] == 375.0
    assert report.figures["ttft_p99_ms_pd"] == pytest.approx(497.5)
    assert report.figures["tpot_p50_ms_pd"] == 437.5
    assert report.figures["stall_p50_ms_pd"] == 1125.0
    # 16 tokens in 5 s; what moved did so in the warm-up too
    assert report.figures["tokens_per_s_pd"] == 3.2
    assert report.figures["moved_gb_per_s"] == 0.5


@pytest.mark.nightly
def test_a_rehearsal_on_a_cpu(tmp_path: Path):
    out = tmp_path / "pd.json"
    command = [sys.executable, "-m", "benchmarks", "gpu_pd", "--tiny", "--seconds", "3", "--rate", "3"]
    subprocess.run([*command, "--json", str(out)], check=True, timeout=600)
    found = json.loads(out.read_text())
    assert found["conditions"]["answers_pd"] == found["conditions"]["answers_mixed"] > 0
    assert found["figures"]["moved_gb_per_s"] > 0
    assert found["figures"]["tpot_p99_pd_over_mixed"] > 0
