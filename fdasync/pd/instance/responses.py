"""What an instance tells the caller of a request: new tokens as they come, rows and the end, or why there is no end.

Of requests that are served here whole, those that another instance prefilled, and those that are handed to another
instance. New tokens of all requests of a caller go in one message for each turn of the loop
(`token_streams.py`). A caller that is gone has its requests aborted. Called by `instance.py`; knows the door and
results, no schedule."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from fdasync.errors import (
    BadInput,
    FdasyncError,
    PeerRefused,
    PeerUnreachable,
    PermanentError,
    ProtocolError,
    TooLong,
)
from fdasync.pd.instance.token_streams import ELSEWHERE, Streams, groups
from fdasync.pd.messages import Abort, Failed, Moved, Progress, PromptTokens
from fdasync.pd.results import ended_message, output_messages, row_messages

if TYPE_CHECKING:
    from fdasync.engine.inputs import Ask
    from fdasync.engine.output import RequestOutput
    from fdasync.pd.instance.context import Site
    from fdasync.pd.instance.prefill_service import Asking
    from fdasync.pd.link.peer import Peer
    from fdasync.pd.messages import Piece

_WORDS_CHARS = 4096


class Answers:
    """See the module."""

    def __init__(self, site: Site, asking: Asking) -> None:
        self._site = site
        self._asking = asking
        self._streams = Streams(site)
        # by caller and the request's name among instances; a request at the door has no output yet
        self._live: dict[tuple[bytes, str], RequestOutput | None] = {}
        self._aborted: set[tuple[bytes, str]] = set()
        self._lost: set[RequestOutput] = set()
        self._telling = 0

    @property
    def num_live(self) -> int:
        """Requests whose callers have not been told of their end."""
        return len(self._live) + self._telling

    def submit(self, caller: Peer, name: str, ask: Ask) -> None:
        """Serve a request of this caller."""
        place = caller.incarnation, name
        if place in self._live:
            # a name never repeats: this is the same request again
            return
        self._live[place] = None
        self._site.start(self._serve(caller, name, ask), f"request {name}")

    def follow(self, request: RequestOutput, caller: bytes, name: str) -> None:
        """Answer this caller from now on about a request that was taken over."""
        peer = self._site.links.find(caller)
        assert peer is not None
        self._watch(peer, name, request)

    def lose(self, request: RequestOutput) -> None:
        """It came in part, or was given up while it came: end it; its caller is told that it was lost."""
        if not request.done.done():
            self._lost.add(request)
            # how it ends here is nobody's affair
            self._streams.take_last(request)
            self._site.door.abort(request)

    def abort(self, caller: Peer, message: Abort) -> None:
        """End it with what it has; one that is still at the door never begins. Unknown ones have ended."""
        place = caller.incarnation, message.request
        if place in self._live:
            request = self._live[place]
            self._aborted.add(place)
            if request is not None:
                self._site.door.abort(request)
            elif (waiting := self._site.door.find(message.request)) is not None:
                self._site.door.abort(waiting)

    def on_lost(self, caller: Peer) -> None:
        """A caller is gone: nobody wants its answers."""
        for incarnation, name in list(self._live):
            if incarnation == caller.incarnation:
                self.abort(caller, Abort(name))

    # -- one request --------------------------------------------------------------------------------

    async def _serve(self, caller: Peer, name: str, ask: Ask) -> None:
        place = caller.incarnation, name
        try:
            request = await self._site.door.submit(ask)
        except FdasyncError as error:
            del self._live[place]
            self._aborted.discard(place)
            self._site.tell(caller, failed(name, error))
            return
        if isinstance(ask.prompt, str) and request.prompt:
            self._site.tell(caller, PromptTokens(name, array("i", request.prompt).tobytes()))
        self._watch(caller, name, request)
        if place in self._aborted:
            self._site.door.abort(request)

    def _watch(self, caller: Peer, name: str, request: RequestOutput) -> None:
        """Tell of its tokens as they come, and of its end. No coroutine waits meanwhile: most of its life is steps."""
        self._live[caller.incarnation, name] = request
        asked = request.asked
        streams = asked is not None and asked[0].streams and asked[0].errand is None
        if streams:
            self._streams.add(caller, name, request)
        ended = self._site.guarded(lambda: self._ended(caller, name, request, streams))
        request.done.add_done_callback(ended)

    def _ended(self, caller: Peer, name: str, request: RequestOutput, streams: bool) -> None:
        place = caller.incarnation, name
        self._live.pop(place, None)
        self._aborted.discard(place)
        reasons = {sample.finish.reason for sample in request.samples if sample.finish is not None}
        last = self._streams.take_last(request) if streams else ()
        lost = request in self._lost
        self._lost.discard(request)
        went_to = self._asking.take_moved(name)
        if went_to:
            # also where it was aborted in the same turn: whoever has all of it answers alone
            self._site.tell(caller, Moved(name, went_to))
        elif lost:
            words = Failed(name, "InstanceLost", "not all of it was handed over", retriable=True)
            self._site.tell(caller, words)
        elif reasons == {"lease_lost"}:
            # nothing came of it here: who sent it knows
            return
        elif reasons & ELSEWHERE:
            self._nowhere(caller, name, request, reasons)
        elif caller.is_up and not request.done.cancelled():
            self._telling += 1
            self._site.start(self._tell_end(caller, name, request, last), f"end of {name}")

    async def _tell_end(self, caller: Peer, name: str, request: RequestOutput, last: tuple[Piece, ...]) -> None:
        site = self._site
        try:
            for pieces in groups(last):
                await site.say(caller, Progress(pieces))
            await request.decode()
            try:
                result = site.door.result(request)
            except FdasyncError as error:
                await site.say(caller, failed(name, error))
                return
            for words, payload in row_messages(name, result):
                await site.say(caller, words, payload)
            for outputs in output_messages(name, result):
                await site.say(caller, outputs)
            await site.say(caller, ended_message(name, result))
        except ProtocolError as error:
            # a link does not take it: its caller must know, and nobody else need
            site.tell(caller, failed(name, error))
        except (PeerUnreachable, PeerRefused):
            # nobody is there to tell
            return
        finally:
            self._telling -= 1

    def _nowhere(self, caller: Peer, name: str, request: RequestOutput, reasons: set[str]) -> None:
        """Nobody has all of it."""
        if reasons & {"no_lease", "never_lease"}:
            notes = [sample.finish.note for sample in request.samples if sample.finish is not None]
            problem = f"no decode instance took it: {next((note for note in notes if note), '')}"[:_WORDS_CHARS]
            words = Failed(
                name,
                "InstanceLost",
                problem,
                retriable=True,
                whole="never_lease" in reasons,
                # of a text nobody but us knows how long it is, and whom to send it to may depend on it
                prompt_tokens=len(request.prompt),
            )
            self._site.tell(caller, words)


def failed(name: str, error: FdasyncError) -> Failed:
    """An error, for the other side of a link."""
    kind = type(error).__name__
    retriable = not isinstance(error, PermanentError)
    if isinstance(error, BadInput):
        limit = "" if error.limit is None else str(error.limit)[:_WORDS_CHARS]
        problem = error.problem[:_WORDS_CHARS]
        count = 0
        if isinstance(error, TooLong):
            kind, count = BadInput.__name__, error.prompt_tokens
        return Failed(
            name, kind, problem, error.field[:_WORDS_CHARS], limit, error.hint[:_WORDS_CHARS], prompt_tokens=count
        )  # fmt: skip
    # an engine that failed or closes cannot serve it; another one can
    retriable = retriable or kind in ("EngineFailed", "EngineClosed")
    return Failed(name, kind, str(error)[:_WORDS_CHARS], retriable=retriable)
