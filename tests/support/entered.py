"""Which functions of one room of the package a scheduler's turns enter."""

from __future__ import annotations

import sys
from pathlib import Path

import fdasync


def functions_entered(table, room):
    """The set of the names of functions of `room` (a folder of the package) that the turns of this table enter from now
    on; it grows with each turn."""
    folder = str(Path(fdasync.__file__).parent / room)
    handle = table.scheduler.handle
    functions = set()

    def profile(frame, what, _argument):
        if what == "call" and frame.f_code.co_filename.startswith(folder):
            functions.add(frame.f_code.co_name)

    def watched(events):
        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            return handle(events)
        finally:
            sys.setprofile(before)

    table.scheduler.handle = watched
    return functions
