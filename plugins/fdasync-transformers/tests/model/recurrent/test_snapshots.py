"""Every recurrent family, by hand-made steps: it continues from a snapshot bit by bit as if nothing had happened, and
answers as one plain pass does."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from fdasync_transformers.execution.model_memory import HostMemory
from fdasync_transformers.model.recurrent.states import States
from fdasync_transformers.tiny.checkpoints import make_tiny_model
from fdasync_transformers.tiny.families import FAMILIES
from recurrent_play import BLOCK, Player, plain, start
from structures import by_structure

from fdasync.errors import InvariantBroken

SERVED = [name for name, entry in FAMILIES.items() if entry.recurrent and not entry.refused and entry.vision is None]
LENGTH = 5 * BLOCK


def tokens_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, LENGTH).tolist()


def rest(player: Player, key: int) -> torch.Tensor:
    """The last three blocks: a chunk of each of two, then tokens one by one."""
    out = [player.step(chunks=[(key, BLOCK, False)]), player.step(chunks=[(key, BLOCK, True)])]
    return torch.cat([*out, *(player.step() for _ in range(BLOCK))])


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("family", by_structure(SERVED, also=("zaya",), ahead=("lfm2_moe", "nemotron_h", "qwen3_next")))
def test_a_snapshot_continues_bit_by_bit(family: str) -> None:
    model = make_tiny_model(family)
    tokens, other = tokens_of(1), tokens_of(2)
    wanted = plain(model, tokens)
    player = Player(model)
    # within one chunk: the place is written as the state was at its position
    takes = [(1, BLOCK, 0), (1, 2 * BLOCK, 2)]
    first = player.step(starts=[start(1, tokens, [3, 9, 4, 8, 1])], chunks=[(1, 2 * BLOCK, False)], takes=takes)
    whole = torch.cat([first, rest(player, 1)])
    torch.testing.assert_close(whole, wanted, rtol=1e-3, atol=1e-3)
    # another sequence had the lane in between
    player.step(leaves=[1], starts=[start(2, other, [11, 12, 13, 14, 15])], chunks=[(2, LENGTH, True)])
    again = player.step(
        leaves=[2], starts=[start(3, tokens, [3, 9, 20, 21, 22], 2 * BLOCK, 2)], chunks=[(3, BLOCK, False)]
    )
    again = torch.cat([again, player.step(chunks=[(3, BLOCK, True)]), *(player.step() for _ in range(BLOCK))])
    assert torch.equal(again, whole[2 * BLOCK :])
    # the other place holds the state of an earlier position
    middle = player.step(
        leaves=[3], starts=[start(4, tokens, [3, 23, 24, 25, 26], BLOCK, 0)], chunks=[(4, 4 * BLOCK, True)]
    )
    torch.testing.assert_close(middle, wanted[BLOCK:], rtol=1e-3, atol=1e-3)


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
    memory = HostMemory()
    memory.bind(player.pool, states)
    memory.release(("kv_cache",), keep_weights=True)
    memory.regain("kv_cache")
    # whole pages came back as zeros
    assert int((states.memory == 0).sum()) >= states.memory.nbytes - 2 * mmap.PAGESIZE > 0
