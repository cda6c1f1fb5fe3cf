"""Where every sequence stands, and when its blocks go back. Pure.

    waiting --start--> [loading] --> prefilling --last chunk planned--> decoding --last token planned--> tail --end-->
       ^                   |             |                                 |
       +---- released -----+--------- leaving <------- preempt ------------+

Whoever leaves the runner keeps its blocks until the last step that names them completed. Filled by
`step_planner.py`, asked by `core.py`; decides whom to preempt and nothing else.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from fdasync.cache.prefix import PrefixIndex, block_keys
from fdasync.scheduler.state.sequence import Sequence, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.events.actions import RowSpan
    from fdasync.scheduler.tiers.swap_planner import Copier


class Roster:
    """All live sequences by state, and those whose blocks steps in flight still name.

    Args:
        spans: where rows are asked for that a released tail would take with it.
        on_preempted: told of a sequence that is about to give its blocks up for others.

    Attributes:
        waiting: in order; holds no blocks.
        leased: by key; waits for another instance's blocks, or for room for them.
        loading: by key; has its blocks, and waits for KV to arrive; `loaded` in the order of arrival.
        requeued: those that came back to `waiting`; taken by `core.py`.
        prefilling, decoding, tail: by key; `decoding` in the runner's order.
        last_step, done_step: the last step planned, and the last that completed.
        preemptions: how many there were.
        num_leased: of `leased`, those whose lease is granted.
        walled: the last plan let nobody in, for lack of room or of a lane, and somebody waits for that.
        held_for: order of the lease in line that nobody after it may pass any more; None: there is none.
    """

    def __init__(
        self,
        block_tokens: int,
        index: PrefixIndex,
        spans: list[RowSpan],
        copier: Copier,
        on_preempted: Callable[[Sequence], None],
    ) -> None:
        self.waiting: list[Sequence] = []
        self.loading: dict[int, Sequence] = {}
        self.loaded: dict[int, Sequence] = {}
        self.requeued: list[Sequence] = []
        self._copier = copier
        self._on_preempted = on_preempted
        self.leased: dict[int, Sequence] = {}
        self.prefilling: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self.tail: dict[int, Sequence] = {}
        self.last_step = -1
        self.done_step = -1
        self.preemptions = 0
        self.num_leased = 0
        self.walled = False
        self.held_for: tuple[int, int] | None = None
        self._block_tokens = block_tokens
        self._index = index
        self._spans = spans
        self._leaves: list[int] = []
        self._draining: dict[int, list[Sequence]] = {}
        self._decodes: list[Sequence] | None = None
        self._emitters: list[tuple[int, Sequence]] = []

    @property
    def num_running(self) -> int:
        """Sequences that the runner knows after the next step's leaves, or will know soon."""
        return len(self.decoding) + len(self.prefilling) + len(self.loading) + len(self.loaded)

    # -- forward ------------------------------------------------------------------------------------

    def reserve(self, blocks_each: int) -> int:
        """Blocks that decoding sequences may want next: for so many blocks' worth of tokens each, never past their
        length limit (DECISIONS 23); a quarter of all at most."""
        size = self._block_tokens
        total = 0
        for seq in self.decoding.values():
            known = len(seq.tokens)
            stop = min(known + blocks_each * size, seq.max_len - 1)
            total += max(-(-stop // size) - len(seq.blocks), 0)
        return min(total, self._index.pool.num_blocks // 4)

    def enqueue(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=lambda other: other.order)

    def first_aged(self, before: float) -> tuple[int, int] | None:
        """The order of the first who waits for room, and has waited since `before`; who was preempted counts at
        once. None: there is none."""
        if not self.walled:
            return None
        return next((seq.order for seq in self.waiting if seq.wants_room and seq.waits_since <= before), None)

    def to_loading(self, seq: Sequence) -> None:
        """It has its blocks, and waits for copies. The caller has taken it out of `waiting`."""
        seq.state = State.LOADING
        self.loading[seq.key] = seq

    def to_leased(self, seq: Sequence) -> None:
        """Another instance computes its prompt."""
        seq.state = State.LEASED
        self.leased[seq.key] = seq

    def handed_over(self, seq: Sequence) -> None:
        """All that another instance computed of it is on the device."""
        del self.leased[seq.key]
        seq.state = State.LOADING
        self.loaded[seq.key] = seq

    def arrived(self, seq: Sequence) -> None:
        """All that it waited for is on the device."""
        del self.loading[seq.key]
        self.loaded[seq.key] = seq

    def to_prefill(self, seq: Sequence) -> None:
        """It has its blocks, and KV in those that are hits. The caller has taken it out of `waiting`."""
        self.loaded.pop(seq.key, None)
        seq.state = State.PREFILL
        self.prefilling[seq.key] = seq

    def to_decode(self, seq: Sequence) -> None:
        """Its last chunk is planned."""
        del self.prefilling[seq.key]
        seq.state = State.DECODE
        seq.stamp += 1
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
        """Plan no more tokens of `seq`, whatever it was doing; the runner forgets it at the next step."""
        if seq.state is State.WAITING:
            self.waiting.remove(seq)
        elif seq.state is State.LEASED:
            del self.leased[seq.key]
        elif seq.state is State.LOADING:
            # the runner has not heard of it
            self.loading.pop(seq.key, None)
            self.loaded.pop(seq.key, None)
            self._copier.forget(seq)
        elif seq.state is State.PREFILL:
            del self.prefilling[seq.key]
            self._leaves.append(seq.key)
        elif seq.state is State.DECODE:
            del self.decoding[seq.key]
            self._decodes = None
            self._leaves.append(seq.key)
            seq.stamp += 1
            seq.last_step = self.last_step
        elif seq.state is State.TAIL:
            del self.tail[seq.key]

    def take_leaves(self) -> tuple[int, ...]:
        """Keys that the runner must forget, once each."""
        leaves = tuple(self._leaves)
        self._leaves.clear()
        return leaves

    def decodes(self, skips: list[Sequence]) -> tuple[list[Sequence], list[tuple[int, Sequence]]]:
        """Who decodes, in the runner's order, and (row, sequence) of those whose tokens are wanted as they come.

        Shared between steps while nobody joins or leaves: not to be written.
        """
        if self._decodes is None:
            self._decodes = list(self.decoding.values())
            self._emitters = [(row, seq) for row, seq in enumerate(self._decodes) if seq.emits]
        if not skips:
            return self._decodes, self._emitters
        decodes = [seq for seq in self._decodes if seq not in skips]
        return decodes, [(row, seq) for row, seq in enumerate(decodes) if seq.emits]

    # -- blocks on their way out --------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        return bool(self._draining)

    def draining(self) -> list[Sequence]:
        """Retired sequences whose blocks a step in flight still names."""
        return [seq for batch in self._draining.values() for seq in batch]

    def step_done(self, step_id: int) -> None:
        """Release what was retired while this step was in flight. Called after its blocks are sealed."""
        self.done_step = step_id
        for seq in self._draining.pop(step_id, ()):
            self._release(seq)

    def pending_free(self) -> int:
        """Blocks that come back without anybody's doing."""
        leaving = {seq.key: seq for seq in self.draining()} | self.tail
        blocks = sum(1 for seq in leaving.values() for block in seq.blocks if block.pins == 1)
        return blocks + self._copier.num_leaving

    def preempt(self) -> Sequence | None:
        """Preempt the lowest priority, then the newest; never the oldest of the highest (it must get through).

        Its blocks come back now, or when its last step in flight completes; then it waits again.
        """
        holders = (self.decoding, self.prefilling, self.loading, self.loaded)
        running = sorted([seq for held in holders for seq in held.values()], key=lambda seq: seq.order)
        if len(running) < 2:
            return None
        seq = running[-1]
        self.preemptions += 1
        self.leave(seq)
        return seq

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
            # the open tail's slot goes with its block: last chance for its rows (DECISIONS 6)
            seq.take_rows(seq.computed, self._block_tokens, self._spans)
        if preempted:
            self._on_preempted(seq)
        self._index.release(seq.blocks)
        seq.blocks = []
        if preempted:
            seq.restart()
            if self._index.enabled and seq.indexed:
                parent = seq.keys[-1] if seq.keys else seq.root
                seq.keys += block_keys(parent, seq.tokens, self._block_tokens, len(seq.keys) * self._block_tokens)
            self.enqueue(seq)
            self.requeued.append(seq)
