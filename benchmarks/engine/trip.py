"""What one request crosses: the files of `fdasync` that it enters, their functions, and how often the file changes.

A whole engine with the synthetic runner in its own process serves one request of 40 prompt tokens and 4 output tokens,
alone, with `sys.setprofile` on. The first trip goes from the call of `complete` to its return. The second has a memory
store behind the host tier, and ends when the request's complete blocks are in the store. A function is entered when it
is called and when a coroutine goes on; the file changes when a function of another file is entered and when control
comes back from it. The figures are counts: the speed of the machine is not in them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

import fdasync
from benchmarks.lib.report import Report
from fdasync import Engine, EngineConfig, SamplingParams

if TYPE_CHECKING:
    from types import CodeType, FrameType

PROMPT_TOKENS = 40
NEW_TOKENS = 4
BLOCK_TOKENS = 16
# the last token is never computed
COMPLETE_BLOCKS = (PROMPT_TOKENS + NEW_TOKENS - 1) // BLOCK_TOKENS
STORE_DEADLINE_S = 20.0

AIM_FILES = 24

_HOME = f"{Path(fdasync.__file__).parent}/"


class Tracer:
    """Counts the files and functions of the package that are entered while it is on.

    Attributes:
        files: paths in the package, in the order in which they were first entered, and the names of their functions
            that were.
        changes: of the file that control is in.
    """

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {}
        self.changes = 0
        self._last = ""

    def start(self) -> None:
        sys.setprofile(self._on_event)

    def stop(self) -> None:
        sys.setprofile(None)

    @property
    def functions(self) -> int:
        """The number of functions that were entered."""
        return sum(len(names) for names in self.files.values())

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            self._is_in(frame.f_code, entered=True)
        elif event == "return" and frame.f_back is not None and _is_ours(frame.f_code):
            self._is_in(frame.f_back.f_code, entered=False)

    def _is_in(self, code: CodeType, *, entered: bool) -> None:
        if not _is_ours(code):
            return
        file = code.co_filename.removeprefix(_HOME)
        if entered:
            self.files.setdefault(file, set()).add(f"{code.co_qualname}:{code.co_firstlineno}")
        if file != self._last:
            self._last = file
            self.changes += 1


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_HOME)


async def trip(*, store: bool) -> Tracer:
    """Serve one request in a new engine. Raises RuntimeError if the request ended early."""
    config = EngineConfig(
        runner="synthetic",
        runner_config={"num_moe_layers": 2, "vocab_size": 1000, "num_blocks": 64, "block_tokens": BLOCK_TOKENS},
        process="inline",
        store="memory" if store else "",
    )
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    tracer = Tracer()
    async with Engine(config) as engine:
        tracer.start()
        try:
            result = await engine.complete(list(range(1, PROMPT_TOKENS + 1)), params)
            if store:
                await _stored(engine, tracer)
        finally:
            tracer.stop()
    if len(result.samples[0].token_ids) != NEW_TOKENS:
        raise RuntimeError(f"the request ended after {len(result.samples[0].token_ids)} tokens")
    return tracer


async def _stored(engine: Engine, tracer: Tracer) -> None:
    async with asyncio.timeout(STORE_DEADLINE_S):
        while True:
            # looking is no part of the trip
            tracer.stop()
            written = engine.stats().scheduler.written_blocks
            tracer.start()
            if written == COMPLETE_BLOCKS:
                return
            await asyncio.sleep(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--store", action="store_true", help="the trip with a store only")
    parser.add_argument("--list", action="store_true", help="name the files in the order of entry, and their functions")
    args = parser.parse_args()
    report = Report("One request's trip through the package")
    for store in (True,) if args.store else (False, True):
        tracer = uvloop.run(trip(store=store))
        name = "store_" if store else ""
        report.add(f"{name}files", [len(tracer.files)], aim=None if store else AIM_FILES)
        report.add(f"{name}functions", [tracer.functions])
        report.add(f"{name}changes", [tracer.changes])
        if args.list:
            print("with a store" if store else "without a store")
            for file, functions in tracer.files.items():
                names = sorted(name.rpartition(":")[0] for name in functions)
                print(f"  {file}: {', '.join(names)}")
    report.conditions |= {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "block_tokens": BLOCK_TOKENS}
    report.finish(args.json)
