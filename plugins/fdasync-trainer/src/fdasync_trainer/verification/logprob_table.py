"""Log-probs of tokens by request and position: of a rollout's results, or of a trainer.

A NaN where weights are named, of a token that was sampled, is a log-prob that is not a number: a bug, which comparisons
count. Another NaN says that nothing is told. Knows results of an engine, no models and no files. Called by
`logprob_file.py`, `logprob_compare.py`, `trainer.py` and users.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdasync.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fdasync.result import Result, Sample


class WeightsName(msgspec.Struct, frozen=True, array_like=True):
    """Weights that log-probs were computed with.

    Attributes:
        version: the caller's label.
        weights_id: their fingerprint, hex; "": not known.
    """

    version: str
    weights_id: str = ""


class ScoredSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of n tokens, and the log-probs of some of them. Arrays are owned by the caller.

    Attributes:
        request_id: the caller's name of the request.
        sample: number of the sample among the request's samples.
        token_ids: int32 [n], of prompt and output.
        prompt_len: tokens of the prompt.
        logprobs: float32 [n], natural: entry p is that of the token at position p, given those before it. NaN: not
            told; behind the prompt, where `weights` names some, a log-prob that is not a number.
        weights: int32 [n]: which of `LogprobTable.weights` the log-prob was computed with; -1: not told.
        temperature: that the logits were divided by; 1: the model's own distribution.
        digests: uint64 [n, layers], XXH3-64 of what each decoder layer put out at each position, as float32; None: not
            told.
    """

    request_id: str
    token_ids: NDArray[np.int32]
    prompt_len: int
    logprobs: NDArray[np.float32]
    weights: NDArray[np.int32]
    sample: int = 0
    temperature: float = 1.0
    digests: NDArray[np.uint64] | None = None

    @property
    def name(self) -> tuple[str, int]:
        return self.request_id, self.sample

    @property
    def told(self) -> NDArray[np.bool_]:
        """[n]: tokens that have a log-prob, those whose log-prob is not a number among them."""
        sampled = np.arange(len(self.logprobs)) >= max(self.prompt_len, 1)
        told: NDArray[np.bool_] = ~np.isnan(self.logprobs) | (sampled & (self.weights >= 0))
        return told


class LogprobTable(msgspec.Struct, frozen=True):
    """Sequences with log-probs, and the weights that they name.

    Attributes:
        sequences: of different names (request, sample).
        weights: that `ScoredSequence.weights` counts.
    """

    sequences: tuple[ScoredSequence, ...]
    weights: tuple[WeightsName, ...]

    @property
    def tokens(self) -> int:
        """Tokens that have a log-prob."""
        return sum(int(one.told.sum()) for one in self.sequences)


def rollout_logprobs(
    results: Iterable[Result], weights_ids: Mapping[str, str], temperatures: Mapping[str, float] | None = None
) -> LogprobTable:
    """The log-probs of the tokens that an engine or a router sampled.

    Args:
        results: of requests with raw log-probs, which are those of the model's logits; or with processed ones where
            `temperatures` names the request.
        weights_ids: fingerprints by weight version (`engine.capacity.weights_id`); versions without one are not known.
        temperatures: by request id, of requests that were sampled at a temperature and else unchanged: the log-probs
            of the distribution that was sampled from.

    Raises BadInput for a result without log-probs, and for two of one name.
    """
    numbers: dict[str, int] = {}
    sequences = []
    for result in results:
        temperature = (temperatures or {}).get(result.request_id)
        for sample in result.samples:
            values = sample.raw_logprobs if temperature is None else sample.processed_logprobs
            if values is None:
                kind = "raw" if temperature is None else "processed"
                raise BadInput("results", f"request {result.request_id} has no {kind} log-probs")
            tokens = np.array([*result.prompt_token_ids, *sample.token_ids], np.int32)
            prompt_len = len(result.prompt_token_ids)
            logprobs = np.full(len(tokens), np.nan, np.float32)
            logprobs[prompt_len:] = values
            one = ScoredSequence(
                request_id=result.request_id,
                sample=sample.index,
                token_ids=tokens,
                prompt_len=prompt_len,
                logprobs=logprobs,
                weights=_weights_of(sample, prompt_len, len(tokens), numbers),
                temperature=1.0 if temperature is None else temperature,
            )
            sequences.append(one)
    named = tuple(WeightsName(label, weights_ids.get(label, "")) for label in numbers)
    return checked(LogprobTable(tuple(sequences), named), "results")


def _weights_of(sample: Sample, prompt_len: int, count: int, numbers: dict[str, int]) -> NDArray[np.int32]:
    weights = np.full(count, -1, np.int32)
    for span in sample.weight_version:
        number = numbers.setdefault(span.version, len(numbers))
        weights[prompt_len + span.start : prompt_len + span.stop] = number
    return weights


def checked(table: LogprobTable, field: str) -> LogprobTable:
    """The table, if it can be compared and written. Raises BadInput naming `field` and the sequence."""
    names: set[tuple[str, int]] = set()
    layers: set[int] = set()
    for one in table.sequences:
        where = f"{field}: request {one.request_id} sample {one.sample}"
        if one.name in names:
            raise BadInput(where, "is there twice")
        names.add(one.name)
        count = len(one.token_ids)
        for name, array, dtype in (
            ("token_ids", one.token_ids, np.int32),
            ("logprobs", one.logprobs, np.float32),
            ("weights", one.weights, np.int32),
        ):
            if array.shape != (count,) or array.dtype != dtype:
                raise BadInput(
                    where, f"{name} is {array.dtype} {list(array.shape)}", limit=f"{dtype.__name__} [{count}]"
                )
        if not 0 <= one.prompt_len <= count:
            raise BadInput(where, f"{one.prompt_len} tokens of its {count} are the prompt's")
        wrong = one.weights[(one.weights < -1) | (one.weights >= len(table.weights))]
        if wrong.size:
            raise BadInput(where, f"names weights {int(wrong[0])} of {len(table.weights)}")
        if count and not np.isnan(one.logprobs[0]):
            raise BadInput(where, "has a log-prob at position 0, which nothing stands before")
        if not one.temperature > 0:
            raise BadInput(where, f"has temperature {one.temperature}")
        layers.add(-1 if one.digests is None else one.digests.shape[-1])
        if one.digests is not None and (one.digests.ndim != 2 or len(one.digests) != count):
            raise BadInput(where, f"has digests {list(one.digests.shape)} for {count} tokens")
    if len(layers) > 1:
        raise BadInput(field, "digests are of different numbers of layers, or only some sequences have them")
    return table
