"""New tokens on their way to callers: those of all requests of one caller together, once a turn of the loop.

A step of 256 sequences is one message, not 256. What a caller that does not keep up was not told stays with its
requests, and merges. Used by `answers.py`; knows requests as what deltas come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdasync.errors import DeadlineExceeded, PeerBusy, PeerRefused, PeerUnreachable
from fdasync.pd.messages import Piece, Progress

if TYPE_CHECKING:
    from fdasync.output import RequestOutput
    from fdasync.pd.peer import Peer
    from fdasync.pd.site import Site

#: finish reasons of what another instance goes on with, or nobody: no caller is told of them
ELSEWHERE = frozenset(("handed_over", "no_lease", "lease_lost"))
_MAX_PIECES = 512
_ROOM_S = 60.0


class _Reader:
    """One caller: its requests by name, and those of which something is new."""

    __slots__ = ("news", "num_requests", "peer", "waits")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.news: dict[RequestOutput, None] = {}
        self.num_requests = 0
        self.waits = False


class Streams:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._readers: dict[Peer, _Reader] = {}
        self._names: dict[RequestOutput, tuple[_Reader, str]] = {}
        self._due = False

    def add(self, caller: Peer, name: str, request: RequestOutput) -> None:
        """Tell this caller of a request's tokens as they come."""
        reader = self._readers.get(caller)
        if reader is None:
            reader = self._readers[caller] = _Reader(caller)
        reader.num_requests += 1
        self._names[request] = reader, name
        request.on_news = self._on_news
        self._on_news(request)

    def take_last(self, request: RequestOutput) -> tuple[Piece, ...]:
        """A request ended: what of it was not told yet, for its caller to be told first of all; once."""
        if request not in self._names:
            return ()
        reader, name = self._names.pop(request)
        request.on_news = None
        reader.news.pop(request, None)
        reader.num_requests -= 1
        if not reader.num_requests:
            self._readers.pop(reader.peer, None)
        return tuple(self._pieces(name, request))

    def _on_news(self, request: RequestOutput) -> None:
        entry = self._names.get(request)
        if entry is None:
            return
        entry[0].news[request] = None
        if not self._due:
            self._due = True
            self._site.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._due = False
        for reader in list(self._readers.values()):
            if reader.news and not reader.waits:
                self._tell(reader)

    def _tell(self, reader: _Reader) -> None:
        while reader.news and reader.peer.is_up:
            if not reader.peer.has_room:
                reader.waits = True
                self._site.start(self._wait(reader), f"room for news of {reader.peer.name}")
                return
            pieces: list[Piece] = []
            while reader.news and len(pieces) < _MAX_PIECES:
                request = next(iter(reader.news))
                del reader.news[request]
                pieces += self._pieces(self._names[request][1], request)
            if pieces:
                try:
                    reader.peer.send(Progress(tuple(pieces)))
                except (PeerUnreachable, PeerRefused, PeerBusy):
                    # it is lost, and its requests are about to be aborted
                    return

    async def _wait(self, reader: _Reader) -> None:
        try:
            await reader.peer.room(_ROOM_S)
        except (PeerUnreachable, PeerRefused, DeadlineExceeded):
            return
        finally:
            reader.waits = False
        self._tell(reader)

    def _pieces(self, name: str, request: RequestOutput) -> list[Piece]:
        """Everything new of a request's samples."""
        pieces = []
        for sample in request.samples:
            delta = sample.delta()
            if request.spoiled is not None:
                # told at its end, with what there is
                self._site.door.abort(request)
                break
            if delta is not None and delta.finish_reason not in ELSEWHERE:
                pieces.append(
                    Piece(
                        name,
                        delta.index,
                        delta.token_ids,
                        delta.text,
                        delta.raw_logprobs,
                        delta.processed_logprobs,
                        delta.top_logprobs,
                        delta.finish_reason,
                    )
                )
        return pieces
