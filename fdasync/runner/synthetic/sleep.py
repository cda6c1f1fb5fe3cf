"""What a synthetic runner does when its memory is released and taken back. Called by `runner.py`, its base.

KV that comes back has other content than before, and weights that were dropped are others until new ones are loaded: a
block or a weight that is read too early shows in tokens. The memory is really freed. Knows no copies and no time but
the configured one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from fdasync.errors import InvariantBroken, WakeFailed
from fdasync.runner.synthetic.oracle import U64
from fdasync.runner.synthetic.steps import SyntheticSteps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.request import MemoryPart
    from fdasync.runner.base import RunnerLimits
    from fdasync.runner.synthetic.oracle import SyntheticConfig

#: content that no step has written, and weights after they were dropped
SPOILT = 0xEEEE


class SyntheticSleep(SyntheticSteps):
    """See the module.

    Attributes:
        lacks_weights: dropped weights came back as memory only, and none were loaded since.
    """

    def __init__(self, config: SyntheticConfig, limits: RunnerLimits) -> None:
        super().__init__(config, limits)
        self.lacks_weights = False
        self._released: set[MemoryPart] = set()
        self._kept_weights = 0
        self._words = 0
        self._failed_wakes = 0

    @property
    def cannot_step(self) -> str:
        """Why no step can be computed and no block copied, or ""."""
        if self._released:
            return f"{', '.join(sorted(self._released))} released"
        return "its weights were dropped, and no others were loaded" if self.lacks_weights else ""

    async def release_memory(self, parts: Sequence[MemoryPart], *, keep_weights: bool) -> None:
        """See `Runner`."""
        if self._flights:
            raise InvariantBroken("memory is released while steps are in flight")
        again = self._released & set(parts)
        if again and (again != {"weights"} or keep_weights):
            raise InvariantBroken(f"{', '.join(sorted(again))} released twice")
        await asyncio.sleep(self.config.sleep_s)
        if "kv_cache" in parts:
            self._words = len(self._kv)
            self._kv, self._kv_stamps = np.zeros(0, U64), np.zeros(0, np.uint32)
            if self._states is not None:
                self._states.release()
        if "weights" in parts:
            if "weights" not in self._released:
                self._kept_weights = self.weights_id
            self.weights_id = SPOILT
            self.lacks_weights = self.lacks_weights or not keep_weights
        self._released.update(parts)

    async def regain_memory(self, part: MemoryPart) -> None:
        """See `Runner`."""
        if part not in self._released:
            raise InvariantBroken(f"{part} was to be taken back, and never released")
        await asyncio.sleep(self.config.sleep_s)
        if self._failed_wakes < self.config.fail_wakes:
            self._failed_wakes += 1
            raise WakeFailed(part, "it was told to fail")
        self._released.remove(part)
        if part == "kv_cache":
            self._kv, self._kv_stamps = self._allocate(self._words)
            self._kv[:] = U64(SPOILT)
            self._kv_stamps[:] = SPOILT
        elif part == "weights" and not self.lacks_weights:
            self.weights_id = self._kept_weights
