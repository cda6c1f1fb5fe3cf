"""SGLang's `sampling_params`, and what they are here. Pure.

Fields and defaults are as in SGLang's own `SamplingParams`, which refuses other keys. Called by `asked.py`.
"""

from __future__ import annotations

from typing import ClassVar

from fdasync_http.fields import Engine, Table, Unserved, engine, ignored, not_served
from fdasync_http.sampling import SamplingBody

SAMPLING: Table = {
    # null: what the context leaves
    "max_new_tokens": Engine(("max_tokens",), reads_null=True),
    "min_new_tokens": engine("min_tokens"),
    "sampling_seed": engine("seed"),
    **ignored("the tokenizer of the checkpoint says so", "spaces_between_special_tokens"),
    **ignored("tokens are sent as they are made", "stream_interval"),
    **not_served("give regex, ebnf or json_schema", "structural_tag"),
    **not_served("stop patterns are not read; give stop", "stop_regex"),
    "beam_width": Unserved("beams are not searched", (0, 1)),
    # slime asks so for the ids that top-p kept, and goes on without them
    "custom_params": Unserved(
        "no code of clients is run", ({}, {"return_top_p_token_ids": True}, {"return_top_p_token_ids": False})
    ),
}  # fmt: skip


class Sampling(SamplingBody, frozen=True, kw_only=True):
    """The fields on the wire; see SGLang's documentation."""

    RULES: ClassVar[Table] = SAMPLING

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    no_stop_trim: bool = False
    sampling_seed: int | None = None
