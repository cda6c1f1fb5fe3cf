"""The scheduler's state of one sample of one request: tokens, blocks, and how far it got. Pure.

Knows no queue, and of other sequences the first sample of its request alone. Changed by `core.py`, `step_planner.py`,
`results.py`, `queues.py`, `tiers/` and attachments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from fdasync.events.actions import RowSpan

if TYPE_CHECKING:
    from fdasync.cache.blocks import Block
    from fdasync.cache.snapshots import Snapshot
    from fdasync.events.actions import FinishReason
    from fdasync.events.catalog import RequestPrepared
    from fdasync.scheduler.state.policy import Order
    from fdasync.scheduler.state.weights import Weights


class State(Enum):
    """Forward only, but for preemption: LOADING, PREFILL or DECODE -> LEAVING -> WAITING."""

    WAITING = "waiting"  # holds nothing
    LEASED = "leased"  # prefilled by another instance: waits in line for a lease, or for the blocks to arrive
    LOADING = "loading"  # holds blocks for every known token; the KV of some is on its way from the host
    PREFILL = "prefill"  # holds blocks for every known token; chunks are being planned
    DECODE = "decode"  # one token a step, or a run of tokens
    TAIL = "tail"  # nothing left to plan; results or a stop answer are awaited
    LEAVING = "leaving"  # preempted; its last step in flight is awaited
    ENDED = "ended"  # its caller has the result; steps in flight may still name it


class Elsewhere(Protocol):
    """Another instance shall go on with a sequence (`disagg/handoff.py`)."""

    @property
    def granted(self) -> bool:
        """An instance has room for it."""


class StoreWork(Protocol):
    """A lookup or a fetch in flight (`tiers/store_planner.py`). Compared by identity.

    Attributes:
        waiting: sequences that wait for it.
    """

    waiting: list[Sequence]


@dataclass(slots=True, eq=False)
class StoreNotes:
    """One sequence's dealings with the store.

    Attributes:
        waits_for: the lookup or fetch in flight that it waits for; it is not planned meanwhile.
        absent_at: number of the block that the store is known to lack; -1: none is known.
        regret_s: how long it may still wait beyond the estimates; None: the store was never asked for it.
        brought: identities that were fetched for it, and whether their blocks came.
        held: blocks that came for it and stay on the host until it is admitted.
        held_snapshots: likewise.
    """

    waits_for: StoreWork | None = None
    absent_at: int = -1
    regret_s: float | None = None
    brought: dict[bytes, bool] = field(default_factory=dict)
    held: list[Block] = field(default_factory=list)
    held_snapshots: list[Snapshot] = field(default_factory=list)


class Sequence:
    """Mutable state of one sample.

    Token counts, always `rows_have`, `computed` <= `planned`, `computed` < `len(tokens)`:
        computed: positions whose step completed since the last (re)start.
        computed_prefill: the same while in prefill.
        planned: positions planned while in prefill; while it decodes, its tokens and the steps in flight give them.
        rows_have: one past the last position whose aux rows the request owns; never goes back.

    Attributes:
        key: number of the sample in this engine.
        group: key of its request's first sample.
        first: the first sample of its request that came with it; None: it is the first.
        begun: of the first sample: a sample of its request was admitted, and the caller may have tokens of it.
        order: place in every queue, as the policy says.
        deadline: engine time at which it ends; inf: none.
        tokens: prompt and output known so far; grows with overrun after the end too.
        prompt_len: tokens of the prompt.
        max_len, min_len: tokens after which it ends, and before which no token ends it.
        stop_ids: token ids that end it; empty once it ends.
        emits: its tokens are wanted as they come.
        checks_stops: it has stop strings, for which its text is searched.
        start: position of the first row that its request wants; -1: it wants none.
        sampler: how the runner samples it.
        score_from: position of the first token of its prompt that is to be scored and is not; -1: none.
        chosen_from: first position whose chosen positions it wants and does not have; -1: it wants none.
        keys: identities of the leading full blocks, as far as known.
        root: identity before the first block.
        salt: what sets `root` apart besides the namespace.
        indexed: `keys` belong to the KV that it has, so that its blocks may be shared; False after a weight update.
        hashing: its identities are being computed again; it cannot be matched.
        state: where it stands.
        blocks: its device blocks, in order.
        decoding: its prompt is computed.
        arrivals: copies that its blocks wait for, while LOADING.
        hit_blocks: how many of its blocks came from the host, and from the store.
        cached_tokens: tokens that were not computed at its first start: from the device, the host, the store; None: it
            was never admitted.
        store: its dealings with the store.
        hand_off: another instance shall decode it (`disagg/prefill.py`).
        lease: group of the lease that it came by (`disagg/decode.py`), else -1.
        waits_since: engine time at which it came to the queue; -inf once it was preempted.
        resume: the snapshot that it is about to start from, pinned; None: none.
        branch_at: end of the leading tokens whose KV was there already when it was admitted, with a snapshot or not.
        mark: while it decodes, the position at which it takes its next snapshot; 0 for a model without recurrent state.
        rolling: the snapshot that its next one replaces; None: there is none.
        awaited: (position in its answer, snapshot) for each that steps in flight or later ones take; rising.
        passed: the last snapshot that it started from or took, and how often a sequence had started from it by then.
        parting: the state behind its prompt, held until it is handed over with it; None: there is none.
        midway: its KV came whole up to its prompt's end, an open block included, and it has not started yet.
        spans: (first output token, weight version, weights id), in order.
        near: the length from which on the next plan must look at it: it may lack a block, or make its last token.
        due: the length from which on more must be done than take its tokens: `near`, or where a block is full.
        idle_step: the last step that left it out since it decodes.
        last_step: the last step that names it, once it is out of the decode set.
        is_cut: the runner went on behind its last token, in a run that ended it: later tokens are not its own.
        ending: (reason, output tokens to keep, matched id) while a stop answer is awaited.
        checked: output tokens that are known to hold no stop string.
        drafts: `FinishRequest.drafts`, once it ends; None: nothing drafts.
    """

    __slots__ = (
        "arrivals", "awaited", "begun", "blocks", "branch_at", "cached_tokens", "checked", "checks_stops",
        "chosen_from", "computed_prefill", "deadline", "decoding", "drafts", "due", "emits", "ending", "first",
        "group", "hand_off", "hashing", "hit_blocks", "idle_step", "indexed", "is_cut", "key", "keys", "last_step",
        "lease", "mark", "max_len", "midway", "min_len", "near", "order", "parting", "passed", "planned",
        "prompt_len", "resume", "rolling", "root", "rows_have", "salt", "sampler", "score_from", "spans", "start",
        "state", "stop_ids", "store", "tokens", "waits_since",
    )  # fmt: skip

    def __init__(self, event: RequestPrepared, order: Order, weights: Weights, first: Sequence | None = None) -> None:
        self.key = event.key
        self.group = event.group
        self.first = first
        self.begun = False
        self.order = order
        self.tokens = list(event.tokens)
        self.prompt_len = len(self.tokens)
        self.max_len = self.prompt_len + event.max_tokens
        self.min_len = self.prompt_len + event.min_tokens
        self.stop_ids = event.stop_ids
        self.emits = event.emits
        self.checks_stops = event.checks_stops
        self.start = event.start
        self.sampler = event.sampler
        self.score_from = event.sampler.score_from
        self.chosen_from = event.sampler.chosen_from
        self.deadline = event.deadline
        self.keys = list(event.block_keys)
        self.root = event.root
        self.salt = event.salt
        self.indexed = True
        self.hashing = False
        self.arrivals = 0
        self.hand_off: Elsewhere | None = None
        self.lease = -1
        self.midway = False
        self.resume: Snapshot | None = None
        self.rolling: Snapshot | None = None
        self.awaited: list[tuple[int, Snapshot]] = []
        self.passed: tuple[Snapshot, int] | None = None
        self.parting: Snapshot | None = None
        self.branch_at = 0
        self.mark = 0
        self.store = StoreNotes()
        self.spans = [(0, weights.version, weights.weights_id)]
        self.state = State.WAITING
        self.waits_since = event.at
        self.blocks: list[Block] = []
        self.decoding = False
        self.computed_prefill = 0
        self.planned = 0
        self.near = 0
        self.due = 0
        self.idle_step = -1
        self.is_cut = False
        self.last_step = -1
        self.rows_have = max(event.start, 0)
        self.hit_blocks = (0, 0)
        self.cached_tokens: tuple[int, int, int] | None = None
        self.ending: tuple[FinishReason, int, int] | None = None
        self.checked = 0
        self.drafts: tuple[int, int, int] | None = None

    @property
    def computed(self) -> int:
        """Positions whose step completed since the last (re)start."""
        # a decode step's tokens arrive with the step, so all but the last known token were forwarded
        return len(self.tokens) - 1 if self.decoding else self.computed_prefill

    @property
    def wants_room(self) -> bool:
        """While it waits, it waits for room alone."""
        elsewhere = self.hand_off is not None and not self.hand_off.granted
        return not (self.hashing or elsewhere or self.store.waits_for is not None or self._waits_for_prompt)

    @property
    def _waits_for_prompt(self) -> bool:
        """It takes the prompt's chosen positions from the first sample, which has not planned all of them yet, and
        could end before they are written (docs/design.md, rule 46)."""
        first = self.first
        if first is None or self.chosen_from < 0:
            return False
        return max(first.planned, first.chosen_from) < self.prompt_len - 1

    @property
    def has_begun(self) -> bool:
        """A sample of its request was admitted: the request goes on, or ends, as a whole."""
        return (self.first or self).begun

    @property
    def num_output(self) -> int:
        """Output tokens known so far, overrun included."""
        return len(self.tokens) - self.prompt_len

    def admitted(self, cached_tokens: tuple[int, int, int]) -> None:
        """It starts for the first time, or another instance has started it; see the attribute."""
        self.cached_tokens = cached_tokens
        (self.first or self).begun = True

    def hit_limit(self, block_tokens: int) -> int:
        """The most leading blocks that it need not compute: its next token needs the logits of its last token, and a
        scored token of the prompt needs the logits of the token before it, or its hidden state (docs/design.md, rule
        12). No block has the positions that indexers chose (rule 46)."""
        last = len(self.tokens) - 1
        if self.score_from >= 0 and not self.sampler.scores_hits:
            last = min(last, max(self.score_from - 1, 0))
        if self.chosen_from >= 0:
            last = min(last, self.chosen_from)
        return last // block_tokens

    def start_anew(self) -> None:
        """Nothing that was computed counts: neither its tokens nor the scores of its prompt."""
        del self.tokens[self.prompt_len :]
        self.score_from = self.sampler.score_from

    def scored(self, stop: int) -> None:
        """A step computed its positions up to `stop`, and scored the tokens up to the one at `stop`."""
        if self.score_from >= 0:
            self.score_from = max(self.score_from, stop + 1) if stop + 1 < self.prompt_len else -1

    def take_rows(self, upto: int, block_tokens: int, spans: list[RowSpan]) -> None:
        """Ask for copies of the aux rows up to position `upto` that the request does not have yet.

        The first completed pass wins: rows that it has stay, whatever is computed again later.
        """
        start = self.rows_have
        if self.start < 0 or start >= upto:
            return
        blocks = self.blocks[start // block_tokens : -(-upto // block_tokens)]
        slots = [block.slot for block in blocks if block.slot is not None]
        assert len(slots) == len(blocks)
        spans.append(
            RowSpan(
                key=self.key,
                slots=tuple([slot.id for slot in slots]),
                generations=tuple([slot.generation for slot in slots]),
                offset=start % block_tokens,
                count=upto - start,
                start=start,
            )
        )
        self.rows_have = upto

    def new_weights(self, weights: Weights) -> None:
        """Tokens sampled from now on are of these weights, or of their new label."""
        if self.spans[-1][0] == self.num_output:
            self.spans.pop()
        named = weights.version, weights.weights_id
        if not self.spans or self.spans[-1][1:] != named:
            self.spans.append((self.num_output, *named))

    def restart(self) -> None:
        """Back to the start, holding nothing; tokens and rows that it has stay."""
        if self.chosen_from >= 0:
            self.chosen_from = max(self.chosen_from, self.computed)
        self.state = State.WAITING
        self.waits_since = float("-inf")
        self.decoding = False
        self.midway = False
        self.computed_prefill = 0
        self.planned = 0
        self.last_step = -1
