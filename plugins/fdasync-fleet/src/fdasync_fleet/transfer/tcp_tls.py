"""TLS 1.3 for the connections of `tcp.py`, where an instance asks for it.

A sender draws a certificate, which no authority signs. The sender's answer to a knock contains the certificate's digest
under the secret that the link handed over (`tcp_wire.py`); the receiver compares that digest with the certificate that
the handshake shows. A process between sender and receiver does not have the secret, so its own certificate is refused.
The module knows no protocol behind the handshake. Called by `tcp_server.py` and `tcp_client.py`.
"""

from __future__ import annotations

import datetime
import mmap
import os
import ssl
from hashlib import sha256
from typing import TYPE_CHECKING

from fdasync.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    import socket

#: a socket, or TLS above it, has nothing to read or no room to write now
AGAIN = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
#: bytes of a certificate's digest
DIGEST_NBYTES = 32
# a certificate must have dates; receivers compare its digest and pass over them
_VALID = datetime.timedelta(days=365 * 20)


class ServerTls:
    """The sender's side: a certificate of its own.

    Attributes:
        digest: of the certificate, SHA-256.
    """

    def __init__(self) -> None:
        """Raises ConfigError without the package `cryptography`."""
        certificate, key = _drawn()
        self.digest = sha256(ssl.PEM_cert_to_DER_cert(certificate.decode())).digest()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        # each connection is dialled once: nothing is ever resumed
        self._context.num_tickets = 0
        # the key is in memory alone: the library reads it by a name
        fd = os.memfd_create("fdasync-tls", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, len(certificate + key))
            with mmap.mmap(fd, 0) as memory:
                memory[:] = certificate + key
            self._context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)

    def wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        """TLS above a connection; `sock` is used up. Raises OSError."""
        return self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


def dial_tls(sock: socket.socket) -> ssl.SSLSocket:
    """TLS above a connection to a sender; `sock` is used up. Raises OSError. `check_certificate` follows the
    handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # the digest is what is checked
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(sock, do_handshake_on_connect=False)


def shake(sock: ssl.SSLSocket) -> bool:
    """Go on with a handshake on a new connection, whose buffer has room for all that this side says: whether it has
    ended. Raises OSError where it fails."""
    try:
        sock.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def check_certificate(sock: ssl.SSLSocket, digest: bytes) -> None:
    """Raise ProtocolError unless the other side has the certificate that was announced."""
    found = sock.getpeercert(binary_form=True)
    if found is None or sha256(found).digest() != digest:
        raise ProtocolError("another process than the sender shows a certificate")


def _drawn() -> tuple[bytes, bytes]:
    """A certificate that signs itself, and its key, in PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ModuleNotFoundError as error:
        raise ConfigError(
            "encrypt_blocks",
            f"needs the package {error.name}",
            hint="pip install 'cryptography>=45.0.1', or leave it out",
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fdasync")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - _VALID).not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return made.public_bytes(serialization.Encoding.PEM), pem
