"""SGLang's `sampling_params`, and what they are here. Pure.

Fields and defaults are as in SGLang's own `SamplingParams`, which refuses other keys. Called by `asked.py`.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from fdasync_http.fields import Engine, Table, Unserved, engine, ignored, same, unserved

SAMPLING: Table = {
    **same(
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n",
        "stop", "stop_token_ids", "ignore_eos", "logit_bias",
    ),
    # null: what the context leaves
    "max_new_tokens": Engine(("max_tokens",), reads_null=True),
    "min_new_tokens": engine("min_tokens"),
    "sampling_seed": engine("seed"),
    **ignored("the tokenizer of the checkpoint says so", "spaces_between_special_tokens"),
    **ignored("tokens are sent as they are made", "stream_interval"),
    **unserved("give regex, ebnf or json_schema", "structural_tag"),
    **unserved("stop patterns are not read; give stop", "stop_regex"),
    "beam_width": Unserved("beams are not searched", (0, 1)),
    # slime asks so for the ids that top-p kept, and goes on without them
    "custom_params": Unserved(
        "no code of clients is run", ({}, {"return_top_p_token_ids": True}, {"return_top_p_token_ids": False})
    ),
}  # fmt: skip


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields on the wire; see SGLang's documentation."""

    RULES: ClassVar[Table] = SAMPLING

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int | None] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[int, float] | None = None
    sampling_seed: int | None = None
