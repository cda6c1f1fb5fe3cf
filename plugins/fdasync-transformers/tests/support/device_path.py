"""What the tests of the device path share: where it runs here, and the answers of a fixed set of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from step_driver import Driver

if TYPE_CHECKING:
    from pathlib import Path


ON_GPU = torch.cuda.is_available()
DEVICE = {"kernels": "triton", "device": "cuda" if ON_GPU else "cpu", "num_threads": 1, "ranks_share_gpu": True}
# what the interpreter is given is small: a kernel takes it a tenth of a second
NEW = 12 if ON_GPU else 2


def make_small_checkpoint(folder: Path, family: str, **overrides: Any) -> Any:
    """A tiny checkpoint; for the interpreter of two layers, of which "qwen3_moe" has one dense and one of experts."""
    few = {} if ON_GPU else {"num_hidden_layers": 2}
    return make_tiny_checkpoint(folder, family, **few, **overrides)


async def answers(
    folder: Path,
    config: dict[str, Any],
    *,
    depth: int = 1,
    flat_tokens: int | None = None,
    tiled_tokens: tuple[int, ...] = (),
    new: int = NEW,
) -> list[tuple[list[int], Any, list[float]]]:
    """Tokens, rows as sets and log-probs of a ragged batch: late arrivals, chunks, penalties, sampling.

    `flat_tokens`: steps of so few tokens are computed as decodes; `tiled_tokens`: steps with prompts are padded to one
    of so many, and computed in tiles; `new`: tokens of each.
    """
    driver = await Driver.open(
        folder, config={"self_check": False, **config}, pipeline_depth=depth, max_running=flat_tokens or 4
    )
    try:
        executor: Any = driver.runner.bound.executor
        services = getattr(executor, "_services", None)
        if flat_tokens is not None:
            executor.passes.flat_tokens = flat_tokens
        if tiled_tokens:
            executor.passes.flat_tokens = 0
            with executor._services.streams.on("compute"):
                executor.capture_mixed(tiled_tokens, 4)
        asked = [
            driver.sequence([1 + at * 7 % 50 for at in range(5)], new),
            driver.sequence([3, 5, 9, 11, 2, 3, 4, 5, 6, 7, 9], new, 1, temperature=1.0, seed=4, raw=True),
            driver.sequence([3] * 9, new, repetition_penalty=1.3, presence_penalty=0.2),
        ]
        await driver.run(asked, chunks=2)
        if services is not None:
            assert (services.events.outstanding, services.pinned.outstanding, services.port.lost) == ({}, {}, 0)
        # a model without experts has no rows
        none = np.zeros((0, 0, 0), np.uint8)
        rows = [np.sort(driver.rows(one), -1) if driver.capacity.aux_specs else none for one in asked]
        return [(one.tokens, each, one.raw) for one, each in zip(asked, rows, strict=True)]
    finally:
        await driver.close()


def assert_same(
    got: list[tuple[list[int], Any, list[float]]], wanted: list[tuple[list[int], Any, list[float]]]
) -> None:
    for (tokens, rows, raw), (right_tokens, right_rows, right_raw) in zip(got, wanted, strict=True):
        assert tokens == right_tokens
        assert np.array_equal(rows, right_rows)
        assert np.allclose(raw, right_raw, atol=2e-4)
