"""Every transport that ships keeps the contract."""

from __future__ import annotations

import asyncio
import random

import pytest
from fdasync_fleet.testing import TransportTests
from fdasync_fleet.testing.sim.transport import SimFabric, SimTransport
from fdasync_fleet.transfer.shm import ShmTransport
from fdasync_fleet.transfer.tcp import TcpTransport

from fdasync.testing import SimLoop
from tests.support.device_transport import RegionTransport


@pytest.mark.heavy("a process that is killed is a process")
class TestShm(TransportTests):
    keeps_offers = False
    factory = "fdasync_fleet.transfer.shm:ShmTransport"

    def make(self):
        return ShmTransport()


@pytest.mark.nightly
class TestShmOnTheStdlibLoop(TestShm):
    def new_loop(self):
        return asyncio.SelectorEventLoop()


@pytest.mark.heavy("a process that is killed is a process")
class TestTcp(TransportTests):
    factory = "fdasync_fleet.transfer.tcp:TcpTransport"

    def make(self):
        return TcpTransport()

    def silence(self, transport):
        # who dials gets into the kernel's queue, and that is all
        asyncio.get_running_loop().remove_reader(transport._server._sock.fileno())
        return True


@pytest.mark.nightly
class TestTcpOnTheStdlibLoop(TestTcp):
    def new_loop(self):
        return asyncio.SelectorEventLoop()


@pytest.mark.ci
class TestDevice(TransportTests):
    keeps_offers = False
    factory = "tests.support.device_transport:RegionTransport"

    def make(self):
        return RegionTransport()

    def silence(self, transport):
        # who dials gets into the kernel's queue, and that is all
        transport._door.pause()
        return True


@pytest.mark.nightly
class TestDeviceOnTheStdlibLoop(TestDevice):
    def new_loop(self):
        return asyncio.SelectorEventLoop()


@pytest.mark.heavy("the suite of transports against the one in virtual time")
class TestSim(TransportTests):
    @pytest.fixture(autouse=True)
    def fabric(self):
        self.room = SimFabric(random.Random(7))

    def make(self):
        return SimTransport(self.room)

    def silence(self, transport):
        self.room.freeze(transport)
        return True

    def new_loop(self):
        return SimLoop()


@pytest.mark.ci
class TestTcpByTls(TestTcp):
    factory = "tests.support.tls_transport:make"

    def make(self):
        return TcpTransport(tls=True)
