"""The options that all commands share, and how their values are read: a wrong one is told before anything is measured.

What is told is one line with the option, the value, the limit and the way out; the exit status is 2. Knows no command.
`benchmarks` and `tests.nightly` use it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

Wrong = argparse.ArgumentTypeError
# more than any run has, and few enough to be added and multiplied
MOST = 10**12


class Help(argparse.RawDescriptionHelpFormatter):
    """A module's docstring as it is, and of each option its default."""

    def _get_help_string(self, action: argparse.Action) -> str:
        unsaid = action.default in (None, False, argparse.SUPPRESS)
        return (action.help or "") + ("" if unsaid else " (default %(default)s)")


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        refuse(message.removeprefix("argument "))


def refuse(message: str) -> NoReturn:
    """End with a line on stderr and status 2."""
    print(f"{Path(sys.argv[0]).name}: error: {message} (--help says more)", file=sys.stderr)
    sys.exit(2)


def parser_of(doc: str | None) -> Parser:
    """A parser whose help is a module's docstring, with `--json FILE` as `json_path`."""
    parser = Parser(description=doc, formatter_class=Help)
    parser.add_argument("--json", metavar="FILE", dest="json_path", type=writable, help="write the figures here")
    return parser


def writable(text: str) -> str:
    """A file that can be written: a run of an hour must not end at its last line."""
    path = Path(text)
    new = not path.exists()
    if path.is_dir():
        raise Wrong(f"{text!r} is a folder; give a file in it")
    try:
        # what access is promised is not always given
        path.open("a").close()
    except OSError as error:
        problem = f"{text!r} cannot be written ({error.strerror})"
        raise Wrong(f"{problem}: make the folder {str(path.parent)!r}, or name another") from None
    if new:
        path.unlink()
    return text


def folder(text: str) -> Path:
    """A folder in which files can be made."""
    try:
        tempfile.TemporaryFile(dir=text).close()
    except OSError:
        raise Wrong(f"{text!r} is no folder that can be written: make it, or leave the option out") from None
    return Path(text)


def kept(text: str) -> dict[str, Any]:
    """The figures and conditions that another run wrote with `--json`."""
    try:
        found: dict[str, Any] = json.loads(Path(text).read_text())
        return {"figures": {**found["figures"]}, "conditions": {**found["conditions"]}}
    except (OSError, ValueError, TypeError, KeyError):
        raise Wrong(f"{text!r} is no report: give a file that a run wrote with --json") from None


def up_to(most: int) -> Callable[[str], int]:
    """How an option takes how many there are, one at least."""

    def how_many(text: str) -> int:
        value: int = _number(text, int, "a whole number")
        if not 1 <= value <= most:
            raise Wrong(f"{text} is {'less than 1' if value < 1 else f'more than {most}'}; give a number between")
        return value

    return how_many


at_least_one = up_to(MOST)


def above_zero(text: str) -> float:
    """How long or how large."""
    value = _number(text, float, "a number")
    if not 0 < value <= MOST:
        raise Wrong(f"{text} is not above 0, or more than {MOST}; give a number between")
    return value


def names_of(known: Collection[str]) -> Callable[[str], set[str]]:
    """How an option takes some of these names, "a,b"."""

    def names(text: str) -> set[str]:
        given = set(text.split(","))
        if unknown := given - set(known):
            raise Wrong(f"no {', '.join(sorted(unknown)) or 'name'}; there are {', '.join(known)}")
        return given

    return names


def need_gpus(count: int, without: str) -> None:
    """Refuse a run on so many CUDA GPUs where torch sees fewer. `without`: the option that needs none."""
    import torch

    if torch.cuda.device_count() < count:
        need = "a CUDA GPU" if count == 1 else f"{count} CUDA GPUs"
        refuse(f"this needs {need}, torch sees {torch.cuda.device_count()}; take another machine, or give {without}")


def need_memory(nbytes: int, options: str) -> None:
    """Refuse a run that takes more memory than the machine has. `options`: those that say how much."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > most:
        refuse(f"{options}: {nbytes} bytes are more than this machine's memory, {most}; give less")


def _number(text: str, kind: Callable[[str], Any], words: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise Wrong(f"{text!r} is not {words}") from None
