"""A tiny model is random in every part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from fdasync_transformers.tiny.checkpoints import _KEPT, make_tiny_model

if TYPE_CHECKING:
    from made import Made


def its_output_wanders(made: Made) -> None:
    state = torch.random.get_rng_state()
    model = make_tiny_model(made.family)
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 33)[None], use_cache=False).logits
    assert logits.argmax(-1).unique().numel() > 8
    for key, value in model.state_dict().items():
        assert value.isfinite().all()
        if value.is_floating_point() and value.numel() > 1 and not key.endswith(_KEPT):
            assert value.unique().numel() > value.numel() // 2, key
