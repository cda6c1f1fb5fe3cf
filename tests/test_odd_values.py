"""Values that no field takes, in each field of each call: refused by a typed error that can be printed, or taken; never
an error of Python's own. Lone surrogates come with JSON, numpy's scalars with a trainer's code."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fdasync import Grammar, SamplingParams, WeightsGroup
from fdasync.engine.config import EngineConfig
from fdasync.errors import BadInput, FdasyncError
from fdasync.testing import LetterTokenizer, synthetic_config, synthetic_engine
from tests.engine.updates import weights

LONE = json.loads('"a\\ud800"')
ODD: list[Any] = [
    LONE, np.int64(3), np.float32(1.0), np.float64(1.0), np.bool_(True), np.str_("a"), np.array([1, 2]), np.array(3),
    [LONE], [np.int64(1)], (np.float32(1),), {LONE: 1}, {1: LONE}, {np.int64(1): 1.0}, {1: np.float32(1)}, b"\xff",
    object(), 10**400, float("nan"), float("inf"), [[LONE]], {"kind": LONE, "text": "a"},
    {"kind": "regex", "text": LONE}, set(), iter(()), 2**70, -(2**70), 1j,
]  # fmt: skip
odd_ones = pytest.mark.parametrize("odd", ODD, ids=[f"{type(odd).__name__}-{at}" for at, odd in enumerate(ODD)])


class Typed:
    """Lets calls fail by errors of the package alone, which can be printed."""

    def __enter__(self) -> Typed:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, FdasyncError):
            return False
        str(error).encode()
        return True


@odd_ones
def test_sampling_params(odd):
    for field in SamplingParams.__struct_fields__:
        with Typed():
            SamplingParams.from_mapping({field: odd})
        with Typed():
            SamplingParams(**{field: odd}).validated(vocab_size=100)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_tokens": LONE}, "max_tokens"),
        ({"temperature": LONE}, "temperature"),
        ({"temperature": 1.0, "seed": LONE, "n": 3}, "seed"),
        ({"stop": LONE}, "stop"),
        ({"stop": ["a", LONE]}, "stop"),
        ({"logit_bias": np.int64(3)}, "logit_bias"),
        ({"logit_bias": {1: LONE}}, "logit_bias[1]"),
        ({"stop_token_ids": [LONE]}, "stop_token_ids[0]"),
        ({"max_tokens": np.int64(3)}, "max_tokens"),
        ({"grammar": {"kind": LONE, "text": "a"}}, "grammar.kind"),
        ({"grammar": {"kind": "regex", "text": LONE}}, "grammar"),
        ({LONE: 1}, f"{LONE!r}"),
    ],
)
def test_the_field_is_named(values, field):
    with pytest.raises(BadInput) as caught:
        SamplingParams.from_mapping(values)
    assert caught.value.field == field


def test_a_grammar_that_its_caller_made_is_named():
    for grammar in (Grammar(LONE, "a"), Grammar("regex", LONE), Grammar("regex", np.int64(1))):
        with pytest.raises(BadInput) as caught:
            SamplingParams(grammar=grammar).validated(vocab_size=100)
        assert caught.value.field == "grammar"


@pytest.mark.ci(after=5)
@odd_ones
def test_configurations(odd):
    for field in EngineConfig.__struct_fields__:
        with Typed():
            EngineConfig.from_mapping({field: odd})


_OPTIONS = ("request_id", "priority", "deadline_s", "routing", "aux", "start", "cache_salt", "trace")


@pytest.mark.ci(after=14)
@odd_ones
async def test_calls_of_an_engine(odd):
    config = synthetic_config({"vocab_size": 60, "chosen_top_k": 3}, request_deadline_s=60.0)
    params = SamplingParams(max_tokens=1)
    tensor = ("weights", "uint64", (1,), (5).to_bytes(8, "little"))
    async with synthetic_engine(config, tokenizer=LetterTokenizer()) as engine:
        calls = [
            *[lambda option=option: engine.complete([1, 2], params, **{option: odd}) for option in _OPTIONS],
            *[lambda prompt=prompt: engine.complete(prompt, params) for prompt in (odd, [odd], [1, odd])],
            lambda: engine.complete([1], odd),
            lambda: engine.pause(odd),
            lambda: engine.resume(),
            lambda: engine.update_weights(odd, [tensor]),
            lambda: engine.update_weights(None, odd),
            lambda: engine.update_weights(None, [tensor], odd),
            lambda: engine.update_weights(None, [tensor], expected=odd),
            *[
                lambda at=at: engine.update_weights(None, [(*tensor[:at], odd, *tensor[at + 1 :])])
                for at in range(len(tensor))
            ],
            lambda: engine.update_weights(None, [("weights", "uint64", (odd,), bytes(8))]),
            lambda: engine.set_weight_version(odd),
            lambda: engine.begin_weight_update(odd),
            lambda: engine.end_weight_update(odd),
            lambda: engine.abandon_weight_update(),
            lambda: engine.leave_weights_group(odd),
            lambda: engine.join_weights_group(odd),
            lambda: engine.sleep(odd),
            lambda: engine.sleep(0, odd),
            lambda: engine.sleep(0, tags=odd),
            lambda: engine.wake(odd),
            lambda: engine.wake(),
        ]
        for call in calls:
            with Typed():
                await call()
        for field in WeightsGroup.__struct_fields__:
            values = {"name": "g", "address": "127.0.0.1", "port": 1, "world_size": 2, "rank": 1}
            with Typed():
                await engine.join_weights_group(WeightsGroup(**{**values, "timeout_s": 0.001, field: odd}))
        for verb in (engine.abort, engine.abort_all):
            with Typed():
                verb(odd)
        # whatever was refused, it goes on
        await engine.update_weights(None, weights(1))
        assert (await engine.complete([1, 2], params)).finish_reason in ("length", "stop")
