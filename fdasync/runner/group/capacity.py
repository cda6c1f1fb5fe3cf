"""The capacity of a group: values that its ranks agree on, and the least of values that may differ.

Pure. Called by `group.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import ConfigError
from fdasync.runner.base import Capacity
from fdasync.runner.group.errors import rank_name

if TYPE_CHECKING:
    from collections.abc import Sequence

# measured by each rank for itself, gathered to rank 0, or for people
_OWN = ("num_blocks", "weights_id", "prefill_tokens_per_s", "notes", "tokenizer")


def agreed(capacities: Sequence[Capacity]) -> Capacity:
    """Rank 0's, with the fewest blocks of all.

    Raises ConfigError naming the field, a rank, and both values, where a rank differs from rank 0 in a field that all
    must share.
    """
    first = capacities[0]
    for rank, other in enumerate(capacities):
        for field in Capacity.__struct_fields__:
            mine, its = getattr(first, field), getattr(other, field)
            if field not in _OWN and mine != its:
                name = rank_name(rank, len(capacities))
                problem = f"Capacity.{field} of {name} is {its!r}, of rank 0 {mine!r}"
                raise ConfigError("config.tensor_parallel", problem, hint="all ranks must load the same model alike")
    return msgspec.structs.replace(first, num_blocks=min(capacity.num_blocks for capacity in capacities))
