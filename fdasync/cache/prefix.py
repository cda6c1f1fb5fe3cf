"""The prefix index: which computation of a block carries which identity, and what may be evicted. Pure.

Identity is a chained BLAKE2b-128 over namespace, parent and token ids (`block_key`). An identity has one
indexed computation; a second one stays private. A block is *pending* from the plan of the step that
fills it and *sealed* when that step completed; a pending block may be shared by later steps only.

Used by the scheduler. Knows no requests and no bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

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


class PrefixIndex:
    """Identities of device blocks, and idle blocks in the order of eviction.

    Args:
        pool: the blocks.
        enabled: False keeps nothing: every block is private and freed with its last pin.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self.evictions = 0
        self._by_key: dict[bytes, Block] = {}
        # insertion order = order of eviction; release() puts leaves before their parents
        self._idle: dict[bytes, Block] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: free ones and idle ones."""
        return self.pool.num_free + len(self._idle)

    def allocate(self) -> Block | None:
        """A fresh pinned block, evicting the idle block used longest ago if need be; None when none is left."""
        if not self.pool.num_free:
            if not self._idle:
                return None
            key, victim = next(iter(self._idle.items()))
            del self._idle[key]
            self._drop(victim)
            self.evictions += 1
        return self.pool.allocate()

    def match(self, keys: Sequence[bytes], limit: int, before_step: int) -> list[Block]:
        """The longest run of indexed blocks for `keys[:limit]` that a step `before_step` may read. Pins nothing."""
        blocks = []
        for key in keys[:limit]:
            block = self._by_key.get(key)
            if block is None or (not block.sealed and block.step >= before_step):
                break
            blocks.append(block)
        return blocks

    def pin(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if not block.pins and block.key is not None:
                del self._idle[block.key]
            block.pins += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Take one pin off each block of a chain; the last block goes idle first, so leaves go before parents."""
        for block in reversed(blocks):
            block.pins -= 1
            if block.pins:
                continue
            if block.key is None:
                self.pool.free(block)
            elif block.sealed:
                self._idle[block.key] = block
            else:
                raise InvariantBroken(f"{block} lost its last pin while pending")

    def begin(self, block: Block, key: bytes, step: int) -> None:
        """`step` was planned to fill `block` with what `key` names: index it as pending, or keep it private
        where the identity has a computation already."""
        if self.enabled and key not in self._by_key:
            block.key, block.step = key, step
            self._by_key[key] = block

    def seal(self, block: Block, key: bytes | None = None) -> None:
        """The step that fills `block` is done. `key` indexes it now, if it was not pending before."""
        block.sealed = True
        block.step = -1
        if self.enabled and key is not None and block.key is None and key not in self._by_key:
            block.key = key
            self._by_key[key] = block

    def is_coming(self, key: bytes, before_step: int) -> bool:
        """Is the identity pending in a step that `before_step` cannot read from?"""
        block = self._by_key.get(key)
        return block is not None and not block.sealed and block.step >= before_step

    def _drop(self, block: Block) -> None:
        assert block.key is not None
        del self._by_key[block.key]
        block.key = None
        self.pool.free(block)

    def check(self) -> None:
        """Raise InvariantBroken unless index, idle list and pool agree."""
        self.pool.check()
        live = {block.id: block for block in self.pool.live()}
        for key, block in self._by_key.items():
            if block.key != key or live.get(block.id) is not block:
                raise InvariantBroken(f"index and pool disagree about {block}")
            if block.pins < 0 or (block.pins == 0) != (key in self._idle):
                raise InvariantBroken(f"{block} is idle and pinned, or neither")
            if not block.sealed and block.step < 0:
                raise InvariantBroken(f"{block} is indexed but neither pending nor sealed")
        if not self._idle.keys() <= self._by_key.keys():
            raise InvariantBroken("an idle block is not indexed")
        for block in live.values():
            if block.key is None and block.pins < 1:
                raise InvariantBroken(f"private {block} is pinned by nobody")
