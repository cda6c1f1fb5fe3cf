"""The benchmark of replay: a small run of it, and what it makes of passes that are known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.report import Report
from benchmarks.trainer.replay_kl import check_replay, compare, prove
from benchmarks.trainer.replay_sides import Ask, Pass, Sampled, asks
from fdasync.result import Routing

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]


def rows_of(array: np.ndarray) -> Routing:
    return Routing(array=array, start=0, layer_ids=(0, 1), num_experts=8)


def two_sequences() -> tuple[list[Sampled], Pass]:
    """Prompts of 3 tokens, 2 and 4 sampled ones."""
    rng = np.random.default_rng(0)
    found = []
    for answer in (2, 4):
        array = np.stack([[rng.permutation(8)[:2] for _ in range(2)] for _ in range(3 + answer - 1)]).astype(np.uint8)
        found.append(Sampled(list(range(3 + answer)), 3, np.full(answer, -1.0, np.float32), rows_of(array)))
    return found, Pass([one.logprobs for one in found], [one.routing for one in found])


def moved(played: Pass, *by: float) -> Pass:
    """Log-probs of each sequence lower by so much."""
    lower = [one - np.float32(less) for one, less in zip(played.logprobs, by, strict=True)]
    return Pass(lower, list(played.routing))


def k3(by: float) -> float:
    return float(np.exp(-by) + by - 1)


@pytest.mark.nightly
def test_a_small_run_writes_what_it_promises(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "replay_kl", "--tokens", "400", "--steps", "4", "--json", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    figures, conditions = report["figures"], report["conditions"]
    assert conditions["tokens"] >= 400
    assert conditions["rollout"]["preemptions"] > 0
    assert conditions["rollout"]["cached_tokens"] > 0
    for suffix in ("", "_eager"):
        assert conditions[f"replayed_positions{suffix}"] > 400
        assert 0 < figures[f"kl_on{suffix}"] < 1e-2
        low, high = conditions[f"kl_on{suffix}_interval95"]
        assert low <= figures[f"kl_on{suffix}"] <= high
        assert figures[f"kl_ratio{suffix}"] == pytest.approx(
            figures[f"kl_on{suffix}"] / figures[f"kl_off{suffix}"], rel=1e-2
        )
    assert conditions["experts"] != conditions["experts_eager"] == "eager"
    assert set(figures) == {
        f"kl_{name}{suffix}" for name in ("off", "on", "self", "ratio") for suffix in ("", "_eager")
    }
    assert "kl_ratio" in done.stdout


def test_figures_of_known_passes() -> None:
    sequences, played = two_sequences()
    report = Report("")
    far = moved(played, 0.5, 1.0)
    compare(report, "", sequences, {"off": far, "on": moved(played, 0.1, 0.2), "self": far})
    assert report.figures["kl_off"] == pytest.approx((2 * k3(0.5) + 4 * k3(1)) / 6, rel=1e-3)
    assert report.figures["kl_on"] == pytest.approx((2 * k3(0.1) + 4 * k3(0.2)) / 6, rel=1e-3)
    off, on = report.figures["kl_off"], report.figures["kl_on"]
    assert report.figures["kl_ratio"] == pytest.approx(on / off, rel=1e-3)
    assert report.figures["kl_self"] == 0
    # two sequences: a quarter of the draws are of one of them alone, and as many of the other
    assert report.conditions["kl_off_interval95"] == pytest.approx([k3(0.5), k3(1)], rel=1e-3)
    assert report.conditions["kl_ratio_interval95"] == pytest.approx([k3(0.1) / k3(0.5), k3(0.2) / k3(1)], rel=1e-3)


def test_fixed_numerics_void_a_run_where_one_log_prob_has_other_bits() -> None:
    sequences, played = two_sequences()
    report = Report("")
    prove(report, sequences, {"off": played, "on": moved(played, 0.0, 0.0)})
    assert report.figures == {"differing_logprobs_off": 0, "differing_logprobs_on": 0}
    other = moved(played, 0.0, 0.0)
    other.logprobs[1][3] = np.nextafter(other.logprobs[1][3], np.float32(0))
    with pytest.raises(SystemExit, match="on: 1 log-probs of 2 sequences have other bits"):
        prove(report, sequences, {"off": played, "on": other})


def test_replay_that_computed_other_experts_voids_the_run() -> None:
    sequences, played = two_sequences()
    on = Pass(played.logprobs, list(played.routing), real=sum(len(one.ids) for one in sequences), live=2)
    assert check_replay(sequences, on) == 10
    with pytest.raises(SystemExit, match="3 had no row"):
        check_replay(sequences, replace(on, live=3))
    # in the prompt, which no figure looks at
    on.routing[0] = rows_of((on.routing[0].array + 1) % 8)
    with pytest.raises(SystemExit, match="of 10 positions"):
        check_replay(sequences, on)


def test_prompts_share_prefixes_and_ask_for_enough() -> None:
    text = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint8)
    found = asks(text, 10_000)
    assert found == asks(text, 10_000)
    assert 10_000 <= sum(4 * one.max_tokens for one in found) < 10_000 + 4 * 160
    assert all(isinstance(one, Ask) and 72 <= len(one.prompt) <= 128 for one in found)
    assert len({tuple(one.prompt[:64]) for one in found}) == 8
    assert len({tuple(one.prompt) for one in found}) == len(found)
    assert max(one.max_tokens for one in asks(text, 500)) <= 40
