"""Weights under which nothing was computed push no table of earlier weights out."""

from __future__ import annotations

import numpy as np

from fdasync.telemetry.sight.recording.recorder import PickRecorder, PicksSoFar


def test_an_update_of_many_calls_keeps_the_tables_before_it() -> None:
    table, rows = np.zeros((1, 4), np.int64), 0
    recorder = PickRecorder(lambda: PicksSoFar(table.copy(), rows, rows), (0,), b"0", "old")
    table += 10
    rows = 10
    for number in range(1, 7):
        recorder.weights_changed(bytes([number]), "new")
    assert [(one.version, one.rows) for one in recorder.tables()] == [("new", 0), ("old", 10)]
