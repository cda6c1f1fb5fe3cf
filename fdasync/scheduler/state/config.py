"""The scheduler's configuration and its statistics. Pure data.

The engine makes the configuration from its own; `scheduler/stats.py` fills the statistics.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class LeaseRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of prefill/decode disaggregation.

    Attributes:
        asks: lease questions in flight, to all decode instances together.
        asks_per_peer: lease questions in flight, to one decode instance.
        ahead_tokens: prompt tokens that a prefill instance has leases for and has not begun, and prompt tokens that it
            is asking one decode instance for; 0: two step budgets. A longer request is leased all the same, alone.
        silent_s: a decode instance that answers nothing for so long is passed over.
        queue_s: how long to stand in line at one instance while there are others to ask.
        find_s: how long to look for an instance that has room.
        total_s: how long a lease may take, from the question to the last hand-over.
        ttl_s: a lease that is not renewed for so long is over.
        max_ttl_s, max_total_s: the most that a decode instance grants as ttl_s and total_s, whatever a prefill instance
            asks for.
        staging_blocks: host blocks that wait for other instances to copy them, or are being filled from other
            instances; 0: half of the host tier. One other instance gets half of that at most.
        receive_s: how long the copy of a few blocks from another instance may take.
        line: leases that wait in line on a decode instance.
        age_s: a request that waited so long for room on a decode instance, in line for a lease or for the steps there,
            is not passed any more by requests that come after it in the order of the policy.
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
    """Everything that the scheduler has to know, with all defaults resolved.

    Attributes:
        block_tokens: tokens of a block; a power of two.
        num_blocks: blocks of the device.
        max_running: sequences at a time; max_step_tokens holds max_run_tokens of each.
        max_step_tokens: token budget of a step.
        pipeline_depth: most steps in flight, 1 or 2.
        max_run_tokens: most tokens that a step yields of one decoding sequence.
        prefix_cache: share sealed and pending blocks by identity.
        capture: every block has an aux slot.
        decode_reserve_blocks: free blocks that admission leaves for each decoding sequence, a quarter of all
            blocks at most.
        weight_version: label of the weights in use.
        weights_id: of these weights.
        namespace: root of all identities while these weights are in use.
        num_host_blocks: blocks of the host tier; 0: there is none.
        block_nbytes: bytes of a block's KV.
        store: there is a store behind the host tier.
        write_through: which sealed blocks are written to the store.
        write_back: the sealed blocks of preempted requests go to the host at once, and to the store if there is one.
        fetch_min_tokens: shorter runs of tokens are computed, not looked up.
        leases: bounds of prefill/decode disaggregation.
        kv_events: publish every identity as soon as it can be matched, and as soon as it no longer can.
        prefill_tokens_per_s, fetch_nbytes_per_s, lookup_s: estimates until the first measurement.
        policy, policy_config: which requests go first (`state/policy.py`): the policy's name, and its settings.
        drafter, drafter_config: what drafts tokens for the runner to verify, up to max_run_tokens - 1 of a sequence:
            the drafter's name, and its settings. "": nothing here does.
        weighs_drafts: steps have as many drafts as pay; False: as many as there are.
        own_drafter: name of the runner's own drafter, whose drafts `StepDone` tells; "": it has none.
        recurrent: sequences have a state besides their KV, and go on only where there is a snapshot of it.
        num_snapshots, num_host_snapshots: places of snapshots on the device and on the host.
        state_every_tokens: snapshots are taken at its multiples, too, and stored there alone; a multiple of
            block_tokens.
        snapshot_nbytes: bytes of a snapshot.
    """

    block_tokens: int
    num_blocks: int
    max_running: int
    max_step_tokens: int
    pipeline_depth: int = 1
    max_run_tokens: int = 1
    prefix_cache: bool = True
    capture: bool = True
    decode_reserve_blocks: int = 1
    weight_version: str = "0"
    weights_id: str = ""
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
    kv_events: bool = False
    policy: str = "arrival"
    policy_config: dict[str, Any] = msgspec.field(default_factory=dict)
    drafter: str = ""
    drafter_config: dict[str, Any] = msgspec.field(default_factory=dict)
    weighs_drafts: bool = True
    own_drafter: str = ""
    recurrent: bool = False
    num_snapshots: int = 0
    num_host_snapshots: int = 0
    state_every_tokens: int = 1
    snapshot_nbytes: int = 0


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and gauges of now.

    Attributes:
        waiting: sequences in the waiting queue.
        running: sequences that hold blocks, and may still have a step planned or in flight.
        steps: completed steps.
        free_blocks, idle_blocks, num_blocks: device blocks without content; with content that no sequence uses; all.
        preemptions: how often a sequence gave its blocks up for others.
        evictions, host_evictions: blocks that left the device, and the host, to make room.
        finished: sequences that ended.
        generated_tokens: output tokens in results.
        dropped_tokens: tokens sampled for requests that had ended already (overrun).
        late_aborts: aborts of requests that were unknown or had ended.
        prompt_tokens, hit_tokens: of admitted requests, first admission only.
        hit_tokens_host, hit_tokens_store: the part of hit_tokens that was found there.
        num_slots, free_slots: places of rows, and places without content; 0 without capture.
        num_host_blocks, free_host_blocks: blocks of the host tier, and blocks without content among them.
        swapped_in_blocks, swapped_out_blocks: blocks copied between device and host.
        fetched_blocks, late_fetched_blocks: blocks read from the store in time, and after the wait for them had ended.
        written_blocks: blocks that the store took.
        dropped_writes: blocks that should have been kept or written, and were not.
        forgotten_blocks: blocks that the store was believed to have, and had not when it was asked.
        fetch_cut_offs: lookups and fetches whose wait ended at its deadline.
        moving: copies between device and host in flight.
        writing: blocks that are being written to the host or the store, or queued for it.
        waiting_for_store: lookups and fetches in flight.
        late_transfers: transfers whose wait ended before their work.
        reserved_blocks: free and idle blocks that are promised to leases, and not taken yet.
        leased: samples that wait for blocks of another instance, or in line for room for them.
        leases_granted, leases_denied, leases_dropped: answers to prefill instances, and leases that ended unused.
        received_blocks: blocks that arrived from other instances.
        hand_offs: groups of samples on their way to another instance.
        queued_tokens: prompt tokens of the waiting sequences.
        paused: no steps are planned.
        weight_version: the caller's label of the weights in use.
        drafter: name of the drafter that steps have drafts of; "": there is none, or the runner alone drafts.
        drafted_tokens: tokens of the drafter that the runner forwarded as drafts.
        accepted_tokens: drafted tokens that equalled the token sampled in their place.
        drafting_steps: completed steps that had drafts.
        own_drafter, own_drafted_tokens, own_accepted_tokens, own_drafting_steps: likewise of the runner's own drafter.
        num_snapshots, free_snapshots, num_host_snapshots, free_host_snapshots: places of snapshots of recurrent state,
            and places without content, on the device and on the host; all 0 for a model that has KV alone.
        taken_snapshots: snapshots that steps took.
        resumed_snapshots: sequences that started from one.
        lost_snapshots: snapshots that were evicted from their last place.
        refused_snapshots: snapshots that were not taken, since every place was in use.
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
    num_slots: int = 0
    free_slots: int = 0
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
    late_transfers: int = 0
    reserved_blocks: int = 0
    leased: int = 0
    leases_granted: int = 0
    leases_denied: int = 0
    leases_dropped: int = 0
    received_blocks: int = 0
    hand_offs: int = 0
    queued_tokens: int = 0
    paused: bool = False
    weight_version: str = "0"
    drafter: str = ""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafting_steps: int = 0
    own_drafter: str = ""
    own_drafted_tokens: int = 0
    own_accepted_tokens: int = 0
    own_drafting_steps: int = 0
    num_snapshots: int = 0
    free_snapshots: int = 0
    num_host_snapshots: int = 0
    free_host_snapshots: int = 0
    taken_snapshots: int = 0
    resumed_snapshots: int = 0
    lost_snapshots: int = 0
    refused_snapshots: int = 0
