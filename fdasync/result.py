"""The results of a request: deltas while it runs, one result at its end.

Pure data, which knows no other module of the package. The engine and the router make results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    # a third of what the start of a transfer process takes, which has no arrays
    import numpy as np  # noqa: TC004
    from numpy.typing import NDArray  # noqa: TC004

#: How a sample ended. Callers see the first four, and "failed" in a partial result. Between instances a prefill side
#: ends its part as "handed_over", "no_lease" or "never_lease", a decode side as "lease_lost" (`FinishRequest`).
FinishReason = Literal[
    "stop", "length", "abort", "deadline", "failed", "handed_over", "no_lease", "never_lease", "lease_lost"
]
#: how a request that is handed over in part may end for all instances that have samples of it; "": in no such way
PartEnd = Literal["", "abort", "deadline"]


class TopLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The best alternatives at one position.

    Attributes:
        token_ids: best first.
        logprobs: of each token id.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """Expert routing of a contiguous run of positions; row i belongs to position `start + i`.

    A finished sample has `len(prompt) + len(token_ids) - 1 - start` rows: the last token was never forwarded.

    Attributes:
        array: [n, num_moe_layers, top_k], uint8 up to 256 experts, else uint16; logical expert ids in the router's
            order, so rows are compared as sets. Owned by the caller.
        start: absolute position of the first row.
        layer_ids: hidden-layer numbers along the second axis.
        num_experts: all ids are below it.
        top_k_by_layer: how many leading columns count in each layer; None: all, in every layer.
    """

    array: NDArray[np.generic]
    start: int
    layer_ids: tuple[int, ...]
    num_experts: int
    top_k_by_layer: tuple[int, ...] | None = None


class ChosenPositions(msgspec.Struct, frozen=True, kw_only=True):
    """The positions that indexers chose for a contiguous run of tokens, and attention read; row i belongs to the token
    at position `start + i`.

    A finished sample has `len(prompt) + len(token_ids) - 1 - start` rows: the last token was never forwarded.

    Attributes:
        array: int32 [n, layers, top_k], the best first, -1 behind the last where there are fewer. Owned by the caller.
        start: absolute position of the first row.
        layer_ids: hidden-layer numbers along the second axis: of the layers that have an indexer of their own. Where
            layers share one (glm_moe_dsa), the others read the positions of the nearest such layer before them, which
            are not repeated.
    """

    array: NDArray[np.int32]
    start: int
    layer_ids: tuple[int, ...]


class WeightSpan(msgspec.Struct, frozen=True):
    """Output tokens that were sampled with one set of weights, under one label.

    Attributes:
        start, stop: the tokens [start, stop).
        version: the caller's label of the weights, which may have named other weights before, or name others later.
        weights_id: what the weights are, whatever their label: 32 hex digits (docs/design.md, rule 1). "": not known.
    """

    start: int
    stop: int
    version: str
    weights_id: str = ""


class CachedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens that were not computed at a sample's first admission, by the tier that had them.

    Attributes:
        device, host, store: tokens found there.
    """

    device: int = 0
    host: int = 0
    store: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.store


class DraftCounts(msgspec.Struct, frozen=True):
    """What drafts did for a sample, in an engine that has a drafter, or a runner with one; of both together.

    Attributes:
        steps: decode steps that gave tokens of it. Its output tokens over these steps are the tokens of a step.
        drafted: drafts that the runner forwarded, as far as the tokens tell.
        accepted: drafts that equalled the token sampled in their place, also behind the sample's last token.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0


class Usage(msgspec.Struct, frozen=True):
    """The cost of a request in tokens.

    Attributes:
        prompt_tokens: tokens of the prompt, counted once for all samples; 0: the request ended before its text was
            tokenised.
        cached_tokens: prompt tokens that came from a cache of any tier or instance for every sample. Tokens that one
            sample computed and others found do not count, so with `n` above 1 a sample's own `cached_tokens` may be
            higher.
        completion_tokens: `token_ids` of all samples together, with the EOS or stop ids that ended them.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The new tokens of one sample. A slow reader gets fewer, longer deltas; no token is lost.

    Attributes:
        index: number of the sample.
        token_ids: new tokens. All deltas of a sample joined are the result's `token_ids`.
        text: new text that cannot change any more; "" without a tokenizer.
        raw_logprobs, processed_logprobs: of the new tokens, if `SamplingParams.logprobs` asks for them; else None.
        top_logprobs: alternatives at the new tokens, if `SamplingParams.top_logprobs` asks for them; else None.
        finish_reason: stop, length, abort or deadline in a sample's last delta; None before.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str = ""
    raw_logprobs: tuple[float, ...] | None = None
    processed_logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[TopLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a request: whole, or its part so far if it was aborted or failed.

    Attributes:
        index: number of the sample.
        token_ids: sampled tokens, with the EOS or stop id that ended them.
        text: decoded, cut before a matched stop string; "" without a tokenizer.
        raw_logprobs: float32 [len(token_ids)] log-softmax of the model's logits, or None.
        processed_logprobs: the same after penalties, bias, temperature and filters, or None.
        top_logprobs: alternatives at each token, or None.
        finish_reason: stop, length, abort, deadline; "failed" in `EngineFailed.partial`.
        stop_token_id: the EOS or stop id that ended it, or None.
        stop_string: the stop string that ended it; "": none did.
        cached: prompt tokens that were not computed for it, by the tier that had them.
        weight_version: spans of output tokens by weight version and weights id.
        routing: expert routing; None: it was not captured, or not requested.
        aux: rows of every other aux spec that was requested, by name, [n, *shape] of the spec's dtype; as many as of
            `routing`, row i belongs to position `start + i`. Owned by the caller.
        start: position of the first row of any kind, as requested.
        drafts: what drafts did for it, on the instance that decoded it; None: that one has no drafter.
        chosen_positions: what indexers chose for its tokens, if `SamplingParams.chosen_positions_start` asks for it;
            else None.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    raw_logprobs: NDArray[np.float32] | None
    processed_logprobs: NDArray[np.float32] | None
    top_logprobs: tuple[TopLogprobs | None, ...] | None
    finish_reason: FinishReason
    cached: CachedTokens
    weight_version: tuple[WeightSpan, ...]
    routing: Routing | None
    aux: dict[str, NDArray[np.generic]]
    start: int = 0
    stop_token_id: int | None = None
    drafts: DraftCounts | None = None
    chosen_positions: ChosenPositions | None = None
    stop_string: str = ""

    @property
    def stop_reason(self) -> int | str | None:
        """What ended it: the EOS or stop id, or the stop string; None: neither did. A string goes before the id of the
        token that completes it."""
        return self.stop_string or self.stop_token_id

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache, in any tier."""
        return self.cached.total

    @property
    def logprobs(self) -> NDArray[np.float32] | None:
        """The raw log-probs; the processed ones if only those were requested."""
        return self.processed_logprobs if self.raw_logprobs is None else self.raw_logprobs


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request. Attributes of a sample can be read off the result: it has sample 0's.

    Attributes:
        request_id: as given or drawn.
        prompt_token_ids: the prompt's tokens; (): the request ended before its text was tokenised.
        samples: one for each of `n`, by index.
        ttft_s: from the call to the first token of any sample, in seconds; None: no token came, or tokens were only
            counted at the end (`complete` without log-probs or stop strings).
        prompt_logprobs: float32 [prompt - `SamplingParams.prompt_logprobs_start`], log-softmax of the model's logits:
            entry i belongs to the prompt's token at position start + i, and is NaN at position 0. A request that ended
            before its prompt was computed has the leading part. None: not requested, or a router ended the request
            itself. Owned by the caller.
        prompt_top_logprobs: alternatives at those positions, None at position 0; None: not requested.
        total_s: from the call to the end, in seconds.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    ttft_s: float | None = None
    total_s: float = 0.0
    prompt_logprobs: NDArray[np.float32] | None = None
    prompt_top_logprobs: tuple[TopLogprobs | None, ...] | None = None

    @property
    def usage(self) -> Usage:
        """Tokens of the whole request, all samples together."""
        # a sample without tokens may have ended before it was ever matched: its count says nothing of the cache
        begun = [sample for sample in self.samples if sample.token_ids] or self.samples
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            cached_tokens=min((sample.cached_tokens for sample in begun), default=0),
            completion_tokens=sum(len(sample.token_ids) for sample in self.samples),
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def logprobs(self) -> NDArray[np.float32] | None:
        return self.samples[0].logprobs

    @property
    def drafts(self) -> DraftCounts | None:
        return self.samples[0].drafts

    @property
    def raw_logprobs(self) -> NDArray[np.float32] | None:
        return self.samples[0].raw_logprobs

    @property
    def processed_logprobs(self) -> NDArray[np.float32] | None:
        return self.samples[0].processed_logprobs

    @property
    def top_logprobs(self) -> tuple[TopLogprobs | None, ...] | None:
        return self.samples[0].top_logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def stop_token_id(self) -> int | None:
        return self.samples[0].stop_token_id

    @property
    def stop_string(self) -> str:
        return self.samples[0].stop_string

    @property
    def stop_reason(self) -> int | str | None:
        return self.samples[0].stop_reason

    @property
    def cached_tokens(self) -> int:
        return self.samples[0].cached_tokens

    @property
    def cached(self) -> CachedTokens:
        return self.samples[0].cached

    @property
    def weight_version(self) -> tuple[WeightSpan, ...]:
        return self.samples[0].weight_version

    @property
    def routing(self) -> Routing | None:
        return self.samples[0].routing

    @property
    def aux(self) -> dict[str, NDArray[np.generic]]:
        return self.samples[0].aux

    @property
    def chosen_positions(self) -> ChosenPositions | None:
        return self.samples[0].chosen_positions

    @property
    def start(self) -> int:
        return self.samples[0].start
