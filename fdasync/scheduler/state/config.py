"""The scheduler's configuration. Pure data, which the engine makes from its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

_Seconds = Annotated[float, Meta(ge=1e-3, le=1e9)]
_Count = Annotated[int, Meta(ge=1, le=10**9)]
_FromZero = Annotated[int, Meta(ge=0, le=10**9)]


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

    asks: _Count = 256
    asks_per_peer: _Count = 16
    ahead_tokens: _FromZero = 0
    silent_s: _Seconds = 1.0
    queue_s: _Seconds = 5.0
    find_s: _Seconds = 60.0
    total_s: _Seconds = 120.0
    ttl_s: _Seconds = 5.0
    max_ttl_s: _Seconds = 60.0
    max_total_s: _Seconds = 600.0
    staging_blocks: _FromZero = 0
    receive_s: _Seconds = 10.0
    line: _Count = 256
    age_s: _Seconds = 2.0
    beyond_running: _FromZero = 64


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
