"""Says who may connect to a listener with keys (ZAP, ZeroMQ RFC 27), and counts the refused clients.

libzmq asks `inproc://zeromq.zap.01` about each client that has shown by CURVE that it has the secret of its key;
`Doorkeeper` answers from the allow list. Clients that do not come so far, since they have another server key or no keys
at all, are reported by the socket's monitor. It reports nothing of connections that do not speak ZMQ's protocol, or say
nothing until libzmq closes them; they are the accepted connections that remain. All is read on the loop. Knows no
messages. Owned by `ZmqWire`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import parse_monitor_message

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

ZAP_ADDRESS = "inproc://zeromq.zap.01"
#: domains of listeners: one for listeners that ask for keys, one for the others; libzmq cannot clear a domain
DOMAIN, OPEN_DOMAIN = b"fdasync", b"ipc"
# answers and reports in one callback of the loop
_CAP = 64
#: least time between two reports of refusals
REPORT_S = 1.0
_EVENTS = (
    zmq.Event.ACCEPTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
# most connections whose handshake is awaited; beyond them the oldest count as strangers
_MAX_AWAITED = 4096
_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
# of ZAP: the request's frames before the credentials, and a public key
_HEAD, _KEY_NBYTES = 6, 32


class Doorkeeper:
    """See the module. Reads two sockets of the wire's, which closes them.

    Args:
        allowed: public keys of clients that may connect.
        handshake_s: time after which libzmq has closed a connection without a handshake.
        on_refused: called with a reason and the number of connections that were refused for it since the last call;
            at most once in REPORT_S for each reason.

    Attributes:
        refused: number of connections that were refused, by reason: "key" (the client's key is not allowed),
            "mechanism" (it came without keys), "handshake" (it has another server key, is no client, or went away when
            it saw that keys are asked for), "stranger" (it does not speak the protocol).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        allowed: frozenset[bytes],
        handshake_s: float,
        on_refused: Callable[[str, int], None] | None,
    ) -> None:
        self.refused = {"key": 0, "mechanism": 0, "handshake": 0, "stranger": 0}
        self._handshake_s = handshake_s
        # when connections were accepted whose handshakes are awaited; whose is whose is not told, only how many
        self._awaited: deque[float] = deque()
        self._waiting: asyncio.TimerHandle | None = None
        self._loop = loop
        self._allowed = allowed
        self._on_refused = on_refused
        self._told = dict(self.refused)
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        for timer in (self._timer, self._waiting):
            if timer is not None:
                timer.cancel()

    def answer(self, sock: zmq.Socket[bytes]) -> bool:
        """Answer libzmq's questions; False if there may be more."""
        for _ in range(_CAP):
            try:
                peer, _empty, *frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            is_open = len(frames) == _HEAD and frames[2] == OPEN_DOMAIN and frames[5] == b"NULL"
            is_allowed = is_open or (
                len(frames) == _HEAD + 1
                and frames[0] == b"1.0"
                and frames[2] == DOMAIN
                and frames[5] == b"CURVE"
                and len(frames[_HEAD]) == _KEY_NBYTES
                and frames[_HEAD] in self._allowed
            )
            if not is_allowed:
                self._count("key")
            verdict = (b"200", b"OK") if is_allowed else (b"400", b"this key is not allowed")
            number = frames[1] if len(frames) > 1 else b""
            sock.send_multipart([peer, b"", b"1.0", number, *verdict, b"", b""], zmq.NOBLOCK)
        return False

    def read_failures(self, sock: zmq.Socket[bytes]) -> bool:
        """Count what the listeners' monitor reports; False if there may be more."""
        for _ in range(_CAP):
            try:
                event: dict[str, Any] = dict(parse_monitor_message(sock.recv_multipart(zmq.NOBLOCK)))
            except zmq.Again:
                return True
            kind = event["event"]
            if kind == zmq.Event.ACCEPTED:
                self._await_handshake()
                continue
            if self._awaited:
                self._awaited.popleft()
            # a key that is not allowed is counted where it is refused
            if kind not in (zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.HANDSHAKE_FAILED_AUTH):
                self._count("mechanism" if event["value"] == _MISMATCH else "handshake")
        return False

    def watch(self, sock: zmq.Socket[bytes], address: str) -> None:
        """Have a socket report its failed handshakes at an inproc address."""
        sock.monitor(address, int(_EVENTS))

    def _await_handshake(self) -> None:
        self._awaited.append(self._loop.time() + self._handshake_s)
        if len(self._awaited) > _MAX_AWAITED:
            self._awaited.popleft()
            self._count("stranger")
        if self._waiting is None:
            # bare timer: looks who has come no further
            self._waiting = self._loop.call_at(self._awaited[0], self._count_strangers)

    def _count_strangers(self) -> None:
        self._waiting = None
        now = self._loop.time()
        while self._awaited and self._awaited[0] <= now:
            self._awaited.popleft()
            self._count("stranger")
        if self._awaited:
            # bare timer: the same
            self._waiting = self._loop.call_at(self._awaited[0], self._count_strangers)

    def _count(self, reason: str) -> None:
        self.refused[reason] += 1
        if self._timer is None:
            # bare timer: reports what was counted until then
            self._timer = self._loop.call_later(REPORT_S, self._report)

    def _report(self) -> None:
        self._timer = None
        told, self._told = self._told, dict(self.refused)
        for reason, count in self.refused.items():
            if count > told[reason] and self._on_refused is not None:
                self._on_refused(reason, count - told[reason])
