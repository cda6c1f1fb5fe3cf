"""Which experts were chosen, of all engines together: shares, imbalance, experts that nobody chose.

Pure. Called by `summary.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.telemetry.sight.sight import Picks


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Picks under one set of weights.

    Attributes:
        version: label of the weights.
        layers: hidden-layer numbers.
        num_experts: of each layer.
        rows, counted: tokens that were computed, and tokens among them that were looked at: `table` is an estimate
            where `counted` is lower.
        table: picks [layers][experts].
        imbalance: of each layer, the picks of the busiest expert over the mean; 1: all are alike, 0: no picks.
        dead: (layer, expert) that nobody chose in what was counted, by hidden-layer number; () as long as chance alone
            may explain one.
    """

    version: str
    layers: tuple[int, ...]
    num_experts: int
    rows: int
    counted: int
    table: list[list[int]]
    imbalance: tuple[float, ...]
    dead: tuple[tuple[int, int], ...]


# an expert is called dead where, were all chosen alike, so many picks of it were to be expected
_EXPECTED = 20


def experts_of(tables: Sequence[Sequence[Picks]]) -> tuple[Experts, ...]:
    """Sums over engines, by weights.

    Args:
        tables: of each engine, newest first.
    """
    by_weights: dict[tuple[str, bytes], list[Picks]] = {}
    for own in tables:
        for picks in own:
            by_weights.setdefault((picks.version, picks.namespace), []).append(picks)
    return tuple([_sum_of(version, parts) for (version, _), parts in by_weights.items()])


def _sum_of(version: str, parts: Sequence[Picks]) -> Experts:
    first = parts[0]
    shape = (len(first.layers), first.num_experts)
    alike = [part for part in parts if (part.layers, part.num_experts) == (first.layers, first.num_experts)]
    table = sum([np.frombuffer(part.table, "<i8").reshape(shape) for part in alike], np.zeros(shape, np.int64))
    counted = sum([part.counted for part in alike])
    means = table.mean(axis=1)
    rows = sum([part.rows for part in alike])
    # picks that were really looked at, of an expert on average
    seen = means * (counted / rows if rows else 0.0)
    dead = [
        (first.layers[layer], int(expert))
        for layer in range(shape[0])
        if seen[layer] >= _EXPECTED
        for expert in np.flatnonzero(table[layer] == 0)
    ]
    return Experts(
        version=version,
        layers=first.layers,
        num_experts=first.num_experts,
        rows=rows,
        counted=counted,
        table=table.tolist(),
        imbalance=tuple(
            [float(most / mean) if mean else 0.0 for most, mean in zip(table.max(axis=1), means, strict=True)]
        ),
        dead=tuple(dead),
    )
