"""How many ranks a group has at most, and which part of a KV block each of them holds and copies. Pure.

A block's bytes are shares of equal size, one after the other, however many ranks there are (docs/design.md, section
4). Runners that compute in groups call this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fdasync.errors import ConfigError, InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Sequence

#: ranks of the largest group: the GPUs of one machine
MOST_RANKS = 8


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
    """The part of a rank, from 0, among `ranks`.

    Raises ConfigError where shares and ranks do not divide, InvariantBroken for a rank that there is not, and for no
    shares.
    """
    if shares < 1 or not 0 <= rank < ranks:
        raise InvariantBroken(f"the part of rank {rank} of {ranks} in {shares} shares")
    if shares % ranks == 0:
        count = shares // ranks
        return Part(rank * count, count, True)
    if ranks % shares:
        problem = f"{ranks} ranks cannot divide the {shares} shares of a KV block"
        works = [width for width in range(1, MOST_RANKS + 1) if not shares % width or not width % shares]
        raise ConfigError("config.tensor_parallel", problem, hint=works_with(works))
    holders = ranks // shares
    return Part(rank // holders, 1, rank % holders == 0)


def works_with(widths: Sequence[int]) -> str:
    """The hint of an error about the number of ranks: the numbers that are possible."""
    return f"works with {', '.join(map(str, widths))}"
