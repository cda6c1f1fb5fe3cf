"""Sends the result of one request to its caller: each sample when it ends, if the caller reads deltas, then the end.

A sample goes as its rows, its output and its `SampleEnd`; none is sent twice. A request of one sample without rows ends
with one message, `Answered`. The caller's link bounds what waits: a task makes and sends one message after the other.
Knows of a request only its samples and its result. Made by `responses.py`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from fdasync.errors import (
    BadInput,
    FdasyncError,
    GrammarFailed,
    PeerRefused,
    PeerUnreachable,
    PermanentError,
    ProtocolError,
    TooLong,
    WeightsBroken,
)
from fdasync_fleet.instance.token_streams import groups
from fdasync_fleet.messages import Ended, Failed, Progress, brief
from fdasync_fleet.results import answer_message, prompt_message, sample_messages, score_messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync.engine.request_state import RequestState
    from fdasync.result import Sample
    from fdasync_fleet.instance.context import InstanceContext
    from fdasync_fleet.link.peer import Peer
    from fdasync_fleet.messages import Piece


class ResultSender:
    """See the module.

    Args:
        tokens: the caller sent the prompt as tokens; False: as text, or it is not known.
        on_end: called once after `send_end`, when all was sent or cannot be.
    """

    def __init__(
        self,
        context: InstanceContext,
        caller: Peer,
        name: str,
        request: RequestState,
        on_end: Callable[[], None],
        *,
        tokens: bool,
    ) -> None:
        self._context = context
        self._caller = caller
        self._name = name
        self._request = request
        self._on_end = on_end
        self._tokens = tokens
        self._waiting: deque[int] = deque()
        self._sent: set[int] = set()
        self._last: tuple[Piece, ...] | None = None
        self._is_running = False
        # the caller is gone, or has its error
        self._is_over = False

    def send_sample(self, index: int) -> None:
        """A sample has ended, and its request goes on."""
        self._waiting.append(index)
        self._go()

    def send_end(self, last: tuple[Piece, ...]) -> None:
        """The request has ended: send these last pieces of it, the samples that were not sent yet, and the end."""
        self._last = last
        self._go()

    def _go(self) -> None:
        if not self._is_running:
            self._is_running = True
            self._context.start(self._run(), f"result of {self._name}")

    async def _run(self) -> None:
        try:
            while self._waiting and not self._is_over:
                sample = self._request.samples[self._waiting.popleft()].sample(self._context.capacity())
                await self._say_sample(sample)
            if self._last is not None and not self._is_over:
                await self._say_end(self._last)
        except ProtocolError as error:
            # a message is longer than a link takes: only its caller must know
            self._is_over = True
            self._context.tell(self._caller, failed(self._name, error))
            self._context.frontend.abort(self._request)
        except (PeerUnreachable, PeerRefused):
            self._is_over = True
        finally:
            self._is_running = False
            if self._last is not None:
                self._on_end()

    async def _say_sample(self, sample: Sample) -> None:
        await self._say_prompt()
        self._sent.add(sample.index)
        for message, payload in sample_messages(self._name, sample):
            await self._context.say(self._caller, message, payload)

    async def _say_prompt(self) -> None:
        if not self._sent and not self._tokens:
            await self._context.say(self._caller, prompt_message(self._name, self._request.prompt))

    async def _say_end(self, last: tuple[Piece, ...]) -> None:
        context, caller, name, request = self._context, self._caller, self._name, self._request
        for pieces in groups(last):
            await context.say(caller, Progress(pieces))
        await request.settle()
        try:
            result = context.frontend.result(request)
        except FdasyncError as error:
            await context.say(caller, failed(name, error))
            return
        whole = len(result.samples) == 1 and not self._sent and request.scores is None
        if whole and (answer := answer_message(name, result.samples[0])) is not None:
            await self._say_prompt()
            await context.say(caller, answer)
            return
        for sample in result.samples:
            if sample.index not in self._sent:
                await self._say_sample(sample)
        for scored in score_messages(name, 0, request.scores) if request.scores is not None else ():
            await context.say(caller, scored)
        await context.say(caller, Ended(name))


def failed(name: str, error: FdasyncError) -> Failed:
    """An error as a message."""
    kind = type(error).__name__
    if isinstance(error, BadInput):
        limit = "" if error.limit is None else str(error.limit)
        count = 0
        if isinstance(error, TooLong):
            kind, count = BadInput.__name__, error.prompt_tokens
        problem, field, limit, hint = map(brief, (error.problem, error.field, limit, error.hint))
        return Failed(
            request=name, error=kind, problem=problem, field=field, limit=limit, hint=hint, prompt_tokens=count
        )
    # another engine can serve the request of an engine that failed or closes
    retriable = not isinstance(error, PermanentError) or kind in ("EngineFailed", "EngineClosed")
    if isinstance(error, WeightsBroken):
        # its subclass says the same of the weights
        kind = WeightsBroken.__name__
    problem = error.problem if isinstance(error, GrammarFailed | WeightsBroken) else str(error)
    return Failed(name, kind, brief(problem), retriable=retriable)
