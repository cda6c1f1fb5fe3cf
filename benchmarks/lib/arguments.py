"""The options that all commands share, and how their values are read: a wrong one is told before anything is measured.

Knows no command. `benchmarks` and `tests.nightly` use it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring, with `--json FILE` as `json_path`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", dest="json_path", type=writable, help="write the figures here")
    return parser


def writable(text: str) -> str:
    """A file that can be written: a run of an hour must not end at its last line."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; give a file in it")
    if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written: make the folder {str(path.parent)!r}, or name another"
        )
    return text


def at_least_one(text: str) -> int:
    """How many."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def above_zero(text: str) -> float:
    """How long or how large."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def names_of(known: Collection[str]) -> Callable[[str], set[str]]:
    """How an option takes some of these names, "a,b"."""

    def names(text: str) -> set[str]:
        given = set(text.split(","))
        if unknown := given - set(known):
            raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown)) or 'name'}; there are {', '.join(known)}")
        return given

    return names
