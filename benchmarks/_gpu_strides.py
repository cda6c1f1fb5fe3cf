"""The part of `gpu_attention` about where heads stand: in shares, one after the other, or side by side in a token.

Pools had all heads of a token side by side before blocks were made of shares; the kernels still take such views. Both
are views of one pool here, timed in alternation, so that a slow moment of the machine falls on both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks._gpu_attention_rig import Rig
    from benchmarks._report import Report


def measure_strides(rig: Rig, rounds: int, report: Report) -> None:
    """Adds `*_us_*` of shares, `*_beside_us_*` of heads side by side, and the median of their ratios, round by round:
    above 1 where shares are slower."""
    sizes = rig.sizes
    works: dict[str, tuple[list[Callable[[], object]], int]] = {}
    beside = replace(rig, beside=True)
    both = (rig, beside)
    for count, length in sizes.decodes:
        works[f"decode_{{}}_{count}x{length}"] = ([one.decode(count, length) for one in both], sizes.layers)
    for count, cached, length in sizes.prefills:
        name = f"prefill_{{}}_{count}x{length}" + (f"@{cached}" if cached else "")
        works[name] = ([one.prefill(count, cached, length) for one in both], sizes.prefill_layers)
    for count in sizes.stores:
        works[f"store_{{}}_{count}"] = ([one.store(count) for one in both], sizes.layers)
    times: dict[str, list[list[float]]] = {name: [[], []] for name in works}
    for number in range(2 * rounds + 1):
        for name, (runs, layers) in works.items():
            for which in (0, 1) if number % 2 else (1, 0):
                us = rig.ms(runs[which]) * 1e3 / layers
                if number:
                    times[name][which].append(us)
    for name, (shares, side) in times.items():
        report.add(name.format("us"), shares)
        report.add(name.format("beside_us"), side)
        report.add(name.format("ratio"), [one / other for one, other in zip(shares, side, strict=True)], aim=1.0)
