"""The output stage: makes deltas, texts, log-probs, rows and results from tokens.

`OutputProcessor` performs `EmitTokens`, `CopyRows` and `FinishRequest` for the driver, and answers stop checks with
events. Text exists here and in preparation only. A slow reader holds nothing up: deltas that it did not take merge into
one longer delta. This module knows no blocks and no scheduling. Called by `driver.py`; `frontend.py` and `stream.py`
read the requests (`request_state.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec.structs import replace

from fdasync.cache.aux import ROUTING
from fdasync.cache.debug_rows import check_debug_rows
from fdasync.engine.request_state import SampleOutput
from fdasync.engine.tokenizer import TokenKinds
from fdasync.errors import InvariantBroken
from fdasync.events.actions import CopyRows, FinishRequest
from fdasync.events.catalog import AbortRequested, StopChecked, StopMatched

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from fdasync.cache.aux import AuxSpec
    from fdasync.cache.aux_arena import AuxArena
    from fdasync.engine.request_state import RequestState
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.events.actions import Action, EmitTokens, RowSpan
    from fdasync.events.bus import EventBus
    from fdasync.result import FinishReason
    from fdasync.runner.base import PromptScores, StepOutput

T = TypeVar("T")


class OutputProcessor:
    """All live samples by key. Called by the driver, in the order of the actions."""

    def __init__(
        self,
        bus: EventBus,
        clock: Callable[[], float],
        arena: AuxArena | None,
        on_end: Callable[[RequestState], None],
        *,
        routing_debug: bool = False,
    ) -> None:
        """`routing_debug`: rows name positions, and are checked as requests get them."""
        self._routing_debug = routing_debug
        self._bus = bus
        self._clock = clock
        self._arena = arena
        self._on_end = on_end
        # no sample refers to its request: without a cycle, an ended request is freed at once
        self._live: dict[int, tuple[RequestState, SampleOutput]] = {}
        self._kinds: TokenKinds | None = None

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: RequestState, keys: list[int], tokenizer: Tokenizer | None) -> None:
        """Take on a request whose samples are about to be published under these keys."""
        params, start = request.params, request.start
        kinds = None
        if tokenizer is not None:
            if self._kinds is None or self._kinds.tokenizer is not tokenizer:
                self._kinds = TokenKinds(tokenizer)
            kinds = self._kinds
        request.samples = [SampleOutput(key, index, params, start, kinds) for index, key in enumerate(keys)]
        for sample, chosen in zip(request.samples, request.chosen, strict=False):
            sample.chosen = chosen
        request.open = len(keys)
        self._live.update((sample.key, (request, sample)) for sample in request.samples)

    def requests(self) -> list[RequestState]:
        """Live requests, oldest first."""
        return list({id(request): request for request, _ in self._live.values()}.values())

    def find(self, key: int) -> tuple[RequestState, SampleOutput] | None:
        """A live sample and its request."""
        return self._live.get(key)

    def emit(self, action: EmitTokens, output: StepOutput) -> None:
        live = self._live
        now = self._clock()
        for key, token, row in zip(action.keys, action.tokens, action.rows, strict=True):
            request, sample = live[key]
            if sample.closed:
                continue  # overrun: the scheduler has not read of the match yet
            sample.tokens.append(token)
            if request.first_token_at is None:
                request.first_token_at = now
            if sample.raw is not None:
                sample.raw.append(_given(output.raw, "raw log-probs")[row])
            if sample.processed is not None:
                sample.processed.append(_given(output.processed, "processed log-probs")[row])
            if sample.top is not None:
                sample.top.append(_given(output.top, "top log-probs")[row])
            if sample.search is not None:
                found = sample.find_stop(token)
                if sample.spoiled is not None:
                    self._abort(request, sample)
                elif found:
                    self._bus.publish(StopMatched(key=key, keep_tokens=len(sample.tokens)))
                    sample.closed = True
                else:
                    self._bus.publish(StopChecked(key=key, num_tokens=len(sample.tokens)))
            request.wake()

    def spoil(self, key: int, error: Exception, *, begun: bool = True) -> None:
        """A sample cannot go on: end its request with this error, and with the tokens so far. `begun`: False: only if
        it has none. A sample that has all its tokens goes well."""
        found = self._live.get(key)
        if found is not None and not found[1].closed and (begun or not found[1].tokens):
            request, sample = found
            sample.spoiled = error
            self._abort(request, sample)
            request.wake()

    def _abort(self, request: RequestState, sample: SampleOutput) -> None:
        self._bus.publish(AbortRequested(keys=tuple([other.key for other in request.samples])))
        sample.closed = True

    def take_scores(self, scores: tuple[PromptScores, ...]) -> None:
        """Keep the log-probs of prompts that a step computed; if their request has ended, they are dropped."""
        for run in scores:
            live = self._live.get(run.key)
            if live is not None and live[0].scores is not None:
                live[0].scores.add(run)

    def copy_rows(self, spans: tuple[RowSpan, ...]) -> None:
        arena = self._arena
        assert arena is not None
        for span in spans:
            request, sample = self._live[span.key]
            if not sample.rows:
                most = len(request.prompt) + request.params.max_tokens - 1 - request.start
                sample.rows = {spec.name: _empty(spec, most) for spec in request.specs}
            if span.start != sample.start + sample.num_rows:
                raise InvariantBroken(
                    f"rows of position {span.start} came for sample {span.key}, whose next row is that of position "
                    f"{sample.start + sample.num_rows}"
                )
            arena.copy_rows(span.slots, span.generations, span.offset, span.count, sample.rows, sample.num_rows)
            if self._routing_debug and ROUTING in sample.rows:
                self._check_rows(sample, span.count)
            sample.num_rows += span.count

    def _check_rows(self, sample: SampleOutput, count: int) -> None:
        """The rows that were just copied must name their own positions."""
        first = sample.start + sample.num_rows
        rows = sample.rows[ROUTING][sample.num_rows : sample.num_rows + count]
        assert self._arena is not None
        spec = next(spec for spec in self._arena.specs if spec.name == ROUTING)
        check_debug_rows(rows, np.arange(first, first + count), spec, f"in the result of sample {sample.key}")

    def cut(self, request: RequestState, reason: FinishReason) -> None:
        """End a request before any of its samples was published: the result is empty."""
        params, start = request.params, request.start
        request.samples = [SampleOutput(-1, index, params, start, None) for index in range(params.n)]
        for sample in request.samples:
            sample.finish = FinishRequest(
                key=-1, reason=reason, token_ids=(), num_rows=0, cached_tokens=(0, 0, 0), spans=()
            )
            self._give_rows(request, sample)
        request.ended_at = self._clock()
        self._bus.publish(request.ended())
        request.done.set_result(None)

    def finish(self, action: FinishRequest) -> None:
        request, sample = self._live[action.key]
        if sample.chosen is not None and request.failure is None:
            sample.chosen.check(len(action.token_ids))
        del self._live[action.key]
        keep = len(sample.tokens)
        if sample.closed and keep < len(action.token_ids):
            # it ended before the scheduler read of the match: tokens behind the match are overrun all the same
            rows = min(action.num_rows, max(len(request.prompt) + keep - 1 - request.start, 0))
            action = replace(action, token_ids=action.token_ids[:keep], num_rows=rows)
        elif sample.search is not None and sample.end_text() and action.reason == "length":
            # no token can follow: text that was held back has become final, and holds a stop string
            action = replace(action, reason="stop")
        sample.finish = action
        if sample.chosen is not None:
            sample.chosen.end(len(action.token_ids))
        self._give_rows(request, sample)
        request.open -= 1
        if not request.open:
            self.end(request)
        else:
            request.wake()

    def _give_rows(self, request: RequestState, sample: SampleOutput) -> None:
        """A sample that wants rows and has none gets an empty array of each spec."""
        if not sample.rows:
            sample.rows = {spec.name: _empty(spec, 0) for spec in request.specs}

    def end(self, request: RequestState) -> None:
        """Every sample ended, or there will be none."""
        request.ended_at = self._clock()
        self._bus.publish(request.ended())
        if not request.done.done():
            request.done.set_result(None)
        request.wake()
        self._on_end(request)

    def fail(self, cause: BaseException, last: list[Action]) -> None:
        """The engine failed: end every live request with what it has so far.

        Args:
            last: the scheduler's last actions, with tokens and rows that were not given out yet.
        """
        requests = self.requests()
        for request in requests:
            request.failure = cause
        for action in last:
            if isinstance(action, CopyRows):
                self._rescue_rows(action.spans, cause)
            elif isinstance(action, FinishRequest):
                self.finish(action)
        self._live.clear()
        for request in requests:
            # samples that the scheduler did not know yet
            for sample in request.samples:
                if sample.finish is None:
                    self._give_rows(request, sample)
            if not request.done.done():
                self.end(request)

    def _rescue_rows(self, spans: tuple[RowSpan, ...], cause: BaseException) -> None:
        """Copy the rows that were written; a sample's rows end with the block before the first missing one (they stay
        contiguous)."""
        spoiled: set[int] = set()
        for span in spans:
            if span.key in spoiled:
                continue
            assert self._arena is not None
            try:
                for part in span.by_slot(self._arena.block_tokens):
                    self.copy_rows((part,))
            except InvariantBroken as error:
                spoiled.add(span.key)
                cause.add_note(f"while the rows so far were taken: {error}")


def _given(values: tuple[T, ...] | None, what: str) -> tuple[T, ...]:
    """The values that a request asked for. Raises InvariantBroken where the runner returned none."""
    if values is None:
        raise InvariantBroken(f"the runner returned no {what} for a request that asked for them")
    return values


def _empty(spec: AuxSpec, count: int) -> NDArray[Any]:
    return np.empty((count, *spec.shape), spec.dtype)
