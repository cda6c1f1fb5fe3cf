"""Which copies of the synthetic runner may run beside its steps and its other copies.

While a copy runs, no step and no other copy may write its source, nor touch its target. Pure. Called by `runner.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken
from fdasync.events.actions import SwapOut

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.events.actions import SwapIn
    from fdasync.runner.input_batch import InputBatch
    from fdasync.runner.synthetic.steps import Flight


def check_blocks(copy: SwapOut | SwapIn, device_blocks: int, host_blocks: int) -> None:
    """Raise InvariantBroken for a copy of blocks that there are not.

    Args:
        device_blocks, host_blocks: how many there are.
    """
    if len(copy.device) != len(copy.host) or not copy.device:
        raise InvariantBroken(f"copy {copy.copy_id} has {len(copy.device)} device and {len(copy.host)} host blocks")
    for ids, count in ((copy.device, device_blocks), (copy.host, host_blocks)):
        if len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= count:
            raise InvariantBroken(f"copy {copy.copy_id} names blocks {ids}, there are {count}")


def check_beside_steps(copy: SwapOut | SwapIn, flights: Iterable[Flight], lanes: InputBatch, block_tokens: int) -> None:
    """Raise InvariantBroken where a step in flight writes the copy's blocks, or reads its target."""
    written: set[int] = set()
    read: set[int] = set()
    for flight in flights:
        written |= set((flight.batch.kv_index // block_tokens).tolist())
        for lane, length in zip(flight.batch.lanes, flight.ends, strict=True):
            read |= set(lanes.block_table(int(lane), int(length)).tolist())
    met = set(copy.device) & (written if isinstance(copy, SwapOut) else written | read)
    if met:
        raise InvariantBroken(f"copy {copy.copy_id} and a step in flight meet in device blocks {sorted(met)}")


def check_beside_copies(copy: SwapOut | SwapIn, others: Iterable[SwapOut | SwapIn]) -> None:
    """Raise InvariantBroken where another copy that runs reads or writes a block that one of the two writes."""
    outward = isinstance(copy, SwapOut)
    for other in others:
        both_out = outward and isinstance(other, SwapOut)
        both_in = not outward and not isinstance(other, SwapOut)
        if set(other.device) & set(copy.device) and not both_out:
            raise InvariantBroken(f"copies {other.copy_id} and {copy.copy_id} meet in a device block")
        if set(other.host) & set(copy.host) and not both_in:
            raise InvariantBroken(f"copies {other.copy_id} and {copy.copy_id} meet in a host block")
