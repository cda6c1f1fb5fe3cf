"""Every recurrent family, by hand-made steps: it continues from a snapshot bit by bit as if nothing had happened, and
answers as one plain pass does."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import pytest
import torch
from checks.snapshots import PLAYED, a_snapshot_continues_bit_by_bit, tokens_of
from fdasync_transformers.execution.model_memory import HostSleep
from fdasync_transformers.model.recurrent.states import States
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from made import Made
from recurrent_play import BLOCK, Player, plain, start

from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("family", PLAYED.by_day)
def test_a_snapshot_continues_bit_by_bit(tmp_path: Path, family: str) -> None:
    a_snapshot_continues_bit_by_bit(Made(family, tmp_path))


@pytest.mark.parametrize("family", ["qwen3_next", "minimax", "zaya"])
def test_decodes_beside_chunks_keep_their_states_apart(family: str) -> None:
    model = make_tiny_model(family)
    prompts = [tokens_of(seed) for seed in (1, 2, 3)]
    cached = 2 * BLOCK
    prompts[2][:cached] = prompts[0][:cached]
    wanted = [plain(model, prompt) for prompt in prompts]
    player = Player(model)
    starts = [start(key, prompts[key], range(key * 5, key * 5 + 5)) for key in (0, 1)]
    out: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}

    def note(logits: torch.Tensor, *counts: tuple[int, int]) -> None:
        for (key, _), part in zip(counts, logits.split([count for _, count in counts]), strict=True):
            out[key].append(part)

    note(player.step(starts=starts, chunks=[(0, 9, True), (1, 4, False)]), (0, 9), (1, 4))
    # one decode takes a snapshot at a block's end, beside a chunk of one token
    note(player.step(chunks=[(1, 1, False)]), (0, 1), (1, 1))
    note(player.step(chunks=[(1, 3, True)], skips=[0]), (1, 3))
    for position in range(10, cached):
        takes = [(0, cached, 1)] if position == cached - 1 else []
        note(player.step(takes=takes), (0, 1), (1, 1))
    late = start(2, prompts[2], [0, 1, 20, 21, 22], cached, 1)
    note(player.step(starts=[late], chunks=[(2, 5, True)]), (0, 1), (1, 1), (2, 5))
    note(player.step(), (0, 1), (1, 1), (2, 1))
    for key, parts in out.items():
        got, first = torch.cat(parts), cached if key == 2 else 0
        torch.testing.assert_close(got, wanted[key][first : first + len(got)], rtol=1e-3, atol=1e-3)


def test_a_start_that_fits_no_snapshot_is_refused() -> None:
    player = Player(make_tiny_model("lfm2_moe"))
    for cached, place in ((BLOCK, -1), (0, 1), (BLOCK, 4)):
        with pytest.raises(InvariantBroken, match=f"behind {cached} tokens, from snapshot {place}"):
            player.states.check_start(place, cached)
    player.model.states = None
    with pytest.raises(InvariantBroken, match="which has no memory"):
        player.step(starts=[start(1, tokens_of(1), range(5))], chunks=[(1, 4, False)])


def test_state_is_released_with_the_blocks() -> None:
    player = Player(make_tiny_model("qwen3_next"))
    states = States(player.model.recurrent.layout, 4, 4, torch.device("cpu"))
    states.memory.fill_(0xFF)
    sleep = HostSleep(player.model.model, player.pool, states)
    sleep.release(("kv_cache",), keep_weights=True)
    sleep.regain("kv_cache")
    # whole pages came back as zeros
    assert int((states.memory == 0).sum()) >= states.memory.nbytes - 2 * mmap.PAGESIZE > 0
