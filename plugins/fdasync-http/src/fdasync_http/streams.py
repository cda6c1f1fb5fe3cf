"""Reads a generator's stream as answers need it: what is new, and each sample once it is whole.

Knows no dialect. Called by the rooms of paths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fdasync import Delta, DeltaStream, Sample


async def read(stream: DeltaStream, *, at_end: bool = False) -> AsyncIterator[Delta | Sample]:
    """The deltas of a stream, and each of its samples once, behind its last delta.

    Args:
        at_end: samples come behind all deltas, when the request has ended and its result is there.

    Raises the error that the request ended with.
    """
    given: set[int] = set()
    async for delta in stream:
        yield delta
        if delta.finish_reason is not None and not at_end:
            given.add(delta.index)
            yield stream.sample(delta.index)
    # a router ends samples itself where their instance is silent: these have no last delta
    for sample in stream.result.samples:
        if sample.index not in given:
            yield sample
