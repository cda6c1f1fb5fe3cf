"""Positions, ids and slots of a step's rows, and updates of device tables: `layout.py`."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from fdasync_kernels.layout import scatter_updates, step_layout
from fdasync_kernels.step_kernels import StepKernels
from hypothesis import given, settings
from hypothesis import strategies as st
from step_kernels_here import both

from fdasync.errors import BadInput


def here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Tables:
    """Tokens and block tables of some lanes, of random numbers."""

    def __init__(self, lanes: int, max_blocks: int, block_tokens: int) -> None:
        seeded = torch.Generator().manual_seed(lanes)
        self.block_tokens = block_tokens
        self.max_tokens = max_blocks * block_tokens
        # wider than what is passed, so that rows are strided
        self.blocks = torch.randint(0, 2**31 // block_tokens, (lanes, max_blocks + 3), generator=seeded).int()
        self.tokens = torch.randint(0, 150_000, (lanes, self.max_tokens + 5), generator=seeded).int()
        self.args = (self.blocks.to(here())[:, :max_blocks], self.tokens.to(here())[:, : self.max_tokens])

    def row(self, lane: int, position: int) -> tuple[int, int, int]:
        block = int(self.blocks[lane, position // self.block_tokens])
        slot = block * self.block_tokens + position % self.block_tokens
        return position, int(self.tokens[lane, position]), slot


def lay(
    kernels: StepKernels, tables: Tables, sequences: list[tuple[int, int, int]], rows: int
) -> list[tuple[int, int, int]]:
    """Run the kernel for (lane, start, count) each and `rows` rows; what it wrote, a row each."""
    firsts = [0, *accumulate(count for _, _, count in sequences)]
    outs = [torch.full((rows + 1,), -77, dtype=torch.int64, device=here()) for _ in range(3)]
    kernels.step_layout(
        torch.tensor([lane for lane, _, _ in sequences], dtype=torch.int32, device=here()),
        torch.tensor([start for _, start, _ in sequences], dtype=torch.int64, device=here()),
        torch.tensor(firsts, dtype=torch.int32, device=here()),
        *tables.args,
        tables.block_tokens,
        *[out[:rows] for out in outs],
    )
    assert all(int(out[rows]) == -77 for out in outs), "written past the rows"
    positions, ids, slots = (out[:rows].tolist() for out in outs)
    return list(zip(positions, ids, slots, strict=True))


def expected(tables: Tables, sequences: list[tuple[int, int, int]], rows: int) -> list[tuple[int, int, int]]:
    out: list[tuple[int, int, int]] = []
    for lane, start, count in sequences:
        out += [(0, 0, -1) if lane < 0 else tables.row(lane, start + number) for number in range(count)]
    return (out + [(0, 0, -1)] * rows)[:rows]


@pytest.mark.ci
@both
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_row_is_where_its_sequence_says(kernels, data):
    block_tokens = data.draw(st.sampled_from([1, 4, 16, 24]), label="block tokens")
    tables = Tables(6, 8, block_tokens)
    sequences: list[tuple[int, int, int]] = []
    for _ in range(data.draw(st.integers(1, 12), label="sequences")):
        lane = data.draw(st.integers(-1, 5))
        start = data.draw(st.integers(0, tables.max_tokens - 1))
        # none at all too: such a sequence owns no row
        sequences.append((lane, start, data.draw(st.integers(0, min(20, tables.max_tokens - start)))))
    padding = data.draw(st.integers(0, 70), label="padding")
    rows = max(1, sum(count for _, _, count in sequences) + padding)
    assert lay(kernels, tables, sequences, rows) == expected(tables, sequences, rows)


@both
@pytest.mark.parametrize("sequences", [255, 256, 257])
def test_a_token_each_for_many_sequences(kernels, sequences):
    tables = Tables(300, 4, 16)
    wanted = [(number, number % 64, 1) for number in range(sequences)]
    assert lay(kernels, tables, wanted, 256) == expected(tables, wanted, 256)


@both
def test_one_long_sequence(kernels):
    tables = Tables(2, 600, 16)
    assert lay(kernels, tables, [(1, 1000, 8192)], 8192) == expected(tables, [(1, 1000, 8192)], 8192)


@both
def test_padding_sequences_at_the_end_own_nothing(kernels):
    tables = Tables(3, 4, 4)
    sequences = [(2, 3, 5), (0, 0, 1), (-1, 0, 0), (-1, 0, 0)]
    assert lay(kernels, tables, sequences, 9) == expected(tables, sequences, 9)
    assert lay(kernels, tables, [(-1, 0, 0)] * 4, 3) == [(0, 0, -1)] * 3


@both
def test_a_position_or_lane_that_no_table_holds_reads_nothing(kernels):
    tables = Tables(3, 4, 4)
    assert lay(kernels, tables, [(1, 14, 4)], 4) == [tables.row(1, 14), tables.row(1, 15), (0, 0, -1), (0, 0, -1)]
    blocks, tokens = tables.args
    tables.args = (blocks, tokens[:, :15])
    assert lay(kernels, tables, [(1, 14, 2)], 2) == [tables.row(1, 14), (0, 0, -1)]
    tables.args = (blocks[:, :3], tokens)
    assert lay(kernels, tables, [(1, 11, 2)], 2) == [tables.row(1, 11), (0, 0, -1)]
    assert lay(kernels, tables, [(3, 0, 1), (0, -1, 2)], 3) == [(0, 0, -1), (0, 0, -1), tables.row(0, 0)]


@both
@settings(max_examples=25, deadline=None)
@given(
    updates=st.dictionaries(st.integers(0, 299), st.integers(-(2**31), 2**31 - 1), max_size=200),
    skipped=st.lists(st.sampled_from([-1, -5, 300, 2**40]), max_size=9),
)
def test_updates_go_where_they_say_and_padding_nowhere(kernels, updates, skipped):
    before = torch.arange(304, dtype=torch.int32)
    target = before.to(here())
    index = torch.tensor([*skipped, *updates, -1], dtype=torch.int64, device=here())
    value = torch.tensor([*(5 for _ in skipped), *updates.values(), 5], dtype=torch.int32, device=here())
    # what lies behind the target is not its own
    kernels.scatter_updates(target[:300], index, value)
    for cell, number in updates.items():
        before[cell] = number
    assert target.tolist() == before.tolist()


@both
def test_no_updates_and_no_rows(kernels):
    nothing = torch.zeros(0, dtype=torch.int64, device=here())
    kernels.scatter_updates(torch.zeros(3, dtype=torch.int32, device=here()), nothing, nothing.int())
    tables = Tables(1, 1, 4)
    assert lay(kernels, tables, [(0, 0, 0)], 0) == []


def test_bad_input_is_refused():
    tables, tokens = Tables(2, 2, 4).args
    good = {
        "lanes": torch.zeros(1, dtype=torch.int32),
        "starts": torch.zeros(1, dtype=torch.int64),
        "first_rows": torch.tensor([0, 1], dtype=torch.int32),
        "tables": tables.cpu(),
        "tokens": tokens.cpu(),
        "block_tokens": 4,
        **{name: torch.zeros(2, dtype=torch.int64) for name in ("out_positions", "out_ids", "out_slots")},
    }
    bad = {
        "lanes": torch.zeros(0, dtype=torch.int32),
        "starts": torch.zeros(1, dtype=torch.int32),
        "first_rows": torch.zeros(1, dtype=torch.int32),
        "tables": tables.cpu()[:1],
        "tokens": tokens.cpu().long(),
        "block_tokens": 0,
        "out_positions": torch.zeros(2, dtype=torch.int32),
        "out_ids": torch.zeros(3, dtype=torch.int64),
        "out_slots": torch.zeros(4, dtype=torch.int64)[::2],
    }
    for field, value in bad.items():
        with pytest.raises(BadInput) as caught:
            step_layout(**{**good, field: value})
        assert caught.value.field == field
    cells = torch.zeros(4, dtype=torch.int32)
    for field, arguments in {
        "target_flat": (cells.long(), cells.long(), cells),
        "index": (cells, cells, cells),
        "value": (cells, cells.long(), cells[:3]),
    }.items():
        with pytest.raises(BadInput) as caught:
            scatter_updates(*arguments)
        assert caught.value.field == field


@pytest.mark.gpu
def test_neither_rows_nor_sequences_compile_anew(device):
    from fdasync_kernels.layout import _scatter_kernel, _step_layout_kernel

    tables = Tables(300, 40, 16)

    def compiled() -> list[int]:
        caches = [*_step_layout_kernel.device_caches.values(), *_scatter_kernel.device_caches.values()]
        return [len(cache[0]) for cache in caches]

    def once(sequences: int, rows: int, shift: int) -> None:
        wanted = [(number, number, 1) for number in range(sequences)]
        assert lay(StepKernels(), tables, wanted, rows) == expected(tables, wanted, rows)
        cells = torch.zeros(sequences + shift, dtype=torch.int32, device=device)[shift:]
        scatter_updates(cells, torch.arange(sequences, device=device), torch.ones_like(cells))
        assert bool((cells == 1).all())

    once(16, 16, 0)
    before = compiled()
    assert before
    for sequences, rows, shift in ((1, 1, 0), (1, 256, 1), (255, 300, 3), (256, 256, 0)):
        once(sequences, rows, shift)
    assert compiled() == before
