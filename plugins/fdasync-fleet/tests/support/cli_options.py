"""Options of the command line as its parser gives them."""

from __future__ import annotations

from typing import Any


def options(**values: Any) -> dict[str, Any]:
    names = ("model", "config_path", "runner", "dtype", "device", "num_threads", "num_blocks", "block_tokens",
             "max_context_tokens", "max_running", "max_step_tokens", "host_blocks", "seed", "numerics",
              "sum_slices", "tensor_parallel")  # fmt: skip
    others = {"taps": (), "store": None, "store_required": False, "policy": None, "gpus": (), "share_gpus": False,
              "drafter": None, "draft_tokens": None}  # fmt: skip
    return {**dict.fromkeys(names), **others, **values}
