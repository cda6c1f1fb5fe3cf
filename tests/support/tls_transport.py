"""A transport that encrypts, for processes that the conformance suite starts."""

from fdasync_fleet.transfer.tcp import TcpTransport


def make() -> TcpTransport:
    """As `TcpTransport`."""
    return TcpTransport(tls=True)
