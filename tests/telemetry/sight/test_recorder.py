"""What an engine records of its last minutes."""

from __future__ import annotations

from typing import Any

import numpy as np

from fdasync.telemetry.sight.latencies import total
from fdasync.telemetry.sight.recording.recorder import PickRecorder, PicksSoFar, Recorder
from fdasync.telemetry.sight.sight import MAX_PICKS_NBYTES, MOST_MOMENTS, MOST_TABLES
from tests.telemetry.sight.scene import stats

NOTHING = PickRecorder(None, (), b"", "0")


class Numbers:
    """An engine's numbers."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def __call__(self) -> Any:
        return stats(**self.values)


def test_a_moment_is_what_happened_in_it() -> None:
    numbers = Numbers()
    recorder = Recorder(numbers, NOTHING, 100.0)
    hits = {"hit_tokens_device": 4, "hit_tokens_host": 2, "hit_tokens_store": 1}
    numbers.values = {
        "generated_tokens": 10, "live_tokens": 20, "prompt_tokens": 9, **hits, "finished": 2, "running": 3,
        "used_blocks": 8,
    }  # fmt: skip
    recorder.ended("length", 2.0, 0.5, 0.01)
    recorder.ended("handed_over", 9.0, None, None)
    recorder.tick(104.9)
    assert recorder.sight().moments == ()
    recorder.tick(105.0)
    numbers.values |= {"generated_tokens": 30, "waiting": 1, "waiting_for_place": 1, "running": 0, "used_blocks": 3}
    recorder.ended("stop", 1.0, 0.5, None)
    recorder.tick(110.1)
    first, second = recorder.sight().moments
    assert (first.number, first.seconds, first.tokens, first.prompt_tokens, first.hits) == (1, 5.0, 30, 9, (4, 2, 1))
    assert (first.finished, first.running, first.used_blocks) == (2, 3, 8)
    assert (second.number, second.tokens, second.prompt_tokens, second.waiting, second.used_blocks) == (2, 20, 0, 2, 3)
    assert (total(first.ttft), total(first.tpot), total(second.ttft), total(second.tpot)) == (1, 1, 1, 0)
    whole = recorder.sight()
    # who handed a request over does not know how long it took
    assert (total(whole.total), total(whole.ttft), whole.total_s, whole.ttft_s) == (2, 2, 3.0, 1.0)
    assert whole.ends == (("handed_over", 1), ("length", 1), ("stop", 1))
    assert [moment.number for moment in recorder.sight(since=1).moments] == [2]


def test_a_loop_that_stood_still_leaves_a_gap_and_old_moments_go() -> None:
    recorder = Recorder(Numbers(), NOTHING, 0.0)
    recorder.tick(5.0)
    recorder.tick(31.0)
    assert [(moment.number, moment.seconds) for moment in recorder.sight().moments] == [(1, 5.0), (6, 26.0)]
    for number in range(2 * MOST_MOMENTS):
        recorder.tick(36.0 + 5 * number)
    moments = recorder.sight().moments
    assert len(moments) == MOST_MOMENTS
    assert moments[-1].number == 6 + 2 * MOST_MOMENTS


class Counted:
    """Counts of a runner, since its start."""

    def __init__(self, layers: int = 2, experts: int = 3) -> None:
        self.table = np.zeros((layers, experts), np.int64)
        self.rows = 0

    def add(self, layer: int, expert: int, count: int) -> None:
        self.table[layer, expert] += count
        self.rows += count

    def read(self) -> PicksSoFar:
        return PicksSoFar(self.table.copy(), self.rows, self.rows // 2)


def of(picks: Any) -> Any:
    return np.frombuffer(picks.table, "<i8").reshape(2, 3).tolist()


def test_each_set_of_weights_has_its_own_picks_and_a_label_is_no_set() -> None:
    counted = Counted()
    counted.add(0, 0, 100)
    recorder = PickRecorder(counted.read, (4, 5), b"first", "0")
    counted.add(0, 1, 4)
    recorder.weights_changed(b"first", "0b")
    counted.add(1, 2, 6)
    (table,) = recorder.tables()
    assert (table.version, table.layers, table.num_experts) == ("0b", (4, 5), 3)
    assert (table.rows, table.counted) == (10, 5)
    assert of(table) == [[0, 4, 0], [0, 0, 6]]
    recorder.weights_changed(b"second", "1")
    counted.add(0, 0, 8)
    now, before = recorder.tables()
    assert (now.version, of(now), now.rows) == ("1", [[8, 0, 0], [0, 0, 0]], 8)
    assert (before.version, of(before)) == ("0b", [[0, 4, 0], [0, 0, 6]])
    assert recorder.tables(past=False) == (now,)
    for number in range(2, 9):
        counted.add(0, 0, 1)
        recorder.weights_changed(bytes([number]), str(number))
    assert [table.version for table in recorder.tables()] == ["8", "7", "6", "5"]
    assert len(recorder.tables()) == MOST_TABLES


def test_tables_that_are_too_large_to_send_are_left_out() -> None:
    cells = MAX_PICKS_NBYTES // 8
    counted = Counted(2, cells // 4)
    fits = PickRecorder(counted.read, (0, 1), b"a", "0")
    for name in (b"b", b"c", b"d"):
        counted.add(0, 0, 1)
        fits.weights_changed(name, name.decode())
    assert [picks.version for picks in fits.tables()] == ["d", "c"]
    assert PickRecorder(Counted(2, cells // 2 + 1).read, (0, 1), b"a", "0").tables() == ()
    assert NOTHING.tables() == ()
