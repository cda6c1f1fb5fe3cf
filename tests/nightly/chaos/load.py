"""The load of the chaos harness: clients that send requests in every way there is, and check every answer.

Every request must end once, in time, right or with an error that allows another try; the deltas of a stream must be the
result, or its beginning. Knows a router by its public face. Used by `chaos.py`.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fdasync.errors import (
    BadInput,
    DeadlineExceeded,
    EngineClosed,
    FdasyncError,
    InstanceLost,
    TransientError,
    WeightsBroken,
)
from fdasync.request import SamplingParams

if TYPE_CHECKING:
    from random import Random

    from fdasync_fleet.router.router import Router

    from fdasync.result import Delta, Result
    from tests.nightly.chaos.versions import Versions

Way = Literal["complete", "stream", "abort", "leave", "cancel", "deadline"]
_WAYS: tuple[Way, ...] = ("complete",) * 5 + ("stream",) * 6 + ("abort", "abort", "leave", "cancel", "deadline")
LONG_S = 40.0
# of the answer to a deadline, a cancel or an abort: an instance may be stopped, and a router waits 5 s for it
GRACE_S = 12.0
_STEMS = 6
_NUMBER = re.compile(r"[0-9]+")
_MAX_CONTEXT = 250


class Ask(msgspec.Struct, frozen=True):
    """One request as a client makes it.

    Attributes:
        prompt, params, deadline_s, start: see `Engine.generate`.
        way: how the client ends it.
        after_s: when it is aborted, cancelled or left.
        routing: with rows of every kind; False: without rows.
    """

    prompt: list[int]
    params: SamplingParams
    way: Way
    deadline_s: float
    after_s: float
    routing: bool
    start: int


class Wrong(AssertionError):
    """A wrong answer."""


class Load:
    """See the module.

    Attributes:
        outcomes: number of requests by outcome.
        errors: number of errors that allow another try, by their words.
        wrong: broken rules, in words.
        served_at: times of right answers.
    """

    def __init__(self, router: Router, versions: Versions, rng: Random, vocab: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.served_at: list[float] = []
        self._router = router
        self._versions = versions
        self._rng = rng
        self._vocab = vocab
        self._stems = [self._tokens(rng.choice((8, 24, 60, 100))) for _ in range(_STEMS)]
        self._clients: list[asyncio.Task[None]] = []
        self._going = False

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab) for _ in range(count)]

    def start(self, clients: int) -> None:
        self._going = True
        loop = asyncio.get_running_loop()
        self._clients = [loop.create_task(self._client()) for _ in range(clients)]

    async def stop(self) -> None:
        """Send no new requests, and wait for the ends of the others."""
        self._going = False
        if self._clients:
            await asyncio.wait(self._clients, timeout=LONG_S + 2 * GRACE_S)
        for client in self._clients:
            if not client.done():
                client.cancel()
                self.wrong.append("a client did not end")
            elif client.exception() is not None:
                self.wrong.append(f"a client failed: {client.exception()!r}")
        self._clients = []

    async def _client(self) -> None:
        while self._going:
            outcome = await self.one(self.draw())
            # a client that was refused comes back later
            await asyncio.sleep(self._rng.expovariate(2.0 if outcome == "refused" else 20.0))

    def draw(self) -> Ask:
        rng = self._rng
        stem = rng.choice(self._stems)
        prompt = (stem[: rng.randrange(1, len(stem) + 1)] if rng.random() < 0.7 else []) + self._tokens(
            rng.choice((1, 2, 5, 13, 30, 60))
        )
        way = rng.choice(_WAYS)
        params = SamplingParams(
            max_tokens=min(rng.choice((1, 2, 5, 12, 30, 50)), _MAX_CONTEXT - len(prompt)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(1 << 30),
            n=rng.choice((1, 1, 1, 1, 2, 3)),
            logprobs=rng.choice(("none", "both")),
            stop_token_ids=(rng.randrange(self._vocab),) if rng.random() < 0.2 else (),
        )
        return Ask(
            prompt, params, way, rng.uniform(0.02, 0.8) if way == "deadline" else LONG_S, rng.expovariate(4.0),
            rng.random() < 0.9, rng.randrange(len(prompt)) if rng.random() < 0.2 else 0,
        )  # fmt: skip

    # -- one request ----------------------------------------------------------------------------------

    async def one(self, ask: Ask, **where: Any) -> str:
        """Send a request and check its answer; returns the outcome."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        deltas: list[Delta] = []
        try:
            async with asyncio.timeout(ask.deadline_s + GRACE_S):
                result = await self._ask(ask, deltas, where)
            outcome = self._judge(ask, result, deltas, began)
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                outcome = self._judge_late(ask, error, loop.time() - began)
            else:
                outcome = self._blame(ask, f"it never ended, within {ask.deadline_s + GRACE_S:g} s")
        except WeightsBroken as error:
            outcome = self._judge_broken(ask, error, deltas, began)
        except (TransientError, EngineClosed) as error:
            outcome = self._judge_error(ask, error, deltas, began)
        except Exception as error:
            outcome = self._blame(ask, f"{type(error).__name__}: {error}")
        self.outcomes[outcome] += 1
        if outcome == "right":
            self.served_at.append(loop.time())
        return outcome

    async def _ask(self, ask: Ask, deltas: list[Delta], where: dict[str, Any]) -> Result | None:
        """The result; None: the request was cancelled, or left."""
        words = {"deadline_s": ask.deadline_s, "start": ask.start, **where}
        # all kinds of rows, or none
        words |= {"routing": ask.routing, "aux": None if ask.routing else False}
        if ask.way in ("complete", "deadline"):
            return await self._router.complete(ask.prompt, ask.params, **words)
        if ask.way == "cancel":
            task = asyncio.ensure_future(self._router.complete(ask.prompt, ask.params, **words))
            await asyncio.wait([task], timeout=ask.after_s)
            task.cancel()
            await asyncio.wait([task])
            return None if task.cancelled() else task.result()
        async with self._router.generate(ask.prompt, ask.params, **words) as stream:
            timer = None
            if ask.way == "abort":
                timer = asyncio.get_running_loop().call_later(ask.after_s, stream.abort)
            try:
                async for delta in stream:
                    deltas.append(delta)
                    if ask.way == "leave" and len(deltas) > 3:
                        return None
                return stream.result
            finally:
                if timer is not None:
                    timer.cancel()

    # -- judgement ------------------------------------------------------------------------------------

    def _judge(self, ask: Ask, result: Result | None, deltas: list[Delta], began: float) -> str:
        seconds = asyncio.get_running_loop().time() - began
        try:
            if result is None:
                self._check_beginning(ask, deltas, began)
                return "left"
            self._check(ask, result, deltas, began)
        except AssertionError as error:
            return self._blame(ask, f"{error}")
        reasons = {sample.finish_reason for sample in result.samples}
        if reasons <= {"stop", "length"}:
            return "right"
        if "abort" in reasons:
            if ask.way == "abort" or self._versions.aborts.met(began):
                return "aborted"
            return self._blame(ask, "it was aborted, and not by its client")
        if seconds < ask.deadline_s - 0.2:
            return self._blame(ask, f"its deadline of {ask.deadline_s:g} s came after {seconds:.2f} s")
        return "deadline" if ask.way == "deadline" else self._blame(ask, f"no answer came in {ask.deadline_s:g} s")

    def _check(self, ask: Ask, result: Result, deltas: list[Delta], began: float) -> None:
        if list(result.prompt_token_ids) != ask.prompt:
            raise Wrong("the result is of another prompt")
        if [sample.index for sample in result.samples] != list(range(ask.params.n)):
            raise Wrong(f"samples {[sample.index for sample in result.samples]}")
        # a result that a router ended by itself has the tokens that had come, and may lack rows
        answered = all(sample.finish_reason in ("stop", "length") for sample in result.samples)
        for sample in result.samples:
            whole = answered and sample.finish_reason in ("stop", "length")
            rows = ask.routing and (whole or sample.routing is not None)
            # a sample that a router ended before its first token has no log-probs
            bare = not whole and sample.raw_logprobs is None
            params = msgspec.structs.replace(ask.params, logprobs="none") if bare else ask.params
            self._versions.check(sample, ask.prompt, params, began, ask.start, None if rows else ())
            if ask.way in ("stream", "abort"):
                streamed = _streamed(deltas, sample.index)
                if streamed != sample.token_ids:
                    raise Wrong(f"deltas {streamed} are not the result's {sample.token_ids}")

    def _check_beginning(self, ask: Ask, deltas: list[Delta], began: float) -> None:
        for index in range(ask.params.n):
            streamed = _streamed(deltas, index)
            if streamed:
                self._versions.check_beginning(streamed, ask.prompt, ask.params, index, began)

    def _judge_late(self, ask: Ask, error: DeadlineExceeded, seconds: float) -> str:
        if seconds < ask.deadline_s - 0.5:
            return self._blame(ask, f"after {seconds:.2f} of {ask.deadline_s:g} s: {error}")
        return "deadline" if ask.way == "deadline" else self._blame(ask, f"no instance took it: {error}")

    def _judge_error(self, ask: Ask, error: FdasyncError, deltas: list[Delta], began: float) -> str:
        problem = error.problem if isinstance(error, InstanceLost) else str(error)
        self.errors[f"{type(error).__name__}: {_NUMBER.sub('N', problem)[:160]}"] += 1
        try:
            self._check_beginning(ask, deltas, began)
            partial = error.partial if isinstance(error, InstanceLost) else None
            if partial is not None:
                for sample in partial.samples:
                    streamed = _streamed(deltas, sample.index)
                    if sample.token_ids[: len(streamed)] != streamed:
                        raise Wrong(f"deltas {streamed} are not of the partial result {sample.token_ids}")
        except AssertionError as wrong:
            return self._blame(ask, f"{wrong}")
        if isinstance(error, EngineClosed | BadInput):
            return self._blame(ask, f"{error}")
        return "lost"

    def _judge_broken(self, ask: Ask, error: WeightsBroken, deltas: list[Delta], began: float) -> str:
        """New requests are refused until an update has mended the weights; what was inside waits for that."""
        if deltas or not self._versions.broken.met(began):
            return self._blame(ask, f"after {len(deltas)} deltas: {error}")
        return "refused"

    def _blame(self, ask: Ask, problem: str) -> str:
        params = ask.params
        self.wrong.append(
            f"{ask.way} of {len(ask.prompt)} tokens, n={params.n}, max_tokens={params.max_tokens}, seed={params.seed},"
            f" deadline {ask.deadline_s:.2f} s: {problem}"
        )
        return "wrong"


def _streamed(deltas: list[Delta], index: int) -> tuple[int, ...]:
    """The tokens of sample `index`."""
    return tuple(token for delta in deltas if delta.index == index for token in delta.token_ids)
