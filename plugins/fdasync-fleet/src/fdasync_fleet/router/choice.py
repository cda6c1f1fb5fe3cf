"""Chooses the instances that serve a request, by their load and by the prefixes that they have.

No Python runs for each instance: the choice follows the prompt through the index of blocks once, and compares columns
of numbers. The cost of a prefill or mixed instance is the number of prompt tokens that it would compute until the
prompt is done, this prompt's twice; for a mixed one also a part of its tokens in use, so that a prefix draws only as
many requests as it is worth. The cost of a decode instance is the share of its blocks that would be in use.

Pure. Called by `dispatch.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fdasync_fleet.router.blocks.index import slots_of
from fdasync_fleet.router.instances import LEAST, InstanceHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from fdasync_fleet.fields import Role
    from fdasync_fleet.router.instances import InstanceTable
    from fdasync_fleet.router.limits import Need, Room
    from fdasync_fleet.router.loads import Column

_MAX_DECODERS = 8
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
    """The costs of one request on each instance."""

    def __init__(self, table: InstanceTable, keys: Sequence[bytes], num_tokens: int, without: Sequence[str]) -> None:
        self._table = table
        self._loads = table.loads
        self._num_blocks = len(keys)
        self._num_tokens = num_tokens
        self._size = max(table.block_tokens, 1)
        failed = [table.find(address) for address in without]
        self._failed = sum({1 << instance.slot for instance in failed if instance is not None})
        # (blocks, bitset of the instances that have just so many), without the instances that have none
        self._had = [each for each in table.index.prefixes(keys, self._loads.working) if each[0]]

    def missing(self, instance: InstanceHandle) -> int:
        """Prompt tokens that an instance would compute."""
        for had, bits in self._had:
            if bits >> instance.slot & 1:
                return max(self._num_tokens - had * self._size, 0)
        return self._num_tokens

    def prefill_cost(self, instance: InstanceHandle) -> int:
        """What the prefill of this request costs on an instance, in prompt tokens."""
        return self._loads.work.one[instance.slot] + _MISSING * self.missing(instance)

    def _able(self, role: Role, fits: Callable[[Room], bool]) -> int:
        able = self._loads.able(role, fits)
        # an instance that failed the request before is used only where no other is left
        return able & ~self._failed or able

    def best(self, role: Role, fits: Callable[[Room], bool]) -> InstanceHandle | None:
        """The best instance of a role that takes work and can hold the request, where it prefills it."""
        able = self._able(role, fits)
        if not able:
            return None
        costs = self._loads.burden if role == "mixed" else self._loads.work
        least: tuple[float, int, int] | None = None
        # the instances that have most of the prompt first; the last bitset holds all that are able, whatever they have
        for had, bits in (*reversed(self._had), (0, able)):
            missing = _MISSING * max(self._num_tokens - had * self._size, 0)
            if least is not None and least[0] < costs.floor + missing:
                # an instance that has no more of the prompt costs more than the best so far
                break
            if some := bits & able:
                found = self._lightest(some, missing, costs)
                least = found if least is None else min(least, found)
        else:
            self._loads.raise_floor(costs)
        assert least is not None
        return self._table.at(least[-1])

    def _lightest(self, bits: int, missing: int, costs: Column[int] | Column[float]) -> tuple[float, int, int]:
        """Cost, live requests and slot of the best of some instances, for which so much of the prompt is missing."""
        live = self._loads.live
        if bits.bit_count() <= _FEW:
            one, alive = costs.one, live.one
            cost, busy, slot = min([(one[slot], alive[slot], slot) for slot in slots_of(bits)])
            return cost + missing, busy, slot
        rows = self._loads.slots(bits)
        here = costs.all.take(rows)
        first = int(here.argmin())
        near = (here == here[first]).nonzero()[0]
        slot = int(rows[first if len(near) == 1 else near[live.all.take(rows.take(near)).argmin()]])
        return costs.one[slot] + missing, live.one[slot], slot

    def decoders(
        self, fits: Callable[[Room], bool], count: int, without: InstanceHandle | None
    ) -> list[InstanceHandle]:
        """The decode instances that take work and can take the request over, the best first, at most so many."""
        able = self._able("decode", fits)
        if without is not None:
            able &= ~(1 << without.slot)
        if not able:
            return []
        rows = self._loads.slots(able)
        costs = self._decode_costs(rows)
        if count < len(rows):
            # all with one of the lowest costs, then in order
            near = costs <= np.partition(costs, count - 1)[count - 1]
            rows, costs = rows[near], costs[near]
        # columns of numpy, at most `count` of them
        order = np.lexsort((self._loads.live.all[rows], costs))[:count]
        return [self._table.at(slot) for slot in rows[order].tolist()]

    def _decode_costs(self, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """Fraction of their blocks that would be in use with this request (0 to 1 and beyond), less the blocks of the
        request's prefix that they have already."""
        loads = self._loads
        # requests that the latest status does not count yet
        newer = np.maximum(loads.live.all[rows] - loads.counted.all[rows], 0)
        used = loads.used.all.copy()
        for had, bits in self._had:
            used[slots_of(bits) if bits.bit_count() <= _FEW else loads.slots(bits)] -= had
        taken = used[rows] + newer * max(self._num_blocks, 256 // self._size, 1)
        costs: NDArray[np.float64] = taken / np.maximum(loads.total.all[rows], 1)
        return costs


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
        return Route(instance, tuple(takers), costs.missing(instance))

    if named:
        # an instance does not hand over to itself
        takers = [instance for instance in named if instance.may(need.fits_decode) and instance is not first]
        takers = takers[:_MAX_DECODERS]
    else:
        takers = costs.decoders(need.fits_decode, _MAX_DECODERS, first)
    if first is None:
        giver = costs.best("prefill", need.fits_prefill)
    else:
        giver = first if first.may(need.fits_prefill) else None
    # where the caller names instances, no other serves it whole
    mixed = None if named or first is not None else costs.best("mixed", need.fits_whole)
    direct = first is None and bool(takers) and costs.missing(takers[0]) < direct_below_tokens
    if not whole and takers and giver is not None and not direct:
        if mixed is not None and costs.prefill_cost(mixed) < costs.prefill_cost(giver):
            return route(mixed)
        return route(giver, takers)
    # prefill or decode instances are missing or too small: one instance serves the request whole
    if named or first is not None:
        able = [one for one in table.able(prefill, decoders) if one.takes_work and one.may(need.fits_whole)]
        return route(able[0]) if able else None
    if mixed is None:
        alone = costs.decoders(need.fits_whole, 1, None)
        mixed = alone[0] if alone else costs.best("prefill", need.fits_whole)
    return None if mixed is None else route(mixed)
