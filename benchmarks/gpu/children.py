"""The parts of `gpu_serving` that have processes of their own: the library's engine, and start-up.

Each child writes JSON, so one that fails or is stopped leaves what it had. Knows no models. Called by `serving.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.gpu.scale import Scale
    from benchmarks.lib.report import Report

# of the library's process: loading, and three rounds of a few seconds each
_LIBRARY_LIMIT_S = 120.0
# of one start with no compiled kernels
_STARTUP_LIMIT_S = 180.0


def child(command: list[str], limit_s: float, environment: Mapping[str, str] | None = None) -> str:
    """Run a module of this repository in a new process; what went wrong, or ""."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            stderr=subprocess.PIPE,
            text=True,
            timeout=limit_s,
            check=False,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired as error:
        # bytes, whatever was asked for
        text = bytes(error.stderr or b"").decode(errors="replace")
        return f"stopped after {error.timeout:.0f} s: {text[-1500:]}"
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return f"exit status {done.returncode}: {done.stderr[-3000:]}" if done.returncode else ""


def _arguments(scale: Scale) -> list[str]:
    return ["--model", scale.model, *(["--tiny"] if scale.device == "cpu" else [])]


def library(scale: Scale, report: Report, folder: str, ours: float | None) -> str:
    """The library's continuous batching; figures, and what went wrong, or "", which is a condition and no error."""
    requests, new_tokens = scale.library
    out = Path(folder) / "library.json"
    command = ["benchmarks.gpu.library", folder, str(requests), str(new_tokens), str(out), *_arguments(scale)]
    problem = child(command, _LIBRARY_LIMIT_S)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"rates": [], "notes": {}}
    report.conditions["library"] = {**found["notes"], "rates": [round(rate, 1) for rate in found["rates"]]}
    if problem:
        report.conditions["library"]["problem"] = problem
    rates = found["rates"][1:] or found["rates"]
    if rates:
        theirs = report.add("library_new_tokens_per_s", rates)
        if ours is not None:
            report.add("ours_over_library_cb", [ours / theirs])
    return problem


def startup(scale: Scale, report: Report, folder: str) -> None:
    """Two starts in fresh processes over one cache of compiled kernels, empty for the first.

    Raises RuntimeError where one fails.
    """
    cache = Path(folder) / "compiled"
    for name in ("cold", "warm"):
        out = Path(folder) / f"startup_{name}.json"
        command = ["benchmarks.gpu.startup", folder, str(out), *_arguments(scale)]
        problem = child(command, _STARTUP_LIMIT_S, {"TRITON_CACHE_DIR": str(cache)})
        if problem:
            raise RuntimeError(f"the {name} start: {problem}")
        seconds: dict[str, float] = json.loads(out.read_text())
        figure = f"startup_{name}_s"
        report.add(figure, [sum(seconds.values())], aim=scale.aim(figure))
        report.conditions[figure] = {part: round(value, 2) for part, value in seconds.items()}
    report.conditions["startup_compiled_files"] = sum(1 for path in cache.rglob("*") if path.is_file())
