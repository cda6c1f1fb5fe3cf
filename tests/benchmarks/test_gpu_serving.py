"""The benchmark of serving on a GPU: rehearsed in Triton's interpreter, and what it makes of times and traces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import profile as profiling
from benchmarks.gpu import serving as gpu_serving
from benchmarks.gpu.decode import ratio
from benchmarks.gpu.profile import Event
from benchmarks.gpu.scale import AIMS, Scale, large

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]


def rehearse(out: Path, *arguments: str) -> dict[str, Any]:
    """The report of a rehearsal that went well."""
    command = [sys.executable, "-m", "benchmarks", "gpu_serving", "--tiny", "--json", str(out), *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    return report


@pytest.mark.nightly
def test_a_rehearsal_writes_figures_that_make_sense(tmp_path: Path) -> None:
    report = rehearse(tmp_path / "figures.json")
    figures, conditions = report["figures"], report["conditions"]
    for size in (1, 2):
        for way in ("on", "off", "depth1"):
            assert 0.1 < figures[f"decode_tokens_per_s_{size}_{way}"] < 100_000
        rate = figures[f"decode_tokens_per_s_{size}_on"]
        assert figures[f"step_ms_{size}"] == pytest.approx(size / rate * 1e3, rel=1e-3)
        on_over_off = rate / figures[f"decode_tokens_per_s_{size}_off"]
        assert figures[f"capture_on_over_off_{size}"] == pytest.approx(on_over_off, rel=1e-2)
        low, high, pairs = conditions[f"capture_on_over_off_{size}_interval95"]
        assert low <= figures[f"capture_on_over_off_{size}"] <= high
        assert pairs == conditions["pairs"]
        assert f"depth2_over_depth1_{size}" in figures
        assert figures[f"floor_ms_{size}"] > 0
        # top 4 of 16: each layer of a step of one has 4, of two no more than 8; 0 would mean that no row came
        assert 4 <= conditions[f"floor_{size}"]["experts_chosen_per_layer"] <= 4 * size
    for way in ("sampled", "top_p"):
        assert figures[f"{way}_over_greedy_2"] > 0
        assert f"{way}_over_greedy_1" not in figures
    assert figures["floor_ms_2"] > figures["floor_ms_1"]
    assert figures["replies_over_none_2"] > 0
    assert figures["engine_over_runner_2"] > 0
    assert "void" in conditions
    assert conditions["failed"] == {}


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["glm-4.5-air", "deepseek-v2-lite"])
def test_other_models_are_rehearsed(model: str, tmp_path: Path) -> None:
    """Latents, shared experts, a dense layer at the head, and routers of other kinds."""
    report = rehearse(tmp_path / "figures.json", "--model", model, "--only", "d")
    assert report["conditions"]["model"] == model
    # top 4 of 16
    assert report["conditions"]["floor_1"]["experts_chosen_per_layer"] == 4
    assert 4 <= report["conditions"]["floor_2"]["experts_chosen_per_layer"] <= 8
    assert report["figures"]["floor_share_2"] > 0


def arguments(*given: str) -> Scale:
    return gpu_serving.scale_of(gpu_serving.parse([*given]))


def test_options_make_a_scale(capsys: pytest.CaptureFixture[str]) -> None:
    assert arguments() == large("qwen3-30b-a3b") == Scale()
    quick = arguments("--model", "deepseek-v2-lite", "--quick", "--sizes", "64,1")
    assert quick.config["model_type"] == "deepseek_v2"
    assert (quick.sizes, quick.pairs, quick.side_pairs) == ((1, 64), 3, 2)
    assert arguments("--pairs", "2").side_pairs == 2
    assert arguments("--tiny", "--model", "glm-4.5-air").device == "cpu"
    assert gpu_serving.parse([]).only == set("abdf")
    assert gpu_serving.parse(["--only", "h,a"]).only == set("ah")
    for wrong in (["--only", "e"], ["--model", "gpt-5"], ["--only", ""]):
        with pytest.raises(SystemExit):
            gpu_serving.parse(wrong)
        assert wrong[0] in capsys.readouterr().err


def test_aims_are_of_figures_that_there_are(tmp_path: Path) -> None:
    """Of some that a run of all sizes has, by the files that pages cite."""
    kept = {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("gpu_*.json")}
    of_default = kept["gpu_serving"]["figures"] | kept["gpu_serving_h"]["figures"]
    assert AIMS["qwen3-30b-a3b"].keys() <= of_default.keys()
    assert AIMS["qwen3-next-80b-a3b"].keys() <= kept["gpu_hybrid"]["figures"].keys()


def step_at(start: float) -> list[Event]:
    """A step of 100 us behind its inputs, 20 of them gaps."""
    kernels = [("_scatter_kernel", 0, 15), ("nvjet_tst_64x8", 20, 45), ("_decode", 60, 90), ("nvjet_lm_head", 85, 100)]
    sent = Event("Memcpy HtoD (Pinned -> Device)", start - 1.5, start - 0.5)
    return [sent, *[Event(name, start + begin, start + end) for name, begin, end in kernels]]


def test_idle_time_is_that_between_steps() -> None:
    events = [event for number in range(7) for event in step_at(number * 125.0)]
    # on its way to the host while the next step runs: it is no part of either
    events.append(Event("Memcpy DtoH (Device -> Pinned)", 3 * 125.0 + 10, 3 * 125.0 + 50))
    found = profiling.idle_of(sorted(events, key=lambda event: event.start))
    # of seven the first may be a part, and the end of the last is not seen; gaps inside a step are not idle
    assert found.steps == 5
    assert found.step_us == pytest.approx(125)
    assert found.share == pytest.approx(25 / 125)


def test_steps_that_touch_have_no_idle_time() -> None:
    # the inputs of each come while the step before it runs
    events = [event for number in range(5) for event in step_at(number * 100.0)[1:]]
    events += [Event("Memcpy HtoD (Pinned -> Device)", number * 100.0 - 0.2, number * 100.0) for number in range(5)]
    assert profiling.idle_of(sorted(events, key=lambda event: event.start)).share == 0


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="0 whole steps"):
        profiling.idle_of([Event("_decode", 0.0, 1.0)])


def test_the_last_steps_of_a_trace_count() -> None:
    slow = [event for number in range(10) for event in step_at(number * 500.0)]
    events = slow + [event for number in range(10) for event in step_at(5000.0 + number * 125.0)]
    assert profiling.idle_of(events, last=8).share == pytest.approx(25 / 125)
    assert profiling.idle_of(events, last=8).steps == 8


def test_a_trace_file_is_read_by_category(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    rows = [
        {"ph": "X", "cat": "kernel", "name": "late", "ts": 20.5, "dur": 2.0, "args": {"stream": 7}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 10.0, "dur": 1.5},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 9.0, "dur": 1.0},
        {"ph": "M", "name": "process_name"},
    ]
    path.write_text(json.dumps({"traceEvents": rows}))
    assert profiling.read_trace(str(path)) == [
        Event("Memcpy HtoD (Pinned -> Device)", 10.0, 11.5),
        Event("late", 20.5, 22.5),
    ]


def test_an_interval_holds_its_ratio_and_shrinks_with_the_spread() -> None:
    base = [100.0, 101.0, 99.0, 100.5, 99.5, 100.2, 99.8, 100.0, 100.1, 99.9]
    middle, low, high = ratio([value * 0.99 for value in base], base)
    assert middle == pytest.approx(0.99)
    assert low == pytest.approx(0.99)
    assert high == pytest.approx(0.99)
    wide = ratio([90.0, 110.0, 100.0, 95.0, 105.0, 91.0, 109.0, 100.0, 96.0, 104.0], base)
    assert wide[1] < 0.97 < wide[0] < 1.03 < wide[2]
