"""Each family of the catalogue, every night: all properties that need no more than its model and its checkpoint, on one
model and one checkpoint.

A property is a function of `support/checks`, which a test in the room of its subject plays by day, on a family of each
structure. A family fails with all properties that fail. What needs an engine or a runner in processes of its own, a GPU
or kernels in the interpreter stays with its tests: `parallel/test_ranks.py`, `fused/test_layers.py`, and
`tests/nightly/families` for whole engines.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import replay_checks as replay
from checks import kept, models, operations, routers, slices, snapshots, steps, weights
from fdasync_transformers.tiny.families import FAMILIES
from made import Made
from structures import parted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

#: what is checked, and of which families
PROPERTIES: dict[str, tuple[Callable[[Made], Any], Collection[str]]] = {
    "output wanders": (models.its_output_wanders, parted(FAMILIES).by_night),
    "operations": (operations.answers_as_before, operations.EXPECTED.keys() - operations.BY_DAY),
    "routers": (routers.fused_or_says_why, routers.PLAYED.by_night),
    "tensors": (weights.tensors_are_the_librarys, weights.PLAIN.by_night),
    "text half": (weights.a_text_half_is_that_of_the_whole, weights.WRAPPED.by_night),
    **{
        f"names of the whole: {whole}": (
            partial(weights.names_may_be_of_the_whole_or_of_the_text, of_whole=whole),
            weights.WRAPPED.by_night,
        )
        for whole in (True, False)
    },
    **{
        f"tensors and buffers, {dtype}": (
            partial(weights.tensors_and_buffers_are_those_of_from_pretrained, dtype=dtype),
            weights.PLAYED.by_night,
        )
        for dtype in ("float32", "bfloat16")
    },
    "update from a folder": (weights.a_folder_gives_what_a_fresh_load_gives, weights.PLAYED.by_night),
    **{
        f"update by names of the {names}": (
            partial(weights.all_tensors_give_what_a_fresh_load_gives, names=names),
            weights.PLAYED.by_night,
        )
        for names in ("checkpoint", "state")
    },
    "kept answers": (kept.answers_as_kept, kept.read().keys()),
    "steps": (steps.paged_steps_equal_generate, steps.PLAYED.by_night),
    "aux data": (steps.weights_and_norms_are_the_librarys, steps.RECORDED.by_night),
    "snapshots": (snapshots.a_snapshot_continues_bit_by_bit, snapshots.PLAYED.by_night),
    "live choice replayed": (replay.the_live_choice_changes_nothing, replay.PLAYED.by_night),
    "random rows replayed": (replay.random_rows_get_live_weights_and_true_gradients, replay.PLAYED.by_night),
    "replay with checkpointing": (replay.checkpointing_is_bit_equal, replay.PLAYED.by_night),
    "partial replay": (replay.rows_and_live_choices_mix, replay.PLAYED.by_night),
    "replay in bfloat16": (replay.bfloat16_is_bit_equal, replay.PLAYED.by_night),
    "replay in batches": (replay.padded_packed_and_alone_are_equal, replay.PLAYED.by_night),
    "sums in slices": (slices.the_same_bits_by_night, slices.BY_NIGHT),
}
#: without those that are played by day in all that they have
PLAYED = [name for name in FAMILIES if any(name in families for _, families in PROPERTIES.values())]


@pytest.mark.nightly
@pytest.mark.parametrize("family", PLAYED)
def test_each_family(tmp_path: Path, family: str, subtests: pytest.Subtests) -> None:
    made = Made(family, tmp_path)
    for name, (check, families) in PROPERTIES.items():
        if family in families:
            with subtests.test(name, family=family):
                checking = check(made)
                if checking is not None:
                    asyncio.run(checking)
