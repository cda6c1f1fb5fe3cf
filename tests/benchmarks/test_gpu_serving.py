"""The benchmark of serving on a GPU: rehearsed in Triton's interpreter, and what it makes of times and traces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import children as _gpu_children
from benchmarks.gpu import profile as profiling
from benchmarks.gpu import serving as gpu_serving
from benchmarks.gpu.decode import ratio
from benchmarks.gpu.profile import Event
from benchmarks.gpu.scale import Scale, large, tiny, write_folder
from benchmarks.lib.report import Report

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
        # top 2 of 8: each layer of a step of one has 2, of two no more than 4; 0 would mean that no row came
        assert 2 <= conditions[f"floor_{size}"]["experts_chosen_per_layer"] <= 2 * size
        assert len(conditions[f"floor_{size}"]["experts_chosen_by_layer"]) == 2
        skewed = conditions[f"floor_{size}_skewed"]["experts_chosen_by_layer"]
        assert figures[f"experts_chosen_{size}_skewed"] == pytest.approx(sum(skewed) / 2, abs=0.1)
        assert figures[f"decode_tokens_per_s_{size}_skewed"] > 0
    for way in ("sampled", "top_p"):
        assert figures[f"{way}_over_greedy_2"] > 0
        assert f"{way}_over_greedy_1" not in figures
    assert len(conditions["skew"]["spread_of_logits"]) == 2
    assert max(conditions["skew"]["spread_of_bias_over_tokens"]) < 0.5
    assert figures["floor_ms_2"] > figures["floor_ms_1"]
    assert figures["engine_tokens_per_s_2_replies"] > 0
    assert figures["engine_tokens_per_s_2_none"] > 0
    assert "void" in conditions
    assert "errors" not in conditions
    # aims are of a GPU
    assert conditions["aims"] == {}


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["glm-4.5-air", "deepseek-v2-lite"])
def test_other_models_are_rehearsed(model: str, tmp_path: Path) -> None:
    """Latents, shared experts, a dense layer at the head, and routers of other kinds."""
    report = rehearse(tmp_path / "figures.json", "--model", model, "--only", "d,e")
    assert report["conditions"]["model"] == model
    # top 4 of 16
    assert report["figures"]["experts_chosen_1_skewed"] == 4
    assert 4 <= report["figures"]["experts_chosen_2_skewed"] <= 8
    assert report["figures"]["floor_share_2"] > 0


@pytest.mark.nightly
def test_a_start_is_timed_twice_in_processes_of_its_own(tmp_path: Path) -> None:
    report = rehearse(tmp_path / "figures.json", "--only", "g")
    for name in ("startup_cold_s", "startup_warm_s"):
        parts = report["conditions"][name]
        assert set(parts) == {"import", "open", "bind"}
        assert report["figures"][name] == pytest.approx(sum(parts.values()), abs=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "glm-4.5-air"])
def test_the_library_answers_in_a_process_of_its_own(model: str, tmp_path: Path) -> None:
    scale = tiny(model)
    report = Report("the library")
    problem = _gpu_children.library(scale, report, write_folder(tmp_path, scale), 100.0)
    if "MemoryError" in problem:
        pytest.skip("this build of the library finds no memory on a CPU")
    assert problem == ""
    rate = report.figures["library_new_tokens_per_s"]
    assert report.figures["ours_over_library_cb"] == pytest.approx(100.0 / rate, rel=1e-3)


def test_a_child_that_fails_or_hangs_is_told() -> None:
    assert "exit status 2" in _gpu_children.child(["benchmarks.gpu.startup", "--no-such-option"], 60.0)
    assert "stopped after 0 s" in _gpu_children.child(["benchmarks.gpu.startup", "."], 0.01)


def arguments(*given: str) -> Scale:
    return gpu_serving.scale_of(gpu_serving.parse([*given]))


def test_options_make_a_scale(capsys: pytest.CaptureFixture[str]) -> None:
    assert arguments() == large("qwen3-30b-a3b") == Scale()
    quick = arguments("--model", "deepseek-v2-lite", "--quick", "--sizes", "64,1", "--skew", "0.5")
    assert quick.config["model_type"] == "deepseek_v2"
    assert (quick.sizes, quick.skew, quick.pairs, quick.side_pairs) == ((1, 64), 0.5, 3, 2)
    assert arguments("--pairs", "2").side_pairs == 2
    assert arguments("--tiny", "--model", "glm-4.5-air").device == "cpu"
    assert gpu_serving.parse(["--startup"]).parts == set("abcdefg")
    assert gpu_serving.parse([]).parts == set("abcdef")
    for wrong in (["--only", "i"], ["--model", "gpt-5"], ["--only", ""]):
        with pytest.raises(SystemExit):
            gpu_serving.parse(wrong)
        assert wrong[0] in capsys.readouterr().err


def test_aims_are_of_the_default_model_on_a_gpu() -> None:
    figures = {"floor_share_64": 0.86, "idle_share_depth2": 0.02, "startup_warm_s": 18.0, "step_ms_64": 18.0}
    found = gpu_serving.aims_of(large("qwen3-30b-a3b"), figures)
    assert {name: one["met"] for name, one in found.items()} == {
        "floor_share_64": True,
        "idle_share_depth2": False,
        "startup_warm_s": True,
    }
    assert gpu_serving.aims_of(large("glm-4.5-air"), figures) == {}
    assert gpu_serving.aims_of(tiny(), figures) == {}


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_serving"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--tiny"):
        gpu_serving.main()


def step_at(start: float) -> list[Event]:
    """A step of 100 us behind its inputs: 20 of gaps, and kernels of every group."""
    kernels = [
        ("_scatter_kernel", 0, 5),
        ("void at::native::vectorized_elementwise_kernel<4>", 5, 10),
        ("void at::native::index_elementwise_kernel", 10, 15),
        ("nvjet_tst_64x8", 20, 30),
        ("_decode", 30, 40),
        ("_route_kernel", 40, 45),
        ("void cutlass::device_kernel<cutlass::gemm::GroupProblemShape>", 60, 80),
        ("nvjet_lm_head", 80, 90),
        ("void at::native::reduce_kernel<argmax>", 90, 98),
        ("_scatter_kernel", 98, 100),
    ]
    sent = Event("Memcpy HtoD (Pinned -> Device)", start - 1.5, start - 0.5)
    return [sent, *[Event(name, start + begin, start + end) for name, begin, end in kernels]]


def test_a_trace_is_divided_into_groups_that_add_up() -> None:
    events = [event for number in range(7) for event in step_at(number * 125.0)]
    # on its way to the host while the next step runs: it is no part of either
    events.append(Event("Memcpy DtoH (Device -> Pinned)", 3 * 125.0 + 10, 3 * 125.0 + 50))
    found = profiling.break_down(sorted(events, key=lambda event: event.start))
    # of seven the first may be a part, and the end of the last is not seen
    assert found.steps == 5
    assert found.step_us == pytest.approx(125)
    assert found.idle_us == pytest.approx(25)
    assert sum(found.shares.values()) == pytest.approx(1)
    microseconds = {name: share * 125 for name, share in found.shares.items()}
    assert microseconds == pytest.approx(
        {
            "tables and layout": 5,
            "attention": 10,
            "router and capture": 5,
            "products of experts": 20,
            "grouping and sum of experts": 0,
            "fused norms, rotary, activations": 0,
            "other products": 20,
            "sort, index, scatter": 5,
            "element-wise, norms, copies": 5,
            "sampling, staging of rows": 10,
            "idle between steps": 25,
            "gaps inside the step": 20,
        }
    )
    # the table by kernel: all of the step but gaps and idle time
    assert found.launches == 10
    rows = {kernel.name: kernel for kernel in found.kernels}
    assert found.kernels[0].name == "void cutlass::device_kernel<cutlass::gemm::GroupProblemShape>"
    assert found.kernels[0].us == pytest.approx(20)
    assert found.kernels[0].share == pytest.approx(0.16)
    assert rows["_scatter_kernel"].launches == 2
    assert rows["_scatter_kernel"].us == pytest.approx(7)
    # 5 us of it are at the head of the step, 2 behind the logits
    assert rows["_scatter_kernel"].group == "tables and layout"
    assert sum(kernel.us for kernel in found.kernels) == pytest.approx(80)
    table = profiling.table_of(found)
    assert [row["name"] for row in table] == [kernel.name for kernel in found.kernels]
    assert table[0] == {
        "name": found.kernels[0].name,
        "group": "products of experts",
        "launches": 1.0,
        "us": 20.0,
        "share": 0.16,
    }


def test_the_smallest_kernels_are_one_row() -> None:
    def step(start: float) -> list[Event]:
        sent = Event("Memcpy HtoD (Pinned -> Device)", start - 1, start)
        return [sent, *[Event(f"kernel {number}", start + number, start + number + 1) for number in range(70)]]

    found = profiling.break_down([event for number in range(5) for event in step(number * 100.0)])
    table = profiling.table_of(found)
    assert len(table) == 61
    assert table[-1] == {"name": "10 others", "group": "", "launches": 10.0, "us": 10.0, "share": 0.1}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("experts_group", "grouping and sum of experts"),
        ("experts_combine", "grouping and sum of experts"),
        ("experts_gate_up", "products of experts"),
        ("experts_down", "products of experts"),
        ("experts_group_place", "grouping and sum of experts"),
        ("experts_down_many", "products of experts"),
        ("_finish", "fused norms, rotary, activations"),
        ("_prepare", "fused norms, rotary, activations"),
        ("_norm_kernel", "fused norms, rotary, activations"),
        ("_rotate_kernel", "fused norms, rotary, activations"),
        ("_gate_kernel", "fused norms, rotary, activations"),
        ("_angles_kernel", "fused norms, rotary, activations"),
        ("_product_kernel", "router and capture"),
        ("route_kernel", "router and capture"),
        ("_latents", "attention"),
        ("_join_latents", "attention"),
        ("latents_hopper", "attention"),
        ("_decode", "attention"),
        ("join_splits", "attention"),
        ("_prefill_hopper", "attention"),
        ("masses_kernel", "sampling, staging of rows"),
        ("slow_cut_kernel", "sampling, staging of rows"),
        ("bounds_kernel", "sampling, staging of rows"),
        ("_best_rows_kernel", "sampling, staging of rows"),
        ("nvjet_sm90_tst_64x8", "other products"),
        ("void at::native::radixSortKVInPlace", "sort, index, scatter"),
        ("void at::native::vectorized_elementwise_kernel<4>", "element-wise, norms, copies"),
    ],
)
def test_kernels_are_known_by_their_names(name: str, group: str) -> None:
    def step(start: float) -> list[Event]:
        # a product behind it, so that it is not taken for sampling
        kernels = [Event(name, start, start + 10), Event("nvjet_head", start + 10, start + 20)]
        return [Event("Memcpy HtoD (Pinned -> Device)", start - 1, start), *kernels]

    found = profiling.break_down([event for number in range(5) for event in step(number * 20.0)])
    assert found.kernels[0].group == group or found.kernels[1].group == group
    assert found.shares[group] == pytest.approx(0.5 if group != "other products" else 1.0)


def test_steps_that_touch_have_no_idle_time() -> None:
    # the inputs of each come while the step before it runs
    events = [event for number in range(5) for event in step_at(number * 100.0)[1:]]
    events += [Event("Memcpy HtoD (Pinned -> Device)", number * 100.0 - 0.2, number * 100.0) for number in range(5)]
    found = profiling.break_down(sorted(events, key=lambda event: event.start))
    assert found.shares["idle between steps"] == 0
    assert found.shares["gaps inside the step"] == pytest.approx(0.2)


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="0 whole steps"):
        profiling.break_down([Event("_decode", 0.0, 1.0)])


def test_the_last_steps_of_a_trace_count() -> None:
    slow = [event for number in range(10) for event in step_at(number * 500.0)]
    events = slow + [event for number in range(10) for event in step_at(5000.0 + number * 125.0)]
    assert profiling.break_down(events, last=8).idle_us == pytest.approx(25)
    assert profiling.break_down(events, last=8).steps == 8


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
