"""The prefix index: which computation of a block carries which identity, and what may be evicted. Pure.

Identity is a chained BLAKE2b-128 over namespace, parent and token ids (`identity.py`). An identity has one
indexed computation over all tiers; a second one stays private. A block is *pending* from the plan of the step that
fills it and *sealed* when that step completed; a pending block may be shared by later steps only.

This module knows no requests, no transfers and no bytes. The scheduler calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.cache.blocks import Lru
from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fdasync.cache.blocks import Block, BlockPool
    from fdasync.cache.snapshots import Snapshot


class PrefixIndex:
    """Identities of blocks over all tiers, and what may be evicted, in order of last use.

    An unused block on the device is *clean* if its KV is on the host too, or if no later sequence can make use of it:
    it can go at once. Else it is *dirty*: it is copied out first if the host has room, and goes at once if not
    (docs/design.md, rule 8).

    Args:
        pool: the blocks.
        enabled: False keeps nothing: every block is private and freed with its last pin.
        kv_events: whether to keep `kv_events`.

    Attributes:
        pool, enabled: as given.
        kv_events: identities that became matchable (True) or stopped being so (False) since the caller last cleared
            this; None: not kept.
        reserved: device blocks that were promised by number and not taken yet.
        lent: device blocks that other instances read, or that are being filled from theirs. They come free by
            themselves, though no sequence may use them any more.
        evictions, host_evictions: blocks that left the device, or the host, to make room.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool = True, kv_events: bool = False) -> None:
        self.pool = pool
        self.enabled = enabled
        self.kv_events: dict[bytes, bool] | None = {} if kv_events else None
        self.reserved = 0
        self.lent = 0
        self.evictions = 0
        self.host_evictions = 0
        self._by_key: dict[bytes, Block] = {}
        self._clock = 0
        # the clock of blocks that nothing can use any more: before all others
        self._useless_clock = -(1 << 62)
        self._clean = Lru()
        self._dirty = Lru()
        # blocks on the host: on the host only; on the device too and used there; on the device too and unused
        self._host_only = Lru()
        self._host_used = Lru()
        self._host_clean = Lru()

    # -- room ---------------------------------------------------------------------------------------

    @property
    def num_idle(self) -> int:
        """Indexed device blocks that no sequence and no transfer uses."""
        return len(self._clean) + len(self._dirty)

    @property
    def num_dirty(self) -> int:
        return len(self._dirty)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now. Below 0 while more are reserved than could be had at once."""
        return self.pool.num_free + len(self._clean) + (0 if self.has_host_room else len(self._dirty)) - self.reserved

    @property
    def has_host_room(self) -> bool:
        """Whether a dirty block could be copied out without making another one dirty."""
        return bool(self.pool.num_host_free or self._host_only or self._host_used)

    def available_besides(self, hits: Sequence[Block]) -> int:
        """As `num_available`, less the idle blocks among `hits`, which are about to be pinned."""
        taken = [block for block in hits if block.device_list is not None]
        if self.has_host_room:
            taken = [block for block in taken if block.device_list is self._clean]
        return self.num_available - len(taken)

    def allocate(self) -> Block | None:
        """A fresh pinned block, evicting the idle block used longest ago if need be; None if none can be had now."""
        if self.reserved and self.num_available <= 0:
            return None
        if not self.pool.num_free and not self._make_room():
            return None
        return self.pool.allocate()

    def reserve(self, count: int) -> None:
        """Promise `count` of `num_available`, to be taken one by one later. Evicts nothing yet."""
        self.reserved += count

    def unreserve(self, count: int) -> None:
        self.reserved -= count

    def take_reserved(self) -> Block | None:
        """Take a reserved block, fresh and pinned; None while the blocks that could be freed are being copied out."""
        if not self._make_room(promised=True):
            return None
        self.reserved -= 1
        return self.pool.allocate()

    def take(self) -> Block:
        """As `allocate`, of the blocks that the caller counted by `num_available`: room on the host that an eviction
        made since then does not withhold the next block."""
        if not self._make_room(promised=True):
            raise InvariantBroken("more blocks were taken than were available")
        return self.pool.allocate()

    def bring(self, block: Block) -> None:
        """Give a block of the host a pinned place on the device, to be filled by a copy; counted as in `take`."""
        if not self._make_room(promised=True):
            raise InvariantBroken("more blocks were brought than were available")
        self.pool.add_device(block)
        block.ref_count += 1
        self.settle(block)

    def _make_room(self, *, promised: bool = False) -> bool:
        if self.pool.num_free:
            return True
        victims = self._clean or (self._dirty if promised or not self.has_host_room else None)
        if not victims:
            return False
        victim = victims.oldest()
        self.evictions += 1
        self._leave_device(victim)
        return True

    def next_dirty(self, count: int) -> list[Block]:
        """The dirty blocks used longest ago."""
        return self._dirty.first(count)

    def make_host_room(self, *, for_fetch: bool = False, for_store: bool = False) -> bool:
        """Make sure that a host block is free, evicting if need be; False: none could be.

        Blocks that are on the host only go first, then host copies of blocks that are used on the device. Host copies
        of unused device blocks go last, and only for a fetch or for the store: a copy outward for any other reason
        would make the evicted block dirty, to be copied out in turn.

        Args:
            for_fetch: the place is for a block that a fetch brings.
            for_store: the place is for a block on its way to the store. A block that waits for the store itself does
                not go for it.
        """
        if self.pool.num_host_free:
            return True
        for victims in (self._host_only, self._host_used, self._host_clean if for_fetch or for_store else None):
            if victims:
                victim = victims.oldest()
                if for_store and victim.wanted:
                    continue
                self.host_evictions += 1
                self._leave_host(victim)
                return True
        return False

    # -- lookups and pins -----------------------------------------------------------------------------

    def get(self, key: bytes) -> Block | None:
        """The computation that is indexed under this identity; None: there is none."""
        return self._by_key.get(key)

    def match(self, keys: Sequence[bytes], limit: int, before_step: int) -> list[Block]:
        """The longest run of indexed blocks for `keys[:limit]`, in any tier, that step `before_step` may read. Pins
        nothing."""
        blocks = []
        for key in keys[:limit]:
            block = self._by_key.get(key)
            if block is None or (not block.sealed and block.step >= before_step):
                break
            blocks.append(block)
        return blocks

    def pin(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_count += 1
            if block.ref_count == 1:
                self.settle(block)

    def release(self, blocks: Sequence[Block], useful: int | None = None) -> None:
        """Take one pin off each block of a chain; the last block goes idle first, so leaves go before parents.

        `useful`: of so many leading blocks a later sequence can make use; those behind them go before all others. None:
        of all.
        """
        end = len(blocks) if useful is None else useful
        for number in range(len(blocks) - 1, -1, -1):
            block = blocks[number]
            block.ref_count -= 1
            if not block.ref_count:
                if block.key is not None and not block.sealed:
                    raise InvariantBroken(f"{block} lost its last pin while pending")
                if number < end or block.wanted:
                    self._use(block)
                else:
                    self._useless_clock += 1
                    block.last_use = self._useless_clock
                self.settle(block)

    def useful(self, blocks: Sequence[Block], keys: Sequence[bytes]) -> int | None:
        """How many leading blocks of a chain a later sequence can use: a recurrent model goes on from snapshots alone.
        `keys`: identities of the chain, as far as they are known."""
        if self.pool.snapshots is None:
            return None
        for number in range(min(len(blocks), len(keys)) - 1, -1, -1):
            block = self._by_key.get(keys[number])
            if block is not None and block.snapshot is not None:
                return number + 1
        return 0

    # -- identities -----------------------------------------------------------------------------------

    def unpin(self, snapshot: Snapshot) -> None:
        """A sequence that was about to start from a snapshot will not start."""
        assert self.pool.snapshots is not None
        self.pool.snapshots.unpin(snapshot)

    def unhold(self, snapshot: Snapshot) -> None:
        """A transfer, or a request that waits, lets go of a snapshot."""
        assert self.pool.snapshots is not None
        self.pool.snapshots.unhold(snapshot)

    def begin(self, block: Block, key: bytes, step: int) -> None:
        """Index `block`, which `step` will fill, as pending under `key`; it stays private if the identity has a
        computation already."""
        if self.enabled and key not in self._by_key:
            block.key, block.step = key, step
            self._by_key[key] = block
            self._use(block)

    def seal(self, block: Block, key: bytes | None = None) -> None:
        """Seal `block`, whose step is done. A block that was not pending is indexed under `key` now."""
        block.sealed = True
        block.step = -1
        if block.key is None:
            if self.enabled and key is not None:
                self.adopt(block, key)
        elif self.kv_events is not None:
            self.kv_events[block.key] = True

    def adopt(self, block: Block, key: bytes) -> bool:
        """Index a sealed private block, unless the identity has a computation already (docs/design.md, rule 7)."""
        if key in self._by_key:
            return False
        block.key = key
        self._by_key[key] = block
        self._clock = block.last_use = self._clock + 1
        if self.kv_events is not None:
            self.kv_events[key] = True
        return True

    def _use(self, block: Block) -> None:
        """Make it the block used last. It must be in no list."""
        self._clock += 1
        block.last_use = self._clock

    def is_coming(self, key: bytes, before_step: int) -> bool:
        """Whether the identity is pending in a step that `before_step` cannot read from."""
        block = self._by_key.get(key)
        return block is not None and not block.sealed and block.step >= before_step

    def forget(self) -> None:
        """Forget every identity, since the weights changed. Unused blocks go at once, in every tier; blocks that
        sequences use stay as private blocks, and blocks that transfers use go when these end."""
        for block in self._by_key.values():
            if not block.sealed:
                raise InvariantBroken(f"{block} is pending while the weights change")
        self._unname()
        if self.kv_events is not None:
            self.kv_events.clear()

    def reset(self) -> None:
        """As `forget`, under the same weights, and while steps are in flight: a pending block is sealed as a private
        one. The caller sees to it that the sequences that use blocks index no more of them."""
        if self.kv_events is not None:
            # new weights tell this by their namespace
            self.kv_events |= {key: False for key, block in self._by_key.items() if block.sealed}
        self._unname()

    @property
    def is_device_idle(self) -> bool:
        """No sequence, no transfer and no other instance uses a block of the device."""
        used = any(block.id >= 0 and (block.ref_count or block.device_moves) for block in self.pool.live())
        return not (used or self.reserved or self.lent)

    def clear_device(self) -> None:
        """Take all blocks off the device. Those that the host has stay there, others are forgotten. None is in use."""
        for block in [block for block in self.pool.live() if block.id >= 0]:
            if block.ref_count or block.device_moves:
                raise InvariantBroken(f"{block} is in use, and the device is to be cleared")
            self._leave_device(block)
        if self.pool.snapshots is not None:
            self.pool.snapshots.clear_device()

    def _unname(self) -> None:
        for block in self._by_key.values():
            block.key = None
            block.wanted = False
            if block.snapshot is not None and self.pool.snapshots is not None:
                self.pool.snapshots.drop(block.snapshot)
        self._by_key.clear()
        for block in self.pool.live():
            self.settle(block)

    # -- places ---------------------------------------------------------------------------------------

    def settle(self, block: Block) -> None:
        """Free the places of a block that no request can use any more, and list it where it may be evicted. Called
        whenever its pins, transfers or places have changed."""
        self._unlist(block)
        unused = block.id >= 0 and not block.ref_count and not block.device_moves
        if block.key is None:
            # private: no request will ever match it
            if unused:
                self.pool.drop_device(block)
            if block.host >= 0 and not block.host_holds:
                self.pool.drop_host(block)
            return
        whole = block.on_host
        if unused:
            block.device_list = self._clean if whole or block.last_use < 0 else self._dirty
            block.device_list.add(block)
        if whole and not block.host_holds:
            if block.id < 0:
                block.host_list = self._host_only
            else:
                block.host_list = self._host_clean if unused else self._host_used
            block.host_list.add(block)

    @staticmethod
    def _unlist(block: Block) -> None:
        if block.device_list is not None:
            block.device_list.discard(block)
            block.device_list = None
        if block.host_list is not None:
            block.host_list.discard(block)
            block.host_list = None

    def _leave_device(self, block: Block) -> None:
        if not block.on_host:
            self._lose(block)
            return
        self._unlist(block)
        self.pool.drop_device(block)
        self.settle(block)

    def _leave_host(self, block: Block) -> None:
        if block.id < 0:
            self._lose(block)
            return
        self._unlist(block)
        self.pool.drop_host(block)
        self.settle(block)

    def _lose(self, block: Block) -> None:
        assert block.key is not None
        del self._by_key[block.key]
        if self.kv_events is not None:
            self.kv_events[block.key] = False
        block.key = None
        self.settle(block)

    def check(self) -> None:
        """Raise InvariantBroken unless index, lists and pool agree."""
        self.pool.check()
        leaving = sum(1 for block in self.pool.live() if block.id >= 0 and not block.ref_count and block.device_moves)
        if not 0 <= self.reserved <= self.pool.num_free + self.num_idle + leaving:
            raise InvariantBroken(f"{self.reserved} device blocks are reserved, and cannot be had")
        live = dict.fromkeys(self.pool.live())
        for key, block in self._by_key.items():
            if block.key != key or block not in live:
                raise InvariantBroken(f"index and pool disagree about {block}")
            if not block.sealed and block.step < 0:
                raise InvariantBroken(f"{block} is indexed but neither pending nor sealed")
        for block in live:
            unused = block.id >= 0 and not block.ref_count and not block.device_moves
            want = None
            if unused and block.key is not None:
                want = self._clean if block.on_host or block.last_use < 0 else self._dirty
            if block.ref_count < 0 or block.device_list is not want:
                raise InvariantBroken(f"{block} is in the wrong list of the device")
            if block.key is None and not (block.ref_count or block.device_moves or block.host_holds):
                raise InvariantBroken(f"private {block} is not in use")
            if block.key is not None and self._by_key.get(block.key) is not block:
                raise InvariantBroken(f"{block} bears an identity that is another's")
            listed = block.host_list is not None
            if listed != (block.on_host and not block.host_holds and block.key is not None):
                raise InvariantBroken(f"{block} is in the wrong list of the host")
        for held in (self._clean, self._dirty, self._host_only, self._host_used, self._host_clean):
            for block in held:
                if block.device_list is not held and block.host_list is not held:
                    raise InvariantBroken(f"{block} is in a list that it does not know")
