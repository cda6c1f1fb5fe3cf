"""Sequences of a trainer's batch attend to themselves alone, whatever stands behind them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fdasync_trainer.numerics.segments import HostSegments
from fdasync_trainer.replay.layout import Spans
from fdasync_transformers.fixed.attention import KEYS
from fdasync_transformers.model.kv import Reach

LENGTHS = (3 * KEYS, 2 * KEYS + 1, 10, 2 * KEYS + 40)
REACHES = (Reach(), Reach("window", 70), Reach("chunk", 100))


def attended(lengths, parts, reach):
    lengths = np.array(lengths)
    spans = Spans(np.cumsum(lengths) - lengths, lengths, int(lengths.sum()))
    return HostSegments(spans, torch.device("cpu")).attend(*parts, reach, 0.3, None)


@pytest.mark.parametrize("reach", REACHES, ids=lambda reach: reach.kind)
@pytest.mark.parametrize("spoilt", range(len(LENGTHS)))
def test_a_sequence_of_no_numbers_spoils_no_other(spoilt, reach):
    torch.manual_seed(0)
    parts = [torch.randn(sum(LENGTHS), heads, 16) for heads in (4, 2, 2)]
    sequences = list(zip(*(torch.split(part, LENGTHS) for part in parts), strict=True))
    for part in sequences[spoilt]:
        part.fill_(float("nan"))
    whole = torch.split(attended(LENGTHS, parts, reach), LENGTHS)
    for place, (length, own) in enumerate(zip(LENGTHS, sequences, strict=True)):
        assert (
            whole[place].isnan().all() if place == spoilt else torch.equal(whole[place], attended([length], own, reach))
        )
