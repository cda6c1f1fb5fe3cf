"""The conformance suite for transports: what `transfer/base.py` promises, as tests.

Adopt it with a class of a few lines in a test module of your own:

    class TestMyTransport(TransportTests):
        factory = "my_package.my_module:MyTransport"

        def make(self):
            return MyTransport()

Every test opens two transports or more, with regions of their own, on a loop of its own, bounded. Tests named
"process" start a sender in another process with `factory`, and kill or stop it. No test needs an async plugin or
settings. What a transport cannot do is skipped with the reason. `transports/harness.py` lists the hooks and has the
tools, for further tests of your own:

        @on_loop
        async def test_of_mine(self):
            async with self.sides() as (sender, receiver):
                copy_spec = receiver.wanted(sender, "a tag", 1000)
                assert await receiver.take(sender.source, [copy_spec]) == ["done"]
                assert receiver.has(copy_spec, "a tag")
"""

from __future__ import annotations

from fdasync.testing.harness.bounded import on_loop
from fdasync_fleet.testing.transports.lifetimes import EndTests
from fdasync_fleet.testing.transports.processes import ProcessTests
from fdasync_fleet.testing.transports.values import ValueTests

__all__ = ["TransportTests", "on_loop"]


class TransportTests(ValueTests, EndTests, ProcessTests):
    """Subclass it, name the subclass Test..., define `make`; the other hooks are in `TransportHooks`."""
