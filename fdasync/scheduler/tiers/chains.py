"""Whether the store has whole chains: what it is believed to have, when it is asked, what is written again. Pure.

A block in the store is worth nothing without those before it: whoever looks for a prefix stops at the first that is
missing. And a store may forget. So its last word about a block (written, refused, found, missing) is believed for
`TRUSTED_USES` admissions that come by the block. The next one asks about the chain, with a lookup that nobody waits
for, and what is missing there and still here is written again, parents first. A prefix in use is whole in the store
again after that many requests, at the cost of one lookup for as many; a refused write is tried again as rarely.

A block is not written where its chain is known to be broken: the one before it is nowhere here any more, or the store
lacks it and it is not about to be written. Then what the store has behind it counts for nothing either. Computing the
one before it again puts both right: that one is written when it seals, this one when it is used next.

Called by `store_planner.py` and `tiers.py`; knows identities and blocks, and no lookup in flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync.cache.blocks import Block
    from fdasync.cache.prefix import PrefixIndex
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.sequence import Sequence as Sample

# of one lookup; a longer chain is asked about in parts
MAX_LOOKUP_KEYS = 4096
# admissions for which a word of the store is believed; a group of so many samples costs one lookup
TRUSTED_USES = 8


class Chains:
    """See the module.

    Args:
        send: told of each block that is wanted from now on: by way of the host, to the store.

    Attributes:
        forgotten: blocks that the store was believed to have, and had not.
    """

    def __init__(self, config: SchedulerConfig, index: PrefixIndex, send: Callable[[Block], None]) -> None:
        self._index = index
        self._send = send
        self._block_tokens = config.block_tokens
        self._outputs = config.write_through == "all"
        self._enabled = config.store and config.write_through != "off"
        self.forgotten = 0

    def want(self, block: Block, parent: bytes) -> None:
        """Have it written, behind the block of identity `parent`; b"": it is the first."""
        block.wanted = True
        block.parent = parent
        self._send(block)

    def used(self, seq: Sample) -> tuple[bytes, list[bytes]]:
        """`seq` is admitted with the blocks that are here. Has those written that should be in the store and were not
        tried lately; returns the part of the chain to ask the store about, from the first block for which that is due,
        and the identity before it (b"": none)."""
        if not self._enabled or not seq.indexed:
            return b"", []
        keys = seq.keys if self._outputs else seq.keys[: seq.prompt_len // self._block_tokens]
        before, asked = b"", list[bytes]()
        whole, again, lost = True, False, False
        parent = b""
        for key in keys:
            block = self._index.get(key)
            if block is None:
                break
            block.uses += 1
            due = block.uses > TRUSTED_USES
            if block.wanted or not block.sealed:
                # it is being written, or will be
                whole = False
            elif lost:
                # whatever the store has of it, nobody finds it
                block.stored, block.absent = False, True
            elif block.stored:
                if whole and (asked or due):
                    before = before if asked else parent
                    asked.append(key)
            elif due or again or not block.absent:
                whole, again = False, True
                self.want(block, parent)
            else:
                lost = True
            parent = key
        return before, asked[:MAX_LOOKUP_KEYS]

    def asked(self, keys: Sequence[bytes]) -> None:
        """The store is being asked about these: nobody else needs to."""
        for key in keys:
            block = self._index.get(key)
            if block is not None:
                block.uses = 0

    def answered(self, parent: bytes, keys: Sequence[bytes], count: int) -> None:
        """The store has the leading `count` of the part of a chain behind `parent`, and not the next one: what is here
        of the rest is written again, as far as it hangs together."""
        whole = True
        for number, key in enumerate(keys):
            block = self._index.get(key)
            if number < count:
                if block is not None and not block.wanted:
                    block.heard(stored=True)
            elif block is None:
                whole = False
            elif not block.wanted:
                self._missing(block)
                if whole:
                    self.want(block, parent)
            parent = key

    def broken_before(self, keys: Sequence[bytes]) -> None:
        """The store lacks a block that is not here either: nobody finds these there, which come behind it, so they are
        written again when they are used next."""
        for key in keys:
            block = self._index.get(key)
            if block is not None and not block.wanted:
                self._missing(block)
                block.uses = TRUSTED_USES

    def _missing(self, block: Block) -> None:
        self.forgotten += block.stored
        block.heard(stored=False)

    def gives_up(self, block: Block) -> bool:
        """True: nobody would find this wanted block in the store, so it is not written; it is looked at again when it
        is used next."""
        if not block.parent:
            return False
        before = self._index.get(block.parent)
        if before is not None and (before.wanted or not before.absent):
            return False
        block.give_up()
        block.uses = TRUSTED_USES
        return True
