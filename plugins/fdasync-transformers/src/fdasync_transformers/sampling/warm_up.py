"""Launches the sampler's kernels once at start-up, so that no request waits while they are compiled.

`USUAL` holds one `SamplerSpec` for each way in which requests usually sample. `warm_up` plans a step of one row for
each and samples it from made-up logits, and scores these as a prompt's logits. A kernel is compiled again for another
dtype or width of the logits and for the few constants that a plan chooses (whether anything changes logits, whether
there is a top-k or top-p); it is not for another number of rows. So one row of each is enough. Knows no models and no
requests. Called by `execution/parts/samples.py` on a GPU.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fdasync.request import SamplerSpec
from fdasync_transformers.sampling.plan import MASKS, plan_samples
from fdasync_transformers.sampling.sampler import sample_on_device
from fdasync_transformers.sampling.token_logprobs import normalisers_on_device

if TYPE_CHECKING:
    from collections.abc import Mapping

# one token of a prompt, and one sampled token
_PROMPT_LEN, _POSITION = 1, 2
# between two neighbours of the made-up logits, and the lowest of them
_STEP, _LOWEST = 0.5, -1000.0


def _spec(**asked: Any) -> SamplerSpec:
    """A draw at temperature 1 that asks for nothing else than `asked`."""
    return SamplerSpec(prompt_len=_PROMPT_LEN, **({"temperature": 1.0} | asked))


_PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
_BIAS: dict[str, Any] = {"bias_ids": struct.pack("<i", 0), "bias_values": struct.pack("<f", 1.0)}
_STOPS: dict[str, Any] = {"stop_ids": (0,), "min_tokens": _POSITION}

#: what requests usually ask for, by name
USUAL: Mapping[str, SamplerSpec] = {
    "greedy": _spec(temperature=0.0),
    "temperature": _spec(),
    "raw log-probs": _spec(raw=True),
    "raw log-probs of another temperature": _spec(temperature=0.7, raw=True),
    "top-k": _spec(top_k=20),
    "top-p": _spec(top_p=0.9),
    "top-k and top-p": _spec(top_k=20, top_p=0.9),
    "min-p": _spec(min_p=0.1),
    "alternatives": _spec(raw=True, top=5),
    "greedy with raw log-probs": _spec(temperature=0.0, raw=True),
    "penalties": _spec(**_PENALTIES),
    "bias": _spec(**_BIAS),
    "stop ids": _spec(**_STOPS),
    "grammar": _spec(grammar=b"any"),
    "penalties with top-k and top-p": _spec(top_k=20, top_p=0.9, **_PENALTIES),
    "bias with top-p and alternatives": _spec(top_p=0.9, processed=True, top=5, **_BIAS),
}


def warm_up(vocab_size: int, dtype: torch.dtype, tokens: torch.Tensor) -> None:
    """Queue one step of each of `USUAL` on the current stream. Compiles on the calling thread: tens of seconds where
    Triton's cache on the disk has none of the kernels.

    Args:
        vocab_size: V of the logits that will be sampled.
        dtype: of the logits: bfloat16, float16 or float32.
        tokens: int32 [lanes, max_tokens], the table of known tokens that steps will pass, on the device where the
            kernels run; read only. Penalties are left out where `max_tokens` is less than 2.

    Raises what a step of the kernels may raise.
    """
    device = tokens.device
    # they fall quickly, so that few ids are within reach of a top-p
    logits = (torch.arange(vocab_size, device=device) * -_STEP).clamp(min=_LOWEST).to(dtype)[None]
    for spec in USUAL.values():
        plan = plan_samples([spec], [_POSITION], [0])
        if plan.longest > tokens.shape[1]:
            continue
        sent = {name: torch.from_numpy(array).to(device) for name, array in plan.arrays.items()}
        if plan.masked:
            everything = np.full((plan.masked, -(-vocab_size // 32)), -1, np.int32)
            sent[MASKS] = torch.from_numpy(everything).to(device)
        sample_on_device(logits, plan, sent, tokens)
    # prompts that are scored
    normalisers_on_device(logits)
