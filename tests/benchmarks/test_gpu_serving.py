"""The benchmark of serving on a GPU: rehearsed in Triton's interpreter, and what it makes of times and traces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import _gpu_profile as profiling
from benchmarks._gpu_decode import ratio
from benchmarks._gpu_profile import Event

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_rehearsal_writes_figures_that_make_sense(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.gpu_serving", "--tiny", "--json", str(out)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
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
    assert figures["floor_ms_2"] > figures["floor_ms_1"]
    assert figures["engine_tokens_per_s_2_replies"] > 0
    assert figures["engine_tokens_per_s_2_none"] > 0
    assert "void" in conditions
    assert "errors" not in conditions


def test_without_a_gpu_it_says_so() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu_serving"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "--tiny" in done.stderr
    assert "Traceback" not in done.stderr


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
            "grouped GEMMs of experts": 20,
            "other GEMMs": 20,
            "sort, index, scatter of grouping": 5,
            "element-wise, norms, copies": 5,
            "sampling, staging of rows": 10,
            "idle between steps": 25,
            "gaps inside the step": 20,
        }
    )
    assert found.kernels[0] == pytest.approx(("void cutlass::device_kernel<cutlass::gemm::GroupProblemShape>", 0.16))


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
