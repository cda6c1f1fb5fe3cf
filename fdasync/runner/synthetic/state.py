"""The recurrent state of the synthetic model, live and in snapshots.

A state is some words of 64 bits. Each token multiplies every word by an odd number of its own and adds its KV word
(`Oracle.states`), and what a position gives depends on every bit of the state behind it: a state that is stale, of
another sequence or of another position changes tokens and rows.

Copies to the host move their bytes at their end, and spoil their targets at their beginning. The module knows no
sequence but by its lane, and no time. Called by `steps.py` and `runner.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import InvariantBroken
from fdasync.events.actions import SwapOut
from fdasync.runner.synthetic.oracle import U64

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from fdasync.cache.host_arena import HostArena
    from fdasync.events.actions import RunStep, SwapIn

_SPOILT = U64(0xEEEE)


class States:
    """See the module.

    Args:
        words: of a state.
        place_nbytes: of a place of snapshots.
        host: places of snapshots on the host; None: there are none. The caller's.

    Attributes:
        live: uint64 [lanes, words].
    """

    def __init__(self, lanes: int, words: int, num_places: int, place_nbytes: int, host: HostArena | None) -> None:
        self.live = np.full((lanes, words), _SPOILT, U64)
        self._places = np.full((num_places, place_nbytes // 8), _SPOILT, U64)
        self._words = words
        self._host = host

    def begin(self, lane: int, place: int, num_cached: int) -> None:
        """A sequence starts in a lane, from a snapshot or, at -1, from nothing. Raises InvariantBroken."""
        if (place < 0) != (num_cached == 0):
            raise InvariantBroken(f"a sequence starts behind {num_cached} tokens, from snapshot {place}")
        self.live[lane] = self._places[place, : self._words] if place >= 0 else U64(0)

    def take(self, place: int, state: NDArray[np.uint64]) -> None:
        self._places[place, : self._words] = state

    def check(self, step: RunStep, copies: Iterable[SwapOut | SwapIn]) -> None:
        """Raise InvariantBroken where a step meets a copy in flight in a place, or has two writers of one."""
        written = [take.place for take in step.snapshots]
        read = {start.snapshot for start in step.starts if start.snapshot >= 0}
        if len(set(written)) != len(written) or read & set(written):
            raise InvariantBroken(f"step {step.step_id} takes snapshots {written}, and reads {sorted(read)}")
        for copy in copies:
            met = set(copy.snapshots) & (set(written) if isinstance(copy, SwapOut) else read | set(written))
            if met:
                raise InvariantBroken(f"step {step.step_id} and copy {copy.copy_id} meet in snapshots {sorted(met)}")

    def check_copy(self, copy: SwapOut | SwapIn, others: Iterable[SwapOut | SwapIn], flying: Iterable[RunStep]) -> None:
        """Raise InvariantBroken for a copy of snapshots that may not run now."""
        host = 0 if self._host is None else self._host.num_blocks
        for ids, count in ((copy.snapshots, len(self._places)), (copy.snapshots_host, host)):
            if len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= count:
                raise InvariantBroken(f"copy {copy.copy_id} names snapshots {ids}, there are {count}")
        if len(copy.snapshots) != len(copy.snapshots_host):
            raise InvariantBroken(f"copy {copy.copy_id} names {copy.snapshots} and {copy.snapshots_host}")
        outward = isinstance(copy, SwapOut)
        for step in flying:
            named = {take.place for take in step.snapshots}
            if not outward:
                named |= {start.snapshot for start in step.starts}
            if named & set(copy.snapshots):
                raise InvariantBroken(f"copy {copy.copy_id} and step {step.step_id} meet in a snapshot")
        for other in others:
            same_way = isinstance(other, SwapOut) == outward
            meets_device = set(other.snapshots) & set(copy.snapshots) and not (same_way and outward)
            meets_host = set(other.snapshots_host) & set(copy.snapshots_host) and not (same_way and not outward)
            if meets_device or meets_host:
                raise InvariantBroken(f"copies {other.copy_id} and {copy.copy_id} meet in a snapshot")

    def spoil(self, copy: SwapOut | SwapIn, *, writes: bool) -> None:
        """A copy begins: its target has no content that anybody may read."""
        if not isinstance(copy, SwapOut):
            self._places[list(copy.snapshots)] = _SPOILT
        elif writes and self._host is not None:
            self._host.kv[list(copy.snapshots_host)] = 0xEE

    def copy(self, copy: SwapOut | SwapIn, *, writes: bool) -> int:
        """Move a copy's bytes; returns how many."""
        if self._host is None or not copy.snapshots:
            return 0
        device, host = list(copy.snapshots), list(copy.snapshots_host)
        if isinstance(copy, SwapOut):
            if not writes:
                return 0
            self._host.kv[host] = self._places[device].view(np.uint8)
        else:
            self._places[device] = np.ascontiguousarray(self._host.kv[host]).view(U64)
        return len(device) * self._host.block_nbytes

    def release(self) -> None:
        """The device's memory goes: nothing of it may be read any more."""
        self.live[:] = _SPOILT
        self._places[:] = _SPOILT
