"""Sends new tokens to callers: one message for all requests of a caller, once a turn of the loop.

A step of 256 sequences is then one message instead of 256. While a caller's link is full, new tokens stay in their
requests and merge. Tells its caller which samples have ended. Knows of a request only its deltas. Called by
`responses.py`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from fdasync.errors import DeadlineExceeded, PeerBusy, PeerRefused, PeerUnreachable, ProtocolError
from fdasync_fleet.messages import Piece, Progress
from fdasync_fleet.results import RUN_CHARS, RUN_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fdasync.engine.request_state import RequestState
    from fdasync.result import Delta
    from fdasync_fleet.instance.context import InstanceContext
    from fdasync_fleet.link.peer import Peer

#: finish reasons of samples that another instance goes on with or that found none; callers do not get them
ELSEWHERE = frozenset(("handed_over", "no_lease", "never_lease", "lease_lost"))
_MAX_PIECES = 512
_ROOM_S = 60.0


class _Reader:
    """One caller.

    Attributes:
        peer: the link to it.
        changed: its requests with new output.
        num_requests: number of its requests.
        unsent: groups of pieces that are not sent yet, in order.
        waits: a task waits for room in the link.
    """

    __slots__ = ("changed", "num_requests", "peer", "unsent", "waits")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.changed: dict[RequestState, None] = {}
        self.num_requests = 0
        self.unsent: deque[tuple[Piece, ...]] = deque()
        self.waits = False


class TokenStreams:
    """See the module."""

    def __init__(self, context: InstanceContext) -> None:
        self._context = context
        self._readers: dict[Peer, _Reader] = {}
        self._names: dict[RequestState, tuple[_Reader, str, Callable[[int], None]]] = {}
        self._due = False

    def add(self, caller: Peer, name: str, request: RequestState, on_last: Callable[[int], None]) -> None:
        """Send a request's tokens to this caller as they come. `on_last` is called with the index of each sample that
        ends before the request does."""
        reader = self._readers.get(caller)
        if reader is None:
            reader = self._readers[caller] = _Reader(caller)
        reader.num_requests += 1
        self._names[request] = reader, name, on_last
        request.on_change = self._on_change
        self._on_change(request)

    def take_last(self, request: RequestState) -> tuple[Piece, ...]:
        """A request has ended: returns its pieces that are not sent yet, once; the caller sends them before the end."""
        if request not in self._names:
            return ()
        reader, name, _ = self._names.pop(request)
        request.on_change = None
        reader.changed.pop(request, None)
        reader.num_requests -= 1
        if not reader.num_requests:
            self._readers.pop(reader.peer, None)
        before = [piece for group in reader.unsent for piece in group if piece.request == name]
        reader.unsent = deque(
            left for group in reader.unsent if (left := tuple([piece for piece in group if piece.request != name]))
        )
        return (*before, *self._pieces(name, request, lambda _index: None))

    def _on_change(self, request: RequestState) -> None:
        entry = self._names.get(request)
        if entry is None:
            return
        entry[0].changed[request] = None
        if not self._due:
            self._due = True
            self._context.loop.call_soon(self._context.guarded(self._flush))

    def _flush(self) -> None:
        self._due = False
        for reader in list(self._readers.values()):
            if (reader.changed or reader.unsent) and not reader.waits:
                self._tell(reader)

    def _tell(self, reader: _Reader) -> None:
        while (reader.changed or reader.unsent) and reader.peer.is_up:
            if not reader.peer.has_room:
                reader.waits = True
                self._context.start(self._wait(reader), f"room for tokens of {reader.peer.name}")
                return
            if not reader.unsent:
                self._gather(reader)
            if reader.unsent:
                try:
                    reader.peer.send(Progress(reader.unsent[0]))
                except (PeerUnreachable, PeerRefused, PeerBusy):
                    # the peer is lost, and its requests are about to be aborted
                    return
                except ProtocolError as error:
                    # longer than a link takes, however it is cut: the caller must not wait for it
                    reader.unsent.clear()
                    self._context.links.give_up(reader.peer, str(error))
                    return
                reader.unsent.popleft()

    def _gather(self, reader: _Reader) -> None:
        """Collect new pieces of some requests, as many as fit into a message; a request with more takes several."""
        pieces: list[Piece] = []
        tokens = 0
        while reader.changed and len(pieces) < _MAX_PIECES and tokens < RUN_TOKENS:
            request = next(iter(reader.changed))
            del reader.changed[request]
            _, name, on_last = self._names[request]
            new = self._pieces(name, request, on_last)
            tokens += sum(len(piece.token_ids) for piece in new)
            pieces += new
        reader.unsent.extend(groups(pieces))

    async def _wait(self, reader: _Reader) -> None:
        try:
            await reader.peer.room(_ROOM_S)
        except DeadlineExceeded:
            # the link decides when the peer is lost; until then tokens wait and merge
            pass
        except (PeerUnreachable, PeerRefused):
            return
        finally:
            reader.waits = False
        self._tell(reader)

    def _pieces(self, name: str, request: RequestState, on_last: Callable[[int], None]) -> list[Piece]:
        """The new output of a request's samples."""
        pieces = []
        for sample in request.samples:
            delta = sample.delta()
            if request.spoiled is not None:
                # decoding failed: the request ends with that error
                self._context.frontend.abort(request)
                break
            if delta is not None and delta.finish_reason not in ELSEWHERE:
                pieces += _runs(name, delta)
                if delta.finish_reason is not None:
                    on_last(delta.index)
        return pieces


def _runs(name: str, delta: Delta) -> list[Piece]:
    """A delta as pieces that a link takes; the last one has the finish reason."""
    count = len(delta.token_ids)
    raw, processed, top = delta.raw_logprobs, delta.processed_logprobs, delta.top_logprobs
    pieces = []
    number = max(-(-count // RUN_TOKENS), -(-len(delta.text) // RUN_CHARS), 1)
    for at in range(number):
        run, chars = slice(at * RUN_TOKENS, (at + 1) * RUN_TOKENS), slice(at * RUN_CHARS, (at + 1) * RUN_CHARS)
        pieces.append(
            Piece(
                request=name,
                index=delta.index,
                token_ids=delta.token_ids[run],
                text=delta.text[chars],
                raw_logprobs=None if raw is None else raw[run],
                processed_logprobs=None if processed is None else processed[run],
                top_logprobs=None if top is None else top[run],
                finish_reason=delta.finish_reason if at == number - 1 else None,
            )
        )
    return pieces


def groups(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    """The pieces in order, in groups that fit into one message each."""
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
