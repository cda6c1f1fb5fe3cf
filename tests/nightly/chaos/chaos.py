"""Chaos with real processes: prefill and decode instances, a router and a steady load, while things go wrong.

    python -m tests.nightly chaos --minutes 10 --seed 7 --transport tcp
    python -m tests.nightly chaos --minutes 10 --seed 7 --hosts      # as root

Processes are killed and stopped (instances, workers, single ranks of groups, stores), links cut, stalled and refused,
instances join and drain. Weights change under the load, by folders and by trainers, which die in the middle of a
broadcast; the fleet falls asleep, and wakes or fails to. All is drawn from a seed, which is printed. With --hosts every
instance and the router live in network namespaces of their own, each on a wire that delays by 2 ms, loses 1 % and is
cut, in both directions or in one; there are no trainers then, whose groups are of one host.
Every request must end once, in time, right by the oracle or with an error that allows another try, or be refused while
weights are broken. Every round ends in quiet, when each instance must have everything back. The program ends with 1 if
a rule was broken, and names it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop
from fdasync_fleet.router.config import RouterConfig
from fdasync_fleet.router.router import Router

from benchmarks.lib.report import Report
from fdasync.request import SamplingParams
from fdasync.testing.harness.leaks import Resources
from tests.nightly.chaos.faults import OF_GROUPS, OF_SLEEPS, Director, slowest_recovery
from tests.nightly.chaos.fleet import LINKS, VOCAB, Fleet, Sizes, versions_of
from tests.nightly.chaos.hosts import NETWORK, Hosts
from tests.nightly.chaos.late import Late, play_late
from tests.nightly.chaos.load import LONG_S, Ask, Load
from tests.nightly.chaos.node import START_S
from tests.nightly.chaos.notes import Notes
from tests.nightly.chaos.proxy import Proxy
from tests.system.network.hosts import NETWORKS, why_not

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.nightly.chaos.versions import Versions

PREFILL, DECODE = 2, 3
# hosts for instances that join, of which one may still be ending
GUESTS = 3
CLIENTS = 14
ROUND_S = 20.0
# kinds of faults that must have been seen to strike where they were played so often
MUST_STRIKE, OFTEN = (*OF_GROUPS, *OF_SLEEPS), 2


class Game:
    """One fleet and one router.

    Attributes:
        wrong: broken rules, in words.
        rounds: that were played.
        sizes: of the instances.
        load, director, notes, versions: None until the fleet is up.
    """

    def __init__(
        self,
        folder: Path,
        transport: str,
        seed: int,
        hosts: Hosts | None = None,
        only: Sequence[str] = (),
        instances: tuple[int, int] = (PREFILL, DECODE),
    ) -> None:
        self._only = only
        self.wrong: list[str] = []
        self.rounds = 0
        self._rng = random.Random(seed)
        self.sizes = Sizes.drawn(self._rng)
        self._fleet = Fleet(folder, transport, *instances, self.sizes, hosts)
        self.load: Load | None = None
        self.director: Director | None = None
        self.notes: Notes | None = None
        self.versions: Versions | None = None

    async def play(self, seconds: float) -> None:
        """Play rounds for so many seconds."""
        fleet = self._fleet
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        try:
            # the loop itself keeps a file open from its first listener on
            first = Proxy()
            await first.open()
            await first.aclose()
            before = Resources.now()
            await fleet.open()
            async with Router(
                fleet.addresses,
                RouterConfig(retries=3, handoff_s=2.0, command_s=8.0),
                links=LINKS,
                keys=fleet.keys,
                seed=1,
            ) as router:
                versions = self.versions = versions_of(fleet.nodes["p0"])
                self.load = Load(router, versions, self._rng, VOCAB)
                self.notes = Notes(self.wrong, self.load.served_at)
                self.director = Director(fleet, router, self._rng, versions, self.notes, self._only)
                # what an instance starts with is no folder's, from now on
                await self.director.weights.mend("the start")
                await self._warm()
                self.director.weights.start()
                await self._meet()
                # of a few kinds each is played, however slow the machine is
                while (loop.time() < until or (self._only and self.director.owes)) and not self.wrong:
                    await self._round(min(ROUND_S, max(until - loop.time(), 5.0)))
                await self.director.weights.aclose()
                await self.director.trainers.aclose()
                self.notes.must_have_struck(MUST_STRIKE, OFTEN)
            await fleet.aclose()
            self.wrong += fleet.wrong
            self.wrong += [f"the harness: {line}" for line in Resources.now().left_since(before)]
        finally:
            fleet.destroy()

    async def _meet(self) -> None:
        """Send a request through each pair of prefill and decode instance, so that all have met, and check the quiet.
        What an instance holds in the first quiet is remembered for comparison."""
        assert self.load is not None
        for first in self._fleet.role("prefill"):
            for last in self._fleet.role("decode"):
                prompt = [self._rng.randrange(VOCAB) for _ in range(30)]
                ask = Ask(prompt, SamplingParams(max_tokens=8, seed=1), "complete", LONG_S, 0.0, True, 0)
                outcome = await self.load.one(ask, prefill=first.address, decoders=[last.address])
                if outcome != "right":
                    self.wrong.append(f"{first.name} and {last.name} have no fault, and a request is {outcome}")
        await self._fleet.check_quiet()
        await self._fleet.remember()
        self._take()

    async def _warm(self) -> None:
        assert self.director is not None
        if self.director.has_trainers:
            await self.director.trainers.warm_all()

    async def _round(self, seconds: float) -> None:
        assert self.load is not None
        assert self.director is not None
        began = asyncio.get_running_loop().time()
        self.load.start(CLIENTS)
        await self.director.play(seconds)
        await self.load.stop()
        await self._fleet.heal()
        await self._fleet.until_up(START_S)
        await self._warm()
        # instances that lost each other dial again once a second
        await asyncio.sleep(2.0)
        await self._meet()
        self.rounds += 1
        outcomes = dict(sorted(self.load.outcomes.items()))
        assert self.notes is not None
        took_s = asyncio.get_running_loop().time() - began
        words = f"round {self.rounds}, {took_s:.0f} s: {outcomes}, faults {len(self.notes.at)}"
        print(f"  {words}", file=sys.stderr, flush=True)

    def _take(self) -> None:
        assert self.load is not None
        self.wrong += self.load.wrong + self._fleet.wrong
        self.load.wrong = []
        self._fleet.wrong = []


def run(
    minutes: float,
    seed: int,
    transport: str,
    json_path: str | None,
    keep: bool,
    hosts: Hosts | None = None,
    only: Sequence[str] = (),
    instances: tuple[int, int] = (PREFILL, DECODE),
) -> int:
    """Play, and report.

    Args:
        only: kinds of faults; (): all kinds, and messages that come too late.
        instances: of each role.
    """
    folder = Path(tempfile.mkdtemp(prefix="fdasync-chaos-"))
    game = Game(folder, transport, seed, hosts, only, instances)
    began = time.monotonic()
    wrong: list[str] = []
    late = Late([])
    try:
        if hosts is None and not only:
            # its scene holds messages back in a proxy
            late = uvloop.run(play_late(folder, transport, seed))
            wrong += late.wrong
        if not wrong:
            uvloop.run(game.play(60 * minutes - (time.monotonic() - began)))
    except Exception as error:
        wrong.append(f"{type(error).__name__}: {error}")
    finally:
        wrong += game.wrong
        if wrong and keep:
            print(f"logs and traces are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    between = f"hosts of a network {NETWORKS[NETWORK]}" if hosts is not None else transport
    report = Report(f"Chaos over {between}, seed {seed}")
    report.conditions |= {"seed": seed, "transport": transport, "instances": list(instances), "wrong": wrong}
    if hosts is not None:
        report.conditions["wire_of_each_host"] = dict(
            zip(("delay_s", "loss", "rate_mbit"), NETWORKS[NETWORK], strict=True)
        )
    report.conditions["sizes"] = msgspec.structs.asdict(game.sizes)
    if hosts is None and not only:
        report.add("late_words_refused", [late.refused])
    report.add("seconds", [time.monotonic() - began])
    report.add("rounds", [game.rounds])
    if game.load is not None and game.notes is not None and game.versions is not None:
        notes = game.notes
        outcomes = game.load.outcomes
        asked = outcomes.total()
        for name, count in sorted(outcomes.items()):
            report.add(f"requests_{name}", [count])
        # requests that their clients did not take back
        served = outcomes["right"] + outcomes["lost"] + outcomes["wrong"]
        report.add("requests", [asked])
        report.add("served_right", [outcomes["right"] / max(served, 1)])
        recovery_s, after = slowest_recovery(notes.at, game.load.served_at)
        report.add("fault_to_success_s_max", [recovery_s])
        report.conditions |= {
            "slowest_after": after, "faults": dict(sorted(notes.played.items())),
            "struck": dict(sorted(notes.struck.items())),
            "timeline": [[round(at - notes.at[0][0], 1), what] for at, what in notes.at][-100:],
            "errors": dict(game.load.errors.most_common(20)),
        }  # fmt: skip
        report.add("faults", [len(notes.at)])
        for name, count in sorted(notes.struck.items()):
            report.add(f"struck: {name}", [count])
        report.add("answers_of_mixed_weights", [game.versions.mixed])
        for name, seconds in sorted(notes.took.items()):
            report.add(name, seconds)
    report.finish(json_path)
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    return 1 if wrong else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, help="default: drawn")
    parser.add_argument("--transport", choices=["shm", "tcp"], default="shm", help="how blocks travel (default shm)")
    parser.add_argument("--hosts", action="store_true", help="each on a host of its own; blocks travel over tcp")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--only", nargs="+", metavar="KIND", default=[], help="kinds of faults (default: all)")
    parser.add_argument(
        "--instances", nargs=2, type=int, metavar=("P", "D"), default=[PREFILL, DECODE],
        help="of each role (default 2 3); an only one of its role has no fault but those of the whole fleet",
    )  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="leave logs and traces of events where something was wrong")
    args = parser.parse_args()
    instances = (args.instances[0], args.instances[1])
    seed = random.randrange(1 << 30) if args.seed is None else args.seed
    if args.hosts and (reason := why_not()):
        parser.error(reason)
    print(f"seed {seed}, transport {args.transport}", file=sys.stderr, flush=True)
    if not args.hosts:
        sys.exit(run(args.minutes, seed, args.transport, args.json, args.keep, None, args.only, instances))
    with Hosts(sum(instances) + GUESTS, seed) as hosts:
        hosts.enter()
        code = run(args.minutes, seed, "tcp", args.json, args.keep, hosts, args.only, instances)
    sys.exit(code)
