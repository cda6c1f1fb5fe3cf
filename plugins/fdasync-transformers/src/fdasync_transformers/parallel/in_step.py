"""What the ranks tell each other at the end of each step: the tokens that rank 0 sampled, and that they computed alike.

Every rank sees the same sums, so all have the same hidden states, bit by bit, and choose the same experts. Each step
proves it: digests of the rows and of the last hidden states of every rank are compared. Knows rows, hidden states and
tokens; knows no models. Called by the executors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash

from fdasync.errors import RunnerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from fdasync_transformers.parallel.collectives import Collectives

_DIGEST_NBYTES = 16
# in the order of the digests
_DIFFERENCES = ("chose other experts than rank 0: their rows differ", "computed other hidden states than rank 0")


def share_step(
    collectives: Collectives,
    step_id: int,
    rows: Mapping[str, NDArray[np.generic]],
    hidden: torch.Tensor | None,
    tokens: NDArray[np.int32],
) -> NDArray[np.int32]:
    """The tokens that rank 0 gives; other ranks' tokens are ignored.

    Args:
        rows: of the step, by the name of their spec.
        hidden: the last hidden states of the step's tokens, in host memory; None: the model does not show them.
        tokens: sampled, int32 [n].

    Raises RunnerError naming the ranks whose rows, or else hidden states, differ from rank 0's; and as `Collectives`.
    """
    chosen, computed = xxhash.xxh3_128(), xxhash.xxh3_128()
    for name, values in sorted(rows.items()):
        chosen.update(f"{name}:{values.dtype}:{values.shape};".encode())
        chosen.update(np.ascontiguousarray(values).view(np.uint8).data)
    if hidden is not None:
        computed.update(hidden.contiguous().view(torch.uint8).numpy().data)
    message = chosen.digest() + computed.digest() + tokens.astype("<i4").tobytes()
    told = collectives.tell(message, f"end of step {step_id}")
    for at, what in enumerate(_DIFFERENCES):
        digests = [one[at * _DIGEST_NBYTES : (at + 1) * _DIGEST_NBYTES] for one in told]
        if others := [str(rank) for rank, one in enumerate(digests) if one != digests[0]]:
            raise RunnerError(f"rank {', '.join(others)} of {collectives.ranks} {what}", step_id)
    return np.frombuffer(told[0], "<i4", offset=2 * _DIGEST_NBYTES).astype(np.int32)
