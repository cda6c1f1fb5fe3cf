"""Calls as data: requests and weight updates, their arguments, limits and checks; and a runner's `SamplerSpec`.

Knows no engine and no tokenizer. The engine, the router, the scheduler and runners read it.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence, Sized
from operator import index
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict, cast, get_args

import msgspec
from msgspec import Meta

from fdasync.errors import BadInput
from fdasync.registry.mapping import check, converted, nearest, struct_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    #: text, or token ids
    Prompt = str | Sequence[int]
    #: name, dtype, shape, buffer
    NamedTensor = tuple[str, str, Sequence[int], Any]
    #: a checkpoint folder, tensors, or tensors that a trainer broadcasts
    WeightSource: TypeAlias = "str | os.PathLike[str] | Sequence[NamedTensor] | GroupTensors"

LogprobKind = Literal["none", "raw", "processed", "both"]
#: what a pause does to the requests that are inside (`Generator.pause`)
PauseMode = Literal["in_place", "retract", "abort", "wait"]
#: what a sleep does to the requests that are inside (`Generator.sleep`)
SleepMode = Literal["keep", "abort", "wait"]
#: the parts of a device's memory that a sleep releases, and a wake takes back
MemoryPart = Literal["weights", "kv_cache", "cuda_graph"]
WakeTag = Literal["weights", "kv_cache", "cuda_graph", "scheduling"]
#: what a generator does, in one word. Where several hold, the last of them counts. "running": it plans steps whenever
#: there is work. "paused": a pause has returned, and no resume came since. "waits_for_weights": a sleep that is over
#: has dropped the weights, and an update has to bring some. "broken": an update has failed half-way, and another one
#: has to mend that. "updating": an update is under way, or ranks of a trainer's group meet. "asleep": a sleep has
#: begun, and not all memory is back. "waking": a wake is under way
Doing = Literal["running", "paused", "waits_for_weights", "broken", "updating", "asleep", "waking"]
GrammarKind = Literal["json_schema", "regex", "lark", "gbnf"]
#: "default": the fastest arithmetic; the last bits of a number may depend on the batch, chunk and kernel that computed
#: it. "fixed": every number of a token (KV, log-probs, rows, samples) depends on its prefix and the weights alone, to
#: the last bit.
Numerics = Literal["default", "fixed"]

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 256
MAX_TOP_LOGPROBS = 64
#: tokens of one request with a bias, and the largest bias either way
MAX_LOGIT_BIAS_TOKENS = 1024
MAX_LOGIT_BIAS = 100.0
MAX_GRAMMAR_CHARS = 1 << 16
#: logits processors of one request, and bytes of their settings
MAX_PROCESSORS = 8
MAX_PROCESSORS_NBYTES = 1 << 16
#: as much as a message between instances has room for
MAX_SALT_CHARS = 4096
#: for checks without a model: token ids are int32
MAX_VOCAB_SIZE = 1 << 31
MAX_AUX_NAMES = 64
_MAX_NAME_CHARS = 256
_Bias = Annotated[float, Meta(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
MAX_VERSION_CHARS = 256
#: what an engine starts with unless its configuration says otherwise
FIRST_VERSION = "0"
# orders fit the messages between instances
_MAX_NUMBER_DIGITS = 14
_LAST_DIGITS = re.compile(r"[0-9]+(?=[^0-9]*\Z)")
_NUMBER = re.compile(r"[0-9]+")
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_TRACE = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class WeightsFingerprint(msgspec.Struct, frozen=True):
    """What names a set of weights: equal for two sides exactly where all their tensors have equal bytes.

    Attributes:
        weights_id: hex XXH3-128 over name, dtype, shape and bytes of every tensor, by name, as a runner holds them.
        tensors: hex XXH3-128 of each tensor alone, by name; empty: not told. With them a difference has a name.
    """

    weights_id: str
    tensors: dict[str, str] = {}


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a caller gives for a weight update.

    Attributes:
        name: as in the checkpoint or in the model's state dict.
        dtype: numpy's name, "bfloat16", "float8_e4m3fn" or "float8_e5m2".
        shape: of the whole tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightsGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process group of `torch.distributed` over which a trainer, its rank 0, broadcasts weights.

    Attributes:
        name: of the group, as all of its ranks know it.
        address, port: of the trainer's store (`torch.distributed.TCPStore`).
        world_size: ranks of the group, the trainer's among them.
        rank: of the first worker here, from 1 on. An engine over N GPUs takes N ranks; a router takes the ranks of its
            instances, one instance after the other in the order of their addresses.
        backend: "gloo" between CPUs, "nccl" between GPUs.
        timeout_s: longest that the ranks may take to meet, and that the next bytes of an update may take to come.
    """

    name: str
    address: str
    port: int
    world_size: int
    rank: int = 1
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout_s: float = 60.0


class GroupTensors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensors that rank 0 of a group broadcasts, as a source of new weights.

    Attributes:
        group: name of a group that was joined (`Generator.join_weights_group`).
        tensors: in the order in which they come.
        bucket_nbytes: 0: a broadcast for each tensor. Else neighbours come in one, as bytes, each at a multiple of 16:
            as many as fit into so many bytes, rounded down to a multiple of 16. A larger tensor comes alone, in pieces
            of so many bytes.
        checksum: a last broadcast of 16 bytes follows, XXH3-128 over the bytes of all tensors in order, big-endian.
    """

    group: str
    tensors: tuple[TensorMeta, ...]
    bucket_nbytes: int = 0
    checksum: bool = False


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the text of an answer must be, from its first token to its end.

    Attributes:
        kind: "json_schema"; "regex", which the whole text matches; "lark" or "gbnf", a context-free grammar. A runner
            says which dialects of these it reads.
        text: the schema, the expression or the grammar, of 1 to 65,536 characters.
    """

    kind: GrammarKind
    text: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]

    def packed(self) -> bytes:
        """As `SamplerSpec.grammar` carries it."""
        return f"{self.kind}\n{self.text}".encode()

    @classmethod
    def unpacked(cls, packed: bytes) -> Grammar:
        """The grammar that `packed` was made of."""
        kind, _, text = packed.decode().partition("\n")
        return msgspec.convert({"kind": kind, "text": text}, cls)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample, and when to stop.

    Attributes:
        max_tokens: most new tokens, >= 1.
        min_tokens: EOS and stop ids cannot be sampled before this many new tokens, and no stop string ends in them.
        temperature: 0 is greedy; else the logits are divided by it, up to 100.
        top_k: keep the k largest logits; 0, and any number from the vocabulary's size on, keeps all.
        top_p: keep the smallest set whose probability reaches top_p, in (0, 1].
        min_p: drop what is less likely than min_p times the likeliest, in [0, 1].
        seed: below 2^63; noise depends on (seed, sample index, position) alone; None: the frontend draws one.
        repetition_penalty: 0.001 to 1000; divides positive and multiplies negative logits of tokens already in
            prompt or output (arXiv 1909.05858). 1 is off.
        presence_penalty, frequency_penalty: in [-2, 2]; subtracted once, or once per occurrence, for
            tokens in the output.
        logit_bias: by token id, what is added to the token's logit, in [-100, 100], for 1024 ids at most. It is added
            after the penalties, which do not scale it, and before the temperature: 100 forces a token and -100 bars
            one, for logits as models have them. Ids may be strings of digits, as in JSON.
        processors: plugins that change the logits before all else, in this order; the settings of each by its name
            (`fdasync.processors`). An engine takes the names that its runner was started with. Raw log-probs are of
            the model's logits, as ever; processed ones of the changed logits.
        grammar: tokens that it does not allow cannot be sampled, whatever their bias. EOS can be sampled where the text
            may end, and nothing else where it must; so it goes with neither `ignore_eos` nor `min_tokens`. An answer
            that ends otherwise (length, a stop string) is the beginning of a text that it allows.
        n: samples of the one prompt, up to 1024 and the engine's `max_requests`.
        stop: strings that end the request, or a single one, which becomes a tuple. They are looked for in the text with
            special tokens shown, so one may be or hold a special token ("<|im_end|>"). Text from the match on is not
            returned. Tokens that complete the match are, as an EOS is (they were sampled and count for a trainer);
            tokens after it are dropped. Text that only the end of the request completes (U+FFFD of an incomplete
            character) is searched at the end: a match makes "length" a "stop". `Sample.stop_reason` tells which it was.
        stop_token_ids: token ids that end the request; the id is kept in the result, as EOS is.
        ignore_eos: EOS ids of the model do not end the request.
        logprobs: "raw" = log-softmax of the model's logits (float32); "processed" = the same after
            penalties, bias, grammar, temperature and filters, the distribution that was sampled from; "both"; "none".
        top_logprobs: this many best alternatives beside each sampled token, of the kind that `logprobs` names
            (raw with "both").
        prompt_logprobs_start: position in the prompt from which raw log-probs of the prompt's own tokens are wanted
            (`Result.prompt_logprobs`); None: none are. The log-prob of the token at position i comes from the logits
            of position i - 1, so the token at position 0 has none. Positions from there on are computed even if a
            cache has them, once for all samples.
        prompt_top_logprobs: this many best alternatives beside each token of the prompt that has a log-prob.
        chosen_positions_start: position in the prompt: for each token from there on the positions that the model's
            indexers chose are wanted (`Sample.chosen_positions`); None: none are. The prompt's are computed even if a
            cache has its blocks, once for all samples. The engine bounds their bytes
            (`EngineConfig.chosen_positions_nbytes`); a router serves none.
    """

    max_tokens: Annotated[int, Meta(ge=1)] = 256
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0, extra={"hint": "use temperature=0 for greedy"})] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-3, le=1e3)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    logit_bias: Annotated[dict[int, _Bias], Meta(max_length=MAX_LOGIT_BIAS_TOKENS)] = {}
    processors: Annotated[dict[str, dict[str, Any]], Meta(max_length=MAX_PROCESSORS)] = {}
    grammar: Grammar | None = None
    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    stop: str | Annotated[tuple[str, ...], Meta(max_length=MAX_STOP_STRINGS)] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: LogprobKind = "none"
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    prompt_logprobs_start: Annotated[int, Meta(ge=0)] | None = None
    prompt_top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    chosen_positions_start: Annotated[int, Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Checked parameters from plain values (parsed JSON, for example). `SamplingParams(**values)` means the same,
        but is checked only when a request is made with it.

        Raises BadInput naming the first field that is wrong or unknown, and the known name nearest to it. Limits that
        depend on a model's vocabulary are checked when a request is made.
        """
        params = struct_of(cls, values, whole="params")
        params._check(MAX_VOCAB_SIZE)
        return params

    def validated(self, *, vocab_size: int) -> SamplingParams:
        """A checked copy that shares no object that the caller could change (a list given for `stop`, for example).

        Raises BadInput naming the first field that is wrong. Types are checked too.
        """
        copy = converted(SamplingParams, msgspec.structs.asdict(self), whole="params")
        copy._check(vocab_size)
        if copy.processors:
            own = dict(msgspec.json.decode(copy.packed_processors()))
            return msgspec.structs.replace(copy, processors=own)
        return copy

    def _check(self, vocab_size: int) -> None:
        """What no annotation says: relations between fields, the vocabulary, and text that is no Unicode."""
        if self.min_tokens > self.max_tokens:
            raise BadInput("min_tokens", f"{self.min_tokens} is out of range", limit=f"0 to {self.max_tokens}")
        if self.grammar is not None:
            self._check_grammar(self.grammar)
        for name, count in (("top_logprobs", self.top_logprobs), ("prompt_top_logprobs", self.prompt_top_logprobs)):
            if count > vocab_size:
                raise BadInput(name, f"{count} is out of range", limit=f"0 to {vocab_size}")
        if self.prompt_top_logprobs and self.prompt_logprobs_start is None:
            raise BadInput(
                "prompt_top_logprobs", "needs", other="prompt_logprobs_start", hint="0 scores the whole prompt"
            )
        if self.processors:
            self._check_processors()
        if self.top_logprobs and self.logprobs == "none":
            raise BadInput("top_logprobs", "needs logprobs", hint='set logprobs="raw" or "processed"')
        for text in self.stop:
            # a stop string alone is one of these only now
            if not text or len(text) > MAX_STOP_CHARS:
                raise BadInput("stop", f"a stop string of {len(text)} characters", limit=f"1 to {MAX_STOP_CHARS}")
            check_text("stop", text)
        for field, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise BadInput(field, f"{token} is outside the vocabulary", limit=f"0 to {vocab_size - 1}")

    def packed_processors(self) -> bytes:
        """Names and settings as a `SamplerSpec` has them; empty: there are none."""
        return msgspec.json.encode(list(self.processors.items())) if self.processors else b""

    def _check_processors(self) -> None:
        try:
            # of numbers that are no JSON msgspec makes null
            json.dumps(self.processors, allow_nan=False)
            nbytes = len(self.packed_processors())
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput("processors", f"settings that are no JSON: {error}") from None
        if nbytes > MAX_PROCESSORS_NBYTES:
            raise BadInput("processors", f"{nbytes} bytes of settings as JSON", limit=MAX_PROCESSORS_NBYTES)
        if self.top_logprobs and self.logprobs in ("raw", "both"):
            raise BadInput("top_logprobs", "cannot be raw with", other="processors", hint='set logprobs="processed"')

    def _check_grammar(self, grammar: Grammar) -> None:
        # an object that its caller made is not checked yet
        try:
            check(grammar)
        except BadInput as wrong:
            raise BadInput("grammar", f"{wrong.field}: {wrong.problem}", limit=wrong.limit) from None
        if self.ignore_eos:
            raise BadInput("grammar", "cannot be kept with", other="ignore_eos", hint="its text ends with EOS")
        if self.min_tokens:
            hint = "let the grammar say how long a text is"
            raise BadInput("grammar", "cannot be kept with", other="min_tokens", hint=hint)


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments that every `Generator` takes in `generate` and `complete`; each may be left out.

    Attributes:
        request_id: the caller's own name for the request, unique among live requests; drawn when None.
        priority: higher is admitted first and preempted last; equal ones in order of arrival. Default 0.
        deadline_s: seconds from the call, after which the request returns with finish_reason "deadline". None: the
            configuration's.
        routing: whether to return expert routing; None: if the engine captures it; True: raise if it does not.
        aux: the other rows of each token to return (`Sample.aux`), whatever `routing` is: names of the runner's
            `AuxSpec`s (the error for an unknown name lists them); None: all; True: all, and raise if there are none;
            False: none. "final_hidden" is returned where it is named alone.
        start: first position whose rows are wanted, inside the prompt; the result repeats it. Default 0.
        cache_salt: requests share prefixes only with requests of the same salt, of up to 4096 characters. Default "".
        trace: the caller's span, as W3C's `traceparent`, for tracing (`fdasync.telemetry.otel`). Default "".
    """

    request_id: str | None
    priority: int
    deadline_s: float | None
    routing: bool | None
    aux: bool | Sequence[str] | None
    start: int
    cache_salt: str
    trace: str


class HandOffTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes that this instance prefills and another one decodes.

    Attributes:
        name: the request's name among instances.
        caller: incarnation of the router that gets the answer.
        decoders: addresses of decode instances, in order of preference.
        seen: of each decoder, the incarnation of the process that the router reaches there, and the address at which
            that process says that it listens; empty: unknown.
    """

    name: str
    caller: bytes
    decoders: tuple[str, ...]
    seen: tuple[tuple[bytes, str], ...] = ()


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A caller's request, not tokenised yet. Fields that are not named here are as in `GenerateOptions`.

    Attributes:
        prompt: text or token ids; a tuple of ints once it is checked.
        params: how to sample.
        streams: the caller reads deltas; False: the result alone.
        hand_off: the decode instances that the request goes to; None: this engine decodes it.
        waited_s: seconds that it has waited at a router or at another instance.
    """

    prompt: Any
    params: SamplingParams
    streams: bool
    request_id: str | None = None
    priority: int = 0
    deadline_s: float | None = None
    routing: bool | None = None
    aux: bool | Sequence[str] | None = None
    start: int = 0
    cache_salt: str = ""
    trace: str = ""
    hand_off: HandOffTarget | None = None
    waited_s: float = 0.0


def ask_of(prompt: Any, params: SamplingParams | None, options: GenerateOptions, *, streams: bool) -> GenerateRequest:
    """A call of `generate` (`streams`) or `complete`, not checked yet but for the names of its options.

    Raises TypeError for a keyword argument that neither takes, as a call of a Python function does.
    """
    known = GenerateOptions.__optional_keys__
    for name in options:
        if name not in known:
            near = nearest(name, tuple(known))
            hint = f"; did you mean {near!r}?" if near else f"; there are {', '.join(sorted(known))}"
            raise TypeError(f"unexpected keyword argument {name!r}{hint}")
    return GenerateRequest(
        prompt=prompt, params=SamplingParams() if params is None else params, streams=streams, **options
    )


def check_trace(trace: Any) -> None:
    """Raises BadInput unless it is a `traceparent`, or ""."""
    if not isinstance(trace, str) or (trace and not is_trace(trace)):
        raise BadInput("trace", f"{trace!r:.100} is no traceparent", limit="00-TRACE-SPAN-FLAGS in hex, or ''")


def is_trace(trace: str) -> bool:
    """Whether a text is a `traceparent` of version 00, which names a trace and a span."""
    return _TRACE.fullmatch(trace) is not None and trace[3:35].strip("0") != "" and trace[36:52].strip("0") != ""


def check_text(field: str, text: str) -> None:
    """Raise BadInput for text that cannot be encoded: no trace, message or tokenizer could take it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            field, f"has a lone surrogate at character {error.start}", hint="it is not valid Unicode text"
        ) from None


def no_tokens(values: Iterable[object], why: Exception) -> BadInput:
    """The error for a sequence that `array` did not take for token ids, with its reason."""
    if all(isinstance(one, Sized) for one in values):
        return BadInput("prompt", "holds several prompts", limit="one prompt a call", hint="call once for each of them")
    return BadInput("prompt", f"holds something that is no token id: {why}")


def check_name(request_id: Any) -> None:
    """Raise BadInput for a request id that is no string."""
    if not isinstance(request_id, str):
        raise BadInput("request_id", f"{request_id!r} is no name")


def check_pause_mode(mode: Any) -> None:
    """Raise BadInput for a mode that `Generator.pause` does not know."""
    if not isinstance(mode, str) or mode not in get_args(PauseMode):
        raise BadInput("mode", f"{mode!r:.100} is no mode of a pause", limit=", ".join(get_args(PauseMode)))


#: longest profile, in seconds: steps stop while its file is written, which takes several times as long
MOST_PROFILE_S = 10.0


def checked_profile_s(seconds: Any) -> float:
    """The length of a profile. Raises BadInput."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= MOST_PROFILE_S:
        raise BadInput(
            "seconds", f"{seconds!r:.100} is no length of a profile", limit=f"above 0, up to {MOST_PROFILE_S:g}"
        )
    return float(seconds)


def check_update_mode(mode: Any) -> None:
    """Raise BadInput for a mode that `Generator.update_weights` does not know."""
    if not isinstance(mode, str) or mode not in ("abort", "keep"):
        raise BadInput("mode", f"{mode!r:.100} is neither 'abort' nor 'keep'")


def checked_sleep(level: Any, mode: Any) -> tuple[Literal[0, 1, 2], SleepMode]:
    """Raises BadInput for a level or a mode that `Generator.sleep` does not know."""
    try:
        depth = -1 if isinstance(level, bool) else index(level)
    except TypeError:
        depth = -1
    if not 0 <= depth <= 2:
        raise BadInput("level", f"{level!r:.100} is no depth of a sleep", limit="0, 1 or 2")
    if not isinstance(mode, str) or mode not in get_args(SleepMode):
        raise BadInput("mode", f"{mode!r:.100} is no mode of a sleep", limit=", ".join(get_args(SleepMode)))
    return cast("Literal[0, 1, 2]", depth), cast("SleepMode", mode)


def checked_tags(tags: Any) -> tuple[WakeTag, ...]:
    """Raises BadInput for names that are no parts of an engine's memory."""
    known = get_args(WakeTag)
    try:
        named = None if isinstance(tags, str) else tuple(tags)
    except TypeError:
        named = None
    if named is None:
        raise BadInput("tags", f"{tags!r:.100} is no list of names", limit=", ".join(known))
    if wrong := [tag for tag in named if not isinstance(tag, str) or tag not in known]:
        raise BadInput("tags", f"{wrong[0]!r:.100} names no part of an engine's memory", limit=", ".join(known))
    return named


def check_prefix(prefix: Any) -> None:
    """Raise BadInput for a prefix of request ids that is no string."""
    if not isinstance(prefix, str):
        raise BadInput("prefix", f"{prefix!r} is no beginning of a name")


def checked_aux(aux: Any) -> bool | tuple[str, ...] | None:
    """A copy of the `aux` option. Raises BadInput for a value of another type; whether the runner has such rows is not
    checked here."""
    if aux is None or isinstance(aux, bool):
        return aux
    if isinstance(aux, str) or not isinstance(aux, Sequence):
        raise BadInput("aux", f"{aux!r} is neither True, False, None nor a sequence of names", hint='aux=("name",)')
    names = tuple(dict.fromkeys(aux)) if all(isinstance(name, str) for name in aux) else ()
    if len(names) > MAX_AUX_NAMES or (aux and not names):
        raise BadInput("aux", f"{aux!r} are not names", limit=f"{MAX_AUX_NAMES} names")
    for name in names:
        if not 0 < len(name) <= _MAX_NAME_CHARS:
            raise BadInput("aux", f"a name of {len(name)} characters", limit=f"1 to {_MAX_NAME_CHARS} characters")
        check_text("aux", name)
        if name == "routing":
            raise BadInput("aux", "routing is asked for by an argument of its own", hint="routing=True")
    return names


def checked_version(version: Any) -> str:
    """A label as text: a string as it is, an integer from 0 on as its decimal digits. Raises BadInput."""
    if isinstance(version, int) and not isinstance(version, bool):
        if not 0 <= version < 1 << 63:
            raise BadInput("version", f"{version!r:.100} is out of range", limit="an integer from 0 to 2^63 - 1")
        return str(version)
    if not isinstance(version, str):
        raise BadInput("version", f"{version!r:.100} is neither text nor an integer")
    if not 0 < len(version) <= MAX_VERSION_CHARS:
        raise BadInput("version", f"has {len(version)} characters", limit=f"1 to {MAX_VERSION_CHARS} characters")
    check_text("version", version)
    return version


def checked_fingerprint(expected: Any) -> WeightsFingerprint | None:
    """What a caller expects of new weights: a fingerprint, its weights id alone, or None. Raises BadInput."""
    if expected is None:
        return None
    made = WeightsFingerprint(expected) if isinstance(expected, str) else expected
    if not isinstance(made, WeightsFingerprint):
        raise BadInput("expected", f"{type(expected).__name__} is no fingerprint", hint="give its 32 hex digits")
    # the struct's own fields are not checked where a caller makes it
    weights_id: Any = made.weights_id
    if not isinstance(weights_id, str) or not _FINGERPRINT.fullmatch(weights_id):
        raise BadInput("expected", f"{weights_id!r:.100} is no fingerprint", limit="32 lower-case hex digits")
    return made


def first_difference(one: WeightsFingerprint, other: WeightsFingerprint) -> str:
    """Name of the first tensor, by name, that differs or that one side lacks; "": none does, or a side tells none."""
    if not one.tensors or not other.tensors:
        return ""
    names = sorted(one.tensors.keys() | other.tensors.keys())
    return next((name for name in names if one.tensors.get(name) != other.tensors.get(name)), "")


def next_version(version: str) -> str:
    """The label that counts one up: the last run of digits plus one, as wide as it was ("step-09" to "step-10"); "-1"
    is appended where there are no digits. Raises BadInput if that is too long."""
    digits = _LAST_DIGITS.search(version)
    if digits is None:
        return checked_version(f"{version}-1")
    number = str(int(digits[0]) + 1).zfill(len(digits[0]))
    return checked_version(f"{version[: digits.start()]}{number}{version[digits.end() :]}")


def next_order(order: int, version: str) -> int:
    """The order of weights that come into use after weights of `order` (-1: there were none). A label that is a higher
    number of up to 14 digits is its own order; any other label's order is one higher."""
    number = int(version) if len(version) <= _MAX_NUMBER_DIGITS and _NUMBER.fullmatch(version) else 0
    return max(order + 1, number)


class SamplerSpec(msgspec.Struct, frozen=True, array_like=True):
    """How a runner samples for one sequence; a part of `SeqStart`. By default greedily, and asking for nothing else.

    Attributes:
        prompt_len: tokens before the first sampled one; penalties count output from here.
        seed, index: seed and sample index of the noise, which also depends on the token's position.
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, min_tokens: as in
            `SamplingParams`.
        stop_ids: ids masked while fewer than `min_tokens` tokens were sampled.
        raw, processed: which log-probs to compute.
        top: how many alternatives beside them.
        bias_ids, bias_values: token ids, int32 little-endian, each once, and what is added to the logit of each after
            the penalties, float32 little-endian; both empty without a bias.
        grammar: a `Grammar`, packed; empty: none. The scheduler passes it on and does not read it.
        processors: names and settings of logits processors, JSON (`SamplingParams.processors`); empty: none. Likewise.
        score_from: position of the first token of the prompt whose log-prob is wanted; -1: none is. At position 0
            there is none to compute.
        score_top: how many alternatives beside each of these log-probs.
        chosen_from: first position whose chosen positions are wanted, in memory that the runner was lent
            (`Runner.lend`); -1: none are.
        scores_hits: the runner scores tokens of cached blocks too, by the final hidden states that these have
            (`fdasync.cache.aux.FINAL_HIDDEN`).
    """

    prompt_len: int
    seed: int = 0
    index: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    raw: bool = False
    processed: bool = False
    top: int = 0
    bias_ids: bytes = b""
    bias_values: bytes = b""
    grammar: bytes = b""
    score_from: int = -1
    score_top: int = 0
    chosen_from: int = -1
    processors: bytes = b""
    scores_hits: bool = False

    def logit_bias(self) -> dict[int, float]:
        """The bias by token id, for a runner that samples one sequence at a time."""
        return dict(zip(array("i", self.bias_ids), array("f", self.bias_values), strict=True))
