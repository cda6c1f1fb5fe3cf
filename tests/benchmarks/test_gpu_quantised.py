"""The benchmark of weights that stay as stored: what it takes, and a rehearsal in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import quantised as gpu_quantised

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]


def test_both_models_have_one_shape() -> None:
    plain, stored = gpu_quantised.scales_of(gpu_quantised.parse([])).values()
    assert (plain.config["num_hidden_layers"], plain.sizes, plain.pairs, plain.device) == (24, (64,), 10, "cuda")
    assert stored.config.pop("quantization_config")["weight_block_size"] == [128, 128]
    assert plain.config == stored.config
    assert plain.runner_config((64,)) | {"quantised_weights": "stored"} == stored.runner_config((64,))
    assert gpu_quantised.scales_of(gpu_quantised.parse(["--tiny"]))["bf16"].device == "cpu"
    linears = gpu_quantised.scales_of(gpu_quantised.parse(["--linears", "--pairs", "4"]))
    assert [each.runner["quantised_weights"] for each in linears.values()] == ["dequantised", "stored_linears"]
    assert {each.pairs for each in linears.values()} == {4}


@pytest.mark.nightly
def test_a_rehearsal_finds_the_same_rows_and_logits(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "gpu_quantised", "--tiny", "--json", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["figures"]
    assert figures["differing_rows"] == 0
    assert figures["rows"] == 2 * 2 * (3 + 1)
    assert figures["equal_logits"] == figures["positions"] == 2 * (3 + 1)
    # and sees a difference where there is one
    assert figures["equal_logits_drawn"] < figures["positions"]
    assert figures["weights_gb_stored"] < figures["weights_gb_bf16"]
    assert figures["stored_over_bf16_2"] > 0
