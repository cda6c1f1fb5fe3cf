"""What the ranks tell each other at the end of each step: the tokens that rank 0 sampled, and that their rows agree.

Routers are whole on every rank and see the same sums, so all ranks choose the same experts. Each step proves it: a
digest of the rows of every rank is compared. Knows rows and tokens; knows no models. Called by the executors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

from fdasync.errors import RunnerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from fdasync_transformers.parallel.collectives import Collectives

_DIGEST_NBYTES = 16


def share_step(
    collectives: Collectives,
    step_id: int,
    rows: Mapping[str, NDArray[np.generic]] | None,
    tokens: NDArray[np.int32],
) -> NDArray[np.int32]:
    """The tokens that rank 0 gives; those of other ranks are not looked at.

    Args:
        rows: of the step, by the name of their spec; None: none are recorded.
        tokens: sampled, int32 [n].

    Raises RunnerError naming the ranks whose rows differ from rank 0's; and as `Collectives`.
    """
    digest = xxhash.xxh3_128()
    for name, values in sorted((rows or {}).items()):
        digest.update(f"{name}:{values.dtype}:{values.shape};".encode())
        digest.update(np.ascontiguousarray(values).view(np.uint8).data)
    told = collectives.tell(digest.digest() + tokens.astype("<i4").tobytes(), f"end of step {step_id}")
    first = told[0][:_DIGEST_NBYTES]
    if others := [rank for rank, one in enumerate(told) if one[:_DIGEST_NBYTES] != first]:
        names = ", ".join(str(rank) for rank in others)
        raise RunnerError(
            f"rank {names} of {collectives.ranks} chose other experts than rank 0: their rows differ", step_id
        )
    return np.frombuffer(told[0], "<i4", offset=_DIGEST_NBYTES).astype(np.int32)
