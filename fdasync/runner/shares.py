"""Which part of a KV block each rank of a group holds and copies. Pure.

A block's bytes are shares of equal size, one after the other, however many ranks there are (ARCHITECTURE.md, *A block's
places*). Runners that compute in groups call this.
"""

from __future__ import annotations

from typing import NamedTuple

from fdasync.errors import ConfigError


class Part(NamedTuple):
    """A rank's run of shares.

    Attributes:
        first, num_shares: shares [first, first + num_shares).
        writes: whether this rank writes them to the host; where several ranks hold a share, the lowest does.
    """

    first: int
    num_shares: int
    writes: bool


def part_of(shares: int, ranks: int, rank: int) -> Part:
    """The part of a rank, from 0, among `ranks`. Raises ConfigError where shares and ranks do not divide."""
    if shares % ranks == 0:
        count = shares // ranks
        return Part(rank * count, count, True)
    if ranks % shares:
        problem = f"{ranks} ranks cannot divide the {shares} shares of a KV block"
        raise ConfigError("config.tensor_parallel", problem, limit=f"a divisor or a multiple of {shares}")
    holders = ranks // shares
    return Part(rank // holders, 1, rank % holders == 0)
