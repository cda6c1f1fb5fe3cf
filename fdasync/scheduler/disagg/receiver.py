"""Decides when a decode instance copies offered blocks, and enters the blocks that arrived into their leases. Pure.

Offered blocks are copied to the host, a bounded number at a time (the staging ring; one prefill instance gets half of
it at most), and checked there. Blocks that lie on a prefill instance's device are copied to this one's, and have no
place on the host. Recurrent states are copied to the host's places for them; one prefill instance gets half of these at
most. Each block takes one of the device blocks that were reserved for its lease. This module knows no bytes, and
decides about no lease. Called by `decode.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken
from fdasync.events.actions import ReceiveBlocks
from fdasync.scheduler.disagg.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.cache.blocks import Block
    from fdasync.cache.snapshots import Snapshot
    from fdasync.events.actions import Action
    from fdasync.events.catalog import BlocksReceived
    from fdasync.scheduler.disagg.lease import Lease
    from fdasync.scheduler.state.sequence import Sequence
    from fdasync.scheduler.tiers.parts import Parts

_MAX_RECEIVE_BLOCKS = 16


@dataclass(slots=True, eq=False)
class _Receive:
    """A copy of blocks from a prefill instance, in flight.

    Attributes:
        lease: the blocks are for it.
        epoch: of the weights at its start.
        blocks: device and host places that are being filled.
        indices: of each block, its number in the prompt.
        samples: of each block, the sample whose open block it is; None: it is a full block of all samples.
        on_device: the blocks come from device to device.
        state: the state that is being filled, of the first of `samples`; None: blocks are filled.
    """

    lease: Lease
    epoch: int
    on_device: bool = False
    blocks: list[Block] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    samples: list[Sequence | None] = field(default_factory=list)
    state: Snapshot | None = None


class BlockReceiver:
    """See the module.

    Args:
        actions: the list that its actions are appended to.

    Attributes:
        epoch: counts changes of the weights; blocks that were offered in an earlier one are not indexed.
        num_received: blocks that arrived so far.
    """

    def __init__(self, parts: Parts, actions: list[Action]) -> None:
        config = parts.config
        self._rules = config.leases
        self._size = config.block_tokens
        self._index = parts.index
        self._actions = actions
        self._receives: dict[int, _Receive] = {}
        self._ring = Shares(config.leases.staging_blocks or max(config.num_host_blocks // 2, 1))
        self._states = Shares(config.num_host_snapshots)
        self._next_receive = 0
        self.epoch = 0
        self.num_received = 0

    @property
    def num_receiving(self) -> int:
        """Host blocks that are being filled."""
        return self._ring.total

    @property
    def is_receiving(self) -> bool:
        """Copies are in flight."""
        return bool(self._receives)

    def receive(self, lease: Lease, now: float) -> str:
        """Copy the offered blocks as far as the ring and the host have room. Returns a promise that the prefill
        instance broke, for which the lease must end; "" if there is none."""
        problem = ""
        while lease.offered and not problem:
            if lease.offered[0][1] > lease.full:
                if not self._receive_state(lease, now):
                    break
                continue
            receive = _Receive(lease, self.epoch, on_device=lease.offered[0][3])
            offers: list[int] = []
            rows: list[int] = []
            while lease.offered and len(offers) < _MAX_RECEIVE_BLOCKS:
                offer, index, seq, on_device = lease.offered[0]
                if on_device != receive.on_device or index > lease.full:
                    break
                if not on_device and self._ring.total and self._ring.is_full(lease.peer):
                    break
                if (lease.blocks[index] if seq is None else lease.open.get(seq.key)) is not None:
                    # offered twice, or a block of the prefix that this instance has
                    problem = f"block {index} was offered twice, or is here"
                    break
                roomy = on_device or self._index.make_host_room(for_fetch=True)
                block = self._index.take_reserved() if roomy else None
                if block is None:
                    break
                lease.reserved -= 1
                if seq is None:
                    lease.blocks[index] = block
                else:
                    lease.open[seq.key] = block
                lease.offered.popleft()
                self._place(block, lease, on_device=on_device)
                offers.append(offer)
                receive.blocks.append(block)
                receive.indices.append(index)
                receive.samples.append(seq)
                rows.append(self._size if seq is None else seq.prompt_len % self._size)
            if not offers:
                break
            self._start(receive, offers, rows, now)
        return problem

    def _receive_state(self, lease: Lease, now: float) -> bool:
        """Copy the state that is offered next; False: there is no place for it now."""
        pool = self._index.pool.snapshots
        offer, index, seq, _ = lease.offered[0]
        state = None if pool is None or self._states.is_full(lease.peer) else pool.receive(None)
        if state is None:
            return False
        lease.offered.popleft()
        self._states.take(lease.peer)
        self._start(_Receive(lease, self.epoch, indices=[index], samples=[seq], state=state), [offer], [0], now)
        return True

    def _start(self, receive: _Receive, offers: list[int], rows: list[int], now: float) -> None:
        number = self._next_receive
        self._next_receive += 1
        self._receives[number] = receive
        slots = [block.slot for block in receive.blocks if block.slot is not None]
        self._actions.append(
            ReceiveBlocks(
                receive_id=number,
                group=receive.lease.group,
                offers=tuple(offers),
                indices=tuple(receive.indices),
                host=() if receive.on_device else tuple([block.host for block in receive.blocks]),
                slots=tuple([slot.id for slot in slots]),
                generations=tuple([slot.generation for slot in slots]),
                rows=tuple(rows),
                deadline=min(receive.lease.over_by, now + self._rules.receive_s),
                device=tuple([block.id for block in receive.blocks]) if receive.on_device else (),
                snapshots_host=() if receive.state is None else (receive.state.host,),
            )
        )

    def let_go(self, lease: Lease, state: Snapshot) -> None:
        """A sample has left its lease, and needs its state's place on the host no more; the last sample that shares the
        place gives it back."""
        if not any(held is state for held in lease.states.values()):
            self._states.give_back(lease.peer)
        self._index.unhold(state)

    @property
    def held_snapshots(self) -> list[Snapshot]:
        """States that are being filled."""
        return [receive.state for receive in self._receives.values() if receive.state is not None]

    def _place(self, block: Block, lease: Lease, *, on_device: bool) -> None:
        """Hold the place that the copy fills."""
        if on_device:
            block.device_moves += 1
            self._index.lent += 1
        else:
            self._index.pool.add_host(block)
            block.hold("receive")
            self._ring.take(lease.peer)
        self._index.settle(block)

    def _leave(self, block: Block, lease: Lease, *, on_device: bool) -> None:
        """Undo `_place`."""
        if on_device:
            block.device_moves -= 1
            self._index.lent -= 1
        else:
            block.unhold("receive")
            self._ring.give_back(lease.peer)
        self._index.settle(block)

    def received(
        self,
        event: BlocksReceived,
        bring: Callable[[Lease, list[Block]], None],
        bring_state: Callable[[Lease, Snapshot], bool],
    ) -> Lease:
        """A copy ended; returns its lease. Blocks that arrived are checked, and stay as cache without the lease too.

        Args:
            bring: called with the lease and its blocks that arrived on the host, before they may be evicted.
            bring_state: called with the lease and a state that arrived on the host; returns whether the lease keeps it
                there.
        """
        receive = self._receives.pop(event.receive_id, None)
        if receive is None or len(event.arrived) != len(receive.samples):
            raise InvariantBroken(f"receive {event.receive_id} ended, and was not in flight")
        lease = receive.lease
        if receive.state is not None:
            if event.arrived[0]:
                assert self._index.pool.snapshots is not None
                self._index.pool.snapshots.received(receive.state)
            if not event.arrived[0] or not bring_state(lease, receive.state):
                self.let_go(lease, receive.state)
            return lease
        here: list[Block] = []
        for number, (block, came) in enumerate(zip(receive.blocks, event.arrived, strict=True)):
            seq = receive.samples[number]
            if came:
                self.num_received += 1
                block.on_host = not receive.on_device
                if block.ref_count and not receive.on_device:
                    # a block without a pin was of a sample that ended meanwhile
                    here.append(block)
                if seq is None:
                    block.sealed = True
                    lease.missing -= 1
                    if self._index.enabled and receive.epoch == self.epoch and lease.shares:
                        self._index.adopt(block, lease.keys[receive.indices[number]])
                else:
                    lease.tails.pop(seq.key, None)
        bring(lease, here)
        for block in receive.blocks:
            self._leave(block, lease, on_device=receive.on_device)
        return lease
