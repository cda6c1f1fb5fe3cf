"""Room on a decode instance for a request that another instance prefills, as its scheduler sees it. Pure data.

Moved by `decode.py` (who gets it, when it ends, when its samples start) and `receiver.py` (what arrives).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdasync.cache.blocks import Block
    from fdasync.events.catalog import LeaseAsked, SampleOffered
    from fdasync.scheduler.state.config import LeaseRules
    from fdasync.scheduler.state.sequence import Sequence


class Lease:
    """Room for a group of samples, or its place in line.

    Attributes:
        order: place in line.
        full: full blocks of the prompt; `prefix` of them were here; `missing` have not arrived on the host.
        blocks: the full ones, shared by all samples, as far as they were offered; one pin of each is the lease's.
        open: by sample, the block with the end of its prompt, as far as it was offered.
        reserved: blocks that it may still take.
        offered: (offer, index, sample or None) that can be copied.
        arriving: copies to the device that it waits for.
        hands: by sample: its first token came.
        tails: samples whose open block has not arrived yet.
        renew_by, over_by: engine times, no later than this instance's own rules allow.
    """

    __slots__ = (
        "arriving", "asked_at", "blocks", "full", "granted", "group", "hands", "keys", "missing", "offered", "open",
        "order", "over_by", "peer", "prefix", "queued", "renew_by", "reserved", "seqs", "tails", "ttl_s",
    )  # fmt: skip

    def __init__(self, event: LeaseAsked, seqs: list[Sequence], block_tokens: int, rules: LeaseRules) -> None:
        self.group = event.requests[0].group
        self.peer = event.peer
        self.seqs = {seq.key: seq for seq in seqs}
        self.order = seqs[0].order
        self.full = seqs[0].prompt_len // block_tokens
        self.keys = event.requests[0].block_keys
        self.asked_at = event.at
        self.ttl_s = min(event.ttl_s, rules.max_ttl_s)
        self.renew_by = event.at + self.ttl_s
        self.over_by = min(event.over_by, event.at + rules.max_total_s)
        self.granted = self.queued = False
        self.prefix = self.missing = 0
        self.blocks: list[Block | None] = []
        self.open: dict[int, Block] = {}
        self.reserved = 0
        self.offered: deque[tuple[int, int, Sequence | None]] = deque()
        self.arriving: set[int] = set()
        self.hands: dict[int, SampleOffered] = {}
        self.tails: dict[int, None] = {}
