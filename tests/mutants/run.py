"""Runs, for each mutant, the tests that run its line, until one fails that passes without it."""

from __future__ import annotations

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
        state: "uncovered": no test of the ring runs the line; "lost": the mutant's text is not in the tree.
        test: the test that killed it, or "" where pytest did not begin; `how` it ended.
        num_run: tests that ended with it in place.
        seconds: wall time, the confirming run included.
        broken: tests that failed, and without the mutant as well: they were left out.
    """

    mutant: Mutant
    state: Literal["killed", "survived", "uncovered", "lost"]
    test: str = ""
    how: str = ""
    num_run: int = 0
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
    """

    def __init__(self, map_: Map, tests: Iterable[str], costs_s: dict[str, float]) -> None:
        unknown_s = median(costs_s.values()) if costs_s else _UNKNOWN_S
        self._map = map_
        self._costs_s = {test: costs_s.get(test, unknown_s) for test in tests}
        self._passing: set[str] = set()
        self._reading = Lock()

    def try_mutant(self, tree: Tree, mutant: Mutant) -> Result:
        """Run the tests that run its line; the tree is as it was afterwards."""
        began = time.monotonic()
        try:
            reached = self._reached(tree, mutant)
        except NotFound:
            return Result(mutant=mutant, state="lost")
        result = Result(mutant=mutant, state="survived" if any(reached) else "uncovered")
        for batch in reached:
            left = batch
            while left and result.state == "survived":
                with tree.mutated(mutant):
                    outcome = tree.run(left, self._costs_s)
                result.num_run += outcome.num_run
                if outcome.found == "passed":
                    break
                if self._passes(tree, outcome):
                    result.state, result.test, result.how = "killed", outcome.test, outcome.found
                else:
                    result.broken.append(outcome.test)
                    left = [test for test in left if test != outcome.test]
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

    def _reached(self, tree: Tree, mutant: Mutant) -> list[list[str]]:
        """Tests to run, in batches. Raises: NotFound."""
        source = (tree.path / mutant.path).read_text()
        line = mutant.find(source)
        with self._reading:
            reached = self._map.reached(mutant.path, source, line)
        return batches(mutant.path, reached, self._costs_s)


def batches(path: str, reached: Reached, costs_s: dict[str, float]) -> list[list[str]]:
    """Tests of a ring in the order in which they are tried, each batch a run: few and cheap ones near the source first;
    last those that share files with tests whose fixtures run the line."""
    direct = sorted(reached.direct & costs_s.keys(), key=lambda test: costs_s[test])
    near = [test for test in direct if test.startswith(_near(path))]
    far = [test for test in direct if not test.startswith(_near(path))]
    shared = [test for test in costs_s if file_of(test) in reached.shared and test not in reached.direct]
    found = [near[:_FIRST_NEAR], near[_FIRST_NEAR:], far[:_FIRST_FAR], far[_FIRST_FAR:], shared]
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
