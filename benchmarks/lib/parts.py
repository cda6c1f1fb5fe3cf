"""Parts of a benchmark on a rented machine: one that fails does not lose the others, and nothing waits for the end.

Figures go to the JSON file after every part. Knows nothing of what is measured. Used by the commands of
`benchmarks/gpu` and by `tests/nightly/shapes`.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.lib.report import Report


class Void(Exception):
    """A part ran and did not do what it is there to measure."""


class Parts:
    """Runs parts and keeps what they found.

    Attributes:
        report: that the parts add to.
        failed: name of each part that raised, and what.
    """

    def __init__(self, report: Report, json_path: str | None) -> None:
        self.report = report
        self.failed: dict[str, str] = {}
        self._json_path = json_path
        self._began = time.perf_counter()
        report.conditions["failed"] = self.failed
        report.conditions["seconds"] = {}

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._began:6.1f} s] {text}", file=sys.stderr, flush=True)

    async def run(self, name: str, part: Callable[..., Awaitable[Any]], *values: Any) -> Any:
        """What the part returned, called with these values; None where it raised, which is told and counted. What it
        held is given back."""
        self.say(f"{name}: begins")
        began = time.perf_counter()
        result = None
        try:
            result = await part(*values)
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        self.report.conditions["seconds"][name] = round(time.perf_counter() - began, 2)
        self.say(f"{name}: {'FAILED: ' + self.failed[name] if name in self.failed else 'done'}")
        self.save()
        # an engine's pool and graphs go with it
        gc.collect()
        with suppress(RuntimeError):  # a device that failed fails the next part, too
            torch.cuda.empty_cache()
        return result

    def save(self) -> None:
        """Write what there is."""
        self.report.save(self._json_path)

    def finish(self) -> int:
        """Print the table and write; the exit status: 1 where a part failed."""
        self.report.finish(self._json_path)
        for name, problem in self.failed.items():
            print(f"FAILED {name}: {problem}", file=sys.stderr)
        return 1 if self.failed else 0
