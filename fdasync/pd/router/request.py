"""One request of a router: where it is served, what came of it, and its one end.

Knows no instances and no links: `dispatch.py` moves it, `router/stream.py` reads it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fdasync.pd.router.limits import need_of
from fdasync.result import CachedTokens, Delta, Result, Sample

if TYPE_CHECKING:
    from fdasync.cache.aux import AuxSpec
    from fdasync.ipc.deadlines import DeadlineTimer
    from fdasync.pd.messages import Submit
    from fdasync.pd.results import Incoming
    from fdasync.pd.router.instances import Member


class Routed:
    """See the module.

    Attributes:
        need: what it needs of whoever serves it, as far as known.
        words: what was asked for; name and deadline are those of the try in hand.
        prompt_of_text: tokens of a prompt that is text, once an instance has told them.
        tries: so far; failed: addresses of those that failed it.
        name: of the try in hand among instances; "" while there is none.
        sessions: of the decoders, when it was sent: in a later one that is another process.
        first, decoders: who has it; `server`: who answers, once that is known; `decoder`: in whose load it counts.
        specs: whose rows it is to have; None: no instance was chosen yet, that would say.
        incoming: rows and outputs so far.
        whole: one instance must serve it: none takes it from another.
        delivered: something of it came.
        done: set at its end, with `result` or `error`.
    """

    def __init__(self, request_id: str, words: Submit, keys: tuple[bytes, ...], num_tokens: int, now: float) -> None:
        self.request_id = request_id
        self.words = words
        self.prompt_of_text: tuple[int, ...] = ()
        self.keys = keys
        self.num_tokens = num_tokens
        self.need = need_of(words.text, words.tokens, words.params.max_tokens, words.params.n)
        self.prefill = ""
        self.wanted_decoders: tuple[str, ...] = ()
        self.started_at = now
        self.ends_at = now + words.deadline_s
        self.tries = 0
        self.failed: list[str] = []
        self.name = ""
        self.first: Member | None = None
        self.decoders: tuple[Member, ...] = ()
        self.sessions: dict[str, int] = {}
        self.server: Member | None = None
        self.decoder: Member | None = None
        self.specs: tuple[AuxSpec, ...] | None = None
        self.incoming: Incoming | None = None
        self.aborted = False
        self.whole = False
        self.first_token_at: float | None = None
        self.pending: list[list[Delta]] = [[] for _ in range(words.params.n)]
        self.taken: list[list[Delta]] = [[] for _ in range(words.params.n)]
        self.result: Result | None = None
        self.error: Exception | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiter: asyncio.Future[None] | None = None
        self.timer: DeadlineTimer | None = None

    @property
    def delivered(self) -> bool:
        return any(self.pending) or any(self.taken)

    def add(self, delta: Delta, now: float) -> None:
        """News of one sample."""
        if self.first_token_at is None and delta.token_ids:
            self.first_token_at = now
        self.pending[delta.index].append(delta)
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def end(self, result: Result | None, error: Exception | None, now: float) -> None:
        """Its one end."""
        if self.done.done():
            return
        if result is not None:
            ttft_s = None if self.first_token_at is None else self.first_token_at - self.started_at
            result = msgspec.structs.replace(result, ttft_s=ttft_s, total_s=now - self.started_at)
        self.result, self.error = result, error
        self.done.set_result(None)
        self.wake()

    def take(self, index: int) -> Delta | None:
        """Everything new of a sample as one delta."""
        news = self.pending[index]
        if not news:
            return None
        self.taken[index] += news
        self.pending[index] = []
        return _merged(news)

    def so_far(self, reason: str) -> Result:
        """What came, as a result without rows. A sample whose tokens all came lacks them too, and must not pass for a
        whole one, unless rows were not wanted."""
        rowless = self.specs == ()
        samples = []
        for index in range(self.words.params.n):
            known = self.taken[index] + self.pending[index]
            whole = _merged(known) if known else Delta(index=index, token_ids=())
            raw, processed = whole.raw_logprobs, whole.processed_logprobs
            samples.append(
                Sample(
                    index=index,
                    token_ids=whole.token_ids,
                    text=whole.text,
                    raw_logprobs=None if raw is None else np.array(raw, np.float32),
                    processed_logprobs=None if processed is None else np.array(processed, np.float32),
                    top_logprobs=whole.top_logprobs,
                    finish_reason=(whole.finish_reason if rowless else None) or reason,
                    cached=CachedTokens(),
                    weight_version=(),
                    routing=None,
                    aux={},
                    start=self.words.start,
                )
            )
        given = self.words.text is None
        tokens = tuple(memoryview(self.words.tokens).cast("i")) if given else self.prompt_of_text
        return Result(request_id=self.request_id, prompt_token_ids=tokens, samples=tuple(samples))


def _merged(deltas: list[Delta]) -> Delta:
    """One delta for several of the same sample."""
    if len(deltas) == 1:
        return deltas[0]

    def joined(name: str) -> tuple[object, ...] | None:
        if getattr(deltas[0], name) is None:
            return None
        return tuple([value for delta in deltas for value in getattr(delta, name) or ()])

    return Delta(
        index=deltas[0].index,
        token_ids=tuple([token for delta in deltas for token in delta.token_ids]),
        text="".join([delta.text for delta in deltas]),
        raw_logprobs=joined("raw_logprobs"),  # type: ignore[arg-type]
        processed_logprobs=joined("processed_logprobs"),  # type: ignore[arg-type]
        top_logprobs=joined("top_logprobs"),  # type: ignore[arg-type]
        finish_reason=deltas[-1].finish_reason,
    )
