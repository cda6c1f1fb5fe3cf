"""What a caller asks for: sampling parameters and the numbers a request lives by.

Pure data. Knows nothing of engines, text or tokenizers; read by prepare, scheduler, runners, output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fdasync.errors import BadInput
from fdasync.registry.mapping import struct_of

if TYPE_CHECKING:
    from collections.abc import Mapping

LogprobKind = Literal["none", "raw", "processed", "both"]

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_TOP_LOGPROBS = 64
#: as much as instances tell each other in one field
MAX_SALT_CHARS = 4096
#: where the vocabulary is not known: token ids are int32
MAX_VOCAB_SIZE = 1 << 31
MAX_AUX_NAMES = 64
_MAX_NAME_CHARS = 256


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample, and when to stop.

    Attributes:
        max_tokens: most new tokens, >= 1.
        min_tokens: EOS and stop ids cannot be sampled before this many new tokens.
        temperature: 0 is greedy; else the logits are divided by it, up to 100.
        top_k: keep the k largest logits; 0 keeps all.
        top_p: keep the smallest set whose probability reaches top_p, in (0, 1].
        min_p: drop what is less likely than min_p times the likeliest, in [0, 1].
        seed: below 2^63; noise depends on (seed, sample index, position) alone; None draws one at the door.
        repetition_penalty: 0.001 to 1000; divides positive and multiplies negative logits of tokens already in
            prompt or output (arXiv 1909.05858). 1 is off.
        presence_penalty, frequency_penalty: in [-2, 2]; subtracted once, or once per occurrence, for
            tokens in the output.
        n: samples of the one prompt, up to 1024 and the engine's `max_requests`.
        stop: strings that end the request; one may be given as it is ("ab" is the one stop string "ab"), and is a tuple
            of one from then on. Text from the match on is not returned; the tokens that complete the match are, as an
            EOS is (they were sampled and count for a trainer); tokens after it are dropped.
            What is text only at the end (U+FFFD of a character that is not complete) is searched at the end: a match
            makes "length" a "stop".
        stop_token_ids: token ids that end the request; the id is kept in the result, as EOS is.
        ignore_eos: EOS ids of the model do not stop.
        logprobs: "raw" = log-softmax of the model's logits (float32); "processed" = the same after
            penalties, temperature and filters, the distribution that was sampled from; "both"; "none".
        top_logprobs: this many best alternatives beside each sampled token, of the kind asked for
            (raw where both).
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: LogprobKind = "none"
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Checked parameters from plain values (parsed JSON, say). `SamplingParams(**values)` means the same, but is
        checked only where a request is made with it.

        Raises BadInput naming the first field that makes no sense, or that is unknown, and the nearest that is not.
        What depends on a model's vocabulary is checked where the request is made.
        """
        params = struct_of(cls, values, whole="params")
        params._check(MAX_VOCAB_SIZE)
        return params

    def validated(self, *, vocab_size: int) -> SamplingParams:
        """A checked copy that shares nothing the caller could change (a list given for `stop`, say).

        Raises BadInput naming the first field that makes no sense. Types are checked too.
        """
        copy = struct_of(SamplingParams, msgspec.structs.asdict(self), whole="params")
        copy._check(vocab_size)
        return copy

    def _check(self, vocab_size: int) -> None:
        _at_least("max_tokens", self.max_tokens, 1)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_k", self.top_k, 0, vocab_size)
        _within("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise BadInput("top_p", "must be above 0", limit="(0, 1]", hint="use temperature=0 for greedy")
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("n", self.n, 1, 1024)
        _within("top_logprobs", self.top_logprobs, 0, min(MAX_TOP_LOGPROBS, vocab_size))
        if self.seed is not None:
            _within("seed", self.seed, 0, 2**63 - 1)
        if self.top_logprobs and self.logprobs == "none":
            raise BadInput("top_logprobs", "needs logprobs", hint='set logprobs="raw" or "processed"')
        if len(self.stop) > MAX_STOP_STRINGS:
            raise BadInput("stop", f"{len(self.stop)} strings", limit=MAX_STOP_STRINGS)
        for text in self.stop:
            if not text or len(text) > MAX_STOP_CHARS:
                raise BadInput("stop", f"a stop string of {len(text)} characters", limit=f"1 to {MAX_STOP_CHARS}")
            check_text("stop", text)
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise BadInput("stop_token_ids", f"{token} is outside the vocabulary", limit=f"0 to {vocab_size - 1}")


def _within(field: str, value: float, low: float, high: float) -> None:
    # `not (...)` so that NaN is refused as well
    if not (low <= value <= high) or not math.isfinite(value):
        raise BadInput(field, f"{value!r} is out of range", limit=f"{low} to {high}")


def _at_least(field: str, value: int, low: int) -> None:
    if value < low:
        raise BadInput(field, f"{value!r} is too small", limit=f"at least {low}")


def check_text(field: str, text: str) -> None:
    """Raise BadInput for text that has no bytes: no trace, message or tokenizer could hold it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            field, f"has a lone surrogate at character {error.start}", hint="it is not valid Unicode text"
        ) from None


def checked_aux(aux: Any) -> bool | tuple[str, ...] | None:
    """A copy of what a caller asks for besides routing. Raises BadInput for what is no such thing; whether there are
    such rows is another question."""
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


class SamplerSpec(msgspec.Struct, frozen=True, array_like=True):
    """What a runner needs to sample for one sequence; travels with `SeqStart`.

    Attributes:
        prompt_len: tokens before the first sampled one; penalties count output from here.
        seed, index: of the noise, with the token's position.
        stop_ids: ids masked while fewer than `min_tokens` tokens were sampled.
        raw, processed: which log-probs to compute; `top` alternatives beside them.
    """

    prompt_len: int
    seed: int
    index: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    stop_ids: tuple[int, ...]
    raw: bool
    processed: bool
    top: int
