"""Which rows count reaches the kernels of the experts in a step of an engine: `fused/live_rows.py` and its users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from device_path import DEVICE, ON_GPU
from fdasync_kernels.experts import chain, tiles
from fdasync_kernels.layer import finish
from fdasync_transformers.fused.layers import fuse
from fdasync_transformers.fused.layers.layer import Carry
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from step_driver import Driver

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = [3, 5, 9, 11, 2]
PADDED = 16


@pytest.mark.ci
@pytest.mark.skipif(ON_GPU, reason="a graph is replayed there: no function is called")
async def test_a_step_tells_experts_and_sums_its_padding_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By fused layers, which ask for the parts of experts and sum them. What is fused is proven by other tests."""
    seen: dict[str, list[list[bool] | None]] = {"experts": [], "finish": []}

    def watched(name: str, honest: Any) -> Any:
        def spy(*args: Any, **kwargs: Any) -> Any:
            live = kwargs["live"]
            seen[name].append(None if live is None else (live >= 0).tolist())  # blocking: a tensor of the CPU
            return honest(*args, **kwargs)

        return spy

    monkeypatch.setattr(fuse, "check_layer", lambda *_: None)
    monkeypatch.setattr(tiles, "all_tiles", lambda *_args, **_kwargs: ())
    # the layers take this one when they are fused, the other is looked up in each call
    monkeypatch.setattr(finish, "finish_experts", watched("finish", finish.finish_experts))
    make_tiny_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=1, mlp_only_layers=[])
    config = {**DEVICE, "experts": "fused", "fused_layers": True, "self_check": False}
    driver = await Driver.open(tmp_path, config=config)
    try:
        executor: Any = driver.runner.bound.executor
        executor.passes.flat_tokens = 0
        with executor._services.streams.on("compute"):
            executor.capture_mixed((PADDED,), 4)
        monkeypatch.setattr(chain, "experts", watched("experts", chain.experts))
        seen["finish"].clear()
        await driver.run([driver.sequence(PROMPT, 1)])
        wanted = [True] * len(PROMPT) + [False] * (PADDED - len(PROMPT))
        assert seen == {"experts": [wanted], "finish": [wanted]}
        # a pass of another caller has no padding
        assert driver.runner.opened.model.live.slots is None
    finally:
        await driver.close()


def test_a_norm_is_carried_to_the_very_tensor_it_was_made_for() -> None:
    carry = Carry()
    stream, normed = torch.randn(3, 4), torch.randn(3, 4)
    whole = carry.give(stream, normed)
    held = carry.take(whole)
    assert held is not None
    assert held[0] is stream
    assert held[1] is normed
    assert carry.take(whole) is None, "it is taken once"
    # equal values, and the same memory, are another tensor: it may have been changed in between
    for other in (whole.clone(), whole.view_as(whole)):
        carry.give(stream, normed)
        assert carry.take(other) is None
