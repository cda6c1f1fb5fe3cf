"""What every benchmark shares: a table, and one JSON object {"figures": ..., "conditions": ...}.

The conditions say of each run the machine and its GPU, the versions of what it used, the spread of each figure
(`NAME_spread`), and how fast a fixed loop was when the run began and when it ended (`calibration_us`).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.lib.arguments import need_gpus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REHEARSED = "a rehearsal on a CPU: no figure says anything of a GPU"


class Report:
    """The figures of one run.

    Attributes:
        title: of the table.
        figures: medians by name.
        conditions: facts about the run and the machine, and the spread of each figure.

    Args:
        aims: by name, of figures that there may be; `add` takes them too.
        gpus: that the run needs; where there are fewer it is refused, and told to take the option `without`.
    """

    def __init__(
        self, title: str, aims: Mapping[str, float] | None = None, *, gpus: int = 0, without: str = "--device cpu"
    ) -> None:
        self.title = title
        self.figures: dict[str, float] = {}
        self._aims = dict(aims or {})
        self.conditions: dict[str, Any] = {
            "python": platform.python_version(),
            "cpus": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
            "gpu": _gpu(gpus, without),
            "versions": versions(),
            "calibration_us": [calibrate_us()],
        }

    def add(self, name: str, values: Sequence[float], *, aim: float | None = None) -> float:
        """The median of these values under a name; the spread goes to the conditions."""
        figure = statistics.median(values)
        self.figures[name] = short(figure)
        self.conditions[f"{name}_spread"] = [short(min(values)), short(max(values)), len(values)]
        if aim is not None:
            self._aims[name] = aim
        print(f"  {name} = {figure:.4g}", file=sys.stderr, flush=True)
        return figure

    def finish(self, json_path: str | None) -> int:
        """Print the table; write the object. The exit status: 1 where the conditions say why the figures are void."""
        self.conditions["calibration_us"].append(calibrate_us())
        table = Table(title=self.title)
        for column in ("figure", "median", "min", "max", "runs", "aim"):
            table.add_column(column, justify="left" if column == "figure" else "right")
        for name, value in self.figures.items():
            low, high, runs = self.conditions.get(f"{name}_spread", [value, value, 1])
            aim = self._aims.get(name)
            table.add_row(name, f"{value:g}", f"{low:g}", f"{high:g}", str(runs), "" if aim is None else f"{aim:g}")
        Console().print(table)
        self.save(json_path)
        if void := self.conditions.get("void"):
            print(f"void: {void}", file=sys.stderr)
        return 1 if void else 0

    def save(self, json_path: str | None) -> None:
        """Write the object as it is so far."""
        if json_path:
            text = json.dumps({"figures": self.figures, "conditions": self.conditions}, indent=2)
            Path(json_path).write_text(text + "\n")


def _gpu(count: int, without: str) -> str:
    if not count:
        return "none"
    need_gpus(count, without)
    import torch

    return torch.cuda.get_device_name()


def short(value: float) -> float:
    """Six digits, not six places: a rehearsal moves some kilobytes a second."""
    return float(f"{value:.6g}")


def versions() -> dict[str, str]:
    """Of what the figures depend on, where it is installed."""
    found = {}
    for name in ("numpy", "torch", "triton", "transformers", "msgspec", "uvloop", "pyzmq"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def calibrate_us() -> float:
    """CPU microseconds of a fixed pure-Python loop: how fast this machine is right now."""
    best = []
    for _ in range(5):
        started = time.process_time()
        total = 0
        box = {}
        for number in range(20_000):
            total += number & 7
            box[number & 255] = total
        best.append((time.process_time() - started) * 1e6)
    return round(statistics.median(best), 1)
