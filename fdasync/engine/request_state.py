"""A live request inside an engine: its reader and its end, and the outputs of its samples as they grow.

The frontend makes a request's state, the output stage fills its samples (tokens, log-probs, text with stop strings,
rows), a stream or an instance reads deltas and the result. Text is final once given out: an incomplete character, and
text that could begin a stop string, are held back. Knows no blocks and no scheduling. Called by `frontend.py`,
`output.py`, `stream.py` and `fdasync_fleet/instance`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from fdasync.cache.aux import ROUTING
from fdasync.engine.stop_search import StopSearch
from fdasync.engine.tokenizer import IncrementalDecoder
from fdasync.errors import PLUGIN_ERRORS
from fdasync.events.catalog import RequestEnded
from fdasync.result import CachedTokens, Delta, DraftCounts, FinishReason, Result, Routing, Sample, WeightSpan
from fdasync.runner.prompt_scores import PromptLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from fdasync.cache.aux import AuxSpec
    from fdasync.engine.chosen_output import ChosenOutput
    from fdasync.engine.tokenizer import TokenKinds
    from fdasync.events.actions import FinishRequest
    from fdasync.events.catalog import RequestPart, RequestPrepared
    from fdasync.request import GenerateRequest, SamplingParams
    from fdasync.result import TopLogprobs
    from fdasync.runner.base import Capacity

_DECODE_SLICE_TOKENS = 256


class SampleOutput:
    """The output of one sample so far.

    Attributes:
        key: its number in the engine; -1: it was never published.
        index: its number in the request.
        start: position of its first row.
        tokens, raw, processed, top: token ids, and log-probs where they are wanted, emitted so far; empty for a sample
            without deltas.
        kinds: of the tokenizer's tokens; None: there is no tokenizer.
        decoder: makes text of tokens; None: there is no tokenizer, or the text has ended.
        search: looks for its stop strings; None: it has none.
        min_tokens: no stop string may end within so many first tokens.
        stop: the stop string that was found; "": none was.
        closed: tokens that are emitted later are overrun.
        text: final text so far.
        released: how many characters of `text` may be given out; a suffix that could begin a stop string may not.
        fed_tokens: how many tokens were decoded.
        rows: per spec, an array for every row that it can ever have. Untouched pages cost nothing.
        num_rows: how many rows are filled.
        sent_tokens, sent_chars: how many are in deltas already.
        sent_last: the last delta was given out.
        finish: the action that ended it; None: it has not ended.
        spoiled: the tokenizer's error over its tokens, or its grammar's.
        chosen: what indexers chose for its tokens; None: it wants none.
    """

    __slots__ = (
        "chosen",
        "closed",
        "decoder",
        "fed_tokens",
        "finish",
        "index",
        "key",
        "kinds",
        "min_tokens",
        "num_rows",
        "processed",
        "raw",
        "released",
        "rows",
        "search",
        "sent_chars",
        "sent_last",
        "sent_tokens",
        "spoiled",
        "start",
        "stop",
        "text",
        "tokens",
        "top",
    )  # fmt: skip

    def __init__(self, key: int, index: int, params: SamplingParams, start: int, kinds: TokenKinds | None) -> None:
        """`kinds`: the kinds of the tokenizer's tokens; None: there is no tokenizer, and no text."""
        self.key = key
        self.index = index
        self.start = start
        self.tokens: list[int] = []
        self.raw: list[float] | None = [] if params.logprobs in ("raw", "both") else None
        self.processed: list[float] | None = [] if params.logprobs in ("processed", "both") else None
        self.top: list[TopLogprobs | None] | None = [] if params.top_logprobs else None
        self.kinds = kinds
        self.decoder = IncrementalDecoder(kinds.tokenizer, kinds) if kinds is not None else None
        # the parameters make a tuple of a single string
        self.search = StopSearch(tuple(params.stop)) if params.stop else None
        self.min_tokens = params.min_tokens
        self.stop = ""
        self.closed = False
        self.text = ""
        self.released = 0
        self.fed_tokens = 0
        self.rows: dict[str, NDArray[np.generic]] = {}
        self.num_rows = 0
        self.sent_tokens = 0
        self.sent_chars = 0
        self.sent_last = False
        self.finish: FinishRequest | None = None
        self.chosen: ChosenOutput | None = None
        self.spoiled: BaseException | None = None

    # -- text -------------------------------------------------------------------------------------

    def feed(self, token_ids: list[int] | tuple[int, ...]) -> None:
        """Decode further tokens without a search for stop strings."""
        self.fed_tokens += len(token_ids)
        if self.decoder is not None:
            self._decode(token_ids)
            self.released = len(self.text)

    def _decode(self, token_ids: Sequence[int] | None) -> None:
        """Append the text of further tokens; None: of the tokens held back."""
        if self.decoder is not None:
            try:
                self.text += self.decoder.flush() if token_ids is None else self.decoder.feed(token_ids)
            except PLUGIN_ERRORS as error:
                self._spoil(error)

    def _spoil(self, error: BaseException) -> None:
        # a plugin's error over these tokens ends this request alone (docs/design.md, rule 30)
        self.spoiled = error
        self.decoder = None

    def find_stop(self, token: int) -> bool:
        """Decode one token and look for stop strings; a match cuts the text. Returns whether there is one.

        The search covers final text with special tokens shown, and clean text that would be final if no token followed:
        a match ends the sample, so none follows.
        """
        assert self.search is not None
        self.fed_tokens += 1
        before = len(self.text)
        self._decode((token,))
        following = special = ""
        if self.decoder is not None and self.kinds is not None:
            try:
                following, special = self.decoder.open_text(), self.kinds.special_text(token)
            except PLUGIN_ERRORS as error:
                self._spoil(error)
        return self._look(self.search, before, following, special)

    def _look(self, search: StopSearch, before: int, following: str = "", special: str = "") -> bool:
        """Search the text behind the first `before` characters."""
        barred = self.fed_tokens <= self.min_tokens
        match = search.add(self.text[before:], following=following, special=special, barred=barred)
        if match is None:
            self.released = len(self.text) - search.held
            return False
        whole = self.text + following
        self.text = whole[: len(whole) - match.dropped]
        self.released = len(self.text)
        self.stop = match.stop
        self.decoder = None
        return True

    def end_text(self) -> bool:
        """No token will follow: text that was held back is final now. Returns whether it holds a stop string."""
        found = False
        if self.decoder is not None:
            before = len(self.text)
            self._decode(None)
            found = self.search is not None and self._look(self.search, before)
        self.decoder = None
        self.released = len(self.text)
        return found

    # -- deltas and results -----------------------------------------------------------------------

    def delta(self) -> Delta | None:
        """Everything new since the last delta; None if there is nothing."""
        finish = self.finish
        tokens = self.tokens if finish is None else finish.token_ids
        first, last = self.sent_tokens, len(tokens)
        if self.sent_last or (first >= last and (finish is None or finish.reason == "failed")):
            return None
        if self.decoder is not None and self.search is None:
            self.feed(tokens[self.fed_tokens :])
        if finish is not None:
            self.end_text()
            self.sent_last = True
        text = self.text[self.sent_chars : self.released]
        self.sent_tokens = last
        self.sent_chars = max(self.released, self.sent_chars)
        return Delta(
            index=self.index,
            token_ids=tuple(tokens[first:last]),
            text=text,
            raw_logprobs=None if self.raw is None else tuple(self.raw[first:last]),
            processed_logprobs=None if self.processed is None else tuple(self.processed[first:last]),
            top_logprobs=None if self.top is None else tuple(self.top[first:last]),
            # the stream raises a failure
            finish_reason=None if finish is None or finish.reason == "failed" else finish.reason,
        )

    def sample(self, capacity: Capacity) -> Sample:
        """The result so far; whole once `finish` is there."""
        finish = self.finish
        tokens = tuple(self.tokens) if finish is None else finish.token_ids
        count = len(tokens)
        if self.search is None:
            self.feed(tokens[self.fed_tokens :])
        if finish is not None:
            self.end_text()
        rows = self.num_rows if finish is None else min(finish.num_rows, self.num_rows)
        versions = () if finish is None else finish.spans
        stops = [start for start, *_ in versions[1:]] + [count]
        aux = {name: array[:rows] for name, array in self.rows.items()}
        routing = aux.pop(ROUTING, None)
        return Sample(
            index=self.index,
            token_ids=tokens,
            text=self.text,
            raw_logprobs=None if self.raw is None else np.array(self.raw[:count], np.float32),
            processed_logprobs=None if self.processed is None else np.array(self.processed[:count], np.float32),
            top_logprobs=None if self.top is None else tuple(self.top[:count]),
            finish_reason="failed" if finish is None else finish.reason,
            cached=CachedTokens() if finish is None else CachedTokens(*finish.cached_tokens),
            weight_version=tuple(
                WeightSpan(start, stop, version, weights_id)
                for (start, version, weights_id), stop in zip(versions, stops if versions else (), strict=True)
            ),
            routing=None
            if routing is None
            else Routing(
                array=routing,
                start=self.start,
                layer_ids=capacity.moe_layer_ids,
                num_experts=capacity.num_experts,
                top_k_by_layer=capacity.top_k_by_layer,
            ),
            aux=aux,
            start=self.start,
            stop_token_id=None if finish is None or finish.matched_stop < 0 else finish.matched_stop,
            stop_string=self.stop if finish is not None and finish.reason == "stop" and finish.matched_stop < 0 else "",
            drafts=None if finish is None or finish.drafts is None else DraftCounts(*finish.drafts),
            chosen_positions=None if self.chosen is None else self.chosen.value(),
        )


class RequestState:
    """One request: its samples, its waiting reader, its end.

    Attributes:
        request_id: the caller's name of it, or the engine's.
        params: how to sample.
        prompt: token ids; empty until it is prepared.
        start: position of the first row that it gets.
        specs: the aux specs whose rows it gets.
        scores: log-probs of its prompt; None: it wants none.
        samples: its samples; empty until they are numbered.
        open: how many samples have not ended.
        started_at, first_token_at, ended_at: engine times; None: there is no token yet.
        chosen: memory for what indexers choose, by sample; empty: it wants none.
        lent: keys of the samples whose memory the runner has.
        asked: the caller's request, and how its first sample was prepared; None until then.
        limit: timeout of its wait at the frontend and of its preparation; an abort ends those too.
        failure: the error that ended the engine, and with it the request.
        done: set when every sample ended, or the engine failed.
        trace, part: as in `RequestEnded`.
        waiter: set when the reader can take something; None: no reader waits.
        on_change: called whenever `waiter` would be set, for a reader of many requests.
    """

    __slots__ = (
        "asked",
        "chosen",
        "done",
        "ended_at",
        "failure",
        "first_token_at",
        "lent",
        "limit",
        "on_change",
        "open",
        "params",
        "part",
        "prompt",
        "request_id",
        "samples",
        "scores",
        "specs",
        "start",
        "started_at",
        "trace",
        "waiter",
    )  # fmt: skip

    def __init__(
        self, request_id: str, params: SamplingParams, *, start: int, now: float, part: RequestPart = "whole"
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.prompt: tuple[int, ...] = ()
        self.start = start
        self.specs: tuple[AuxSpec, ...] = ()
        scored = params.prompt_logprobs_start
        # what a hand-off computed before it started anew, under other weights too, is given to nobody
        latest = part == "prefill"
        self.scores = None if scored is None else PromptLogprobs(scored, params.prompt_top_logprobs, latest=latest)
        self.samples: list[SampleOutput] = []
        self.chosen: list[ChosenOutput] = []
        self.lent: list[int] = []
        self.open = 0
        self.started_at = now
        self.first_token_at: float | None = None
        self.ended_at = now
        self.asked: tuple[GenerateRequest, RequestPrepared] | None = None
        self.limit: asyncio.Timeout | None = None
        self.failure: BaseException | None = None
        self.done = asyncio.get_running_loop().create_future()
        self.waiter: asyncio.Future[None] | None = None
        self.on_change: Callable[[RequestState], None] | None = None
        self.trace = ""
        self.part = part

    @property
    def spoiled(self) -> BaseException | None:
        """The tokenizer's error over its tokens, or its grammar's."""
        for sample in self.samples:
            if sample.spoiled is not None:
                return sample.spoiled
        return None

    def wake(self) -> None:
        """Wake the reader: there is something to take."""
        if self.on_change is not None:
            self.on_change(self)
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def result(self, capacity: Capacity) -> Result:
        """Its result; if it has not ended, its result so far."""
        ttft_s = None if self.first_token_at is None else self.first_token_at - self.started_at
        return Result(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            samples=tuple([sample.sample(capacity) for sample in self.samples]),
            prompt_logprobs=None if self.scores is None else self.scores.values(),
            prompt_top_logprobs=None if self.scores is None else self.scores.alternatives(),
            ttft_s=ttft_s,
            total_s=self.ended_at - self.started_at,
        )

    def ended(self) -> RequestEnded:
        """The event for taps about its end."""
        reasons: list[FinishReason] = []
        output_tokens = device = host = store = 0
        for sample in self.samples:
            end = sample.finish
            if end is None:
                reasons.append("failed")
                output_tokens += len(sample.tokens)
                continue
            reasons.append(end.reason)
            output_tokens += len(end.token_ids)
            device += end.cached_tokens[0]
            host += end.cached_tokens[1]
            store += end.cached_tokens[2]
        error = self.failure or self.spoiled
        return RequestEnded(
            request_id=self.request_id,
            group=self.samples[0].key,
            reasons=tuple(reasons),
            prompt_tokens=len(self.prompt),
            output_tokens=output_tokens,
            cached=(device, host, store),
            ttft_s=None if self.first_token_at is None else self.first_token_at - self.started_at,
            total_s=self.ended_at - self.started_at,
            error="" if error is None else type(error).__name__,
            trace=self.trace,
            part=self.part,
        )

    async def settle(self) -> None:
        """Copy chosen positions and decode long outputs in slices, so that no callback of the loop grows long."""
        for sample in self.samples:
            for _ in () if sample.chosen is None else sample.chosen.copying():
                await asyncio.sleep(0)
            if sample.finish is None or sample.search is not None or sample.decoder is None:
                continue
            tokens = sample.finish.token_ids
            while len(tokens) - sample.fed_tokens > _DECODE_SLICE_TOKENS:
                sample.feed(tokens[sample.fed_tokens : sample.fed_tokens + _DECODE_SLICE_TOKENS])
                await asyncio.sleep(0)
