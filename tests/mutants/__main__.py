"""Mutants of the product: small changes that tests should notice. `python -m tests.mutants --help`, from the root."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from pathlib import Path

import click
import msgspec

from tests.mutants.draw import draw as draw_mutants
from tests.mutants.map import Map, costs_of, make_map, read_costs
from tests.mutants.mutant import Mutant
from tests.mutants.run import Result, Ring, Run, run_all
from tests.mutants.table import table as make_table
from tests.mutants.trial import Tree

_FILE = click.Path(dir_okay=False, path_type=Path)
_THERE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def cli() -> None:
    """Draw mutants, map which tests run which lines, run those of each mutant, and make a table of what they killed."""
    # what runs ends, and copies of the tree go; in the background of a shell interrupts would be left out
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


@cli.command()
@click.option("--seed", type=int, required=True)
@click.option("--count", type=int, default=80, show_default=True)
@click.option("--out", type=_FILE, help="A JSON file; without it they are printed.")
def draw(seed: int, count: int, out: Path | None) -> None:
    """Draw mutants of the tree here, by operator and seed, spread evenly over the areas."""
    written = msgspec.json.format(msgspec.json.encode(draw_mutants(Path.cwd(), seed, count)), indent=1) + b"\n"
    if out is None:
        click.echo(written, nl=False)
    else:
        out.write_bytes(written)


@cli.command("map", context_settings={"ignore_unknown_options": True})
@click.option("--out", type=_FILE, required=True, help="Where the data of coverage goes.")
@click.argument("pytest_args", nargs=-1, type=click.UNPROCESSED)
def map_(out: Path, pytest_args: tuple[str, ...]) -> None:
    """Run pytest with PYTEST_ARGS and write which tests run which lines, their children included."""
    sys.exit(make_map(out, list(pytest_args)))


@cli.command()
@click.argument("drawn", type=_THERE)
@click.option("--map", "data", type=_THERE, required=True, help="What `map` wrote of this tree's tests and sources.")
@click.option("--marks", required=True, help="The ring: which tests may run, as of pytest's -m.")
@click.option("--out", type=_FILE, required=True, help="Results; a run that was stopped goes on with what is there.")
@click.option("--survivors-of", type=_THERE, help="Results of another ring: leave out what it killed.")
@click.option("--costs", type=_FILE, help="What a run of the tests recorded.  [default: that of the map's]")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True)
@click.option("--budget-s", type=float, help="CPU seconds of tests for one mutant.  [default: as many as there are]")
@click.option("--limit-s", type=float, default=300.0, show_default=True, help="A test that takes longer hangs.")
def run(
    drawn: Path, data: Path, marks: str, out: Path, survivors_of: Path | None, costs: Path | None, jobs: int,
    budget_s: float | None, limit_s: float,
) -> None:  # fmt: skip
    """Apply each mutant of DRAWN to a copy of the tree here, and run the tests that run its line until one fails."""
    mutants = msgspec.json.decode(drawn.read_bytes(), type=list[Mutant])
    if survivors_of is not None:
        killed = {one.mutant for one in _read(survivors_of).results if one.state == "killed"}
        mutants = [mutant for mutant in mutants if mutant not in killed]
    ring = _read(out) if out.exists() else Ring(marks)
    if ring.marks != marks:
        raise click.UsageError(f"{out} has results of the ring {ring.marks!r}")
    costs_s = read_costs(costs or costs_of(data))
    map_of = Map(data)
    with contextlib.ExitStack() as stack:
        trees = [stack.enter_context(Tree(Path.cwd(), limit_s)) for _ in range(jobs)]
        tests = trees[0].collect(marks, map_of.test_files())
        click.echo(f"{len(mutants)} mutants, {len(ring.results)} of them done; {len(tests)} tests of the ring")

        def tell(ring: Ring, result: Result) -> None:
            # whole or not at all: it may be stopped at any time
            part = out.with_name(f"{out.name}.part")
            part.write_bytes(msgspec.json.format(msgspec.json.encode(ring), indent=1) + b"\n")
            os.replace(part, out)
            what = f"{result.state} {result.how} {result.num_run} tests, {result.seconds} s  {result.test}"
            click.echo(f"{result.mutant.number:3}  {result.mutant.path}:{result.mutant.line}  {what}")

        run_all(mutants, ring, Run(map_of, tests, costs_s, budget_s or math.inf), trees, tell)


@cli.command()
@click.argument("results", type=_THERE, nargs=-1, required=True)
def table(results: tuple[Path, ...]) -> None:
    """Print by area how many mutants each ring of RESULTS killed, and those that survived all, in Markdown."""
    click.echo(make_table([_read(path) for path in results]))


def _read(path: Path) -> Ring:
    return msgspec.json.decode(path.read_bytes(), type=Ring)


if __name__ == "__main__":
    cli(prog_name="python -m tests.mutants")
