"""Defines every message between instances and routers, and encodes and decodes them.

Messages are frozen, tagged msgspec structs, encoded as msgpack arrays, never pickle. Bounds stand in the types, so that
`decode` refuses a value out of bounds before any code works with it.

A *lease* is room that a decode instance (D) grants to one request of a prefill instance (P). P sends a `LeaseRequest`;
D replies with `LeaseAnswer`s: any number of "queued", then one "granted" or "denied". P's `Heartbeat`s renew the
lease, and a `LeaseDrop` from either side ends it. Under a lease P offers blocks (`BlocksOffer`), D copies them itself
and replies `BlocksTaken`. One `HandOff` for each sample closes the lease.

This module knows no sockets, no sessions and no order: sender, incarnation and order are the link's (`link/links.py`).
Every other module of `pd` uses it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from fdasync.cache.aux import AuxSpec
from fdasync.errors import ProtocolError
from fdasync.ipc.shared_memory import Part
from fdasync.request import (
    FIRST_VERSION,
    MAX_STOP_CHARS,
    Doing,
    SamplingParams,
)
from fdasync.result import FinishReason, PartEnd, TopLogprobs, WeightSpan
from fdasync.runner.facts import ModelFacts
from fdasync.stats import EngineStats
from fdasync.telemetry.sight.sight import Sight
from fdasync_fleet.fields import (
    WORDS_CHARS,
    Count,
    Floats,
    Key,
    Keys,
    LeaseName,
    Meta,
    Name,
    Names,
    Namespace,
    Role,
    Seconds,
    Small,
    Tokens,
    Trace,
    Version,
    Words,
)
from fdasync_fleet.verbs import Failure, Verb

PROTOCOL = 4
#: the longest message that a link takes, without its payload
MAX_MESSAGE_NBYTES = 8 << 20
#: the longest payload that a link takes
MAX_PAYLOAD_NBYTES = 4 << 20


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages."""


# -- handshakes and heartbeats --------------------------------------------------------------------


class Source(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The place where other instances read the blocks of an instance.

    Attributes:
        machine: boot id of the instance's machine; memory can be mapped on the same machine only.
        pid: process id of the instance.
        regions: (fd, bytes) of each shared region, in that process.
        token: random bytes, by which a reader checks that it opened the regions or the socket of this source.
        address: host:port of the data socket; "" without one.
    """

    machine: Words
    pid: Count
    regions: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=64)]
    token: Key
    address: Words


class Hello(Message, frozen=True, array_like=True, tag="hello"):
    """The first message of either side of a link. Tag and protocol stay the first two elements in every version, so
    that a side can refuse another version by name.

    Attributes:
        protocol: `PROTOCOL` of the sender.
        name: the sender's name, for people.
        role: the sender's role.
        address: the address at which the sender listens; "" for routers.
        sources: (transport's name, source) of each transport that the sender offers.
        namespace: namespace of the weights in use; empty for routers.
        facts: the instance's model and limits; None for routers.
        namespace_base: digest of all parts of a block's identity except the weights; empty for routers.
        text: digest of the token ids that the tokenizer makes of sample texts; empty without a tokenizer.
        weight_order: order of the label of its weights (`request.next_order`).
    """

    protocol: Small
    name: Name
    role: Role
    address: Words
    sources: Annotated[tuple[tuple[Name, Source], ...], Meta(max_length=8)] = ()
    namespace: Namespace = b""
    facts: ModelFacts | None = None
    namespace_base: Namespace = b""
    text: Namespace = b""
    weight_order: Count = 0


# Instances that differ in one of these cannot use each other's blocks, or would end the same request differently; the
# digests last: they tell a reader less.
_ALIKE = (
    "kv_layout", "kv_dtype", "block_tokens", "block_nbytes", "aux_specs", "vocab_size", "eos_ids", "routing_debug",
    "numerics", "sum_slices",
)  # fmt: skip
_ALIKE_DIGESTS = ("text", "namespace_base")


def shape_of(hello: Hello) -> tuple[tuple[str, Any], ...]:
    """Names and values of the properties besides the weights in which two instances must agree."""
    facts = [(name, getattr(hello.facts, name)) for name in _ALIKE]
    return (*facts, *[(name, getattr(hello, name)) for name in _ALIKE_DIGESTS])


def difference(one: Hello, other: Hello) -> tuple[str, str, str] | None:
    """The first property that differs, with both values as text; None: blocks can be exchanged."""
    for (name, ours), (_, theirs) in zip(shape_of(one), shape_of(other), strict=True):
        if ours != theirs:
            told = [each.hex() if isinstance(each, bytes) else f"{each!r:.200}" for each in (ours, theirs)]
            return name, told[0], told[1]
    return None


class Refused(Message, frozen=True, array_like=True, tag="refused"):
    """The reply to a Hello that does not fit: no link comes about.

    Attributes:
        field: name of the field that does not fit.
        problem: the reason, for people.
    """

    field: Name
    problem: Words


class Bye(Message, frozen=True, array_like=True, tag="bye"):
    """The sender ends the session, or does not know the session of the frame that it got.

    Attributes:
        reason: the reason, for people.
    """

    reason: Words


class Status(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How an instance is, sent with its heartbeats.

    Attributes:
        stats: the numbers of its engine; `state` is "draining" while the instance drains.
        received_nbytes: bytes of other instances' blocks that were copied here and checked.
        asked: leases that other instances granted to this prefill side.
        asked_s: seconds from lease request to grant, summed over the `asked` leases.
        asked_most_s: the longest such time.
        peer_problem: which of its requests' decode instances it does not reach, or finds replaced by another process,
            with what each side sees; "" while there is none.
    """

    stats: EngineStats
    received_nbytes: Count = 0
    asked: Count = 0
    asked_s: Seconds = 0.0
    asked_most_s: Seconds = 0.0
    peer_problem: Words = ""

    @property
    def free_blocks(self) -> int:
        """Device blocks that are free, or idle and not promised to a lease; more may be promised than are free now."""
        told = self.stats.scheduler
        return max(told.free_blocks + told.idle_blocks - told.reserved_blocks, 0)


class Heartbeat(Message, frozen=True, array_like=True, tag="beat"):
    """The sender lives, and renews leases.

    Attributes:
        leases: leases of the receiver that the sender still wants.
        status: the sender's load; None from routers.
    """

    leases: Annotated[tuple[LeaseName, ...], Meta(max_length=1 << 16)] = ()
    status: Status | None = None


#: messages that only links send; they have no number and may be lost
LINK_MESSAGES = (Hello, Refused, Bye, Heartbeat)


# -- leases, P to D and back ----------------------------------------------------------------------


class Wanted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request as a prefill instance hands it on: checked, tokenised, hashed, its seed drawn.

    Attributes:
        caller: incarnation of the router that gets the results.
        tokens: token ids of the prompt.
        block_keys: identities of the prompt's full blocks under `namespace` and `salt`.
        namespace: namespace of the sender's weights.
        salt: the tenant's salt.
        params: sampling parameters, with a seed.
        streams: whether the caller reads deltas.
        priority: the request's priority.
        deadline_s: seconds until the request's deadline.
        rows: names of the aux specs whose rows the caller wants, routing included.
        start: position of the first row that the caller wants.
        waited_s: seconds since the caller sent the request.
        trace: as in `Submit`.
    """

    caller: Key
    tokens: Tokens
    block_keys: Keys
    namespace: Key
    salt: Words
    params: SamplingParams
    streams: bool
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)]
    deadline_s: Seconds
    rows: Names
    start: Count
    waited_s: Seconds = 0.0
    trace: Trace = ""


class LeaseRequest(Message, frozen=True, array_like=True, tag="ask"):
    """P asks D for a lease; idempotent by (request, attempt).

    Attributes:
        request, attempt: name of the lease, also in the messages below.
        wanted: the request for which P wants room.
        ttl_s: the lease ends when P has not renewed it for so long.
        total_s: the lease ends in any case when P has not handed off within this time.
    """

    request: Name
    attempt: Small
    wanted: Wanted
    ttl_s: Seconds
    total_s: Seconds


class LeaseAnswer(Message, frozen=True, array_like=True, tag="answer"):
    """D's reply to a `LeaseRequest`.

    Attributes:
        verdict: "queued" is an interim reply; another will follow.
        prefix_blocks: leading blocks that D has and keeps for this lease; P need not send them.
        retry_after_s: with "denied": how long P should wait before it sends the request again; negative: never again.
        reason: with "denied": the reason, for people.
        reads_device: with "granted": D copies blocks from P's devices. P offers parts of these then.
    """

    request: Name
    attempt: Small
    verdict: Literal["granted", "denied", "queued"]
    prefix_blocks: Count = 0
    retry_after_s: Annotated[float, Meta(ge=-1, le=1e9)] = 0.0
    reason: Words = ""
    reads_device: bool = False


class LeaseDrop(Message, frozen=True, array_like=True, tag="drop"):
    """From P: P gives the lease up, even if D has not read its request yet. From D: D has no such lease (any more).

    Attributes:
        reason: the reason, for people.
        ended: from P: the request ended so there, by its caller, a pause, an update or its deadline: what D has of it
            ends likewise, and is the answer. "": not so; what was handed over in part is lost.
    """

    request: Name
    attempt: Small
    reason: Words
    ended: PartEnd = ""


class BlockRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block that the sender offers.

    Attributes:
        index: number of the block in the prompt.
        parts: parts of the sender's regions: the block's KV, then its rows, one part for each aux spec. The KV is a
            part of the sender's devices (`DEVICE_REGION`) where the receiver reads those.
        checksums: of each part: XXH3-64; for a part of devices the checksum of `ipc/peers/sums.py`.
    """

    index: Small
    parts: Annotated[tuple[Part, ...], Meta(max_length=64)]
    checksums: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=64)]


class BlocksOffer(Message, frozen=True, array_like=True, tag="offer"):
    """P's sealed blocks lie ready. P keeps them unchanged until D has taken them or the lease ends.

    Attributes:
        offer: number of the offer under this lease.
        blocks: the blocks offered.
    """

    request: Name
    attempt: Small
    offer: Count
    blocks: Annotated[tuple[BlockRef, ...], Meta(max_length=1024)]


class BlocksTaken(Message, frozen=True, array_like=True, tag="taken"):
    """D has copied and checked every block of an offer; P may use their places again."""

    request: Name
    attempt: Small
    offer: Count


class HandOff(Message, frozen=True, array_like=True, tag="hand_off"):
    """P hands over one sample: its first token and its open block. D goes on when it has all of the sample.

    Attributes:
        index: number of the sample.
        offer: number of the offer by which `tail` counts, if there is a tail.
        token: the sample's first token.
        raw, processed, top: log-probs of the token, as the caller asked for them.
        cached: prompt tokens that P did not compute, by tier: device, host, store.
        tail: the open block, with the last tokens of the prompt; None where the prompt fills its blocks.
        tail_rows: number of tokens in `tail`.
        state: the recurrent state behind the prompt, one part of the sender's host, numbered as the block behind the
            open one; None: the model has none.
    """

    request: Name
    attempt: Small
    index: Small
    offer: Count
    token: Small
    raw: float | None
    processed: float | None
    top: TopLogprobs | None
    cached: tuple[Count, Count, Count]
    tail: BlockRef | None
    tail_rows: Small
    state: BlockRef | None = None


class ScoredPrompt(Message, frozen=True, array_like=True, tag="scored"):
    """A run of log-probs of a request's prompt: from P to D before the `HandOff` of sample 0, and from the instance
    that answers to the router before the `Ended`.

    Attributes:
        attempt: number of the lease's attempt; 0 to a router.
        first: position of the run's first token.
        logprobs, top, top_ids, top_logprobs: as in `runner.base.PromptScores`.
    """

    request: Name
    attempt: Small
    first: Count
    logprobs: Floats
    top: Small
    top_ids: Tokens
    top_logprobs: Floats


class HandOffTaken(Message, frozen=True, array_like=True, tag="handed"):
    """D has all of a sample and goes on with it; P may forget the sample."""

    request: Name
    attempt: Small
    index: Small


# -- requests, router to instances and back -------------------------------------------------------


class Submit(Message, frozen=True, array_like=True, tag="submit"):
    """A router sends a request to an instance.

    Attributes:
        request: the request's name among instances, also in the messages below; never repeats.
        request_id: the caller's name for the request.
        text: the prompt as text; None where `tokens` is the prompt.
        tokens: the prompt as token ids; empty where `text` is the prompt.
        decoders: addresses of decode instances that may take the request over, in order of preference; empty: the
            receiver serves it whole.
        params: sampling parameters, with a seed.
        streams: whether the caller reads deltas.
        priority: the request's priority.
        deadline_s: seconds until the request's deadline.
        routing, aux: the rows that the caller wants; see `Engine.generate`.
        start: position of the first row that the caller wants.
        salt: the tenant's salt.
        waited_s: seconds since the caller sent the request.
        seen: of each of `decoders`, the incarnation of the process that answers the router there, and the address at
            which that process says that it listens; empty where the router does not know.
        trace: the caller's span, as W3C's `traceparent`; "": it traces nothing.
    """

    request: Name
    request_id: Name
    text: Annotated[str, Meta(max_length=4 << 20)] | None
    tokens: Tokens
    decoders: Annotated[tuple[Words, ...], Meta(max_length=256)]
    params: SamplingParams
    streams: bool
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)]
    deadline_s: Seconds
    routing: bool | None
    aux: bool | Names | None
    start: Count
    salt: Words
    waited_s: Seconds = 0.0
    seen: Annotated[tuple[tuple[Namespace, Words], ...], Meta(max_length=256)] = ()
    trace: Trace = ""


class PromptTokens(Message, frozen=True, array_like=True, tag="prompt"):
    """The tokens of a prompt. The instance that tokenised a text sends them before its other messages, for a caller
    whose request ends without an `Ended`; the instance that answers sends them before the first sample, unless it knows
    that the caller sent tokens. A router gives out no output of a text before it has them."""

    request: Name
    tokens: Tokens


class Abort(Message, frozen=True, array_like=True, tag="abort"):
    """The receiver ends a request with the tokens that it has, or never begins it."""

    request: Name


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """New output of one sample. Fields that are not listed are as in `fdasync.Delta`.

    Attributes:
        request: the request's name among instances.
        index: number of the sample.
    """

    request: Name
    index: Small
    token_ids: tuple[int, ...]
    text: str
    raw_logprobs: tuple[float, ...] | None
    processed_logprobs: tuple[float, ...] | None
    top_logprobs: tuple[TopLogprobs | None, ...] | None
    finish_reason: FinishReason | None


class Progress(Message, frozen=True, array_like=True, tag="progress"):
    """New output of some of a caller's requests. The sender merges pieces while the link is full."""

    pieces: Annotated[tuple[Piece, ...], Meta(max_length=1024)]


class Rows(Message, frozen=True, array_like=True, tag="rows"):
    """A run of aux rows of one sample. The payload has the rows of positions [start, start + count).

    Attributes:
        index: number of the sample.
        name: name of the aux spec.
        start: position of the first row.
        count: number of rows.
    """

    request: Name
    index: Small
    name: Name
    start: Count
    count: Count


class Outputs(Message, frozen=True, array_like=True, tag="outputs"):
    """A run of one sample's output. Each sample of a result has at least one.

    Attributes:
        index: number of the sample.
        first: number of the run's first token in the sample.
        token_ids: the run's tokens.
        text: the run's text.
        raw, processed: log-probs of the tokens, float32 little-endian; None where the caller did not ask for them.
        top: alternatives of each token; None where the caller did not ask for them.
    """

    request: Name
    index: Small
    first: Count
    token_ids: Tokens
    text: Annotated[str, Meta(max_length=1 << 20)]
    raw: Floats | None
    processed: Floats | None
    top: tuple[TopLogprobs | None, ...] | None


class SampleEnd(Message, frozen=True, array_like=True, tag="sample_end"):
    """A sample is whole: its `Rows` and `Outputs` were sent before. A caller that reads deltas gets it when the sample
    ends, beside the last `Piece` of the sample and in any order with it; another one when the request ends.

    Attributes:
        index: number of the sample.
        num_tokens: number of tokens sent.
        finish_reason, versions, stop_token_id, stop_string: as in `fdasync.Sample`; `versions` is its `weight_version`.
        cached: prompt tokens that were not computed, by tier: device, host, store.
        num_rows: number of rows sent for each spec; None without specs.
        aux: specs of the rows sent.
        drafts: what drafts did: steps, drafted, accepted; None: the instance has no drafter.
    """

    request: Name
    index: Small
    num_tokens: Count
    finish_reason: FinishReason
    cached: tuple[Count, Count, Count]
    versions: Annotated[tuple[WeightSpan, ...], Meta(max_length=4096)]
    stop_token_id: int | None
    num_rows: Count | None
    aux: Annotated[tuple[AuxSpec, ...], Meta(max_length=64)]
    drafts: tuple[Count, Count, Count] | None = None
    stop_string: Annotated[str, Meta(max_length=MAX_STOP_CHARS)] = ""


class Moved(Message, frozen=True, array_like=True, tag="moved"):
    """The sender handed every sample of a request to a decode instance, which alone answers from now on.

    Attributes:
        address: address of the decode instance.
    """

    request: Name
    address: Words


class Ended(Message, frozen=True, array_like=True, tag="ended"):
    """A request ended with a result. The ends of all its samples were sent before."""

    request: Name


class Answered(Message, frozen=True, array_like=True, tag="answered"):
    """A request of one sample ended with a result, and this is all of it: as `Outputs`, `SampleEnd` and `Ended` in this
    order. Most requests end so, with one message in place of three.

    Attributes:
        outputs: all of the sample's output.
        end: the sample's end.
    """

    request: Name
    outputs: Outputs
    end: SampleEnd


class Failed(Message, frozen=True, array_like=True, tag="failed"):
    """A request ended with an error.

    Attributes:
        error: name of the error's class in `fdasync.errors`.
        problem: the error's problem, for people.
        field, limit, hint: fields of a BadInput.
        retriable: the same request may succeed on another instance or later.
        whole: with `retriable`: only an instance that serves it whole may succeed, since no decode instance will ever
            take the request over.
        prompt_tokens: least number of tokens of the prompt, where it is too long for the sender or no decode instance
            took it; else 0.
    """

    request: Name
    error: Words
    problem: Words
    field: Words = ""
    limit: Words = ""
    hint: Words = ""
    retriable: bool = False
    whole: bool = False
    prompt_tokens: Count = 0


class KvEventBatch(Message, frozen=True, array_like=True, tag="blocks"):
    """An instance reports the blocks that it gained and lost.

    Attributes:
        namespace, weight_version, weight_order: of the weights in use, under which these identities stand.
        reset: whether the instance has no identities but `added`.
        added: identities that the instance can serve from now on.
        removed: identities that it can serve no more.
    """

    namespace: Namespace
    weight_version: Version
    reset: bool
    added: Keys
    removed: Keys
    weight_order: Count = 0


# -- commands, router to instances ----------------------------------------------------------------


class Call(Message, frozen=True, array_like=True, tag="call"):
    """A router has an instance do something; the instance replies with one `Reply`.

    Attributes:
        number: of the call; the reply repeats it.
        verb: a call of a method of `Verbs`.
    """

    number: Count
    verb: Verb


class Standing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How an instance stands after a call.

    Attributes:
        namespace, weight_version, weight_order: of its weights.
        state: what it does.
        is_delta: the last folder that its weights came from was a delta to the weights before.
    """

    namespace: Namespace = b""
    weight_version: Version = FIRST_VERSION
    weight_order: Count = 0
    state: Doing = "running"
    is_delta: bool = False


class Reply(Message, frozen=True, array_like=True, tag="reply"):
    """The outcome of a call.

    Attributes:
        number: of the call.
        standing: how the instance stands now.
        value: what the method returned; "" for nothing.
        failure: the error that it raised; None: it did as it was told.
    """

    number: Count
    standing: Standing = Standing()
    value: Words = ""
    failure: Failure | None = None

    @property
    def error(self) -> str:
        """Name of the error's class; "" for success."""
        return "" if self.failure is None else self.failure.kind


# -- for people who look on ----------------------------------------------------------------------


class Watch(Message, frozen=True, array_like=True, tag="watch"):
    """A router asks an instance what there is to see; the instance replies with one `Seen`. A router asks at most once
    a second, and only while somebody looks.

    Attributes:
        number: the `Seen` repeats it.
        since: number of a `Moment`; only later ones are told.
        past_picks: with the tables of picks under earlier weights.
    """

    number: Count
    since: Count = 0
    past_picks: bool = False


class Seen(Message, frozen=True, array_like=True, tag="seen"):
    """The reply to a `Watch`. It is left out while the link is full, and the router asks again.

    Attributes:
        number: of the `Watch`.
        sight: what the instance shows. Its tables of picks take `MAX_PICKS_NBYTES` at most.
    """

    number: Count
    sight: Sight


AnyMessage = (
    Hello
    | Refused
    | Bye
    | Heartbeat
    | LeaseRequest
    | LeaseAnswer
    | LeaseDrop
    | BlocksOffer
    | BlocksTaken
    | HandOff
    | HandOffTaken
    | ScoredPrompt
    | Submit
    | PromptTokens
    | Abort
    | Progress
    | Rows
    | Outputs
    | SampleEnd
    | Moved
    | Ended
    | Answered
    | Failed
    | KvEventBatch
    | Call
    | Reply
    | Watch
    | Seen
)


def brief(text: str) -> str:
    """A text as a field of type `Words` can carry it: cut to the longest length, and encodable as UTF-8."""
    return text[:WORDS_CHARS].encode(errors="replace").decode()


def _plain(value: Any) -> str:
    """A text of another class, such as numpy's, for msgspec, which knows Python's alone."""
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Raises ProtocolError for a message that is longer than a link takes."""
    data = _ENCODER.encode(message)
    if len(data) > MAX_MESSAGE_NBYTES:
        name = type(message).__name__
        raise ProtocolError(f"a {name} of {len(data)} bytes is longer than the limit of {MAX_MESSAGE_NBYTES}")
    return data


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Raises ProtocolError, and nothing else, for bytes that are no message."""
    if len(data) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is longer than the limit of {MAX_MESSAGE_NBYTES}")
    try:
        message: Message = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # bytes that are no UTF-8 are a ValueError
        raise ProtocolError(f"{len(data)} bytes are no message: {error}") from None
    return message
