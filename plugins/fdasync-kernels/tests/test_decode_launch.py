"""How decode is cut: by wide tiles where kv heads are few, among as many programs as the device runs at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_layers import Shape, expected, make_layer, make_query
from attention_reference import assert_close
from fdasync_kernels.attention import decode
from fdasync_kernels.attention.decode import attend_decode, count_splits, decode_launch, decode_workspace
from fdasync_kernels.attention.tile import Launch


def test_wide_tiles_run_half_as_many_programs() -> None:
    launch = decode_launch(8, 128, torch.bfloat16, few=True)
    assert launch.keys == 128
    splits = [count_splits(count, 32, 4, 1 << 15, launch, 32 * 256, 132) for count in (1, 32, 64)]
    assert splits == [64, 2, 1]
    assert decode_launch(8, 128, torch.bfloat16).keys == decode_launch(32, 128, torch.bfloat16, few=True).keys == 64
    # twice as many keys of so many dims have no room
    assert decode_launch(8, 256, torch.bfloat16, few=True).keys == 32


@pytest.mark.parametrize("sequences", [3, 16, 17])
def test_few_and_many_sequences_attend_alike(device: torch.device, sequences: int) -> None:
    """By wide tiles and by others; without a GPU 16 programs are few."""
    shape = Shape(heads=2, kv_heads=1, dtype=torch.bfloat16)
    lengths = [5 + 31 * number % 300 for number in range(sequences)]
    case, _ = make_layer(shape, lengths, device)
    query, out = make_query(shape, sequences, device), torch.empty(sequences, 2, 16, device=device).bfloat16()
    positions = torch.tensor(lengths, device=device) - 1
    workspace = decode_workspace(sequences, 2, 16, device)
    attend_decode(
        query, case.keys, case.values, case.tables, case.lanes, positions,
        scale=0.3, reach_kind="full", reach_size=0, sinks=None, out=out, workspace=workspace,
    )  # fmt: skip
    spans = [(lane, length - 1) for lane, length in enumerate(lengths)]
    assert_close(out, expected(shape, case, None, query, spans), shape.dtype)


def test_sequences_of_few_heads_have_room_for_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    # 528 programs fill a device, and a rank has 8 heads
    monkeypatch.setattr(decode, "PROGRAMS_PER_PROCESSOR", 66)
    workspace = decode_workspace(256, 8, 128, torch.device("cpu"))
    assert len(workspace.partials) == 8 * 528
    assert count_splits(256, 8, 1, 2048, Launch(16, 64, 4, 3), len(workspace.partials), workspace.processors) == 2
    # of many heads many sequences have enough
    assert len(decode_workspace(256, 128, 16, torch.device("cpu")).partials) == 128 * 256


def test_wide_tiles_are_for_as_many_kv_heads_as_run_at_once(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    chosen: list[int] = []
    own = decode.decode_launch

    def launch(*given: Any, **named: Any) -> Launch:
        made = own(*given, **named)
        chosen.append(made.keys)
        return made

    monkeypatch.setattr(decode, "decode_launch", launch)
    shape = Shape(heads=2, kv_heads=1, dtype=torch.bfloat16)
    workspace = decode_workspace(40, 2, 16, device)
    most = 2 * workspace.processors
    case, _ = make_layer(shape, [5] * (most + 1), device)
    for sequences in (most, most + 1):
        query, out = make_query(shape, sequences, device), torch.empty(sequences, 2, 16, device=device).bfloat16()
        positions = torch.full((sequences,), 4, device=device)
        attend_decode(
            query, case.keys, case.values, case.tables, case.lanes[:sequences], positions,
            scale=0.3, reach_kind="full", reach_size=0, sinks=None, out=out, workspace=workspace,
        )  # fmt: skip
    assert chosen == [128, 64]
