"""A result as messages, and messages as a result: what a caller of a router gets is what an engine's caller gets.

Rows travel beside the rest, in runs no longer than a link takes (`Rows`), before the `Ended` that counts them. Pure.
Used by `answers.py` and `router.py`.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from fdasync.cache.aux import AuxSpec
from fdasync.errors import ProtocolError
from fdasync.pd.messages import MAX_PAYLOAD_NBYTES, Ended, Rows, SampleEnd
from fdasync.result import CachedTokens, Delta, Result, Routing, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from fdasync.pd.messages import Facts, Piece

_ROUTING = "routing"


def row_messages(name: str, result: Result) -> Iterator[tuple[Rows, memoryview]]:
    """All rows of a result, in order, each run with its bytes (views of the result's arrays)."""
    for sample in result.samples:
        for spec, rows in _arrays(sample):
            row_nbytes = rows[:1].nbytes or 1
            most = max(MAX_PAYLOAD_NBYTES // row_nbytes, 1)
            for first in range(0, len(rows), most):
                run = np.ascontiguousarray(rows[first : first + most])
                words = Rows(name, sample.index, spec.name, first, len(run))
                yield words, run.view(np.uint8).reshape(-1).data


def ended_message(name: str, result: Result) -> Ended:
    """Everything but the rows."""
    samples = []
    for sample in result.samples:
        arrays = _arrays(sample)
        samples.append(
            SampleEnd(
                token_ids=array("i", sample.token_ids).tobytes(),
                text=sample.text,
                raw=None if sample.raw_logprobs is None else sample.raw_logprobs.astype("<f4").tobytes(),
                processed=None
                if sample.processed_logprobs is None
                else sample.processed_logprobs.astype("<f4").tobytes(),
                top=sample.top_logprobs,
                finish_reason=sample.finish_reason,
                cached=(sample.cached.device, sample.cached.host, sample.cached.store),
                versions=sample.weight_version,
                stop_token_id=sample.stop_token_id,
                num_rows=len(arrays[0][1]) if arrays else None,
                aux=tuple([spec for spec, _ in arrays]),
            )
        )
    return Ended(name, array("i", result.prompt_token_ids).tobytes(), tuple(samples))


def _arrays(sample: Sample) -> list[tuple[AuxSpec, NDArray[Any]]]:
    arrays: dict[str, NDArray[Any]] = {}
    if sample.routing is not None:
        arrays[_ROUTING] = sample.routing.array
    arrays.update(sample.aux)
    return [(AuxSpec(name, rows.shape[1:], rows.dtype.name), rows) for name, rows in arrays.items()]


class Incoming:
    """Rows of one request as they come; `result` makes the whole of them.

    Args:
        specs: of the instance that sends them, as its handshake said; nothing else is taken.
        most_rows: that one sample can have.
    """

    def __init__(self, specs: Sequence[AuxSpec], samples: int, most_rows: int) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._samples = samples
        self._most_rows = most_rows
        self._runs: dict[tuple[int, str], list[NDArray[Any]]] = {}
        self._counts: dict[tuple[int, str], int] = {}

    def add(self, message: Rows, payload: bytes | memoryview | None) -> None:
        """Raises ProtocolError for rows that are not the next ones, or are not what they are said to be."""
        place = message.index, message.name
        spec = self._specs.get(message.name)
        have = self._counts.get(place, 0)
        if spec is None or message.index >= self._samples or message.first != have or payload is None:
            raise ProtocolError(f"rows {message.first} of {message.name!r} of sample {message.index} were not expected")
        if have + message.count > self._most_rows or len(payload) != message.count * spec.token_nbytes:
            raise ProtocolError(f"{message.count} rows of {message.name!r} in {len(payload)} bytes")
        rows = np.frombuffer(payload, spec.dtype).reshape(message.count, *spec.shape)
        self._runs.setdefault(place, []).append(rows)
        self._counts[place] = have + message.count

    def result(self, message: Ended, request_id: str, facts: Facts, start: int) -> Result:
        """The result that these rows and this message are. Raises ProtocolError where they do not fit together."""
        if len(message.samples) != self._samples:
            raise ProtocolError(f"{len(message.samples)} samples came, {self._samples} were asked for")
        samples = tuple([self._sample(index, end, facts, start) for index, end in enumerate(message.samples)])
        return Result(request_id=request_id, prompt_token_ids=_tokens(message.prompt), samples=samples)

    def _sample(self, index: int, end: SampleEnd, facts: Facts, start: int) -> Sample:
        aux = {spec.name: self._rows(index, spec, end.num_rows or 0) for spec in end.aux}
        routing = aux.pop(_ROUTING, None)
        tokens = _tokens(end.token_ids)
        return Sample(
            index=index,
            token_ids=tokens,
            text=end.text,
            raw_logprobs=_floats(end.raw, len(tokens)),
            processed_logprobs=_floats(end.processed, len(tokens)),
            top_logprobs=end.top,
            finish_reason=end.finish_reason,
            cached=CachedTokens(*end.cached),
            weight_version=end.versions,
            routing=None
            if routing is None
            else Routing(
                array=routing,
                start=start,
                layer_ids=facts.moe_layer_ids,
                num_experts=facts.num_experts,
                top_k_by_layer=facts.top_k_by_layer,
            ),
            aux=aux,
            stop_token_id=end.stop_token_id,
        )

    def _rows(self, index: int, spec: AuxSpec, count: int) -> NDArray[Any]:
        known = self._specs.get(spec.name)
        have = self._counts.get((index, spec.name), 0)
        if known != spec or have != count:
            raise ProtocolError(f"{have} rows of {spec.name!r} of sample {index} came, {count} were counted")
        runs = self._runs.pop((index, spec.name), [])
        if not runs:
            return np.empty((0, *spec.shape), spec.dtype)
        # a copy of its own: the caller owns it, and may write to it
        return np.concatenate(runs) if len(runs) > 1 else runs[0].copy()


def delta_of(piece: Piece) -> Delta:
    """What a caller reads."""
    return Delta(
        index=piece.index,
        token_ids=piece.token_ids,
        text=piece.text,
        raw_logprobs=piece.raw_logprobs,
        processed_logprobs=piece.processed_logprobs,
        top_logprobs=piece.top_logprobs,
        finish_reason=piece.finish_reason,
    )


def _tokens(data: bytes) -> tuple[int, ...]:
    if len(data) % 4:
        raise ProtocolError(f"{len(data)} bytes are no token ids")
    return tuple(array("i", data))


def _floats(data: bytes | None, count: int) -> NDArray[np.float32] | None:
    if data is None:
        return None
    if len(data) != 4 * count:
        raise ProtocolError(f"{len(data)} bytes of log-probs for {count} tokens")
    return np.frombuffer(data, "<f4").astype(np.float32)
