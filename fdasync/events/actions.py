"""Every command that the scheduler may give, on one page, in the imperative.

Frozen, tagged structs without tensors, rows or text. Each asynchronous action ends in exactly one event: `RunStep` in
`StepDone` or `StepFailed`, `SwapOut` and `SwapIn` in `SwapDone`, `LookUp` in `LookedUp`, `FetchBlocks` in `FetchEnded`,
`StoreBlocks` in `StoreEnded`, `HashAgain` in `Hashed`, `AskLease` in `LeaseAnswered`, `SendBlocks` in `BlocksSent`,
`HandOver` in `HandedOver`, `ReceiveBlocks` in `BlocksReceived`; a fetch or a write that ended before its work did is
followed by one `LateTransferEnded`. Each token of `EmitTokens` for a request with stop strings is answered by one
`StopMatched` or `StopChecked`, up to the first `StopMatched`. The driver performs actions in the order given:
`CopyRows` stands before the `FinishRequest` that reads the rows and before the `RunStep` that may write those slots
again. The module knows no scheduler and no engine; the scheduler makes actions, and `engine/driver.py` performs them.

Numbers like `copy_id`, `fetch_id`, `put_id`, `offer` and `receive_id` name one action; its terminal event repeats them.
A `key` is the internal number of a sequence (one sample of a request), a `group` the key of its request's first sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from fdasync.request import SamplerSpec

# the scheduler knows it from here
from fdasync.result import FinishReason as FinishReason
from fdasync.result import PartEnd as PartEnd

if TYPE_CHECKING:
    from collections.abc import Iterator

LeaseVerdict = Literal["granted", "queued", "denied"]


class SeqStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that enters the runner, new or resumed after preemption.

    Attributes:
        key: the sequence; a runner forgets it at `RunStep.leaves`.
        tokens: every known token, int32 little-endian.
        num_cached: leading tokens whose KV and rows exist already, fewer than all: in whole blocks or, for a
            sequence that another instance began, up to any token. A partial block has this sequence as its one
            writer; its bytes past those tokens have no meaning.
        blocks: device block ids, in order, for every known token.
        slots, generations: aux slot and its generation for each block that is not cached whole, a partial block
            included (it keeps the slot of its first rows); both empty when capture is off.
        sampler: how to sample.
        snapshot: place of the recurrent state behind the `num_cached` tokens, to be copied before the step computes;
            -1: there are no such tokens, or the model has no such state (`Capacity.state_specs`).
    """

    key: int
    tokens: bytes
    num_cached: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    sampler: SamplerSpec
    snapshot: int = -1


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The next `count` tokens of a sequence that is still in prefill.

    Attributes:
        key: the sequence.
        count: how many tokens.
        last: these are the last known tokens: sample once, and decode from the next step on.
    """

    key: int
    count: int
    last: bool


class BlockAppend(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One more block at the end of a decoding sequence's block table.

    Attributes:
        key: the sequence.
        block: device block id.
        slot, generation: the block's aux slot and its generation; slot -1: capture is off.
    """

    key: int
    block: int
    slot: int
    generation: int


class Drafts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Paths that a step may verify: guessed tokens of decoding sequences, in columns with an entry for each path.

    The host may not know the tokens of steps in flight when it drafts. The runner passes over the path's tokens for
    positions that the sequence has, right or wrong. The path's tokens behind the last sampled token are drafts: the
    step forwards them behind it, up to `most`, to the end of the path or of the block table, or to a token that is no
    id. Where the path ends before that, the step forwards the last sampled token alone.

    The runner samples at each forwarded position, with the noise of that position, and penalties, masks, grammar and
    bias as if the tokens before it had been sampled. It yields the samples up to and including the first that differs
    from the draft in its place.

    Attributes:
        keys: sequences that the step decodes, each once.
        starts: position of the path's first token: the length of the sequence that the host knew.
        counts: tokens of the path, 1 to `path_tokens`.
        most: how many drafts the step may forward of it, 1 to `RunnerLimits.speculation`.
        tokens: int32 little-endian, path after path.
    """

    keys: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    most: tuple[int, ...]
    tokens: bytes


def path_tokens(speculation: int, depth: int) -> int:
    """The most tokens of a path: the runs of the steps in flight before it, and its drafts."""
    return depth * (speculation + 1) - 1


class TakeSnapshot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copy a sequence's recurrent state to a place of snapshots, within a step.

    Attributes:
        key: the sequence.
        position: how many leading tokens the state is behind; the last of them is one of the sequence's tokens in this
            step. Where a step may yield several tokens of a decoding sequence, any position: the step takes the
            snapshot if its tokens that stand reach it, and else leaves the place as it is. Then an earlier step took
            it, or a later step names the same place.
        place: of the snapshot, on the device.
    """

    key: int
    position: int
    place: int


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag="run_step"):
    """One step, as a delta against the runner's state. Steps are performed in order.

    The runner keeps a *decode set* in the order of joining. A step applies, in this order: `leaves`
    (forget the sequence), `starts`, `appends`; then it forwards one token (the last sampled one, which
    never leaves the device) of every member of the decode set but `skips`, and the `chunks`; samples in
    that order, chunks only where `last`; lastly the sequences of `last` chunks join the decode set.

    A runner with `Capacity.max_run_tokens` above 1 may forward further tokens of its own choice behind the first one of
    a decoding sequence, as far as its block table after this step has room; if it has no room for the first one either,
    the runner forwards and yields nothing of that sequence. It yields the accepted tokens, as a run; they are the
    tokens that one token a step would give. The positions that were forwarded with tokens of the run have KV and rows.
    Later positions have content without meaning; the next step, in flight already or not, begins there and writes them
    again.

    Attributes:
        step_id: counts steps.
        leaves: keys of sequences that left.
        starts: sequences that enter the runner.
        appends: blocks for decoding sequences.
        skips: keys of decoding sequences that this step leaves out.
        chunks: prefill of this step.
        drafts: paths to verify, where `RunnerLimits.speculation` allows for it; None: there are none.
        own_drafts: tokens that the runner's own drafter (`Capacity.drafter`) drafts behind each sampled sequence, for
            the next step to verify; None: as many as `RunnerLimits.speculation`.
        snapshots: recurrent states to copy; of one sequence in the order of their positions.
    """

    step_id: int
    leaves: tuple[int, ...] = ()
    starts: tuple[SeqStart, ...] = ()
    appends: tuple[BlockAppend, ...] = ()
    skips: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    drafts: Drafts | None = None
    own_drafts: int | None = None
    snapshots: tuple[TakeSnapshot, ...] = ()


class SwapOut(msgspec.Struct, frozen=True, array_like=True, tag="swap_out"):
    """Copy the KV of sealed device blocks to host blocks, or snapshots from their places on the device to those on the
    host; rows stay in their slots. Ends in one `SwapDone`.

    Attributes:
        copy_id: names the copy.
        device, host: block ids; `device[i]` is copied to `host[i]`, and stays as it is.
        snapshots, snapshots_host: places, likewise. A copy has blocks or snapshots.
    """

    copy_id: int
    device: tuple[int, ...]
    host: tuple[int, ...]
    snapshots: tuple[int, ...] = ()
    snapshots_host: tuple[int, ...] = ()


class SwapIn(msgspec.Struct, frozen=True, array_like=True, tag="swap_in"):
    """Copy the KV of host blocks to fresh device blocks, or snapshots to places on the device. Ends in one `SwapDone`.

    Attributes:
        copy_id: names the copy.
        host, device: block ids; `host[i]` is copied to `device[i]`.
        slots, generations: the slots that the blocks keep; both empty when capture is off.
        snapshots_host, snapshots: places, likewise. A copy has blocks or snapshots.
    """

    copy_id: int
    host: tuple[int, ...]
    device: tuple[int, ...]
    slots: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    snapshots_host: tuple[int, ...] = ()
    snapshots: tuple[int, ...] = ()


class EmitTokens(msgspec.Struct, frozen=True, array_like=True, tag="emit"):
    """Hand sampled tokens of one step to their requests: three columns of equal length.

    Attributes:
        step_id: the step.
        keys, tokens: sequence and token; a sequence stands once for each token of its run, in order.
        rows: the token's row in the step's output (for log-probs).
    """

    step_id: int
    keys: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: tuple[int, ...]


class RowSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Aux rows of one sequence. They follow the rows that the sequence has; the request's rows check that.

    Attributes:
        key: the sequence.
        slots: slots of the blocks that hold the rows, in the order of the blocks.
        generations: for each slot, the use of it that the rows must have been written for.
        offset: of the first row in the first slot.
        count: how many rows; they end in the last slot.
        start: position of the first row.
    """

    key: int
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    offset: int
    count: int
    start: int

    def by_slot(self, block_tokens: int) -> Iterator[RowSpan]:
        """The same rows, a span for each slot, in order."""
        first, last = self.offset, self.offset + self.count
        for number, (slot, generation) in enumerate(zip(self.slots, self.generations, strict=True)):
            low = max(first, number * block_tokens)
            high = min(last, (number + 1) * block_tokens)
            yield RowSpan(
                key=self.key,
                slots=(slot,),
                generations=(generation,),
                offset=low - number * block_tokens,
                count=high - low,
                start=self.start + low - first,
            )


class CopyRows(msgspec.Struct, frozen=True, array_like=True, tag="copy_rows"):
    """Copy aux rows out of their slots into the results of their requests, now.

    Attributes:
        spans: the rows.
    """

    spans: tuple[RowSpan, ...]


class FinishRequest(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """End one sequence. No other action does, and it is given once for each.

    Attributes:
        key: the sequence.
        reason: stop, length, abort, deadline; "failed" from `Scheduler.salvage` alone. On a prefill side also
            "handed_over" (the decode instance goes on with the sample), "no_lease" (no decode instance granted a lease)
            or "never_lease" (none ever will); on a decode side "lease_lost" (the lease ended before the hand-over).
        token_ids: the returned output tokens.
        num_rows: contiguous aux rows from the request's `start` that belong to them.
        cached_tokens: tokens that were not computed at first admission, found on the device, on the host, in the store.
        spans: (first output token, weight version, weights id) for each change of one of the two, in order.
        matched_stop: the stop id that ended it, else -1.
        note: why, with "no_lease", "never_lease" and "lease_lost".
        drafts: steps that decoded it, its drafts and those accepted (`fdasync.result.DraftCounts`); None: no drafter.
    """

    key: int
    reason: FinishReason
    token_ids: tuple[int, ...]
    num_rows: int
    cached_tokens: tuple[int, int, int]
    spans: tuple[tuple[int, str, str], ...]
    matched_stop: int = -1
    note: str = ""
    drafts: tuple[int, int, int] | None = None


class LookUp(msgspec.Struct, frozen=True, array_like=True, tag="look_up"):
    """Look up how many leading blocks of these identities the store has. Ends in one `LookedUp`, by the deadline.

    Attributes:
        lookup_id: names the lookup.
        namespace, keys: identities of the blocks.
        deadline: engine time.
    """

    lookup_id: int
    namespace: bytes
    keys: tuple[bytes, ...]
    deadline: float


class FetchBlocks(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Read these blocks from the store: KV to host blocks, rows to slots. Ends in one `FetchEnded`, by the deadline.

    Attributes:
        fetch_id: names the fetch.
        namespace, keys: identities of the blocks.
        host: host block ids.
        slots, generations: of the rows; both empty when capture is off.
        deadline: engine time.
        snapshots_host: places on the host for the snapshots that the blocks carry, -1 for a block that carries none;
            empty if none does.
    """

    fetch_id: int
    namespace: bytes
    keys: tuple[bytes, ...]
    host: tuple[int, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    deadline: float
    snapshots_host: tuple[int, ...] = ()


class StoreBlocks(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """Write these host blocks and their rows to the store. Ends in one `StoreEnded`.

    Attributes:
        put_id: names the write.
        namespace, keys: identities of the blocks.
        host: host block ids.
        slots, generations: of their rows, and the use of each slot that they must have been written for; both empty if
            there are no rows.
        snapshots_host: places of the snapshots that the objects get, as in `FetchBlocks`.
    """

    put_id: int
    namespace: bytes
    keys: tuple[bytes, ...]
    host: tuple[int, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    snapshots_host: tuple[int, ...] = ()


class HashAgain(msgspec.Struct, frozen=True, array_like=True, tag="hash_again"):
    """Compute the identities of a sequence's full blocks under the present namespace. Ends in one `Hashed`.

    Attributes:
        key: the sequence.
        tokens: its tokens, int32 little-endian.
        salt: its caller's salt.
    """

    key: int
    tokens: bytes
    salt: str


class AskLease(msgspec.Struct, frozen=True, array_like=True, tag="ask_lease"):
    """Ask a decode instance for a lease, room for a group of samples. Ends in one `LeaseAnswered`.

    Attributes:
        group: the samples.
        attempt: never repeats within a group.
        peer: address of the instance.
        namespace, keys: identities of the prompt's full blocks.
        silent_by: engine time by which the instance must have sent any answer.
        answer_by: engine time by which it must have granted or denied the lease; without a grant the lease ends then.
        over_by: engine time at which even a granted lease ends.
        ttl_s: the lease ends when it was not renewed for so long.
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
    """Tell a decode instance that a lease, asked for or granted, is not wanted any more. Offers under it end.

    Attributes:
        group, attempt, peer: as in `AskLease`.
        ended: how the request ended here, when a part of it may have been handed over: its samples on the other side
            end the same way. "": it did not end, and the other side's samples are lost.
    """

    group: int
    attempt: int
    peer: str
    ended: PartEnd = ""


class SendBlocks(msgspec.Struct, frozen=True, array_like=True, tag="send_blocks"):
    """Let a decode instance copy these host blocks and their rows. Ends in one `BlocksSent`.

    Attributes:
        offer: names the offer.
        group, attempt, peer: the lease, as in `AskLease`.
        indices: places of the blocks in the prompt.
        host: host block ids.
        slots, generations: as in `StoreBlocks`.
        device: device block ids, where the instance reads this one's device; `host` is empty then.
    """

    offer: int
    group: int
    attempt: int
    peer: str
    indices: tuple[int, ...]
    host: tuple[int, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    device: tuple[int, ...] = ()


class HandOver(msgspec.Struct, frozen=True, array_like=True, tag="hand_over"):
    """Give a decode instance a sample's first token and its open block. Ends in one `HandedOver`.

    Attributes:
        offer: names the offer.
        group, attempt, peer: the lease, as in `AskLease`.
        key: the sample.
        index: number of the sample in its group.
        token: its first token.
        tail: index of the open block in the prompt; -1: the prompt fills its blocks.
        tail_rows: how many of its tokens count.
        host, slot, generation: where the open block is, and which use of its slot; -1: there is none.
        cached: prompt tokens that were not computed, by tier.
        device: the open block's device block id, where the instance reads this one's device; `host` is -1 then.
        snapshot_host: the host's place of the recurrent state behind the prompt; -1: the model has none.
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
    device: int = -1
    snapshot_host: int = -1


class AnswerLease(msgspec.Struct, frozen=True, array_like=True, tag="answer_lease"):
    """Answer the prefill instance that asked for a lease.

    Attributes:
        group: the samples, under numbers of this instance.
        verdict: "queued" is an interim answer.
        prefix_blocks: with "granted": leading blocks that need not be sent.
        retry_after_s: with "denied": asking again earlier makes no sense; negative: asking again never does.
        reason: with "denied": why.
    """

    group: int
    verdict: LeaseVerdict
    prefix_blocks: int = 0
    retry_after_s: float = 0.0
    reason: str = ""


class DropLease(msgspec.Struct, frozen=True, array_like=True, tag="drop_lease"):
    """Tell a prefill instance that a lease granted to it is over.

    Attributes:
        group: the samples, under numbers of this instance.
        reason: in words.
        ended: all of the samples have ended here.
    """

    group: int
    reason: str
    ended: bool = False


class ReceiveBlocks(msgspec.Struct, frozen=True, array_like=True, tag="receive_blocks"):
    """Copy blocks that a prefill instance offers: KV to host blocks, or from device to device; rows to slots. Ends in
    one `BlocksReceived`.

    Attributes:
        receive_id: names the copy.
        group: the samples, under numbers of this instance.
        offers: the offer of each block.
        indices: the block's place in the prompt.
        host: host block ids.
        slots, generations: of the rows; both empty when capture is off.
        rows: how many tokens of each block count.
        deadline: engine time.
        device: device block ids, where the blocks are offered on the other instance's device; `host` is empty then.
        snapshots_host: places on the host for recurrent states; a state's index is one above an open block's. A copy
            has blocks or states; a copy of states has no `host`, `slots` and `device`.
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
    device: tuple[int, ...] = ()
    snapshots_host: tuple[int, ...] = ()


class ConfirmHandOver(msgspec.Struct, frozen=True, array_like=True, tag="confirm"):
    """Tell the prefill instance that all of a sample has arrived here.

    Attributes:
        group: the samples, under numbers of this instance.
        key: the sample.
        emit: hand its first token to its request.
    """

    group: int
    key: int
    emit: bool


class TellBlocks(msgspec.Struct, frozen=True, array_like=True, tag="tell_blocks"):
    """Tell routers how the identities that can be matched here have changed.

    Attributes:
        added: identities that can be matched from now on.
        removed: identities that are lost.
    """

    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class WakeAt(msgspec.Struct, frozen=True, array_like=True, tag="wake_at"):
    """Publish `TimerFired` at `time`, engine time; replaces any earlier WakeAt."""

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

#: actions that concern other instances
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
