"""Small builders that several test files share."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fdasync.cache.aux import AuxSpec
from fdasync.cache.identity import block_keys, root_key
from fdasync.events.catalog import RequestPrepared
from fdasync.request import SamplerSpec
from fdasync.runner.base import Capacity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from fdasync.result import Result, Sample


ROOT = root_key(b"tests")


def hold_up(seconds: float) -> None:
    """Block the loop as a trainer's step does, by a call that the guard against blocking calls does not know.

    Takes no CPU: other tests have use for it.
    """
    signal.sigtimedwait((), seconds)


SPECS = (AuxSpec("routing", (3, 2), "uint8"), AuxSpec("values", (4,), "float16"))


#: a policy and its settings; the last one lets prompts of a few tokens pass each other
POLICIES = st.sampled_from(
    [("arrival", {}), ("shortest-prompt-first", {}), ("shortest-prompt-first", {"ageing_s_per_token": 0.3})]
)
# `make test-all` plays more examples of each property and of each machine than `make test`
EXAMPLES = float(os.environ.get("FDASYNC_EXAMPLES", "0.5"))


def case_settings(max_examples: int, **options: Any) -> settings:
    # a busy machine must not fail a test: no deadlines, no complaint of slowness
    slow = [HealthCheck.too_slow]
    count = max(round(max_examples * EXAMPLES), 1)
    return settings(max_examples=count, deadline=None, print_blob=True, suppress_health_check=slow, **options)


def machine_settings(max_examples: int, steps: int) -> settings:
    return case_settings(max_examples, stateful_step_count=steps)


def make_sampler(prompt_len: int = 1, **changes: Any) -> SamplerSpec:
    return SamplerSpec(prompt_len=prompt_len, **changes)


def make_request(key: int, tokens: Iterable[int], max_tokens: int, block_tokens: int, **fields: Any) -> RequestPrepared:
    """What prepare publishes for a prompt; rows from position 0 are wanted unless `start` says otherwise."""
    prompt = tuple(tokens)
    values: dict[str, Any] = {
        "key": key, "group": key, "tokens": prompt, "max_tokens": max_tokens, "start": 0, "root": ROOT,
        "block_keys": tuple(block_keys(ROOT, prompt, block_tokens)), "sampler": make_sampler(len(prompt)), "at": 1.0,
    }  # fmt: skip
    return RequestPrepared(**{**values, **fields})


def make_capacity(**changes: Any) -> Capacity:
    values: dict[str, Any] = {
        "model": "m", "fingerprint": "f", "weights_id": "w", "vocab_size": 300, "eos_ids": (7,),
        "max_context_tokens": 100, "block_tokens": 4, "num_blocks": 20, "block_nbytes": 64, "kv_layout": "l",
        "kv_dtype": "d", "aux_specs": SPECS, "moe_layer_ids": (1, 3, 5), "num_experts": 16, "top_k": 2,
    }  # fmt: skip
    return Capacity(**{**values, **changes})


def check_early_samples(early: Sequence[Sample], result: Result) -> None:
    """Samples that a stream gave at their last deltas are those of its result, whole."""
    for sample in early:
        end = result.samples[sample.index]
        assert _plain(sample) == _plain(end), f"sample {sample.index} was another one when it ended"
        for one, other in zip(_arrays(sample), _arrays(end), strict=True):
            np.testing.assert_array_equal(one, other)


def _plain(sample: Sample) -> Sample:
    return msgspec.structs.replace(sample, routing=None, aux={}, raw_logprobs=None, processed_logprobs=None)


def _arrays(sample: Sample) -> list[NDArray[Any]]:
    routing = None if sample.routing is None else sample.routing.array
    arrays = (routing, sample.raw_logprobs, sample.processed_logprobs, *sample.aux.values())
    return [array for array in arrays if array is not None]
