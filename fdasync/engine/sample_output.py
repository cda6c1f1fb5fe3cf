"""One sample's output as it grows: tokens, log-probs, text with stop strings, rows, deltas, result.

Owned by `output.py`. Text is final once given out: an incomplete character, or what could begin a stop string,
is held back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fdasync.cache.aux import ROUTING
from fdasync.engine.tokenizer import IncrementalDecoder
from fdasync.result import CachedTokens, Delta, Routing, Sample, WeightSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fdasync.engine.tokenizer import TokenKinds
    from fdasync.events.actions import FinishRequest
    from fdasync.request import SamplingParams
    from fdasync.result import TopLogprobs
    from fdasync.runner.base import Capacity


class SampleOutput:
    """What has come of one sample so far.

    Attributes:
        tokens, raw, processed, top: emitted so far, unless the sample is final-only.
        matched: a stop string was found; whatever is emitted later is overrun.
        searched: characters of the text, and of what may follow it yet, in which no stop string was found.
        text: final text so far; `released` characters of it may be given out (a suffix that could begin a
            stop string may not).
        rows: per spec, an array for every row it can ever have; `num_rows` are filled. Untouched pages cost nothing.
        sent_tokens, sent_chars: already in deltas.
        finish: the action that ended it.
        start: the position of its first row.
        spoiled: what the tokenizer raised over its tokens.
    """

    __slots__ = (
        "decoder",
        "fed_tokens",
        "finish",
        "index",
        "key",
        "matched",
        "num_rows",
        "processed",
        "raw",
        "released",
        "rows",
        "searched",
        "sent_chars",
        "sent_last",
        "sent_tokens",
        "spoiled",
        "start",
        "stops",
        "text",
        "tokens",
        "top",
    )  # fmt: skip

    def __init__(self, key: int, index: int, params: SamplingParams, start: int, kinds: TokenKinds | None) -> None:
        """`kinds`: of the tokenizer's tokens; None: there is no tokenizer, and no text."""
        self.key = key
        self.index = index
        self.start = start
        self.tokens: list[int] = []
        self.raw: list[float] | None = [] if params.logprobs in ("raw", "both") else None
        self.processed: list[float] | None = [] if params.logprobs in ("processed", "both") else None
        self.top: list[TopLogprobs | None] | None = [] if params.top_logprobs else None
        self.decoder = IncrementalDecoder(kinds.tokenizer, kinds) if kinds is not None else None
        self.stops = params.stop
        self.matched = False
        self.searched = 0
        self.text = ""
        self.released = 0
        self.fed_tokens = 0
        self.rows: dict[str, NDArray[np.generic]] = {}
        self.num_rows = 0
        self.sent_tokens = 0
        self.sent_chars = 0
        self.sent_last = False
        self.finish: FinishRequest | None = None
        self.spoiled: Exception | None = None

    # -- text -------------------------------------------------------------------------------------

    def feed(self, token_ids: list[int] | tuple[int, ...]) -> None:
        """Decode further tokens, no stop strings looked for."""
        self.fed_tokens += len(token_ids)
        if self.decoder is not None:
            self._decode(token_ids)
            self.released = len(self.text)

    def _decode(self, token_ids: Sequence[int] | None) -> str:
        """Text of further tokens; None: of what was held back. Returns what may follow it yet, where stops count."""
        if self.decoder is None:
            return ""
        try:
            self.text += self.decoder.flush() if token_ids is None else self.decoder.feed(token_ids)
            return self.decoder.open_text() if self.stops else ""
        except Exception as error:
            # a plugin's error, about this request's tokens: this request's alone
            self.spoiled = error
            self.decoder = None
            return ""

    def find_stop(self, token: int) -> bool:
        """Decode one token and look for stop strings; a match cuts the text.

        They are looked for in text that is final, and in clean text that would be if no token followed: a match ends
        the sample, so none does.
        """
        self.fed_tokens += 1
        return self._search((token,))

    def _search(self, token_ids: Sequence[int] | None) -> bool:
        before = len(self.text)
        following = self._decode(token_ids)
        # what became final need not be what had followed
        searched = self.searched if len(self.text) == before else before
        first = max(0, searched - max(map(len, self.stops)) + 1)
        unseen = self.text[first:] + following[max(0, first - len(self.text)) :]
        self.searched = len(self.text) + len(following)
        found = [at for stop in self.stops if (at := unseen.find(stop)) >= 0]
        if found:
            self.text = (self.text + following)[: first + min(found)]
            self.released = len(self.text)
            self.decoder = None
            return True
        self.released = len(self.text) - max(_held(self.text, stop) for stop in self.stops)
        return False

    def end_text(self) -> bool:
        """No token will follow: what was held back is final now. Says whether a stop string was found in that."""
        if self.decoder is None:
            found = False
        elif self.stops:
            found = self._search(None)
        else:
            found = False
            self._decode(None)
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
        if self.decoder is not None and not self.stops:
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
            # a failure is told by what the stream raises
            finish_reason=None if finish is None or finish.reason == "failed" else finish.reason,
        )

    def sample(self, capacity: Capacity) -> Sample:
        """The result so far; whole once `finish` is there."""
        finish = self.finish
        tokens = tuple(self.tokens) if finish is None else finish.token_ids
        count = len(tokens)
        if not self.stops:
            self.feed(tokens[self.fed_tokens :])
        if finish is not None:
            self.end_text()
        rows = self.num_rows if finish is None else min(finish.num_rows, self.num_rows)
        versions = () if finish is None else finish.spans
        stops = [start for start, _ in versions[1:]] + [count]
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
                WeightSpan(start, stop, version) for (start, version), stop in zip(versions, stops, strict=True)
            )
            if versions
            else (),
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
        )


def _held(text: str, stop: str) -> int:
    """How many characters at the end of `text` could begin `stop`."""
    tail = text[-(len(stop) - 1) :] if len(stop) > 1 else ""
    at = tail.find(stop[0])
    while at >= 0:
        if stop.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(stop[0], at + 1)
    return 0
