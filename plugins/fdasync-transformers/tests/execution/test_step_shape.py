"""The sequences of a step in host memory: rows of one sequence side by side are one, and padding is none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fdasync_transformers.execution.step_shape import DeviceBatch, sequences_of
from fdasync_transformers.model.kv import KVPool
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_play import open_mtp

from fdasync.runner.input_batch import InputBatch

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


def shape(entries: list[tuple[int, int, int]], decodes: int, *, runs: bool) -> DeviceBatch:
    """(lane, start, count) of each."""
    lanes, starts, counts = ([entry[at] for entry in entries] for at in range(3))
    return DeviceBatch(
        sum(counts), decodes, torch.tensor(lanes, dtype=torch.int32), torch.tensor(starts),
        torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32), runs=runs,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    decodes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 2)), max_size=5),
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=3),
)
def test_rows_with_padding_among_them(decodes: list[tuple[int, int, int]], chunks: list[tuple[int, int]]) -> None:
    """A decode has some rows, and padding behind them."""
    entries, wanted, rows = [], [], []
    for lane, (start, count, padding) in enumerate(decodes):
        if count:
            wanted.append((lane, start, count, len(entries)))
        rows += range(len(entries), len(entries) + count)
        entries += [(lane, start + at, 1) for at in range(count)] + [(-1, 0, 1)] * padding
    total, at = len(entries), len(entries)
    for number, (start, count) in enumerate(chunks):
        lane = len(decodes) + number
        wanted.append((lane, start, count, at))
        entries.append((lane, start, count))
        rows += range(at, at + count)
        at += count
    found = sequences_of(shape(entries, total, runs=True))
    columns = (found.lanes, found.starts, found.counts, found.first_rows)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == wanted
    assert found.rows.tolist() == rows
    assert found.decodes == sum(count > 0 for _, count, _ in decodes)


def test_a_step_that_is_all_padding_has_logits_of_nothing(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_next", num_hidden_layers=4)
    model: Any = open_mtp(tmp_path, {"mtp": False, "self_check": False}).step_model
    model.states = model.make_states(4)
    table, pool = InputBatch(4, 64, 4, 64), KVPool(model.layout, 64, 4, CPU)
    passed = model.forward(shape([(-1, 0, 1)] * 3, 3, runs=True), model.lanes_of(table), pool)
    assert passed.logits.shape == (3, model.model.config.vocab_size)
    assert not passed.logits.any()
    assert not pool.blocks.any()


def test_padding_changes_no_other_row(tmp_path: Path) -> None:
    """Of a model with recurrent layers, attention and experts: logits, KV and states."""
    make_tiny_checkpoint(tmp_path, "qwen3_next", num_hidden_layers=4)
    model: Any = open_mtp(tmp_path, {"mtp": False, "self_check": False}).step_model
    found = []
    for padding in (False, True):
        model.states = model.make_states(4, versions=3)
        table, pool = InputBatch(4, 64, 4, 64), KVPool(model.layout, 64, 4, CPU)
        lanes = model.lanes_of(table)
        lanes.tables[:3] = torch.arange(3 * lanes.tables.shape[1], dtype=torch.int32).view(3, -1)
        lanes.tokens[:] = torch.arange(lanes.tokens.numel(), dtype=torch.int32).view(4, -1) % 90 + 3
        model.forward(shape([(lane, 0, 5) for lane in range(3)], 0, runs=False), lanes, pool)
        none = [(-1, 0, 1)] if padding else []
        entries = [(0, 5, 1), (0, 6, 1), *none, (1, 5, 1), *none, (2, 5, 4)]
        batch = shape(entries, len(entries) - 1, runs=True)
        keep = [number for number, (lane, _, _) in enumerate(entries) if lane >= 0]
        rows = [*keep, *range(len(entries), len(entries) + 3)]
        passed = model.forward(batch, lanes, pool)
        found.append((passed.logits[rows], pool.blocks.clone(), model.states.memory.view(torch.float32).clone()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert found[0][0].any()
