"""One sample of one request, as the scheduler sees it: tokens, blocks, and how far it got. Pure."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

from fdasync.events.actions import RowSpan

if TYPE_CHECKING:
    from fdasync.cache.blocks import Block
    from fdasync.events.catalog import RequestPrepared


class State(Enum):
    """Forward only, but for preemption: LOADING, PREFILL or DECODE -> LEAVING -> WAITING."""

    WAITING = "waiting"  # holds nothing
    LEASED = (
        "leased"  # prefilled by another instance; waits in line, or holds blocks and waits for what they shall hold
    )
    LOADING = "loading"  # holds blocks for every known token; some of them are on their way from the host
    PREFILL = "prefill"  # holds blocks for every known token; chunks are being planned
    DECODE = "decode"  # one token a step
    TAIL = "tail"  # nothing left to plan; results or a stop answer are awaited
    LEAVING = "leaving"  # preempted; its last step in flight is awaited
    ENDED = "ended"  # its caller has the result; steps in flight may still name it


class Elsewhere(Protocol):
    """That another instance shall go on with a sequence; `granted`: one has room for it."""

    @property
    def granted(self) -> bool: ...


class StoreNotes:
    """What one sequence has to do with the store.

    Attributes:
        waits_for: the lookup or fetch in flight that it waits for; it is not planned meanwhile.
        absent_at: number of the block that is known to be missing there; -1: nothing is known.
        regret_s: what waiting may still cost it beyond the estimates; None: it never asked.
        brought: keys that were fetched for it, and whether they came.
        held: blocks that came for it and stay on the host until it is admitted.
    """

    __slots__ = ("absent_at", "brought", "held", "regret_s", "waits_for")

    def __init__(self) -> None:
        self.waits_for: object = None
        self.absent_at = -1
        self.regret_s: float | None = None
        self.brought: dict[bytes, bool] = {}
        self.held: list[Block] = []


class Sequence:
    """Mutable state of one sample.

    Token lengths, always `rows_have`, `computed` <= `planned`, `computed` < `len(tokens)`:
        computed: positions whose step completed since the last (re)start.
        planned: positions planned while in prefill; from then on the decode tick tells (`step_planner.py`).
        rows_have: one past the last position whose aux rows the request owns; never goes back.

    Attributes:
        order: place in every queue: higher priority first, then older.
        tokens: prompt and output known so far; internal, grows with overrun after the end too.
        keys: identities of the leading full blocks, as far as known.
        root, salt: identity before the first block; what made it, with the namespace.
        indexed: `keys` belong to the KV that it has, so that its blocks may be shared; not after a weight update.
        hashing: its identities are being computed again; it cannot be matched.
        arrivals: copies that its blocks wait for, while LOADING.
        hit_blocks: of its blocks, those that came from the host and from the store.
        cached_tokens: not computed at its first start: from the device, the host, the store.
        store: its dealings with the store (`store_planner.py`).
        group: key of its request's first sample.
        errand: it is decoded elsewhere (`disagg/prefill.py`); lease: group of the lease it came by (`decode.py`), else
        -1.
        waits_since: engine time at which it came to the queue; -inf once it was preempted.
        midway: its KV came whole up to its prompt's end, an open block included; until it starts.
        spans: (first output token, weight version), in order.
        base, stamp: decode position = base + tick; `stamp` tells stale calendar entries from live ones.
        last_step: the last step that names it, once it is out of the decode set.
        ending: (reason, output tokens to keep, matched id) while a stop answer is awaited.
        checked: output tokens that are known to hold no stop string.
    """

    __slots__ = (
        "arrivals",
        "base",
        "blocks",
        "cached_tokens",
        "checked",
        "checks_stops",
        "computed_prefill",
        "deadline",
        "decoding",
        "emits",
        "ending",
        "errand",
        "group",
        "hashing",
        "hit_blocks",
        "indexed",
        "key",
        "keys",
        "last_step",
        "lease",
        "max_len",
        "midway",
        "min_len",
        "order",
        "planned",
        "priority",
        "prompt_len",
        "root",
        "rows_have",
        "salt",
        "sampler",
        "spans",
        "stamp",
        "start",
        "state",
        "stop_ids",
        "store",
        "tokens",
        "waits_since",
    )

    def __init__(self, event: RequestPrepared, arrival: int, version: int = 0) -> None:
        self.key = event.key
        self.group = event.group
        self.priority = event.priority
        self.order = (-event.priority, arrival)
        self.tokens = list(event.tokens)
        self.prompt_len = len(self.tokens)
        self.max_len = self.prompt_len + event.max_tokens
        self.min_len = self.prompt_len + event.min_tokens
        self.stop_ids = event.stop_ids
        self.emits = event.emits
        self.checks_stops = event.checks_stops
        self.start = event.start
        self.sampler = event.sampler
        self.deadline = event.deadline
        self.keys = list(event.block_keys)
        self.root = event.root
        self.salt = event.salt
        self.indexed = True
        self.hashing = False
        self.arrivals = 0
        self.errand: Elsewhere | None = None
        self.lease = -1
        self.midway = False
        self.store = StoreNotes()
        self.spans = [(0, version)]
        self.state = State.WAITING
        self.waits_since = event.at
        self.blocks: list[Block] = []
        self.decoding = False
        self.computed_prefill = 0
        self.planned = 0
        self.base = 0
        self.stamp = 0
        self.last_step = -1
        self.rows_have = max(event.start, 0)
        self.hit_blocks = (0, 0)
        self.cached_tokens: tuple[int, int, int] | None = None
        self.ending: tuple[str, int, int] | None = None
        self.checked = 0

    @property
    def computed(self) -> int:
        """Positions whose step completed since the last (re)start."""
        # a decode step's token arrives with the step, so all but the last known token were forwarded
        return len(self.tokens) - 1 if self.decoding else self.computed_prefill

    @property
    def wants_room(self) -> bool:
        """While it waits: it waits for nothing else."""
        elsewhere = self.errand is not None and not self.errand.granted
        return not (self.hashing or elsewhere or self.store.waits_for is not None)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    def take_rows(self, upto: int, block_tokens: int, spans: list[RowSpan]) -> None:
        """Ask for copies of the aux rows up to position `upto` that the request does not have yet.

        The first completed pass wins: rows that it has stay, whatever is computed again later.
        """
        if self.start < 0:
            return
        position = self.rows_have
        while position < upto:
            index, offset = divmod(position, block_tokens)
            count = min(block_tokens - offset, upto - position)
            slot = self.blocks[index].slot
            assert slot is not None
            spans.append(RowSpan(self.key, slot.id, slot.generation, offset, count, position))
            position += count
        self.rows_have = max(position, self.rows_have)

    def new_weights(self, version: int) -> None:
        """Tokens sampled from now on are of this version."""
        if self.spans[-1][0] == self.num_output:
            self.spans.pop()
        self.spans.append((self.num_output, version))

    def restart(self) -> None:
        """Back to the start, holding nothing; tokens and rows that it has stay."""
        self.state = State.WAITING
        self.waits_since = float("-inf")
        self.decoding = False
        self.midway = False
        self.computed_prefill = 0
        self.planned = 0
        self.last_step = -1
