"""Looking into a scheduler: its counters and gauges, and whether its books are right. Pure; changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fdasync.errors import InvariantBroken
from fdasync.scheduler.state.config import SchedulerStats

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fdasync.cache.prefix import PrefixIndex
    from fdasync.scheduler.disagg.decode import Lender
    from fdasync.scheduler.disagg.prefill import Borrower
    from fdasync.scheduler.state.queues import Roster
    from fdasync.scheduler.state.sequence import Sequence
    from fdasync.scheduler.tiers.store_planner import Storer
    from fdasync.scheduler.tiers.swap_planner import Copier


class Parts(NamedTuple):
    """What is looked into."""

    prefix: PrefixIndex
    roster: Roster
    copier: Copier
    storer: Storer
    borrower: Borrower
    lender: Lender


class Counters:
    """What the scheduler counts itself; see `SchedulerStats`."""

    __slots__ = ("dropped", "finished", "generated", "hits", "late_aborts", "prompt_tokens")

    def __init__(self) -> None:
        self.finished = self.generated = self.dropped = self.late_aborts = self.prompt_tokens = 0
        self.hits = (0, 0, 0)

    def ended(self, seq: Sequence, keep: int) -> None:
        """A sequence ended with so many output tokens."""
        self.finished += 1
        self.generated += keep
        self.dropped += seq.num_output - keep
        if seq.cached_tokens is not None:
            self.prompt_tokens += seq.prompt_len
            (device, host, store), (more_device, more_host, more_store) = self.hits, seq.cached_tokens
            self.hits = (device + more_device, host + more_host, store + more_store)


def stats(counters: Counters, parts: Parts, *, weight_version: int, paused: bool) -> SchedulerStats:
    """Counters since the start, gauges of now."""
    index, roster, copier, storer, borrower, lender = parts
    pool = index.pool
    return SchedulerStats(
        waiting=len(roster.waiting),
        running=roster.num_running + len(roster.tail),
        steps=roster.done_step + 1,
        free_blocks=pool.num_free,
        idle_blocks=index.num_idle,
        num_blocks=pool.num_blocks,
        preemptions=roster.preemptions,
        evictions=index.evictions,
        finished=counters.finished,
        generated_tokens=counters.generated,
        dropped_tokens=counters.dropped,
        late_aborts=counters.late_aborts,
        prompt_tokens=counters.prompt_tokens,
        hit_tokens=sum(counters.hits),
        hit_tokens_host=counters.hits[1],
        hit_tokens_store=counters.hits[2],
        num_host_blocks=pool.num_host_blocks,
        free_host_blocks=pool.num_host_free,
        host_evictions=index.host_evictions,
        swapped_in_blocks=copier.in_blocks,
        swapped_out_blocks=copier.out_blocks,
        fetched_blocks=storer.fetched,
        late_fetched_blocks=storer.late_fetched,
        written_blocks=storer.written,
        dropped_writes=storer.dropped + copier.dropped,
        forgotten_blocks=storer.chains.forgotten,
        fetch_cut_offs=storer.cut_off,
        moving=copier.num_in_flight,
        writing=storer.num_writes + copier.num_queued,
        waiting_for_store=storer.num_waits,
        late_leases=storer.num_late,
        reserved_blocks=index.reserved,
        leased=len(roster.leased),
        leases_granted=lender.granted,
        leases_denied=lender.denied,
        leases_dropped=lender.dropped,
        received_blocks=lender.received,
        errands=borrower.num_errands,
        queued_tokens=sum(len(seq.tokens) for seq in roster.waiting),
        paused=paused,
        weight_version=weight_version,
    )


def check(sequences: Iterable[Sequence], parts: Parts, *, steps: bool, paused: bool) -> None:
    """Raise InvariantBroken unless blocks, slots, pins, moves and queues agree, and everybody waits for something.

    `steps`: some are in flight.
    """
    index, roster, copier, storer, borrower, lender = parts
    index.check()
    live = list(sequences)
    pins: dict[int, int] = {}
    holders = {id(seq): seq for seq in (*live, *roster.draining())}
    for seq in holders.values():
        for block in seq.blocks:
            pins[block.id] = pins.get(block.id, 0) + 1
    for block in lender.held():
        pins[block.id] = pins.get(block.id, 0) + 1
    for block in index.pool.live():
        if block.pins != pins.get(block.id, 0):
            raise InvariantBroken(f"{block} has {block.pins} pins, {pins.get(block.id, 0)} sequences use it")
    if not steps and roster.is_draining:
        raise InvariantBroken("sequences drain, but no step is in flight")
    copier.check()
    lender.check()
    copies = sum(block.device_moves for block in index.pool.live())
    storer.check(copies + copier.num_held + lender.num_receiving)
    hashing = any(seq.hashing for seq in live)
    moving = copier.num_in_flight or storer.num_waits
    elsewhere = borrower.num_asked or borrower.num_out or lender.num_leases
    if live and not (steps or roster.tail or moving or hashing or paused or elsewhere):
        raise InvariantBroken(f"{len(live)} sequences wait for nothing: the scheduler stalled")
