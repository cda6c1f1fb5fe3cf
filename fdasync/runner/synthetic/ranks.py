"""How ranks of the synthetic runner notice that one of them is out of step: they compare what each step sampled.

Blocks until all ranks have come. Called by `runner.py` in each step of a rank that has joined an exchange.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from fdasync.errors import RunnerError

if TYPE_CHECKING:
    from fdasync.ipc.exchange import Exchange
    from fdasync.runner.base import StepOutput


def compare_ranks(exchange: Exchange, output: StepOutput) -> None:
    """Raise RunnerError naming the ranks whose samples differ from rank 0's, and what the exchange raises."""
    digest = hashlib.blake2b(msgspec.msgpack.encode(output), digest_size=16).digest()
    every = [bytes(part) for part in exchange.gather(digest, f"step {output.step_id}")]
    others = [rank for rank, part in enumerate(every) if part != every[0]]
    if others:
        names = ", ".join(map(str, others))
        raise RunnerError(f"rank {names} of {exchange.ranks} sampled other tokens than rank 0", output.step_id)
