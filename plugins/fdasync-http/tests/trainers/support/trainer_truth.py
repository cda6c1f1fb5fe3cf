"""Compares what a trainer decoded with the model's closed form: tokens, log-probs, every row, under any weights.

The synthetic model is a function of tokens and weights. A call that an update crossed has read the KV of two weights;
which position was computed under which follows from the spans of versions in its answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from fdasync import Routing, SamplingParams
from fdasync.result import CachedTokens, Sample, TopLogprobs, WeightSpan
from fdasync.runner.synthetic.oracle import Oracle
from fdasync.testing import check_sample
from fdasync.testing.harness.pass_model import Read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

OLD, NEW = 1, 77


class Call(NamedTuple):
    """One call to generate, decoded.

    Attributes:
        prompt, params: as they were sent, in the engine's words.
        tokens, logprobs, tops: of the output.
        rows: [positions - start, layers, top-k]; None: there are none.
        start: position of the first row.
        reason: "stop", "length" or "abort".
        spans: version, first output token and the one behind the last.
    """

    prompt: Sequence[int]
    params: SamplingParams
    tokens: Sequence[int]
    logprobs: Sequence[float]
    rows: NDArray[np.integer] | None
    start: int
    reason: str
    spans: Sequence[tuple[str, int, int]]
    tops: tuple[TopLogprobs, ...] | None = None

    @property
    def versions(self) -> list[str]:
        return [version for version, _, _ in self.spans]


class Truth:
    """See the module.

    Args:
        oracle: of the model under its first weights.

    Attributes:
        weights: id of the weights that each version names.
    """

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.weights = {"0": oracle.config.weights_id}

    @property
    def shape(self) -> tuple[int, int]:
        """Hidden layers and top-k: a trainer knows them from the model's configuration. All layers have experts."""
        return self.oracle.config.num_moe_layers, self.oracle.config.top_k

    def of(self, version: str) -> Oracle:
        """The model under these weights."""
        return Oracle(msgspec.structs.replace(self.oracle.config, weights_id=self.weights[version]))

    def check(self, call: Call, *, with_rows: bool) -> None:
        """Raise AssertionError unless a call, whose weights were the same all along, is right."""
        assert len(call.versions) <= 1, f"weights changed: {call.spans}"
        assert self._spans_cover(call)
        self._compare(call, self.of(call.versions[0] if call.versions else "0"), with_rows)

    def check_crossed(self, call: Call, *, with_rows: bool, recomputed: bool) -> None:
        """Raise AssertionError unless a call is right that ran when the weights changed.

        Args:
            recomputed: the pause took its blocks, so its KV is all new from then on; else it keeps the KV that it had.
        """
        assert self._spans_cover(call)
        versions = call.versions
        if len(versions) == 1 and versions[0] == min(self.weights):
            # it ended before
            self._compare(call, self.of(versions[0]), with_rows)
            return
        failed: AssertionError | None = None
        for boundary in self._boundaries(call):
            try:
                self._compare(call, self.oracle, with_rows, list(self._reads(call, boundary, recomputed)))
                return
            except AssertionError as error:
                failed = error
        assert failed is not None
        raise failed

    @staticmethod
    def _spans_cover(call: Call) -> bool:
        """Whether each token has one version."""
        ends = [0, *[end for _, _, end in call.spans]]
        return ends[-1] == len(call.tokens) and ends[:-1] == [start for _, start, _ in call.spans]

    @staticmethod
    def _boundaries(call: Call) -> Sequence[int]:
        """Positions that may be the first one computed under the new weights."""
        if len(call.versions) == 2:
            return (len(call.prompt) - 1 + call.spans[0][2],)
        # no token before the change, but a part of the prompt may have been computed
        return range(len(call.prompt))

    def _reads(self, call: Call, boundary: int, recomputed: bool) -> Iterator[Read]:
        old, new = self.weights.values()
        for position in range(len(call.prompt) + call.params.max_tokens):
            if position < boundary:
                yield Read((old,), old)
            elif recomputed:
                yield Read((new,), new)
            else:
                kv = [old] * boundary + [new] * (position + 1 - boundary)
                yield Read(tuple(kv), new)

    @staticmethod
    def _compare(call: Call, oracle: Oracle, with_rows: bool, seen: Sequence[Read] | None = None) -> None:
        logprobs = np.array(call.logprobs, np.float32)
        kinds = {"raw_logprobs": None, "processed_logprobs": None, f"{call.params.logprobs}_logprobs": logprobs}
        routing = None
        if call.rows is not None:
            found = call.rows.astype(oracle.row_dtype)
            # a narrower dtype holds the ids as well
            assert np.array_equal(found, call.rows)
            layers = tuple(range(oracle.config.num_moe_layers))
            num_experts = oracle.config.num_experts
            routing = Routing(array=found, start=call.start, layer_ids=layers, num_experts=num_experts)
        # what a call without any token brings is not told
        assert (routing is not None) == with_rows or not call.tokens, "rows are missing, or were not asked for"
        spans = tuple(WeightSpan(start, end, version) for version, start, end in call.spans)
        sample = Sample(
            index=0, token_ids=tuple(call.tokens), text="", top_logprobs=call.tops, finish_reason=call.reason,
            cached=CachedTokens(), weight_version=spans, routing=routing, aux={}, start=call.start, **kinds,
        )  # fmt: skip
        names = () if routing is None else ("routing",)
        check_sample(sample, call.prompt, call.params, oracle, start=call.start, names=names, seen=seen)
