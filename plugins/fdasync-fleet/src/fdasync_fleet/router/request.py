"""The state of one request of a router: the instances that serve it, its output so far, and its one end.

Sends nothing. `router/dispatch.py` moves it from state to state, `router/stream.py` reads its output.
"""

from __future__ import annotations

import asyncio
from struct import unpack
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fdasync.result import CachedTokens, Result, Sample
from fdasync_fleet.router.limits import need_of
from fdasync_fleet.router.output import RoutedOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.ipc.deadlines import DeadlineTimer
    from fdasync.result import Delta, FinishReason
    from fdasync_fleet.messages import Submit
    from fdasync_fleet.results import Incoming
    from fdasync_fleet.router.instances import InstanceHandle


class RoutedRequest:
    """See the module. All times are by the loop's clock.

    Attributes:
        request_id: the caller's name for the request.
        submit: the message to instances; its names and times are set anew for each try.
        prompt_of_text: token ids of a prompt that is text, once an instance has sent them.
        num_tokens: tokens of the prompt; an estimate for a text.
        need: how much an instance must hold to serve it, as far as known.
        prefill, wanted_decoders: addresses of the instances that the caller names; "" and empty: any.
        started_at, ends_at: time of the call, and of the deadline.
        tries: number of tries so far.
        failed: addresses of the instances that failed a try.
        name: the current try's name among instances; "" while there is none.
        first: the instance that the try was sent to; None once that instance has no more work with it.
        decoders: instances to which `first` may hand it over.
        missing, num_blocks: prompt tokens that `first` had to compute, and full blocks of the prompt, as far as known.
        beats: number of statuses of `first` when the try was sent.
        expected: blocks of the prompt that `first` is expected to have because of this try.
        sessions: the session of each of `decoders` when the try was sent; in a later session it is another process.
        server: the instance that answers, once that is known.
        decoder: the instance in whose load it counts as a request that decodes.
        incoming: rows and outputs of the current try.
        aborted: the caller has aborted it.
        whole: one instance must serve it whole, since no decode instance takes it over.
        first_token_at: time of the first token; None before.
        outputs: of each sample.
        samples: samples that are whole, by index; of the current try.
        result, error: the end; one of the two is set when `done` is.
        done: set at the end.
        waiter: the reader that waits for output.
        timer: ends the request when no instance does.
    """

    __slots__ = (
        "aborted",
        "beats",
        "decoder",
        "decoders",
        "done",
        "ends_at",
        "error",
        "expected",
        "failed",
        "first",
        "first_token_at",
        "incoming",
        "missing",
        "name",
        "need",
        "num_blocks",
        "num_tokens",
        "outputs",
        "prefill",
        "prompt_of_text",
        "request_id",
        "result",
        "samples",
        "server",
        "sessions",
        "started_at",
        "submit",
        "timer",
        "tries",
        "waiter",
        "wanted_decoders",
        "whole",
    )

    def __init__(self, request_id: str, submit: Submit, num_tokens: int, now: float) -> None:
        self.request_id = request_id
        self.submit = submit
        self.prompt_of_text: tuple[int, ...] = ()
        self.num_tokens = num_tokens
        self.need = need_of(submit.text, submit.tokens, submit.params)
        self.prefill = ""
        self.wanted_decoders: tuple[str, ...] = ()
        self.started_at = now
        self.ends_at = now + submit.deadline_s
        self.tries = 0
        self.failed: list[str] = []
        self.name = ""
        self.first: InstanceHandle | None = None
        self.decoders: tuple[InstanceHandle, ...] = ()
        self.missing = self.num_blocks = 0
        self.beats = 0
        self.expected: Sequence[bytes] = ()
        self.sessions: dict[str, int] = {}
        self.server: InstanceHandle | None = None
        self.decoder: InstanceHandle | None = None
        self.incoming: Incoming | None = None
        self.aborted = False
        self.whole = False
        self.first_token_at: float | None = None
        self.outputs = [RoutedOutput(index) for index in range(submit.params.n)]
        self.samples: list[Sample | None] = [None] * submit.params.n
        self.result: Result | None = None
        self.error: Exception | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiter: asyncio.Future[None] | None = None
        self.timer: DeadlineTimer | None = None

    @property
    def delivered(self) -> bool:
        """Whether output has arrived, so that the request cannot be tried again."""
        return any(self.outputs)

    @property
    def is_between(self) -> bool:
        """Whether the instance that the try was sent to may still hand over what it has of it."""
        return bool(self.decoders) and self.first is not None and self.server is not self.first

    @property
    def is_torn(self) -> bool:
        """Whether a sample has tokens, and is not whole."""
        return any(
            output.has_tokens and sample is None for output, sample in zip(self.outputs, self.samples, strict=True)
        )

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt; (): it is text, and no instance has sent them yet."""
        submit = self.submit
        return self.prompt_of_text if submit.text is not None else unpack(f"{len(submit.tokens) // 4}i", submit.tokens)

    @property
    def prompt_is_known(self) -> bool:
        """Whether `prompt` has the prompt's tokens."""
        return self.submit.text is None or bool(self.prompt_of_text)

    def add_prompt(self, token_ids: tuple[int, ...]) -> None:
        """The tokens of a text. The instance that tokenised it need not be the one that answers, and may be heard
        later; it has none if the request ended before."""
        self.prompt_of_text = token_ids or self.prompt_of_text
        self.wake()

    def add_sample(self, sample: Sample) -> None:
        """All of a sample has arrived, but for its last delta perhaps."""
        self.samples[sample.index] = sample
        self.wake()

    def add(self, delta: Delta, now: float) -> None:
        """Add output of one sample."""
        if self.first_token_at is None and delta.token_ids:
            self.first_token_at = now
        self.outputs[delta.index].add(delta)
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def end(self, result: Result | None, error: Exception | None, now: float) -> None:
        """End the request; only the first call counts."""
        if self.done.done():
            return
        if result is not None:
            ttft_s = None if self.first_token_at is None else self.first_token_at - self.started_at
            result = msgspec.structs.replace(result, ttft_s=ttft_s, total_s=now - self.started_at)
        self.result, self.error = result, error
        self.done.set_result(None)
        self.wake()

    def outcome(self) -> Result:
        """The result of the request, which has ended. Raises the error that it ended with."""
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    def take(self, index: int) -> Delta | None:
        """All unread output of a sample as one delta; None: there is none. The first delta of a text waits for the
        prompt's tokens, and the last one for the whole sample, whose rows are on their way."""
        if not self.prompt_is_known and not self.done.done():
            return None
        return self.outputs[index].take(is_whole=self.samples[index] is not None or self.done.done())

    def so_far(self, reason: FinishReason) -> Result:
        """The output so far as a result: whole samples, and the others, which end with `reason`, without rows and
        versions: if they have tokens, only the instance knows these (`is_torn`)."""
        samples = []
        for index, output in enumerate(self.outputs):
            if (ended := self.samples[index]) is not None:
                samples.append(ended)
                continue
            whole = output.whole()
            raw, processed = whole.raw_logprobs, whole.processed_logprobs
            samples.append(
                Sample(
                    index=index,
                    token_ids=whole.token_ids,
                    text=whole.text,
                    raw_logprobs=None if raw is None else np.array(raw, np.float32),
                    processed_logprobs=None if processed is None else np.array(processed, np.float32),
                    top_logprobs=whole.top_logprobs,
                    finish_reason=reason,
                    cached=CachedTokens(),
                    weight_version=(),
                    routing=None,
                    aux={},
                    start=self.submit.start,
                )
            )
        return Result(request_id=self.request_id, prompt_token_ids=self.prompt, samples=tuple(samples))
