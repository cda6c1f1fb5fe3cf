"""Offers blocks to decode instances and hands samples over to them. Pure.

Blocks are offered as they seal (docs/design.md, rule 18). To a decode instance that reads this one's device they are
offered where they are, and pinned. Else they go by way of the host, where a bounded number of them waits for decode
instances to copy them (the staging ring; one decode instance gets half of it at most). A sample's hand-over closes with
its first token and its open block, after all other blocks were offered. Blocks that a decode instance may be reading
stay in place until it says that it has ended. The recurrent state behind a prompt goes with the hand-over, by way of
the host, where a decode instance gets half of the places at most. This module knows no questions for leases. Called by
`disagg/prefill.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken
from fdasync.events.actions import HandOver, SendBlocks
from fdasync.scheduler.disagg.shares import Shares

if TYPE_CHECKING:
    from fdasync.cache.snapshots import Snapshot
    from fdasync.events.actions import Action
    from fdasync.events.catalog import BlocksSent, HandedOver
    from fdasync.scheduler.disagg.handoff import HandOff
    from fdasync.scheduler.state.hold import Export
    from fdasync.scheduler.state.sequence import Sequence
    from fdasync.scheduler.tiers.parts import Parts

_MAX_OFFER_BLOCKS = 16


class _Hand:
    """A hand-over that the decode instance has not answered yet.

    Attributes:
        hand_off, seq: the sample.
        peer: the decode instance.
        export: its open block; None: its prompt fills its blocks.
        state: the recurrent state behind its prompt, held; None: the model has none.
        staged: the state counts for the instance's share of the host's places.
    """

    __slots__ = ("export", "hand_off", "peer", "seq", "staged", "state")

    def __init__(self, hand_off: HandOff, seq: Sequence, export: Export | None, *, staged: bool) -> None:
        self.hand_off = hand_off
        self.seq = seq
        self.peer = hand_off.peer
        self.export = export
        self.state: Snapshot | None = seq.parting
        self.staged = staged
        # from here on the hand-over holds it, whatever becomes of the sample
        seq.parting = None


class BlockSender:
    """See the module.

    Args:
        actions: the list that its actions are appended to.
    """

    def __init__(self, parts: Parts, actions: list[Action]) -> None:
        config = parts.config
        self._block_tokens = config.block_tokens
        self._index = parts.index
        self._swap_planner = parts.swap_planner
        self._actions = actions
        self._offers: dict[int, tuple[str, list[Export]]] = {}
        self._hand_overs: dict[int, _Hand] = {}
        self._ring = Shares(config.leases.staging_blocks or max(config.num_host_blocks // 2, 1))
        self._states = Shares(config.num_host_snapshots)
        self._next_offer = 0

    @property
    def num_out(self) -> int:
        """Offers and hand-overs that a decode instance has not answered yet."""
        return len(self._offers) + len(self._hand_overs)

    def drop(self, hand_off: HandOff) -> None:
        """Its lease is over: offer nothing more. Offered blocks stay until their offer has ended."""
        for _, export in hand_off.exports:
            self._unexport(hand_off.peer, export)
        hand_off.exports.clear()
        for hand in hand_off.hands.values():
            if hand is not None:
                self._swap_planner.release(hand)
        hand_off.hands.clear()
        for _ in hand_off.staged:
            self._states.give_back(hand_off.peer)
        hand_off.staged.clear()

    def forget(self, hand_off: HandOff, seq: Sequence) -> None:
        """A sample ended before it was handed over."""
        export = hand_off.hands.pop(seq.key, None)
        if export is not None:
            self._swap_planner.release(export)
        if seq.key in hand_off.staged:
            del hand_off.staged[seq.key]
            self._states.give_back(hand_off.peer)

    def pump(self, hand_off: HandOff) -> None:
        """Offer sealed blocks as far as there is room on the host, and hand over the samples that are ready."""
        holder = next((seq for seq in hand_off.seqs if seq.blocks), None)
        gone = next((number for number, (_, export) in enumerate(hand_off.exports) if export.gone), None)
        if gone is not None:
            # their sequence was preempted: they are offered once they were computed again
            hand_off.next_block = hand_off.exports[gone][0]
            for _, export in hand_off.exports[gone:]:
                self._unexport(hand_off.peer, export)
            del hand_off.exports[gone:]
        while holder is not None and hand_off.next_block < hand_off.full:
            block = holder.blocks[hand_off.next_block]
            if not block.sealed or not block.usable:
                break
            if hand_off.on_device:
                hand_off.exports.append((hand_off.next_block, self._swap_planner.pin(block)))
                hand_off.next_block += 1
                continue
            if self._ring.total and self._ring.is_full(hand_off.peer):
                break
            hand_off.exports.append((hand_off.next_block, self._swap_planner.export(block)))
            hand_off.next_block += 1
            self._ring.take(hand_off.peer)
        while hand_off.exports and hand_off.exports[0][1].ready:
            count = 0
            while count < min(len(hand_off.exports), _MAX_OFFER_BLOCKS) and hand_off.exports[count][1].ready:
                count += 1
            self._offer(hand_off, hand_off.exports[:count])
            del hand_off.exports[:count]
        # states have places of their own: they come to the host beside the blocks
        stateful = {seq.key: self._has_state(hand_off, seq) for seq in hand_off.seqs if seq.key in hand_off.hands}
        if hand_off.next_block < hand_off.full:
            return
        tail = hand_off.tokens % self._block_tokens
        for seq in hand_off.seqs:
            if seq.key not in hand_off.hands:
                continue
            hand = hand_off.hands[seq.key]
            if tail and hand is None:
                # open blocks go last: before, they could take the room on the host that full blocks wait for
                place = self._swap_planner.pin if hand_off.on_device else self._swap_planner.export
                hand = hand_off.hands[seq.key] = place(seq.blocks[-1])
            # a hand-over closes the lease: until all full blocks were offered, another lease may still be found
            if not hand_off.exports and (hand is None or hand.ready) and stateful[seq.key]:
                self._hand_over(hand_off, seq, hand)

    def _has_state(self, hand_off: HandOff, seq: Sequence) -> bool:
        """Whether the state that goes with a sample is on the host, if there is one; else bring it there, as far as the
        decode instance's share allows."""
        snapshot = seq.parting
        if snapshot is None or snapshot.on_host:
            return True
        if seq.key not in hand_off.staged:
            if self._states.is_full(hand_off.peer):
                return False
            hand_off.staged[seq.key] = None
            self._states.take(hand_off.peer)
        self._swap_planner.keep_snapshot(snapshot)
        return False

    def _offer(self, hand_off: HandOff, batch: list[tuple[int, Export]]) -> None:
        number = self._take_offer()
        exports = [export for _, export in batch]
        self._offers[number] = (hand_off.peer, exports)
        slots = [export.block.slot for export in exports if export.block.slot is not None]
        self._actions.append(
            SendBlocks(
                offer=number,
                group=hand_off.group,
                attempt=hand_off.attempt,
                peer=hand_off.peer,
                indices=tuple([index for index, _ in batch]),
                host=tuple([export.block.host for export in exports if not export.on_device]),
                slots=tuple([slot.id for slot in slots]),
                generations=tuple([slot.generation for slot in slots]),
                device=tuple([export.block.id for export in exports if export.on_device]),
            )
        )

    def _hand_over(self, hand_off: HandOff, seq: Sequence, export: Export | None) -> None:
        number = self._take_offer()
        hand_off.sent = True
        del hand_off.hands[seq.key]
        staged = seq.key in hand_off.staged
        hand_off.staged.pop(seq.key, None)
        self._hand_overs[number] = hand = _Hand(hand_off, seq, export, staged=staged)
        block = None if export is None else export.block
        slot = None if block is None else block.slot
        on_device = export is not None and export.on_device
        self._actions.append(
            HandOver(
                offer=number,
                group=hand_off.group,
                attempt=hand_off.attempt,
                peer=hand_off.peer,
                key=seq.key,
                index=seq.sampler.index,
                token=seq.tokens[seq.prompt_len],
                tail=-1 if block is None else hand_off.full,
                tail_rows=seq.prompt_len % self._block_tokens,
                host=-1 if block is None or on_device else block.host,
                slot=-1 if slot is None else slot.id,
                generation=-1 if slot is None else slot.generation,
                cached=seq.cached_tokens or (0, 0, 0),
                device=block.id if block is not None and on_device else -1,
                snapshot_host=-1 if hand.state is None else hand.state.host,
            )
        )

    def _take_offer(self) -> int:
        self._next_offer += 1
        return self._next_offer - 1

    def sent(self, event: BlocksSent) -> None:
        """An offer ended: the decode instance does not read its blocks any more, copied or not."""
        entry = self._offers.pop(event.offer, None)
        if entry is None:
            raise InvariantBroken(f"offer {event.offer} ended, and was not out")
        # leaves before their parents, as with a sequence's blocks
        for export in reversed(entry[1]):
            self._unexport(entry[0], export)

    def _unexport(self, peer: str, export: Export) -> None:
        self._swap_planner.release(export)
        if export.on_device:
            return
        self._ring.give_back(peer)

    def handed_over(self, event: HandedOver) -> tuple[HandOff, Sequence]:
        """A hand-over ended; returns its hand-off and its sample. The open block is not read any more."""
        hand = self._hand_overs.pop(event.offer, None)
        if hand is None:
            raise InvariantBroken(f"hand-over {event.offer} ended, and was not out")
        if hand.export is not None:
            self._swap_planner.release(hand.export)
        if hand.state is not None:
            self._index.unhold(hand.state)
        if hand.staged:
            self._states.give_back(hand.peer)
        return hand.hand_off, hand.seq

    @property
    def held_snapshots(self) -> list[Snapshot]:
        """States that hand-overs hold, once for each."""
        return [hand.state for hand in self._hand_overs.values() if hand.state is not None]
