"""Keeps chains of blocks whole in the store: what it is believed to have, when to check, what to write again. Pure.

A block in the store is worth nothing without the blocks before it, since a lookup stops at the first missing block. And
a store may forget. So the last known state of a block (written, refused, found, missing) is believed for `TRUSTED_USES`
admissions that use the block. The next admission checks the chain, with a lookup that no request waits for. Blocks that
are missing there and still here are written again, parents first. A prefix in use is whole in the store again after
that many requests, at the cost of one lookup; a refused write is tried again as rarely.

A block is not written where its chain is known to be broken: the block before it is in no tier here any more, or the
store lacks that block and no write of it is about to come. Blocks that the store has behind the gap do not count
either. Computing the missing block again repairs the chain: it is written when it seals, the next one when it is used.

This module knows identities and blocks, and no lookup in flight. Called by `store_planner.py` and `write_policy.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.scheduler.tiers.gaps import MAX_LOOKUP_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync.cache.blocks import Block
    from fdasync.cache.prefix import PrefixIndex
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.sequence import Sequence as Sample
    from fdasync.scheduler.tiers.gaps import Gaps

# admissions for which a block's last known state is believed; a group of so many samples costs one lookup
TRUSTED_USES = 8


class Chains:
    """See the module.

    Args:
        send: called with each block that shall be written from now on.

    Attributes:
        forgotten: blocks that the store was believed to have, and had not.
    """

    def __init__(self, config: SchedulerConfig, index: PrefixIndex, gaps: Gaps, send: Callable[[Block], None]) -> None:
        self._index = index
        self._gaps = gaps
        self._send = send
        self._block_tokens = config.block_tokens
        self._outputs = config.write_through == "all"
        self._enabled = config.store and config.write_through != "off"
        self.forgotten = 0

    def want(self, block: Block, number: int, parent: bytes) -> None:
        """Have a sequence's block of this number written, behind that of identity `parent` (b"": it is the first)."""
        block.with_state = self._gaps.carries_state(number)
        self._want(block, parent)

    def _want(self, block: Block, parent: bytes) -> None:
        block.wanted = True
        block.parent = parent
        self._send(block)

    def used(self, seq: Sample) -> tuple[bytes, list[bytes]]:
        """`seq` is admitted with the blocks that are here. Blocks that should be in the store and were not tried lately
        are written. Returns the part of the chain to ask the store about, from the first block whose check is due, and
        the identity before that part (b"": none)."""
        if not self._enabled or not seq.indexed:
            return b"", []
        keys = seq.keys if self._outputs else seq.keys[: seq.prompt_len // self._block_tokens]
        before, asked = b"", list[bytes]()
        whole, again, lost = True, False, False
        parent = b""
        for number, key in enumerate(keys):
            block = self._index.get(key)
            if block is None:
                break
            block.uses += 1
            block.with_state = self._gaps.carries_state(number)
            due = block.uses > TRUSTED_USES
            if block.wanted or not block.sealed:
                # it is being written, or will be
                whole = False
            elif lost:
                # no lookup finds it behind the gap, though the store may have it
                block.stored, block.absent = False, True
            elif block.stored:
                if whole and (asked or due):
                    before = before if asked else parent
                    asked.append(key)
            elif due or again or not block.absent:
                whole, again = False, True
                self._want(block, parent)
            else:
                lost = True
            parent = key
        return before, asked[:MAX_LOOKUP_KEYS]

    def asked(self, keys: Sequence[bytes]) -> None:
        """The store is being asked about these blocks: no other admission has to."""
        for key in keys:
            block = self._index.get(key)
            if block is not None:
                block.uses = 0

    def answered(self, parent: bytes, keys: Sequence[bytes], count: int) -> None:
        """The store has the leading `count` of these blocks behind `parent`, and not the next one. The rest is written
        again, up to the first block that is not here."""
        whole = True
        for number, key in enumerate(keys):
            block = self._index.get(key)
            if block is None:
                whole = whole and number < count
            elif block.wanted or not block.sealed:
                # it is being written, or will be: a block that made room meanwhile may be computed again right now
                pass
            elif number < count:
                block.heard(stored=True)
            else:
                self._missing(block)
                if whole:
                    self._want(block, parent)
            parent = key

    def broken_before(self, keys: Sequence[bytes]) -> None:
        """The store lacks a block that is not here either. No lookup finds these blocks behind it, so they are written
        again when they are used next."""
        for key in keys:
            block = self._index.get(key)
            if block is not None and not block.wanted:
                self._missing(block)
                block.uses = TRUSTED_USES

    def _missing(self, block: Block) -> None:
        self.forgotten += block.stored
        block.heard(stored=False)

    def gives_up(self, block: Block) -> bool:
        """Whether no lookup would find this wanted block in the store. It is not written then, and looked at again when
        it is used next."""
        if not block.parent:
            return False
        before = self._index.get(block.parent)
        if before is not None and (before.wanted or not before.absent):
            return False
        block.give_up()
        block.uses = TRUSTED_USES
        return True
