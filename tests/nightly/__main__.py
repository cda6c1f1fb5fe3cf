"""What the nightly tests play, by hand and for as long as you like: `python -m tests.nightly NAME`."""

from __future__ import annotations

import sys

from benchmarks.lib.commands import run

COMMANDS = {
    "chaos": "tests.nightly.chaos.chaos",
    "families": "tests.nightly.families.families",
    "shapes": "tests.nightly.shapes.shapes",
    "same_bits": "tests.nightly.same_bits",
    "http_attack": "tests.nightly.http.attack",
    "http_fuzz": "tests.nightly.http.fuzz",
}

if __name__ == "__main__":
    run("tests.nightly", COMMANDS, sys.argv[1:])
