"""Turns the samples of a `Result` into messages, and such messages back into equal samples and an equal `Result`.

Rows and tokens travel in runs no longer than a link takes (`Rows`, `Outputs`), before the `SampleEnd` that counts them,
so a sample may have any size. Pure: knows no link and no caller. `instance/result_sender.py` and
`instance/token_streams.py` make messages with it, `router/dispatch.py` reads them.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from fdasync.cache.aux import ROUTING, AuxSpec
from fdasync.errors import InvariantBroken, ProtocolError
from fdasync.result import CachedTokens, Delta, DraftCounts, Result, Routing, Sample
from fdasync.runner.base import PromptScores
from fdasync.runner.prompt_scores import PromptLogprobs
from fdasync_fleet.messages import MAX_PAYLOAD_NBYTES, Answered, Outputs, PromptTokens, Rows, SampleEnd, ScoredPrompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from fdasync.request import SamplingParams
    from fdasync.runner.facts import ModelFacts
    from fdasync_fleet.messages import Message, Piece

#: tokens of a run; with 20 alternatives for each, a run takes some 2 MB
RUN_TOKENS = 8192
#: characters of a run's text
RUN_CHARS = 1 << 20
# no token is longer
_MAX_TOKEN_CHARS = 256
_KINDS = ("raw", "processed", "top")


def sample_messages(name: str, sample: Sample) -> Iterator[tuple[Message, memoryview | None]]:
    """A sample that has ended: its rows with their bytes (views of the sample's arrays), its output, its end."""
    arrays = _arrays(sample)
    for spec, rows in arrays:
        row_nbytes = rows[:1].nbytes or 1
        most = max(MAX_PAYLOAD_NBYTES // row_nbytes, 1)
        for first in range(0, len(rows), most):
            run = np.ascontiguousarray(rows[first : first + most])
            words = Rows(request=name, index=sample.index, name=spec.name, start=sample.start + first, count=len(run))
            yield words, run.view(np.uint8).reshape(-1).data
    for outputs in _outputs(name, sample):
        yield outputs, None
    yield _end(name, sample, arrays), None


def answer_message(name: str, sample: Sample) -> Answered | None:
    """A request with this sample alone as one message; None: it has rows, or more than a run."""
    if len(sample.token_ids) > RUN_TOKENS or len(sample.text) > RUN_CHARS or _arrays(sample):
        return None
    (outputs,) = _outputs(name, sample)
    return Answered(name, outputs, _end(name, sample, []))


def _end(name: str, sample: Sample, arrays: list[tuple[AuxSpec, NDArray[Any]]]) -> SampleEnd:
    return SampleEnd(
        name,
        sample.index,
        num_tokens=len(sample.token_ids),
        finish_reason=sample.finish_reason,
        cached=(sample.cached.device, sample.cached.host, sample.cached.store),
        versions=sample.weight_version,
        stop_token_id=sample.stop_token_id,
        num_rows=len(arrays[0][1]) if arrays else None,
        aux=tuple([spec for spec, _ in arrays]),
        drafts=None if (drafts := sample.drafts) is None else (drafts.steps, drafts.drafted, drafts.accepted),
        stop_string=sample.stop_string,
    )


def _outputs(name: str, sample: Sample) -> Iterator[Outputs]:
    """Tokens, text and log-probs of a sample, in runs."""
    count, chars = len(sample.token_ids), len(sample.text)
    for number in range(max(-(-count // RUN_TOKENS), -(-chars // RUN_CHARS), 1)):
        first, start = number * RUN_TOKENS, number * RUN_CHARS
        run = slice(first, first + RUN_TOKENS)
        raw, processed, top = sample.raw_logprobs, sample.processed_logprobs, sample.top_logprobs
        yield Outputs(
            request=name,
            index=sample.index,
            first=min(first, count),
            token_ids=array("i", sample.token_ids[run]).tobytes(),
            text=sample.text[start : start + RUN_CHARS],
            raw=None if raw is None else raw[run].astype("<f4").tobytes(),
            processed=None if processed is None else processed[run].astype("<f4").tobytes(),
            top=None if top is None else top[run],
        )


def prompt_message(name: str, token_ids: Sequence[int]) -> PromptTokens:
    """The tokens of a prompt."""
    return PromptTokens(name, array("i", token_ids).tobytes())


def prompt_logprobs_of(params: SamplingParams) -> PromptLogprobs | None:
    """Collects the log-probs of a prompt; None: these parameters ask for none."""
    return PromptLogprobs.wanted(params.prompt_logprobs_start, params.prompt_top_logprobs)


def score_messages(name: str, attempt: int, scores: PromptLogprobs) -> Iterator[ScoredPrompt]:
    """The log-probs of a prompt so far, in runs."""
    for run in scores.runs(RUN_TOKENS):
        yield ScoredPrompt(
            request=name,
            attempt=attempt,
            first=run.start,
            logprobs=run.logprobs,
            top=run.top,
            top_ids=run.top_ids,
            top_logprobs=run.top_logprobs,
        )


def add_scores(scores: PromptLogprobs | None, message: ScoredPrompt, most: int, vocab_size: int) -> None:
    """Add a run to the log-probs of a prompt of at most so many tokens. Raises ProtocolError for a run that is not the
    next one, or makes no sense."""
    run = PromptScores(
        key=0,
        start=message.first,
        logprobs=message.logprobs,
        top=message.top,
        top_ids=message.top_ids,
        top_logprobs=message.top_logprobs,
    )
    if scores is None or message.first != scores.stop or message.first + run.count > most or not run.count:
        raise ProtocolError(f"log-probs of {run.count} tokens of the prompt from {message.first} on were not expected")
    if len(message.top_ids) % 4 == 0:
        ids = np.frombuffer(message.top_ids, "<i4")
        if ((ids < -1) | (ids >= vocab_size)).any():
            raise ProtocolError("alternatives in a prompt are outside the vocabulary")
    try:
        scores.add(run)
    except InvariantBroken as error:
        raise ProtocolError(str(error)) from None


def _arrays(sample: Sample) -> list[tuple[AuxSpec, NDArray[Any]]]:
    arrays: dict[str, NDArray[Any]] = {}
    if sample.routing is not None:
        arrays[ROUTING] = sample.routing.array
    arrays.update(sample.aux)
    return [(AuxSpec(name, rows.shape[1:], rows.dtype.name), rows) for name, rows in arrays.items()]


class Incoming:
    """Collects the rows and outputs of one request, and makes samples and a `Result` of them.

    Args:
        specs: the aux specs whose rows were asked for; rows of other specs are refused.
        samples: number of samples.
        most_rows: the most rows, and the most tokens, that one sample can have.
        start: position of each sample's first row, as it was asked for.
        scores: collects the log-probs of the prompt; None: none were asked for.
    """

    __slots__ = (
        "_chars",
        "_counts",
        "_most_rows",
        "_outputs",
        "_runs",
        "_samples",
        "_scores",
        "_specs",
        "_start",
        "_tokens",
        "_whole",
    )

    def __init__(
        self,
        specs: Sequence[AuxSpec],
        samples: int,
        most_rows: int,
        start: int,
        scores: PromptLogprobs | None = None,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._samples = samples
        self._most_rows = most_rows
        self._start = start
        self._scores = scores
        self._runs: dict[tuple[int, str], list[NDArray[Any]]] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._outputs: dict[int, list[Outputs]] = {}
        self._tokens: dict[int, int] = {}
        self._chars: dict[int, int] = {}
        self._whole: dict[int, Sample] = {}

    def add_outputs(self, message: Outputs) -> None:
        """Raises ProtocolError for a run that is not the next one, or has more tokens or text than a sample can."""
        index, count = message.index, len(message.token_ids) // 4
        have = self._tokens.get(index, 0)
        chars = self._chars.get(index, 0) + len(message.text)
        is_over = index >= self._samples or index in self._whole
        if is_over or message.first != have or len(message.token_ids) % 4:
            raise ProtocolError(f"tokens {message.first} of sample {index} were not expected")
        if have + count > self._most_rows or chars > self._most_rows * _MAX_TOKEN_CHARS:
            raise ProtocolError(f"{have + count} tokens and {chars} characters of sample {index} cannot be")
        for values in (message.raw, message.processed):
            if values is not None and len(values) != 4 * count:
                raise ProtocolError(f"{len(values)} bytes of log-probs for {count} tokens")
        if message.top is not None and len(message.top) != count:
            raise ProtocolError(f"{len(message.top)} alternatives for {count} tokens")
        runs = self._outputs.setdefault(index, [])
        if runs and any((getattr(runs[0], name) is None) != (getattr(message, name) is None) for name in _KINDS):
            raise ProtocolError(f"the runs of sample {index} do not fit together")
        runs.append(message)
        self._tokens[index], self._chars[index] = have + count, chars

    def add(self, message: Rows, payload: bytes | memoryview | None) -> None:
        """Raises ProtocolError for rows that are not the next ones, or whose bytes do not fit their spec and count."""
        place = message.index, message.name
        spec = self._specs.get(message.name)
        have = self._counts.get(place, 0)
        is_over = message.index >= self._samples or message.index in self._whole
        if spec is None or is_over or payload is None:
            raise ProtocolError(f"rows of {message.name!r} of sample {message.index} were not expected")
        if message.start != self._start + have:
            raise ProtocolError(
                f"rows of position {message.start} of {message.name!r} came for sample {message.index}, whose next row "
                f"is that of position {self._start + have}"
            )
        if have + message.count > self._most_rows or len(payload) != message.count * spec.token_nbytes:
            raise ProtocolError(f"{message.count} rows of {message.name!r} in {len(payload)} bytes")
        rows = np.frombuffer(payload, spec.dtype).reshape(message.count, *spec.shape)
        self._runs.setdefault(place, []).append(rows)
        self._counts[place] = have + message.count

    def add_scores(self, message: ScoredPrompt, vocab_size: int) -> None:
        """Raises ProtocolError for log-probs that are not the next ones, or make no sense."""
        add_scores(self._scores, message, self._most_rows, vocab_size)

    def result(self, request_id: str, prompt: tuple[int, ...]) -> Result:
        """The result of all samples. Raises ProtocolError where some are missing, or do not fit the prompt."""
        if len(self._whole) != self._samples:
            raise ProtocolError(f"{len(self._whole)} samples came, {self._samples} were asked for")
        samples, scores = tuple([self._whole[index] for index in range(self._samples)]), self._scores
        if scores is not None and samples[0].token_ids and scores.stop != len(prompt):
            raise ProtocolError(f"log-probs of the prompt's tokens up to {scores.stop} came, it has {len(prompt)}")
        return Result(
            request_id=request_id,
            prompt_token_ids=prompt,
            samples=samples,
            prompt_logprobs=None if scores is None else scores.values(),
            prompt_top_logprobs=None if scores is None else scores.alternatives(),
        )

    def add_end(self, end: SampleEnd, facts: ModelFacts) -> Sample:
        """A sample, of its runs and this message. Raises ProtocolError where they do not fit together."""
        index = end.index
        if index >= self._samples or index in self._whole:
            raise ProtocolError(f"the end of sample {index} of {self._samples} was not expected")
        sample = self._whole[index] = self._sample(index, end, facts)
        return sample

    def _sample(self, index: int, end: SampleEnd, facts: ModelFacts) -> Sample:
        if {spec.name for spec in end.aux} != self._specs.keys():
            came, wanted = [spec.name for spec in end.aux], list(self._specs)
            raise ProtocolError(f"rows of {came} of sample {index} came, rows of {wanted} were asked for")
        aux = {spec.name: self._rows(index, spec, end.num_rows or 0) for spec in end.aux}
        routing = aux.pop(ROUTING, None)
        runs = self._outputs.pop(index, [])
        if not runs or self._tokens[index] != end.num_tokens:
            raise ProtocolError(f"{self._tokens.get(index, 0)} tokens of sample {index} came, of {end.num_tokens}")
        return Sample(
            index=index,
            token_ids=tokens_of(b"".join([run.token_ids for run in runs])),
            text="".join([run.text for run in runs]),
            raw_logprobs=_floats([run.raw for run in runs]),
            processed_logprobs=_floats([run.processed for run in runs]),
            top_logprobs=None if runs[0].top is None else tuple([one for run in runs for one in run.top or ()]),
            finish_reason=end.finish_reason,
            cached=CachedTokens(*end.cached),
            weight_version=end.versions,
            routing=None
            if routing is None
            else Routing(
                array=routing,
                start=self._start,
                layer_ids=facts.moe_layer_ids,
                num_experts=facts.num_experts,
                top_k_by_layer=facts.top_k_by_layer,
            ),
            aux=aux,
            start=self._start,
            stop_token_id=end.stop_token_id,
            drafts=None if end.drafts is None else DraftCounts(*end.drafts),
            stop_string=end.stop_string,
        )

    def _rows(self, index: int, spec: AuxSpec, count: int) -> NDArray[Any]:
        known = self._specs.get(spec.name)
        have = self._counts.get((index, spec.name), 0)
        if known != spec or have != count:
            raise ProtocolError(f"{have} rows of {spec.name!r} of sample {index} came, {count} were counted")
        runs = self._runs.pop((index, spec.name), [])
        if not runs:
            return np.empty((0, *spec.shape), spec.dtype)
        # the caller owns the array and may write to it
        return np.concatenate(runs) if len(runs) > 1 else runs[0].copy()


def delta_of(piece: Piece) -> Delta:
    """The caller's form of a piece: its fields without the request's name."""
    return Delta(
        index=piece.index,
        token_ids=piece.token_ids,
        text=piece.text,
        raw_logprobs=piece.raw_logprobs,
        processed_logprobs=piece.processed_logprobs,
        top_logprobs=piece.top_logprobs,
        finish_reason=piece.finish_reason,
    )


def tokens_of(data: bytes) -> tuple[int, ...]:
    """Token ids of a message. Raises ProtocolError."""
    if len(data) % 4:
        raise ProtocolError(f"{len(data)} bytes are no token ids")
    return tuple(array("i", data))


def _floats(runs: list[bytes | None]) -> NDArray[np.float32] | None:
    known = [run for run in runs if run is not None]
    return np.frombuffer(b"".join(known), "<f4").astype(np.float32) if known else None
