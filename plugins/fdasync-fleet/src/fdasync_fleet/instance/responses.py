"""Serves a router's requests on an instance, and sends their tokens, results and errors to the router (the caller).

It serves requests that stay here, requests that this instance took over, and requests that it hands over (their caller
gets `Moved`). `token_streams.py` sends new tokens, `result_sender.py` samples and ends. When a caller is gone, its
requests are aborted. Knows the frontend, and no schedule. Called by `instance.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import FdasyncError
from fdasync_fleet.instance.result_sender import ResultSender, failed
from fdasync_fleet.instance.token_streams import ELSEWHERE, TokenStreams
from fdasync_fleet.messages import Abort, Failed, Moved, brief
from fdasync_fleet.results import prompt_message

if TYPE_CHECKING:
    from fdasync.engine.request_state import RequestState
    from fdasync.request import GenerateRequest
    from fdasync.result import FinishReason
    from fdasync_fleet.instance.context import InstanceContext
    from fdasync_fleet.instance.prefill_service import PrefillService
    from fdasync_fleet.link.peer import Peer


class Responses:
    """See the module."""

    def __init__(self, context: InstanceContext, prefill_service: PrefillService) -> None:
        self._context = context
        self._prefill_service = prefill_service
        self._token_streams = TokenStreams(context)
        # by caller and the request's name among instances; None while the request is in preparation
        self._live: dict[tuple[bytes, str], RequestState | None] = {}
        self._aborted: set[tuple[bytes, str]] = set()
        self._lost: set[RequestState] = set()
        self._num_ending = 0

    @property
    def num_live(self) -> int:
        """Number of requests whose ends are not sent yet."""
        return len(self._live) + self._num_ending

    def submit(self, caller: Peer, name: str, asked: GenerateRequest) -> None:
        """Serve a request of this caller."""
        place = caller.incarnation, name
        if place in self._live:
            # a name never repeats, so this is the same request again
            return
        self._live[place] = None
        self._context.start(self._serve(caller, name, asked), f"request {name}")

    def follow(self, request: RequestState, caller: bytes, name: str) -> None:
        """Send a request that this instance took over to this caller from now on."""
        peer = self._context.links.find(caller)
        assert peer is not None
        self._watch(peer, name, request, tokens=False)

    def lose(self, request: RequestState) -> None:
        """A request was handed over in part only, or given up by the prefill side: end it, and tell its caller that it
        is lost."""
        if not request.done.done():
            self._lost.add(request)
            # its last tokens are not sent
            self._token_streams.take_last(request)
            self._context.frontend.abort(request)

    def abort(self, caller: Peer, message: Abort) -> None:
        """End a request with the tokens that it has; one in preparation never begins. An unknown one has ended."""
        place = caller.incarnation, message.request
        if place in self._live:
            request = self._live[place]
            self._aborted.add(place)
            if request is not None:
                self._context.frontend.abort(request)
            elif (waiting := self._context.frontend.find(message.request)) is not None:
                self._context.frontend.abort(waiting)

    def on_lost(self, caller: Peer) -> None:
        """A caller is gone: abort its requests."""
        for incarnation, name in list(self._live):
            if incarnation == caller.incarnation:
                self.abort(caller, Abort(name))

    # -- one request --------------------------------------------------------------------------------

    async def _serve(self, caller: Peer, name: str, asked: GenerateRequest) -> None:
        place = caller.incarnation, name
        try:
            request = await self._context.frontend.submit(asked)
        except FdasyncError as error:
            del self._live[place]
            self._aborted.discard(place)
            self._context.tell(caller, failed(name, error))
            return
        text = isinstance(asked.prompt, str)
        if text and request.prompt:
            self._context.tell(caller, prompt_message(name, request.prompt))
        self._watch(caller, name, request, tokens=not text)
        if place in self._aborted:
            self._context.frontend.abort(request)

    def _watch(self, caller: Peer, name: str, request: RequestState, *, tokens: bool) -> None:
        """Send a request's tokens and samples as they come, and its end. Callbacks do this, so that a request needs a
        task only while something of its result is sent. `tokens`: see `ResultSender`."""
        self._live[caller.incarnation, name] = request
        asked = request.asked
        streams = asked is not None and asked[0].streams and asked[0].hand_off is None
        sender = ResultSender(self._context, caller, name, request, self._result_sent, tokens=tokens)
        if streams:
            self._token_streams.add(caller, name, request, sender.send_sample)
        ended = self._context.guarded(lambda: self._ended(sender, caller, name, request, streams))
        request.done.add_done_callback(ended)

    def _ended(self, sender: ResultSender, caller: Peer, name: str, request: RequestState, streams: bool) -> None:
        place = caller.incarnation, name
        self._live.pop(place, None)
        self._aborted.discard(place)
        reasons = {sample.finish.reason for sample in request.samples if sample.finish is not None}
        last = self._token_streams.take_last(request) if streams else ()
        lost = request in self._lost
        self._lost.discard(request)
        went_to = self._prefill_service.take_moved(name)
        if went_to:
            # even if it was aborted in the same turn: the decode instance alone answers from now on
            self._context.tell(caller, Moved(name, went_to))
        elif lost:
            message = Failed(name, "InstanceLost", "not all of it was handed over", retriable=True)
            self._context.tell(caller, message)
        elif reasons == {"lease_lost"}:
            # the prefill side ended the lease, and tells the caller
            return
        elif reasons & ELSEWHERE:
            self._nowhere(caller, name, request, reasons)
        elif caller.is_up and not request.done.cancelled():
            self._num_ending += 1
            sender.send_end(last)

    def _result_sent(self) -> None:
        self._num_ending -= 1

    def _nowhere(self, caller: Peer, name: str, request: RequestState, reasons: set[FinishReason]) -> None:
        """No decode instance took the request."""
        if reasons & {"no_lease", "never_lease"}:
            notes = [sample.finish.note for sample in request.samples if sample.finish is not None]
            problem = f"no decode instance took it: {next((note for note in notes if note), '')}"
            message = Failed(
                name,
                "InstanceLost",
                brief(problem),
                retriable=True,
                whole="never_lease" in reasons,
                # the router does not tokenise a text, and its choice may depend on the number of tokens
                prompt_tokens=len(request.prompt),
            )
            self._context.tell(caller, message)
