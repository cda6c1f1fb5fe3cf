"""Parts of a benchmark on a rented machine: one that fails does not lose the others, and nothing waits for the end.

Figures go to the JSON file after every part. Knows nothing of what is measured. Used by `exact.py` and by
`tests/nightly/shapes`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.lib.report import Report


class Void(Exception):
    """A part ran and did not do what it is there to measure."""


class Parts:
    """Runs parts and keeps what they found.

    Attributes:
        failed: name of each part that raised, and what.
    """

    def __init__(self, report: Report, json_path: str | None) -> None:
        self.failed: dict[str, str] = {}
        self._report = report
        self._json_path = json_path
        self._began = time.perf_counter()
        report.conditions["failed"] = self.failed
        report.conditions["seconds"] = {}

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._began:6.1f} s] {text}", file=sys.stderr, flush=True)

    async def run(self, name: str, part: Callable[[], Awaitable[Any]]) -> Any:
        """What the part returned; None where it raised, which is told and counted."""
        self.say(f"{name}: begins")
        began = time.perf_counter()
        result = None
        try:
            result = await part()
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        self._report.conditions["seconds"][name] = round(time.perf_counter() - began, 2)
        self.say(f"{name}: {'FAILED: ' + self.failed[name] if name in self.failed else 'done'}")
        self.save()
        return result

    def save(self) -> None:
        """Write what there is, whole or not at all."""
        if self._json_path:
            report = {"figures": self._report.figures, "conditions": self._report.conditions}
            partial = Path(f"{self._json_path}.partial")
            partial.write_text(json.dumps(report, indent=2) + "\n")
            os.replace(partial, self._json_path)

    def finish(self) -> int:
        """Print the table and write; the exit status: 1 where a part failed."""
        self._report.finish(self._json_path)
        for name, problem in self.failed.items():
            print(f"FAILED {name}: {problem}", file=sys.stderr)
        return 1 if self.failed else 0


def describe_device(report: Report, device: str) -> None:
    """Versions and the device's name into the conditions. Raises SystemExit for CUDA where there is none."""
    import torch
    import transformers
    import triton

    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise SystemExit("this benchmark needs a CUDA GPU, and torch sees none (--device cpu is a rehearsal)")
        report.conditions["gpu"] = torch.cuda.get_device_name(torch.device(device))
    report.conditions.update(
        device=device, torch=torch.__version__, triton=triton.__version__, transformers=transformers.__version__
    )
