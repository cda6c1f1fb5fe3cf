"""The capture buffer, and the rows that it writes in debug: `gpu/capture.py`, `cache/debug_rows.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdasync.cache.aux import AuxSpec
from fdasync.cache.debug_rows import debug_rows
from fdasync.errors import BadInput, RunnerError
from fdasync.gpu.capture import CaptureBuffer

SPEC = AuxSpec("routing", (3, 4), "uint8")
WIDE = AuxSpec("routing", (3, 4), "uint16")


def rows_of(staged: torch.Tensor, spec: AuxSpec) -> np.ndarray:
    return staged.cpu().numpy().view(spec.dtype)


@pytest.mark.parametrize("spec", [SPEC, WIDE])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_pass_is_recorded_as_it_was(device, spec, dtype):
    buffer = CaptureBuffer(9, spec, device)
    limit = 256 if spec is SPEC else 65536
    expected = np.zeros((5, 3, 4), dtype=spec.dtype)
    buffer.begin()
    for row, k in ((2, 4), (0, 3), (1, 1)):
        ids = torch.randint(limit // 2, limit, (k, 5), generator=torch.Generator().manual_seed(row)).T
        buffer.put(ids.to(device, dtype), row, k)
        expected[:, row, :k] = ids.numpy()
    assert buffer.filled == 3
    buffer.expect()
    assert np.array_equal(rows_of(buffer.stage(5), spec), expected)
    assert not buffer.buffer[5:].any(), "rows of no token were written"
    # the next pass writes over the rows, and what lies past a layer's own k stays zero
    buffer.begin()
    for row, k in ((0, 3), (1, 1), (2, 4)):
        buffer.put(torch.full((2, k), 7, dtype=dtype, device=device), row, k)
    again = rows_of(buffer.stage(2), spec)
    assert (again[:, 0, :3] == 7).all()
    assert not again[:, 0, 3:].any()
    assert not again[:, 1, 1:].any()


def test_a_missing_or_doubled_layer_is_seen(device):
    buffer = CaptureBuffer(4, SPEC, device)
    ids = torch.zeros((2, 4), dtype=torch.int64, device=device)
    buffer.begin()
    buffer.put(ids, 0, 4)
    buffer.put(ids, 2, 4)
    with pytest.raises(RunnerError, match=r"routing of 2 layers was captured, 3 were to be; rows without: 1$"):
        buffer.expect()
    with pytest.raises(RunnerError, match="row 2 was captured twice"):
        buffer.put(ids, 2, 4)
    with pytest.raises(RunnerError, match="row 0 was captured twice"):
        buffer.claim(0, 2, 4)
    buffer.begin()
    assert buffer.filled == 0
    for row in range(3):
        buffer.claim(row, 2, 4)
    buffer.expect()


def test_what_does_not_fit_is_refused(device):
    buffer = CaptureBuffer(4, SPEC, device)
    ids = torch.zeros((2, 4), dtype=torch.int64, device=device)
    for call in (
        lambda: buffer.put(ids, 0, 3),
        lambda: buffer.put(ids[0], 0, 4),
        lambda: buffer.put(ids.float(), 0, 4),
        lambda: buffer.put(torch.zeros((5, 4), dtype=torch.int64, device=device), 0, 4),
        lambda: buffer.put(ids, 3, 4),
        lambda: buffer.put(ids, -1, 4),
        lambda: buffer.put(torch.zeros((2, 5), dtype=torch.int64, device=device), 0, 5),
        lambda: buffer.stage(5),
    ):
        with pytest.raises(RunnerError):
            call()
        assert buffer.filled == 0, "what was refused counts"
    for arguments in (
        (0, SPEC, device),
        (4, AuxSpec("values", (3, 4), "float32"), device),
        (4, AuxSpec("routing", (12,), "uint8"), device),
    ):
        with pytest.raises(BadInput):
            CaptureBuffer(*arguments)


def test_what_is_staged_outlives_any_number_of_passes(device):
    buffer = CaptureBuffer(4, SPEC, device)
    staged = []
    for number in range(1, 6):
        buffer.begin()
        for row in range(3):
            buffer.put(torch.full((2, 4), number, dtype=torch.int64, device=device), row, 4)
        staged.append(buffer.stage(2))
    for number, rows in enumerate(staged, 1):
        assert rows.is_contiguous()
        assert rows.shape == (2, 3, 4)
        assert bool((rows == number).all())
    assert buffer.nbytes == 4 * 12


@given(
    shape=st.tuples(st.integers(1, 300), st.integers(1, 9)),
    dtype=st.sampled_from(["uint8", "uint16"]),
    positions=st.lists(st.integers(0, 2**31 - 2), max_size=4),
)
def test_debug_rows_are_digits_of_positions(shape, dtype, positions):
    rows = debug_rows(positions, AuxSpec("routing", shape, dtype))
    base, digits = (256, 4) if dtype == "uint8" else (65536, 2)
    assert rows.shape == (len(positions), *shape)
    assert rows.dtype == dtype
    for number, position in enumerate(positions):
        for layer, slot in {(0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 2)}:
            digit = (position + 1) // base ** ((layer * shape[1] + slot) % digits) % base
            assert rows[number, layer, slot] == (digit + layer) % base


@pytest.mark.parametrize(
    "spec", [SPEC, WIDE, AuxSpec("routing", (280, 3), "uint8"), AuxSpec("routing", (2, 3), "uint16")]
)
def test_debug_writes_the_same_rows_on_the_device(device, spec):
    buffer = CaptureBuffer(6, spec, device, debug=True)
    positions = np.array([0, 254, 255, 65534, 2**24 + 5, 2**31 - 2])
    buffer.begin()
    for row in range(spec.shape[0]):
        # a layer's own k does not matter: all slots are written
        buffer.put(torch.zeros((6, 1), dtype=torch.int64, device=device), row, 1, torch.tensor(positions).to(device))
    buffer.expect()
    assert np.array_equal(rows_of(buffer.stage(6), spec), debug_rows(positions, spec))


def test_debug_needs_positions(device):
    buffer = CaptureBuffer(6, SPEC, device, debug=True)
    ids = torch.zeros((2, 4), dtype=torch.int64, device=device)
    for positions in (None, torch.zeros(3, dtype=torch.int64, device=device), ids):
        with pytest.raises(RunnerError, match="absolute positions"):
            buffer.put(ids, 0, 4, positions)
    for spec in (AuxSpec("routing", (4,), "uint8"), AuxSpec("values", (2, 2), "float32")):
        with pytest.raises(BadInput):
            debug_rows([1], spec)


@pytest.mark.gpu
def test_a_graph_replays_the_copies(device):
    buffer = CaptureBuffer(64, SPEC, device)
    ids = torch.randint(0, 256, (3, 33, 4), device=device)

    def once() -> torch.Tensor:
        buffer.begin()
        for row in range(3):
            buffer.put(ids[row], row, 4)
        buffer.expect()
        return buffer.buffer

    once()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    for _ in range(3):
        ids.copy_(torch.randint_like(ids, 0, 256))
        graph.replay()
        assert torch.equal(buffer.stage(33).long(), ids.transpose(0, 1))
