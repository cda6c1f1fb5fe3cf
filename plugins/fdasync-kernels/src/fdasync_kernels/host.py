"""What the small kernels around a model's pass compute, for tensors in host memory: a CPU launches no kernel.

Each function has the name, the arguments and the rule of the kernel that it stands in for (`layout.py`, `drafts.py`,
`own_drafts.py`, `states.py`, `digest.py`), and is done when it returns. What a kernel refuses as bad input
is an error of numpy here. Knows no models. Chosen by `step_kernels.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from fdasync_kernels.digest import PARTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


def _of(tensor: torch.Tensor) -> NDArray[Any]:
    """A view."""
    return tensor.numpy()


class _Rows:
    """The rows of a step, as `step_layout` has them: int64 [T] each, and bool [T].

    Attributes:
        lanes, positions: of each; 0 where it is none.
        used: which rows are a sequence's.
    """

    def __init__(
        self,
        count: int,
        lanes: torch.Tensor,
        starts: torch.Tensor,
        first_rows: torch.Tensor,
        num_lanes: int,
        max_tokens: int,
    ) -> None:
        row, firsts, begins = np.arange(count), _of(first_rows).astype(np.int64), _of(starts)
        owner = np.searchsorted(firsts[:-1], row, side="right") - 1
        lane = _of(lanes).astype(np.int64)[owner]
        positions = begins[owner] + row - firsts[owner]
        used = (row < firsts[-1]) & (lane >= 0) & (lane < num_lanes) & (positions >= 0) & (positions < max_tokens)
        self.used: NDArray[np.bool_] = used
        self.lanes: Ints = np.where(used, lane, 0)
        self.positions: Ints = np.where(used, positions, 0)

    @property
    def follows(self) -> NDArray[np.bool_]:
        """bool [T], which rows are behind the row of their sequence's position before."""
        used, lanes, positions = self.used, self.lanes, self.positions
        found = np.zeros(len(used), np.bool_)
        # a sequence may have several entries side by side, of one row each
        found[1:] = used[1:] & used[:-1] & (lanes[1:] == lanes[:-1]) & (positions[1:] == positions[:-1] + 1)
        return found


def step_layout(
    lanes: torch.Tensor,
    starts: torch.Tensor,
    first_rows: torch.Tensor,
    tables: torch.Tensor,
    tokens: torch.Tensor,
    block_tokens: int,
    out_positions: torch.Tensor,
    out_ids: torch.Tensor,
    out_slots: torch.Tensor,
) -> None:
    """As `layout.step_layout`."""
    most = min(tokens.shape[1], tables.shape[1] * block_tokens)
    rows = _Rows(len(out_positions), lanes, starts, first_rows, len(tokens), most)
    blocks = _of(tables)[rows.lanes, rows.positions // block_tokens].astype(np.int64)
    _of(out_positions)[:] = rows.positions
    _of(out_ids)[:] = np.where(rows.used, _of(tokens)[rows.lanes, rows.positions], 0)
    _of(out_slots)[:] = np.where(rows.used, blocks * block_tokens + rows.positions % block_tokens, -1)


def scatter_updates(target_flat: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
    """As `layout.scatter_updates`."""
    target, at = _of(target_flat), _of(index)
    here = (at >= 0) & (at < len(target))
    target[at[here]] = _of(value)[here]


def place_drafts(
    runs: torch.Tensor,
    paths: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    vocab_size: int,
    most_rows: int,
    row_lanes: torch.Tensor,
    row_starts: torch.Tensor,
    row_counts: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    floats: torch.Tensor | None = None,
    drafted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `drafts.place_drafts`."""
    known, path_tokens = _of(tokens), _of(paths)
    num_lanes, max_tokens = known.shape
    lane, row, rows, start, room, path, count, begin, most, first = _of(runs).T[:, :, None]
    here = (lane >= 0) & (lane < num_lanes)
    safe = np.where(here, lane, 0)
    start = np.where(start < 0, _of(lengths)[safe], start)
    number = np.arange(most_rows)[None]
    at = start + 1 - begin + number
    inside = (number < most) & (number + 1 < rows) & (at >= number) & (at < count)
    draft = np.where(inside, path_tokens[np.where(inside, path + at, 0)], -1).astype(np.int64)
    behind = np.minimum(start + 1 + number, max_tokens - 1)
    if drafted is not None:
        own = np.where(here & (count < 0), np.minimum(_of(drafted)[safe], most), 0)
        is_own = (number < own) & (number + 1 < rows)
        draft = np.where(is_own, known[safe, behind], draft)
        inside = inside | is_own
    good = inside & (draft >= 0) & (draft < vocab_size)
    drafts = np.where(good, most_rows, number).min(axis=1, keepdims=True)
    used = np.minimum(np.minimum(drafts + 1, rows), np.maximum(np.minimum(room, max_tokens) - start, 0))
    used = np.where(here, used, 0)
    written = number + 1 < used
    known[np.broadcast_to(safe, written.shape)[written], behind[written]] = draft[written]
    mine, forwarded = number < rows, number < used
    places = (row + number)[mine]
    _of(row_lanes)[places] = np.where(forwarded, lane, -1)[mine]
    _of(row_starts)[places] = np.where(forwarded, start + number, 0)[mine]
    if row_counts is not None:
        _of(row_counts)[places] = forwarded[mine]
    if noise is not None and floats is not None:
        _of(floats)[places, 1] = _noise_at(noise, start + 1 + number - first, forwarded)[mine]
    return _int32(start), _int32(used)


def accept_drafts(
    runs: torch.Tensor,
    samples: torch.Tensor,
    placed: torch.Tensor,
    used: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    most_rows: int,
) -> torch.Tensor:
    """As `drafts.accept_drafts`."""
    known, sampled = _of(tokens), _of(samples)
    num_lanes, max_tokens = known.shape
    lane, row, rows, start = _of(runs).T[:4, :, None].copy()
    start[: len(placed), 0] = _of(placed)
    rows[: len(placed), 0] = _of(used)
    here = (lane >= 0) & (lane < num_lanes)
    rows, safe = np.where(here, rows, 0), np.where(here, lane, 0)
    number = np.arange(most_rows)[None]
    sample = sampled[np.where(number < rows, row + number, 0)]
    behind = np.minimum(start + 1 + number, max_tokens - 1)
    right = (number + 1 < rows) & (sample == known[safe, behind])
    counts = np.minimum(np.where(right, most_rows, number).min(axis=1, keepdims=True) + 1, rows)
    # the last sample of a context that is full is read by no step
    written = (number < counts) & (start + 1 + number < max_tokens)
    known[np.broadcast_to(safe, written.shape)[written], behind[written]] = sample[written]
    _of(lengths)[lane[here]] = (start + counts)[here]
    return _int32(counts)


def draft_room(
    lanes: torch.Tensor, rooms: torch.Tensor, lengths: torch.Tensor, drafted: torch.Tensor, most: int, max_tokens: int
) -> None:
    """As `own_drafts.draft_room`."""
    here = _of(lanes) >= 0
    lane = _of(lanes)[here]
    _of(drafted)[lane] = np.clip(np.minimum(_of(rooms)[here], max_tokens - 1) - _of(lengths)[lane], 0, most)


def draft_rows(
    lanes: torch.Tensor, lengths: torch.Tensor, drafted: torch.Tensor, depth: int, each: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `own_drafts.draft_rows`."""
    lane = np.repeat(_of(lanes), each)
    safe = np.maximum(lane, 0)
    used = (lane >= 0) & (depth < _of(drafted)[safe])
    positions = _of(lengths)[safe].astype(np.int64) + depth + 1 - each + np.arange(len(lane)) % each
    return _int32(np.where(used, lane, -1)), torch.from_numpy(np.where(used, positions, 0))


def draft_noise(
    lanes: torch.Tensor,
    noise: torch.Tensor,
    first: torch.Tensor,
    lengths: torch.Tensor,
    depth: int,
    floats: torch.Tensor,
) -> None:
    """As `own_drafts.draft_noise`."""
    lane = _of(lanes)
    place = _of(lengths)[np.maximum(lane, 0)].astype(np.int64) + 1 + depth - _of(first)
    _of(floats)[: len(lane), 1] = _noise_at(noise, place[:, None], lane[:, None] >= 0)[:, 0]


def take_drafts(
    lanes: torch.Tensor,
    lengths: torch.Tensor,
    drafted: torch.Tensor,
    depth: int,
    samples: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """As `own_drafts.take_drafts`."""
    lane = _of(lanes)
    safe = np.maximum(lane, 0)
    place = _of(lengths)[safe].astype(np.int64) + 1 + depth
    used = (lane >= 0) & (depth < _of(drafted)[safe]) & (place < tokens.shape[1])
    _of(tokens)[lane[used], place[used]] = _of(samples)[used]


def shift_states(
    states: torch.Tensor,
    kept: torch.Tensor,
    lanes: torch.Tensor,
    starts: torch.Tensor,
    first_rows: torch.Tensor,
    max_tokens: int,
) -> torch.Tensor:
    """As `states.shift_states`."""
    rows = _Rows(len(states), lanes, starts, first_rows, len(kept), max_tokens)
    out = torch.zeros_like(states)
    follows = rows.follows
    inner = torch.from_numpy(np.flatnonzero(follows))
    out[inner] = states[inner - 1]
    outer = np.flatnonzero(rows.used & ~follows & (rows.positions > 0))
    out[torch.from_numpy(outer)] = kept[torch.from_numpy(rows.lanes[outer])]
    return out


def keep_states(
    states: torch.Tensor,
    depth: int,
    lengths: torch.Tensor,
    num_runs: int,
    lanes: torch.Tensor,
    starts: torch.Tensor,
    first_rows: torch.Tensor,
    tables: torch.Tensor,
    kept: torch.Tensor,
    carried: torch.Tensor,
    *,
    shares: int,
    first_share: int,
    block_tokens: int,
) -> None:
    """As `states.keep_states`."""
    count, width = states.shape
    rows = _Rows(count, lanes, starts, first_rows, len(kept), tables.shape[1] * block_tokens)
    stands = rows.used & ((np.arange(count) >= num_runs) | (rows.positions < _of(lengths)[rows.lanes]))
    goes_on = np.zeros(count, np.bool_)
    goes_on[:-1] = (stands & rows.follows)[1:]
    last = np.flatnonzero(stands & ~goes_on)
    kept[torch.from_numpy(rows.lanes[last]), depth] = _since(depth, states, rows.positions, last)
    ends = np.flatnonzero(stands & (~goes_on | ((rows.positions + 1) % block_tokens == 0)))
    if not len(ends):
        return
    blocks = _of(tables)[rows.lanes[ends], rows.positions[ends] // block_tokens].astype(np.int64)
    held, cells = carried.shape[2], carried.shape[4]
    # the last depth's cells go on with zeros to the end of the block
    first, stop = depth * width, block_tokens * shares * cells if depth == kept.shape[1] - 1 else (depth + 1) * width
    made = states.new_zeros((len(ends), stop - first))
    made[:, :width] = _since(depth, states, rows.positions, ends)
    token, rest = np.divmod(np.arange(first, stop), cells * shares)
    share, cell = np.divmod(rest, cells)
    here = np.flatnonzero((share >= first_share) & (share < first_share + held))
    at = [torch.from_numpy(each[here]) for each in (token, share - first_share, cell)]
    carried[torch.from_numpy(blocks)[:, None], at[0], at[1], 0, at[2]] = made[:, torch.from_numpy(here)]


def _since(depth: int, states: torch.Tensor, positions: Ints, rows: Ints) -> torch.Tensor:
    """The states of these rows; zeros of positions before `depth`, where a layer has none."""
    found = states[torch.from_numpy(rows)]
    found[torch.from_numpy(positions[rows] < depth)] = 0
    return found


def digest_rows(rows: torch.Tensor | None, out: torch.Tensor, salt: int) -> None:
    """As `digest.digest_rows`, by XXH3: other numbers, of which four are none that is always 0."""
    digest = xxhash.xxh3_128()
    if rows is not None:
        digest.update(_of(rows.view(-1).view(torch.uint8)).data)
    numbers = _of(out)
    numbers[:] = np.zeros(PARTS, np.int32)
    numbers[0] = salt & 0x7FFFFFFF
    numbers[1:5] = np.frombuffer(digest.digest(), "<i4")


def _noise_at(noise: torch.Tensor, places: Ints, used: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The noise [S, n] at these places of each sequence; 0 where none is used or there is none."""
    drawn = _of(noise)
    inside = used & (places >= 0) & (places < drawn.shape[1])
    rows = np.arange(len(drawn))[:, None]
    found: NDArray[np.float64] = np.where(inside, drawn[rows, np.where(inside, places, 0)], 0.0)
    return found


def _int32(column: NDArray[Any]) -> torch.Tensor:
    """[n] of [n] or [n, 1]."""
    return torch.from_numpy(column.reshape(-1).astype(np.int32))
