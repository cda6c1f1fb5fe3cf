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

from benchmarks.lib.arguments import above_zero, at_least_one, parser_of
from benchmarks.lib.report import Report
from fdasync.request import SamplingParams
from fdasync.testing.harness.leaks import Resources
from tests.nightly.chaos.faults import OF_GROUPS, OF_SLEEPS, Director, slowest_recovery
from tests.nightly.chaos.fleet import LINKS, VOCAB, Fleet, Sizes, versions_of
from tests.nightly.chaos.hosts import NETWORK, Hosts
from tests.nightly.chaos.late import play_late
from tests.nightly.chaos.load import LONG_S, Ask, Load
from tests.nightly.chaos.node import START_S
from tests.nightly.chaos.notes import Notes, Stage
from tests.nightly.chaos.proxy import Proxy
from tests.system.network.hosts import NETWORKS, why_not

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

PREFILL, DECODE = 2, 3
# hosts for instances that join, of which one may still be ending
GUESTS = 3
CLIENTS = 14
ROUND_S = 20.0
# kinds of faults that must have been seen to strike where they were played so often
MUST_STRIKE, OFTEN = (*OF_GROUPS, *OF_SLEEPS), 2


class Game:
    """One fleet and one router.

    Args:
        args: of the command line.

    Attributes:
        wrong: broken rules, in words.
        rounds: that were played.
        is_up: the fleet was up, and the following are there.
        load, director, stage: who asks, who makes faults, and what they act on.
    """

    load: Load
    director: Director
    stage: Stage

    def __init__(self, args: argparse.Namespace, folder: Path, seed: int, transport: str, hosts: Hosts | None) -> None:
        self.wrong: list[str] = []
        self.rounds = 0
        self.is_up = False
        self._only: Sequence[str] = args.only
        self._least_faults: int = args.faults
        self._rng = random.Random(seed)
        self._sizes = Sizes.drawn(self._rng)
        prefill, decode = args.instances
        self._fleet = Fleet(folder, transport, prefill, decode, self._sizes, hosts)

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
            config = RouterConfig(retries=3, handoff_s=2.0, command_s=8.0)
            async with Router(fleet.addresses, config, links=LINKS, keys=fleet.keys, seed=1) as router:
                versions = versions_of(fleet.nodes["p0"])
                self.load = Load(router, versions, self._rng, VOCAB)
                notes = Notes(self.wrong, self.load.served_at)
                self.stage = Stage(fleet, router, self._rng, versions, notes)
                self.director = Director(self.stage, self._only)
                self.is_up = True
                # what an instance starts with is no folder's, from now on
                await self.director.weights.mend("the start")
                await self._warm()
                self.director.weights.start()
                await self._meet()
                while (loop.time() < until or self._owes) and not self.wrong:
                    # what is owed is played however slow the machine is
                    await self._round(ROUND_S if self._owes else min(ROUND_S, max(until - loop.time(), 5.0)))
                await self.director.weights.aclose()
                await self.director.trainers.aclose()
                notes.must_have_struck(MUST_STRIKE, OFTEN)
            await fleet.aclose()
            self.wrong += fleet.wrong
            self.wrong += [f"the harness: {line}" for line in Resources.now().left_since(before)]
        finally:
            fleet.destroy()

    @property
    def _owes(self) -> bool:
        """Too few faults were played, or of a few kinds not each."""
        return len(self.stage.notes.at) < self._least_faults or (bool(self._only) and self.director.owes)

    async def _meet(self) -> None:
        """Send a request through each pair of prefill and decode instance, so that all have met, and check the quiet.
        What an instance holds in the first quiet is remembered for comparison."""
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
        if self.director.has_trainers:
            await self.director.trainers.warm_all()

    async def _round(self, seconds: float) -> None:
        began, before = asyncio.get_running_loop().time(), len(self.stage.notes.at)
        self.load.start(CLIENTS)
        await self.director.play(seconds)
        if len(self.stage.notes.at) == before and self._owes:
            self.wrong.append(f"no fault fitted this fleet for {seconds:g} s")
        await self.load.stop()
        await self._fleet.heal()
        await self._fleet.until_up(START_S)
        await self._warm()
        # instances that lost each other dial again once a second
        await asyncio.sleep(2.0)
        await self._meet()
        self.rounds += 1
        took_s = asyncio.get_running_loop().time() - began
        words = f"{dict(sorted(self.load.outcomes.items()))}, faults {len(self.stage.notes.at)}"
        print(f"  round {self.rounds}, {took_s:.0f} s: {words}", file=sys.stderr, flush=True)

    def _take(self) -> None:
        self.wrong += self.load.wrong + self._fleet.wrong
        self.load.wrong = []
        self._fleet.wrong = []

    def report(self, report: Report) -> None:
        """What was asked, what went wrong meanwhile, and what came of it."""
        report.add("rounds", [self.rounds])
        report.conditions["sizes"] = msgspec.structs.asdict(self._sizes)
        if not self.is_up:
            return
        notes, outcomes = self.stage.notes, self.load.outcomes
        for name, count in sorted(outcomes.items()):
            report.add(f"requests_{name}", [count])
        # requests that their clients did not take back
        served = outcomes["right"] + outcomes["lost"] + outcomes["wrong"]
        report.add("requests", [outcomes.total()])
        report.add("served_right", [outcomes["right"] / max(served, 1)])
        recovery_s, after = slowest_recovery(notes.at, self.load.served_at)
        report.add("fault_to_success_s_max", [recovery_s])
        report.conditions |= {
            "slowest_after": after, "faults": dict(sorted(notes.played.items())),
            "timeline": [[round(at - notes.at[0][0], 1), what] for at, what in notes.at][-100:],
            "errors": dict(self.load.errors.most_common(20)),
        }  # fmt: skip
        report.add("faults", [len(notes.at)])
        for name, count in sorted(notes.struck.items()):
            report.add(f"struck: {name}", [count])
        report.add("answers_of_mixed_weights", [self.stage.versions.mixed])
        for name, seconds in sorted(notes.took.items()):
            report.add(name, seconds)


def run(args: argparse.Namespace, seed: int, transport: str, hosts: Hosts | None) -> int:
    """Play, and report; the exit status."""
    folder = Path(tempfile.mkdtemp(prefix="fdasync-chaos-"))
    game = Game(args, folder, seed, transport, hosts)
    between = transport if hosts is None else f"hosts of a network {NETWORKS[NETWORK]}"
    report = Report(f"Chaos over {between}, seed {seed}")
    began = time.monotonic()
    wrong: list[str] = []
    try:
        if hosts is None and not args.only:
            # its scene holds messages back in a proxy
            refused, wrong = uvloop.run(play_late(folder, transport, seed))
            report.add("late_words_refused", [refused])
        if not wrong:
            uvloop.run(game.play(60 * args.minutes - (time.monotonic() - began)))
    except Exception as error:
        wrong.append(f"{type(error).__name__}: {error}")
    finally:
        wrong += game.wrong
        if wrong and args.keep:
            print(f"logs and traces are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    report.conditions |= {"seed": seed, "transport": transport, "instances": args.instances, "wrong": wrong}
    if hosts is not None:
        report.conditions["wire_of_each_host"] = dict(
            zip(("delay_s", "loss", "rate_mbit"), NETWORKS[NETWORK], strict=True)
        )
    report.add("seconds", [time.monotonic() - began])
    game.report(report)
    report.finish(args.json_path)
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    return 1 if wrong else 0


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=above_zero, default=5.0)
    parser.add_argument("--faults", type=at_least_one, default=1, help="as many at least, however long it takes")
    parser.add_argument("--seed", type=int, help="default: drawn")
    parser.add_argument("--transport", choices=["shm", "tcp"], default="shm", help="how blocks travel")
    parser.add_argument("--hosts", action="store_true", help="each on a host of its own; blocks travel over tcp")
    parser.add_argument("--only", nargs="+", metavar="KIND", default=[], help="kinds of faults")
    parser.add_argument(
        "--instances", nargs=2, type=at_least_one, metavar=("P", "D"), default=[PREFILL, DECODE],
        help="of each role (default 2 3); an only one of its role has no fault but those of the whole fleet",
    )  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="leave logs and traces of events where something was wrong")
    args = parser.parse_args()
    seed = random.randrange(1 << 30) if args.seed is None else args.seed
    if args.hosts and (reason := why_not()):
        parser.error(reason)
    print(f"seed {seed}, transport {args.transport}", file=sys.stderr, flush=True)
    if not args.hosts:
        return run(args, seed, args.transport, None)
    with Hosts(sum(args.instances) + GUESTS, seed) as hosts:
        hosts.enter()
        return run(args, seed, "tcp", hosts)
