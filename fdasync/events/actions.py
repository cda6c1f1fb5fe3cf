"""Every command the scheduler may give, on one page, in the imperative.

Frozen, tagged structs without tensors, rows or text. Each asynchronous one ends in exactly one event: `RunStep` in
`StepDone` or `StepFailed`, `SwapOut` and `SwapIn` in `SwapDone`, `LookUp` in `LookedUp`, `FetchBlocks` in `FetchEnded`,
`StoreBlocks` in `StoreEnded`, `HashAgain` in `Hashed`, `AskLease` in `LeaseAnswered`, `SendBlocks` in `BlocksSent`,
`HandOver` in `HandedOver`, `ReceiveBlocks` in `BlocksReceived`; a fetch or a write that ended before its work did is
followed by one `LeaseReturned`. `EmitTokens` for a request with stop strings is answered by one `StopMatched` or
`StopChecked`. The driver performs actions in the order given: `CopyRows` stands before the `FinishRequest` that reads
the rows and before the `RunStep` that may write those slots again.
"""

from __future__ import annotations

import msgspec

from fdasync.request import SamplerSpec


class SeqStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that enters the runner, new or resumed after preemption.

    Attributes:
        key: internal number of the sequence; a runner forgets it at `RunStep.leaves`.
        tokens: every known token, int32 little-endian.
        num_cached: leading tokens whose KV and rows are there already, fewer than all: in whole blocks or, for a
            sequence that another instance began, up to any token. A block that is there in part has this sequence
            as its one writer; what it holds past those tokens is of no meaning, whatever bits they are.
        blocks: device block ids, in order, for every known token.
        slots, generations: aux slot and its generation for each block that is not cached whole, the one that is
            there in part included (it keeps those of its first rows); both empty when capture is off.
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


class SwapOut(msgspec.Struct, frozen=True, array_like=True, tag="swap_out"):
    """Copy the KV of sealed device blocks to host blocks, `device[i]` to `host[i]`; their rows stay in their slots.

    Ends in one `SwapDone`. The device blocks stay as they are.
    """

    copy_id: int
    device: tuple[int, ...]
    host: tuple[int, ...]


class SwapIn(msgspec.Struct, frozen=True, array_like=True, tag="swap_in"):
    """Copy the KV of host blocks to fresh device blocks, `host[i]` to `device[i]`. Ends in one `SwapDone`.

    `slots` and `generations` name the slots that the blocks keep (both empty when capture is off).
    """

    copy_id: int
    host: tuple[int, ...]
    device: tuple[int, ...]
    slots: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()


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
    """`count` aux rows of one sequence, those of positions [start, start + count), from `offset` in a slot.

    They follow the rows that it already has: whoever places them compares.
    """

    key: int
    slot: int
    generation: int
    offset: int
    count: int
    start: int


class CopyRows(msgspec.Struct, frozen=True, array_like=True, tag="copy_rows"):
    """Copy aux rows out of their slots into the results of their requests, now."""

    spans: tuple[RowSpan, ...]


class FinishRequest(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """End one sequence. The only action that does, and given once for each.

    Attributes:
        reason: stop, length, abort, deadline; "failed" from `Scheduler.salvage` alone; of samples that another
            instance goes on with "handed_over", or "no_lease" where none would ("never_lease": ever); "lease_lost" on
            that one, where nothing came of it.
        note: of "no_lease" and "lease_lost": why.
        token_ids: the returned output tokens.
        num_rows: contiguous aux rows from the request's start that belong to them.
        cached_tokens: tokens that were not computed at first admission, found on the device, on the host, in the store.
        spans: (first output token, weight version) where the version changed, in order.
        matched_stop: the stop id that ended it, else -1.
    """

    key: int
    reason: str
    token_ids: tuple[int, ...]
    num_rows: int
    cached_tokens: tuple[int, int, int]
    spans: tuple[tuple[int, int], ...]
    matched_stop: int = -1
    note: str = ""


class LookUp(msgspec.Struct, frozen=True, array_like=True, tag="look_up"):
    """How many leading blocks of these identities does the store have? Ends in one `LookedUp`, by the deadline."""

    lookup_id: int
    namespace: bytes
    keys: tuple[bytes, ...]
    deadline: float


class FetchBlocks(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Read these blocks from the store: KV to host blocks, rows to slots. Ends in one `FetchEnded`, by the deadline.

    `slots` and `generations` are empty when capture is off.
    """

    fetch_id: int
    namespace: bytes
    keys: tuple[bytes, ...]
    host: tuple[int, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    deadline: float


class StoreBlocks(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """Write these host blocks and their rows to the store. Ends in one `StoreEnded`.

    Attributes:
        slots, generations: of their rows, and the use of each slot that they must have been written for; empty where
            there are no rows.
    """

    put_id: int
    namespace: bytes
    keys: tuple[bytes, ...]
    host: tuple[int, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]


class HashAgain(msgspec.Struct, frozen=True, array_like=True, tag="hash_again"):
    """Compute the identities of a sequence's full blocks under the present namespace. Ends in one `Hashed`.

    `tokens` are int32 little-endian.
    """

    key: int
    tokens: bytes
    salt: str


class AskLease(msgspec.Struct, frozen=True, array_like=True, tag="ask_lease"):
    """Ask another instance for room for a group of samples. Ends in one `LeaseAnswered`.

    Attributes:
        group: key of the group's first sample.
        attempt: never repeats within a group.
        peer: address of the instance.
        namespace, keys: identities of the prompt's full blocks.
        silent_by: engine time by which it must have answered something.
        answer_by: engine time by which it must have answered for good; the lease is over then too, unless granted.
        over_by: engine time at which even a granted lease is over.
        ttl_s: not renewed for so long, it is over.
    """

    group: int
    attempt: int
    peer: str
    namespace: bytes
    keys: tuple[bytes, ...]
    silent_by: float
    answer_by: float
    over_by: float
    ttl_s: float


class GiveUpLease(msgspec.Struct, frozen=True, array_like=True, tag="give_up_lease"):
    """Tell the other instance that a lease, asked for or granted, is not wanted any more. Offers under it end."""

    group: int
    attempt: int
    peer: str


class SendBlocks(msgspec.Struct, frozen=True, array_like=True, tag="send_blocks"):
    """Let the other instance copy these host blocks and their rows. Ends in one `BlocksSent`.

    Attributes:
        indices: which of the prompt's blocks they are.
        slots, generations: as in `StoreBlocks`.
    """

    offer: int
    group: int
    attempt: int
    peer: str
    indices: tuple[int, ...]
    host: tuple[int, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]


class HandOver(msgspec.Struct, frozen=True, array_like=True, tag="hand_over"):
    """Give the other instance a sample's first token and its open block. Ends in one `HandedOver`.

    Attributes:
        index: number of the sample.
        tail: index of the open block in the prompt; -1: the prompt fills its blocks.
        tail_rows: how many of its tokens count.
        host, slot, generation: where the open block is, and which use of its slot; -1 where there is none.
        cached: prompt tokens that were not computed, by tier.
    """

    offer: int
    group: int
    attempt: int
    peer: str
    key: int
    index: int
    token: int
    tail: int
    tail_rows: int
    host: int
    slot: int
    generation: int
    cached: tuple[int, int, int]


class AnswerLease(msgspec.Struct, frozen=True, array_like=True, tag="answer_lease"):
    """Answer who asked for a lease. See `pd.messages.LeaseAnswer`."""

    group: int
    verdict: str
    prefix_blocks: int = 0
    retry_after_s: float = 0.0
    reason: str = ""


class DropLease(msgspec.Struct, frozen=True, array_like=True, tag="drop_lease"):
    """Tell who holds a lease of ours that it is over; `ended`: because all of its samples have ended here."""

    group: int
    reason: str
    ended: bool = False


class ReceiveBlocks(msgspec.Struct, frozen=True, array_like=True, tag="receive_blocks"):
    """Copy blocks that were offered to us: KV to host blocks, rows to slots. Ends in one `BlocksReceived`.

    Attributes:
        indices: which of the prompt's blocks; offered under `offers`, one for each.
        slots, generations: empty when capture is off.
        rows: how many tokens of each block count.
        deadline: engine time.
    """

    receive_id: int
    group: int
    offers: tuple[int, ...]
    indices: tuple[int, ...]
    host: tuple[int, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    rows: tuple[int, ...]
    deadline: float


class ConfirmHandOver(msgspec.Struct, frozen=True, array_like=True, tag="confirm"):
    """Everything of a sample is here: tell who computed it, and, if `emit`, hand its first token to its request."""

    group: int
    key: int
    emit: bool


class TellBlocks(msgspec.Struct, frozen=True, array_like=True, tag="tell_blocks"):
    """Identities that can be matched from now on, and those that are lost; for routers."""

    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class WakeAt(msgspec.Struct, frozen=True, array_like=True, tag="wake_at"):
    """Publish `TimerFired` at this engine time; replaces any earlier WakeAt."""

    time: float


Action = (
    RunStep
    | SwapOut
    | SwapIn
    | EmitTokens
    | CopyRows
    | FinishRequest
    | LookUp
    | FetchBlocks
    | StoreBlocks
    | HashAgain
    | AskLease
    | GiveUpLease
    | SendBlocks
    | HandOver
    | AnswerLease
    | DropLease
    | ReceiveBlocks
    | ConfirmHandOver
    | TellBlocks
    | WakeAt
)

#: what concerns other instances
ELSEWHERE = (
    AskLease,
    GiveUpLease,
    SendBlocks,
    HandOver,
    AnswerLease,
    DropLease,
    ReceiveBlocks,
    ConfirmHandOver,
    TellBlocks,
)
