"""A recurrent family continues from a snapshot bit by bit, and answers as one plain pass does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from fdasync_transformers.tiny.families import FAMILIES
from recurrent_play import BLOCK, Player, plain, start
from structures import parted

if TYPE_CHECKING:
    from made import Made

PLAYED = parted(
    [name for name, entry in FAMILIES.items() if entry.recurrent and not entry.refused and entry.vision is None],
    also=("zaya",),
    ahead=("lfm2_moe", "nemotron_h", "qwen3_next"),
)
LENGTH = 5 * BLOCK


def tokens_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, LENGTH).tolist()


def rest(player: Player, key: int) -> torch.Tensor:
    """The last three blocks: a chunk of each of two, then tokens one by one."""
    out = [player.step(chunks=[(key, BLOCK, False)]), player.step(chunks=[(key, BLOCK, True)])]
    return torch.cat([*out, *(player.step() for _ in range(BLOCK))])


def a_snapshot_continues_bit_by_bit(made: Made) -> None:
    model = made.model()
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
