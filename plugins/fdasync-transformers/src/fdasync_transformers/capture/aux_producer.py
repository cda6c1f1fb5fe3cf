"""The base of producers: a producer records one kind of per-token data during a model's passes.

A producer attaches hooks to a model, and owns the transient device buffer that they fill (`fdasync.gpu.capture`). It
writes within the forward pass, so that a CUDA graph contains its writes, and it waits for nothing. It knows no
sequences and no arenas. `routing.py`, `router_weights.py` and `layer_norms.py` are producers; `aux_data.py` makes the
producers of a runner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch.utils.hooks import RemovableHandle

    from fdasync.cache.aux import AuxSpec
    from fdasync.gpu.capture import StepRows


class AuxProducer:
    """Hooks on a model, and the buffer that they fill; attached when it is made, detached by `close`.

    A pass is `begin`, the model's forward, `end`, `stage`. A subclass adds its hooks to `_hooks`; each of them writes
    its layer's row of `_buffer`.
    """

    def __init__(self, buffer: StepRows) -> None:
        self._buffer = buffer
        self._hooks: list[RemovableHandle] = []

    @property
    def spec(self) -> AuxSpec:
        """Name, shape and dtype of a token's row."""
        return self._buffer.spec

    def begin(self, positions: torch.Tensor | None = None) -> None:  # noqa: ARG002
        """Call before a forward pass of tokens at these positions (int64 [T], on the device)."""
        self._buffer.begin()

    def end(self) -> None:
        """Call after the forward pass. Raises RunnerError if a layer wrote nothing."""
        self._buffer.expect()

    def stage(self, count: int) -> torch.Tensor:
        """Copy the rows of the last pass's `count` tokens aside on the device; see `StepRows.stage`."""
        return self._buffer.stage(count)

    def rows(self, count: int) -> NDArray[np.generic]:
        """Rows of the pass's `count` tokens, as the spec's dtype; valid until the next pass.

        Waits for the device. Raises RunnerError if a layer wrote nothing.
        """
        self.end()
        host: NDArray[np.generic] = self._buffer.buffer[:count].cpu().numpy()
        return host.view(self.spec.dtype)

    def check(self, rows: NDArray[np.generic], positions: NDArray[np.int64]) -> None:
        """Raise InvariantBroken where these rows cannot be of these positions. Most producers cannot tell."""

    def close(self) -> None:
        """Detach from the model; may be called twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
