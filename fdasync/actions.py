"""Every command the scheduler may give, on one page, in the imperative.

Frozen, tagged structs without tensors, rows or text. Only `RunStep` is asynchronous: it ends in
exactly one `StepDone` or `StepFailed`. `EmitTokens` for a request with stop strings is answered by one
`StopMatched` or `StopChecked`. The driver performs actions in the order given: `CopyRows` stands before
the `FinishRequest` that reads the rows and before the `RunStep` that may write those slots again.
"""

from __future__ import annotations

import msgspec

from fdasync.request import SamplerSpec


class SeqStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that enters the runner, new or resumed after preemption.

    Attributes:
        key: internal number of the sequence; a runner forgets it at `RunStep.leaves`.
        tokens: every known token, int32 little-endian.
        num_cached: leading tokens whose KV and rows are there already (whole blocks).
        blocks: device block ids, in order, for every known token.
        slots, generations: aux slot and its generation for each block past the cached ones; both empty
            when capture is off.
        sampler: how to sample.
    """

    key: int
    tokens: bytes
    num_cached: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    sampler: SamplerSpec


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """The next `count` tokens of a sequence that is still in prefill.

    Attributes:
        last: these are the last known tokens: sample once, and decode from the next step on.
    """

    key: int
    count: int
    last: bool


class BlockAppend(msgspec.Struct, frozen=True, array_like=True):
    """One more block at the end of a decoding sequence's block table (slot -1: capture is off)."""

    key: int
    block: int
    slot: int
    generation: int


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag="run_step"):
    """One step, as a delta against what the runner knows. Steps are performed in order.

    The runner keeps a *decode set* in the order of joining. A step applies, in this order: `leaves`
    (forget the sequence), `starts`, `appends`; then it forwards one token (the last sampled one, which
    never leaves the device) of every member of the decode set but `skips`, and the `chunks`; samples in
    that order, chunks only where `last`; lastly the sequences of `last` chunks join the decode set.
    """

    step_id: int
    leaves: tuple[int, ...] = ()
    starts: tuple[SeqStart, ...] = ()
    appends: tuple[BlockAppend, ...] = ()
    skips: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()


class EmitTokens(msgspec.Struct, frozen=True, array_like=True, tag="emit"):
    """Hand sampled tokens of one step to their requests: three columns of equal length.

    Attributes:
        keys, tokens: sequence and token.
        rows: the token's row in the step's output (for log-probs).
    """

    step_id: int
    keys: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: tuple[int, ...]


class RowSpan(msgspec.Struct, frozen=True, array_like=True):
    """`count` aux rows of one sequence from `offset` in a slot; they follow the rows that it already has."""

    key: int
    slot: int
    generation: int
    offset: int
    count: int


class CopyRows(msgspec.Struct, frozen=True, array_like=True, tag="copy_rows"):
    """Copy aux rows out of their slots into the results of their requests, now."""

    spans: tuple[RowSpan, ...]


class FinishRequest(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """End one sequence. The only action that does, and given once for each.

    Attributes:
        reason: stop, length, abort, deadline; "failed" from `Scheduler.salvage` alone.
        token_ids: the returned output tokens.
        num_rows: contiguous aux rows from the request's start that belong to them.
        cached_tokens: prompt tokens that came from the prefix cache at first admission.
        spans: (first output token, weight version) where the version changed, in order.
        matched_stop: the stop id that ended it, else -1.
    """

    key: int
    reason: str
    token_ids: tuple[int, ...]
    num_rows: int
    cached_tokens: int
    spans: tuple[tuple[int, int], ...]
    matched_stop: int = -1


class WakeAt(msgspec.Struct, frozen=True, array_like=True, tag="wake_at"):
    """Publish `TimerFired` at this engine time; replaces any earlier WakeAt."""

    time: float


Action = RunStep | EmitTokens | CopyRows | FinishRequest | WakeAt
