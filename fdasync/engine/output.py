"""From tokens to what callers read: deltas, stop strings, log-probs, rows, results.

Outside the core: text exists here only. `OutputHub` performs `EmitTokens`, `CopyRows` and `FinishRequest`
for the driver and answers stop checks with events. A reader that is slow never holds anything up: what
it did not take merges into one longer delta. Knows no blocks and no scheduling.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec.structs import replace

from fdasync.cache.aux import ROUTING
from fdasync.cache.debug_rows import check_debug_rows
from fdasync.engine.sample_output import SampleOutput
from fdasync.engine.tokenizer import TokenKinds
from fdasync.errors import InvariantBroken
from fdasync.events.actions import CopyRows, FinishRequest
from fdasync.events.catalog import AbortRequested, RequestEnded, StopChecked, StopMatched
from fdasync.result import Result

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from fdasync.cache.aux import AuxSpec
    from fdasync.cache.aux_arena import AuxArena
    from fdasync.engine.inputs import Ask
    from fdasync.engine.tokenizer import Tokenizer
    from fdasync.events.actions import Action, EmitTokens, RowSpan
    from fdasync.events.bus import EventBus
    from fdasync.events.catalog import RequestPrepared
    from fdasync.request import SamplingParams
    from fdasync.runner.base import Capacity, StepOutput

T = TypeVar("T")

_DECODE_SLICE_TOKENS = 256


class RequestOutput:
    """One request: its samples, its waiting reader, its end.

    Attributes:
        done: set when every sample ended, or the engine failed.
        failure: what ended the engine, and with it the request.
        asked: what the caller asked for, and how its first sample was prepared; None until then.
        on_news: told of everything that `waiter` would be told; for one who reads many requests.
        limit: of the wait at the door and of its preparation; an abort ends those too.
        specs: whose rows it gets.
    """

    __slots__ = (
        "asked",
        "done",
        "ended_at",
        "failure",
        "first_token_at",
        "limit",
        "on_news",
        "open",
        "params",
        "prompt",
        "request_id",
        "samples",
        "specs",
        "start",
        "started_at",
        "waiter",
    )  # fmt: skip

    def __init__(self, request_id: str, params: SamplingParams, *, start: int, now: float) -> None:
        self.request_id = request_id
        self.params = params
        self.prompt: tuple[int, ...] = ()
        self.start = start
        self.specs: tuple[AuxSpec, ...] = ()
        self.samples: list[SampleOutput] = []
        self.open = 0
        self.started_at = now
        self.first_token_at: float | None = None
        self.ended_at = now
        self.asked: tuple[Ask, RequestPrepared] | None = None
        self.limit: asyncio.Timeout | None = None
        self.failure: BaseException | None = None
        self.done = asyncio.get_running_loop().create_future()
        self.waiter: asyncio.Future[None] | None = None
        self.on_news: Callable[[RequestOutput], None] | None = None

    @property
    def spoiled(self) -> Exception | None:
        """What the tokenizer raised over its tokens."""
        for sample in self.samples:
            if sample.spoiled is not None:
                return sample.spoiled
        return None

    def wake(self) -> None:
        """Tell the reader that there is something to take."""
        if self.on_news is not None:
            self.on_news(self)
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def result(self, capacity: Capacity) -> Result:
        """Whole, or so far."""
        ttft_s = None if self.first_token_at is None else self.first_token_at - self.started_at
        return Result(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            samples=tuple([sample.sample(capacity) for sample in self.samples]),
            ttft_s=ttft_s,
            total_s=self.ended_at - self.started_at,
        )

    def ended(self) -> RequestEnded:
        """What taps are told of its end."""
        reasons = []
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
        )

    async def decode(self) -> None:
        """Decode long outputs in slices, so that no callback of the loop grows long."""
        for sample in self.samples:
            if sample.finish is None or sample.stops or sample.decoder is None:
                continue
            tokens = sample.finish.token_ids
            while len(tokens) - sample.fed_tokens > _DECODE_SLICE_TOKENS:
                sample.feed(tokens[sample.fed_tokens : sample.fed_tokens + _DECODE_SLICE_TOKENS])
                await asyncio.sleep(0)


class OutputHub:
    """All live samples by key. Called by the driver, in the order of the actions."""

    def __init__(
        self,
        bus: EventBus,
        clock: Callable[[], float],
        arena: AuxArena | None,
        on_end: Callable[[RequestOutput], None],
        *,
        routing_debug: bool = False,
    ) -> None:
        """`routing_debug`: rows name positions, and are checked as requests get them."""
        self._routing_debug = routing_debug
        self._bus = bus
        self._clock = clock
        self._arena = arena
        self._on_end = on_end
        # no sample refers to its request: what has ended goes at once, and leaves the garbage collector nothing to find
        self._live: dict[int, tuple[RequestOutput, SampleOutput]] = {}
        self._kinds: TokenKinds | None = None

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: RequestOutput, keys: list[int], tokenizer: Tokenizer | None) -> None:
        """Take on a request whose samples are about to be published under these keys."""
        params, start = request.params, request.start
        kinds = None
        if tokenizer is not None:
            if self._kinds is None or self._kinds.tokenizer is not tokenizer:
                self._kinds = TokenKinds(tokenizer)
            kinds = self._kinds
        request.samples = [SampleOutput(key, index, params, start, kinds) for index, key in enumerate(keys)]
        request.open = len(keys)
        self._live.update((sample.key, (request, sample)) for sample in request.samples)

    def requests(self) -> list[RequestOutput]:
        """Live requests, oldest first."""
        return list({id(request): request for request, _ in self._live.values()}.values())

    def find(self, key: int) -> tuple[RequestOutput, SampleOutput] | None:
        """A live sample, and the request that it is of."""
        return self._live.get(key)

    def emit(self, action: EmitTokens, output: StepOutput) -> None:
        live = self._live
        now = self._clock()
        for key, token, row in zip(action.keys, action.tokens, action.rows, strict=True):
            request, sample = live[key]
            if sample.matched:
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
            if sample.stops:
                found = sample.find_stop(token)
                if sample.spoiled is not None:
                    self._bus.publish(AbortRequested(keys=tuple([other.key for other in request.samples])))
                    sample.matched = True
                elif found:
                    self._bus.publish(StopMatched(key=key, keep_tokens=len(sample.tokens)))
                    sample.matched = True
                else:
                    self._bus.publish(StopChecked(key=key, num_tokens=len(sample.tokens)))
            request.wake()

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
            arena.copy_rows(span.slot, span.generation, span.offset, span.count, sample.rows, sample.num_rows)
            if self._routing_debug and ROUTING in sample.rows:
                self._check_rows(sample, span.count)
            sample.num_rows += span.count

    def _check_rows(self, sample: SampleOutput, count: int) -> None:
        """What was copied behind the rows so far must name the positions that it is for."""
        first = sample.start + sample.num_rows
        rows = sample.rows[ROUTING][sample.num_rows : sample.num_rows + count]
        assert self._arena is not None
        spec = next(spec for spec in self._arena.specs if spec.name == ROUTING)
        check_debug_rows(rows, np.arange(first, first + count), spec, f"in the result of sample {sample.key}")

    def cut(self, request: RequestOutput, reason: str) -> None:
        """End a request before any of its samples was published: the result is empty."""
        params, start = request.params, request.start
        request.samples = [SampleOutput(-1, index, params, start, None) for index in range(params.n)]
        for sample in request.samples:
            sample.finish = FinishRequest(-1, reason, (), 0, (0, 0, 0), ())
            self._give_rows(request, sample)
        request.ended_at = self._clock()
        self._bus.publish(request.ended())
        request.done.set_result(None)

    def finish(self, action: FinishRequest) -> None:
        request, sample = self._live.pop(action.key)
        keep = len(sample.tokens)
        if sample.matched and keep < len(action.token_ids):
            # it was ended before the scheduler read of the match: what follows the match is overrun all the same
            rows = min(action.num_rows, max(len(request.prompt) + keep - 1 - request.start, 0))
            action = replace(action, token_ids=action.token_ids[:keep], num_rows=rows)
        elif sample.stops and sample.end_text() and action.reason == "length":
            # no token can follow: text that waited for more has become final, and holds a stop string
            action = replace(action, reason="stop")
        sample.finish = action
        self._give_rows(request, sample)
        request.open -= 1
        if not request.open:
            self.end(request)
        else:
            request.wake()

    def _give_rows(self, request: RequestOutput, sample: SampleOutput) -> None:
        """Who wants rows and has none gets none of each kind, not nothing."""
        if not sample.rows:
            sample.rows = {spec.name: _empty(spec, 0) for spec in request.specs}

    def end(self, request: RequestOutput) -> None:
        """Every sample ended, or there will be none."""
        request.ended_at = self._clock()
        self._bus.publish(request.ended())
        if not request.done.done():
            request.done.set_result(None)
        request.wake()
        self._on_end(request)

    def fail(self, cause: BaseException, last: list[Action]) -> None:
        """The engine failed: end every live request with what it has; `last` brings what only the scheduler knows."""
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
            # those that the scheduler had not heard of yet
            for sample in request.samples:
                if sample.finish is None:
                    self._give_rows(request, sample)
            if not request.done.done():
                self.end(request)

    def _rescue_rows(self, spans: tuple[RowSpan, ...], cause: BaseException) -> None:
        """Copy what is there; a sample's rows end where one is missing (they stay contiguous)."""
        spoiled: set[int] = set()
        for span in spans:
            if span.key in spoiled:
                continue
            try:
                self.copy_rows((span,))
            except InvariantBroken as error:
                spoiled.add(span.key)
                cause.add_note(f"while the rows so far were taken: {error}")


def _given(values: tuple[T, ...] | None, what: str) -> tuple[T, ...]:
    """What a request asked for must come: a short array would pass for a right one."""
    if values is None:
        raise InvariantBroken(f"the runner returned no {what} for a request that asked for them")
    return values


def _empty(spec: AuxSpec, count: int) -> NDArray[Any]:
    return np.empty((count, *spec.shape), spec.dtype)
