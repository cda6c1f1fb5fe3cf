"""A scheduler's statistics, and the check of its invariants. Pure; reads the parts of a scheduler and changes none.

Called by `core.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fdasync.errors import InvariantBroken
from fdasync.scheduler.state.pausing import PAUSED
from fdasync.stats import SchedulerStats

if TYPE_CHECKING:
    from fdasync.cache.blocks import HostHold
    from fdasync.scheduler.state.attachment import Attachment
    from fdasync.scheduler.tiers.parts import Parts


@dataclass(slots=True)
class Counters:
    """Counts that `core.py` and `results.py` keep; see `SchedulerStats`.

    Attributes:
        finished: sequences that ended.
        generated, dropped: tokens in results, and overrun.
        late_aborts: aborts of unknown or ended requests.
        prompt_tokens: of admitted requests.
        hits: of `prompt_tokens`, those found on the device, the host, in the store.
    """

    finished: int = 0
    generated: int = 0
    dropped: int = 0
    late_aborts: int = 0
    prompt_tokens: int = 0
    hits: tuple[int, int, int] = (0, 0, 0)


def collect_stats(counters: Counters, parts: Parts, attachments: tuple[Attachment, ...]) -> SchedulerStats:
    """Counters since the start, gauges of now."""
    index, queues, swap_planner, store_planner = parts.index, parts.queues, parts.swap_planner, parts.store_planner
    pool, snapshots = index.pool, index.pool.snapshots
    device_hits, host_hits, store_hits = counters.hits
    return SchedulerStats(
        waiting=len(queues.waiting),
        running=queues.num_running + len(queues.tail),
        steps=queues.done_step + 1,
        used_blocks=pool.num_blocks - index.num_idle - pool.num_free,
        idle_blocks=index.num_idle,
        free_blocks=pool.num_free,
        preemptions=queues.preemptions,
        evictions=index.evictions,
        finished=counters.finished,
        generated_tokens=counters.generated,
        dropped_tokens=counters.dropped,
        late_aborts=counters.late_aborts,
        prompt_tokens=counters.prompt_tokens,
        hit_tokens_device=device_hits,
        hit_tokens_host=host_hits,
        hit_tokens_store=store_hits,
        used_slots=pool.num_slots - pool.num_free_slots,
        free_slots=pool.num_free_slots,
        used_host_blocks=pool.num_host_blocks - pool.num_host_free,
        free_host_blocks=pool.num_host_free,
        host_evictions=index.host_evictions,
        swapped_in_blocks=swap_planner.in_blocks,
        swapped_out_blocks=swap_planner.out_blocks,
        fetched_blocks=store_planner.fetched,
        late_fetched_blocks=store_planner.late_fetched,
        written_blocks=store_planner.written,
        dropped_writes=store_planner.dropped + swap_planner.dropped + (snapshots.unwritten if snapshots else 0),
        forgotten_blocks=store_planner.chains.forgotten,
        fetch_cut_offs=store_planner.cut_off,
        moving=swap_planner.num_in_flight,
        writing=store_planner.num_writes + swap_planner.num_queued,
        waiting_for_store=store_planner.num_waits,
        late_transfers=store_planner.num_late,
        reserved_blocks=index.reserved,
        leased=len(queues.leased),
        queued_tokens=sum(len(seq.tokens) for seq in queues.waiting),
        paused=parts.pausing.paused,
        weight_version=parts.weights.version,
        **{name: value for one in attachments for name, value in one.stats().items()},
    )


def check(parts: Parts, attachments: tuple[Attachment, ...], *, steps: bool) -> None:
    """Raise InvariantBroken unless blocks, slots, pins, moves and queues agree, and every sequence waits for something.

    Args:
        steps: some are in flight.
    """
    index, queues, swap_planner, store_planner = parts.index, parts.queues, parts.swap_planner, parts.store_planner
    stage = parts.pausing.stage
    index.check()
    if stage == "clear" and index.pool.num_free - index.reserved != index.pool.num_blocks:
        raise InvariantBroken("blocks of a device are used, and its memory may be another program's")
    live = list(parts.sequences.values())
    holds = [one.check(live) for one in attachments]
    ref_count: dict[int, int] = {}
    holders = {id(seq): seq for seq in (*live, *queues.draining())}
    for seq in holders.values():
        for block in seq.blocks:
            ref_count[block.id] = ref_count.get(block.id, 0) + 1
    for block in (*swap_planner.pinned, *[block for held in holds for block in held.blocks]):
        ref_count[block.id] = ref_count.get(block.id, 0) + 1
    for block in index.pool.live():
        if block.ref_count != ref_count.get(block.id, 0):
            raise InvariantBroken(f"{block} has {block.ref_count} pins, {ref_count.get(block.id, 0)} sequences use it")
    if not steps and queues.is_draining:
        raise InvariantBroken("sequences drain, but no step is in flight")
    if index.pool.snapshots is not None:
        pinned = Counter([id(seq.resume) for seq in live if seq.resume is not None])
        pinned += Counter([id(seq.resume) for seq in queues.draining() if seq.resume is not None])
        held_snapshots = store_planner.snapshot_holds(live)
        partings = [seq.parting for seq in holders.values() if seq.parting is not None]
        exchanged = [snapshot for held in holds for snapshot in held.snapshots]
        held_snapshots += Counter([id(snapshot) for snapshot in (*partings, *exchanged)])
        for snapshot in index.pool.snapshots.live():
            if snapshot.pins != pinned[id(snapshot)]:
                raise InvariantBroken(f"{pinned[id(snapshot)]} sequences are about to start from {snapshot}")
            if snapshot.holds != held_snapshots[id(snapshot)]:
                raise InvariantBroken(f"{held_snapshots[id(snapshot)]} transfers and requests hold {snapshot}")
    swap_planner.check()
    on_host: Counter[HostHold] = Counter({**swap_planner.host_holds(), **store_planner.host_holds()})
    for held in holds:
        on_host.update(held.host)
    found = Counter([reason for block in index.pool.live() for reason in block.host_holds])
    for reason, count in on_host.items():
        if found[reason] != count:
            raise InvariantBroken(f"{found[reason]} host blocks are held for {reason}, {count} should be")
    hashing = any(seq.hashing for seq in live)
    moving = swap_planner.num_in_flight or store_planner.num_waits
    elsewhere = index.lent or any(held.waits for held in holds)
    if live and not (steps or queues.tail or moving or hashing or stage in PAUSED or elsewhere):
        raise InvariantBroken(f"{len(live)} sequences wait for nothing: the scheduler stalled")
