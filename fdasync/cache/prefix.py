"""The prefix index: which computation of a block carries which identity, and what may be evicted. Pure.

Identity is a chained BLAKE2b-128 over namespace, parent and token ids (`block_key`). An identity has one
indexed computation over all tiers; a second one stays private. A block is *pending* from the plan of the step that
fills it and *sealed* when that step completed; a pending block may be shared by later steps only.

Used by the scheduler. Knows no requests, no transfers and no bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

from fdasync.cache.lru import Lru
from fdasync.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fdasync.cache.blocks import Block, BlockPool

KEY_NBYTES = 16


def root_key(*parts: bytes) -> bytes:
    """Identity of an empty prefix: a namespace, and whatever else sets prefixes apart (a tenant's salt)."""
    digest = hashlib.blake2b(digest_size=KEY_NBYTES)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Identity of the block of these tokens behind `parent`."""
    return hashlib.blake2b(parent + array("i", token_ids).tobytes(), digest_size=KEY_NBYTES).digest()


def block_keys(root: bytes, token_ids: Sequence[int], block_tokens: int, start: int = 0) -> list[bytes]:
    """Identities of the full blocks of `token_ids` from token `start` (a multiple of block_tokens) on,
    chained from `root`, the identity of what stands before `start`."""
    keys = []
    for first in range(start, len(token_ids) - block_tokens + 1, block_tokens):
        root = block_key(root, token_ids[first : first + block_tokens])
        keys.append(root)
    return keys


def are_block_keys(keys: Sequence[bytes], parent: bytes, tokens: bytes, block_tokens: int, first: int = 0) -> bool:
    """Whether these are the identities of the blocks of `tokens` (int32 as they lie in memory) from number `first` on,
    behind `parent`."""
    step = 4 * block_tokens
    for number, key in enumerate(keys, first):
        parent = hashlib.blake2b(parent + tokens[number * step : (number + 1) * step], digest_size=KEY_NBYTES).digest()
        if parent != key:
            return False
    return True


class PrefixIndex:
    """Identities of blocks over all tiers, and what may be evicted, in order of last use.

    A block of the device that nobody uses is *clean* if its KV is on the host too: it can go at once. Else it is
    *dirty*: it goes at once only where the host has no room, and is copied out first where it has (DECISIONS 8).

    Args:
        pool: the blocks.
        enabled: False keeps nothing: every block is private and freed with its last pin.
        news: keep them.

    Attributes:
        news: identities that can be matched since somebody cleared this (True), or cannot any more; None: not kept.
        reserved: device blocks that were promised by number and not taken yet.
        evictions, host_evictions: blocks that left a tier to make room.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool = True, news: bool = False) -> None:
        self.pool = pool
        self.enabled = enabled
        self.news: dict[bytes, bool] | None = {} if news else None
        self.reserved = 0
        self.evictions = 0
        self.host_evictions = 0
        self._by_key: dict[bytes, Block] = {}
        self._clock = 0
        self._clean: Lru[Block] = Lru()
        self._dirty: Lru[Block] = Lru()
        # of the host: nowhere else; on the device and used there; on the device and unused
        self._host_only: Lru[Block] = Lru()
        self._host_used: Lru[Block] = Lru()
        self._host_clean: Lru[Block] = Lru()

    # -- room ---------------------------------------------------------------------------------------

    @property
    def num_idle(self) -> int:
        """Device blocks that hold something for nobody in particular."""
        return len(self._clean) + len(self._dirty)

    @property
    def num_dirty(self) -> int:
        return len(self._dirty)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now. Below 0 while more is promised than could be had at once."""
        return self.pool.num_free + len(self._clean) + (0 if self.has_host_room else len(self._dirty)) - self.reserved

    @property
    def has_host_room(self) -> bool:
        """A dirty block could be copied out, without another one becoming dirty for it."""
        return bool(self.pool.num_host_free or self._host_only or self._host_used)

    def available_besides(self, hits: Sequence[Block]) -> int:
        """As `num_available`, when these are about to be pinned."""
        taken = [block for block in hits if block.device_list is not None]
        if self.has_host_room:
            taken = [block for block in taken if block.device_list is self._clean]
        return self.num_available - len(taken)

    def allocate(self) -> Block | None:
        """A fresh pinned block, evicting the idle block used longest ago if need be; None when none can be had now."""
        if self.reserved and self.num_available <= 0:
            return None
        return self.pool.allocate() if self._make_room() else None

    def reserve(self, count: int) -> None:
        """Promise so many of `num_available`, to be taken one by one later. Costs nothing until then."""
        self.reserved += count

    def unreserve(self, count: int) -> None:
        self.reserved -= count

    def take_reserved(self) -> Block | None:
        """A fresh pinned block of those reserved; None while those that could be had are being copied out."""
        if not self._make_room(promised=True):
            return None
        self.reserved -= 1
        return self.pool.allocate()

    def take(self) -> Block:
        """As `allocate`, of what `num_available` promised: evicting one block must not withhold the next."""
        if not self._make_room(promised=True):
            raise InvariantBroken("more blocks were taken than were available")
        return self.pool.allocate()

    def bring(self, block: Block) -> None:
        """Give a block of the host a pinned place on the device, to be filled by a copy; of what `num_available`
        promised."""
        if not self._make_room(promised=True):
            raise InvariantBroken("more blocks were brought than were available")
        self.pool.add_device(block)
        block.pins += 1
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
        """One free host block, evicting if need be; False: there is none.

        Copies that blocks in use have on the device go before none. Those of unused ones go only for a fetch, or for a
        block that passes through on its way to the store: for any other copy outward they would only change places.

        Args:
            for_store: for such a block. None goes for it that waits for the store itself.
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
        """The one computation that is indexed under this identity."""
        return self._by_key.get(key)

    def match(self, keys: Sequence[bytes], limit: int, before_step: int) -> list[Block]:
        """The longest run of indexed blocks for `keys[:limit]` that a step `before_step` may read, in any tier. Pins
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
            block.pins += 1
            if block.pins == 1:
                self.settle(block)

    def release(self, blocks: Sequence[Block]) -> None:
        """Take one pin off each block of a chain; the last block goes idle first, so leaves go before parents."""
        for block in reversed(blocks):
            block.pins -= 1
            if not block.pins:
                if block.key is not None and not block.sealed:
                    raise InvariantBroken(f"{block} lost its last pin while pending")
                self._use(block)
                self.settle(block)

    # -- identities -----------------------------------------------------------------------------------

    def begin(self, block: Block, key: bytes, step: int) -> None:
        """`step` was planned to fill `block` with what `key` names: index it as pending, or keep it private
        where the identity has a computation already."""
        if self.enabled and key not in self._by_key:
            block.key, block.step = key, step
            self._by_key[key] = block
            self._use(block)

    def seal(self, block: Block, key: bytes | None = None) -> None:
        """The step that fills `block` is done. `key` indexes it now, if it was not pending before."""
        block.sealed = True
        block.step = -1
        if self.news is not None and block.key is not None:
            self.news[block.key] = True
        if self.enabled and key is not None and block.key is None:
            self.adopt(block, key)

    def adopt(self, block: Block, key: bytes) -> bool:
        """Index a sealed private block, unless the identity has a computation already (DECISIONS 7)."""
        if key in self._by_key:
            return False
        block.key = key
        self._by_key[key] = block
        self._use(block)
        if self.news is not None:
            self.news[key] = True
        return True

    def _use(self, block: Block) -> None:
        """It is the block used last. Not while it is in a list."""
        self._clock += 1
        block.used = self._clock

    def is_coming(self, key: bytes, before_step: int) -> bool:
        """Is the identity pending in a step that `before_step` cannot read from?"""
        block = self._by_key.get(key)
        return block is not None and not block.sealed and block.step >= before_step

    def forget(self) -> None:
        """The weights changed: no identity means anything any more. What nobody uses goes at once, in every tier; what
        sequences use stays as their private blocks, what transfers use goes with their end."""
        for block in list(self._by_key.values()):
            if not block.sealed:
                raise InvariantBroken(f"{block} is pending while the weights change")
            block.key = None
            block.wanted = False
        self._by_key.clear()
        if self.news is not None:
            self.news.clear()
        for block in self.pool.live():
            self.settle(block)

    # -- places ---------------------------------------------------------------------------------------

    def settle(self, block: Block) -> None:
        """Something about its users, transfers or places changed: give up what nobody can use any more, and list it
        where it may be evicted, by its last use."""
        self._unlist(block)
        unused = block.id >= 0 and not block.pins and not block.device_moves
        if block.key is None:
            # private: nobody will ever find it again
            if unused:
                self.pool.drop_device(block)
            if block.host >= 0 and not block.host_moves:
                self.pool.drop_host(block)
            return
        whole = block.on_host
        if unused:
            block.device_list = self._clean if whole else self._dirty
            block.device_list.add(block)
        if whole and not block.host_moves:
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
        if self.news is not None:
            self.news[block.key] = False
        block.key = None
        self.settle(block)

    def check(self) -> None:
        """Raise InvariantBroken unless index, lists and pool agree."""
        self.pool.check()
        leaving = sum(1 for block in self.pool.live() if block.id >= 0 and not block.pins and block.device_moves)
        if not 0 <= self.reserved <= self.pool.num_free + self.num_idle + leaving:
            raise InvariantBroken(f"{self.reserved} device blocks are promised, and cannot be had")
        live = dict.fromkeys(self.pool.live())
        for key, block in self._by_key.items():
            if block.key != key or block not in live:
                raise InvariantBroken(f"index and pool disagree about {block}")
            if not block.sealed and block.step < 0:
                raise InvariantBroken(f"{block} is indexed but neither pending nor sealed")
        for block in live:
            unused = block.id >= 0 and not block.pins and not block.device_moves
            want = None
            if unused and block.key is not None:
                want = self._clean if block.on_host else self._dirty
            if block.pins < 0 or block.device_list is not want:
                raise InvariantBroken(f"{block} is in the wrong list of the device")
            if block.key is None and not (block.pins or block.device_moves or block.host_moves):
                raise InvariantBroken(f"private {block} is used by nobody")
            if block.key is not None and self._by_key.get(block.key) is not block:
                raise InvariantBroken(f"{block} bears an identity that is another's")
            listed = block.host_list is not None
            if listed != (block.on_host and not block.host_moves and block.key is not None):
                raise InvariantBroken(f"{block} is in the wrong list of the host")
        for held in (self._clean, self._dirty, self._host_only, self._host_used, self._host_clean):
            for block in held:
                if block.device_list is not held and block.host_list is not held:
                    raise InvariantBroken(f"{block} is in a list that it does not know")
