"""Everything that instances and routers say to each other, on one page. A contract: pure data, no sockets.

Frozen, tagged msgspec structs, encoded as msgpack arrays; never pickle. Who sends, in which incarnation, and in which
order is the link's affair (`links.py`); every message about a request names it and its attempt. Bounds stand in the
types, so that `decode` refuses what is out of bounds before anything is done with it.

A *lease* is room on a decode instance (D) for one request of a prefill instance (P): `LeaseAsk` is answered by
`LeaseAnswer`s (any number of "queued", one "granted" or "denied"), renewed by P's `Heartbeat`s, ended by `LeaseDrop`
from either side. Under a lease P offers blocks (`BlocksOffer`); D copies them itself and answers `BlocksTaken`.
`HandOff` closes it, one for each sample.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fdasync.cache.aux import AuxSpec
from fdasync.errors import ProtocolError
from fdasync.ipc.shared_memory import Part
from fdasync.request import SamplingParams
from fdasync.result import TopLogprobs, WeightSpan

PROTOCOL = 1
#: of one message without its payload, and of a payload; a link takes nothing longer
MAX_MESSAGE_NBYTES = 8 << 20
MAX_PAYLOAD_NBYTES = 4 << 20

Meta = msgspec.Meta
Name = Annotated[str, Meta(min_length=1, max_length=256)]
_WORDS_CHARS = 4096
Words = Annotated[str, Meta(max_length=_WORDS_CHARS)]
Key = Annotated[bytes, Meta(min_length=16, max_length=16)]
Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Small = Annotated[int, Meta(ge=0, lt=1 << 20)]
#: token ids, int32 little-endian
Tokens = Annotated[bytes, Meta(max_length=4 << 20)]
Keys = Annotated[tuple[Key, ...], Meta(max_length=1 << 17)]
Namespace = Annotated[bytes, Meta(max_length=16)]
Floats = Annotated[bytes, Meta(max_length=4 << 20)]
Role = Literal["mixed", "prefill", "decode", "router"]
#: a request's name among instances, and the number of the attempt to find room for it
LeaseName = tuple[Name, Small]
#: of aux specs
Names = Annotated[tuple[Name, ...], Meta(max_length=64)]
#: no model has more layers with experts
Layers = Annotated[tuple[Small, ...], Meta(max_length=4096)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages."""


# -- who is there ---------------------------------------------------------------------------------


class Shape(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What blocks are, and what decides an answer besides the weights: instances that differ in any of it cannot use
    each other's blocks, or the same request would end differently, depending on who serves it.

    Attributes:
        model: digest of everything that identities are made of, but the weights.
        aux: rows that live with each block, in order.
        vocab_size: of the model. eos_ids: what ends a sample, sorted.
        routing_debug: rows name positions, not experts.
        text: digest of what the tokenizer makes of text; empty where there is none.
    """

    model: Key
    kv_layout: Words
    kv_dtype: Words
    block_tokens: Small
    block_nbytes: Count
    aux: Annotated[tuple[AuxSpec, ...], Meta(max_length=64)]
    vocab_size: Count
    eos_ids: Annotated[tuple[Count, ...], Meta(max_length=4096)]
    routing_debug: bool
    text: Namespace

    def difference(self, other: Shape) -> tuple[str, str, str] | None:
        """The first field that differs, with both values in words; None: blocks can be exchanged."""
        # the model last: a digest says less than anything else
        for name in (*self.__struct_fields__[1:], "model"):
            values = getattr(self, name), getattr(other, name)
            if values[0] != values[1]:
                ours, theirs = [each.hex() if isinstance(each, bytes) else f"{each!r:.200}" for each in values]
                return name, ours, theirs
        return None


class Source(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the blocks of an instance can be read.

    Attributes:
        machine: boot id of its machine; memory can be mapped on the same one only.
        pid: of its process.
        regions: (fd, bytes) of each of its shared regions, in that process.
        token: random; shows that what was opened is what was meant.
        address: host:port of its data socket, "" where it has none.
    """

    machine: Words
    pid: Count
    regions: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=64)]
    token: Key
    address: Words


class Hello(Message, frozen=True, array_like=True, tag="hello"):
    """The first message of either side of a link. Tag and protocol stay the first two elements in every version, so
    that another one can be refused by name.

    Attributes:
        protocol: PROTOCOL.
        name: for people.
        address: where it listens; "" for routers.
        shape: of instances; None for routers. sources: for each transport that it offers, by name.
        namespace: of the weights in use; empty for routers.
        facts: of instances: what a router has to know of the model (`Facts`).
    """

    protocol: Small
    name: Name
    role: Role
    address: Words
    shape: Shape | None = None
    sources: Annotated[tuple[tuple[Name, Source], ...], Meta(max_length=8)] = ()
    namespace: Namespace = b""
    facts: Facts | None = None


class Facts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a router has to know of an instance's model and limits; see `runner.base.Capacity` and `EngineConfig`."""

    model: Words
    vocab_size: Count
    max_context_tokens: Count
    num_blocks: Count
    moe_layer_ids: Layers
    num_experts: Small
    top_k_by_layer: Layers | None
    tokenizer: Words
    model_path: Words
    max_step_tokens: Count
    weight_version: Count
    max_requests: Count


class Refused(Message, frozen=True, array_like=True, tag="refused"):
    """The answer to a Hello that does not fit: which field, and why in words. No link comes about."""

    field: Name
    problem: Words


class Bye(Message, frozen=True, array_like=True, tag="bye"):
    """The sender goes away, or knows nothing of this link (any more)."""

    reason: Words


class Totals(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an instance did since its start; see `scheduler.SchedulerStats` for the counters of the same names.

    Attributes:
        tokens: sampled here, those of live requests included.
        received_blocks, received_nbytes: of other instances, copied here and checked.
        leases_granted, leases_denied: to others that asked.
        asked: answers that its own questions for room got, granted ones; `asked_s`: how long those took, together;
            `asked_most_s`: the longest.
    """

    tokens: Count = 0
    finished: Count = 0
    steps: Count = 0
    preemptions: Count = 0
    prompt_tokens: Count = 0
    hit_tokens: Count = 0
    hit_tokens_host: Count = 0
    hit_tokens_store: Count = 0
    written_blocks: Count = 0
    fetched_blocks: Count = 0
    received_blocks: Count = 0
    received_nbytes: Count = 0
    leases_granted: Count = 0
    leases_denied: Count = 0
    asked: Count = 0
    asked_s: Seconds = 0.0
    asked_most_s: Seconds = 0.0


class Status(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How an instance is doing.

    Attributes:
        state: running, paused or draining.
        queued_tokens: prompt tokens that wait to be computed.
        running: sequences that hold blocks; `leased`: of them, those that wait for blocks of others.
        free_blocks: of the device, free or idle and not promised to a lease.
        totals: since its start.
        store_problem: why its store is not asked for now; "" while it is used, and where there is none.
    """

    state: Literal["running", "paused", "draining"]
    waiting: Count
    queued_tokens: Count
    running: Count
    leased: Count
    free_blocks: Count
    num_blocks: Count
    totals: Totals = Totals()
    store_problem: Words = ""


class Heartbeat(Message, frozen=True, array_like=True, tag="beat"):
    """The sender lives, and still wants these leases of the receiver."""

    leases: Annotated[tuple[LeaseName, ...], Meta(max_length=1 << 16)] = ()
    status: Status | None = None


# -- leases, P to D and back ----------------------------------------------------------------------


class Wanted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request as an instance hands it on: checked, tokenised, hashed, its seed drawn.

    Attributes:
        caller: incarnation of the router that the answer goes to.
        tokens: the prompt.
        block_keys: identities of its full blocks under `namespace` and `salt`, one for each.
        params: with a seed.
        deadline_s: what is left of it.
        rows: names of the aux specs whose rows are wanted, routing's too; start: from that position on.
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


class LeaseAsk(Message, frozen=True, array_like=True, tag="ask"):
    """P asks D for room for a request; idempotent by (request, attempt).

    Attributes:
        ttl_s: a lease that is not renewed for so long is over.
        total_s: one that was not handed off by then is over in any case.
    """

    request: Name
    attempt: Small
    wanted: Wanted
    ttl_s: Seconds
    total_s: Seconds


class LeaseAnswer(Message, frozen=True, array_like=True, tag="answer"):
    """D's answer.

    Attributes:
        verdict: "queued" is an interim one: another will follow.
        prefix_blocks: leading blocks that D has, and keeps for this lease: they need not be sent.
        retry_after_s: of "denied": asking again before makes no sense; a negative one: asking again never does.
        reason: of "denied", in words.
    """

    request: Name
    attempt: Small
    verdict: Literal["granted", "denied", "queued"]
    prefix_blocks: Count = 0
    retry_after_s: Annotated[float, Meta(ge=-1, le=1e9)] = 0.0
    reason: Words = ""


class LeaseDrop(Message, frozen=True, array_like=True, tag="drop"):
    """From P: it gives up, also what D has not heard of yet. From D: there is no such lease (any more)."""

    request: Name
    attempt: Small
    reason: Words


class BlockRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block of the sender's: which of the prompt's it is, where its KV and rows lie, and what they must be.

    Attributes:
        index: number of the block in the prompt.
        parts: in the sender's regions: its KV, then its rows, one part for each aux spec.
        checksums: XXH3-64 of each part.
    """

    index: Small
    parts: Annotated[tuple[Part, ...], Meta(max_length=64)]
    checksums: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=64)]


class BlocksOffer(Message, frozen=True, array_like=True, tag="offer"):
    """P's sealed blocks lie ready; they stay as they are until D took them or the lease is over."""

    request: Name
    attempt: Small
    offer: Count
    blocks: Annotated[tuple[BlockRef, ...], Meta(max_length=1024)]


class BlocksTaken(Message, frozen=True, array_like=True, tag="taken"):
    """D has copied and checked every block of an offer; the sender may use their places again."""

    request: Name
    attempt: Small
    offer: Count


class HandOff(Message, frozen=True, array_like=True, tag="hand_off"):
    """One sample's first token, and its open block; D goes on from there when it has everything.

    Attributes:
        index: number of the sample.
        offer: number of the offer that the open block is, if there is one.
        raw, processed, top: log-probs of the token, as asked for.
        cached: prompt tokens that were not computed, by tier.
        tail: the block with the last tokens of the prompt; None where they fill their blocks.
        tail_rows: how many of its tokens count.
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


class HandOffTaken(Message, frozen=True, array_like=True, tag="handed"):
    """D has everything of a sample and goes on with it; P may forget it."""

    request: Name
    attempt: Small
    index: Small


# -- requests, router to instances and back -------------------------------------------------------


class Submit(Message, frozen=True, array_like=True, tag="submit"):
    """A request for an instance.

    Attributes:
        request: its name among instances; never repeats.
        request_id: the caller's name for it.
        text: the prompt; None where it is `tokens`.
        decoders: addresses of D's to hand it to, in order of preference; empty: serve it whole.
        deadline_s: what is left of it.
        routing, aux: which rows are wanted; see `Engine.generate`.
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


class PromptTokens(Message, frozen=True, array_like=True, tag="prompt"):
    """The tokens of a prompt that was given as text, from whoever made them: before the first news of the request, for
    a caller that never hears of its end."""

    request: Name
    tokens: Tokens


class Abort(Message, frozen=True, array_like=True, tag="abort"):
    """End a request with what it has, or never begin it."""

    request: Name


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is new of one sample; see `fdasync.Delta`.

    Attributes:
        index: number of the sample.
    """

    request: Name
    index: Small
    token_ids: tuple[int, ...]
    text: str
    raw_logprobs: tuple[float, ...] | None
    processed_logprobs: tuple[float, ...] | None
    top_logprobs: tuple[TopLogprobs | None, ...] | None
    finish_reason: str | None


class Progress(Message, frozen=True, array_like=True, tag="progress"):
    """New tokens of some of a caller's requests, merged as far as the sender had to wait."""

    pieces: Annotated[tuple[Piece, ...], Meta(max_length=1024)]


class Rows(Message, frozen=True, array_like=True, tag="rows"):
    """A run of aux rows of one sample, as payload: those of positions [start, start + count) of spec `name`."""

    request: Name
    index: Small
    name: Name
    start: Count
    count: Count


class Outputs(Message, frozen=True, array_like=True, tag="outputs"):
    """A run of one sample's output, from its token `first` on; at least one comes for each sample of a result.

    Attributes:
        raw, processed: float32 little-endian; top: likewise one for each token; None: not asked for.
    """

    request: Name
    index: Small
    first: Count
    token_ids: Tokens
    text: Annotated[str, Meta(max_length=1 << 20)]
    raw: Floats | None
    processed: Floats | None
    top: tuple[TopLogprobs | None, ...] | None


class SampleEnd(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The end of one sample of a result, whose rows and tokens came before; see `fdasync.Sample`.

    Attributes:
        num_tokens: that came.
        num_rows: of each spec; None: there are none of any.
        aux: names of the specs.
    """

    num_tokens: Count
    finish_reason: Words
    cached: tuple[Count, Count, Count]
    versions: Annotated[tuple[WeightSpan, ...], Meta(max_length=4096)]
    stop_token_id: int | None
    num_rows: Count | None
    aux: Annotated[tuple[AuxSpec, ...], Meta(max_length=64)]


class Moved(Message, frozen=True, array_like=True, tag="moved"):
    """Every sample of a request was handed to the instance at this address: it alone answers from now on."""

    request: Name
    address: Words


class Ended(Message, frozen=True, array_like=True, tag="ended"):
    """A request's result: its one end, as far as the sender knows."""

    request: Name
    prompt: Tokens
    samples: Annotated[tuple[SampleEnd, ...], Meta(max_length=1024)]


class Failed(Message, frozen=True, array_like=True, tag="failed"):
    """A request ended with an error.

    Attributes:
        error: name of its class in `fdasync.errors`.
        field, limit, hint: of BadInput.
        retriable: the same request may succeed elsewhere or later.
        whole: but only where one instance serves it whole: no decode instance will ever take it from another.
        prompt_tokens: of a request that is too long for the sender, or that nobody took from it: at least so many.
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


class BlockNews(Message, frozen=True, array_like=True, tag="blocks"):
    """Identities that an instance can serve from now on, and those that it lost, under the weights that it has now;
    `reset`: it has no others."""

    namespace: Namespace
    weight_version: Count
    reset: bool
    added: Keys
    removed: Keys


# -- commands, router to instances ----------------------------------------------------------------


class Command(Message, frozen=True, array_like=True, tag="command"):
    """Something that an instance shall do, answered by one `Done`.

    Attributes:
        number: of the router's commands.
        verb: claim (no other router may update weights for limit_s, or until this one's update or its link is over),
            release (it may), update_weights (version, path, mode), pause, resume, drain (within limit_s).
    """

    number: Count
    verb: Literal["claim", "release", "update_weights", "pause", "resume", "drain"]
    version: Count = 0
    path: Words = ""
    mode: Literal["abort", "keep"] = "abort"
    limit_s: Seconds = 0.0


class Done(Message, frozen=True, array_like=True, tag="done"):
    """What came of a command; `error` is the name of an error's class, "" where it went well."""

    number: Count
    error: Words = ""
    problem: Words = ""
    namespace: Namespace = b""
    weight_version: Count = 0


AnyMessage = (
    Hello
    | Refused
    | Bye
    | Heartbeat
    | LeaseAsk
    | LeaseAnswer
    | LeaseDrop
    | BlocksOffer
    | BlocksTaken
    | HandOff
    | HandOffTaken
    | Submit
    | PromptTokens
    | Abort
    | Progress
    | Rows
    | Outputs
    | Moved
    | Ended
    | Failed
    | BlockNews
    | Command
    | Done
)


def brief(text: str) -> str:
    """Words of an error as a message can carry them: the other side refuses longer ones, and what is no text."""
    return text[:_WORDS_CHARS].encode(errors="replace").decode()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Raises ProtocolError if it is longer than a link takes."""
    data = _ENCODER.encode(message)
    if len(data) > MAX_MESSAGE_NBYTES:
        name = type(message).__name__
        raise ProtocolError(f"a {name} of {len(data)} bytes is longer than the limit of {MAX_MESSAGE_NBYTES}")
    return data


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Raises ProtocolError, and nothing else, for whatever is not a message."""
    if len(data) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is longer than the limit of {MAX_MESSAGE_NBYTES}")
    try:
        message: Message = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # bytes that are no UTF-8 are a ValueError
        raise ProtocolError(f"{len(data)} bytes are no message: {error}") from None
    return message
