"""Makes a lossy wire reliable: numbers, acknowledges, repeats and orders the messages between two processes.

Each side has a *session*. Between two sessions each message is delivered once and in order, whatever the wire loses,
repeats or reorders. Each frame begins with an envelope: the sender's session, the recipient's (zeros while it is
unknown), the message's number (0: it has none and may be lost), and the number up to which the sender has received all.

A session's name has 16 bytes: 12 random bytes of its process, and 4 that count its sessions. So a frame of an ended
session is never taken for one of the next, even between the same two processes.

Pure: knows no loop, no clock and no messages; callers pass the time. Called by `peer.py`, `links.py` and `inbound.py`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from fdasync_fleet.fields import MOST_S, Meta
from fdasync_fleet.messages import MAX_MESSAGE_NBYTES, MAX_PAYLOAD_NBYTES

if TYPE_CHECKING:
    from fdasync_fleet.link.wire import Frame

_NUMBERS = struct.Struct("<QQ")
NUMBERS_OF = _NUMBERS.unpack_from
PROCESS_NBYTES = 12
SESSION_NBYTES = 16
PAIR_NBYTES = 2 * SESSION_NBYTES
ENVELOPE_NBYTES = PAIR_NBYTES + _NUMBERS.size
MAX_FRAME_NBYTES = ENVELOPE_NBYTES + MAX_MESSAGE_NBYTES
NOBODY = bytes(SESSION_NBYTES)
NEVER = float("inf")
Time = Annotated[float, Meta(ge=1e-3, le=MOST_S)]
Many = Annotated[int, Meta(ge=1)]


def process_of(session: bytes) -> bytes:
    """The incarnation of a session's process: 16 bytes, as `Links.incarnation` and `Peer.incarnation`."""
    return session[:PROCESS_NBYTES] + bytes(SESSION_NBYTES - PROCESS_NBYTES)


def session_name(process: bytes, number: int) -> bytes:
    """The name of a process's session; `number` counts from 1."""
    return process[:PROCESS_NBYTES] + number.to_bytes(SESSION_NBYTES - PROCESS_NBYTES, "big")


def is_sound(frames: list[Frame]) -> bool:
    """Whether these frames are an envelope with a body, and at most one payload, all of sizes that a link takes."""
    if not ENVELOPE_NBYTES <= len(frames[0]) <= MAX_FRAME_NBYTES:
        return False
    return len(frames) == 1 or (len(frames) == 2 and len(frames[1]) <= MAX_PAYLOAD_NBYTES)


class LinkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of a link in seconds, and its bounds for one peer.

    Attributes:
        beat_s: time between heartbeats.
        lost_s: an instance that is silent for so long is lost.
        router_lost_s: a router that is silent for so long is lost. Its loop may stand still while its process does
            other work (a trainer's step). A router whose connection closed is lost after `lost_s`.
        deaf_s: a peer that sends frames but acknowledges no message for so long is lost.
        window_messages, window_nbytes: most messages and bytes that are sent and not acknowledged; `PeerBusy` refuses
            more. The last message may exceed the bytes.
        ack_messages, ack_s: an acknowledgement is sent alone after so many messages, or after so long.
        retry_s, retry_most_s: time until a message or a Hello is sent again without a reply, at first and at most.
    """

    beat_s: Time = 0.5
    lost_s: Time = 3.0
    router_lost_s: Time = 300.0
    deaf_s: Time = 10.0
    window_messages: Many = 4096
    window_nbytes: Many = 64 << 20
    ack_messages: Many = 64
    ack_s: Time = 0.05
    retry_s: Time = 0.2
    retry_most_s: Time = 1.0


class Sent(NamedTuple):
    """A message that is not acknowledged yet: its encoded body and its payload."""

    body: bytes
    payload: bytes | None


class Counters(msgspec.Struct):
    """Counters of a link; they only grow.

    Attributes:
        sent, received: messages, each counted once.
        resent: messages sent again.
        duplicates: messages that had been received already.
        held: messages that came before their turn and were kept.
        dropped: messages that came before their turn and were not kept.
        late: frames of other sessions.
        malformed: frames without an envelope, and bodies that are no message.
        refused: handshakes that did not fit.
    """

    sent: int = 0
    received: int = 0
    resent: int = 0
    duplicates: int = 0
    held: int = 0
    dropped: int = 0
    late: int = 0
    malformed: int = 0
    refused: int = 0


# messages sent again at first after silence: all may have been lost, or only an acknowledgement
_FIRST_BURST = 32


class Session:
    """See the module.

    Attributes:
        ours, theirs: names of the two sessions; `theirs` is NOBODY until the other side has sent it.
        counters: the peer's counters.
        base: number of our first message that is not acknowledged.
        expected: number of the next message that can be delivered.
        incoming: the first bytes of every frame that the other side sends in this session.
        confirmed: the other side has shown that it knows both names.
        heard: time of the last frame from the other side.
        cut_at: time since which the wire knows that the connection is closed; NEVER: it is not.
        owed: number of messages that arrived and were not acknowledged.
        ack_due, retry_due: time to acknowledge, and to send again; NEVER if there is no need.
        unacked_nbytes: bytes of the messages that are not acknowledged.
        wire_full: the wire refused a frame and has not reported room since.
    """

    __slots__ = (
        "_config",
        "_cursor",
        "_deaf_beats",
        "_head",
        "_held",
        "_held_nbytes",
        "_known_base",
        "_known_heard",
        "_last",
        "_limit",
        "_reached",
        "_retry_s",
        "_unacked",
        "ack_due",
        "base",
        "confirmed",
        "counters",
        "cut_at",
        "expected",
        "heard",
        "incoming",
        "ours",
        "owed",
        "retry_due",
        "theirs",
        "unacked_nbytes",
        "wire_full",
    )

    def __init__(self, ours: bytes, config: LinkConfig, counters: Counters, now: float) -> None:
        self.ours = ours
        self.counters = counters
        self.confirmed = False
        self.heard = now
        self.cut_at = NEVER
        self._config = config
        # `base` and `heard` at the last beat
        self._known_base, self._known_heard = 1, now
        self._deaf_beats = 0
        self.bind(NOBODY)
        # sending: messages [base, last] are not acknowledged; messages from the cursor on go next, up to the limit
        self._unacked: dict[int, Sent] = {}
        self.unacked_nbytes = 0
        self.base = 1
        self._cursor = 1
        self._last = 0
        self._reached = 0
        self._limit = config.window_messages
        self._retry_s = config.retry_s
        self.retry_due = NEVER
        self.wire_full = False
        # receiving: everything below `expected` was delivered
        self.expected = 1
        self._held: dict[int, list[Frame]] = {}
        self._held_nbytes = 0
        self.owed = 0
        self.ack_due = NEVER

    def bind(self, theirs: bytes) -> None:
        """Set the name of the other side's session."""
        self.theirs = theirs
        self._head = self.ours + theirs
        self.incoming = theirs + self.ours

    # -- sending ------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the window is full, so that another message is refused."""
        config = self._config
        return len(self._unacked) >= config.window_messages or self.unacked_nbytes >= config.window_nbytes

    @property
    def unacked(self) -> int:
        return len(self._unacked)

    @property
    def has_more(self) -> bool:
        """Whether messages wait that the wire has not taken."""
        return self._cursor <= self._last

    def bare(self, body: bytes = b"") -> bytes:
        """A frame without a number: it acknowledges, and carries a message (if any) that may be lost."""
        self.owed = 0
        self.ack_due = NEVER
        return self._head + _NUMBERS.pack(0, self.expected - 1) + body

    def add(self, body: bytes, payload: bytes | None, now: float) -> bool:
        """Keep a message until it is acknowledged. True: the wire can take it now (`next_frames`)."""
        if not self._unacked:
            self.retry_due = now + self._retry_s
        self._last = last = self._last + 1
        self._unacked[last] = Sent(body, payload)
        self.unacked_nbytes += len(body) if payload is None else len(body) + len(payload)
        self.counters.sent += 1
        return self._cursor == last and not self.wire_full

    def next_frames(self) -> list[Frame] | None:
        """The next frames for the wire, if any; call `went` when the wire took them."""
        cursor = self._cursor
        if cursor > self._last or cursor >= self.base + self._limit:
            return None
        body, payload = self._unacked[cursor]
        frame = self._head + _NUMBERS.pack(cursor, self.expected - 1) + body
        return [frame] if payload is None else [frame, payload]

    def went(self) -> None:
        """The wire took the frames of `next_frames`."""
        if self._cursor > self._reached:
            self._reached = self._cursor
        else:
            self.counters.resent += 1
        self._cursor += 1
        self.owed = 0
        self.ack_due = NEVER

    def acknowledged(self, number: int, now: float) -> bool:
        """The other side has all messages up to this number. True: the window has more room than before."""
        if number < self.base or number > self._last:
            # an old number, or a number that was never sent
            return False
        unacked = self._unacked
        for each in range(self.base, number + 1):
            body, payload = unacked.pop(each)
            self.unacked_nbytes -= len(body) if payload is None else len(body) + len(payload)
        self.base = number + 1
        self._cursor = max(self._cursor, self.base)
        self._limit = min(2 * self._limit, self._config.window_messages)
        self._retry_s = self._config.retry_s
        self.retry_due = now + self._retry_s if unacked else NEVER
        return True

    def retry(self, now: float) -> None:
        """`retry_due` is over: send again from the first message that is not acknowledged.

        A few at first, twice as many once they are acknowledged, and so on, so that a slow peer does not get all of
        the window again.
        """
        if not self.wire_full:
            self._cursor = self.base
            self._limit = min(_FIRST_BURST, self._config.window_messages)
        self._retry_s = min(2 * self._retry_s, self._config.retry_most_s)
        self.retry_due = now + self._retry_s

    def is_deaf(self) -> bool:
        """Call at each beat: whether the other side goes on sending and has acknowledged nothing for too long.

        Beats without a frame from the other side do not count: a process that stands still reads nothing either.
        """
        if not self._unacked or self.base != self._known_base:
            self._deaf_beats = 0
        elif self.heard != self._known_heard:
            self._deaf_beats += 1
        self._known_base, self._known_heard = self.base, self.heard
        return self._deaf_beats * self._config.beat_s >= self._config.deaf_s

    # -- receiving ----------------------------------------------------------------------------

    def took(self, now: float) -> bool:
        """The next message was delivered. True: an acknowledgement is due at once."""
        self.expected += 1
        self.owed += 1
        self.counters.received += 1
        if self.owed == 1:
            self.ack_due = now + self._config.ack_s
        return self.owed >= self._config.ack_messages

    def out_of_turn(self, number: int, frames: list[Frame], now: float) -> None:
        """A message that is not the next one: keep it if it is early and there is room for it."""
        # the sender lacks an acknowledgement, or we lack a message: acknowledge in both cases
        self.owed += 1
        self.ack_due = min(self.ack_due, now + self._config.ack_s)
        if number < self.expected or number in self._held:
            self.counters.duplicates += 1
            return
        nbytes = sum(map(len, frames))
        config = self._config
        fits = self._held_nbytes + nbytes <= config.window_nbytes + ENVELOPE_NBYTES * config.window_messages
        if number >= self.expected + config.window_messages or not fits:
            self.counters.dropped += 1
            return
        self._held[number] = frames
        self._held_nbytes += nbytes
        self.counters.held += 1

    def next_held(self) -> list[Frame] | None:
        """The next message, if it came before its turn."""
        if not self._held:
            return None
        frames = self._held.pop(self.expected, None)
        if frames is not None:
            self._held_nbytes -= sum(map(len, frames))
        return frames
