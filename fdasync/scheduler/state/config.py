"""What the scheduler is told at its start, and what it tells of itself. Pure data."""

from __future__ import annotations

from typing import Literal

import msgspec


class LeaseRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of prefill/decode disaggregation.

    Attributes:
        asks: lease questions in flight, to all decode instances together; asks_per_peer: to one of them.
        ahead_tokens: prompt tokens that are leased and not begun, on a prefill instance; 0: two step budgets. A longer
            request is leased all the same, alone. What is granted beyond it is given back.
        silent_s: a decode instance that answers nothing for so long is passed over.
        queue_s: how long to stand in line at one instance while there are others to ask.
        find_s: how long to look for an instance that has room.
        total_s: from the question to the last hand-over.
        ttl_s: a lease that is not renewed for so long is over.
        max_ttl_s, max_total_s: on a decode instance, the most that others may ask for as ttl_s and total_s; who asks
            for more gets this.
        staging_blocks: host blocks that wait to be copied by others, or are being copied from them; 0: half of the
            host tier. One other instance gets half of that at most.
        receive_s: to copy a few blocks from another instance.
        line: leases that wait in line on a decode instance.
        age_s: who waited so long for room on a decode instance, in line for a lease or for the steps there, is not
            passed any more by anybody after it in order of priority, then of arrival.
        beyond_running: samples beyond max_running that may hold leases.
    """

    asks: int = 256
    asks_per_peer: int = 16
    ahead_tokens: int = 0
    silent_s: float = 1.0
    queue_s: float = 5.0
    find_s: float = 60.0
    total_s: float = 120.0
    ttl_s: float = 5.0
    max_ttl_s: float = 60.0
    max_total_s: float = 600.0
    staging_blocks: int = 0
    receive_s: float = 10.0
    line: int = 256
    age_s: float = 2.0
    beyond_running: int = 64


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler needs to know, all resolved.

    Attributes:
        block_tokens: a power of two.
        num_blocks: of the device.
        max_running: sequences at a time, at most max_step_tokens.
        max_step_tokens: token budget of a step.
        pipeline_depth: steps in flight, 1 or 2.
        prefix_cache: share sealed and pending blocks by identity.
        capture: every block has an aux slot.
        decode_reserve_blocks: free blocks that admission leaves for each decoding sequence, a quarter of all
            blocks at most.
        weight_version: label of the weights in use.
        namespace: identities live under it, as long as these weights are in use.
        num_host_blocks: of the host tier; 0: there is none.
        block_nbytes: KV of a block.
        store: there is a store behind the host tier.
        write_through: which sealed blocks are written to the store.
        write_back: the sealed blocks of preempted requests go to the host at once, and to the store if there is one.
        fetch_min_tokens: shorter runs are computed, not looked up.
        leases: of requests that go from one instance to another.
        block_news: tell of every identity that can be matched, and of those lost.
        prefill_tokens_per_s, fetch_nbytes_per_s, lookup_s: what is believed before it was measured.
    """

    block_tokens: int
    num_blocks: int
    max_running: int
    max_step_tokens: int
    pipeline_depth: int = 1
    prefix_cache: bool = True
    capture: bool = True
    decode_reserve_blocks: int = 1
    weight_version: int = 0
    namespace: bytes = b""
    num_host_blocks: int = 0
    block_nbytes: int = 1
    store: bool = False
    write_through: Literal["off", "prompt", "all"] = "all"
    write_back: bool = True
    fetch_min_tokens: int = 0
    prefill_tokens_per_s: float = 1e3
    fetch_nbytes_per_s: float = 1e9
    lookup_s: float = 2e-3
    leases: LeaseRules = LeaseRules()
    block_news: bool = False


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and gauges of now.

    Attributes:
        dropped_tokens: sampled for requests that had ended already (overrun).
        late_aborts: aborts of requests that were unknown or had ended.
        prompt_tokens, hit_tokens: of admitted requests, first admission only.
        hit_tokens_host, hit_tokens_store: of hit_tokens, those found there.
        swapped_in_blocks, swapped_out_blocks: copied between device and host.
        fetched_blocks, late_fetched_blocks, written_blocks: read from and written to the store.
        dropped_writes: blocks that should have been kept or written, and were not.
        forgotten_blocks: that the store was believed to have, and had not when it was asked.
        fetch_cut_offs: lookups and fetches that were not waited for any longer.
        moving, writing, waiting_for_store, late_leases: copies in flight; blocks being written or queued; lookups and
            fetches in flight; transfers whose wait ended before their work.
        reserved_blocks: of those free and idle, promised to leases and not taken yet.
        leased: samples that wait for blocks of another instance, or in line for room for them.
        leases_granted, leases_denied, leases_dropped, received_blocks: given to other instances, and what came by them.
        errands: groups of samples on their way to another instance.
        queued_tokens: prompt tokens of those who wait.
    """

    waiting: int
    running: int
    steps: int
    free_blocks: int
    idle_blocks: int
    num_blocks: int
    preemptions: int
    evictions: int
    finished: int
    generated_tokens: int
    dropped_tokens: int
    late_aborts: int
    prompt_tokens: int
    hit_tokens: int
    hit_tokens_host: int = 0
    hit_tokens_store: int = 0
    num_host_blocks: int = 0
    free_host_blocks: int = 0
    host_evictions: int = 0
    swapped_in_blocks: int = 0
    swapped_out_blocks: int = 0
    fetched_blocks: int = 0
    late_fetched_blocks: int = 0
    written_blocks: int = 0
    dropped_writes: int = 0
    forgotten_blocks: int = 0
    fetch_cut_offs: int = 0
    moving: int = 0
    writing: int = 0
    waiting_for_store: int = 0
    late_leases: int = 0
    reserved_blocks: int = 0
    leased: int = 0
    leases_granted: int = 0
    leases_denied: int = 0
    leases_dropped: int = 0
    received_blocks: int = 0
    errands: int = 0
    queued_tokens: int = 0
    paused: bool = False
    weight_version: int = 0
