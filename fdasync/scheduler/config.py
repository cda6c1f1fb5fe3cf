"""What the scheduler is told at its start, and what it tells of itself. Pure data."""

from __future__ import annotations

import msgspec


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


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and gauges of now.

    Attributes:
        dropped_tokens: sampled for requests that had ended already (overrun).
        late_aborts: aborts of requests that were unknown or had ended.
        prompt_tokens, hit_tokens: of admitted requests, first admission only.
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
