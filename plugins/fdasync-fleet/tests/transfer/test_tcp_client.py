"""A sender that is not where it says: the receiver's error tells what both of them see."""

from __future__ import annotations

import contextlib
import socket

import msgspec
import pytest
from fdasync_fleet.testing.transports.harness import TransportHooks
from fdasync_fleet.transfer.tcp import TcpTransport


class Hooks(TransportHooks):
    def make(self):
        return TcpTransport(stuck_s=0.3, idle_s=30.0)


def closed_port() -> socket.socket:
    """Bound, and nobody listens."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


def full_port() -> socket.socket:
    """The kernel takes connections, and nobody answers: as behind a firewall that drops what comes."""
    sock = closed_port()
    sock.listen(1)
    return sock


@pytest.mark.parametrize(("make", "problem"), [(closed_port, "Connection refused"), (full_port, "no answer for 0.3 s")])
async def test_an_address_that_is_not_reached_is_told_with_both_views(make, problem):
    async with Hooks().sides() as (sender, receiver):
        copy_spec = receiver.wanted(sender, "a", 100)
        with contextlib.closing(make()) as sock:
            host, port = sock.getsockname()
            source = msgspec.structs.replace(sender.source, address=f"{host}:{port}")
            (outcome,) = await receiver.start(source, [copy_spec], 300.0)
        assert (outcome.status, outcome.transient) == ("failed", True)
        words = (
            f"the sender says that its blocks are at {host}:{port}, and from 127.0.0.1 they cannot be reached there: "
        )
        assert outcome.problem.startswith(words + problem), outcome.problem
        assert "--listen" in outcome.problem


async def test_another_process_at_that_address_is_told_with_both_views():
    """As behind a translated address: somebody answers there, and does not know the token."""
    async with Hooks().sides() as (sender, receiver), Hooks().sides() as (other, _):
        copy_spec = receiver.wanted(sender, "a", 100)
        source = msgspec.structs.replace(sender.source, address=other.source.address)
        (outcome,) = await receiver.start(source, [copy_spec], 300.0)
        assert outcome.status == "failed"
        assert f"blocks are at {other.source.address}, and from 127.0.0.1" in outcome.problem
