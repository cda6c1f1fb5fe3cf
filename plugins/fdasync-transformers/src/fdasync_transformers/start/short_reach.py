"""Makes windows, chunks and temperature floors of a model short for a while, so that a short sequence crosses them.

A family that differs from plain attention only beyond its window would pass a self-check whose sequences end before it.
Sizes up to `PLAYED_TOKENS` are crossed as they are; larger ones are set to `SHORT_TOKENS` in the config and in every
module that keeps a copy, and set back afterwards. Knows names of the library's config fields; knows no steps. Called by
`open_model.py` around the self-check.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

#: sizes up to this one are crossed as they are
PLAYED_TOKENS = 256
#: larger sizes are made this for the check: shorter than its sequences, and odd, so that no block ends with it
SHORT_TOKENS = 13
# sizes in tokens beyond which a family's attention changes
_FIELDS = ("sliding_window", "attention_chunk_size", "floor_scale", "index_topk")
# in rotary parameters with a temperature by position: its floor
_ROPE_FLOOR = "original_max_position_embeddings"


def sizes_of(model: PreTrainedModel) -> dict[str, int]:
    """The sizes that the config names, by field."""
    found = {name: getattr(model.config, name, None) for name in _FIELDS}
    if rope := _temperature_rope(model):
        found[_ROPE_FLOOR] = rope.get(_ROPE_FLOOR)
    return {name: value for name, value in found.items() if isinstance(value, int) and value > 0}


@contextmanager
def short_reach(model: PreTrainedModel) -> Iterator[tuple[str, ...]]:
    """Within the context the model's large sizes are short; yields notes for people, one for each of them."""
    large = {name: size for name, size in sizes_of(model).items() if size > PLAYED_TOKENS}
    # attributes of the config and of modules, as their dictionaries
    holders = [vars(model.config), *(vars(module) for module in model.modules())]
    if rope := _temperature_rope(model):
        holders.append(rope)
    # a module may keep a size as a number of another type (llama 4's floor scale)
    changed = [
        (holder, name, size) for holder in holders for name, size in large.items() if holder.get(name, None) == size
    ]
    try:
        for holder, name, _ in changed:
            holder[name] = SHORT_TOKENS
        yield tuple(f"self-check: {name} {size} played as {SHORT_TOKENS}" for name, size in large.items())
    finally:
        for holder, name, size in changed:
            holder[name] = size


def _temperature_rope(model: PreTrainedModel) -> dict[str, Any] | None:
    """The rotary parameters of a model that takes its queries' temperature from them (mistral4)."""
    rope = getattr(model.config, "rope_parameters", None)
    return rope if isinstance(rope, dict) and "llama_4_scaling_beta" in rope else None
