"""Steps of the sampler's kernels behind a warm-up, and what each would compile: also without a GPU.

Run as a process of its own by `test_warm_up.py`, since kernels in a process with Triton's interpreter are not compiled.
It launches nothing: it asks Triton which variant of a kernel each launch would take on Hopper. For each argument, such
as 333:bfloat16, it prints as JSON the number of variants that the warm-up of such logits takes, and the launches behind
it that would take another one.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from fdasync_transformers.sampling.plan import MASKS, plan_samples
from fdasync_transformers.sampling.sampler import sample_on_device
from fdasync_transformers.sampling.token_logprobs import normalisers_on_device
from fdasync_transformers.sampling.warm_up import USUAL, warm_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fdasync.request import SamplerSpec

LANES, MAX_TOKENS = 40, 64


def other_steps() -> Iterator[tuple[str, list[SamplerSpec]]]:
    """Steps of other sizes than those of the warm-up: one usual request many times, and all kinds in one step."""
    for count in (1, 2, 3, 4, 5, 17, 32):
        for name, own in USUAL.items():
            yield f"{count} rows, {name}", [own] * count
    everything = list(USUAL.values())
    for top in (1, 2, 16, 20, 32):
        more = [msgspec.structs.replace(own, raw=True, top=top) for own in everything]
        yield f"all kinds, {top} alternatives", more
        yield f"a draw with {top} alternatives", [msgspec.structs.replace(USUAL["temperature"], raw=True, top=top)]


def sample_step(logits: torch.Tensor, own: list[SamplerSpec], tokens: torch.Tensor) -> None:
    """Sample a step whose logits are the first rows of `logits`, as an executor does."""
    positions = [5 + row for row in range(len(own))]
    plan = plan_samples(own, positions, range(len(own)))
    sent = {name: torch.from_numpy(array).to(logits.device) for name, array in plan.arrays.items()}
    if plan.masked:
        words = -(-logits.shape[1] // 32)
        sent[MASKS] = torch.from_numpy(np.full((plan.masked, words), -1, np.int32)).to(logits.device)
    sample_on_device(logits[: len(own)], plan, sent, tokens)


def variants(vocab_size: int, dtype: torch.dtype) -> tuple[int, list[str]]:
    """How many the warm-up takes, and the steps behind it that would take a new one."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    seen: set[tuple[str, str]] = set()
    new: list[str] = []
    step = ""

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **others: Any) -> None:
        binder = create_function_from_signature(self.signature, self.params, backend)
        _, specialization, options = binder(*args, **others, debug=False)
        key = (self.fn.__name__, compute_cache_key({}, specialization, options))
        if step and key not in seen:
            new.append(f"{step}: {key[0]}")
        seen.add(key)

    JITFunction.run = run
    tokens = torch.zeros((LANES, MAX_TOKENS), dtype=torch.int32)
    warm_up(vocab_size, dtype, tokens)
    warmed = len(seen)
    logits = torch.zeros((LANES, vocab_size), dtype=dtype)
    for step, own in other_steps():  # noqa: B007 - `run` reads it
        sample_step(logits, own, tokens)
    for count in (2, 3, 16, 33):
        step = f"{count} tokens of a prompt"
        normalisers_on_device(logits[:count])
    return warmed, new


if __name__ == "__main__":
    sizes = {name: name.split(":") for name in sys.argv[1:]}
    print(json.dumps({name: variants(int(size), getattr(torch, dtype)) for name, (size, dtype) in sizes.items()}))
