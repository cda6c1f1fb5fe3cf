"""The transport keeps the contract of transports: with real engines, in a network that has only loopback."""

from __future__ import annotations

import pytest
from fdasync_fleet.testing import TransportTests
from fdasync_mooncake.transfer.staging import Slots
from fdasync_mooncake.transfer.transport import MooncakeTransport

pytestmark = pytest.mark.usefixtures("network")


# an engine for each side and test
@pytest.mark.nightly
class TestMooncake(TransportTests):
    factory = "fdasync_mooncake.transfer.transport:MooncakeTransport"

    def make(self):
        return MooncakeTransport()

    def silence(self, transport):
        assert transport._server is not None
        # it greets, and has no slot for anybody
        transport._server.slots = Slots(range(0))
        return True
