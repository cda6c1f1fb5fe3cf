"""A lease: room that this decode instance grants for a request that another instance prefills. Pure data.

`decode.py` grants and ends leases and starts their samples; `receiver.py` enters the blocks that arrive. A lease
decides nothing itself.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdasync.cache.blocks import Block
    from fdasync.cache.snapshots import Snapshot
    from fdasync.events.catalog import LeaseAsked, SampleOffered
    from fdasync.scheduler.state.config import LeaseRules
    from fdasync.scheduler.state.sequence import Sequence


class Lease:
    """Room for a group of samples, or its place in line.

    Attributes:
        group: key of the first sample; names the lease in events and actions.
        peer: the prefill instance that asked for it.
        seqs: by key, the samples that have not started here.
        order: its place in line.
        asked_at: engine time of the question.
        shares: its blocks may serve other requests; False once the cache was reset under it.
        granted: it has room; until then it stands in line.
        queued: the prefill instance knows that it stands in line.
        full: number of full blocks of the prompt.
        prefix: how many of `full` this instance had at the grant.
        missing: how many of `full` have not arrived.
        keys: identities of the prompt's full blocks.
        blocks: the full blocks, shared by all samples; None until it is offered. The lease has one pin of each.
        open: by sample, the block with the end of its prompt, once it was offered.
        reserved: device blocks that the lease may still take.
        offered: (offer, index, sample or None, whether it lies on a device) of blocks that can be copied, and of
            states, whose index is `full` + 1.
        arriving: copies to the device that the lease waits for.
        hands: by sample, the offer with its first token.
        states: by sample, the recurrent state behind its prompt, once it is on the host; None: it has not arrived. The
            lease holds each state there once: samples that wait at the same time share one. Once a sample has a
            `resume`, its state is on the device, or on the way there.
        tails: samples whose open block has not arrived yet.
        ttl_s: the lease ends if it is not renewed for so long.
        renew_by, over_by: engine times at which it ends if not renewed, and in any case; this instance's rules bound
            both.
    """

    __slots__ = (
        "arriving", "asked_at", "blocks", "full", "granted", "group", "hands", "keys", "missing", "offered", "open",
        "order", "over_by", "peer", "prefix", "queued", "renew_by", "reserved", "seqs", "shares", "states",
        "tails", "ttl_s",
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
        self.shares = True
        self.granted = self.queued = False
        self.prefix = self.missing = 0
        self.blocks: list[Block | None] = []
        self.open: dict[int, Block] = {}
        self.reserved = 0
        self.offered: deque[tuple[int, int, Sequence | None, bool]] = deque()
        self.arriving: set[int] = set()
        self.hands: dict[int, SampleOffered] = {}
        self.tails: dict[int, None] = {}
        self.states: dict[int, Snapshot | None] = {}
