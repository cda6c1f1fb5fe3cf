"""Blocks and hand-overs of a prefill instance on their way to where their requests go. Pure.

Sealed blocks go as they seal, by way of the host, where a bounded number of them waits to be copied by others (the
staging ring; one other instance gets half of it at most). A sample's first token and its open block close its
hand-over, after all else was offered. What another instance may be reading stays in place until it is told that this
ended. Called by `disagg/prefill.py`, which knows under which lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken
from fdasync.events.actions import HandOver, SendBlocks

if TYPE_CHECKING:
    from fdasync.events.actions import Action
    from fdasync.events.catalog import BlocksSent, HandedOver
    from fdasync.scheduler.disagg.handoff import Errand
    from fdasync.scheduler.state.config import SchedulerConfig
    from fdasync.scheduler.state.hold import Export
    from fdasync.scheduler.state.sequence import Sequence
    from fdasync.scheduler.tiers.swap_planner import Copier

_MAX_OFFER_BLOCKS = 16


class Shipper:
    """See the module.

    Args:
        actions: where what is to be done is put.
    """

    def __init__(self, config: SchedulerConfig, copier: Copier, actions: list[Action]) -> None:
        self._block_tokens = config.block_tokens
        self._staging = config.leases.staging_blocks or max(config.num_host_blocks // 2, 1)
        self._copier = copier
        self._actions = actions
        self._offers: dict[int, tuple[str, list[Export]]] = {}
        self._hand_overs: dict[int, tuple[Errand, Sequence, Export | None]] = {}
        self._exported = 0
        self._by_peer: dict[str, int] = {}
        self._next_offer = 0

    @property
    def num_out(self) -> int:
        """Offers and hand-overs that another instance has not answered yet."""
        return len(self._offers) + len(self._hand_overs)

    @property
    def num_exported(self) -> int:
        """Blocks in the staging ring, or on their way into it."""
        return self._exported

    def drop(self, errand: Errand) -> None:
        """Its lease is over: nothing more is offered. What is offered stays until it is told that this ended."""
        for _, export in errand.exports:
            self._unexport(errand.peer, export)
        errand.exports.clear()
        for hand in errand.hands.values():
            if hand is not None:
                self._copier.release(hand)
        errand.hands.clear()

    def forget(self, errand: Errand, seq: Sequence) -> None:
        """A sample ended before it was handed over."""
        export = errand.hands.pop(seq.key, None)
        if export is not None:
            self._copier.release(export)

    def pump(self, errand: Errand) -> None:
        """Send what is sealed as far as there is room on the host, and hand over who is ready."""
        holder = next((seq for seq in errand.seqs if seq.blocks), None)
        share = max(self._staging // 2, 1)
        gone = next((number for number, (_, export) in enumerate(errand.exports) if export.gone), None)
        if gone is not None:
            # whoever had them was preempted: they are sent when they were computed again
            errand.next_block = errand.exports[gone][0]
            for _, export in errand.exports[gone:]:
                self._unexport(errand.peer, export)
            del errand.exports[gone:]
        while holder is not None and errand.next_block < errand.full:
            block = holder.blocks[errand.next_block]
            if not block.sealed or not block.usable:
                break
            if self._exported and (self._exported >= self._staging or self._by_peer.get(errand.peer, 0) >= share):
                break
            errand.exports.append((errand.next_block, self._copier.export(block)))
            errand.next_block += 1
            self._exported += 1
            self._by_peer[errand.peer] = self._by_peer.get(errand.peer, 0) + 1
        while errand.exports and errand.exports[0][1].ready:
            count = 0
            while count < min(len(errand.exports), _MAX_OFFER_BLOCKS) and errand.exports[count][1].ready:
                count += 1
            self._offer(errand, errand.exports[:count])
            del errand.exports[:count]
        if errand.next_block < errand.full:
            return
        tail = errand.tokens % self._block_tokens
        for seq in errand.seqs:
            if seq.key not in errand.hands:
                continue
            hand = errand.hands[seq.key]
            if tail and hand is None:
                # last, or open blocks could hold the room on the host that the others wait for
                hand = errand.hands[seq.key] = self._copier.export(seq.blocks[-1])
            # a hand-over closes: until all else was offered, another lease may still be found
            if not errand.exports and (hand is None or hand.ready):
                self._hand_over(errand, seq, hand)

    def _offer(self, errand: Errand, batch: list[tuple[int, Export]]) -> None:
        number = self._take_offer()
        exports = [export for _, export in batch]
        self._offers[number] = (errand.peer, exports)
        slots = [export.block.slot for export in exports if export.block.slot is not None]
        self._actions.append(
            SendBlocks(
                number,
                errand.group,
                errand.attempt,
                errand.peer,
                tuple([index for index, _ in batch]),
                tuple([export.block.host for export in exports]),
                tuple([slot.id for slot in slots]),
                tuple([slot.generation for slot in slots]),
            )
        )

    def _hand_over(self, errand: Errand, seq: Sequence, export: Export | None) -> None:
        number = self._take_offer()
        errand.sent = True
        del errand.hands[seq.key]
        self._hand_overs[number] = (errand, seq, export)
        block = None if export is None else export.block
        slot = None if block is None else block.slot
        self._actions.append(
            HandOver(
                number,
                errand.group,
                errand.attempt,
                errand.peer,
                seq.key,
                seq.sampler.index,
                seq.tokens[seq.prompt_len],
                -1 if block is None else errand.full,
                seq.prompt_len % self._block_tokens,
                -1 if block is None else block.host,
                -1 if slot is None else slot.id,
                -1 if slot is None else slot.generation,
                seq.cached_tokens or (0, 0, 0),
            )
        )

    def _take_offer(self) -> int:
        self._next_offer += 1
        return self._next_offer - 1

    def sent(self, event: BlocksSent) -> None:
        """An offer ended, one way or the other: nobody reads its blocks any more."""
        entry = self._offers.pop(event.offer, None)
        if entry is None:
            raise InvariantBroken(f"offer {event.offer} ended, and was not out")
        for export in entry[1]:
            self._unexport(entry[0], export)

    def _unexport(self, peer: str, export: Export) -> None:
        self._copier.release(export)
        self._exported -= 1
        self._by_peer[peer] -= 1
        if not self._by_peer[peer]:
            del self._by_peer[peer]

    def handed_over(self, event: HandedOver) -> tuple[Errand, Sequence]:
        """A hand-over ended: whose, and of which sample. Nobody reads its open block any more."""
        entry = self._hand_overs.pop(event.offer, None)
        if entry is None:
            raise InvariantBroken(f"hand-over {event.offer} ended, and was not out")
        errand, seq, export = entry
        if export is not None:
            self._copier.release(export)
        return errand, seq
