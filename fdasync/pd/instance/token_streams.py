"""New tokens on their way to callers: those of all requests of one caller together, once a turn of the loop.

A step of 256 sequences is one message, not 256. What a caller that does not keep up was not told stays with its
requests, and merges. Used by `responses.py`; knows requests as what deltas come from.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from fdasync.errors import DeadlineExceeded, PeerBusy, PeerRefused, PeerUnreachable, ProtocolError
from fdasync.pd.messages import Piece, Progress
from fdasync.pd.results import RUN_CHARS, RUN_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fdasync.engine.output import RequestOutput
    from fdasync.pd.instance.context import Site
    from fdasync.pd.link.peer import Peer
    from fdasync.result import Delta

#: finish reasons of what another instance goes on with, or nobody: no caller is told of them
ELSEWHERE = frozenset(("handed_over", "no_lease", "never_lease", "lease_lost"))
_MAX_PIECES = 512
_ROOM_S = 60.0


class _Reader:
    """One caller: its requests by name, and those of which something is new."""

    __slots__ = ("news", "num_requests", "peer", "unsent", "waits")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.news: dict[RequestOutput, None] = {}
        self.num_requests = 0
        self.unsent: deque[tuple[Piece, ...]] = deque()
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
        before = [piece for group in reader.unsent for piece in group if piece.request == name]
        reader.unsent = deque(
            left for group in reader.unsent if (left := tuple([piece for piece in group if piece.request != name]))
        )
        return (*before, *self._pieces(name, request))

    def _on_news(self, request: RequestOutput) -> None:
        entry = self._names.get(request)
        if entry is None:
            return
        entry[0].news[request] = None
        if not self._due:
            self._due = True
            self._site.loop.call_soon(self._site.guarded(self._flush))

    def _flush(self) -> None:
        self._due = False
        for reader in list(self._readers.values()):
            if (reader.news or reader.unsent) and not reader.waits:
                self._tell(reader)

    def _tell(self, reader: _Reader) -> None:
        while (reader.news or reader.unsent) and reader.peer.is_up:
            if not reader.peer.has_room:
                reader.waits = True
                self._site.start(self._wait(reader), f"room for news of {reader.peer.name}")
                return
            if not reader.unsent:
                self._gather(reader)
            if reader.unsent:
                try:
                    reader.peer.send(Progress(reader.unsent[0]))
                except (PeerUnreachable, PeerRefused, PeerBusy):
                    # it is lost, and its requests are about to be aborted
                    return
                except ProtocolError as error:
                    # more than a link takes, however it is cut: its caller must not wait for what never comes
                    reader.unsent.clear()
                    self._site.links.give_up(reader.peer, str(error))
                    return
                reader.unsent.popleft()

    def _gather(self, reader: _Reader) -> None:
        """What is new of some requests, as much as goes into a message; one that has more to say takes several."""
        pieces: list[Piece] = []
        tokens = 0
        while reader.news and len(pieces) < _MAX_PIECES and tokens < RUN_TOKENS:
            request = next(iter(reader.news))
            del reader.news[request]
            new = self._pieces(self._names[request][1], request)
            tokens += sum(len(piece.token_ids) for piece in new)
            pieces += new
        reader.unsent.extend(groups(pieces))

    async def _wait(self, reader: _Reader) -> None:
        try:
            await reader.peer.room(_ROOM_S)
        except DeadlineExceeded:
            # its link says when it is lost; until then all waits and merges
            pass
        except (PeerUnreachable, PeerRefused):
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
                pieces += _runs(name, delta)
        return pieces


def _runs(name: str, delta: Delta) -> list[Piece]:
    """A delta as pieces that a link takes; the end comes with the last."""
    count = len(delta.token_ids)
    raw, processed, top = delta.raw_logprobs, delta.processed_logprobs, delta.top_logprobs
    pieces = []
    number = max(-(-count // RUN_TOKENS), -(-len(delta.text) // RUN_CHARS), 1)
    for at in range(number):
        run, chars = slice(at * RUN_TOKENS, (at + 1) * RUN_TOKENS), slice(at * RUN_CHARS, (at + 1) * RUN_CHARS)
        pieces.append(
            Piece(
                name,
                delta.index,
                delta.token_ids[run],
                delta.text[chars],
                None if raw is None else raw[run],
                None if processed is None else processed[run],
                None if top is None else top[run],
                delta.finish_reason if at == number - 1 else None,
            )
        )
    return pieces


def groups(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    """As many as go into one message, in order."""
    found: list[list[Piece]] = []
    tokens = 0
    for piece in pieces:
        count = len(piece.token_ids)
        if not found or len(found[-1]) >= _MAX_PIECES or tokens + count > RUN_TOKENS:
            found.append([])
            tokens = 0
        found[-1].append(piece)
        tokens += count
    return [tuple(group) for group in found]
