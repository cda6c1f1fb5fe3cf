"""What one request crosses: the files of `fdasync` that it enters.

A whole engine with the synthetic runner in its own process serves one request of 40 prompt tokens and 4 output tokens,
alone, with `sys.setprofile` on. The first trip (`files`) goes from the call of `complete` to its return. The second
(`store_files`) has a memory store behind the host tier, and ends when the request's complete blocks are in the store. A
file is entered when one of its functions is called or goes on. The figures are counts: the speed of the machine is not
in them. `tests/test_size.py` holds them against a limit.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

import fdasync
from benchmarks.lib.arguments import parser_of
from benchmarks.lib.report import Report
from fdasync import Engine, EngineConfig, SamplingParams

if TYPE_CHECKING:
    from types import FrameType

PROMPT_TOKENS = 40
NEW_TOKENS = 4
BLOCK_TOKENS = 16
# the last token is never computed
COMPLETE_BLOCKS = (PROMPT_TOKENS + NEW_TOKENS - 1) // BLOCK_TOKENS
STORE_DEADLINE_S = 20.0

AIM_FILES = 24

_HOME = f"{Path(fdasync.__file__).parent}/"


async def trip(*, store: bool) -> list[str]:
    """Serve one request in a new engine; returns the files that were entered, in the order of entry.

    Raises RuntimeError if the request ended early.
    """
    entered: dict[str, None] = {}

    def look(frame: FrameType, event: str, _argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(_HOME):
            entered[file.removeprefix(_HOME)] = None

    config = EngineConfig(
        runner="synthetic",
        runner_config={"num_moe_layers": 2, "vocab_size": 1000, "num_blocks": 64, "block_tokens": BLOCK_TOKENS},
        process="inline",
        store="memory" if store else "",
    )
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    async with Engine(config) as engine:
        sys.setprofile(look)
        try:
            result = await engine.complete(list(range(1, PROMPT_TOKENS + 1)), params)
            async with asyncio.timeout(STORE_DEADLINE_S):
                while store:
                    # looking is no part of the trip
                    sys.setprofile(None)
                    if engine.stats().scheduler.written_blocks == COMPLETE_BLOCKS:
                        break
                    sys.setprofile(look)
                    await asyncio.sleep(0)
        finally:
            sys.setprofile(None)
    if len(result.samples[0].token_ids) != NEW_TOKENS:
        raise RuntimeError(f"the request ended after {len(result.samples[0].token_ids)} tokens")
    return list(entered)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--list", action="store_true", help="name the files in the order of entry")
    args = parser.parse_args()
    report = Report("One request's trip through the package")
    for store in (False, True):
        files = uvloop.run(trip(store=store))
        report.add("store_files" if store else "files", [len(files)], aim=None if store else AIM_FILES)
        if args.list:
            print("\n  ".join(["with a store" if store else "without a store", *files]))
    report.conditions |= {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "block_tokens": BLOCK_TOKENS}
    report.finish(args.json_path)
