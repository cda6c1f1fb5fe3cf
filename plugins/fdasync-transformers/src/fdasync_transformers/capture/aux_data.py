"""The aux data of a model: its producers, called together.

Step models and the parts of steps know one object, `AuxData`, and no producer. Made by `start/aux_producers.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from fdasync.cache.aux import AuxSpec
    from fdasync_transformers.capture.aux_producer import AuxProducer


class AuxData:
    """The producers of a runner, in the order of its specs; a row is of all of them or of none.

    Attributes:
        producers: none where no datum is recorded.
    """

    def __init__(self, producers: Sequence[AuxProducer] = ()) -> None:
        self.producers = tuple(producers)

    @property
    def specs(self) -> tuple[AuxSpec, ...]:
        """Of the producers, in their order."""
        return tuple([producer.spec for producer in self.producers])

    @property
    def token_nbytes(self) -> int:
        """Bytes of a token's rows, of all specs."""
        return sum(spec.token_nbytes for spec in self.specs)

    def attach(self, max_step_tokens: int) -> None:
        """Attach all producers to the model, for passes of at most so many tokens. Where it fails, `close` detaches
        those that were attached."""
        for producer in self.producers:
            producer.attach(max_step_tokens)

    def begin(self, positions: torch.Tensor) -> None:
        """Call before a forward pass of tokens at these positions (int64 [T], on the device)."""
        for producer in self.producers:
            producer.begin(positions)

    def end(self) -> None:
        """Call after the forward pass. Raises NotRecorded if a layer wrote nothing."""
        for producer in self.producers:
            producer.end()

    def stage(self, count: int) -> dict[str, torch.Tensor]:
        """Copy the rows of the last pass's `count` tokens aside on the device; by the name of their spec."""
        return {producer.spec.name: producer.stage(count) for producer in self.producers}

    def read(
        self, staged: Mapping[str, NDArray[np.generic]], positions: NDArray[np.int64]
    ) -> dict[str, NDArray[np.generic]]:
        """The rows of `stage`, copied to the host, as the specs' dtypes: the argument of `AuxArena.scatter`.

        Raises InvariantBroken where rows cannot be of these positions.
        """
        values = {
            producer.spec.name: staged[producer.spec.name].view(producer.spec.dtype) for producer in self.producers
        }
        for producer in self.producers:
            producer.check(values[producer.spec.name], positions)
        return values

    def close(self) -> None:
        """Detach all producers from the model; may be called twice."""
        # in reverse order of attaching
        for producer in reversed(self.producers):
            producer.close()
