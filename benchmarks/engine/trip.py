"""What one request crosses, and one new label of the weights: the files of the packages that it enters.

A whole engine with the synthetic runner in its own process serves one request of 40 prompt tokens and 4 output tokens,
alone, with `sys.setprofile` on. The first trip (`files`) goes from the call of `complete` to its return. The second
(`store_files`) has a memory store behind the host tier, and ends when the request's complete blocks are in the store.
The third (`label_files`) is `router.set_weight_version` over one instance in the same process, on a simulated network
in virtual time, whose own files do not count. A file is entered when one of its functions is called or goes on. The
figures are counts: the speed of the machine is not in them. `tests/test_size.py` holds them against a limit.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import fdasync_fleet
import uvloop
from fdasync_fleet.instance.instance import Instance
from fdasync_fleet.router.router import Router
from fdasync_fleet.testing.sim.network import NetworkConditions, SimNetwork
from fdasync_fleet.testing.sim.transport import SimFabric, SimFaults, SimTransport

import fdasync
from benchmarks.lib.arguments import parser_of
from benchmarks.lib.report import Report
from fdasync import Engine, EngineConfig, SamplingParams
from fdasync.testing.sim.loop import run_sim

if TYPE_CHECKING:
    from types import FrameType

PROMPT_TOKENS = 40
NEW_TOKENS = 4
BLOCK_TOKENS = 16
# the last token is never computed
COMPLETE_BLOCKS = (PROMPT_TOKENS + NEW_TOKENS - 1) // BLOCK_TOKENS
STORE_DEADLINE_S = 20.0

AIMS = {"files": 24, "label_files": 15}

_HOMES = tuple([f"{Path(package.__file__ or '').parent}/" for package in (fdasync, fdasync_fleet)])


class Look:
    """Notes the files of the packages that are entered, in the order of entry."""

    def __init__(self) -> None:
        self.entered: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        file = frame.f_code.co_filename
        home = next((home for home in _HOMES if file.startswith(home)), None)
        if event == "call" and home is not None and not file.removeprefix(home).startswith("testing/"):
            self.entered[file.removeprefix(home)] = None


async def trip(*, store: bool) -> list[str]:
    """Serve one request in a new engine; returns the files that were entered, in the order of entry.

    Raises RuntimeError if the request ended early.
    """
    look = Look()
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
    return list(look.entered)


async def label() -> list[str]:
    """Give the weights of a router's only instance another label; returns the files that were entered."""
    look = Look()
    network = SimNetwork(Random(1), NetworkConditions())
    config = EngineConfig(runner="synthetic", runner_config={"num_blocks": 64}, process="inline", role="mixed")
    transports = [SimTransport(SimFabric(Random(1), SimFaults()))]
    instance = Instance(config, listen="ipc://m0", wire=network.wire("m0"), transports=transports)
    async with instance, Router(["ipc://m0"], wire=network.wire("router"), seed=1) as router:
        sys.setprofile(look)
        try:
            await router.set_weight_version("new")
        finally:
            sys.setprofile(None)
        if instance.engine.facts().weight_version != "new":
            raise RuntimeError("the instance has another label")
    return list(look.entered)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--list", action="store_true", help="name the files in the order of entry")
    args = parser.parse_args()
    report = Report("One request's trip through the package")
    trips = {
        "files": ("without a store", uvloop.run(trip(store=False))),
        "store_files": ("with a store", uvloop.run(trip(store=True))),
        "label_files": ("a label", run_sim(label())),
    }
    for name, (words, files) in trips.items():
        report.add(name, [len(files)], aim=AIMS.get(name))
        if args.list:
            print("\n  ".join([words, *files]))
    report.conditions |= {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "block_tokens": BLOCK_TOKENS}
    report.finish(args.json_path)
