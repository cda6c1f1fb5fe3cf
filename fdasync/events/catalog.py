"""Every event in the system, on one page, in the past tense.

Frozen, tagged structs that carry all the scheduler reads (token ids, lengths, block keys) and no
tensors, rows or text, so that a ring can keep them and a trace can replay them. `at` (engine seconds)
and `seq` are stamped by `EventBus.publish` and by nobody else; tests that call the scheduler directly
give `at` themselves.
"""

from __future__ import annotations

import msgspec

from fdasync.request import SamplerSpec


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
        min_tokens: fewer are never ended by a stop id.
        stop_ids: ids that end it, EOS included.
        priority: higher is served first and preempted last.
        deadline: engine time at which it ends with reason "deadline".
        emits: its tokens are wanted as they come (a stream, stop strings, log-probs).
        checks_stops: it has stop strings; `output.py` answers every emit.
        start: first position whose aux rows are wanted; -1: none are.
        sampler: for the runner.
        namespace: what it was hashed under; one that is not in use any more sends it back to be hashed again.
        root: identity of an empty prefix under that namespace and this salt.
        salt: the caller's, which sets prefixes apart.
        decoders: addresses of instances to hand it to after its prefill, in order of preference; empty: none.
        samples: how many the group has.
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


class AbortRequested(Event, frozen=True, kw_only=True):
    """The caller left, or called abort. Unknown and ended keys are counted, never an error.

    Attributes:
        begun_only: those that never ran are left as they are.
    """

    keys: tuple[int, ...]
    begun_only: bool = False


class StepDone(Event, frozen=True, kw_only=True):
    """A step completed: its KV, its aux rows and its tokens are there.

    Attributes:
        step_id: as in `RunStep`.
        tokens: one per sampled sequence, in the order `RunStep` defines.
    """

    step_id: int
    tokens: tuple[int, ...]


class StepFailed(Event, frozen=True, kw_only=True):
    """A step ended without a result. Fails the engine; kept for the trace."""

    step_id: int
    problem: str


class SwapDone(Event, frozen=True, kw_only=True):
    """A copy of blocks between device and host ended.

    Attributes:
        seconds: how long it took.
        kv_nbytes, aux_nbytes: KV and rows that were moved, counted where they are copied.
    """

    copy_id: int
    seconds: float
    kv_nbytes: int
    aux_nbytes: int


class LookedUp(Event, frozen=True, kw_only=True):
    """The store was asked for a run of blocks.

    Attributes:
        count: leading ones that it has; 0 also where it did not answer.
        seconds: how long it was waited for.
        answered: False: it failed, or the deadline passed first.
    """

    lookup_id: int
    count: int
    seconds: float
    answered: bool


class LookupReturned(Event, frozen=True, kw_only=True):
    """A lookup of so many blocks was answered after all, so long after it was sent; nobody waits for it any more."""

    num_keys: int
    seconds: float


class FetchEnded(Event, frozen=True, kw_only=True):
    """Reading blocks from the store was waited for long enough, or ended.

    Attributes:
        arrived: for each block: it is there, checked, its rows too.
        late: blocks that did not arrive are still being read; `LeaseReturned` follows.
        nbytes: of what arrived.
    """

    fetch_id: int
    arrived: tuple[bool, ...]
    late: bool
    seconds: float
    nbytes: int


class StoreEnded(Event, frozen=True, kw_only=True):
    """Writing blocks to the store was waited for long enough, or ended.

    Attributes:
        stored: for each block: the store has it.
        late: the others are still being written; `LeaseReturned` follows.
    """

    put_id: int
    stored: tuple[bool, ...]
    late: bool
    seconds: float
    nbytes: int


class LeaseReturned(Event, frozen=True, kw_only=True):
    """The late rest of a fetch or a write ended: nothing touches its blocks any more.

    Attributes:
        lease_id: the fetch's or the put's number.
        arrived: for each of its blocks: it arrived, or was stored, after all (or had before).
    """

    lease_id: int
    arrived: tuple[bool, ...]


class Hashed(Event, frozen=True, kw_only=True):
    """A sequence has identities under a namespace again."""

    key: int
    namespace: bytes
    root: bytes
    block_keys: tuple[bytes, ...]


class LeaseAnswered(Event, frozen=True, kw_only=True):
    """An instance granted or denied a lease, or was silent for too long, or is not there.

    Attributes:
        prefix_blocks: of a grant: leading blocks that need not be sent.
        retry_after_s: of a denial: asking again before makes no sense; negative: asking again never does.
        reason: of a denial, in words.
        silent: nobody denied it: there was no answer.
    """

    group: int
    attempt: int
    granted: bool
    prefix_blocks: int = 0
    retry_after_s: float = 0.0
    reason: str = ""
    silent: bool = False


class LeaseLost(Event, frozen=True, kw_only=True):
    """A lease that was granted to us is over: its instance says so, or went away."""

    group: int
    attempt: int
    reason: str


class BlocksSent(Event, frozen=True, kw_only=True):
    """Blocks that were offered were taken, or will not be: nobody reads them any more."""

    offer: int
    taken: bool


class HandedOver(Event, frozen=True, kw_only=True):
    """A sample's hand-over ended: the other instance goes on with it, or will not."""

    offer: int
    taken: bool


class LeaseAsked(Event, frozen=True, kw_only=True):
    """Another instance asks for room for a group of samples.

    Attributes:
        requests: its samples, under numbers of ours.
        peer: who asks.
        ttl_s: not renewed for so long, the lease is over.
        over_by: engine time at which it is over if it was not handed over.
    """

    requests: tuple[RequestPrepared, ...]
    peer: str
    ttl_s: float
    over_by: float


class LeasesRenewed(Event, frozen=True, kw_only=True):
    """These leases of ours are still wanted."""

    groups: tuple[int, ...]


class LeaseGivenUp(Event, frozen=True, kw_only=True):
    """These leases of ours are not wanted any more, or who wanted them is gone."""

    groups: tuple[int, ...]
    reason: str


class BlocksOffered(Event, frozen=True, kw_only=True):
    """Blocks of a lease's prompt can be copied.

    Attributes:
        indices: which of the prompt's blocks.
    """

    group: int
    offer: int
    indices: tuple[int, ...]


class SampleOffered(Event, frozen=True, kw_only=True):
    """A sample's first token came, and where its open block can be copied.

    Attributes:
        tail_rows: how many tokens of the open block count; 0: there is none.
    """

    group: int
    key: int
    offer: int
    token: int
    tail_rows: int
    cached: tuple[int, int, int]


class BlocksReceived(Event, frozen=True, kw_only=True):
    """Copying blocks from another instance ended; nothing touches their places any more.

    Attributes:
        arrived: for each block: it is there, checked, its rows too.
        problem: of the first that is not.
    """

    receive_id: int
    arrived: tuple[bool, ...]
    seconds: float
    nbytes: int
    problem: str = ""


class PauseRequested(Event, frozen=True, kw_only=True):
    """Plan no more steps."""


class ResumeRequested(Event, frozen=True, kw_only=True):
    """Plan steps again."""


class WeightsChanged(Event, frozen=True, kw_only=True):
    """The runner has new weights; no step was in flight. Nothing computed before may be matched any more.

    Attributes:
        version: the caller's label.
        namespace: identities live under this one from now on.
    """

    version: int
    namespace: bytes


class StopMatched(Event, frozen=True, kw_only=True):
    """A stop string was found: the request keeps this many output tokens."""

    key: int
    keep_tokens: int


class StopChecked(Event, frozen=True, kw_only=True):
    """The first `num_tokens` output tokens hold no stop string."""

    key: int
    num_tokens: int


class TimerFired(Event, frozen=True, kw_only=True):
    """The time of the last `WakeAt` has come."""


class Told(Event, frozen=True, kw_only=True):
    """Base of what is told to taps only: the scheduler passes it over."""


class StoreCalled(Told, frozen=True, kw_only=True):
    """One call to a store ended.

    Attributes:
        verb: exists_prefix, get_into, put, delete.
        items, nbytes: of the call.
        done, missed, damaged, failed: items by outcome.
        error: class of the error that ended the call as a whole, or "".
    """

    store: str
    verb: str
    items: int
    nbytes: int
    seconds: float
    done: int = 0
    missed: int = 0
    damaged: int = 0
    failed: int = 0
    error: str = ""


class BlockDamaged(Told, frozen=True, kw_only=True):
    """What came back from a store was not what was asked for, was not used, and was deleted there."""

    store: str
    key: str
    problem: str


class WritesRefused(Told, frozen=True, kw_only=True):
    """Blocks that the store did not take since this was told last, and why the latest ones were not.

    The same kind of reason (no room, or a failure) is told every 10 s at most; `Engine.stats` counts all.
    """

    store: str
    items: int
    problem: str


class BreakerChanged(Told, frozen=True, kw_only=True):
    """A store is left alone from now on (open), tried again (half_open), or used again (closed)."""

    store: str
    state: str
    problem: str


class RequestEnded(Told, frozen=True, kw_only=True):
    """A request has its result, whole or so far.

    Attributes:
        request_id: the caller's name for it, or the drawn one.
        group: key of its first sample; -1 where it ended before it was prepared.
        reasons: finish reason of each sample, by index.
        prompt_tokens, output_tokens: of its prompt, and of all its samples.
        cached: prompt tokens not computed, summed over its samples: found on the device, on the host, in the store.
        ttft_s: from the call to the first token; None where none came, or tokens were only counted at the end.
        total_s: from the call to the end.
        error: class of what ended it, where that was an error; else "".
    """

    request_id: str
    group: int
    reasons: tuple[str, ...]
    prompt_tokens: int
    output_tokens: int
    cached: tuple[int, int, int]
    ttft_s: float | None
    total_s: float
    error: str = ""


class LinkChanged(Told, frozen=True, kw_only=True):
    """A link to another instance or a router came about, or was lost.

    Attributes:
        peer: its name; role: mixed, prefill, decode or router; "listener" where it is an address of ours, which is
            closed for a moment when few file descriptors are left (`zmq_listener.py`).
        problem: why it was lost.
    """

    peer: str
    role: str
    up: bool
    problem: str = ""


class LoopHeldUp(Told, frozen=True, kw_only=True):
    """Something kept the engine's loop from turning: a timer rang this much too late."""

    seconds: float


class EngineDied(Told, frozen=True, kw_only=True):
    """The engine failed: the last event of all."""

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
    | LeaseReturned
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
    | WeightsChanged
    | StopMatched
    | StopChecked
    | TimerFired
    | StoreCalled
    | BlockDamaged
    | WritesRefused
    | BreakerChanged
    | RequestEnded
    | LinkChanged
    | LoopHeldUp
    | EngineDied
)
