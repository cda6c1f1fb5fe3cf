"""Decides where snapshots of recurrent state are taken, and from which a sequence starts. Pure.

A sequence of a recurrent model can go on only from the end of a block that has a snapshot; KV behind the last one is
of no use to it. Snapshots cost as much as the KV of thousands of tokens, so they are taken where another sequence is
likely to start:

- at the last full block of a prompt: the other samples of a group, and a request that is sent again. They compute the
  last token themselves, so after a prompt of whole blocks they start one block early, and its next turn at its end;
- where a prompt departs from the blocks of an earlier one: at a branch of a conversation, or after a shared preface;
- every `state_every_tokens`;
- behind the prompt of a sequence that is handed over to another instance, wherever in a block that is;
- at the last full block of an answer, so that the next turn of a conversation, and a preempted sequence, go on from
  there. An answer may end at any token, so a decoding sequence takes a snapshot at the end of each block and gives back
  the one before, unless that one lies at a multiple of `state_every_tokens` or another sequence started from it.

Where a step may yield several tokens of a sequence, it is not known beforehand which step reaches the end of a block.
Then each step that may reach it is told of the snapshot, under the same place; the step that does takes it. It is
*awaited* until the block is sealed: no sequence starts from it, and it keeps its place.

Places are taken from the least recently used snapshots, but first from snapshots that a sequence has passed: it has a
later one now, from which a next turn starts. Passed snapshots are not copied to the host to make room.

This module plans no copy (`swap_planner.py` does) and knows no bytes. It is an attachment of the scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken
from fdasync.events.actions import TakeSnapshot
from fdasync.scheduler.state.attachment import Attachment
from fdasync.scheduler.state.sequence import Sequence, State

if TYPE_CHECKING:
    from fdasync.cache.blocks import Block
    from fdasync.cache.snapshots import Snapshot, SnapshotPool
    from fdasync.events.catalog import StepDone
    from fdasync.scheduler.state.step_plan import StepPlan
    from fdasync.scheduler.tiers.parts import Parts


class SnapshotPlanner(Attachment):
    """See the module.

    Attributes:
        pool: the places.
    """

    def __init__(self, parts: Parts, pool: SnapshotPool) -> None:
        config = parts.config
        self.pool = pool
        self._index = parts.index
        self._size = config.block_tokens
        self._every = config.state_every_tokens
        # how many positions past what is known the steps in flight and the next one may fill
        self._ahead = config.max_run_tokens * config.pipeline_depth
        self._takes: list[TakeSnapshot] = []

    # -- starting -----------------------------------------------------------------------------------

    def may_begin(self, seq: Sequence) -> bool:
        """Whether its first chunk can be planned, even as its last chunk: to be handed over it needs a place for its
        state, besides the place of the snapshot that it starts from."""
        return seq.hand_off is None or self.pool.has_room(2 if seq.state is State.WAITING else 1)

    def usable(self, seq: Sequence, hits: list[Block], step_id: int) -> list[Block] | None:
        """The leading blocks that a sequence can go on from in step `step_id`: up to the last snapshot. None: that
        snapshot is not yet taken, or steps and copies that end soon have all places, and the sequence should wait."""
        for number in range(len(hits), 0, -1):
            snapshot = hits[number - 1].snapshot
            if snapshot is not None:
                ready = snapshot.can_start(step_id) and (snapshot.place >= 0 or self.pool.has_room())
                return hits[:number] if ready else None
        return []

    def admitted(self, seq: Sequence, hits: list[Block], known: int) -> None:
        """The sequence begins behind these blocks; `usable` found a place for the snapshot at their end."""
        seq.branch_at = known
        if not hits:
            return
        snapshot = hits[-1].snapshot
        if snapshot is None or (snapshot.place < 0 and not self.pool.bring(snapshot)):
            raise InvariantBroken(f"sequence {seq.key} begins behind {hits[-1]}, whose snapshot has no place")
        self.pool.pin(snapshot)
        seq.resume = snapshot
        seq.passed = None if hits[-1].branches > 1 else (snapshot, snapshot.uses)

    # -- taking -------------------------------------------------------------------------------------

    def cut(self, seq: Sequence, start: int, stop: int) -> int:
        """Without its state it could not be handed over: its last token waits for a place."""
        parts = seq.hand_off is not None and stop == len(seq.tokens)
        return stop - 1 if parts and not self.pool.has_room() else stop

    def chunk(self, seq: Sequence, start: int, stop: int, step_id: int) -> None:
        if seq.resume is not None:
            self.pool.started(seq.resume, step_id)
            seq.resume = None
        if stop == len(seq.tokens):
            if seq.hand_off is not None:
                # before any other: this one must have a place
                self._part(seq, step_id)
            # if it decodes, its first snapshot is at the end of the next block
            seq.mark = (stop // self._size + 1) * self._size
            seq.rolling = None
            seq.awaited.clear()
        if self._index.enabled and seq.indexed:
            self._prefilled(seq, start, stop, step_id)

    def _prefilled(self, seq: Sequence, start: int, stop: int, step_id: int) -> None:
        """Step `step_id` computes the positions [start, stop) of a prompt, whose identities are indexed."""
        size, length = self._size, len(seq.tokens)
        last = (length - 1) // size * size
        for position in range(start // size * size + size, stop + 1, size):
            if position in (last, length, seq.branch_at) or position % self._every == 0:
                self._take(seq, position, step_id)

    def _part(self, seq: Sequence, step_id: int) -> None:
        """Step `step_id` computes the last token of a prompt that is handed over: keep the state behind it."""
        length = len(seq.tokens)
        before, seq.parting = seq.parting, None
        if before is not None:
            self.pool.unhold(before)
        snapshot = None
        if length % self._size == 0 and self._index.enabled and seq.indexed:
            # it may serve others, too
            self._take(seq, length, step_id)
            snapshot = self._carrier(seq, length // self._size - 1).snapshot
        if snapshot is None:
            snapshot = self.pool.take(None, step_id)
            if snapshot is None:
                raise InvariantBroken(f"sequence {seq.key} parts, and there is no place for its state")
            self._takes.append(TakeSnapshot(seq.key, length, snapshot.place))
        snapshot.hold()
        seq.parting = snapshot

    def due(self, seq: Sequence) -> int:
        # each step that may take a snapshot is told of it
        return 0 if seq.awaited else seq.mark + 1 - self._ahead

    def decodes(self, seq: Sequence, least: int, most: int, step_id: int) -> None:
        """After step `step_id` a decoding sequence has forwarded `least` to `most` tokens, as far as is known: plan the
        snapshots that the step takes, or may take."""
        for position, snapshot in seq.awaited:
            # one behind fewer tokens is taken by a step in flight
            if snapshot.awaited and position >= least:
                self.pool.await_in(snapshot, step_id)
                self._takes.append(TakeSnapshot(seq.key, position, snapshot.place))
        while seq.mark <= min(most, len(seq.blocks) * self._size):
            position = seq.mark
            seq.mark += self._size
            if position < least or not (self._index.enabled and seq.indexed):
                continue
            if least == most:
                self._let_go_before(seq)
                taken = self._plan(seq, position, step_id)
                if taken is not None:
                    self._follow(seq, position, taken)
            else:
                coming = self._plan(seq, position, step_id, awaited=True)
                if coming is not None:
                    seq.awaited.append((position, coming))

    def _follow(self, seq: Sequence, position: int, snapshot: Snapshot) -> None:
        """A snapshot of an answer was taken, or will be in a step that was planned: it replaces the one before."""
        self._let_go_before(seq)
        if snapshot.block is not None:
            self._go_on_from(seq, snapshot)
            seq.rolling = snapshot if position % self._every else None

    def _let_go_before(self, seq: Sequence) -> None:
        before, seq.rolling = seq.rolling, None
        if before is not None and not before.uses:
            self.pool.drop(before)

    def _carrier(self, seq: Sequence, number: int) -> Block:
        block = seq.blocks[number]
        if block.key is None and number < len(seq.keys):
            # another computation of the block has the identity, and so gets the snapshot
            block = self._index.get(seq.keys[number]) or block
        return block

    def _take(self, seq: Sequence, position: int, step_id: int) -> None:
        snapshot = self._plan(seq, position, step_id)
        if snapshot is not None:
            self._go_on_from(seq, snapshot)

    def _plan(self, seq: Sequence, position: int, step_id: int, *, awaited: bool = False) -> Snapshot | None:
        """None: the block has a snapshot already, or there is no place."""
        block = self._carrier(seq, position // self._size - 1)
        if block.snapshot is not None:
            return None
        block.branches += position == seq.branch_at
        if awaited and not self.pool.has_room(2):
            # it may be awaited for many steps: the last place is for snapshots that come from the host meanwhile
            self.pool.refused += 1
            return None
        if not awaited:
            self._pass_by(seq)
        snapshot = self.pool.take(block, step_id, awaited=awaited)
        if snapshot is not None:
            self._takes.append(TakeSnapshot(seq.key, position, snapshot.place))
        return snapshot

    def _go_on_from(self, seq: Sequence, snapshot: Snapshot) -> None:
        self._pass_by(seq)
        # a block that several sequences left, not one conversation whose own snapshot was lost: further ones will start
        # there
        branches = 0 if snapshot.block is None else snapshot.block.branches
        seq.passed = None if branches > 1 else (snapshot, 0)

    def _pass_by(self, seq: Sequence) -> None:
        """The sequence takes a snapshot behind the one that it passed: what continues it, such as the next turn of a
        conversation, will start there. So the passed snapshot makes room first, unless others started from it, too."""
        passed, seq.passed = seq.passed, None
        if passed is not None:
            before, starts = passed
            if before.uses == starts <= 1:
                self.pool.demote(before)

    def planned(self, plan: StepPlan) -> None:
        plan.snapshots = tuple(self._takes)
        self._takes.clear()

    def stepped(self, plan: StepPlan, samplers: list[Sequence], event: StepDone, seconds: float) -> None:
        self.pool.step_done(plan.step_id)

    def stats(self) -> dict[str, int]:
        pool = self.pool
        return {
            "used_snapshots": pool.num_places - pool.num_free,
            "free_snapshots": pool.num_free,
            "used_host_snapshots": pool.num_host_places - pool.num_host_free,
            "free_host_snapshots": pool.num_host_free,
            "taken_snapshots": pool.taken,
            "resumed_snapshots": pool.resumed,
            "lost_snapshots": pool.lost,
            "refused_snapshots": pool.refused,
        }

    def sealed(self, seq: Sequence, number: int, key: bytes | None) -> None:
        """The snapshot of a decoded block goes to the computation that has its identity. Without an identity (None) no
        sequence can ever start from the snapshot."""
        if not seq.decoding:
            return
        block = seq.blocks[number]
        snapshot = block.snapshot
        position = (number + 1) * self._size
        if seq.awaited and seq.awaited[0][0] == position:
            _, taken = seq.awaited.pop(0)
            self.pool.reached(taken)
            self._follow(seq, position, taken)
        if snapshot is None or block.key is not None:
            return
        other = None if key is None else self._index.get(key)
        if other is not None and other.snapshot is None:
            self.pool.move(snapshot, other)
        else:
            self.pool.drop(snapshot)
