"""Chooses the instances that serve a request, by their load and by the prefixes that they have.

No Python runs for each instance: the choice follows the prompt through the index of blocks once, and compares columns
of numbers. A prefill or mixed instance costs the prompt tokens that it would compute until the prompt is done, those of
this prompt twice; a mixed one also a part of the tokens that it has in use, so that a prefix draws only as many requests
as it is worth. A decode instance costs the share of its blocks that would be in use.

Pure. Called by `dispatch.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fdasync.pd.router.block_index import slots_of
from fdasync.pd.router.instances import LEAST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from fdasync.pd.messages import Role
    from fdasync.pd.router.instances import InstanceHandle, InstanceTable
    from fdasync.pd.router.limits import Need, Room

_MAX_DECODERS = 8
# of a prompt token to compute, what a token in use on a mixed instance weighs
_IN_USE = 1 / 16
# what a prompt token weighs that the instance does not have: computing it delays this request, and others there, while
# the same token in the line before this request delays this one alone
_MISSING = 2
# up to so many instances are taken from a bitset one by one
_FEW = 8


class Route(msgspec.Struct, frozen=True):
    """The instances that serve a request.

    Attributes:
        first: the instance that gets the request.
        decoders: instances to which `first` may hand it over, in order; empty: `first` serves it whole.
        missing: prompt tokens that `first` has to compute, as far as known.
    """

    first: InstanceHandle
    decoders: tuple[InstanceHandle, ...]
    missing: int = 0


class _Costs:
    """The costs of one request on each instance, by slot.

    Attributes:
        had: leading blocks of the prompt that each instance has, by slot.
    """

    def __init__(self, table: InstanceTable, keys: Sequence[bytes], num_tokens: int, without: Sequence[str]) -> None:
        self._table = table
        self._loads = loads = table.loads
        self._num_blocks = len(keys)
        self._num_tokens = num_tokens
        self._size = max(table.block_tokens, 1)
        failed = [table.find(address) for address in without]
        self._failed = sum({1 << instance.slot for instance in failed if instance is not None})
        self.had: NDArray[np.int64] = np.zeros(len(loads.work), np.int64)
        if keys:
            for depth, bits in table.index.prefixes(keys, loads.working):
                if depth:
                    few = bits.bit_count() <= _FEW
                    self.had[slots_of(bits) if few else loads.slots(bits)] = depth

    def missing(self, slot: int) -> int:
        return max(self._num_tokens - int(self.had[slot]) * self._size, 0)

    def prefill_cost(self, slot: int) -> int:
        """What the prefill of this request costs on an instance, in prompt tokens."""
        return int(self._loads.work[slot]) + _MISSING * self.missing(slot)

    def best(self, role: Role, fits: Callable[[Room], bool], count: int, without: int = -1) -> list[InstanceHandle]:
        """Instances of a role that take work and can hold the request, the best first, at most so many.

        `without`: slot of an instance that is left out; negative: none is.
        """
        able = self._loads.able(role, fits)
        if without >= 0:
            able &= ~(1 << without)
        # an instance that failed the request before is used only where no other is left
        able = able & ~self._failed or able
        if not able:
            return []
        rows = self._loads.slots(able)
        costs = self._decode_costs(rows) if role == "decode" else self._prefill_costs(rows, mixed=role == "mixed")
        if count == 1:
            rows = rows[costs == costs.min()]
            return [self._table.at(int(rows[0] if len(rows) == 1 else rows[self._loads.live[rows].argmin()]))]
        if count < len(rows):
            # all with one of the lowest costs, then in order
            near = costs <= np.partition(costs, count - 1)[count - 1]
            rows, costs = rows[near], costs[near]
        order = np.lexsort((self._loads.live[rows], costs))[:count]
        return [self._table.at(slot) for slot in rows[order].tolist()]

    def _prefill_costs(self, rows: NDArray[np.intp], *, mixed: bool) -> NDArray[np.float64]:
        loads = self._loads
        costs = loads.work[rows] + _MISSING * np.maximum(self._num_tokens - self.had[rows] * self._size, 0)
        if mixed:
            return costs + self._in_use(rows) * (self._size * _IN_USE)
        return costs.astype(np.float64)

    def _decode_costs(self, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """Fraction of their blocks that would be in use with this request (0 to 1 and beyond), less the blocks of the
        request's prefix that they have already."""
        costs: NDArray[np.float64] = (self._in_use(rows) - self.had[rows]) / np.maximum(self._loads.total[rows], 1)
        return costs

    def _in_use(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        """Blocks in use, with those of requests that the latest status does not count yet."""
        loads = self._loads
        newer = np.maximum(loads.live[rows] - loads.counted[rows], 0)
        return loads.used[rows] + newer * max(self._num_blocks, 256 // self._size, 1)


def choose(
    table: InstanceTable,
    keys: Sequence[bytes],
    num_tokens: int,
    without: Sequence[str],
    prefill: str,
    decoders: Sequence[str],
    *,
    need: Need = LEAST,
    whole: bool = False,
    direct_below_tokens: int = 0,
) -> Route | None:
    """The route of a request; None: no instance that can hold it takes work now.

    Args:
        keys: identities of the prompt's full blocks, as far as known.
        num_tokens: tokens of the prompt, as far as known.
        without: addresses of instances that failed the request before.
        prefill, decoders: addresses that the caller names; "" and empty: any instance.
        need: how much the request needs.
        whole: one instance must serve it whole, since no decode instance takes it over.
        direct_below_tokens: a decode instance prefills a prompt itself if it lacks fewer tokens of it than this.
    """
    first = table.find(prefill) if prefill else None
    # a named decode instance without a link to this router may have one to the prefill instance
    named = [instance for instance in table.named(decoders) if instance.takes_work or not instance.peer.is_up]
    if (prefill and (first is None or not first.takes_work)) or (decoders and not named):
        return None
    costs = _Costs(table, keys, num_tokens, without)

    def route(instance: InstanceHandle, takers: Sequence[InstanceHandle] = ()) -> Route:
        return Route(instance, tuple(takers), costs.missing(instance.slot))

    if named:
        # an instance does not hand over to itself
        takers = [instance for instance in named if instance.may(need.fits_decode) and instance is not first]
        takers = takers[:_MAX_DECODERS]
    else:
        takers = costs.best("decode", need.fits_decode, _MAX_DECODERS, -1 if first is None else first.slot)
    if first is not None:
        givers = [first] if first.may(need.fits_prefill) else []
    else:
        givers = costs.best("prefill", need.fits_prefill, 1)
    # where the caller names instances, no other serves it whole
    mixed = [] if named or first is not None else costs.best("mixed", need.fits_whole, 1)
    direct = first is None and bool(takers) and costs.missing(takers[0].slot) < direct_below_tokens
    if not whole and takers and givers and not direct:
        if mixed and costs.prefill_cost(mixed[0].slot) < costs.prefill_cost(givers[0].slot):
            return route(mixed[0])
        return route(givers[0], takers)
    # prefill or decode instances are missing or too small: one instance serves the request whole
    if named or first is not None:
        able = [one for one in table.able(prefill, decoders) if one.takes_work and one.may(need.fits_whole)]
    else:
        able = mixed or costs.best("decode", need.fits_whole, 1) or costs.best("prefill", need.fits_whole, 1)
    return route(able[0]) if able else None
