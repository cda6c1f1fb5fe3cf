"""Expert routing, captured where it takes effect.

Where kernels have replaced a router, they write the ids as they route (`fused/routers.py`). For all other routers a
hook before the experts copies the ids that they are about to use. Either way the one transient buffer
(`fdasync.gpu.capture`) gets the ids that were computed with, never recomputed ones. Shared experts and dense layers are
no routing. Knows no sequences. Found by its entry point (`aux_producer.py`), and made by `selfcheck.py` at start-up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fdasync_kernels.router.route import write_ids

from fdasync.cache.debug_rows import check_debug_rows
from fdasync.errors import RunnerError
from fdasync.gpu.capture import CaptureBuffer, copy_ids
from fdasync_transformers.capture.expert_calls import ExpertCalls

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


class RoutingCapture(ExpertCalls):
    """Hooks on a model and its fused routers, and the buffer that they fill; `close` detaches both."""

    _ids: CaptureBuffer
    _positions: torch.Tensor | None = None
    _attached = False

    def row(self) -> tuple[tuple[int, ...], str]:
        """Ids, as narrow as they allow."""
        return self.moe.spec.shape, self.moe.spec.dtype

    def watches(self, part: int) -> bool:
        return self.source.routers is None or part not in self.source.routers.rows

    def attach(self, max_step_tokens: int) -> None:
        super().attach(max_step_tokens)
        if self.source.routers is not None:
            self.source.routers.attach(self._ids, self._pass_positions)
            self._attached = True

    def make_buffer(self, max_step_tokens: int) -> CaptureBuffer:
        device = self.source.model.device
        copy = write_ids if device.type == "cuda" else copy_ids
        self._ids = CaptureBuffer(max_step_tokens, self.spec, device, debug=self.source.debug, copy=copy)
        return self._ids

    def begin(self, positions: torch.Tensor | None = None) -> None:
        """As `AuxProducer.begin`; positions are needed in debug."""
        self._positions = positions
        super().begin(positions)

    def record(self, part: int, seen: Any, /) -> torch.Tensor:
        return self.ids(part, seen)

    def write(self, part: int, seen: Any) -> None:
        self._ids.put(self.record(part, seen), part, self.moe.top_k[part], self._positions)

    def check(self, rows: NDArray[np.generic], positions: NDArray[np.int64]) -> None:
        """In debug, raise InvariantBroken unless these rows are of these positions."""
        if self.source.debug:
            check_debug_rows(rows, positions, self.spec, "as it came off the device")

    def close(self) -> None:
        super().close()
        # once: at a second call they may record for another capture
        if self._attached and self.source.routers is not None:
            self.source.routers.detach()
            self._attached = False

    def _pass_positions(self) -> torch.Tensor:
        if self._positions is None:
            raise RunnerError("routing_debug, and the pass has no positions")
        return self._positions
