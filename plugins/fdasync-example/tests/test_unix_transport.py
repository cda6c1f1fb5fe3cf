"""The whole proof of a transport: the conformance suite, on both loops."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from fdasync_example import UnixTransport
from fdasync_fleet.testing import TransportTests

if TYPE_CHECKING:
    from fdasync_fleet.transfer.base import Transport


@pytest.mark.ci
class TestUnix(TransportTests):
    factory = "fdasync_example:UnixTransport"

    def make(self) -> Transport:
        return UnixTransport()

    def silence(self, transport: Transport) -> bool:
        # who connects gets into the kernel's queue, and that is all
        assert isinstance(transport, UnixTransport)
        assert transport._listener is not None
        asyncio.get_running_loop().remove_reader(transport._listener)
        return True


@pytest.mark.nightly
class TestUnixOnTheStdlibLoop(TestUnix):
    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop()
