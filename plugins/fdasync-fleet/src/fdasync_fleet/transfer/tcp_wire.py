"""The protocol of `tcp.py`: a greeting, requests of one size, and replies of one size followed by bytes.

    receiver: knock    = magic (8), nonce (16), MAC of both (32)
    sender:   answer   = nonce (16), with TLS: digest of its certificate (32); MAC of both nonces and the digest (32)
    both:     with TLS: its handshake, and all that follows within it
    receiver: proof    = another MAC of both nonces (32)
    receiver: request  = number (8), part: region (4), offset (8), nbytes (8); run in it: start (8), length (4)
    sender:   reply    = number (8), verdict (4), length (4); then so many bytes of the run

A MAC is HMAC-SHA256 under the sender's token, a secret that its Hello hands over by the link; the token itself never
goes over this socket. A process without it hears nothing from a sender. A knock that was recorded gets an answer, whose
nonce is new, so that a recorded proof does not fit; and a process that took the sender's port cannot answer. With TLS
(`tcp_tls.py`, another magic) a process between both has no certificate with that digest. The sender's address says
whether it speaks TLS (`tls:` before it), and it speaks nothing else.

All numbers are little-endian. Replies come in the order of the requests. A reply with verdict OK has the requested
length, any other the length 0. A run is at most MAX_RUN_NBYTES, so that many receives share a connection fairly. Any
other bytes are a ProtocolError, which ends the connection. Pure; knows no sockets. Called by both sides.
"""

from __future__ import annotations

import hmac
import ipaddress
import struct
from typing import TYPE_CHECKING, NamedTuple

from fdasync.errors import ProtocolError
from fdasync.ipc.shared_memory import Part

if TYPE_CHECKING:
    from collections.abc import Iterable

MAGIC, TLS_MAGIC = b"fdblk\0\0\2", b"fdblk\0\0\3"
NONCE_NBYTES, _MAC_NBYTES = 16, 32
KNOCK_NBYTES = len(MAGIC) + NONCE_NBYTES + _MAC_NBYTES
ANSWER_NBYTES = NONCE_NBYTES + _MAC_NBYTES
PROOF_NBYTES = _MAC_NBYTES
#: most bytes of one reply
MAX_RUN_NBYTES = 1 << 20
#: most requests of a connection without a whole reply; the sender reads no more
MAX_REQUESTS = 32

_REQUEST = struct.Struct("<QIQQQI")
_REPLY = struct.Struct("<QII")
REQUEST_NBYTES = _REQUEST.size
REPLY_NBYTES = _REPLY.size

OK, NOT_OFFERED = 0, 1
# begins the address of a sender that speaks TLS
_TLS = "tls:"


class Request(NamedTuple):
    """A request for `length` bytes from `start` of a part."""

    number: int
    part: Part
    start: int
    length: int


def _mac(token: bytes, step: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token, step + b"".join(parts), "sha256")


def knock(token: bytes, nonce: bytes, *, tls: bool = False) -> bytes:
    magic = TLS_MAGIC if tls else MAGIC
    return magic + nonce + _mac(token, b"knock", magic, nonce)


def check_knock(data: bytes, token: bytes, *, tls: bool = False) -> bytes:
    """The receiver's nonce. Raises ProtocolError unless the bytes are a knock for this token, with or without TLS."""
    if data[: len(MAGIC)] != (TLS_MAGIC if tls else MAGIC):
        raise ProtocolError("the process that dialled does not speak this protocol")
    nonce = data[len(MAGIC) : len(MAGIC) + NONCE_NBYTES]
    if not hmac.compare_digest(data, knock(token, nonce, tls=tls)):
        raise ProtocolError("the process that dialled means another sender")
    return nonce


def answer(token: bytes, theirs: bytes, nonce: bytes, digest: bytes = b"") -> bytes:
    """The sender's answer to a knock with the nonce `theirs`. `digest`: of its certificate; b"": without TLS."""
    return nonce + digest + _mac(token, b"answer", theirs, nonce, digest)


def check_answer(data: bytes, token: bytes, ours: bytes) -> tuple[bytes, bytes]:
    """The sender's nonce, and the digest of its certificate (b"" in an answer without). Raises ProtocolError unless the
    bytes answer our knock."""
    nonce, digest = data[:NONCE_NBYTES], data[NONCE_NBYTES:-_MAC_NBYTES]
    if not hmac.compare_digest(data, answer(token, ours, nonce, digest)):
        raise ProtocolError("another process than the sender answered")
    return nonce, digest


def proof(token: bytes, receivers: bytes, senders: bytes) -> bytes:
    """The receiver's proof, from the nonces of both."""
    return _mac(token, b"proof", receivers, senders)


def pack_request(request: Request) -> bytes:
    number, part, start, length = request
    return _REQUEST.pack(number, part.region, part.offset, part.nbytes, start, length)


def read_requests(data: bytearray, limit: int) -> Iterable[Request]:
    """Take up to `limit` whole requests off the front. Raises ProtocolError for a malformed one."""
    count = min(len(data) // REQUEST_NBYTES, limit)
    found = []
    for number, region, offset, nbytes, start, length in _REQUEST.iter_unpack(bytes(data[: count * REQUEST_NBYTES])):
        if not 1 <= length <= MAX_RUN_NBYTES or start + length > nbytes:
            raise ProtocolError(f"a request for {length} bytes from {start} of a part of {nbytes}")
        found.append(Request(number, Part(region, offset, nbytes), start, length))
    del data[: count * REQUEST_NBYTES]
    return found


def pack_reply(number: int, verdict: int, length: int) -> bytes:
    return _REPLY.pack(number, verdict, length)


def read_reply(data: bytes | bytearray | memoryview, number: int, length: int) -> bool:
    """Whether the bytes of a request follow its reply. Raises ProtocolError for a reply that does not fit."""
    found, verdict, follows = _REPLY.unpack(data)
    if found != number or (verdict, follows) not in ((OK, length), (NOT_OFFERED, 0)):
        raise ProtocolError(
            f"request {number} for {length} bytes was answered by {found}, verdict {verdict}, {follows} bytes"
        )
    return bool(verdict == OK)


def is_tls(address: str) -> bool:
    """Whether the sender at this address speaks TLS."""
    return address.startswith(_TLS)


def socket_name(host: str, port: int) -> str:
    """host:port, with brackets around a host of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str, *, keyed: bool = False) -> tuple[str, int]:
    """Host and port, with TLS or without. Raises ProtocolError for a malformed address, and, unless `keyed`, if it is
    not loopback."""
    host, _, port = address.removeprefix(_TLS).rpartition(":")
    try:
        if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16):
            raise ValueError
        found = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise ProtocolError(f"{address!r:.100} is no address: host:port, with a number of a host") from None
    if not keyed and not found.is_loopback:
        raise ProtocolError(f"{address!r:.100} is not loopback: without keys, links end at this machine")
    if found.is_unspecified or found.is_multicast:
        raise ProtocolError(f"{address!r:.100} is the address of no machine")
    return str(found), int(port)
