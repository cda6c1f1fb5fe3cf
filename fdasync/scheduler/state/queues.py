"""The queues: where every sequence stands, and when its blocks go back. Pure.

    waiting --start--> [loading] --> prefilling --last chunk planned--> decoding --last token planned--> tail --end-->
       ^                   |             |                                 |
       +---- released -----+--------- leaving <------- preempt ------------+

A sequence that leaves the runner keeps its blocks until the last step that names them completed. This module decides
which sequence is preempted and nothing else; it knows no events and no actions but `RowSpan`. Called by `core.py`,
`step_planner.py`, `results.py`, `tiers/` and `disagg/`.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from fdasync.cache.identity import block_keys
from fdasync.scheduler.state.sequence import Sequence, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.cache.prefix import PrefixIndex
    from fdasync.events.actions import RowSpan
    from fdasync.scheduler.state.policy import Order


class SequenceQueues:
    """All live sequences by state, and those whose blocks steps in flight still name.

    Args:
        spans: the list to which copies of rows are appended before a released block takes its rows with it.
        on_preempted: called with a sequence that is about to give its blocks up for others.
        asks_store: the store may have to be asked about a sequence that comes to the queue.

    Attributes:
        waiting: sequences without blocks, in the policy's order.
        leased: by key, sequences that wait for another instance's blocks, or for room for them.
        loading: by key, sequences that have their blocks and wait for KV to arrive in them.
        loaded: by key, sequences whose KV has arrived, in the order of arrival.
        fresh: waiting sequences whose identities or store `tiers.py` has to look at; `Tiers.take_fresh` takes them.
        prefilling, decoding, tail: by key; `decoding` in the runner's order.
        decode_stop_ids: every token id that may end one of `decodes`, as of its last call.
        last_step, done_step: the last step planned, and the last that completed.
        preemptions: how many there were.
        num_leased: how many of `leased` have a granted lease.
        walled: the last plan admitted no more sequences for lack of room or of a lane.
        held_for: order of the lease in line that no later sequence may pass any more; None: there is none.
    """

    def __init__(
        self,
        block_tokens: int,
        index: PrefixIndex,
        spans: list[RowSpan],
        on_preempted: Callable[[Sequence], None],
        *,
        asks_store: bool = False,
    ) -> None:
        self.waiting: list[Sequence] = []
        self.loading: dict[int, Sequence] = {}
        self.loaded: dict[int, Sequence] = {}
        self.fresh: list[Sequence] = []
        self._on_preempted = on_preempted
        self._asks_store = asks_store
        self.leased: dict[int, Sequence] = {}
        self.prefilling: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self.tail: dict[int, Sequence] = {}
        self.last_step = -1
        self.done_step = -1
        self.preemptions = 0
        self.num_leased = 0
        self.walled = False
        self.held_for: Order | None = None
        self._block_tokens = block_tokens
        self._index = index
        self._spans = spans
        self._leaves: list[int] = []
        self._draining: dict[int, list[Sequence]] = {}
        self.decode_stop_ids: frozenset[int] = frozenset()
        self._decodes: list[Sequence] | None = None
        self._emitters: list[tuple[int, Sequence]] = []

    @property
    def num_running(self) -> int:
        """Sequences that the runner knows after the next step's leaves, or will know soon."""
        return len(self.decoding) + len(self.prefilling) + len(self.loading) + len(self.loaded)

    # -- forward ------------------------------------------------------------------------------------

    def reserve(self, blocks_each: int) -> int:
        """Blocks to keep free for the next tokens of the decoding sequences: `blocks_each` blocks' worth of each, never
        past their length limit (docs/design.md, rule 23); a quarter of all blocks at most."""
        size = self._block_tokens
        total = 0
        for seq in self.decoding.values():
            known = len(seq.tokens)
            stop = min(known + blocks_each * size, seq.max_len - 1)
            total += max(-(-stop // size) - len(seq.blocks), 0)
        return min(total, self._index.pool.num_blocks // 4)

    def enqueue(self, seq: Sequence) -> None:
        """Let it wait to be admitted."""
        insort(self.waiting, seq, key=lambda other: other.order)
        if self._asks_store or not seq.indexed:
            self.fresh.append(seq)

    def first_aged(self, before: float) -> Order | None:
        """The order of the first sequence that waits for room, and has waited since `before`; a preempted sequence
        counts at once. None: there is none."""
        if not self.walled:
            return None
        return next((seq.order for seq in self.waiting if seq.wants_room and seq.waits_since <= before), None)

    def to_loading(self, seq: Sequence) -> None:
        """It has its blocks, and waits for copies. The caller has taken it out of `waiting`."""
        seq.state = State.LOADING
        self.loading[seq.key] = seq

    def to_leased(self, seq: Sequence) -> None:
        """Let it wait for the blocks of its prompt, which another instance computes."""
        seq.state = State.LEASED
        self.leased[seq.key] = seq

    def handed_over(self, seq: Sequence) -> None:
        """All blocks that another instance computed for it are on the device."""
        del self.leased[seq.key]
        seq.state = State.LOADING
        self.loaded[seq.key] = seq

    def arrived(self, seq: Sequence) -> None:
        """All KV that it waited for is on the device."""
        del self.loading[seq.key]
        self.loaded[seq.key] = seq

    def to_prefill(self, seq: Sequence) -> None:
        """It has its blocks, and those it found cached hold KV. The caller has taken it out of `waiting`."""
        self.loaded.pop(seq.key, None)
        seq.state = State.PREFILL
        self.prefilling[seq.key] = seq

    def to_decode(self, seq: Sequence) -> None:
        """Its last chunk is planned: the next step decodes it."""
        del self.prefilling[seq.key]
        seq.state = State.DECODE
        self.decoding[seq.key] = seq
        self._decodes = None

    def to_tail(self, seq: Sequence) -> None:
        """Plan no more tokens, but keep blocks and rows: its results, or a stop answer, are awaited."""
        if seq.state is not State.TAIL:
            self.remove(seq)
            seq.state = State.TAIL
            self.tail[seq.key] = seq

    def end(self, seq: Sequence) -> None:
        """Its caller has the result: plan nothing more, and give its blocks back."""
        self.remove(seq)
        seq.state = State.ENDED
        self._retire(seq)

    def remove(self, seq: Sequence) -> None:
        """Plan no more tokens of `seq`, in any state; the runner forgets it at the next step. Copies that it waits for
        go on; the caller takes it off them."""
        if seq.state is State.WAITING:
            self.waiting.remove(seq)
        elif seq.state is State.LEASED:
            del self.leased[seq.key]
        elif seq.state is State.LOADING:
            # the runner does not know it yet
            self.loading.pop(seq.key, None)
            self.loaded.pop(seq.key, None)
        elif seq.state is State.PREFILL:
            del self.prefilling[seq.key]
            self._leaves.append(seq.key)
        elif seq.state is State.DECODE:
            del self.decoding[seq.key]
            self._decodes = None
            self._leaves.append(seq.key)
            seq.last_step = self.last_step
        elif seq.state is State.TAIL:
            del self.tail[seq.key]

    def take_leaves(self) -> tuple[int, ...]:
        """Keys that the runner must forget, once each."""
        leaves = tuple(self._leaves)
        self._leaves.clear()
        return leaves

    def decodes(self, skips: list[Sequence]) -> tuple[list[Sequence], list[tuple[int, Sequence]]]:
        """The decoding sequences, in the runner's order, and (row, sequence) of each that gives tokens as they come.

        The lists are shared between steps while no sequence joins or leaves: the caller must not write them.
        """
        if self._decodes is None:
            self._decodes = list(self.decoding.values())
            self._emitters = [(row, seq) for row, seq in enumerate(self._decodes) if seq.emits]
            self.decode_stop_ids = frozenset().union(*[seq.stop_ids for seq in self._decodes])
        if not skips:
            return self._decodes, self._emitters
        decodes = [seq for seq in self._decodes if seq not in skips]
        return decodes, [(row, seq) for row, seq in enumerate(decodes) if seq.emits]

    # -- blocks on their way out --------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        """Some retired sequence waits for a step in flight."""
        return bool(self._draining)

    def draining(self) -> list[Sequence]:
        """Retired sequences whose blocks a step in flight still names."""
        return [seq for batch in self._draining.values() for seq in batch]

    def step_done(self, step_id: int) -> None:
        """Release what was retired while this step was in flight. Called after its blocks are sealed."""
        self.done_step = step_id
        for seq in self._draining.pop(step_id, ()):
            self._release(seq)

    def num_leaving(self) -> int:
        """Blocks that come back when steps in flight are done and stop answers have come."""
        leaving = {seq.key: seq for seq in self.draining()} | self.tail
        return sum(1 for seq in leaving.values() for block in seq.blocks if block.ref_count == 1)

    def preempt(self) -> Sequence | None:
        """Preempt the last sequence in the policy's order (in order of arrival: the lowest priority, then the newest).
        None: fewer than two run.

        The first sequence is never preempted, and it is admitted before all others, so it gets through (docs/design.md,
        section 5). Places are permanent, and a policy bounds for how long newcomers may take a place before an older
        one (`Policy.passed_for_s`). So every sequence becomes the first of its priority in the end, and none is
        preempted for ever. The blocks of the preempted sequence come back now, or when its last step in flight
        completes; then it waits again.
        """
        running = sorted(self._running(), key=lambda seq: seq.order)
        if len(running) < 2:
            return None
        seq = running[-1]
        self.preemptions += 1
        self.leave(seq)
        return seq

    def _running(self) -> list[Sequence]:
        """The sequences that have blocks, and need a further step."""
        holders = (self.decoding, self.prefilling, self.loading, self.loaded)
        return [seq for held in holders for seq in held.values()]

    def retract(self) -> list[Sequence]:
        """Have all running sequences give their blocks up, the first one too, as in a preemption; returns them.

        Nothing of a sequence in the tail is left to plan: it ends, or is handed over, by itself. Leased ones hold what
        another instance was promised.
        """
        running = self._running()
        for seq in running:
            self.leave(seq)
        return running

    def leave(self, seq: Sequence) -> None:
        """Back to the queue, as soon as no step in flight names its blocks."""
        self.remove(seq)
        seq.state = State.LEAVING
        self._retire(seq)

    def _retire(self, seq: Sequence) -> None:
        if seq.last_step > self.done_step:
            self._draining.setdefault(seq.last_step, []).append(seq)
        else:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        preempted = seq.state is State.LEAVING
        if seq.state is not State.ENDED and seq.blocks:
            # the open tail's slot goes with its block: last chance for its rows (docs/design.md, rule 6)
            seq.take_rows(seq.computed, self._block_tokens, self._spans)
        if preempted:
            self._on_preempted(seq)
        self._index.release(seq.blocks, self._index.useful(seq.blocks, seq.keys))
        seq.blocks = []
        if seq.resume is not None:
            self._index.unpin(seq.resume)
            seq.resume = None
        if seq.parting is not None:
            self._index.unhold(seq.parting)
            seq.parting = None
        seq.rolling = None
        seq.awaited.clear()
        if preempted:
            seq.restart()
            if self._index.enabled and seq.indexed:
                parent = seq.keys[-1] if seq.keys else seq.root
                seq.keys += block_keys(parent, seq.tokens, self._block_tokens, len(seq.keys) * self._block_tokens)
            self.enqueue(seq)
