"""What the ranks tell each other on the device at the end of each step: rank 0's tokens, and that they computed alike.

All of it is queued behind the step, so two steps stay in flight. Digests of each
rank's rows, and of the first logits of the tokens that are sampled, go to all ranks with the tokens; the host compares
the digests when the step has ended. Heads are whole on every rank, so logits have the same bits where hidden states
have. Every step that computes anything ends with exactly one exchange, on all ranks. Knows rows, logits and tokens;
knows no models. Called by `execution/parts/ranks.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from fdasync_kernels.digest import PARTS

from fdasync.errors import RunnerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from fdasync_kernels.step_kernels import StepKernels
    from numpy.typing import NDArray

    from fdasync_transformers.parallel.collectives import Collectives


# of a token's logits that are compared: all of them would take as long to read as the head's weights
_LOGITS = 1024


class StepEnds:
    """See the module.

    Attributes:
        leads: whether this rank samples.
    """

    def __init__(self, collectives: Collectives, device: torch.device, kernels: StepKernels) -> None:
        self.leads = not collectives.rank
        self._collectives = collectives
        self._device = device
        self._kernels = kernels

    def queue(
        self,
        step_id: int,
        rows: Mapping[str, torch.Tensor],
        logits: torch.Tensor | None,
        tokens: torch.Tensor | None,
        count: int,
        padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queue the exchange on the current stream.

        Args:
            rows: of the step, by the name of their spec; on the device, contiguous.
            logits: of the tokens that are sampled from; None: of none.
            tokens: integers [count], sampled; None on ranks that sample nothing.
            count: how many tokens the step samples.
            padding: bool [n], which of the step's first n rows, and of the first n logits, are none and differ as they
                like; None: no row.

        Returns:
            int32 [ranks, n] on the device: of each rank its digests and tokens. `read` takes it from the host.
        """
        given: list[torch.Tensor | None] = [rows[name] for name in sorted(rows)]
        given.append(None if logits is None else logits[:, :_LOGITS].contiguous())
        message = torch.empty(PARTS * len(given) + count, dtype=torch.int32, device=self._device)
        for number, each in enumerate(given):
            if each is not None and padding is not None:
                each = each.clone()
                each[: len(padding)].masked_fill_(padding.view(-1, *[1] * (each.dim() - 1)), 0)
            self._kernels.digest_rows(each, message[PARTS * number : PARTS * (number + 1)], step_id)
        if tokens is not None and count:
            message[PARTS * len(given) :].copy_(tokens)
        return self._collectives.share(message, f"end of step {step_id}")

    @staticmethod
    def tokens(told: torch.Tensor, count: int) -> torch.Tensor:
        """Rank 0's, int32 [count], a view."""
        return told[0, told.shape[1] - count :]

    @staticmethod
    def read(told: NDArray[np.int32], step_id: int, count: int) -> NDArray[np.int32]:
        """Rank 0's tokens, a view.

        Raises RunnerError naming the ranks whose steps, or else rows, or else logits, are others than rank 0's.
        """
        behind = told.shape[1] - count - PARTS
        # the first number of each digest is the step's
        if others := [f"rank {rank} was at step {at}" for rank, at in enumerate(told[:, 0]) if at != told[0, 0]]:
            raise RunnerError(f"{', '.join(others)} of {len(told)} ranks, and rank 0 at step {told[0, 0]}", step_id)
        for digests, what in (
            (told[:, :behind], "chose other experts than rank 0: their rows differ"),
            (told[:, behind : behind + PARTS], "computed other logits than rank 0"),
        ):
            if others := [str(rank) for rank in range(len(told)) if (digests[rank] != digests[0]).any()]:
                raise RunnerError(f"rank {', '.join(others)} of {len(told)} {what}", step_id)
        return told[0, told.shape[1] - count :]
