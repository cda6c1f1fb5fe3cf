"""Every event in the system, on one page, in the past tense.

Frozen, tagged structs that carry all that the scheduler reads (token ids, lengths, block keys) and no tensors, rows or
text, so that a ring can keep them and a trace can replay them. Only `EventBus.publish` stamps `at` (engine seconds) and
`seq`; tests that call the scheduler directly give `at` themselves. The module knows no bus and no scheduler. The
engine's services make events; the scheduler and taps read them.

A `key` is the internal number of a sample, a `group` the key of its request's first sample. Numbers like `step_id`,
`copy_id`, `fetch_id`, `offer` and `receive_id` are those of the action that the event ends (`events/actions.py`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fdasync.request import PauseMode, SamplerSpec
from fdasync.result import FinishReason

#: a verb of the contract of stores
StoreVerb = Literal["exists_prefix", "get_into", "put", "delete", "usage"]
LinkRole = Literal["mixed", "prefill", "decode", "router", "listener", ""]
# what an engine did of a request
RequestPart = Literal["whole", "prefill", "decode"]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all events. Defaults are left out of traces: JSON has no word for a deadline that is infinite.

    Attributes:
        at: engine time in seconds, stamped at publish.
        seq: number of the event within its engine, stamped at publish.
    """

    at: float = 0.0
    seq: int = 0


class RequestPrepared(Event, frozen=True, kw_only=True):
    """One sample of a request is valid, tokenised and hashed, and waits to be scheduled.

    Attributes:
        key: internal number of the sample; never repeats within an engine.
        group: key of the first sample of the same request.
        tokens: prompt token ids.
        block_keys: chained identity of each full prompt block (empty: prefix cache off).
        max_tokens: most new tokens.
        min_tokens: no stop id ends it before this many new tokens.
        stop_ids: ids that end it, EOS included.
        priority: higher is served first and preempted last.
        deadline: engine time at which it ends with reason "deadline".
        emits: its tokens are wanted as they come (a stream, stop strings, log-probs).
        checks_stops: it has stop strings; `engine/output.py` answers every emit.
        start: first position whose aux rows are wanted; -1: none are.
        sampler: how to sample; for the runner.
        namespace: under which it was hashed; if that is not in use any more, it is hashed again.
        root: identity of an empty prefix under that namespace and this salt.
        salt: the caller's, which sets prefixes apart.
        decoders: addresses of decode instances to hand it to after its prefill, in order of preference; empty: none.
        samples: how many samples the group has.
        arrived_at: engine time of the caller's call, waits at a router or another instance included; None: the time at
            which this was published.
    """

    key: int
    group: int
    tokens: tuple[int, ...]
    block_keys: tuple[bytes, ...]
    max_tokens: int
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    deadline: float = float("inf")
    emits: bool = False
    checks_stops: bool = False
    start: int = -1
    sampler: SamplerSpec
    namespace: bytes = b""
    root: bytes = b""
    salt: str = ""
    decoders: tuple[str, ...] = ()
    samples: int = 1
    arrived_at: float | None = None


class AbortRequested(Event, frozen=True, kw_only=True):
    """The caller left, or called abort. Unknown and ended keys are counted, never an error.

    Attributes:
        keys: the samples to end.
        begun_only: requests none of whose samples ever ran are left as they are.
        reason: "deadline" where another instance had a part of the request, and found the deadline passed.
    """

    keys: tuple[int, ...]
    reason: Literal["abort", "deadline"] = "abort"
    begun_only: bool = False


class StepDone(Event, frozen=True, kw_only=True):
    """A step completed: its KV, its aux rows and its tokens can be read.

    Attributes:
        step_id: as in `RunStep`.
        tokens: the sampled tokens, sequence after sequence in the order that `RunStep` defines.
        counts: how many of the tokens are each sequence's run, which may be none; None: one each.
        own_drafts: how many drafts of the runner's own drafter were forwarded of each sequence; None: it has none.
    """

    step_id: int
    tokens: tuple[int, ...]
    counts: tuple[int, ...] | None = None
    own_drafts: tuple[int, ...] | None = None


class StepFailed(Event, frozen=True, kw_only=True):
    """A step ended without a result. The engine fails; the event is kept for the trace.

    Attributes:
        step_id: as in `RunStep`.
        problem: the runner's error.
    """

    step_id: int
    problem: str


class SwapDone(Event, frozen=True, kw_only=True):
    """A copy of blocks between device and host ended.

    Attributes:
        copy_id: as in `SwapOut` or `SwapIn`.
        seconds: how long it took.
        kv_nbytes, aux_nbytes: bytes of KV and rows that were moved, counted where they are copied.
    """

    copy_id: int
    seconds: float
    kv_nbytes: int
    aux_nbytes: int


class LookedUp(Event, frozen=True, kw_only=True):
    """A lookup of a run of blocks in the store was answered, or its deadline passed.

    Attributes:
        lookup_id: as in `LookUp`.
        count: how many leading blocks the store has; 0 without an answer.
        seconds: how long the engine waited.
        answered: False: the store failed, or the deadline passed first.
    """

    lookup_id: int
    count: int
    seconds: float
    answered: bool


class LookupReturned(Event, frozen=True, kw_only=True):
    """A lookup was answered after its deadline; no request waits for it any more.

    Attributes:
        num_keys: how many blocks were looked up.
        seconds: from the call to the answer.
    """

    num_keys: int
    seconds: float


class FetchEnded(Event, frozen=True, kw_only=True):
    """A read of blocks from the store ended, or its deadline passed.

    Attributes:
        fetch_id: as in `FetchBlocks`.
        arrived: for each block: it was read and checked, with its rows.
        late: the other blocks are still being read; `LateTransferEnded` follows.
        seconds: how long the engine waited.
        nbytes: bytes of the blocks that arrived.
    """

    fetch_id: int
    arrived: tuple[bool, ...]
    late: bool
    seconds: float
    nbytes: int


class StoreEnded(Event, frozen=True, kw_only=True):
    """A write of blocks to the store ended, or its deadline passed.

    Attributes:
        put_id: as in `StoreBlocks`.
        stored: for each block: the store has it.
        late: the other blocks are still being written; `LateTransferEnded` follows.
        seconds: how long the engine waited.
        nbytes: bytes of the blocks that were written.
    """

    put_id: int
    stored: tuple[bool, ...]
    late: bool
    seconds: float
    nbytes: int


class LateTransferEnded(Event, frozen=True, kw_only=True):
    """The late rest of a fetch or a write ended: nothing touches its blocks any more.

    Attributes:
        transfer_id: the `fetch_id` or the `put_id`.
        arrived: for each of its blocks: it arrived or was stored, now or before.
    """

    transfer_id: int
    arrived: tuple[bool, ...]


class Hashed(Event, frozen=True, kw_only=True):
    """A sequence has identities under the present namespace again.

    Attributes:
        key: the sequence.
        namespace: the namespace.
        root: identity of an empty prefix under it.
        block_keys: identities of the sequence's full blocks.
    """

    key: int
    namespace: bytes
    root: bytes
    block_keys: tuple[bytes, ...]


class LeaseAnswered(Event, frozen=True, kw_only=True):
    """A decode instance granted or denied a lease, did not answer in time, or cannot be reached.

    Attributes:
        group, attempt: as in `AskLease`.
        granted: the lease was granted.
        prefix_blocks: of a grant: leading blocks that need not be sent.
        retry_after_s: of a denial: asking again earlier makes no sense; negative: asking again never does.
        reason: of a denial, in words.
        silent: there was no answer.
        reads_device: of a grant: the instance copies blocks from this one's device.
    """

    group: int
    attempt: int
    granted: bool
    prefix_blocks: int = 0
    retry_after_s: float = 0.0
    reason: str = ""
    silent: bool = False
    reads_device: bool = False


class LeaseLost(Event, frozen=True, kw_only=True):
    """A lease that a decode instance had granted is over: the instance says so, or went away.

    Attributes:
        group, attempt: as in `AskLease`.
        reason: in words.
    """

    group: int
    attempt: int
    reason: str


class BlocksSent(Event, frozen=True, kw_only=True):
    """The decode instance copied the blocks that were offered to it, or never will: it reads them no more.

    Attributes:
        offer: as in `SendBlocks`.
        taken: the blocks were copied.
    """

    offer: int
    taken: bool


class HandedOver(Event, frozen=True, kw_only=True):
    """A sample's hand-over ended.

    Attributes:
        offer: as in `HandOver`.
        taken: the decode instance goes on with the sample.
    """

    offer: int
    taken: bool


class LeaseAsked(Event, frozen=True, kw_only=True):
    """A prefill instance asks for a lease for a group of samples.

    Attributes:
        requests: the samples, under numbers of this instance.
        peer: address of the prefill instance.
        ttl_s: the lease ends when it was not renewed for so long.
        over_by: engine time at which it ends unless the samples were handed over.
    """

    requests: tuple[RequestPrepared, ...]
    peer: str
    ttl_s: float
    over_by: float


class LeasesRenewed(Event, frozen=True, kw_only=True):
    """Prefill instances still want these leases.

    Attributes:
        groups: the leases, each by its group here.
    """

    groups: tuple[int, ...]


class LeaseGivenUp(Event, frozen=True, kw_only=True):
    """Prefill instances do not want these leases any more, or are gone.

    Attributes:
        groups: the leases, each by its group here.
        reason: in words.
    """

    groups: tuple[int, ...]
    reason: str


class BlocksOffered(Event, frozen=True, kw_only=True):
    """Blocks of a lease's prompt can be copied.

    Attributes:
        group: the lease, by its group here.
        offer: names the offer.
        indices: places of the blocks in the prompt.
        on_device: they lie on the prefill instance's device, and not on its host.
    """

    group: int
    offer: int
    indices: tuple[int, ...]
    on_device: bool = False


class SampleOffered(Event, frozen=True, kw_only=True):
    """A sample's first token came, and its open block can be copied.

    Attributes:
        group: the lease, by its group here.
        key: the sample.
        offer: names the offer.
        token: the first token.
        tail_rows: how many tokens of the open block count; 0: there is no open block.
        cached: prompt tokens that the prefill instance did not compute, by tier.
        on_device: the open block lies on the prefill instance's device.
        with_state: the recurrent state behind the prompt can be copied, too.
    """

    group: int
    key: int
    offer: int
    token: int
    tail_rows: int
    cached: tuple[int, int, int]
    on_device: bool = False
    with_state: bool = False


class BlocksReceived(Event, frozen=True, kw_only=True):
    """A copy of blocks from a prefill instance ended; nothing touches their places any more.

    Attributes:
        receive_id: as in `ReceiveBlocks`.
        arrived: for each block: it was copied and checked, with its rows.
        seconds: how long the copy took.
        nbytes: bytes of the blocks that arrived.
        problem: of the first block that did not arrive.
    """

    receive_id: int
    arrived: tuple[bool, ...]
    seconds: float
    nbytes: int
    problem: str = ""


class PauseRequested(Event, frozen=True, kw_only=True):
    """The scheduler is to plan no more steps: at once, or ("wait") when the requests that have begun have ended.

    Attributes:
        mode: what happens to the requests that are inside; see `Generator.pause`.
    """

    mode: PauseMode = "in_place"


class ResumeRequested(Event, frozen=True, kw_only=True):
    """The scheduler is to plan steps again, whatever the mode of the pause was, even if it has not begun yet."""


class SleepRequested(Event, frozen=True, kw_only=True):
    """The device's memory is about to be released. Nothing is planned until `ResumeRequested`; what runs gives its
    blocks up, copies of them to the host go on, and then no block is on the device any more."""


class CacheResetRequested(Event, frozen=True, kw_only=True):
    """Device and host are to forget every cached block. Running requests keep the blocks they use, as private ones."""


class WeightsChanged(Event, frozen=True, kw_only=True):
    """The runner has new weights; no step was in flight. No block computed before may be matched any more.

    Attributes:
        version: the caller's label.
        namespace: the namespace of identities from now on.
        weights_id: of the new weights.
    """

    version: str
    namespace: bytes
    weights_id: str


class WeightsRelabelled(Event, frozen=True, kw_only=True):
    """The weights in use have another label from now on. They are the same: identities do not change.

    Attributes:
        version: the caller's label.
    """

    version: str


class StopMatched(Event, frozen=True, kw_only=True):
    """A stop string was found in the text of a sample.

    Attributes:
        key: the sample.
        keep_tokens: how many output tokens it keeps.
    """

    key: int
    keep_tokens: int


class StopChecked(Event, frozen=True, kw_only=True):
    """The text of a sample's first output tokens holds no stop string.

    Attributes:
        key: the sample.
        num_tokens: how many tokens were checked.
    """

    key: int
    num_tokens: int


class TimerFired(Event, frozen=True, kw_only=True):
    """The time of the last `WakeAt` has come."""


class Notice(Event, frozen=True, kw_only=True):
    """Base of events for taps only: the scheduler does not read them."""


class StoreCalled(Notice, frozen=True, kw_only=True):
    """One call to a store ended.

    Attributes:
        store: its name.
        verb: the store's method that was called.
        items, nbytes: of the call.
        seconds: from the call to its end, or to the end of the waiting for it.
        done, missed, damaged, failed: items by outcome.
        error: class of the error that ended the call as a whole, or "".
    """

    store: str
    verb: StoreVerb
    items: int
    nbytes: int
    seconds: float
    done: int = 0
    missed: int = 0
    damaged: int = 0
    failed: int = 0
    error: str = ""


class BlockDamaged(Notice, frozen=True, kw_only=True):
    """A store returned a block that failed its checks; it was not used, and was deleted there.

    Attributes:
        store: its name.
        key: the store's key of the block.
        problem: the check that failed.
    """

    store: str
    key: str
    problem: str


class WritesRefused(Notice, frozen=True, kw_only=True):
    """The store did not take blocks. Published every 10 s at most for each kind of reason (no room, or a failure).

    Attributes:
        store: its name.
        items: blocks that it did not take since the last such event; `Engine.stats` counts all.
        problem: of the latest ones.
    """

    store: str
    items: int
    problem: str


class BreakerChanged(Notice, frozen=True, kw_only=True):
    """The state of a store's circuit breaker changed.

    Attributes:
        store: its name.
        state: "open": the store gets no calls; "half_open": a probe is under way; "closed": the store is used.
        problem: the reason, in words.
    """

    store: str
    state: Literal["closed", "open", "half_open"]
    problem: str


class RequestEnded(Notice, frozen=True, kw_only=True):
    """A request has its result, whole or partial.

    Attributes:
        request_id: the caller's name for it, or the drawn one.
        group: key of its first sample; -1: it ended before it was prepared.
        reasons: finish reason of each sample, by index.
        prompt_tokens, output_tokens: of its prompt, and of all its samples.
        cached: prompt tokens not computed, summed over its samples: found on the device, on the host, in the store.
        ttft_s: from the call to the first token, in seconds; None: no token came, or tokens were only counted at the
            end.
        total_s: from the call to the end, in seconds.
        error: class of the error that ended it; "": no error did.
        trace: the caller's span, as W3C's `traceparent`; "": it traces nothing.
        part: "prefill": another instance was to decode it; "decode": another instance prefilled it; else "whole".
    """

    request_id: str
    group: int
    reasons: tuple[FinishReason, ...]
    prompt_tokens: int
    output_tokens: int
    cached: tuple[int, int, int]
    ttft_s: float | None
    total_s: float
    error: str = ""
    trace: str = ""
    part: RequestPart = "whole"


class LinkChanged(Notice, frozen=True, kw_only=True):
    """A link to another instance or a router is up, or was lost.

    Attributes:
        peer: name of the other side; for a listener its address.
        role: the other side's; "" before its Hello. "listener": an address of this instance, which is closed for a
            moment when few file descriptors are left (`zmq_listener.py`).
        up: the link is up.
        problem: why it was lost.
        blocks: of an instance whose link is up: by which transports blocks come from it, best first, and by which not,
            and why.
    """

    peer: str
    role: LinkRole
    up: bool
    problem: str = ""
    blocks: str = ""


class ConnectionsRefused(Notice, frozen=True, kw_only=True):
    """Connections to this instance were refused; at most once a second for each reason.

    Attributes:
        address: at which this instance listens.
        reason: "key": the client's key is not allowed; "mechanism": it came without keys; "handshake": it has another
            server key, is no client, or went away; "stranger": it does not speak the protocol.
        count: connections since the last event.
    """

    address: str
    reason: str
    count: int


class LoopHeldUp(Notice, frozen=True, kw_only=True):
    """The engine's loop was blocked.

    Attributes:
        seconds: how much too late a timer fired.
    """

    seconds: float


class TapFailed(Notice, frozen=True, kw_only=True):
    """A tap of the configuration raised: it reads no more events, and the engine goes on without it.

    Attributes:
        tap: its name in the configuration.
        problem: class and words of its error.
    """

    tap: str
    problem: str


class EngineDied(Notice, frozen=True, kw_only=True):
    """The engine failed; this is its last event.

    Attributes:
        problem: class and words of the error.
    """

    problem: str


AnyEvent = (
    RequestPrepared
    | AbortRequested
    | StepDone
    | StepFailed
    | SwapDone
    | LookedUp
    | LookupReturned
    | FetchEnded
    | StoreEnded
    | LateTransferEnded
    | Hashed
    | LeaseAnswered
    | LeaseLost
    | BlocksSent
    | HandedOver
    | LeaseAsked
    | LeasesRenewed
    | LeaseGivenUp
    | BlocksOffered
    | SampleOffered
    | BlocksReceived
    | PauseRequested
    | ResumeRequested
    | SleepRequested
    | CacheResetRequested
    | WeightsChanged
    | WeightsRelabelled
    | StopMatched
    | StopChecked
    | TimerFired
    | StoreCalled
    | BlockDamaged
    | WritesRefused
    | BreakerChanged
    | RequestEnded
    | LinkChanged
    | ConnectionsRefused
    | LoopHeldUp
    | TapFailed
    | EngineDied
)
