"""Runs, for each mutant, the tests that run its line, until one fails that passes without it."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from statistics import median
from threading import Lock
from typing import TYPE_CHECKING, Literal

import msgspec

from tests.mutants.mutant import Mutant, NotFound
from tests.mutants.trial import Outcome, Tree, file_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.mutants.map import Map, Reached

#: how many tests the first runs have: of those near the source, and of the others
_FIRST_NEAR = 30
_FIRST_FAR = 200
_UNKNOWN_S = 0.1


class Result(msgspec.Struct, kw_only=True):
    """
    Attributes:
        state: "uncovered": it survived, and no test of the ring is known to run the line; "lost": its text is not in
            the tree.
        test: the test that killed it, or "" where pytest did not begin; `how` it ended.
        num_run: tests that ended with it in place.
        seconds: wall time, the confirming run included.
        num_left: tests that run the line and were not tried: they are beyond the budget.
        broken: tests that failed, and without the mutant as well: they were left out.
    """

    mutant: Mutant
    state: Literal["killed", "survived", "uncovered", "lost"]
    test: str = ""
    how: str = ""
    num_run: int = 0
    num_left: int = 0
    seconds: float = 0.0
    broken: list[str] = []


class Ring(msgspec.Struct):
    """The results of one ring: the expression of marks that chose its tests, and each mutant that was run."""

    marks: str
    results: list[Result] = []


class Run:
    """What the trials of one ring share.

    Args:
        tests: ids of the ring's tests.
        costs_s: CPU seconds of each as they were recorded; of others the median stands for it.
        budget_s: CPU seconds of tests, as recorded, that are spent on one mutant.
    """

    def __init__(self, map_: Map, tests: Iterable[str], costs_s: dict[str, float], budget_s: float = math.inf) -> None:
        self._budget_s = budget_s
        unknown_s = median(costs_s.values()) if costs_s else _UNKNOWN_S
        self._map = map_
        self._costs_s = {test: costs_s.get(test, unknown_s) for test in tests}
        # without a mutant, in a copy of the tree
        self._passing: set[str] = set()
        self._broken: set[str] = set()
        self._reading = Lock()

    def try_mutant(self, tree: Tree, mutant: Mutant) -> Result:
        """Run the tests that run its line; the tree is as it was afterwards."""
        began = time.monotonic()
        source = (tree.path / mutant.path).read_text()
        try:
            line = mutant.find(source)
        except NotFound:
            return Result(mutant=mutant, state="lost")
        with self._reading:
            reached = self._map.reached(mutant.path, source, line)
        result = Result(mutant=mutant, state="survived" if reached.direct & self._costs_s.keys() else "uncovered")
        spent_s = 0.0
        for batch in batches(mutant.path, reached, self._costs_s):
            left = set(batch) - self._broken
            spent_s += sum(self._costs_s[test] for test in left)
            if spent_s > self._budget_s:
                result.num_left += len(left)
                continue
            while left and result.state != "killed":
                with tree.mutated(mutant):
                    outcome = tree.run(left, self._costs_s)
                result.num_run += len(outcome.ended)
                if outcome.found == "passed":
                    break
                if self._passes(tree, outcome):
                    result.state, result.test, result.how = "killed", outcome.test, outcome.found
                else:
                    result.broken.append(outcome.test)
                    self._broken.add(outcome.test)
                    left -= {outcome.test, *outcome.ended}
        result.seconds = round(time.monotonic() - began, 1)
        return result

    def _passes(self, tree: Tree, outcome: Outcome) -> bool:
        """Whether what failed passes without the mutant. All files were collected without it before the first trial."""
        if "::" not in outcome.test:
            return True
        if outcome.test not in self._passing:
            if tree.run([outcome.test], self._costs_s).found != "passed":
                return False
            self._passing.add(outcome.test)
        return True


def batches(path: str, reached: Reached, costs_s: dict[str, float]) -> list[list[str]]:
    """Tests of a ring in the order in which they are tried, each batch a run: few and cheap ones near the source first;
    last those that share its function, or a file with tests whose fixtures run the line."""
    direct, beside = (
        sorted(tests & costs_s.keys(), key=costs_s.__getitem__) for tests in (reached.direct, reached.beside)
    )
    near = [test for test in direct if test.startswith(_near(path))]
    far = [test for test in direct if not test.startswith(_near(path))]
    known = reached.direct | reached.beside
    shared = [test for test in costs_s if file_of(test) in reached.shared and test not in known]
    found = [near[:_FIRST_NEAR], near[_FIRST_NEAR:], far[:_FIRST_FAR], far[_FIRST_FAR:], shared]
    found += [beside[:_FIRST_FAR], beside[_FIRST_FAR:]]
    return [batch for batch in found if batch]


def _near(path: str) -> str:
    """The folder of the tests of a source, by its name."""
    parts = path.split("/")
    return f"plugins/{parts[1]}/" if parts[0] == "plugins" else f"tests/{parts[1]}/"


def run_all(
    mutants: list[Mutant], ring: Ring, run: Run, trees: list[Tree], tell: Callable[[Ring, Result], None]
) -> None:
    """Try each mutant that `ring` has no result of, in as many threads as there are trees; `tell` of each when it is in
    the ring. An interrupt ends what runs and leaves what `ring` has."""
    done = {result.mutant for result in ring.results}
    free: SimpleQueue[Tree] = SimpleQueue()
    for tree in trees:
        free.put(tree)
    lock = Lock()

    def try_one(mutant: Mutant) -> None:
        tree = free.get()
        try:
            result = run.try_mutant(tree, mutant)
        finally:
            free.put(tree)
        with lock:
            ring.results.append(result)
            tell(ring, result)

    with ThreadPoolExecutor(len(trees)) as pool:
        begun = [pool.submit(try_one, mutant) for mutant in mutants if mutant not in done]
        try:
            for one in begun:
                one.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for tree in trees:
                tree.stop()
